"""Losses that are not finite: said at once, and the run ends, leaves the step out, or goes on, on
all workers alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import (
    INPUT,
    SCHEDULE,
    SIZE,
    TARGET,
    Ears,
    built,
    in_a_world,
    mse,
)
from test_loop import job as job_of_loop
from test_loop import trained as trained_of_loop
from test_same_bits import Centred
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from elastic_trainer import LossNotFinite
from elastic_trainer.config import ConfigError
from elastic_trainer.views.verify import verify

pytestmark = pytest.mark.usefixtures("no_launcher")
# In micro-batch 2 of step 1, and once more in the second epoch.
BAD = int(SCHEDULE.microbatch_samples(1, 2)[0])
BAD_STEPS = [
    step for step in range(SCHEDULE.steps) for microbatch in range(4)
    if BAD in SCHEDULE.microbatch_samples(step, microbatch)
]
SPOILED = INPUT.clone()
SPOILED[BAD, 0] = float("nan")
DATA = TensorDataset(SPOILED, TARGET)
MICROBATCH = SCHEDULE.microbatch_samples(1, 2).tolist()


def model() -> torch.nn.Sequential:
    # No dropout: the threads of a simulated world share their random numbers.
    return built(Centred(False))


def job(model: torch.nn.Module, **changes: Any) -> Any:
    return job_of_loop(model, rules=rules(model), **changes)


def trained(model: torch.nn.Module, *others: Any, **changes: Any) -> Any:
    return trained_of_loop(model, *others, buffers=rules(model), **changes)


def rules(model: torch.nn.Module) -> dict[str, Any]:
    return {"*": "mean"} if list(model.buffers()) else {}


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("reduce", ["exact", "ring"])
def test_the_run_ends_before_the_step_is_applied_when_its_loss_is_nan(reduce: str) -> None:
    """With step, micro-batch and samples in the error and in an event; weights and buffers are the
    last finished step's."""
    spoiled, reference, ears = model(), model(), Ears()
    named = (r"the loss of step 1 is nan.* micro-batch 2 "
             rf"\(samples {MICROBATCH[0]}, {MICROBATCH[1]}\).*skip")
    with pytest.raises(LossNotFinite, match=named):
        trained(spoiled, dataset=DATA, reduce=reduce, listeners=[ears])
    trained(reference, dataset=DATA, reduce=reduce, until="1 step")
    assert all(torch.equal(a, b) for a, b in
               zip(spoiled.state_dict().values(), reference.state_dict().values(), strict=True))
    (said,) = ears.facts("worker.loss_not_finite")
    assert (said["step"], said["microbatches"], said["samples"],
            said["on_nan"]) == (1, [2], [MICROBATCH], "raise")
    assert [facts["step"] for facts in ears.facts("worker.step_committed")] == [0]


@pytest.mark.parametrize("size", [2, 3, 6])
def test_all_workers_name_the_samples_when_one_of_them_has_run_the_microbatch(size: int) -> None:
    """And none of them has applied the step."""
    models, reference = [model() for _ in range(size)], model()
    results = in_a_world(size, lambda rank: job(models[rank], dataset=DATA))
    assert all(isinstance(one, LossNotFinite)
               and f"micro-batch 2 (samples {MICROBATCH[0]}" in str(one) for one in results)
    trained(reference, dataset=DATA, until="1 step")
    assert all(torch.equal(p, q) for one in models
               for p, q in zip(one.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("kind", [float("inf"), float("-inf")])
def test_an_infinite_loss_is_not_finite_either(kind: float) -> None:
    """Of either sign."""
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return mse(model, batch) + (kind if any(torch.equal(x, INPUT[BAD])
                                                for x in batch[0]) else 0.0)

    with pytest.raises(LossNotFinite, match=f"step 1 is {kind}.*micro-batch 2"):
        trained(built(), loss=loss)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_step_is_left_out_on_all_workers_when_it_is_to_be_skipped(size: int) -> None:
    """It is finished and counts its samples; weights, momentum and buffers are as if it had not
    been. The rates follow the number of the step."""
    def skipping(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, StepLR]:
        optimizer = momentum(model)
        return optimizer, StepLR(optimizer, 2, gamma=0.5)

    reference, taken = model(), []
    optimizer, scheduler = skipping(reference)

    def make(rank: int) -> Any:
        one = model()
        optimizer, scheduler = skipping(one)
        return job(one, dataset=DATA, optimizer=optimizer, scheduler=scheduler, on_nan="skip")

    def put_back(step: int) -> None:  # by hand: a step of the whole data, whose changes are undone
        if step in BAD_STEPS:
            whole = taken[-1]
            reference.load_state_dict(whole[0])
            for parameter, kept in zip(reference.parameters(), whole[1], strict=True):
                if kept is None:
                    optimizer.state.pop(parameter, None)
                else:
                    optimizer.state[parameter]["momentum_buffer"].copy_(kept)
        taken.append(
            ({k: v.clone()
              for k, v in reference.state_dict().items()}, [
                  optimizer.state[p]["momentum_buffer"].clone() if p in optimizer.state else None
                  for p in reference.parameters()
              ]))

    put_back(-1)
    trained(reference, optimizer, lr=scheduler, after_step=put_back)
    for result in in_a_world(size, make):
        assert (result.steps, result.samples) == (SCHEDULE.steps, 2 * SIZE)
        for name, tensor in result.model.state_dict().items():
            assert torch.equal(tensor, reference.state_dict()[name]), name


def test_a_run_with_a_skipped_step_is_proved_and_resumes(run_dir: Path) -> None:
    """Its line says that it was left out; its samples were seen."""
    ears = Ears()
    trained(model(), dataset=DATA, on_nan="skip", until="2 steps", listeners=[ears])
    resumed = trained(model(), dataset=DATA, on_nan="skip", listeners=[ears])
    assert [facts["step"] for facts in ears.facts("worker.step_committed")
            if facts.get("skipped") and not facts.get("repeated")] == BAD_STEPS
    assert [facts["step"] for facts in ears.facts("worker.loss_not_finite")] == BAD_STEPS
    assert verify(run_dir).violations == ()
    straight = trained(model(), dataset=DATA, on_nan="skip", run_dir=run_dir.with_name("other"))
    assert resumed.weights_sha256 == straight.weights_sha256


def test_the_run_goes_on_when_it_is_to_continue() -> None:
    """As plain PyTorch does; one event tells of the first such step, not one of each."""
    ears = Ears()
    result = trained(model(), dataset=DATA, on_nan="continue", listeners=[ears])
    assert result.steps == SCHEDULE.steps and math.isnan(result.loss)
    assert [facts["step"] for facts in ears.facts("worker.loss_not_finite")] == [1]


def test_a_policy_that_is_none_is_refused() -> None:
    """With those that are."""
    with pytest.raises(ConfigError, match="on_nan is 'ignore'.*\"skip\" or \"continue\""):
        trained(built(), on_nan="ignore")

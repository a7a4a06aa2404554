"""Learning rates: torch's schedulers, rates that are tensors, and who may set them. That the
weights are plain PyTorch's: test_same_bits.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import (
    INPUT,
    TARGET,
    Ears,
    assert_close,
    built,
    in_a_world,
    job,
    mse,
    trained,
)
from test_same_bits import SCHEDULERS as KINDS
from test_same_bits import momentum, tensor_adam
from torch.optim import lr_scheduler as schedulers

from elastic_trainer.config import ConfigError
from elastic_trainer.state.layout import LayoutError
from elastic_trainer.state.optimizer_values import RateChanged

pytestmark = pytest.mark.usefixtures("no_launcher")
Optimizer = torch.optim.Optimizer


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"ReduceLROnPlateau"}))
def test_the_rate_that_is_logged_is_the_one_that_was_used(kind: str) -> None:
    """That of the scheduler, which is stepped once for each finished step."""
    ears, optimizer, rates = Ears(), momentum(built()), list[float]()
    ours(KINDS[kind], momentum, listeners=[ears])
    scheduler = KINDS[kind](optimizer)
    for _ in range(12):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    assert [facts["lr"] for facts in ears.facts("worker.step_committed")] == rates


def ours(make: Any, build: Callable[[torch.nn.Module], Optimizer], **changes: Any) -> None:
    optimizer = build(model := built())
    trained(model, optimizer, **({"microbatches": 1, "until": "4 epochs",
                                  "lr": make and make(optimizer)} | changes))


# --- who may set a rate ------------------------------------------------------------


def test_a_scheduler_that_is_not_handed_over_is_refused_at_the_start() -> None:
    """train() would overwrite its rates."""
    model = built()
    optimizer = momentum(model)
    KINDS["StepLR"](optimizer)
    with pytest.raises(ConfigError, match="lr=scheduler"):
        trained(model, optimizer)


def test_the_run_ends_when_a_scheduler_without_a_mark_is_stepped_behind_our_back() -> None:
    """ReduceLROnPlateau leaves no mark on the optimizer until it changes a rate."""
    model, ears = built(), Ears()
    optimizer = momentum(model)
    scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=1)
    with pytest.raises(
        RateChanged,
        match=r"at step 3 the learning rate of .* group 0 is 0\.01.*set it to 0\.1\. .*"
        r"with train\(\): schedule",
    ):
        trained(model, optimizer, after_step=lambda step: scheduler.step(1.0), listeners=[ears])
    assert [facts["lr"] for facts in ears.facts("worker.step_committed")] == [0.1] * 3


@pytest.mark.parametrize("where", ["after_step", "loss"])
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_the_run_ends_when_the_users_code_sets_a_rate(where: str, rate: Any) -> None:
    """At the first step that would use it, and no worker applies that step."""
    model = built()
    optimizer = torch.optim.Adam(model.parameters(), lr=copy.deepcopy(rate))
    finished: list[int] = []

    def halve(*arguments: Any) -> Any:
        if where == "after_step" or finished:
            optimizer.param_groups[0]["lr"] *= 0.5
        return mse(*arguments)

    users = {
        "after_step": {"after_step": lambda step: halve(model, (INPUT, TARGET))},
        "loss": {"loss": halve, "after_step": finished.append},
    }
    with pytest.raises(RateChanged, match="group 0 is 0.0"):
        trained(model, optimizer, **users[where])
    reference = built()
    trained(reference, torch.optim.Adam(reference.parameters(), lr=0.1), until="1 step")
    assert_close(model, reference)


def test_all_stop_when_one_workers_loss_sets_a_rate() -> None:
    """There by its own error, elsewhere by its text."""

    def make(rank: int) -> Any:
        model = built()
        optimizer = momentum(model)

        def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            if rank == 1:
                optimizer.param_groups[1]["lr"] = 7.0
            return mse(model, batch)

        return job(model, optimizer=optimizer, loss=loss)

    with pytest.raises(RateChanged, match="group 1 is 7.0"):
        in_a_world(2, make)


def test_the_run_ends_when_the_scheduler_that_was_handed_over_is_stepped_again() -> None:
    """Also where the rate stays the same for many steps."""
    model = built()
    optimizer = momentum(model)
    scheduler = schedulers.StepLR(optimizer, 100)
    with pytest.raises(
        RateChanged,
        match="at step 1 the StepLR has been stepped by something other than the trainer",
    ):
        trained(model, optimizer, lr=scheduler, after_step=lambda step: scheduler.step())


def test_a_scheduler_that_does_not_work_here_is_refused_at_the_start() -> None:
    """Another optimizer's, one that ends too early, one for another number, one that holds no
    value."""

    class Held(schedulers.LambdaLR):
        def __init__(self, optimizer: Optimizer):
            self.rule = lambda step: 1.0
            super().__init__(optimizer, self.rule)

    model = built()
    for make, named in [
        (lambda o: schedulers.StepLR(momentum(built()), 3), "StepLR belongs to another optimizer"),
        (
            lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=5),
            "total_steps 5, but the run has 6 steps",
        ),
        (lambda o: schedulers.ReduceLROnPlateau(o, mode="max"), "mode 'max'"),
        (Held, "scheduler/state/rule holds a function"),
        (lambda o: 0.1, "lr is 0.1"),
    ]:
        optimizer = momentum(model)
        with pytest.raises(ConfigError, match=named):
            trained(model, optimizer, lr=make(optimizer))


@pytest.mark.parametrize("kinds", [("StepLR", "CyclicLR"), ("StepLR", None), (None, "StepLR")])
def test_another_kind_of_schedule_is_refused_when_a_run_is_resumed(
        kinds: tuple[str | None, str | None], run_dir: Path) -> None:
    """The other scheduler cannot use its state."""
    first, second = (kind and KINDS[kind] for kind in kinds)
    ours(first, momentum, until="2 steps")
    with pytest.raises(LayoutError, match="the schedule of the learning rates is"):
        ours(second, momentum)


# --- rates that are tensors --------------------------------------------------------


def test_a_tensor_rate_follows_a_function_of_the_step_in_place() -> None:
    """As torch's own schedulers set it."""
    model = built()
    optimizer = tensor_adam(model)
    rate, reference = optimizer.param_groups[0]["lr"], built()
    trained(model, optimizer, lr=lambda step: 1.0 / (step + 1))
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(0.01 / 6)
    trained(
        reference,
        torch.optim.Adam(reference.parameters(), lr=0.01),
        lr=lambda step: 1.0 / (step + 1),
    )
    assert_close(model, reference)


def test_a_tensor_where_the_run_had_a_number_is_refused_when_it_is_resumed(run_dir: Path) -> None:
    """Their arithmetic differs."""
    ours(None, lambda model: tensor_adam(model, lr=0.01), until="2 steps")
    with pytest.raises(LayoutError, match="lr of the optimizer's group 0 is 0.01 there"):
        ours(None, tensor_adam)

"""Learning rates: functions of the step, torch's schedulers, rates that are tensors, and who may
set them. That the weights are plain PyTorch's: test_same_bits.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from test_loop import (
    INPUT,
    NUMBERS,
    TARGET,
    Ears,
    assert_close,
    built,
    in_a_world,
    job,
    mse,
    sgd,
    trained,
)
from test_same_bits import SCHEDULERS as KINDS
from test_same_bits import momentum, tensor_adam
from torch.optim import lr_scheduler as schedulers

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule.learning_rate import (
    cosine,
    inverse_root,
    linear_decay,
    linear_scaling,
    step_decay,
)
from elastic_trainer.state.rates import RateChanged, Rates
from elastic_trainer.state.values.layout import LayoutError
from elastic_trainer.training.job.optimizers import decay_groups

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


def test_the_run_ends_when_a_scheduler_without_a_mark_is_stepped_without_the_trainer() -> None:
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

    users = {"after_step": {"after_step": lambda step: halve(model, (INPUT, TARGET))},
             "loss": {"loss": halve, "after_step": finished.append}}
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
            match="at step 1 the StepLR has been stepped by something other than the trainer"):
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
    trained(reference, torch.optim.Adam(reference.parameters(), lr=0.01),
            lr=lambda step: 1.0 / (step + 1))
    assert_close(model, reference)


def test_a_tensor_where_the_run_had_a_number_is_refused_when_it_is_resumed(run_dir: Path) -> None:
    """Their arithmetic differs."""
    ours(None, lambda model: tensor_adam(model, lr=0.01), until="2 steps")
    with pytest.raises(LayoutError, match="lr of the optimizer's group 0 is 0.01 there"):
        ours(None, tensor_adam)


def test_a_factor_that_is_a_tensor_is_a_number(run_dir: Path) -> None:
    """Else the rate would be a tensor in the checkpoint, and a number in the job that goes on."""
    def half(step: int) -> Any:
        return torch.tensor(0.5)

    for steps in (2, 4):
        model = built()
        trained(model, lr=half, until=f"{steps} steps", run_dir=run_dir)
    reference = built()
    trained(reference, lr=lambda step: 0.5, until="4 steps")
    assert_close(model, reference)


@pytest.mark.parametrize("factor", [None, "1", [1.0]])
def test_a_factor_that_is_no_number_is_an_error(factor: Any) -> None:
    with pytest.raises(TypeError, match=r"lr\(0\) returned .*Return a number"):
        trained(built(), lr=lambda step: factor)


# --- functions of the step ------------------------------------------------------------------------

@pytest.mark.parametrize("curve", [cosine, linear_decay])
@settings(max_examples=50)
@given(warmup=some.integers(0, 50), more=some.integers(1, 200), floor=some.floats(0, 1))
def test_the_rate_rises_then_falls_to_the_floor_when_warmed_up(curve, warmup, more, floor):
    """Up to 1 by equal parts of the warm-up, down to `floor` at total_steps, and there it stays."""
    rate = curve(warmup_steps=warmup, total_steps=warmup + more, floor=floor)
    rising = [rate(step) for step in range(warmup)]
    falling = [rate(step) for step in range(warmup, warmup + more + 3)]
    assert rising == [(step + 1) / warmup for step in range(warmup)]
    assert falling[0] == pytest.approx(1)
    assert falling[more:] == pytest.approx([floor] * 3)
    assert all(a >= b - 1e-12 for a, b in pairwise(falling))


def test_the_rate_is_the_middle_when_half_the_fall_is_over():
    """Half-way both curves are in the middle of 1 and the floor; a quarter in, cosine is still
    higher."""
    of_cosine = cosine(warmup_steps=10, total_steps=110, floor=0.2)
    of_linear = linear_decay(warmup_steps=10, total_steps=110, floor=0.2)
    assert of_cosine(60) == pytest.approx(0.6) and of_linear(60) == pytest.approx(0.6)
    assert of_linear(35) == pytest.approx(0.8)
    assert of_cosine(35) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)


@pytest.mark.parametrize(
    ("key", "numbers"),
    [
        ("warmup_steps", {"warmup_steps": 10, "total_steps": 10}),
        ("warmup_steps", {"warmup_steps": -1, "total_steps": 10}),
        ("total_steps", {"warmup_steps": 0, "total_steps": 0}),
        ("floor", {"warmup_steps": 0, "total_steps": 10, "floor": 1.5}),
        ("floor", {"warmup_steps": 0, "total_steps": 10, "floor": math.nan}),
    ],
)
def test_the_key_is_named_when_a_curve_is_impossible(key, numbers):
    """A curve that cannot be drawn ends at start-up, with the key in the message."""
    with pytest.raises(ConfigError, match=f"^{key} is "):
        cosine(**numbers)


def test_the_rate_falls_by_a_factor_at_each_interval() -> None:
    """As torch's StepLR; the warm-up lies over it."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    ours = step_decay(every_steps=4, factor=0.5)
    for step in range(13):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert [step_decay(every_steps=4, warmup_steps=2)(step) for step in (0, 1, 4)] == [0.5, 1, 0.1]


def test_the_inverse_root_has_its_top_at_the_end_of_the_warm_up() -> None:
    """1 there, and half of it after four times as many steps."""
    rate = inverse_root(warmup_steps=10)
    assert rate(0) == pytest.approx(0.1) and rate(9) == 1 and rate(39) == pytest.approx(0.5)


def test_linear_scaling_rises_from_the_base_rate_to_that_of_the_batch() -> None:
    """Goyal et al., 2017, sections 2.1 and 2.2; another curve multiplies it."""
    rate = linear_scaling(base_batch=256, warmup_steps=4).of_batch(1024)
    assert [rate(step) for step in range(5)] == [1.75, 2.5, 3.25, 4, 4]
    fallen = linear_scaling(base_batch=256, then=step_decay(every_steps=10)).of_batch(1024)
    assert fallen(9) == 4 and fallen(10) == pytest.approx(0.4)


@pytest.mark.parametrize(("make", "key"), [
    (lambda: step_decay(every_steps=0), "every_steps"),
    (lambda: step_decay(every_steps=5, factor=1.5), "factor"),
    (lambda: step_decay(every_steps=5, factor=math.nan), "factor"),
    (lambda: inverse_root(warmup_steps=0), "warmup_steps"),
    (lambda: linear_scaling(base_batch=0), "base_batch"),
    (lambda: linear_scaling(base_batch=8, then=0.1), "then"),  # type: ignore[arg-type]
])
def test_the_key_is_named_when_a_rate_is_impossible(make: Any, key: str) -> None:
    """At start-up."""
    with pytest.raises(ConfigError, match=f"^{key} is "):
        make()


def test_a_run_uses_the_rate_of_its_global_batch() -> None:
    """The event of a step has the rate that was used."""
    ears, optimizer = Ears(), sgd(model := built())
    base = optimizer.param_groups[0]["lr"]
    trained(model, optimizer, lr=linear_scaling(base_batch=2), listeners=[ears], until="1 step")
    used = [facts["lr"] for name, facts in ears.heard if name == "worker.step_committed"]
    assert used == [pytest.approx(base * NUMBERS["global_batch"] / 2)]


def test_biases_and_normalizations_do_not_decay() -> None:
    """Weights of layers and embeddings do; a rule of one's own chooses by name."""
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.LayerNorm(3),
                                torch.nn.Linear(3, 2))
    decaying, others = decay_groups(model, weight_decay=0.1)
    assert decaying["params"] == [model[0].weight, model[2].weight]
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert others["params"] == [model[1].weight, model[1].bias, model[2].bias]
    assert len(decay_groups(model, weight_decay=0.1, rule=lambda name, _: True)) == 1
    with pytest.raises(ConfigError, match="^weight_decay is -1"):
        decay_groups(model, weight_decay=-1)


@pytest.mark.parametrize("is_tensor", (True, False), ids=("tensor", "number"))
def test_a_step_that_is_tried_changes_no_rate(is_tensor: bool) -> None:
    """A sharded step that breaks before the vote is done again. A change of the script's stays
    one."""
    optimizer = (tensor_adam if is_tensor else momentum)(built())
    rates, group = Rates(optimizer), optimizer.param_groups[0]
    before = float(group["lr"])
    with rates.tried(optimizer, 0.5):
        assert float(group["lr"]) == pytest.approx(before / 2)
    assert float(group["lr"]) == before
    rates.check(0)
    group["lr"] *= 2
    with rates.tried(optimizer, 0.5):
        pass
    with pytest.raises(RateChanged):
        rates.check(0)

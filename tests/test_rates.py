"""Learning rates: torch's schedulers, rates that are tensors, and who may set them.

The yardstick is `plainly`: the same steps in plain PyTorch, one worker and one micro-batch, to the
bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import (
    INPUT,
    NUMBERS,
    SIZE,
    TARGET,
    Ears,
    assert_close,
    built,
    in_a_world,
    job,
    mse,
    trained,
)
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.layout import LayoutError, byte_ranges, decode, pack
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.rates import RateChanged

pytestmark = pytest.mark.usefixtures("no_launcher")
Optimizer = torch.optim.Optimizer
ONE_MICROBATCH = Schedule(dataset_size=SIZE,
                          **(NUMBERS | {"microbatches": 1, "epochs": 4}))  # 12 steps


class Warmup:
    """A multiplier that is an object, with values of its own, as LambdaLR keeps it."""

    def __init__(self) -> None:
        self.steps = 4

    def __call__(self, step: int) -> float:
        return min(1.0, step / self.steps)


def sequential(optimizer: Optimizer) -> LRScheduler:
    return schedulers.SequentialLR(
        optimizer,
        [
            schedulers.LinearLR(optimizer, 0.1, total_iters=3),
            schedulers.MultiStepLR(optimizer, [2, 4, 4], gamma=0.5),
            schedulers.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[3, 9],
    )


def chained(optimizer: Optimizer) -> LRScheduler:
    return schedulers.ChainedScheduler(
        [
            schedulers.ConstantLR(optimizer, 0.5, total_iters=4),
            schedulers.ExponentialLR(optimizer, 0.8),
        ]
    )


def plateau(optimizer: Optimizer) -> LRScheduler:
    return schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)


KINDS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 3, gamma=0.3),
    "LambdaLR from 0": lambda optimizer: schedulers.LambdaLR(
        optimizer, lambda step: min(1.0, step / 4)
    ),
    "LambdaLR of an object": lambda optimizer: schedulers.LambdaLR(optimizer, Warmup()),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 5, 5, 9], gamma=0.5),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, T_max=12),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(
        o, T_0=3, T_mult=2
    ),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.3, total_steps=12),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.2, step_size_up=3),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": plateau,
}


def momentum(model: torch.nn.Module) -> Optimizer:
    """Two groups with rates of their own, and a momentum that OneCycleLR and CyclicLR turn."""
    parameters = list(model.parameters())
    return torch.optim.SGD(
        [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}], lr=0.1, momentum=0.9
    )


def plainly(
    make: Callable[[Optimizer], LRScheduler] | None, build: Callable[[torch.nn.Module], Optimizer]
) -> tuple[torch.nn.Module, list[float]]:
    """Train in plain PyTorch; returns the model and each step's rate."""
    model, rates = built(), []
    optimizer = build(model)
    scheduler = make(optimizer) if make else None
    for step in range(ONE_MICROBATCH.steps):
        chosen = torch.from_numpy(ONE_MICROBATCH.microbatch_samples(step, 0))
        optimizer.zero_grad()
        loss = mse(model, [INPUT[chosen], TARGET[chosen]])
        loss.backward()
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(loss.detach())
        elif scheduler:
            scheduler.step()
    return model, rates


def ours(
    make: Callable[[Optimizer], LRScheduler] | None,
    build: Callable[[torch.nn.Module], Optimizer],
    seed: int = 0,
    **changes: Any,
) -> torch.nn.Module:
    model = built(seed=seed)
    optimizer = build(model)
    trained(
        model,
        optimizer,
        **({"microbatches": 1, "until": "4 epochs", "lr": make and make(optimizer)} | changes),
    )
    return model


def assert_equal(model: torch.nn.Module, other: torch.nn.Module) -> None:
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_plain_pytorchs_to_the_bit_when_a_torch_scheduler_sets_the_rates(
    kind: str,
) -> None:
    """It is stepped once for each finished step, and the rate that is logged is the one that was
    used."""
    ears = Ears()
    model = ours(KINDS[kind], momentum, listeners=[ears])
    reference, rates = plainly(KINDS[kind], momentum)
    assert_equal(model, reference)
    assert [facts["lr"] for facts in ears.facts("worker.step_committed")] == rates


@pytest.mark.parametrize("kind", KINDS)
def test_the_scheduler_goes_on_where_it_was_when_the_run_is_resumed(
    kind: str, run_dir: Path
) -> None:
    """It is part of the checkpoint, whatever step it had come to."""
    ours(KINDS[kind], momentum, until="5 steps")
    assert_equal(ours(KINDS[kind], momentum, seed=9), plainly(KINDS[kind], momentum)[0])


def received(state: LiveState) -> Any:
    """Return a state's values as a newcomer gets them."""
    packed = state.packed()
    pieces = list(byte_ranges(packed, 0, packed.payload_bytes))
    return decode(packed.header, torch.cat(pieces))


@pytest.mark.parametrize("kind", KINDS)
def test_a_newcomer_has_the_schedulers_state_when_it_has_received_the_state(kind: str) -> None:
    """And goes on with the same rates."""
    states = []
    for _ in range(2):
        model = built()
        optimizer = momentum(model)
        states.append(LiveState(model, optimizer, scheduler=KINDS[kind](optimizer)))
    giver, taker = states

    def step(state: LiveState) -> list[Any]:
        mse(state.model, [INPUT, TARGET]).backward()
        state.rates.set(1.0)
        state.optimizer.step()
        state.rates.advance(1.0)
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in state.optimizer.param_groups
        ]

    for _ in range(5):
        step(giver)
    taker.load(received(giver))
    assert pack(taker.values()).header == pack(giver.values()).header
    taker.rates.check(5)
    for _ in range(6):
        assert step(taker) == step(giver)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["OneCycleLR", "ReduceLROnPlateau"])
def test_the_weights_are_the_same_when_more_workers_step_a_scheduler(kind: str, size: int) -> None:
    """It hears the loss of the whole batch, which is the same on all."""
    alone = ours(KINDS[kind], momentum, microbatches=4, until="2 epochs")

    def make(rank: int) -> Any:
        model = built()
        optimizer = momentum(model)
        return job(model, optimizer=optimizer, scheduler=KINDS[kind](optimizer))

    for result in in_a_world(size, make):
        assert_equal(result.model, alone)


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


def tensor_adam(model: torch.nn.Module, **changes: Any) -> Optimizer:
    return torch.optim.Adam(model.parameters(), **({"lr": torch.tensor(0.01)} | changes))


TENSORS: dict[str, Callable[[torch.nn.Module], Optimizer]] = {
    "lr": tensor_adam,
    "lr of 64 bits": lambda model: tensor_adam(model, lr=torch.tensor(0.01, dtype=torch.float64)),
    "betas": lambda model: tensor_adam(model, betas=(torch.tensor(0.9), torch.tensor(0.99))),
    "one of two groups": lambda model: torch.optim.Adam(
        [
            {"params": list(model.parameters())[:2], "lr": torch.tensor(0.02)},
            {"params": list(model.parameters())[2:], "lr": 0.01},
        ],
        lr=1.0,
    ),
}


@pytest.mark.parametrize("kind", [None, "OneCycleLR", "LambdaLR from 0"])
@pytest.mark.parametrize("which", TENSORS)
def test_the_weights_are_the_same_to_the_bit_when_a_rate_is_a_tensor(
    which: str, kind: str | None, tmp_path: Path
) -> None:
    """As plain PyTorch's, straight through and resumed: a tensor keeps its type and its place."""
    make = (
        KINDS[kind] if kind and which != "betas" else None
    )  # OneCycleLR replaces the betas, LambdaLR need not be told
    reference, _ = plainly(make, TENSORS[which])
    assert_equal(ours(make, TENSORS[which]), reference)
    ours(make, TENSORS[which], run_dir=tmp_path / "run", until="5 steps")
    kept: list[Optimizer] = []

    def build(model: torch.nn.Module) -> Optimizer:
        kept.append(TENSORS[which](model))
        return kept[0]

    def rates() -> list[int]:
        return [
            id(group[key])
            for group in kept[0].param_groups
            for key in ("lr",)
            if isinstance(group[key], torch.Tensor)
        ]

    found: list[list[int]] = []
    resumed = ours(
        make, build, seed=9, run_dir=tmp_path / "run", after_step=lambda step: found.append(rates())
    )
    assert_equal(resumed, reference)
    assert found and all(one == found[0] for one in found)


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


def test_a_newcomer_has_the_tensor_rate_when_it_has_received_the_state() -> None:
    """Its type, its value, and the tensor that its own optimizer was built with."""
    states = []
    for _ in range(2):
        model = built()
        states.append(LiveState(model, TENSORS["lr of 64 bits"](model)))
    giver, taker = states
    mine = taker.optimizer.param_groups[0]["lr"]
    giver.rates.set(0.5)
    taker.load(received(giver))
    assert (
        taker.optimizer.param_groups[0]["lr"] is mine
        and mine.dtype == torch.float64
        and float(mine) == 0.005
    )
    taker.rates.set(1.0)
    assert float(mine) == 0.01

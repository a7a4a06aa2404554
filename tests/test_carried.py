"""What a loop carries from one batch to the next outside of the state makes the result depend on
the number of workers: the warm-up finds it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain, count, repeat
from typing import Any

import numpy
import pytest
import torch

from elastic_trainer import Trainer
from elastic_trainer.config import ConfigError

Loss = Callable[[torch.nn.Module, Any, int], torch.Tensor]


class Calls(torch.nn.Module):
    """Scales by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Cached(torch.nn.Module):
    """Computes a factor once, the same from every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.factor is None:
            self.factor = torch.arange(1.0, 5.0).cos()
        return x * self.factor


def mse(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return ((model(x) - y) ** 2).mean()


def train(loss: Loss, *modules: torch.nn.Module, microbatches: int = 4,
          samples: int = 64) -> Trainer:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*modules, torch.nn.Linear(4, 8), torch.nn.Dropout(0.1),
                                torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    data = torch.utils.data.TensorDataset(torch.randn(samples, 4), torch.randn(samples, 1))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), data,
                      global_batch=16, microbatches=microbatches, until="2 steps")
    for step in trainer:
        for batch in step:
            step.backward(loss(model, batch, step.number))
    return trainer


def baseline(kept: list[float], model: torch.nn.Module, batch: Any) -> torch.Tensor:
    found = mse(model, batch)
    moved = found * (found.detach() - kept[0])
    kept[0] = 0.9 * kept[0] + 0.1 * found.item()
    return moved


def hidden(kept: list[torch.Tensor], model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    now = mse(model, (x + kept[0], y))
    kept[0] = x.mean(0).detach()
    return now


def bank(kept: list[torch.Tensor], model: torch.nn.Module, batch: Any) -> torch.Tensor:
    kept.append(batch[0].mean())
    return mse(model, batch) + 0.01 * torch.stack(kept).mean() * model(batch[0]).mean()


def gradient_only(kept: Iterator[int], model: torch.nn.Module, batch: Any) -> torch.Tensor:
    found = mse(model, batch)
    return found + next(kept) * (found - found.detach())


CARRYING: dict[str, tuple[Callable[[], Any], Callable[[Any, Any, Any], torch.Tensor]]] = {
    "a counter": (count, lambda kept, model, batch: mse(model, batch) * (1 + next(kept) % 2)),
    "a counter of three": (count, lambda kept, model, batch: (
        mse(model, batch) * (1 + next(kept) % 3))),
    "a baseline": (lambda: [0.0], baseline), "a hidden state": (lambda: [torch.zeros(4)], hidden),
    "a bank": (list, bank), "the gradient only": (lambda: count(1), gradient_only),
    "a generator of torch": (lambda: torch.Generator().manual_seed(3), lambda kept, model, batch: (
        mse(model, batch) * torch.rand((), generator=kept))),
    "a generator of numpy": (lambda: numpy.random.default_rng(3), lambda kept, model, batch: (
        mse(model, batch) * float(kept.random()))),
    "the first is another": (lambda: chain([0.1], repeat(1.0)), lambda kept, model, batch: (
        mse(model, batch) * next(kept))),
}
"""What is kept, and the loss that uses it."""


@pytest.mark.parametrize("what", CARRYING)
def test_a_value_that_a_loop_carries_is_an_error_when_a_batch_is_computed_again(what: str) -> None:
    """It says what a loop may not carry, and where such a value belongs."""
    make, loss = CARRYING[what]
    kept = make()
    with pytest.raises(ConfigError, match="carries a value from one batch to the next") as raised:
        train(lambda model, batch, step: loss(kept, model, batch))
    assert "in state" in str(raised.value) and "number of workers" in str(raised.value)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_value_that_a_module_carries_is_an_error_when_a_batch_is_computed_again(
        microbatches: int) -> None:
    """Also with one micro-batch a step: the other one is of the next step then."""
    with pytest.raises(ConfigError, match="changed the attributes 0.calls"):
        train(lambda model, batch, step: mse(model, batch), Calls(), microbatches=microbatches)


LOG: list[float] = []


def logged(model: torch.nn.Module, batch: Any, step: int) -> torch.Tensor:
    found = mse(model, batch)
    LOG.append(found.item())
    return found


@pytest.mark.parametrize("loss", [
    logged,
    lambda model, batch, step: mse(model, batch) * (
        1 + random.random() + float(numpy.random.rand()) + torch.rand(())),
    lambda model, batch, step: mse(model, batch) * (1 + step % 2),
], ids=["a log", "seeded", "the step"])
def test_what_no_result_depends_on_may_be_carried(loss: Loss) -> None:
    """Counts for a log, the default generators, the number of the step, a cache that every batch
    fills alike; and a run of one batch has no other one."""
    assert train(loss, Cached()).result.steps == 2
    assert train(loss, microbatches=1, samples=16).result.steps == 2


@pytest.mark.parametrize(("share", "is_error"), [(1e-6, False), (0.1, True)])
def test_rounding_is_not_taken_for_a_carried_value_when_the_machine_wavers(
        share: float, is_error: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that add in no fixed order differ in the last bits. A large difference is carried."""
    monkeypatch.setattr("elastic_trainer.training.warm_up.may_waver", lambda device: True)
    noise = torch.Generator().manual_seed(1)

    def loss(model: torch.nn.Module, batch: Any, step: int) -> torch.Tensor:
        return mse(model, batch) * (1 + share * torch.rand((), generator=noise))

    if not is_error:
        assert train(loss).result.steps == 2
        return
    with pytest.raises(ConfigError, match="carries a value"):
        train(loss)


# --- from step to step ----------------------------------------------------------------------------

SCALE = 1.0


def scaled(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return SCALE * mse(model, batch)


class Settings:
    def __init__(self) -> None:
        self.scale, self.kept = 1.0, 1.0

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return self.kept * mse(model, batch)

    def state_dict(self) -> dict[str, float]:
        return {"kept": self.kept}

    def load_state_dict(self, values: dict[str, float]) -> None:
        self.kept = values["kept"]


@pytest.mark.parametrize("registers", [False, True])
def test_a_value_that_the_code_after_a_step_changes_is_reported_once(registers: bool,
                                                                     capsys: Any) -> None:
    """A local name, a global one that a function reads, an attribute, also by a method; not what
    the state has, what is set in each batch, and what a step begins with."""
    global SCALE
    temperature, settings, constant, printed, count = 1.0, Settings(), 2.0, list[float](), 0
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), data, global_batch=16,
                      microbatches=2, until="4 steps", progress=False,
                      state={"settings": settings} if registers else None)
    begins = 0
    for step in trainer:
        begins += 1
        for batch in step:
            count = len(batch)
            loss = temperature * settings.scale * constant * scaled(model, batch)
            step.backward(loss * settings.loss(model, batch) + 0 * begins * len(printed))
        temperature *= 0.9
        SCALE *= 0.9
        settings.scale *= 0.9
        settings.kept *= 0.9
        printed.append(step.loss)
        count += 1
    told = [line for line in capsys.readouterr().err.splitlines() if "the inner loop reads" in line]
    expected = {"temperature", "scaled.SCALE"} | (
        set() if registers else {"settings.scale", "settings.loss.self.kept"})
    assert {line.partition("reads ")[2].partition(",")[0] for line in told} == expected
    assert len(told) == len(expected) and "(1.0, now 0.9)" in told[0]
    SCALE = 1.0


@pytest.mark.parametrize("registers", [False, True])
def test_an_average_beside_the_state_is_reported(registers: bool, capsys: Any) -> None:
    """A resumed run would average from its own first step on."""
    model = torch.nn.Linear(4, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    fixed = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    for step in Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), data, global_batch=16,
                        microbatches=2, until="3 steps", progress=False,
                        state={"average": average} if registers else None):
        for batch in step:
            step.backward(mse(model, batch))
        average.update_parameters(model)
        fixed(data[0][0])
    reported = capsys.readouterr().err.count("has changed the module average,")
    assert reported == (0 if registers else 1)

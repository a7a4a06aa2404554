"""Buffers that a forward pass changes: in every world what a plain PyTorch loop has, or an error
that names them and the choices."""

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
    SCHEDULE,
    SIZE,
    TARGET,
    built,
    in_a_world,
    job,
    mse,
    sgd,
    trained,
)
from test_trainer import Fault, in_a_breaking_world, trainer_of

from elastic_trainer import gather
from elastic_trainer.config import ConfigError
from elastic_trainer.data.seeds import seed_everything
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.layout import byte_view

Model = torch.nn.Module
pytestmark = pytest.mark.usefixtures("no_launcher")


class Queue(Model):
    """Keeps the last keys, as MoCo does: each batch writes its rows behind those of the last."""

    keys: torch.Tensor
    place: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(6, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (int(self.place) + torch.arange(len(x))) % 6
        self.keys[rows] = x.detach()
        self.place += len(x)
        return x + self.keys.mean()


def queued(model: Any) -> dict[str, Any]:
    """The rules of a queue: the rows of the micro-batches come one behind the other."""
    def enqueue(before: torch.Tensor, values: list[torch.Tensor]) -> torch.Tensor:
        start, at, rows = int(model[2].place), 0, before.clone()
        assert torch.equal(model[2].keys, before)
        for value in values:
            new = [row % 6 for row in range(start, start + 6)
                   if not torch.equal(value[row % 6], before[row % 6])]
            for row in new:
                rows[(start + at) % 6] = value[row]
                at += 1
        return rows

    return {"2.keys": gather(enqueue), "2.place": "sum"}


class Codebook(Model):
    """Averages what falls to each code, as VQ-VAE does, by writes that no version counts."""

    sizes: torch.Tensor
    sums: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.ones(4))
        self.register_buffer("sums", torch.eye(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = self.sums / self.sizes[:, None]
        chosen = torch.nn.functional.one_hot(torch.cdist(x.detach(), codes).argmin(1), 4).float()
        self.sizes.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.sums.data.mul_(0.9).add_(chosen.T @ x.detach(), alpha=0.1)
        return x + (chosen @ codes - x).detach()


class Bank(Model):
    """Keeps the last features of each sample, a count of samples, and a running size of the
    loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(SIZE, 8))
        self.register_buffer("samples", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(SIZE, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.detach() * 1e4).sum(1).long().abs() % SIZE
        self.bank[rows] = x.detach()
        self.seen[rows] = True
        self.samples += len(x)
        self.scale = 0.9 * self.scale + 0.1 * x.detach().double().abs().mean()
        return torch.as_tensor(x / self.scale.float())


def spectral() -> Model:
    return torch.nn.utils.spectral_norm(torch.nn.Linear(8, 8))


def parametrized() -> Model:
    return torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(8, 8))


KINDS: dict[str, tuple[Callable[[], Model], Callable[[Any], dict[str, Any]]]] = {
    "a queue": (Queue, queued),
    "a code book": (Codebook, lambda model: {"2.s*": "mean"}),
    "a memory bank": (Bank, lambda model: {"2.bank": "sum", "2.samples": "sum", "2.seen": "sum",
                                           "*.scale": "last"}),
    "spectral_norm": (spectral, lambda model: {}),
    "spectral_norm, parametrized": (parametrized, lambda model: {}),
    "weight_norm": (lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 8)),
                    lambda model: {}),
    "BatchNorm": (lambda: torch.nn.BatchNorm1d(8), lambda model: {"*.num_*": "sum"}),
    "InstanceNorm": (lambda: torch.nn.Sequential(
        torch.nn.Unflatten(1, (2, 4)), torch.nn.InstanceNorm1d(2, track_running_stats=True),
        torch.nn.Flatten()), lambda model: {}),
    "observers": (lambda: torch.ao.quantization.MovingAverageMinMaxObserver(), lambda model: {}),
}


def made(kind: str) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = built(KINDS[kind][0]())
    return model, KINDS[kind][1](model)


def bytes_of(model: Model) -> dict[str, list[int]]:
    return {name: byte_view(value).tolist() for name, value in model.state_dict().items()}


def run(kind: str, model: Any = None, until: int = 6, **more: Any) -> dict[str, list[int]]:
    new, rules = made(kind)
    model, rules = model or new, KINDS[kind][1](model) if model else rules
    trainer = trainer_of(model, buffers=rules, until=f"{until} steps", min_microbatch_samples=2,
                         **more)
    for step in trainer:
        for batch in step:
            step.backward(mse(model, batch))
    return bytes_of(model)


@pytest.mark.parametrize("kind", KINDS)
def test_one_micro_batch_leaves_the_buffers_of_a_plain_loop(kind: str) -> None:
    """Bit for bit, without a rule, and also on a worker that has not run it."""
    (ours, _), (plain, _) = made(kind), made(kind)
    torch.set_num_threads(1)
    trained(ours, microbatches=1)
    optimizer = sgd(plain)
    for step in range(SCHEDULE.steps):
        chosen = torch.cat(
            [torch.from_numpy(SCHEDULE.microbatch_samples(step, microbatch))
             for microbatch in range(4)])
        seed_everything(SCHEDULE.microbatch_seed(step, 0))
        optimizer.zero_grad()
        mse(plain, [INPUT[chosen], TARGET[chosen]]).backward()
        optimizer.step()
    assert bytes_of(ours) == bytes_of(plain)
    schedule = Schedule(dataset_size=SIZE, **(NUMBERS | {"microbatches": 1}))
    for result in in_a_world(2, lambda rank: job(made(kind)[0], schedule=schedule)):
        assert bytes_of(result.model) == bytes_of(plain)


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_with_a_rule_are_the_same_in_every_world(
        kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, on each worker, through generations that break in the micro-batches and behind
    the vote."""
    alone, models = run(kind), [made(kind)[0] for _ in range(size)]
    points = {0: [("step.voted", 1)], 1: [("step.computed", 3), ("step.voted", 4)]}
    for found in in_a_breaking_world(monkeypatch, size, lambda rank: run(
            kind, models[rank], listeners=[Fault(*points.get(rank, []))])):
        assert found == alone


def test_a_step_ends_with_what_the_rule_of_a_buffer_gives() -> None:
    """Against the values that the micro-batches leave one by one, from the step's begin on."""
    kinds = ("a queue", "a memory bank", "spectral_norm")
    for kind in kinds:
        model, rules = made(kind)
        lefts = []
        for microbatch in range(4):
            one = copy.deepcopy(model)
            one(INPUT[torch.from_numpy(SCHEDULE.microbatch_samples(0, microbatch))])
            lefts.append(dict(one.named_buffers()))
        trained(model, until="1 step", buffers=rules)
        now = dict(model.named_buffers())
        if kind == "a queue":
            rows = torch.cat([left["2.keys"][:2] for left in lefts])
            assert int(now["2.place"]) == 8
            assert torch.equal(now["2.keys"], torch.cat([rows[6:], rows[2:6]]))
        elif kind == "a memory bank":
            assert int(now["2.samples"]) == 8 and now["2.scale"].dtype == torch.float64
            assert torch.equal(now["2.scale"], lefts[-1]["2.scale"])
            assert torch.equal(now["2.seen"], sum(left["2.seen"] for left in lefts) > 0)
            for left in lefts:
                alone = left["2.seen"] & (sum(one["2.seen"].int() for one in lefts) == 1)
                assert torch.equal(now["2.bank"][alone], left["2.bank"][alone])
        else:
            assert torch.equal(now["2.weight_u"], lefts[0]["2.weight_u"])


@pytest.mark.parametrize("kind", ["a queue", "a code book", "a memory bank"])
def test_a_buffer_without_a_rule_is_refused_when_forward_changes_it(kind: str) -> None:
    """In the warm-up, with its name and the choices."""
    model, rules = made(kind)
    with pytest.raises(ConfigError) as raised:
        trained(model)
    for word in (*(name for name, _ in model.named_buffers()), '"mean"', '"sum"', '"last"',
                 "gather(fn)", "4 micro-batches", "in after_step"):
        assert word in str(raised.value)


class Later(Model):
    """Changes a buffer in the third step only, in one micro-batch of it, or in BatchNorm's
    class."""

    def __init__(self, norm: Model | None = None) -> None:
        super().__init__()
        self.norm = norm or torch.nn.Identity()
        self.register_buffer("steps", torch.tensor(float("nan")))  # no NaN equals itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.equal(x, HIDDEN[0]):
            self.steps.data.fill_(1.0)
        return torch.as_tensor(self.norm(x))


HIDDEN: list[torch.Tensor] = []


@pytest.mark.parametrize("size", [1, 3])
def test_a_buffer_that_changes_in_a_later_step_is_an_error_there(
        size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On all workers alike, before the step is applied, also if one micro-batch alone changes it,
    by a write that no version counts."""
    late = INPUT[torch.from_numpy(SCHEDULE.microbatch_samples(2, 3))]
    HIDDEN[:] = [late]
    models, steps = [torch.nn.Sequential(Later(), built()) for _ in range(size)], list[int]()

    def work(rank: int) -> str:
        with pytest.raises(RuntimeError) as raised:
            for step in trainer_of(models[rank]):
                for batch in step:
                    step.backward(mse(models[rank], batch))
                steps.append(step.number)
        return str(raised.value)

    (told,) = set(in_a_breaking_world(monkeypatch, size, work))
    assert "changed the buffers 0.steps," in told and "behind the inner loop" in told
    assert max(steps) == 1


class Counting(torch.nn.BatchNorm1d):
    """A BatchNorm that has a buffer of its own."""

    def __init__(self) -> None:
        super().__init__(8)
        self.register_buffer("extra", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.extra += 1
        return super().forward(x)


def wrong(before: torch.Tensor, values: list[torch.Tensor]) -> Any:
    return values


@pytest.mark.parametrize(("model", "rules", "told"), [
    (Counting, {}, "changed the buffers 2.extra,"),
    (Queue, {"2.keys": "max", "2.place": "sum"}, "rule of the buffers '2.keys' is 'max'"),
    (Queue, {"2.keys": "last", "2.place": "sum", "2.gone": "sum"}, "rules for 2.gone"),
    (Queue, {"keys": "last", "*.place": "sum"}, "changed the buffers 2.keys,"),
    (Queue, {"2.keys": gather(wrong), "2.place": "sum"}, "returned a list"),
])
def test_a_rule_that_cannot_be_used_is_refused(model: Callable[[], Model], rules: dict[str, Any],
                                               told: str) -> None:
    """By its name, with the choices."""
    with pytest.raises((ConfigError, TypeError), match=told.replace("(", r"\(")):
        trained(built(model()), buffers=rules)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_buffer_that_changes_behind_backward_is_an_error(replaces: bool) -> None:
    """The step has taken its value there. It was lost in silence."""
    model = built(torch.nn.BatchNorm1d(8))
    with pytest.raises(RuntimeError, match=r"2\.\w+ was changed behind step\.backward\(\)"):
        for step in trainer_of(model, min_microbatch_samples=2):
            for batch in step:
                step.backward(mse(model, batch))
                if replaces:
                    model[2].running_mean = model[2].running_mean + 1
                else:
                    model(batch[0])


@pytest.mark.parametrize("kind", ["a queue", "a memory bank"])
def test_buffers_with_a_rule_go_on_where_they_were_when_a_run_is_resumed(
        kind: str, tmp_path: Path) -> None:
    """They are in the checkpoint, as any buffer."""
    run(kind, until=3, run_dir=tmp_path)
    assert run(kind, run_dir=tmp_path) == run(kind)

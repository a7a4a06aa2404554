"""Buffers that a forward pass changes: in every world what a plain PyTorch loop has, or an error
that names them and the choices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_loop import (
    INPUT,
    SCHEDULE,
    built,
    mse,
    trained,
)
from test_same_bits import BUFFERS, Queue
from test_trainer import in_a_breaking_world, trainer_of
from torch.utils.checkpoint import checkpoint

from elastic_trainer import gather
from elastic_trainer.config import ConfigError

Model = torch.nn.Module
pytestmark = pytest.mark.usefixtures("no_launcher")


def made(kind: str) -> tuple[Any, dict[str, Any]]:
    model = BUFFERS[kind].model()
    return model, BUFFERS[kind].rules(model)


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
    assert "changed the buffers 0.steps," in told and "after the inner loop" in told
    assert max(steps) == 1


class Large(torch.nn.Module):
    """Has a buffer that needs many buckets, and two layers whose gradients fill others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.zeros(1000))
        self.first, self.second = torch.nn.Linear(5, 3), torch.nn.Linear(5, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.code += x.sum().detach()
        return self.first(x) + self.second(x)[:, :3]


@pytest.mark.parametrize("reduce", ["exact", "ring"])
def test_a_buffer_larger_than_a_bucket_is_sent_whole(
        reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in front of the gradients leaves after the last micro-batch, however many buckets
    it takes: else workers would have other bits (ring sums in another order in each world)."""
    def values(size: int) -> list[list[float]]:
        torch.manual_seed(0)
        model = Large()
        models = [copy.deepcopy(model) for _ in range(size)]

        def work(rank: int) -> list[float]:
            one = models[rank]
            for step in trainer_of(one, buffers={"code": "mean"}, bucket_bytes=1024,
                                   reduce=reduce):
                for batch in step:
                    step.backward(mse(one, batch))
            return torch.cat([t.detach().flatten() for t in one.state_dict().values()]).tolist()

        if size == 1:
            return [work(0)]
        with monkeypatch.context() as patch:
            return in_a_breaking_world(patch, size, work)

    for size in (2, 3, 4):
        found = values(size)
        assert found == [found[0]] * size
        assert found[0] == (values(1)[0] if reduce == "exact" else pytest.approx(
            values(1)[0], rel=1e-4, abs=1e-5))


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


@pytest.mark.parametrize("value", [torch.zeros(1), torch.zeros(8, dtype=torch.float64)])
def test_a_buffer_that_is_replaced_by_another_kind_after_a_step_is_an_error(
        value: torch.Tensor) -> None:
    """It was dropped in silence."""
    model: Any = torch.nn.Sequential(torch.nn.Identity(), built())
    model[1].register_buffer("table", torch.zeros(8))
    with pytest.raises(RuntimeError, match=r"replaced the buffers 1.table \(.* before step 2"):
        for step in trainer_of(model):
            for batch in step:
                step.backward(mse(model, batch))
            if step.number == 1:
                model[1].table = value


@pytest.mark.parametrize("replaces", [False, True])
def test_a_buffer_that_changes_after_backward_is_an_error(replaces: bool) -> None:
    """The step has taken its value there. It was lost in silence."""
    model = built(torch.nn.BatchNorm1d(8))
    with pytest.raises(RuntimeError, match=r"2\.\w+ was changed after step\.backward\(\)"):
        for step in trainer_of(model, min_microbatch_samples=2):
            for batch in step:
                step.backward(mse(model, batch))
                if replaces:
                    model[2].running_mean = model[2].running_mean + 1
                else:
                    model(batch[0])


class Again(Model):
    """Has a BatchNorm in a part that may be computed again in the backward pass."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(5, 8), torch.nn.Linear(8, 3)
        self.part = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.part(x) if self.reentrant is None else checkpoint(
            self.part, x, use_reentrant=self.reentrant)
        return torch.as_tensor(self.last(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_batch_norm_counts_a_recomputed_batch_once(reentrant: bool) -> None:
    """As without checkpointing. In plain PyTorch the running statistics move twice for a batch."""
    models: list[Any] = [Again(None), Again(reentrant)]
    for model in models:
        trained(model, microbatches=1)
    assert all(torch.equal(*both) for both in zip(*(m.buffers() for m in models), strict=True))
    assert int(models[1].part[0].num_batches_tracked) == SCHEDULE.steps

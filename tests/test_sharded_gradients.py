"""Gradients sharded over the workers: what a script may not do with `.grad` is an error at once,
and no worker has all gradients.

The bits: test_same_bits.py, test_sharded.py and test_sharded_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from test_loop import built, mse
from test_trainer import in_a_breaking_world, trainer_of
from torch.utils.checkpoint import checkpoint

from elastic_trainer.config import ConfigError
from elastic_trainer.reduce.scattered import ScatteredReducer
from elastic_trainer.training.step import Step

pytestmark = pytest.mark.usefixtures("no_launcher")
GRADIENTS = {"shard": "gradients"}
Act = Callable[[torch.nn.Module, Step], None]


def train(inside: Act = lambda model, step: None, before: Act = lambda model, step: None,
          after: Act = lambda model, step: None, loss: Any = mse, model: Any = None,
          **options: Any) -> str:
    """Train with sharded gradients, with code before and after each backward pass, and after each
    step."""
    model = model or built()
    trainer = trainer_of(model, **(GRADIENTS | options))
    for step in trainer:
        for batch in step:
            before(model, step)
            step.backward(loss(model, batch))
            inside(model, step)
        after(model, step)
    return trainer.result.weights_sha256


def clip(model: torch.nn.Module, step: Step) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def own_pass(model: torch.nn.Module, step: Step) -> None:
    first = next(model.parameters())
    model(torch.ones(2, first.shape[1])).sum().backward()


def new_gradient(model: torch.nn.Module, step: Step) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


@pytest.mark.parametrize(("more", "error"), [
    ({"inside": clip}, "more than one element of the written-to tensor"),
    ({"inside": new_gradient}, "changed .grad after the backward pass"),
    ({"inside": lambda model, step: model.zero_grad()}, "changed .grad after the backward pass"),
    ({"after": clip}, "more than one element of the written-to tensor"),
    ({"before": own_pass}, "a backward pass of your own has left gradients"),
    ({"inside": lambda model, step: [p.grad.data.zero_() for p in model.parameters()]},
     "changed .grad after the backward pass"),
    ({"inside": lambda model, step: own_pass(model[2], step), "model": "half"},
     "changed .grad after the backward pass"),
    ({"loss": lambda model, batch: (checkpoint(model, batch[0].requires_grad_(), use_reentrant=True)
                                    + checkpoint(model, batch[0], use_reentrant=True)).sum()},
     "came in two parts")])
def test_code_that_writes_to_a_gradient_is_an_error(more: dict[str, Any], error: str) -> None:
    """It would have no effect, or be lost: the gradient has left."""
    if more.get("model"):  # the loss of the step uses the first layer alone
        more = more | {"model": built(), "loss": lambda model, batch: model[0](batch[0]).sum()}
    with pytest.raises((RuntimeError, ConfigError), match=error):
        train(**more)


def test_what_code_reads_of_a_gradient_is_no_number() -> None:
    """In the inner loop and after it. A plain script would log the norm."""
    seen = list[float]()

    def note(model: torch.nn.Module, step: Step) -> None:
        seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))

    train(inside=note, after=note)
    assert seen and all(one != one for one in seen)


def test_a_hook_that_would_run_after_the_gradient_has_left_is_refused() -> None:
    model = built()
    first = next(model.parameters())

    def add_hook(_: torch.nn.Module, step: Step) -> None:
        first.register_post_accumulate_grad_hook(lambda p: None)

    with pytest.raises((RuntimeError, ConfigError), match="register_post_accumulate_grad_hook"):
        train(model=model, after=add_hook)


def test_a_hook_that_was_there_before_changes_the_gradient_as_in_plain_pytorch() -> None:
    def halved() -> Any:
        model = built()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(halve)
        return model

    def halve(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    assert train(model=halved()) == train(model=halved(), shard=None)


def test_a_gradient_that_code_has_cleared_after_a_step_is_no_number_again() -> None:
    seen = list[float]()

    def clear(model: torch.nn.Module, step: Step) -> None:
        model.zero_grad(set_to_none=False)

    train(after=clear, inside=lambda model, step: seen.append(
        float(next(model.parameters()).grad.sum())))
    assert seen and all(one != one for one in seen)


class Wide(torch.nn.Module):
    """Layers of several types, in an order that is not that of the optimizer's groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(9))
        for layer in self.layers[::3]:
            layer.to(torch.bfloat16)
        self.last = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        found: torch.Tensor = self.last(x.float())
        return found


def grouped(model: torch.nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])


@pytest.mark.parametrize("phases", (False, True))
def test_the_norm_of_several_types_and_groups_is_torchs(phases: bool) -> None:
    def hashed(shard: str | None) -> str:
        model = Wide()
        optimizer: Any = grouped(model)
        if phases:
            *head, last = model.layers
            optimizer = {"head": grouped(torch.nn.ModuleList(head)),
                         "tail": grouped(torch.nn.ModuleList([last, model.last]))}
        trainer = trainer_of(model, optimizer, shard=shard, clip_norm=0.05)
        for step in trainer:
            for phase in ("head", "tail") if phases else ("",):
                for batch in step.phase(phase) if phases else step:
                    step.backward(mse(model, batch))
        return trainer.result.weights_sha256

    assert hashed("gradients") == hashed(None)


def test_a_scaler_that_is_off_and_whole_numbers_do_not_matter() -> None:
    def model_of() -> Any:
        model = built()
        model.register_parameter("codes", torch.nn.Parameter(
            torch.arange(3, dtype=torch.int8), requires_grad=False))
        return model

    def hashed(shard: str | None) -> str:
        model = model_of()
        return train(model=model, shard=shard, scaler=torch.amp.GradScaler("cpu", enabled=False),
                     optimizer=torch.optim.SGD(
                         [p for p in model.parameters() if p.requires_grad], lr=0.1))

    assert hashed("gradients") == hashed("optimizer") == hashed(None)


def test_16_bits_on_the_way_are_refused() -> None:
    with pytest.raises(ConfigError, match='compress sends gradients in 16 bits. Leave compress'):
        train(reduce="ring", compress=True)


def test_the_norm_of_gradients_that_no_optimizer_has_is_refused() -> None:
    """Each worker would clip by another norm than one process does."""
    model = built()
    *moved, last = model.parameters()
    with pytest.raises(RuntimeError, match=r"in no optimizer, and count for clip_norm"):
        train(model=model, optimizer=torch.optim.SGD(moved, lr=0.1), clip_norm=1.0)
    last.requires_grad_(False)
    train(model=model, optimizer=torch.optim.SGD(moved, lr=0.1), clip_norm=1.0)


class Measured(ScatteredReducer):
    """Notes the most elements of gradients that a worker has had at once."""

    most: ClassVar[list[int]] = []

    def _take(self, number: int, gradient: torch.Tensor) -> None:
        super()._take(number, gradient)
        pending = [piece for bucket in self._pending for piece in bucket.values()]
        left = [p.grad for p in self.flat.gradients.everyone if p.grad is not None]
        self.most.append(sum(one.numel() for one in (
            *self.flat.reduced.values(), *pending, *self._open.values(), *left)))


def test_no_worker_has_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a micro-batch, or of the step: each has what it holds, and the buckets on their way."""
    def model_of() -> Any:
        torch.manual_seed(1)
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(24)))

    def run(rank: int) -> Any:
        model, data = models[rank], torch.utils.data.TensorDataset(torch.ones(32, 64))
        trainer = trainer_of(model, torch.optim.AdamW(model.parameters()), data,
                             bucket_bytes=40_000, until="1 epoch", shard="gradients")
        for step in trainer:
            for (x,) in step:
                step.backward(model(x).square().mean())
        return trainer.result.weights_sha256

    monkeypatch.setattr("elastic_trainer.training.work.ScatteredReducer", Measured)
    models = [model_of() for _ in range(4)]
    assert len(set(in_a_breaking_world(monkeypatch, 4, run))) == 1
    # The parts of two holders of four, and a bucket.
    assert 0 < max(Measured.most) < 0.7 * sum(p.numel() for p in models[0].parameters())

"""What plain PyTorch's loop has and this one must not have, or has elsewhere: each is an error at
once, with the remedy in the words of the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_gradients import adversarial
from test_loop import built, mse
from test_trainer import loop, trainer_of

pytestmark = pytest.mark.usefixtures("nobody_started_us")
Model = torch.nn.Module
clip_grad_norm_ = torch.nn.utils.clip_grad_norm_


# --- gradients that the user's code changes -------------------------------------------------------


CHANGES: dict[str, Callable[[Model], Any]] = {
    "clip_grad_norm_": lambda model: clip_grad_norm_(model.parameters(), 0.1),
    "clip_grad_value_": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4),
    "zero_grad": lambda model: model.zero_grad(),
    "zero_grad in place": lambda model: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize(("change", "isolates"), [
    *((change, False) for change in CHANGES), ("clip_grad_norm_", True), ("zero_grad", True)])
def test_gradients_stay_when_the_backward_pass_of_a_batch_is_done(change: str, isolates: bool,
                                                                  reduce: str) -> None:
    """A batch is a shard: its clipped gradient would be a part of the step's. Also where the loss
    has a backward pass of its own, so that each shard has gradients of its own."""
    model = built()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="changed .grad behind the backward pass.*clip_norm=…"):
        for step in trainer_of(model, reduce=reduce):
            for batch in step:
                step.backward((adversarial if isolates else mse)(model, batch))
                CHANGES[change](model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("change", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_behind_the_inner_loop_raises(change: str) -> None:
    """There the step is applied, so the clipping would have no effect, in silence."""
    model = built()
    with pytest.raises(RuntimeError, match="no effect: the step is applied.*clip_norm=…"):
        for step in trainer_of(model):
            for batch in step:
                step.backward(mse(model, batch))
            CHANGES[change](model)


def test_gradients_are_free_behind_the_inner_loop() -> None:
    """Reading their norm, clearing them, and a backward pass of one's own change no bit."""
    plain, model = built(), built()
    reference = loop(trainer_of(plain), plain)
    trainer, norms = trainer_of(model), list[float]()
    for step in trainer:
        for batch in step:
            step.backward(mse(model, batch))
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        if step.number % 3 == 0:
            mse(model, batch).backward()
        elif step.number % 3 == 1:
            model.zero_grad(set_to_none=False)
        else:
            model.zero_grad()
    assert trainer.result.weights_sha256 == reference and all(norms)

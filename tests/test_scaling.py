"""Backward passes of the user's own beside step.backward, with a scaler: those of a plain PyTorch
loop with the same calls, or an error at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_loop import INPUT, SCHEDULE, TARGET, adamw, built, mse, sgd, trained
from test_trainer import Fault, Pair, in_a_breaking_world, optimizers, trainer_of

from elastic_trainer.state.values.layout import byte_view

Model = torch.nn.Module
Scale = Callable[[torch.Tensor], torch.Tensor]
pytestmark = pytest.mark.usefixtures("no_launcher")


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def norm_of(model: Model, batch: Any) -> torch.Tensor:
    return 0.5 * model(batch[0]).square().mean()


def one_pass(model: Any, batch: Any, scale: Scale) -> torch.Tensor:
    scale(norm_of(model, batch)).backward()
    return mse(model, batch)


def several_passes(model: Any, batch: Any, scale: Scale) -> torch.Tensor:
    for factor in (0.5, 0.25):
        scale(factor * norm_of(model, batch)).backward()
    return mse(model, batch)


def retained(model: Any, batch: Any, scale: Scale) -> torch.Tensor:
    out = model(batch[0])
    scale(out.square().mean()).backward(retain_graph=True)
    return torch.nn.functional.mse_loss(out, batch[1])


def written_by_hand(model: Any, batch: Any, scale: Scale) -> torch.Tensor:
    found = torch.autograd.grad(scale(norm_of(model, batch)), [*model.parameters()])
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient
    return mse(model, batch)


def clipped(model: Any, batch: Any, scale: Scale) -> torch.Tensor:
    scale(norm_of(model, batch)).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clamp(-1.0, 1.0)
    return mse(model, batch)


def penalized(model: Any, batch: Any, scale: Scale) -> torch.Tensor:
    """The recipe of torch's page on automatic mixed precision."""
    loss = mse(model, batch)
    found = torch.autograd.grad(scale(loss), [*model.parameters()], create_graph=True)
    factor = scale(torch.ones(()))
    return loss + 0.1 * sum((gradient / factor).square().sum() for gradient in found)


def adversarial(model: Any, batch: Any, scale: Scale) -> torch.Tensor:
    """A pass that is not scaled, of which nothing stays in `.grad`."""
    x = batch[0].clone().requires_grad_()
    mse(model, [x, batch[1]]).backward()
    model.zero_grad()
    assert x.grad is not None
    return mse(model, [(x + 0.1 * x.grad.sign()).detach(), batch[1]])


def zeroed_in_place(model: Any, batch: Any, scale: Scale) -> torch.Tensor:
    mse(model, batch).backward()
    model.zero_grad(set_to_none=False)
    return mse(model, batch)


def zeroed_then_scaled(model: Any, batch: Any, scale: Scale) -> torch.Tensor:
    mse(model, batch).backward()
    model.zero_grad()
    return one_pass(model, batch, scale)


LOSSES = [one_pass, several_passes, retained, written_by_hand, clipped, penalized, adversarial,
          zeroed_in_place, zeroed_then_scaled]


def run(model: Any, loss: Any, precision: str = "fp32", scale: Any = None, microbatches: int = 4,
        with_step: bool = True, **more: Any) -> list[bytes]:
    """Train with a pass of one's own in each batch; `with_step`: by step.scale, else by the
    scaler."""
    trainer = trainer_of(model, adamw(model), scaler=scale, precision=precision,
                         microbatches=microbatches,
                         **more)
    for step in trainer:
        for batch in step:
            own = step.scale if with_step else scale.scale if scale else lambda it: it
            step.backward(loss(model, batch, own))
    return bytes_of(model)


def bytes_of(model: Model) -> list[bytes]:
    return [byte_view(p).numpy().tobytes() for p in model.parameters()]


def plain(model: Any, loss: Any, precision: str, scale: Any) -> list[bytes]:
    """The same in plain PyTorch, one batch a step."""
    optimizer = adamw(model)
    torch.set_num_threads(1)
    for step in range(SCHEDULE.steps):
        chosen = torch.cat(
            [torch.from_numpy(SCHEDULE.microbatch_samples(step, microbatch))
             for microbatch in range(4)])
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            found = loss(model, [INPUT[chosen], TARGET[chosen]],
                         scale.scale if scale else lambda it: it)
        if scale:
            scale.scale(found).backward()
            scale.step(optimizer)
            scale.update()
        else:
            found.backward()
            optimizer.step()
        optimizer.zero_grad()
    return bytes_of(model)


@pytest.mark.parametrize("kind", ["step.scale", "scaler.scale", "bf16", "disabled"])
@pytest.mark.parametrize("loss", LOSSES)
def test_own_backward_passes_are_those_of_a_plain_loop(loss: Any, kind: str) -> None:
    """Bit for bit: scaled by step.scale or by the scaler, or without a scaler."""
    precision = "bf16" if kind == "bf16" else "fp32"
    scales = [None if kind == "bf16" else torch.amp.GradScaler("cpu", enabled=False)
              if kind == "disabled" else scaler() for _ in range(2)]
    assert run(built(), loss, precision, scales[0], microbatches=1, with_step=kind != "scaler.scale"
               ) == plain(built(), loss, precision, scales[1])


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize("size", [2, 4])
def test_own_backward_passes_with_a_scaler_are_the_same_in_every_world(
        size: int, reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a generation that breaks; the scale is a power of two, so it has no effect."""
    alone, models = run(built(), one_pass, microbatches=4), [built() for _ in range(size)]
    assert run(built(), one_pass, scale=scaler()) == alone
    for found in in_a_breaking_world(monkeypatch, size, lambda rank: run(
            models[rank], one_pass, scale=scaler(), reduce=reduce,
            listeners=[Fault(("step.voted", 2))] if rank == 1 else [])):
        assert found == alone or reduce == "ring"


def unscaled(model: Any, batch: Any, scale: Scale) -> torch.Tensor:
    return one_pass(model, batch, lambda loss: loss)


def one_of_two(model: Any, batch: Any, scale: Scale) -> torch.Tensor:
    norm_of(model, batch).backward()
    return one_pass(model, batch, scale)


def the_other_of_two(model: Any, batch: Any, scale: Scale) -> torch.Tensor:
    one_pass(model, batch, scale)
    return unscaled(model, batch, scale)


def by_hand(model: Any, batch: Any, scale: Scale) -> torch.Tensor:
    return written_by_hand(model, batch, lambda loss: loss)


@pytest.mark.parametrize("loss", [unscaled, one_of_two, the_other_of_two, by_hand])
@pytest.mark.parametrize("late", [False, True])
def test_an_own_backward_pass_that_is_not_scaled_is_refused(loss: Any, late: bool) -> None:
    """It would count 1/1024 or less. In the warm-up, or in the step that does it first; with the
    remedy."""
    steps = list[int]()

    def at_last(model: Any, batch: Any, scale: Scale) -> torch.Tensor:
        return (loss if len(steps) >= 2 or not late else one_pass)(model, batch, scale)

    model, scale = built(), scaler()
    with pytest.raises(RuntimeError) as raised:
        for step in trainer_of(model, scaler=scale):
            for batch in step:
                step.backward(at_last(model, batch, step.scale))
            steps.append(step.number)
    told = str(raised.value)
    assert "0.weight" in told and "divides the step's gradient by " in told
    assert "step.scale(loss).backward()" in told and steps == ([0, 1] if late else [])


def test_a_loss_that_was_scaled_already_is_refused() -> None:
    """By the scaler, by step.scale, alone or as a part of a sum."""
    for make in (lambda step, scale, loss: scale.scale(loss),
                 lambda step, scale, loss: step.scale(loss) + loss):
        model, scale = built(), scaler()
        with pytest.raises(RuntimeError, match="a loss that was scaled already.*1024 times"):
            for step in trainer_of(model, scaler=scale):
                for batch in step:
                    step.backward(make(step, scale, mse(model, batch)))


def test_train_takes_own_passes_that_the_scaler_has_scaled() -> None:
    """Its loss has no step; an unscaled pass is refused there, too."""
    scale = scaler()
    ours = trained(built(), scaler=scale, loss=lambda model, batch: one_pass(
        model, batch, scale.scale)).weights_sha256
    assert ours == trained(built(), loss=lambda model, batch: one_pass(
        model, batch, lambda it: it)).weights_sha256
    with pytest.raises(RuntimeError, match=r"scaler\.scale\(loss\)\.backward\(\)"):
        trained(built(), precision="fp16", loss=lambda model, batch: unscaled(
            model, batch, lambda it: it))


def test_own_passes_of_two_optimizers_are_scaled_in_each_phase() -> None:
    """As DCGAN has them: the discriminator's pass on real images is one's own."""
    def work(scale: Any, as_dcgan: bool) -> list[bytes]:
        torch.manual_seed(0)
        model = Pair()
        trainer = trainer_of(model, optimizers(model), scaler=scale, microbatches=2)
        for step in trainer:
            for phase in ("d", "g"):
                for x, _ in step.phase(phase):
                    first, second = (model.d(x).square().mean(),
                                     model.d(model.fake(x)).square().mean())
                    if as_dcgan:
                        step.scale(first).backward()
                        step.backward(second)
                    else:
                        step.backward(first + second)
        return bytes_of(model)

    found = work(scaler(), True)
    assert found == work(None, True)
    together = work(None, False)
    for one, other in zip(found, together, strict=True):
        assert torch.allclose(*(torch.frombuffer(bytearray(each), dtype=torch.float32)
                                for each in (one, other)), atol=1e-5)


def test_step_scale_outside_of_a_batch_is_refused() -> None:
    model = built()
    with pytest.raises(RuntimeError, match=r"scale\(\) was called in step 0 without a batch"):
        for step in trainer_of(model, sgd(model), scaler=scaler()):
            for batch in step:
                step.backward(mse(model, batch))
            step.scale(mse(model, [INPUT, TARGET]))

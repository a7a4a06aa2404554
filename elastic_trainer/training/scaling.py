"""The scaler of the loss: for the step's backward pass, and for passes of the user's own beside it.

loss of a micro-batch, step.scale(loss) → here → gradients that are all scaled, or the user's error

What always holds:
1. The step's backward pass scales its loss once. A loss that was scaled already is an error.
2. What a pass of the user's own leaves in `.grad` is scaled, too: by step.scale(loss) or by the
   scaler itself. Otherwise it would count 1/65536 behind unscale_, and is an error.
3. A job without a scaler costs nothing here, and one with a scaler only where the user's code
   writes to `.grad` (`Gradients.isolates`).

A pass is known by the number that autograd gives it (`torch._C._current_graph_task_id`, as in
torch/autograd/graph.py 2.13). Gradients that the user's code puts into `.grad` by itself are
trusted if it has scaled any loss in the same batch.

What it does not do: it takes an own pass through reentrant checkpointing for an unscaled one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from elastic_trainer.reduce.gradients import Gradients
from elastic_trainer.state.supported import some

TWICE = (
    "step.backward() got a loss that was scaled already, so the gradient would be {scale:g} times "
    "too large: the trainer scales the loss itself. Give it the loss without a scale. step.scale() "
    "and scaler.scale() are for backward passes of your own.")
UNSCALED = (
    "a backward pass of your own has left gradients in .grad of {names} that are not scaled, and "
    "the scaler divides the step's gradient by {scale:g}, so they would count almost nothing. Call "
    "step.scale(loss).backward() instead of loss.backward() (with train(): "
    "scaler.scale(loss).backward(), with the scaler that you have given), or add the losses: "
    "step.backward(first + second).")


class Scaling:
    """Scales losses for one job, and tells which passes were scaled."""

    def __init__(self, scaler: torch.amp.GradScaler | None, gradients: Gradients):
        self._gradients = gradients
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scaled = set[int]()
        """The passes of the micro-batch in hand that began with a scaled loss."""
        self._seen: dict[int, tuple[torch.Tensor | None, bool]] = {}
        """What passes of the user's own have left, by parameter: the gradient, and whether all of
        it is scaled."""
        self._is_in_step = self._watches = False
        if self._scaler is not None:
            self._scaler.scale = self._scale_marked  # type: ignore[method-assign]

    def _plain_scale(self, loss: Any) -> Any:
        assert self._scaler is not None
        return type(self._scaler).scale(self._scaler, loss)

    def _scale_marked(self, outputs: Any) -> Any:
        """Scale what the user's code hands over, as the scaler does."""
        scaled = self._plain_scale(outputs)
        for one in [scaled] if isinstance(scaled, torch.Tensor) else scaled:
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(self._note)  # type: ignore[no-untyped-call]
        return scaled

    def _note(self, _: torch.Tensor) -> None:
        if self._is_in_step:
            assert self._scaler is not None
            raise RuntimeError(TWICE.format(scale=self._scaler.get_scale()))
        self._scaled.add(torch._C._current_graph_task_id())

    def open(self) -> None:
        """Begin a micro-batch."""
        self._is_in_step = False
        if self._scaler is None:
            return
        self._scaled.clear()
        self._seen.clear()
        if self._gradients.isolates and not self._watches:
            self._watches = True
            parameters: Sequence[Any] = self._gradients.everyone  # torch gives the method no types
            for parameter in parameters:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if self._is_in_step:
            return
        was, is_scaled = self._seen.get(id(parameter), (None, True))
        self._seen[id(parameter)] = parameter.grad, (
            torch._C._current_graph_task_id() in self._scaled
            and (is_scaled or was is not parameter.grad))

    def check(self) -> None:
        """Raise RuntimeError if passes of the user's own in this micro-batch were not scaled."""
        if self._scaler is not None and (odd := list(self._unscaled())):
            raise RuntimeError(UNSCALED.format(names=some(odd), scale=self._scaler.get_scale()))

    def backward(self, loss: torch.Tensor, is_scaled: bool = True) -> None:
        """Run the step's backward pass. Raises RuntimeError if its loss was scaled already."""
        self._is_in_step = True
        (self._plain_scale(loss) if is_scaled and self._scaler is not None else loss).backward()

    def _unscaled(self) -> Iterable[str]:
        """Yield the parameters whose `.grad` has more than zeros, and is not scaled."""
        gradients = self._gradients
        pairs = zip(gradients.names, gradients.everyone, strict=True)
        for name, parameter in pairs if gradients.isolates else ():
            if (left := parameter.grad) is None:
                continue
            seen, is_scaled = self._seen.get(id(parameter), (None, False))
            # Another tensor is one that the user's code has put there.
            if not (is_scaled if seen is left else self._scaled) and bool(
                    (left.coalesce().values() if left.is_sparse else left).any()):
                yield name

"""Mixed precision: torch's autocast around the user's code of a batch, and the scaler of fp16.

option `precision` → here ← each batch in the user's hands (step.py), the loss of train()
(train.py), the function of evaluate() (evaluation.py); loss of a micro-batch, step.scale(loss) →
here → gradients that are all scaled, or the user's error

What always holds:
1. Autocast is on in the thread of the loop from the moment at which a batch is handed out. It is
   off again in step.backward(), or at the next step of the loop. Code after the inner loop, and
   other threads, do not see it.
2. Its cache of 16-bit weights is empty when a batch begins. torch clears the cache when the
   outermost context is left. Otherwise the weights of an earlier step would be used.
3. A context of the user's own inside of ours counts for its block, as nested contexts of torch do.
4. The step's backward pass scales its loss once. A loss that was scaled already is an error. What
   a pass of the user's own leaves in `.grad` is scaled, too: by step.scale(loss) or by the scaler
   itself. Otherwise it would count 1/65536 after unscale_, and is an error.
5. A job without a scaler costs nothing in Scaling, and one with a scaler only where the user's code
   writes to `.grad` (`Gradients.isolates`).

A pass is known by the number that autograd gives it (`torch._C._current_graph_task_id`, as in
torch/autograd/graph.py 2.13). Gradients that the user's code puts into `.grad` by itself are
trusted if it has scaled any loss in the same batch.

What it does not do: cast weights (masters.py does), gradients or the optimizer's values. It
takes an own pass through reentrant checkpointing for an unscaled one.

Source: torch/amp/autocast_mode.py (2.13) for the nesting and the cache.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from elastic_trainer.config import ConfigError
from elastic_trainer.reduce.gradient_sums import Gradients
from elastic_trainer.state.live_state import MASTERS
from elastic_trainer.state.values.supported import some

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16,
              MASTERS: torch.bfloat16}
AROUND = (
    "torch.autocast is on where a batch begins. Its cache would keep the 16-bit weights of the "
    "first step, so later steps would not see the new weights. Give precision=\"bf16\" (or "
    "\"fp16\"), or put `with torch.autocast(…)` around the forward pass only, in the code of a "
    "batch.")
NOT_LEFT = (
    "a torch.autocast was entered in the code of a batch and is still on when the next batch "
    "begins. Leave it in the same batch: use it in a `with` block around the forward pass.")
OTHER_THREAD = (
    "step.backward() was called in another thread than the one that got the batch. Autocast "
    "(precision=\"{name}\") is off there, so the forward pass may have run in 32 bits. Compute the "
    "loss in the thread of the loop, or use precision=\"fp32\" with a torch.autocast of your own.")


class Precision:
    """The autocast in which the user's code computes a batch."""

    def __init__(self, name: str = "fp32", device_type: str = "cpu"):
        self.name, self._device, self._dtype = name, device_type, PRECISIONS[name]
        self._context: torch.autocast | None = None
        self._depth, self._thread = 0, 0
        """How deep the contexts of autocast are nested with ours, and the thread that has it."""

    def __repr__(self) -> str:
        return f"Precision({self.name}{', entered' if self._context else ''})"

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Let autocast be on while a batch is in the user's hands. Raises RuntimeError if it is on
        already, or was entered by the user and not left."""
        context = self._enter()
        try:
            yield
            if context is not None and self._context is context and _depth() != self._depth:
                raise RuntimeError(NOT_LEFT)
        finally:
            self._leave(context)

    def end_forward(self) -> None:
        """Switch autocast off before a backward pass. Inside of a context of the user's own it
        stays, until the next stage. Raises RuntimeError in another thread."""
        if self._context is None:
            return
        if threading.get_ident() != self._thread:
            raise RuntimeError(OTHER_THREAD.format(name=self.name))
        if _depth() == self._depth:
            self._leave(self._context)

    def evaluation(self) -> AbstractContextManager[object]:
        """Return the context for one batch of an evaluation. A context of the user's around
        evaluate() holds instead."""
        if self._dtype is None or torch.is_autocast_enabled(self._device):
            return nullcontext()
        return torch.autocast(self._device, self._dtype)

    def _enter(self) -> torch.autocast | None:
        if torch.is_autocast_enabled(self._device):
            raise RuntimeError(AROUND)
        if _depth():  # a disabled context around the loop: contexts in it do not clear the cache
            torch.clear_autocast_cache()
        if self._dtype is None:
            return None
        self._context = torch.autocast(self._device, self._dtype)
        self._context.__enter__()  # type: ignore[no-untyped-call]
        self._depth, self._thread = _depth(), threading.get_ident()
        return self._context

    def _leave(self, context: torch.autocast | None) -> None:
        """Leave a context, unless it was left. The garbage collector may close the user's iterator
        in another thread: the state of that thread is not ours."""
        if context is None or context is not self._context:
            return
        self._context = None
        if threading.get_ident() == self._thread:
            context.__exit__(None, None, None)
            torch.clear_autocast_cache()


def _depth() -> int:
    """Return how deep the contexts of autocast are nested in this thread."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def precision_of(name: str, device_type: str) -> Precision:
    """Return the precision of a name on a kind of device. Raises ConfigError."""
    if (dtype := PRECISIONS[name]) is not None:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            try:  # torch warns and switches autocast off, or raises
                is_supported = torch.autocast(device_type, dtype)._enabled
            except RuntimeError as error:
                found, is_supported = [], False
                reason = str(error)
            else:
                reason = str(found[0].message) if found else ""
        if not is_supported:
            raise ConfigError(f"precision is {name!r}, which torch does not support on the device "
                              f"{device_type!r}: {reason.strip().rstrip('.')}. Use another one of "
                              f"{tuple(PRECISIONS)}.")
    return Precision(name, device_type)


def scaler_of(name: str, given: torch.amp.GradScaler | None,
              device_type: str) -> torch.amp.GradScaler | None:
    """Return the scaler of the loss: the one given, or a new one for fp16, whose gradients would
    underflow without."""
    if given is None and name == "fp16":
        return torch.amp.GradScaler(device_type)
    return given


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
        if self._scaler is not None and (wrong := list(self._unscaled())):
            raise RuntimeError(UNSCALED.format(names=some(wrong), scale=self._scaler.get_scale()))

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

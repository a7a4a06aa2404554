"""Mixed precision: torch's autocast around the user's code of a batch, and the scaler of fp16.

option `precision` → here ← each batch in the user's hands (step.py), the loss of train()
(train.py), the function of evaluate() (evaluation.py)

What always holds:
1. Autocast is on in the thread of the loop from the moment at which a batch is handed out. It is
   off again in step.backward(), or at the next move. Code behind the inner loop, and other threads,
   do not see it.
2. Its cache of 16-bit weights is empty when a batch begins. torch clears the cache when the
   outermost context is left. Otherwise the weights of an earlier step would be used.
3. A context of the user's own inside of ours counts for its block, as nested contexts of torch do.

What it does not do: cast weights, gradients or the optimizer's values. They keep their types.

Source: torch/amp/autocast_mode.py (2.13) for the nesting and the cache.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from elastic_trainer.config import ConfigError

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
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
        stays, until the next move. Raises RuntimeError in another thread."""
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

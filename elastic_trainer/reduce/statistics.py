"""The loss, and what the forward passes have changed in the model's buffers (BatchNorm).

a micro-batch's loss and buffers → here → in front of the gradients → reducer → here → the model's
buffers

What always holds:
1. Each micro-batch starts with the buffers of the step's begin. The step adds to those with the
   rule "mean" (buffer_rules.py) the weighted mean over micro-batches of (after - before).
2. A buffer of whole numbers is rounded, and one of truth values takes the value of more than half
   of the batch.
3. A mark (an infinite value, NaN, or one of 1e30) stands for "none yet". No difference to it has a
   digit of the value, so there the sum over the microbatches is the mean of the values themselves.
4. Of a buffer without a rule only whether it has changed is counted.

What it does not do: buffers of 64-bit floats keep 32 bits of their change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MARK = 1e30
"""A buffer's value from this size on, or from the largest of its type on, is a mark (rule 3)."""
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_CHANGE = 2.0**22
"""The most by which a whole number changes in a step: up to here the mean over micro-batches is
exact when it is rounded."""


class Statistics:
    """The model's buffers, and how a step changes them. `sums` holds the loss, then the changes,
    then a count for each buffer without a rule. `rules`: by name; None: all have the rule "mean".
    """

    def __init__(self, buffers: dict[str, torch.Tensor], device: torch.device,
                 rules: Mapping[str, Any] | None = None):
        if rules is not None:
            buffers = {name: one for name, one in buffers.items() if rules[name] == "mean"}
        self._names = list(buffers)
        self._watched = [name for name, rule in (rules or {}).items() if rule is None]
        self._before: dict[str, torch.Tensor] | None = None
        self._marks: set[str] = set()
        self._counts_start = 1 + sum(_real(buffer).numel() for buffer in buffers.values())
        self.size = self._counts_start + len(self._watched)
        """The number of elements of the flat buffer that the statistics need."""
        is_whole = [torch.full((_real(buffer).numel(),), _holds_whole_numbers(buffer))
                    for buffer in buffers.values()]
        self._whole = (1 + torch.cat(is_whole).nonzero().flatten().to(device) if is_whole
                       else torch.empty(0))
        """Where the statistics hold changes of whole numbers."""

    def add(self, sums: torch.Tensor, weight: float, loss: torch.Tensor,
            before: dict[str, torch.Tensor], after: dict[str, torch.Tensor],
            is_sum: bool) -> None:
        """Add a micro-batch's loss and changes of the buffers, weighted. A loss that `is_sum` gets
        no weight."""
        marked = self.find_marks(before)
        sums[0] += loss.detach().reshape(()).to(sums.device, torch.float32) * (
            1.0 if is_sum else weight)
        at = 1
        for name in self._names:
            was, now = _real(before[name]), _real(after[name])
            # where nothing changed the change is 0, also for inf - inf
            change = torch.where(now == was, 0, now - was) if now.dtype != torch.bool else now
            if name in marked:
                change = torch.where(_is_mark(was), now, change)
            # multiplied first: add_(alpha=) may round once instead of twice, and then a sum in one
            # buffer has other bits than the sum of two
            sums[at : at + now.numel()].add_(change.reshape(-1).to(torch.float32) * weight)
            at += now.numel()
        for name in self._watched:
            if before[name] is not after[name]:
                sums[at] += _has_changed(before[name], after[name])
            at += 1

    def changed(self, sums: torch.Tensor) -> list[str]:
        """Return the buffers without a rule that micro-batches have changed. On a GPU this
        waits."""
        counts = sums[self._counts_start :].tolist() if self._watched else []
        return [name for name, count in zip(self._watched, counts, strict=True) if count]

    def find_marks(self, before: dict[str, torch.Tensor]) -> set[str]:
        """Return the buffers that hold a mark at the step's begin. This waits for a GPU, so it is
        called while the GPU is idle."""
        if before is not self._before:
            found = {name: values for name in self._names
                     if (values := _real(before[name])).is_floating_point() and values.numel()}
            largest = torch._foreach_norm(list(found.values()), float("inf")) if found else ()
            are_quantities = [one.float() < _mark(one.dtype) for one in largest]  # NaN is none
            answers = torch.stack(are_quantities).tolist() if are_quantities else []
            self._marks = {name for name, is_quantity in zip(found, answers, strict=True)
                           if not is_quantity}
            self._before = before
        return self._marks

    def has_lost_digits(self, sums: torch.Tensor) -> bool:
        """True if a buffer of whole numbers has changed by more than 32-bit sums hold exactly."""
        return bool(self._whole.numel()) and float(sums[self._whole].abs().max()) > MOST_CHANGE

    def apply(self, sums: torch.Tensor, before: dict[str, torch.Tensor],
              buffers: dict[str, torch.Tensor]) -> None:
        """Set the buffers to before + mean change."""
        marked, at = self.find_marks(before), 1
        for name in self._names:
            buffer, was = _real(buffers[name]), _real(before[name])
            change = sums[at : at + buffer.numel()].view(buffer.shape)
            if buffer.is_floating_point():
                now = torch.where(change == 0, was, was + change.to(buffer.dtype))
                buffer.copy_(_with_marks(was, change, now) if name in marked else now)
            elif buffer.dtype == torch.bool:
                buffer.copy_(change > 0.5)
            else:
                buffer.copy_(was + change.round().to(buffer.dtype))
            at += buffer.numel()


def _has_changed(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor | bool:
    """Return whether two tensors have different bytes. A GPU is not waited for."""
    was, now = _bits(before), _bits(after)
    return bool((was != now).any()) if was.is_cpu else (was != now).any()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor's elements as whole numbers."""
    real = _real(tensor)
    return real.view(WHOLE[real.element_size()])


def _holds_whole_numbers(buffer: torch.Tensor) -> bool:
    return not (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.bool)


def _mark(dtype: torch.dtype) -> float:
    """Return from which size on a buffer's value of this type is a mark."""
    return min(MARK, torch.finfo(dtype).max)


def _is_mark(values: torch.Tensor) -> torch.Tensor:
    """Return which values are marks. NaN is one."""
    return ~(values.abs() < _mark(values.dtype))


def _with_marks(was: torch.Tensor, change: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Return a buffer's new values: where it had a mark, the sum over the microbatches is the mean
    itself."""
    # The mean of marks is the mark, whatever was rounded; the sign tells inf from -inf.
    stays = (change.abs() >= 0.999 * was.abs().to(change.dtype)) & (change.sign() == was.sign())
    return torch.where(_is_mark(was), torch.where(stays, was, change.to(was.dtype)), now)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of real numbers: a view with one dimension more, if it is complex."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor

"""Buckets: pieces of the flat buffers that are sent by themselves, as soon as they are full.

layout of the flat buffers → here (buckets; which are full) → ring.py, exact.py

What always holds:
1. The buckets cover the flat buffers. Gradients of the last parameters come first, because autograd
   completes them first. What stands in front of the gradients is in the last buckets: it is
   complete after the last micro-batch.
2. All workers start buckets in this order. So a worker may wait for a bucket that it has started:
   each other worker starts that one, too, before it waits for a later one.
3. There is one hook for a bucket, on the parameter of it that autograd is likely to complete last.
   Whether all its gradients are there is read from their versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from elastic_trainer.reduce.flat import ALIGNED, Layout
from elastic_trainer.reduce.gradient_sums import Gradients

GPU_BUCKET_BYTES = 25 << 20
"""As DistributedDataParallel's: NCCL needs messages of this size to be fast, and a bucket of 1 MiB
takes a negotiation and launches of its own (470 of them for GPT-124M)."""


class Bucket(NamedTuple):
    """A piece of the flat buffers that is sent at once."""

    dtype: torch.dtype
    start: int
    stop: int
    members: list[int]
    """The parameters whose gradients it holds, by their place among those that are trained."""


def cut_evenly(layout: Layout, bucket_bytes: int) -> list[Bucket]:
    """Cut the buffers into even buckets of at most this size, from their ends. The last ones have
    the front."""
    buckets = []
    for dtype in sorted(layout.lengths, key=lambda dtype: dtype == torch.float32):
        length = layout.lengths[dtype]
        pieces = -(-length * dtype.itemsize // bucket_bytes)
        each = -(-length // pieces // ALIGNED) * ALIGNED
        for stop in range(length, 0, -each):
            start = max(0, stop - each)
            buckets.append(Bucket(dtype, start, stop, [
                number for number, (kind, low, high) in enumerate(layout.places)
                if kind == dtype and low < stop and start < high]))
    return buckets


class Filling:
    """Tells when the backward pass may have completed a bucket."""

    def __init__(self, gradients: Gradients, buckets: Sequence[Bucket]):
        self._gradients, self._buckets = gradients, buckets
        self._hooks = list[torch.utils.hooks.RemovableHandle]()
        self._on_filled: Callable[[], None] | None = None

    def watch(self, on_filled: Callable[[], None]) -> None:
        """Call this from the next backward pass, until `rest`. The hooks stay: to set them takes
        longer than their calls."""
        self._on_filled = on_filled
        if not self._hooks:
            last = {min(bucket.members) for bucket in self._buckets if bucket.members}
            parameters: list[Any] = self._gradients.parameters  # torch gives the method no types
            self._hooks = [parameters[number].register_post_accumulate_grad_hook(self._call)
                           for number in sorted(last)]

    def rest(self) -> None:
        self._on_filled = None

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def is_full(self, number: int) -> bool:
        """True if the backward pass in flight has added to each gradient of a bucket, once."""
        return self._gradients.are_added(self._buckets[number].members)

    def _call(self, _: torch.Tensor) -> None:
        if self._on_filled:
            self._on_filled()

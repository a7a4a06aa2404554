"""Whether all micro-batches of a step train the same parameters, and all workers log the same
names.

what this worker trains and logs → whole numbers → here (one small allreduce) → all agree, or
SetsDiffer on all

What always holds:
1. The message has the same length on all workers, and whole numbers add up exactly in any order.
   So each worker draws the same conclusion, whatever the lengths of the others' buffers are.
2. It lies in the memory of the host, so it does not wait for a GPU. It is sent before the last
   micro-batch's backward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from elastic_trainer.reduce.flat import Flat, SetsDiffer

BITS = 32
"""Bits of the fingerprint of what else decides the length of the buffers."""


def message_of(flat: Flat, run: int) -> torch.Tensor:
    """Return what a worker that runs this number of micro-batches in a step tells all others."""
    known = repr((flat.tally.names, flat.statistics.size)).encode()
    fingerprint = [zlib.crc32(known) >> place & 1 for place in range(BITS)]
    trained = [run * is_trained for is_trained in flat.trained]
    return torch.tensor([run, *trained, *fingerprint], dtype=torch.int64)


def agreed(numbers: Sequence[int], size: int) -> list[bool] | None:
    """Return which parameters the micro-batches train, from the sum of all messages; None if no
    micro-batch was run. Raises SetsDiffer."""
    run, *counts = numbers
    trained, fingerprint = counts[:-BITS], counts[-BITS:]
    if any(count not in (0, run) for count in trained) or (
            any(count not in (0, size) for count in fingerprint)):
        raise SetsDiffer
    return [count > 0 for count in trained] if run else None

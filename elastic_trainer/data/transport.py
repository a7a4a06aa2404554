"""Carry a batch from a loader process to its worker, in memory that both map.

loader process: batch → here → a descriptor → unix socket → here → worker: the same batch

What always holds:
1. A tensor arrives with its bits, dtype, shape and strides. Its bytes are copied once, in the
   loader process.
2. The memory has no name (memfd_create(2)). It is freed when both processes have dropped it,
   however they end. The size of /dev/shm is no limit.
3. Both processes are ours, on one machine, forked from one parent: nothing comes from a network or
   a store.

What it does not do: keep two tensors of a batch in one storage (each has its own), or a conjugate
view as a view (it is resolved).

torch's DataLoader serializes with the same class (ForkingPickler). It has a socket, a thread and an
open file for each storage (torch/multiprocessing/reductions.py); this is one file for a batch.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

ALIGNMENT = 64
"""Bytes, as torch's allocator aligns (c10/core/alignment.h): kernels take the same path."""
_PLACE, _COUNT = struct.Struct("<QQ"), struct.Struct("<Q")


class _Packer(ForkingPickler):
    """Serializes a batch, but not the bytes of its tensors and arrays: those are `buffers`."""

    def __init__(self, file: io.BytesIO):
        self.buffers: list[Any] = []
        super().__init__(file, 5, True, self.buffers.append)

    def reducer_override(self, obj: Any) -> Any:
        """Describe a tensor by the bytes that it spans. Sparse and quantized ones go torch's
        way."""
        if not (type(obj) is torch.Tensor and obj.layout == torch.strided and obj.is_leaf
                and obj.device.type == "cpu" and not obj.is_quantized):
            return NotImplemented
        tensor = obj.detach().resolve_conj().resolve_neg()
        shape, stride = tuple(tensor.shape), tensor.stride()
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        flat = torch.as_strided(tensor, (span if tensor.numel() else 0,), (1,))
        return _tensor, (flat.view(torch.uint8).numpy(), tensor.dtype, shape, stride,
                         obj.requires_grad)


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...],
            requires_grad: bool) -> torch.Tensor:
    flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    return torch.as_strided(flat, shape, stride).requires_grad_(requires_grad)


def packed(batch: Any) -> int:
    """Write a batch into memory of its own; returns the descriptor, which the caller closes.

    The layout is: what ForkingPickler writes, the buffers, their places, and the number of places.
    """
    text = io.BytesIO()
    packer = _Packer(text)
    packer.dump(batch)
    buffers = [text.getbuffer(), *(buffer.raw() for buffer in packer.buffers)]
    places = places_of([buffer.nbytes for buffer in buffers])
    table = places[-1][0] + places[-1][1]
    size = table + len(places) * _PLACE.size + _COUNT.size
    descriptor = os.memfd_create("elastic-trainer-batch")
    try:
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) as memory:
            for buffer, (start, length) in zip(buffers, places, strict=True):
                memory[start:start + length] = buffer
            for number, place in enumerate(places):
                _PLACE.pack_into(memory, table + number * _PLACE.size, *place)
            _COUNT.pack_into(memory, size - _COUNT.size, len(places))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def places_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and length of buffers of these lengths, in bytes, each start aligned."""
    places, start = [], 0
    for length in lengths:
        places.append((start, length))
        start += -(-length // ALIGNMENT) * ALIGNMENT
    return places


def unpacked(descriptor: int) -> Any:
    """Return the batch that `packed` has written, and close the descriptor. The tensors are in the
    mapped memory: nothing is copied."""
    try:
        memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
    (count,) = _COUNT.unpack_from(memory, len(memory) - _COUNT.size)
    table = len(memory) - _COUNT.size - count * _PLACE.size
    places = [_PLACE.unpack_from(memory, table + n * _PLACE.size) for n in range(count)]
    view = memoryview(memory)
    text, *buffers = (view[start:start + length] for start, length in places)
    return ForkingPickler.loads(text, buffers=buffers)

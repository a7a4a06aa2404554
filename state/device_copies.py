"""Copies of the state from a device (a GPU) into memory of the host.

live tensors → here → a checkpoint's share (upload.py), a newcomer (world/transfer.py)

What always holds:
1. Each byte leaves its device once, and the device holds no second copy of the state
   (layout.bytes_at).
2. `Streams` copies after what its device was given before, and beside what it is given later.
   Whoever writes to a copied tensor calls `hold_writes` before.
3. On a CPU a copy is made at once.

Source: torch.cuda.Stream and torch.cuda.Event; CUDA programming guide, asynchronous concurrent
execution: a copy into memory of the host runs beside kernels if that memory is pinned. Without
pinned memory it is made all the same, and the host waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_trainer.state.layout import Packed, bytes_at, overlaps


def copy_range(packed: Packed, start: int, stop: int, out: torch.Tensor,
               is_meant: Callable[[int], bool] = lambda number: True) -> None:
    """Copy the bytes [start, stop) of the payload into `out` (uint8, on the CPU), from any device;
    only those of the tensors that are meant, by their numbers.

    A device may still copy when this returns.
    """
    for number, inside, among in overlaps(packed, start, stop):
        if is_meant(number):
            out[among].copy_(bytes_at(packed.tensors[number], inside), non_blocking=True)


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the devices, other than the CPU, that hold some of the tensors."""
    return sorted({tensor.device for tensor in tensors} - {torch.device("cpu")}, key=str)


def await_devices(devices: Iterable[torch.device]) -> None:
    """Wait until each device has done what it was given."""
    for device in devices:
        torch.get_device_module(device).synchronize(device)


@dataclass
class Copying:
    """Copies that devices may still make."""

    ends: list[tuple[torch.device, Any]] = field(default_factory=list)
    """Of each device, an event after its last copy."""
    sources: list[torch.Tensor] = field(default_factory=list)
    """What is copied: its memory must not become another tensor's before."""

    def hold_writes(self) -> None:
        """Let each device do what it is given from now on after its copies. The host does not
        wait."""
        for device, end in self.ends:
            torch.get_device_module(device).current_stream(device).wait_event(end)

    def wait(self) -> None:
        """Wait until the copies are made. Any thread may do so."""
        for _, end in self.ends:
            end.synchronize()
        self.sources = []


class Streams:
    """One stream for copies on each device that holds some of the state."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def copy(self, packed: Packed, start_copies: Callable[[], None]) -> Copying:
        """Let `start_copies` copy from the tensors of `packed`, on the streams for copies."""
        devices = devices_of(packed.tensors)
        with ExitStack() as streams:
            for device in devices:
                module = torch.get_device_module(device)
                if device not in self._streams:
                    self._streams[device] = module.Stream(device=device)
                self._streams[device].wait_stream(module.current_stream(device))
                streams.enter_context(module.stream(self._streams[device]))
            start_copies()
        ends = [(device, self._streams[device].record_event()) for device in devices]
        return Copying(ends, list(packed.tensors) if ends else [])


# --- memory of the host ---------------------------------------------------------------------------


@dataclass
class HostMemory:
    """Memory on the host in pieces, for copies from a device."""

    pieces: list[torch.Tensor] = field(default_factory=list)
    not_pinned: str = ""
    """Why it is not pinned, although it is for a device."""

    @property
    def bytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)


Pin = Callable[[int], torch.Tensor]


def pin(size: int) -> torch.Tensor:
    """Return new pinned memory. Raises RuntimeError where the system gives none."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def new_memory(size: int, piece_bytes: int, is_pinned: bool, pin: Pin = pin,
               rest: Callable[[float], object] = lambda seconds: None) -> HostMemory:
    """Return new memory in pieces of `piece_bytes`; the last one may be shorter.

    Pinned memory is made piece by piece, with a rest as long as each took: meanwhile the device's
    driver takes no kernels. (1.5 GB at once cost a training step 0.8 s.)
    """
    why = ""
    if is_pinned:
        try:
            return HostMemory(_pinned_pieces(size, piece_bytes, pin, rest))
        except RuntimeError as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
    whole = torch.empty(size, dtype=torch.uint8)
    return HostMemory([whole[at : at + piece_bytes]
                       for at in range(0, max(size, 1), piece_bytes)], why)


def _pinned_pieces(size: int, piece_bytes: int, pin: Pin,
                   rest: Callable[[float], object]) -> list[torch.Tensor]:
    pieces: list[torch.Tensor] = []
    for start in range(0, max(size, 1), piece_bytes):
        began = time.monotonic()
        pieces.append(pin(min(piece_bytes, size - start)))
        rest(time.monotonic() - began)
    return pieces

"""Copies of the state from a device (a GPU) into memory of the host.

live tensors → here → a checkpoint's share (upload.py), a newcomer (world/transfer.py)

What always holds:
1. Each byte leaves its device once, and the device holds no second copy of the state
   (layout.bytes_at). Small tensors leave it together, about GATHERED bytes at once.
2. `Streams` copies after what its device was given before, and beside what it is given later.
   Whoever writes to a copied tensor calls `hold_writes` before.
3. On a CPU a copy is made at once.

Source: torch.cuda.Stream and torch.cuda.Event; CUDA programming guide, asynchronous concurrent
execution: a copy into memory of the host runs beside kernels if that memory is pinned. Without
pinned memory it is made all the same, and the host waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from elastic_trainer.state.values.layout import Packed, bytes_at, overlaps

Pin = Callable[[int], torch.Tensor]
SMALL = 1 << 16
"""Tensors of fewer bytes leave a device together: the host needs about 10 µs to start a copy."""
GATHERED = 1 << 24
GATHERABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
"""The types that are put together on a device: torch.cat does not take all."""


def copy_range(packed: Packed, start: int, stop: int, out: torch.Tensor) -> None:
    """Copy the bytes [start, stop) of the payload into `out` (uint8, on the CPU), from any device.

    A device may still copy when this returns.
    """
    Targets(packed, {start: out[: stop - start]}, range(len(packed.tensors))).start(packed.tensors)


class Targets:
    """Where the bytes of some tensors of one layout belong on the host: views of its memory, which
    take longer to make than a copy to start. So they are kept for the next copy."""

    def __init__(self, packed: Packed, pieces: Mapping[int, torch.Tensor], numbers: Container[int],
                 new: Pin | None = None):
        """`pieces` are of the payload, by their first bytes. `new` makes memory for small tensors
        of a device; None: each is copied by itself."""
        self._whole: dict[int, torch.Tensor] = {}
        self._parts: list[tuple[int, int, torch.Tensor]] = []
        """Of tensors that are cut by the end of a piece: number, first element, target."""
        self._bytes: list[tuple[int, slice, torch.Tensor]] = []
        """What is copied byte by byte: number, bytes of the tensor, target."""
        self._small: list[tuple[list[int], torch.Tensor, list[torch.Tensor]]] = []
        """Numbers, the memory in which they arrive together, their targets."""
        for start, piece in pieces.items():
            for number, inside, among in overlaps(packed, start, start + piece.numel()):
                if number in numbers:
                    self._add(number, packed.tensors[number], inside, piece[among])
        if new:
            self._gather(packed.tensors, new)

    def _add(self, number: int, tensor: torch.Tensor, inside: slice, room: torch.Tensor) -> None:
        item = tensor.element_size()
        # a byte of a bool may be another number than 0 and 1
        if tensor.dtype == torch.bool or not tensor.is_contiguous() or any(
                at % item for at in (inside.start, inside.stop, room.storage_offset(),
                                     room.data_ptr())):
            self._bytes.append((number, inside, room))
        elif room.numel() == tensor.numel() * item:
            self._whole[number] = room.view(tensor.dtype).view(tensor.shape)
        else:
            self._parts.append((number, inside.start // item, room.view(tensor.dtype)))

    def _gather(self, tensors: Sequence[torch.Tensor], new: Pin) -> None:
        """Let small tensors of one type leave their device together."""
        groups: dict[Any, list[int]] = {}
        size = 0
        for number in self._whole:
            tensor = tensors[number]
            if (tensor.device.type != "cpu" and tensor.nbytes < SMALL
                    and tensor.dtype in GATHERABLE):
                size += tensor.nbytes
                kind = tensor.device, tensor.dtype, size // GATHERED
                groups.setdefault(kind, []).append(number)
        for (_, dtype, _), numbers in groups.items():
            targets = [self._whole.pop(number) for number in numbers]
            host = new(sum(target.nbytes for target in targets)).view(dtype)
            self._small.append((numbers, host, targets))

    def start(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start the copies from tensors of the layout."""
        for numbers, host, _ in self._small:
            sources = [tensors[number] for number in numbers]
            together = _flatten_dense_tensors(sources)  # type: ignore[no-untyped-call]
            host.copy_(together, non_blocking=True)
        targets, sources = list(self._whole.values()), [tensors[number] for number in self._whole]
        for number, first, target in self._parts:
            tensor = tensors[number]
            targets.append(target)
            sources.append(tensor.as_strided(target.shape, (1,), tensor.storage_offset() + first))
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for number, inside, target in self._bytes:
            target.copy_(bytes_at(tensors[number], inside), non_blocking=True)

    def finish(self) -> None:
        """Bring what has arrived together to its targets. The devices have made the copies."""
        for _, host, targets in self._small:
            values = _unflatten_dense_tensors(host, targets)  # type: ignore[no-untyped-call]
            torch._foreach_copy_(targets, values)


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the devices, other than the CPU, that hold some of the tensors. One on the device
    "meta" is on another worker."""
    nowhere = {torch.device("cpu"), torch.device("meta")}
    return sorted({tensor.device for tensor in tensors} - nowhere, key=str)


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
    targets: list[Targets] = field(default_factory=list)
    """Where it goes, as long as it is not there."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold_writes(self) -> None:
        """Let each device do what it is given from now on after its copies. The host does not
        wait."""
        for device, end in self.ends:
            torch.get_device_module(device).current_stream(device).wait_event(end)

    def wait(self) -> None:
        """Wait until the copies are made. Any thread may do so."""
        for _, end in self.ends:
            end.synchronize()
        with self._lock:
            while self.targets:
                self.targets.pop().finish()
        self.sources = []


class Streams:
    """One stream for copies on each device that holds some of the state."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def copy(self, tensors: Sequence[torch.Tensor], targets: Targets) -> Copying:
        """Start to copy from tensors to their targets, on the streams for copies."""
        devices = devices_of(tensors)
        with ExitStack() as streams:
            for device in devices:
                module = torch.get_device_module(device)
                if device not in self._streams:
                    self._streams[device] = module.Stream(device=device)
                self._streams[device].wait_stream(module.current_stream(device))
                streams.enter_context(module.stream(self._streams[device]))
            targets.start(tensors)
        ends = [(device, self._streams[device].record_event()) for device in devices]
        return Copying(ends, list(tensors) if ends else [], [targets])


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

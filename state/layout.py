"""Values as bytes: a JSON header and the raw bytes of the tensors, one after the other. No pickle.

model, optimizer, scaler, counters → here → newcomer (over the network), checkpoint (on disk), own successor (revive)

What always holds:
1. The same values give the same bytes, whatever the world's size was.
2. Every length is checked before anything is built, and only tensors and JSON values are built.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

FORMAT = 1


class LayoutError(ValueError):
    """Bytes that are not what their header says."""


@dataclass(frozen=True)
class Packed:
    """Values taken apart: `header` (JSON) describes them, `tensors` carry the bytes."""

    header: bytes
    tensors: list[torch.Tensor]

    @property
    def payload_bytes(self) -> int:
        """The number of bytes of all tensors together."""
        return sum(t.numel() * t.element_size() for t in self.tensors)


def pack(values: Any) -> Packed:
    """Take a tree of dicts, lists, tuples, JSON scalars and dense tensors apart. The tensors are not copied.

    Raises TypeError, with the place in the tree, for anything else.
    """
    tensors: list[torch.Tensor] = []
    described = _describe(values, tensors, "")
    shapes = [{"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for t in tensors]
    return Packed(json.dumps({"format": FORMAT, "tensors": shapes, "values": described}).encode(), tensors)


def _describe(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        tensors.append(value.detach())
        return {"$tensor": len(tensors) - 1}
    if isinstance(value, dict):
        return {"$dict": [[_describe(k, tensors, where), _describe(v, tensors, f"{where}/{k}")] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [_describe(v, tensors, where) for v in value]}
    if isinstance(value, list):
        return [_describe(v, tensors, where) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{where[1:]} holds a {type(value).__name__}, which cannot be kept: only dense tensors, numbers, text "
                    f"and containers of them can")


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes as a flat uint8 tensor on the CPU (a view where that is possible)."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _overlaps(packed: Packed, start: int, stop: int) -> Iterator[tuple[torch.Tensor, slice, slice]]:
    """Yield each tensor with bytes among [start, stop) of the payload, and where: in the tensor, and among those bytes."""
    at = 0
    for tensor in packed.tensors:
        size = tensor.numel() * tensor.element_size()
        lower, upper = max(start, at), min(stop, at + size)
        if lower < upper:
            yield tensor, slice(lower - at, upper - at), slice(lower - start, upper - start)
        at += size


def byte_ranges(packed: Packed, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield, as uint8 tensors, the bytes [start, stop) of the payload."""
    for tensor, inside, _ in _overlaps(packed, start, stop):
        yield byte_view(tensor)[inside]


def copy_range(packed: Packed, start: int, stop: int, out: torch.Tensor) -> None:
    """Copy the bytes [start, stop) of the payload into `out` (uint8, on the CPU), from whatever device they are on."""
    for tensor, inside, among in _overlaps(packed, start, stop):
        out[among].copy_(tensor.contiguous().reshape(-1).view(torch.uint8)[inside], non_blocking=True)


def fill_range(packed: Packed, start: int, piece: torch.Tensor) -> None:
    """Copy bytes (uint8) into the payload, from its byte `start` on: the reverse of `copy_range`, for tensors of `room`."""
    for tensor, inside, among in _overlaps(packed, start, start + piece.numel()):
        tensor.view(-1).view(torch.uint8)[inside] = piece[among]


def outline(header: bytes) -> Packed:
    """Return what a header describes: tensors on the device "meta", which have a type and a shape and no bytes.

    Raises LayoutError.
    """
    try:
        described = json.loads(header)
        shapes, version = described["tensors"], described["format"]
        described["values"]
    except (ValueError, KeyError, TypeError) as error:
        raise LayoutError(f"the header is not one of ours: {error!r}") from error
    if version != FORMAT:
        raise LayoutError(f"the header has format {version}; this version reads format {FORMAT}")
    tensors = []
    for entry in shapes:
        dtype = getattr(torch, str(entry["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise LayoutError(f"the header names a dtype that torch does not have: {entry['dtype']!r}")
        try:
            tensors.append(torch.empty(entry["shape"], dtype=dtype, device="meta"))
        except (RuntimeError, TypeError) as error:
            raise LayoutError(f"the header names an impossible shape: {entry['shape']!r}") from error
    return Packed(header, tensors)


def named_tensors(header: bytes | str) -> list[dict[str, Any]]:
    """Return name (its place in the tree), dtype and shape of each tensor that a header describes, in the bytes' order."""
    described = json.loads(header)
    places = _places(described["values"], "")
    return [{"name": place, **facts} for place, facts in zip(places, described["tensors"], strict=True)]


def tensors_digest(header: bytes) -> str:
    """Return a digest of which tensors a header describes, and in which order; numbers and text are not in it."""
    return hashlib.sha256(json.dumps(named_tensors(header)).encode()).hexdigest()


def _places(described: Any, where: str) -> Iterator[str]:
    if isinstance(described, list):
        for number, value in enumerate(described):
            yield from _places(value, f"{where}/{number}")
    elif isinstance(described, dict) and "$tensor" in described:
        yield where[1:]
    elif isinstance(described, dict) and "$tuple" in described:
        yield from _places(described["$tuple"], where)
    elif isinstance(described, dict):
        for key, value in described["$dict"]:
            yield from _places(key, where)
            yield from _places(value, f"{where}/{key}")


def differing(digests: Mapping[int, str]) -> str:
    """Say which ranks' tensors (rank → `tensors_digest`) differ from those of the first rank given; "" if none do."""
    first = next(iter(digests))
    if not (odd := [str(rank) for rank, digest in digests.items() if digest != digests[first]]):
        return ""
    return (f"the tensors of rank {', '.join(odd)} differ from rank {first}'s (names, order, types, shapes). "
            f"Let the state_dict of each extra give the same tensors in the same order on all workers")


def unpack(packed: Packed) -> Any:
    """Put values together again: the reverse of `pack`. The tensors are not copied."""
    return _build(json.loads(packed.header)["values"], packed.tensors)


def decode(header: bytes, payload: torch.Tensor) -> Any:
    """Build the values from a header and a uint8 payload, which the caller gives away: the tensors are views of it.

    Raises LayoutError.
    """
    outlined, tensors, at = outline(header), [], 0
    if outlined.payload_bytes != payload.numel():
        raise LayoutError(f"the payload has {payload.numel()} bytes, but the header describes {outlined.payload_bytes}")
    for tensor in outlined.tensors:
        size = tensor.numel() * tensor.element_size()
        piece = payload[at : at + size]
        if piece.storage_offset() % tensor.element_size() or piece.data_ptr() % tensor.element_size():
            piece = piece.clone()
        tensors.append(piece.view(tensor.dtype).reshape(tensor.shape))
        at += size
    return unpack(Packed(header, tensors))


def _build(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_build(v, tensors) for v in value]
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        if "$tuple" in value:
            return tuple(_build(v, tensors) for v in value["$tuple"])
        return {_build(k, tensors): _build(v, tensors) for k, v in value["$dict"]}
    return value

"""Values as bytes: a JSON header and the raw bytes of the tensors, one after the other. No pickle.

live state → here → newcomer (over the network), checkpoint (in the store), successor (revive)

What always holds:
1. The same values give the same bytes for every world size.
2. Every length is checked before anything is built, and only tensors and JSON values are built.
3. `outline` checks the tree of a header. A header that it accepts can be unpacked, named and
   decoded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

FORMAT = 1
DEEPEST = 100
"""The most containers in one another. Each has up to 3 levels of JSON; Python parses about 1000."""
MACHINE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""This machine's memory. A header that describes more is refused."""
DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


class LayoutError(ValueError):
    """Bytes that are not what their header describes."""


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
    """Take a tree of dicts, lists, tuples, JSON scalars and dense tensors apart. The tensors are
    not copied.

    Raises TypeError, with the place in the tree, for other values, and for a tree that is deeper
    than DEEPEST.
    """
    tensors: list[torch.Tensor] = []
    described = _describe(values, tensors, "")
    shapes = [{"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
              for t in tensors]
    return Packed(
        json.dumps({"format": FORMAT, "tensors": shapes, "values": described}).encode(), tensors)


def _describe(value: Any, tensors: list[torch.Tensor], where: str, depth: int = 0) -> Any:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        tensors.append(value.detach())
        return {"$tensor": len(tensors) - 1}
    if depth > DEEPEST:
        raise TypeError(
            f"{where[1:][:80]}… holds containers in containers, more than {DEEPEST} deep, "
            f"which cannot be kept")
    depth += 1
    if isinstance(value, dict):
        return {"$dict": [[_describe(k, tensors, where, depth),
                           _describe(v, tensors, f"{where}/{k}", depth)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [_describe(v, tensors, where, depth) for v in value]}
    if isinstance(value, list):
        return [_describe(v, tensors, where, depth) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"{where[1:]} holds a {type(value).__name__}, which cannot be kept: only dense tensors, "
        f"numbers, text and containers of them can")


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes as a flat uint8 tensor on the CPU (a view where that is
    possible)."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _overlaps(packed: Packed, start: int, stop: int) -> Iterator[tuple[torch.Tensor, slice, slice]]:
    """Yield each tensor with bytes among [start, stop) of the payload, and where: in the tensor,
    and among those bytes."""
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
    """Copy the bytes [start, stop) of the payload into `out` (uint8, on the CPU), from any
    device."""
    for tensor, inside, among in _overlaps(packed, start, stop):
        out[among].copy_(tensor.contiguous().reshape(-1).view(torch.uint8)[inside],
                         non_blocking=True)


def fill_range(packed: Packed, start: int, piece: torch.Tensor) -> None:
    """Copy bytes (uint8) into the payload, from its byte `start` on: the reverse of `copy_range`.

    The tensors are those of `LiveState.room`.
    """
    for tensor, inside, among in _overlaps(packed, start, start + piece.numel()):
        tensor.view(-1).view(torch.uint8)[inside] = piece[among]


def outline(header: bytes) -> Packed:
    """Return what a header describes: tensors on the device "meta", which have a type and a shape
    and no bytes.

    Raises LayoutError, also for a header whose values could not be built.
    """
    try:
        described = json.loads(header)
        shapes, version, values = described["tensors"], described["format"], described["values"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LayoutError(f"the header is not one of ours: {error!r}"[:200]) from error
    if version != FORMAT:
        raise LayoutError(f"the header has format {str(version)[:40]}; this version reads format "
                          f"{FORMAT}")
    if not isinstance(shapes, list):
        raise LayoutError("the header has no list of tensors")
    tensors = [_outlined(entry) for entry in shapes]
    _check_tree(values, 0, numbers := count())
    if (used := next(numbers)) != len(tensors):
        raise LayoutError(f"the header describes {len(tensors)} tensors and uses {used}")
    return Packed(header, tensors)


def _outlined(entry: Any) -> torch.Tensor:
    """Return a tensor without bytes. Raises LayoutError."""
    if not isinstance(entry, dict) or not isinstance(shape := entry.get("shape"), list):
        raise LayoutError("the header describes a tensor without a shape")
    name = entry.get("dtype")
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise LayoutError(f"the header names a dtype that torch does not have: {str(name)[:40]!r}")
    try:
        if not all(type(side) is int for side in shape):
            raise TypeError("its sides are not all whole numbers")
        return torch.empty(shape, dtype=dtype, device="meta")
    except (RuntimeError, TypeError, ValueError) as error:
        raise LayoutError(f"the header names an impossible shape: {str(shape)[:80]}") from error


def _check_tree(value: Any, depth: int, numbers: Iterator[int]) -> None:
    """Raise LayoutError unless `_build` can build it and its tensors have the order of `pack`."""
    if depth > DEEPEST + 1:
        raise LayoutError(f"the header has containers in containers, more than {DEEPEST} deep")
    match value:
        case list():
            inner = value
        case {"$tensor": int(number), **others} if not others:
            if type(number) is not int or number != next(numbers):
                raise LayoutError(f"the header uses the tensor {number} out of turn")
            return
        case {"$tuple": list(inner), **others} if not others:
            pass
        case {"$dict": list(pairs), **others} if not others:
            for pair in pairs:
                if not isinstance(pair, list) or len(pair) != 2:
                    raise LayoutError("the header has a dict with an entry that is no pair")
                for member in pair:
                    _check_tree(member, depth + 1, numbers)
                if not _is_key(pair[0]):
                    raise LayoutError("the header has a dict with a list or a dict as key")
            return
        case dict():
            raise LayoutError("the header has an object that is no container of ours")
        case _:
            return
    for member in inner:
        _check_tree(member, depth + 1, numbers)


def _is_key(value: Any) -> bool:
    """True for the key of a dict: no list, no dict, and no tuple that contains one."""
    if isinstance(value, dict):
        return "$tensor" in value or ("$tuple" in value and all(map(_is_key, value["$tuple"])))
    return not isinstance(value, list)


def named_tensors(header: bytes | str) -> list[dict[str, Any]]:
    """Return name (its place in the tree), dtype and shape of each tensor that a header describes,
    in the order of their bytes."""
    described = json.loads(header)
    places = _places(described["values"], "")
    return [{"name": place, **facts}
            for place, facts in zip(places, described["tensors"], strict=True)]


def tensors_digest(header: bytes) -> str:
    """Return a digest of the tensors that a header describes and of their order, without numbers
    and text."""
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
    """Return a sentence on the ranks whose tensors (rank → `tensors_digest`) differ from those of
    the first rank given; "" if none do."""
    first = next(iter(digests))
    if not (odd := [str(rank) for rank, digest in digests.items() if digest != digests[first]]):
        return ""
    return (
        f"the tensors of rank {', '.join(odd)} differ from rank {first}'s (names, order, types, "
        f"shapes). Let the state_dict of each extra give the same tensors in the same order on all "
        f"workers")


def unpack(packed: Packed) -> Any:
    """Put values together again: the reverse of `pack`. The tensors are not copied."""
    return _build(json.loads(packed.header)["values"], packed.tensors)


def decode(header: bytes, payload: torch.Tensor) -> Any:
    """Build the values from a header and a uint8 payload. The tensors are views of the payload, so
    the caller gives it away.

    Raises LayoutError.
    """
    outlined, tensors, at = outline(header), [], 0
    if outlined.payload_bytes != payload.numel():
        raise LayoutError(f"the payload has {payload.numel()} bytes, but the header describes "
                          f"{outlined.payload_bytes}")
    for tensor in outlined.tensors:
        item = tensor.element_size()
        size = tensor.numel() * item
        piece = payload[at : at + size]
        if piece.storage_offset() % item or piece.data_ptr() % item:
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

"""Values as bytes: a JSON header and the raw bytes of the tensors, one after the other. No pickle.

live state → here → newcomer (over the network), checkpoint (in the store), successor (revive)

What always holds:
1. The same values give the same bytes for every world size.
2. Every length is checked before memory is used for it, and only tensors, JSON values and the kinds
   of forms.py are built.
3. `outline` builds the tree of a header once, with tensors that have no bytes. A header that it
   accepts can be unpacked, named and decoded.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy
import torch

from elastic_trainer.state.values.forms import (
    MOST_BITS,
    SCALARS,
    SETS,
    CannotKeep,
    Form,
    build,
    form_of,
    is_named_tuple,
    name_of,
    plain_tensor,
    refusal,
    storage_refusal,
    tensor_form,
    tensor_refusal,
)

FORMAT = 1
DEEPEST = 100  # containers in one another, each of up to 3 levels of JSON; Python parses about 1000
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
    classes: Mapping[str, type] | None = None
    """The classes of named tuples and enumerations that this process knows, by name; None: values
    are only looked at, and such a value is a plain tuple or a name."""
    places: Sequence[str] = ()
    """The keys on the way to each tensor ("/a/b"), if `pack` has made this."""

    @cached_property
    def starts(self) -> list[int]:
        """The place of each tensor's first byte in the payload, and the end of the payload."""
        return list(accumulate((t.numel() * t.element_size() for t in self.tensors), initial=0))

    @property
    def payload_bytes(self) -> int:
        """The number of bytes of all tensors together."""
        return self.starts[-1]


def pack(values: Any, classes: dict[str, type] | None = None, *, learns: bool = False,
         lacks: bool = False) -> Packed:
    """Take a tree of values apart (forms.py has their types). Large tensors are not copied.

    `classes`: the named tuples and enumerations that this process knows by name; with `learns` all
    that the tree has are added. `lacks`: another worker has the bytes of tensors on "meta". Raises
    CannotKeep, with the place, for other values, a tree deeper than DEEPEST or within itself.
    """
    writer = _Writer({} if classes is None else classes, learns, lacks)
    described = writer.describe(values, "")
    shapes = ", ".join([f'{{"dtype": "{str(t.dtype)[6:]}", "shape": {list(t.shape)}}}'
                        for t in writer.tensors])  # json.dumps takes twice as long
    header = f'{{"format": {FORMAT}, "tensors": [{shapes}], "values": {json.dumps(described)}}}'
    return Packed(header.encode(), writer.tensors, classes, writer.places)


class Bare(dict[str, torch.Tensor]):
    """Tensors by name that are copied in place where they are loaded: their bytes are all that is
    written, not the class and the strides of each."""


class _Writer:
    """Describes one tree as JSON values."""

    def __init__(self, classes: dict[str, type], learns: bool, lacks: bool):
        self.tensors: list[torch.Tensor] = []
        self.places: list[str] = []
        self._classes, self._learns, self._lacks = classes, learns, lacks
        self._numbers: dict[int, int] = {}
        """By id: the numbers of the parts that may be changed, in the order of their ends."""
        self._parts: list[Any] = []
        """All, so that no other one gets the id of one that is gone."""
        self._open: set[int] = set()

    def describe(self, value: Any, where: str, depth: int = 0) -> Any:
        """Return the description of a value. A part that is described for the second time has the
        number of its first description, so that it comes back as one object."""
        if type(value) in SCALARS and not (type(value) is int and value.bit_length() > MOST_BITS):
            return value
        if depth > DEEPEST:
            raise CannotKeep(
                f"{where[1:][:80]}… holds containers in containers, more than {DEEPEST} deep, "
                f"which cannot be kept")
        if id(value) in self._open:
            raise CannotKeep(f"{where[1:]} holds a {type(value).__name__} that contains itself, "
                             f"which cannot be kept")
        self._open.add(id(value))
        described = (self._tensor if isinstance(value, torch.Tensor) else self._described)(
            value, where, depth + 1)
        self._open.remove(id(value))
        first = self._numbers.setdefault(id(value), len(self._parts))
        is_second = first < len(self._parts) and not isinstance(value, UNCHANGING)
        self._parts.append(value)
        return {"$same": first, "of": described} if is_second else described

    def _described(self, value: Any, where: str, depth: int) -> Any:
        if type(value) is Bare:
            return {"$dict": [[name, self._bare(value[name], f"{where}/{name}", depth)]
                              for name in value]}
        if type(value) is dict:
            return {"$dict": [[k if type(k) is str else self._key(k, where, depth),
                               self.describe(v, f"{where}/{_text(k)}", depth)]
                              for k, v in value.items()]}
        if type(value) is tuple:
            return {"$tuple": [self.describe(v, where, depth) for v in value]}
        if type(value) is list:
            return [self.describe(v, where, depth) for v in value]
        if (form := form_of(value)) is None:
            raise CannotKeep(f"{where[1:]} holds {refusal(value)}")
        self._know(value, where)
        return self._form(form, where, depth)

    def _form(self, form: Form, where: str, depth: int) -> Any:
        before = len(self.tensors)
        is_leaf = isinstance(form.main, torch.Tensor)
        main = (self._bare if is_leaf else self.describe)(form.main, where, depth)
        if form.kind in SETS:
            if len(self.tensors) > before:
                raise CannotKeep(f"{where[1:]} holds a {form.kind} of tensors. Keep a list")
            main = sorted(main, key=json.dumps)
        return {"$is": form.kind, "of": main, "with": self.describe(form.more, where, depth)}

    def _tensor(self, value: torch.Tensor, where: str, depth: int) -> Any:
        if (why := tensor_refusal(value)) and not (value.is_meta and self._lacks):
            raise CannotKeep(f"{where[1:]} holds {why}")
        form = tensor_form(value)
        return self._form(form, where, depth) if form else self._bytes_of(value, where)

    def _bare(self, value: torch.Tensor, where: str, depth: int) -> Any:
        if (why := storage_refusal(value)) and not (value.is_meta and self._lacks):
            raise CannotKeep(f"{where[1:]} is {why}")
        self._parts.append(value)
        return self._bytes_of(value, where)

    def _bytes_of(self, value: torch.Tensor, where: str) -> Any:
        self.places.append(where)
        self.tensors.append(plain_tensor(value))
        return {"$tensor": len(self.tensors) - 1}

    def _key(self, key: Any, where: str, depth: int) -> Any:
        if isinstance(key, torch.Tensor):
            raise CannotKeep(f"{where[1:]} holds a dict with a tensor as key, which would come "
                             f"back as another one. Use its name")
        return self.describe(key, where, depth)

    def _know(self, value: Any, where: str) -> None:
        """Learn the class of a named tuple or of an enumeration. Raises CannotKeep if there was
        none when the loop began: a worker that joins would not know it."""
        if not (isinstance(value, enum.Enum) or is_named_tuple(value)):
            return
        kind = type(value)
        if self._learns:
            self._classes.setdefault(name_of(kind), kind)
        if self._classes.get(name_of(kind)) is not kind:
            raise CannotKeep(
                f"{where[1:]} holds a {kind.__qualname__}, and no object in the state held one of "
                f"this class when the loop began, so a worker that joins would not know it. Let "
                f"the state hold one from the beginning, or keep plain values")


def _text(key: Any) -> str:
    return "a large number" if type(key) is int and key.bit_length() > MOST_BITS else str(key)


UNCHANGING = (tuple, bytes, complex, int, float, str, range, slice, frozenset, enum.Enum,
              numpy.generic, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""What nobody can change: whether two of them are one object makes no difference."""


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes as a flat uint8 tensor on the CPU (if possible, a view)."""
    return flat_bytes(plain_tensor(tensor).cpu())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a plain tensor, on its device (a view where that is possible)."""
    flat = tensor.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a slice of one element counts as contiguous, whatever its stride
        flat = flat.as_strided(flat.shape, (1,), flat.storage_offset())
    return flat.view(torch.uint8)


def bytes_at(tensor: torch.Tensor, inside: slice) -> torch.Tensor:
    """Return some of the bytes of a plain tensor, on its device. Of a tensor whose dimensions lie
    in another order, no more than the rows that have these bytes are copied on the device."""
    if tensor.is_contiguous():
        return flat_bytes(tensor).narrow(0, inside.start, inside.stop - inside.start)
    row = tensor.numel() // tensor.shape[0] * tensor.element_size()
    first, last = inside.start // row, -(-inside.stop // row)
    rows = tensor.narrow(0, first, last - first).clone(memory_format=torch.contiguous_format)
    return flat_bytes(rows).narrow(0, inside.start - first * row, inside.stop - inside.start)


def overlaps(packed: Packed, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield the number of each tensor with bytes among [start, stop) of the payload, and where: in
    the tensor, and among those bytes."""
    number = bisect_right(packed.starts, start) - 1
    while number < len(packed.tensors) and (at := packed.starts[number]) < stop:
        lower, upper = max(start, at), min(stop, packed.starts[number + 1])
        if lower < upper:
            yield number, slice(lower - at, upper - at), slice(lower - start, upper - start)
        number += 1


def byte_ranges(packed: Packed, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield, as uint8 tensors on the CPU, the bytes [start, stop) of the payload."""
    for number, inside, _ in overlaps(packed, start, stop):
        yield bytes_at(packed.tensors[number], inside).cpu()


def fill_range(packed: Packed, start: int, piece: torch.Tensor) -> None:
    """Copy bytes (uint8) into the payload, from its byte `start` on, where it has memory."""
    for number, inside, among in overlaps(packed, start, start + piece.numel()):
        if not packed.tensors[number].is_meta:
            packed.tensors[number].view(-1).view(torch.uint8)[inside] = piece[among]


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
    packed = Packed(header, [_outlined(entry) for entry in shapes])
    _Reader(packed).whole(values)
    return packed


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
    elif isinstance(described, dict) and "of" in described:
        yield from _places(described["of"], where)
        yield from _places(described.get("with"), where)
    elif isinstance(described, dict):
        for key, value in described["$dict"]:
            yield from _places(key, where)
            yield from _places(value, f"{where}/{key}")


def differing(digests: Mapping[int, str]) -> str:
    """Return a sentence on the ranks whose tensors (rank → `tensors_digest`) differ from those of
    the first rank given; "" if none do."""
    first = next(iter(digests))
    if not (wrong := [str(rank) for rank, digest in digests.items() if digest != digests[first]]):
        return ""
    return (
        f"the tensors of rank {', '.join(wrong)} differ from rank {first}'s (names, order, types, "
        f"shapes). Let the state_dict of each extra give the same tensors in the same order on all "
        f"workers")


def unpack(packed: Packed) -> Any:
    """Put values together again: the reverse of `pack`. The tensors are not copied.

    Raises LayoutError for a value of a class that this process does not know.
    """
    return _Reader(packed).whole(json.loads(packed.header)["values"])


def decode(header: bytes, payload: torch.Tensor, classes: Mapping[str, type] | None = None) -> Any:
    """Build the values from a header and a uint8 payload. The tensors are views of the payload, so
    the caller gives it away. `classes` are those of `Packed`.

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
    return unpack(Packed(header, tensors, classes))


def to_text(values: Any) -> str:
    """Return values as one text, for an exchange of texts. Raises CannotKeep."""
    packed = pack(values)
    payload = b"".join(byte_view(tensor).numpy().tobytes() for tensor in packed.tensors)
    return f"{packed.header.decode()}\n{base64.b64encode(payload).decode()}"


def from_text(text: str) -> Any:
    """Return the values of a text of `to_text`, with memory of their own."""
    header, payload = text.split("\n")
    data = numpy.frombuffer(bytearray(base64.b64decode(payload)), dtype=numpy.uint8)
    return decode(header.encode(), torch.from_numpy(data))


class _Reader:
    """Builds the values of one description. Raises LayoutError for one that `pack` cannot have
    made."""

    def __init__(self, packed: Packed):
        self._packed = packed
        self._parts: list[Any] = []
        self._used = 0

    def whole(self, values: Any) -> Any:
        """Return all values, which have all tensors, in their order."""
        built = self._build(values, 0)
        if self._used != (there := len(self._packed.tensors)):
            raise LayoutError(f"the header describes {there} tensors and uses {self._used}")
        return built

    def _build(self, value: Any, depth: int) -> Any:
        if not isinstance(value, (list, dict)):
            return value
        if depth > DEEPEST + 1:
            raise LayoutError(f"the header has containers in containers, more than {DEEPEST} deep")
        match value:
            case {"$same": int(number), "of": main, **others} if not others:
                self._build(main, depth + 1)
                if not 0 <= number < len(self._parts):
                    raise LayoutError("the header names a part that is not there yet")
                return self._parts[number]
        self._parts.append(built := self._built(value, depth + 1))
        return built

    def _built(self, value: Any, depth: int) -> Any:
        match value:
            case list():
                return [self._build(one, depth) for one in value]
            case {"$tensor": int(number), **others} if not others:
                return self._tensor(number)
            case {"$tuple": list(inner), **others} if not others:
                return tuple(self._build(one, depth) for one in inner)
            case {"$dict": list(pairs), **others} if not others:
                return self._dict(pairs, depth)
            case {"$is": str(kind), "of": main, "with": more, **others} if not others:
                form = Form(kind, self._build(main, depth), self._build(more, depth))
                try:
                    return build(form, self._packed.classes)
                except MemoryError:
                    raise
                except Exception as error:  # what the writer cannot have written
                    raise LayoutError(f"a {kind[:40]} cannot be built: {error!r}"[:300]) from error
            case _:
                raise LayoutError("the header has an object that is no container of ours")

    def _tensor(self, number: int) -> torch.Tensor:
        if type(number) is not int or number != self._used or number >= len(self._packed.tensors):
            raise LayoutError(f"the header uses the tensor {number} out of turn")
        self._used += 1
        return self._packed.tensors[number]

    def _dict(self, pairs: list[Any], depth: int) -> dict[Any, Any]:
        made = {}
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise LayoutError("the header has a dict with an entry that is no pair")
            key = self._build(pair[0], depth)
            try:
                hash(key)
            except TypeError as error:
                raise LayoutError("the header has a dict with a list or a dict as key") from error
            made[key] = self._build(pair[1], depth)
        return made

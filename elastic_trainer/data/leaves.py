"""The values of a sample or a batch, as digests by which two processes compare them.

dataset, collate → here → proof (wire/proof.py): kind, shape, digest, and a mark for each element

What always holds:
1. Equal bits have equal digests, whatever process, object or address they are in.
2. Each sample is drawn twice in one process, with the same random state. A value that differs
   between the two is random by intent: it has no digest (None).
3. It reads at most MOST_BYTES of a value, spread evenly. Larger values are rare in a sample, and
   the proof is to cost milliseconds.

What it does not do: look into objects without attributes that it knows. Of those it takes the
type. It reads at most MOST_WALKED values of a sample.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import numpy
import torch

from elastic_trainer.config import ConfigError
from elastic_trainer.data.batches import attributes, fetch
from elastic_trainer.wire.proof import MARK, Leaf, Values

MOST_BYTES = 4 << 20
"""Of one value; hashing it takes 5 ms."""
MOST_MARKED_BYTES = 16 << 20
"""Of a larger value no position is named."""
WINDOWS = 1024
MOST_LEAVES = 64
"""The values of a sample that have a name. The others are taken together."""
MOST_WALKED = 4096
"""All values of a sample that are read."""
MOST_MARKS, MARKS_EACH = 2048, 1024
"""For all values of a sample, and for one of them."""
DEEPEST = 8
OTHERS = "(others)"
WRITTEN = ("datetime", "decimal", "fractions", "uuid", "pathlib")
"""The modules of types that are compared by their texts."""


def drawn_twice(dataset: Any, number: int, seed: Callable[[], None]) -> Values:
    """Return the values of a sample; None for those that differ when it is drawn again."""
    def draw() -> dict[str, Leaf]:
        found: list[dict[str, Leaf]] = []
        fetch(dataset, numpy.array([number]), lambda samples: found.append(leaves(samples[0])),
              lambda *_: seed())
        return found[0]

    return steady(draw(), draw())


def steady(one: Values, other: Values) -> Values:
    """Return the values of two draws: None for those that differ."""
    return {path: one.get(path) if one.get(path) == other.get(path) else None
            for path in {**one, **other}}


def leaves(value: Any) -> dict[str, Leaf]:
    """Return the values in a sample or a batch by their paths: "image", "0", "labels.2"."""
    found = list(islice(_walk(value, "", DEEPEST), MOST_WALKED))
    sizes = sorted(min(len(elements), MARKS_EACH) for _, _, _, elements in found[:MOST_LEAVES])
    most, left = MARKS_EACH, MOST_MARKS
    for place, size in enumerate(sizes):  # small values have a mark for each element
        share = left // (len(sizes) - place)
        if size > share:
            most = share
            break
        left -= size
    named = {path: Leaf(kind, shape, _digest(elements), _marks(elements, most) if shape else "")
             for path, kind, shape, elements in found[:MOST_LEAVES]}
    if others := found[MOST_LEAVES:]:
        text = repr([(path, kind, shape, _digest(elements))
                     for path, kind, shape, elements in others])
        named[OTHERS] = Leaf(f"{len(others)} values", (), _digest(_of_text(text)))
    return named


_Found = tuple[str, str, tuple[int, ...], numpy.ndarray]
"""Path, kind, shape, and the elements as an array of rows of bytes or of whole numbers."""


def _walk(value: Any, path: str, deepest: int) -> Iterator[_Found]:
    try:
        array = _array(value)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        kind = f"a {type(value).__name__} whose bytes cannot be read"
        is_meta = isinstance(value, torch.Tensor) and value.is_meta
        raise ConfigError(
            f"the field `{path or '(all of it)'}` of a sample or a batch is "
            f"{'a tensor on the device meta, which has no values' if is_meta else kind} "
            f"({str(error)[:200]}). So no worker can prove that it has the run's data. Let the "
            f"dataset and collate return tensors on the CPU, arrays, numbers and texts."
        ) from error
    if array is not None:
        kind, elements = array
        yield path, kind, elements.shape, elements.reshape(-1)
        if kind == "image P":
            inner = f"{path}.palette".removeprefix(".")
            yield from _walk(value.getpalette(), inner, deepest - 1)
    elif isinstance(value, (bytes, bytearray)):
        yield path, "bytes", (len(value),), numpy.frombuffer(bytes(value), numpy.uint8)
    elif isinstance(value, str):
        yield path, "text", (len(value),), numpy.frombuffer(
            value.encode("utf-32-le", "surrogatepass"), numpy.uint32)
    elif value is None or isinstance(value, (bool, int, float, complex)):
        yield path, type(value).__name__, (), _of_text(repr(value))
    elif isinstance(value, (set, frozenset)):
        yield path, "set", (), _of_text(repr(sorted(repr(leaves(one)) for one in value)))
    elif deepest == 0 or isinstance(value, type) or callable(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        yield path, "object", (), _of_text(name)
    elif type(value).__module__ in WRITTEN or isinstance(value, range):
        yield path, type(value).__qualname__, (), _of_text(repr(value))
    else:
        is_empty = True
        for name, part in _parts(value):
            is_empty = False
            yield from _walk(part, f"{path}.{name}" if path else name, deepest - 1)
        if is_empty:
            yield path, type(value).__qualname__, (), _of_text("")


def _array(value: Any) -> tuple[str, numpy.ndarray] | None:
    """Return kind and elements of a tensor, an array, an image, or a list of numbers or texts."""
    if isinstance(value, torch.Tensor):
        if value.is_nested or (value.layout != torch.strided and value.device.type != "meta"):
            return None
        return _of_tensor(value)
    if isinstance(value, numpy.ma.MaskedArray):
        return None
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        array = numpy.asarray(value)
        if array.dtype.itemsize == 0:  # empty texts, or no fields
            return str(array.dtype), numpy.zeros(array.shape, numpy.uint8)
        return None if array.dtype.hasobject else (str(array.dtype), array)
    if all(hasattr(type(value), name) for name in ("tobytes", "mode", "size")):  # Pillow
        return f"image {value.mode}", numpy.asarray(value)
    if isinstance(value, (list, tuple)) and value and not hasattr(value, "_fields"):
        kind = type(value[0])
        if kind in (bool, int, float) and all(type(one) is kind for one in value):
            if kind is int and any(not -2**63 <= one < 2**63 for one in value):
                return None
            dtype = {bool: "bool", int: "int64", float: "float64"}[kind]
            return f"list of {kind.__name__}", numpy.array(value, dtype)
        if kind is str and all(type(one) is str for one in value):
            sums = (hashlib.blake2b(one.encode(errors="surrogatepass"), digest_size=8).digest()
                    for one in value)
            return "list of str", numpy.frombuffer(b"".join(sums), numpy.uint64)
    return None


def _of_tensor(tensor: torch.Tensor) -> tuple[str, numpy.ndarray]:
    kind = str(tensor.dtype).removeprefix("torch.")
    whole = tensor.detach().cpu()
    if whole.is_quantized:
        whole = whole.int_repr()
    flat = whole.resolve_conj().resolve_neg().contiguous().reshape(-1)
    rows = flat.view(torch.uint8).numpy()
    words = {1: numpy.uint8, 2: numpy.uint16, 4: numpy.uint32, 8: numpy.uint64}.get(
        flat.element_size(), numpy.dtype((numpy.void, flat.element_size())))
    return kind, rows.view(words).reshape(tuple(whole.shape))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values inside of a value, by their names."""
    if isinstance(value, torch.Tensor):  # sparse or nested
        yield from inner_tensors(value).items()
    elif isinstance(value, numpy.ma.MaskedArray):
        yield from (("data", value.data), ("mask", numpy.ma.getmaskarray(value)))
    elif isinstance(value, Mapping):
        yield from ((str(key), value[key]) for key in value)
    elif is_dataclass(value):
        yield from ((one.name, getattr(value, one.name, None)) for one in fields(value))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (list, tuple, deque)):
        yield from ((str(number), one) for number, one in enumerate(value))
    elif isinstance(value, numpy.ndarray):  # of objects
        yield from ((str(number), one) for number, one in enumerate(value.reshape(-1).tolist()))
    else:
        yield from sorted(attributes(value).items())


def inner_tensors(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the strided tensors that a nested or sparse one is made of, by name; {}: it is
    strided itself, or its bytes cannot be read."""
    value = value.detach()
    if value.is_nested:
        parts = value.unbind()
        return {"values": torch.cat([part.reshape(-1) for part in parts] or [torch.empty(0)]),
                "sizes": torch.tensor([list(part.shape) for part in parts])}
    if value.layout == torch.strided or value.device.type == "meta":
        return {}
    if value.layout == torch.sparse_coo:
        whole = value.coalesce()
        return {"indices": whole.indices(), "values": whole.values()}
    return {"dense": value.to_dense()}


def _of_text(text: str) -> numpy.ndarray:
    return numpy.frombuffer(text.encode(errors="surrogatepass"), numpy.uint8)


def _bytes(elements: numpy.ndarray) -> numpy.ndarray:
    return numpy.ascontiguousarray(elements).reshape(-1).view(numpy.uint8)


def _digest(elements: numpy.ndarray) -> str:
    data = _bytes(elements)
    if data.nbytes > MOST_BYTES:
        length = MOST_BYTES // WINDOWS
        starts = numpy.linspace(0, data.nbytes - length, WINDOWS).astype(numpy.int64)
        data = numpy.concatenate([data[start:start + length] for start in starts])
    return hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()


def _marks(elements: numpy.ndarray, most: int) -> str:
    """Return 12 bits of each block of elements, as text."""
    count = len(elements)
    blocks = min(count, most)
    if not blocks or elements.nbytes > MOST_MARKED_BYTES:
        return ""
    data, size = _bytes(elements), -(-count // blocks) * elements.dtype.itemsize
    sums = (zlib.crc32(data[start:start + size].data) for start in range(0, len(data), size))
    return "".join(MARK[one >> 26] + MARK[one >> 20 & 63] for one in sums)

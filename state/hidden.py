"""Whether an object has changed whose value cannot be kept: an iterator, a generator, an array of
objects.

attributes.py → here → the user's error

What it does not do: see into code (a closure), tensors, and objects without attributes that have no
bytes and cannot be reduced.
"""

from __future__ import annotations

import types
import warnings
import zlib
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy

from elastic_trainer.state.foreign import PLAIN, fields, is_code

MOST_PARTS, DEEPEST = 1000, 6
"""The parts of a container, and the containers in one another, that are looked at."""


def mark(value: Any) -> str:
    """Return a text that is another one when an object has changed."""
    return "/".join(_texts(value, DEEPEST))


def _texts(value: Any, depth: int) -> Iterator[str]:
    if type(value) in PLAIN or isinstance(value, numpy.generic):
        yield repr(value)
    elif depth > 0 and not is_code(value):
        yield type(value).__name__
        yield from _inner(value, depth - 1)


def _inner(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, types.GeneratorType):
        yield from _texts((value.gi_frame and value.gi_frame.f_lasti,
                           value.gi_frame and dict(value.gi_frame.f_locals)), depth)
    elif isinstance(value, dict):
        for pair in islice(value.items(), MOST_PARTS):
            yield from _texts(pair, depth)
    elif isinstance(value, (list, tuple, deque)):
        for one in islice(value, MOST_PARTS):
            yield from _texts(one, depth)
    elif isinstance(value, (set, frozenset)):
        yield from sorted("/".join(_texts(one, depth)) for one in islice(value, MOST_PARTS))
    elif isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        yield from _texts(value.reshape(-1)[:MOST_PARTS].tolist(), depth)
    elif found := fields(value):
        yield from _texts(found, depth)
    else:
        yield from _bytes_of(value, depth)


def _bytes_of(value: Any, depth: int) -> Iterator[str]:
    """Yield what an object without attributes has in its memory, or is made again of."""
    if hasattr(value, "tobytes") and not hasattr(value, "untyped_storage"):
        yield str(zlib.crc32(value.tobytes()))
    elif hasattr(value, "__next__"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # itertools: deprecated in Python 3.12
                reduced = value.__reduce__()
        except Exception:
            reduced = repr(value)
        yield from _texts(reduced, depth)

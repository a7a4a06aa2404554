"""Plain values: numbers, texts, truth values, None, and tuples, lists and dicts of these.

attributes of modules → here → whether they are plain, and whether two of them are equal
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import numpy

MOST_VALUES = 1000
DEEPEST = 5
SCALARS = (bool, int, float, str, type(None))
Key = TypeVar("Key", bound=Hashable)


def is_plain(value: Any) -> bool:
    """Return whether a value is followed: a number, text, truth value, None, or their container."""
    return is_scalar(value) or (
        type(value) in (tuple, list, dict) and 0 <= _room(value, MOST_VALUES, DEEPEST))


def is_scalar(value: Any) -> bool:
    """Return whether a value is a number (also one of numpy), a text, a truth value or None."""
    return type(value) in SCALARS or (
        isinstance(value, numpy.generic) and value.dtype.kind in "biuf")


def _room(value: Any, room: int, depth: int) -> int:
    """Return how much of the room for values is left after a container; -1: it is too large, too
    deep, or holds another kind of value."""
    if is_scalar(value):
        return room - 1
    is_dict = type(value) is dict
    if depth == 0 or room <= 0 or not (is_dict or type(value) in (tuple, list)):
        return -1
    if is_dict and not all(type(key) in (str, int) for key in value):
        return -1
    for one in value.values() if is_dict else value:
        if (room := _room(one, room, depth - 1)) < 0:
            return -1
    return room


def is_size(value: Any) -> bool:
    """Return whether a value may be a size, or a table of sizes: whole numbers and None alone."""
    if isinstance(value, dict):
        return all(is_size(part) for pair in value.items() for part in pair)
    if isinstance(value, (tuple, list)):
        return all(map(is_size, value))
    return value is None or type(value) is int


def is_same(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal. A NaN equals itself, and 1 equals 1.0, as in a
    quick look (`_Places`)."""
    return bool(number_of(one) == number_of(other))


def number_of(value: Any) -> Any:
    """Return a plain value with one form for equal numbers."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(number_of, value))
    if isinstance(value, dict):
        return {key: number_of(one) for key, one in value.items()}
    value = value.item() if isinstance(value, numpy.generic) else value
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value if value == value else {"nan"}


def keys_that_differ(one: Mapping[Key, Any], other: Mapping[Key, Any]) -> set[Key]:
    """Return the keys whose values are not equal, or which one of the two has not."""
    if one == other:
        return set()
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}

"""Attributes of a model's modules that are no plain values: a tensor that is no buffer, a set, an
enumeration, an array, an object with settings.

model → here → vote (a checksum), checkpoint, newcomer

What always holds:
1. Followed are attributes that held such a value when the model was built. One that the user's code
   changes between two steps is part of the state from then on, with its exact type (forms.py). If
   it cannot be kept, the next step raises RuntimeError with its name and the remedy.
2. What a batch or an evaluation changes is a cache: it is no part of the state, and nothing puts it
   back.
3. A model without such attributes costs nothing. A tensor is compared by its identity and its
   version, and an array of more than MOST_BYTES by a sample of its elements.

4. An attribute that was None or a plain value, or was not there, is followed from the moment at
   which the script sets it to such a value between two steps (module_attributes.py).

What it does not do: follow objects that hold modules or tools of a process, callable objects of
installed packages, private attributes of objects without a property, and writes to `tensor.data`.
training/checks/program.py has hooks and methods.
"""

from __future__ import annotations

import copy
import enum
import functools
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import numpy
import torch

from elastic_trainer.state.values.forms import CannotKeep, as_built
from elastic_trainer.state.values.layout import UNCHANGING, byte_ranges, pack
from elastic_trainer.state.values.nodes import fields, is_code

MOST_BYTES = 1 << 16
"""Of an array, which are read at each step's begin and end."""
MOST_KEPT_BYTES = 16 << 20
"""Of an attribute: of each there is a copy as it was built."""
MOST_PARTS, DEEPEST = 10_000, 6
SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype})
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
WRITTEN = ("decimal", "fractions", "datetime", "uuid", "pathlib")
"""The modules of types that are compared by their texts."""


OF_MODELS: WeakValueDictionary[int, OtherAttributes] = WeakValueDictionary()
"""By the id of the model: an evaluation has the model alone."""


Place = tuple[dict[str, Any], str]
"""A dict of attributes, and the name of one of them."""
GONE = object()
"""The value of an attribute that a model did not have when it was built."""


class _NotFollowed(Exception):
    """A value that may change without a change of what is trained."""


class _Same:
    """A reference that equals itself alone."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


class OtherAttributes:
    """Attributes by their paths, each with the dict that it stands in. `own`: the parameters,
    buffers and modules, which the state keeps elsewhere."""

    def __init__(self, model: torch.nn.Module, places: Mapping[str, Place],
                 own: Iterable[Any], find: Callable[[str], Place | None]):
        self._own, seen = frozenset(map(id, own)), set[int]()
        self._at, self._find = dict[str, Place](), find
        self._caches = set[str]()
        """What batches and evaluations have changed."""
        self._moved = set[str]()
        """What the user's code has changed between two steps."""
        self._built = dict[str, Any]()
        """Copies of the values that can be kept."""
        self.classes = dict[str, type]()
        """The classes of their named tuples and enumerations."""
        for path, (holder, name) in places.items():
            value = holder[name]
            is_second = id(value) in seen and not isinstance(value, UNCHANGING)
            seen.add(id(value))
            if is_second or self._look(value) is None:
                continue
            self._at[path] = (holder, name)
            if not self._refusal(path, learns=True):
                self._built[path] = copy.deepcopy(value)
        self._ended = self._looks()
        self._began: dict[str, Any] | None = None
        self._has_begun = False
        self._checksum: int | None = None
        self.registered: Callable[[], Iterable[Any]] = tuple
        """Returns the objects of the option state."""
        self._device = next((one.device for one in model.parameters()), torch.device("cpu"))
        OF_MODELS[id(model)] = self

    def _looks(self) -> dict[str, Any]:
        return {path: self._look(holder.get(name)) for path, (holder, name) in self._at.items()
                if path not in self._caches}

    def _look(self, value: Any) -> Any:
        try:
            return self._seen(value, DEEPEST)
        except Exception:  # an object may do anything in its attributes
            return None

    def _seen(self, value: Any, depth: int) -> Any:
        """Return a tuple that equals another one if the value is the same."""
        kind = type(value)
        if kind in SCALARS:
            return kind, value if value == value else "nan"
        if id(value) in self._own or depth == 0:
            raise _NotFollowed
        if isinstance(value, torch.Tensor):
            return _Same(value), 0 if value.is_inference() else value._version
        if isinstance(value, numpy.ndarray):
            return kind, value.shape, str(value.dtype), _sum_of(value)
        if isinstance(value, FUNCTIONS):
            return kind, value
        if isinstance(value, functools.partial):
            return kind, *(self._seen(one, depth - 1)
                           for one in (value.func, value.args, value.keywords))
        if isinstance(value, (enum.Enum, numpy.generic)) or kind.__module__ in WRITTEN:
            return kind, repr(value)
        if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            return self._seen_container(value, depth)
        if isinstance(value, (str, int, float, bytes)):  # a subclass
            return kind, repr(value)
        return kind, self._seen_object(value, depth)

    def _seen_container(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if len(value) > MOST_PARTS:
            raise _NotFollowed
        if isinstance(value, (set, frozenset)):
            return kind, frozenset(value)
        if isinstance(value, dict):
            return (kind, *((key, self._seen(one, depth - 1)) for key, one in value.items()))
        if SCALARS.issuperset(map(type, value)):
            return kind, tuple(value), tuple(map(type, value))
        return (kind, *(self._seen(one, depth - 1) for one in value))

    def _seen_object(self, value: Any, depth: int) -> Any:
        kind = type(value)
        root = kind.__module__.partition(".")[0]
        if (is_code(value) or root in ("torch", "elastic_trainer")
                or root in sys.stdlib_module_names and root != "__main__"
                or isinstance(value, torch.nn.Module)
                or callable(value) and is_installed(kind.__module__)):
            raise _NotFollowed
        found = {name: one for name, one in fields(value).items()
                 if not name.startswith("_")
                 or isinstance(getattr(kind, name.lstrip("_"), None), property)}
        if not found:
            raise _NotFollowed
        return {name: self._seen(one, depth - 1) for name, one in found.items()}

    # --- a step's life ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Note what has changed since the last step's end: the user's code has changed it."""
        self.note()
        self._began, self._has_begun = self._ended, True

    def note(self) -> None:
        """Note what the user's code has changed since a step's end. What it has changed before the
        first step can be refused by nobody: a worker that joins runs that code, too."""
        if self._began is not None or not self._at:
            return
        now = self._looks()
        moved = {path for path in _differing(self._ended, now)
                 if self._has_begun or not self._refusal(path)}
        if moved:
            self._moved, self._checksum = self._moved | moved, None
        self._ended = now

    def follow(self, path: str, built: Mapping[str, Any]) -> None:
        """Follow an attribute that the user's code has set between two steps. It was a plain value
        when the model was built (`built`), or was not there."""
        if path not in self._at and (place := self._find(path)):
            self._at[path] = place
            self._built[path] = copy.deepcopy(built.get(path, GONE))
            self._ended[path] = self._look(place[0].get(place[1]))
            self._moved.add(path)
            self._checksum = None

    def end(self, *, evaluated: bool = False) -> None:
        """Note what has changed since the step's begin, or since `note` was called before an
        evaluation: a cache."""
        before = self._ended if evaluated else self._began
        if before is not None:
            self._ended = self._looks()
            if changed := _differing(before, self._ended):
                self._caches, self._moved = self._caches | changed, self._moved - changed
                self._checksum = None
            self._began = None

    def check(self) -> None:
        """Raise RuntimeError if something that cannot be kept has changed."""
        registered = set(map(id, self.registered())) if self._moved else ()
        for path in sorted(self._moved):
            holder, name = self._at[path]
            if id(holder.get(name)) not in registered and (why := self._refusal(path)):
                raise RuntimeError(
                    f"the attribute {path} of the model was changed after a step, and a worker "
                    f"that joins, or a resumed run, would not have the change. It is {why}. Keep a "
                    f"tensor as a buffer (register_buffer), numbers and texts as attributes, in a "
                    f"dict or in a dataclass, and an object that has state_dict() in the option "
                    f"state (state={{...}}).")

    def _refusal(self, path: str, *, learns: bool = False) -> str:
        """Return why an attribute cannot be kept; "": it can."""
        holder, name = self._at[path]
        if name not in holder:
            return "gone"
        if not learns and path not in self._built:
            return f"a {type(holder[name]).__name__} that cannot be kept"
        try:
            packed = pack({path: holder[name]}, self.classes, learns=learns)
        except CannotKeep as error:
            return str(error).partition(" holds ")[2] or str(error)
        return ("" if packed.payload_bytes + len(packed.header) <= MOST_KEPT_BYTES else
                f"a value of more than {MOST_KEPT_BYTES} bytes")

    # --- as values --------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """Return what the user's code has changed, by path (nothing is copied)."""
        if self._has_begun:
            self.note()
        return {path: self._at[path][0][self._at[path][1]] for path in sorted(self._moved)
                if not self._refusal(path)}

    def texts(self) -> dict[str, str]:
        """Return these values as short texts."""
        return {path: repr(value)[:80] for path, value in self.values().items()}

    def checksum(self) -> int:
        """Return 32 bits of these values."""
        if self._checksum is None:
            found = 0
            if self._moved:
                packed = pack(self.values(), dict(self.classes))
                found = zlib.crc32(packed.header)
                for part in byte_ranges(packed, 0, packed.payload_bytes):
                    found = zlib.crc32(part.numpy().data, found)
            self._checksum = found
        return self._checksum

    def misfit(self, values: Mapping[str, Any]) -> str:
        """Return why these values are not of this model; "": they are."""
        bad = [path for path in values if path not in self._built and not self._find(path)]
        return (f"the attributes {bad[:5]} were changed there, but this model has no such ones"
                if bad else "")

    def load(self, values: Mapping[str, Any]) -> None:
        """Take over the values; all others are as they were built."""
        if self._has_begun:
            self.note()
        for path in self._moved & self._built.keys() - values.keys():
            _set(*self._at[path], copy.deepcopy(self._built[path]))
        for path, value in values.items():
            if path not in self._at and (place := self._find(path)):
                self._at[path] = place
                self._built[path] = copy.deepcopy(place[0].get(place[1], GONE))
                value = value.to(self._device) if isinstance(value, torch.Tensor) else value
            _set(*self._at[path], value)
        self._moved, self._checksum = set(values), None
        self._caches -= values.keys()
        self._ended, self._began = self._looks(), None


@functools.cache
def is_installed(module: str) -> bool:
    """True for the modules of packages: their callable objects (tokenizers) keep caches."""
    return "site-packages" in str(getattr(sys.modules.get(module), "__file__", ""))


@contextmanager
def others_of_evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Let an evaluation change attributes: these are caches."""
    others = OF_MODELS.get(id(model))
    if others:
        others.note()
    try:
        yield
    finally:
        if others:
            others.end(evaluated=True)


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {path for path in one.keys() & other.keys() if not _are_same(one[path], other[path])}


def _are_same(one: Any, other: Any) -> bool:
    """Return whether two looks are the same. An object may have got more attributes (caches)."""
    if one is other or one == other:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return all(name in other and _are_same(part, other[name]) for name, part in one.items())
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return False


def _sum_of(array: numpy.ndarray) -> int:
    if array.dtype.hasobject:
        raise _NotFollowed
    flat = array.reshape(-1) if array.nbytes <= MOST_BYTES else array.ravel()[
        ::-(-array.nbytes // MOST_BYTES)]
    return zlib.crc32(numpy.ascontiguousarray(flat).view(numpy.uint8).data)


def _set(holder: dict[str, Any], name: str, value: Any) -> None:
    was = holder.get(name)
    if value is GONE:
        holder.pop(name, None)
        return
    value = as_built(was, value)
    if (isinstance(was, torch.Tensor) and isinstance(value, torch.Tensor)
            and was.shape == value.shape and was.dtype == value.dtype):
        with torch.no_grad():
            was.copy_(value)  # others may hold the same tensor
    else:
        holder[name] = value

"""What an object of the user's holds in its attributes, as a tree of values that can be kept.

attributes of an optimizer or a module → Walk → layout (bytes) → Filling (filling.py) → the
same object in another process

A node of the tree is a number, a text, a bool or None as it is, or a list that begins with the kind
of the node. What always holds:
1. One object that stands in two places is one object again, and a tensor that is a view of another
   one is a view again. Parameters, modules and what the state keeps anyway (`kept`) go by name.
2. An object of a class that is not Python's, torch's or numpy's own container is never made, only
   filled: there must be one of its class in the same place.

What it does not do: decide which attributes are kept (attributes.py).
"""

from __future__ import annotations

import functools
import random
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import numpy
import torch
from torch.utils.weak import WeakIdKeyDictionary

from elastic_trainer.state.values.forms import factory_of

MISSING = object()
"""Stands for a place at which there is nothing."""
LEFT = ["left"]
"""The node of a value that is not kept: code, or a tool such as a lock or a stream."""
DEEPEST_OBJECTS, DEEPEST = 4, 30
"""The most objects, and the most containers, in one another that a walk goes through."""
MADE: dict[str, Callable[[], Any]] = {
    "dict": dict, "OrderedDict": OrderedDict, "Counter": Counter, "list": list, "set": set,
    "deque": deque, "defaultdict": defaultdict}
PLAIN = (int, float, str, bool, type(None))
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
        types.MethodWrapperType, type, property)
TOOLS = ("threading", "_thread", "logging", "weakref", "concurrent", "functools", "io", "_io",
         "multiprocessing", "torch.cuda", "torch.distributed", "torch._C", "torch._dynamo",
         "torch.autograd", "torch.utils", "typing", "inspect", "contextlib", "horovod")
"""The packages whose objects hold no values of a training."""
HIDING = (functools.partial, threading.local, weakref.WeakKeyDictionary,
          weakref.WeakValueDictionary, WeakIdKeyDictionary, numpy.ma.MaskedArray,
          numpy.random.BitGenerator, numpy.random.SeedSequence, random.Random)
"""The classes whose objects hold values that no node has: a change in one is a flaw."""
OF_MODULES = frozenset(vars(torch.nn.Module()).keys() - {"training"}) | {"_flat_weight_refs"}
"""The attributes that torch's modules have for themselves."""
SPAWNED = "spawned"
"""In the state of a generator of numpy's: the seeds of those that it has spawned."""
BUILTIN = (dict, list, tuple, set, frozenset, deque)
Node = Any


def class_of(value: Any) -> str:
    """Return the name by which a class is compared: that of a container of Python's, or with its
    module."""
    kind = type(value)
    if kind.__module__ in ("builtins", "collections"):
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"


def is_code(value: Any) -> bool:
    """True for code, and for tools of a process such as locks, streams and loggers."""
    module = type(value).__module__
    if isinstance(value, (torch.Tensor, torch.Generator)) or hides(value):
        return False
    return isinstance(value, CODE) or _is_tool(module)


@functools.cache
def _is_tool(module: str) -> bool:
    return any(module == tool or module.startswith(f"{tool}.") for tool in TOOLS)


def hides(value: Any) -> bool:
    """True for an object of HIDING; a functools.partial of numbers, texts and code alone is code,
    and a random.Random that is no subclass has a node."""
    kind: type = type(value)
    if not _is_hiding(kind):
        return False
    if isinstance(value, functools.partial):
        return any(not (type(one) in PLAIN or is_code(one))
                   for one in (*value.args, *value.keywords.values()))
    return type(value) is not random.Random


@functools.cache
def _is_hiding(kind: type) -> bool:
    return issubclass(kind, HIDING)


def fields(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, those of slots included."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def bears(value: Any, depth: int = 0) -> bool:
    """True if a value holds a tensor, an array, a generator of random numbers or an optimizer:
    whether it has changed cannot be seen at once, so it is kept in any case."""
    if hides(value):
        return False
    if isinstance(value, (torch.Tensor, numpy.ndarray, random.Random, torch.Generator,
                          numpy.random.Generator, numpy.random.RandomState, torch.optim.Optimizer,
                          torch.nn.Module)):
        return True
    if depth > DEEPEST or type(value) in PLAIN or is_code(value):
        return False
    if isinstance(value, dict):
        found = any(bears(k, depth + 1) or bears(v, depth + 1) for k, v in value.items())
    elif isinstance(value, BUILTIN):
        found = any(bears(one, depth + 1) for one in value)
    else:
        found = False
    if found or type(value) in BUILTIN:
        return found
    return depth <= DEEPEST_OBJECTS and any(bears(one, depth + 1)
                                            for one in fields(value).values())


class Walk:
    """One walk over attributes. `kept` has nodes by the id of what is kept elsewhere."""

    def __init__(self, kept: Mapping[int, Node], storages: Mapping[int, Node],
                 is_wanted: Callable[[str, Any, Any], bool] = lambda where, value, owner: True,
                 skipped: frozenset[str] = frozenset()):
        self._kept, self._skipped, self._is_wanted = kept, skipped, is_wanted
        self._storages = dict(storages)
        """The node of a tensor of each memory."""
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self.classes: dict[str, str] = {}
        """The places with an object that is only filled, and its class."""
        self.left: dict[str, Any] = {}
        """The places with a value that this walk cannot keep."""
        self.flaws: dict[str, str] = {}
        """The places with a value that can be kept nowhere, and what it is."""

    def describe(self, value: Any, where: str, depth: int = 0, objects: int = 0) -> Node:
        """Return the node of a value, which stands in a place."""
        kind = type(value)
        if kind in (float, str, bool, type(None)):
            return value
        known = self._kept.get(value if kind is int else id(value))
        if kind is int:
            return ["id", known] if known else value
        if known is not None:
            return known
        if is_code(value):
            return LEFT
        if (number := self._numbers.get(id(value))) is not None:
            return ["same", number]
        if (small := _small(value)) is not None:
            return small
        self._number(value)
        if depth > DEEPEST or hides(value):
            return self._leave(value, where)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
            return ["array", torch.from_numpy(numpy.ascontiguousarray(value)), list(value.shape)]
        if (state := _random_state(value)) is not None:
            return state
        if isinstance(value, BUILTIN):
            node = self._container(value, where, depth + 1, objects)
            own = [] if kind in BUILTIN or node is LEFT else self.attributes(
                value, where, depth + 1, objects + 1)
            return [*node, own] if own else node
        return self._object(value, where, depth + 1, objects)

    def _number(self, value: Any) -> int:
        self._alive.append(value)
        return self._numbers.setdefault(id(value), len(self._numbers))

    def _leave(self, value: Any, where: str) -> Node:
        self._numbers.pop(id(value), None)  # the last number: LEFT has none where it is filled
        self.left[where] = value
        return LEFT

    def _tensor(self, value: torch.Tensor, where: str) -> Node:
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            self.flaws[where] = f"a tensor of the kind {value.layout}"
            return LEFT
        storage = value.untyped_storage()
        base = self._storages.get(storage.data_ptr()) if storage.nbytes() else None
        size = value.numel() * value.element_size()
        if isinstance(base, str):
            self.flaws[where] = OF_OTHERS[base]
            return LEFT
        if base is None and size >= storage.nbytes():
            node = ["tensor", value.detach(), *_place_of(value)]
            self._storages[storage.data_ptr()] = ["same", self._numbers[id(value)]]
            return node
        if base is None:  # a part of a memory: all of it is kept, once
            whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(storage)
            base = ["tensor", whole, *_place_of(whole)]
            self._storages[storage.data_ptr()] = ["same", self._number(whole)]
        return ["view", base, str(value.dtype).removeprefix("torch."), value.storage_offset(),
                list(value.shape), list(value.stride())]

    def _container(self, value: Any, where: str, depth: int, objects: int) -> Node:
        name = class_of(value)
        extra: Any = None
        if isinstance(value, (set, frozenset)):
            if not all(type(one) in PLAIN or id(one) in self._kept for one in value):
                return self._leave(value, where)
            nodes = [self.describe(one, where, depth, objects) for one in value]
            return ["items", name, extra, sorted(nodes, key=repr)]
        if isinstance(value, dict):
            if isinstance(value, defaultdict):
                extra = factory_of(value) if factory_of(value) is not None else "?"
            if name not in MADE or extra == "?":
                self.classes[where] = name
            pairs = []
            for key, one in value.items():
                inner = f"{where}[{self._text(key)}]"
                pairs.append([self.describe(key, inner, depth, objects),
                              self.describe(one, inner, depth, objects)])
            return ["pairs", name, extra, pairs]
        if isinstance(value, deque):
            extra = value.maxlen
        if name not in MADE and name != "tuple":
            self.classes[where] = name
        items = []
        for number, one in enumerate(value):
            items.append(self.describe(one, place := f"{where}[{number}]", depth, objects))
            if items[-1] is LEFT:
                self.left[place] = one
        return ["items", name, extra, items]

    def _text(self, key: Any) -> str:
        known = self._kept.get(id(key))
        return str(known[-1]) if known else str(key)[:40]

    def _object(self, value: Any, where: str, depth: int, objects: int) -> Node:
        name = class_of(value)
        if isinstance(value, Enum):
            self.classes[where] = name
            return ["enum", name, value.name]
        if isinstance(value, torch.nn.Module):
            self.classes[where] = name
            tensors = [*value.named_parameters(), *value.named_buffers()]
            named = [[one, self.describe(tensor, f"{where}.{one}", depth, objects)]
                     for one, tensor in tensors]
            return ["module", name, named, *self._of_modules(value, where, depth, objects)]
        if isinstance(value, torch.optim.Optimizer):
            objects = 0
        found = fields(value)
        if not found or objects > DEEPEST_OBJECTS:
            return self._leave(value, where)
        self.classes[where] = name
        return ["object", name, self.attributes(value, where, depth, objects + 1)]

    def _of_modules(self, whole: torch.nn.Module, where: str, depth: int,
                    objects: int) -> list[Node]:
        """Return the wanted attributes of a module and of its parts, by their paths, as the only
        entry of a list; [] if there are none."""
        found = []
        for path, module in whole.named_modules():
            if id(module) not in self._kept:
                place = f"{where}.{path}".removesuffix(".")
                if pairs := self.attributes(module, place, depth, objects + 1):
                    found.append([path, pairs])
        return [found] if found else []

    def attributes(self, value: Any, where: str, depth: int = 0, objects: int = 0) -> Node:
        """Return the wanted attributes of an object as pairs of name and node: an optimizer's
        groups first and its state last, because the state's keys may stand in both."""
        found = fields(value)
        is_optimizer = isinstance(value, torch.optim.Optimizer)
        is_module = isinstance(value, torch.nn.Module)
        if is_optimizer:
            order = {"param_groups": 0, "state": 2}
            found = dict(sorted(found.items(), key=lambda pair: order.get(pair[0], 1)))
        pairs = []
        for name, one in found.items():
            place = f"{where}.{name}".removeprefix(".")
            if name in (self._skipped if is_optimizer else OF_MODULES if is_module else ()):
                continue
            if self._is_wanted(place, one, value):
                pairs.append([name, self.describe(one, place, depth, objects)])
        return pairs


OF_OTHERS = {
    "gradient": "a gradient, whose memory is used again. Use a clone of it",
    "part": "a tensor whose memory a smaller one in optimizer.state is a view of. Keep both in "
            "optimizer.state or, if one is a view of the other, both in attributes"}
"""Why a tensor in an attribute cannot be kept, by what stands for the node of its memory."""


def _place_of(value: torch.Tensor) -> list[Any]:
    """Return where a tensor is ("cpu", or "" for the model's device) and whether it has a
    gradient."""
    kind = "parameter" if isinstance(value, torch.nn.Parameter) else ""
    return ["cpu" if value.is_cpu else "", bool(value.requires_grad and value.is_leaf), kind]


def _small(value: Any) -> Node | None:
    """Return the node of a value that is nothing but itself; None if it is none."""
    kind = type(value)
    if isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
        return ["numpy", value.dtype.str, value.tobytes().hex()]
    if kind in (bytes, bytearray):
        return ["bytes", kind.__name__, value.hex()]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is torch.dtype:
        return ["dtype", str(value).removeprefix("torch.")]
    if kind is torch.device:
        return ["device", "cpu" if value.type == "cpu" else ""]
    if kind is torch.Size:
        return ["size", list(value)]
    return None


def _random_state(value: Any) -> Node | None:
    """Return the node of a generator of random numbers; None if a value is none."""
    if type(value) is random.Random:
        version, numbers, gauss = value.getstate()
        return ["random", "random.Random", "", [version, list(numbers), gauss]]
    if isinstance(value, torch.Generator):
        on = "cpu" if value.device.type == "cpu" else ""
        return ["random", "torch.Generator", on, value.get_state()]
    if isinstance(value, numpy.random.Generator):
        return ["random", "numpy.Generator", type(value.bit_generator).__name__,
                _as_json({**value.bit_generator.state,
                          **({SPAWNED: seeds} if (seeds := spawned_by(value)) else {})})]
    if isinstance(value, numpy.random.RandomState):
        return ["random", "numpy.RandomState", "", _as_json(value.get_state(legacy=False))]
    return None


def spawned_by(value: numpy.random.Generator) -> dict[str, Any]:
    """Return what the next `spawn` of a generator follows from, if there was one."""
    seeds = getattr(value.bit_generator, "seed_seq", None)
    if not isinstance(seeds, numpy.random.SeedSequence) or not seeds.n_children_spawned:
        return {}
    return {**seeds.state, "spawn_key": list(seeds.spawn_key)}


def _as_json(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _as_json(one) for key, one in state.items()}
    return {"array": state.tolist(), "of": state.dtype.str} if isinstance(
        state, numpy.ndarray) else state


def from_json(state: Any) -> Any:
    if isinstance(state, dict) and state.keys() == {"array", "of"}:
        return numpy.array(state["array"], dtype=state["of"])
    return {key: from_json(one) for key, one in state.items()} if isinstance(
        state, dict) else state


def leaves(node: Node, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors, numbers and texts of a tree with their places."""
    match node:
        case ["pairs", _, _, [*pairs], *own]:
            for key, one in pairs:
                name = key[-1] if isinstance(key, (list, tuple)) else key
                yield from leaves(one, f"{where}/{name}")
            yield from _named(own, where)
        case ["object", _, [*pairs]]:
            yield from _named([pairs], where)
        case ["module", _, [*pairs], *own]:
            yield from _named([pairs], where)
            for path, inner in own[0] if own else ():
                yield from _named([inner], f"{where}.{path}".removesuffix("."))
        case ["items", _, _, [*items], *own]:
            for number, one in enumerate(items):
                yield from leaves(one, f"{where}/{number}")
            yield from _named(own, where)
        case [_, *parts]:
            for one in parts:
                yield from leaves(one, where)
        case dict():
            for one in node.values():
                yield from leaves(one, where)
        case _:
            yield where, node


def _named(own: list[Any], where: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a list of lists of names and nodes."""
    for pairs in own:
        for name, one in pairs:
            yield from leaves(one, f"{where}.{name}")

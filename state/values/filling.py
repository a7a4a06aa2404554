"""Put the values of a tree into the attributes of an object: the reverse of Walk.

layout (bytes) → tree of nodes (nodes.py) → here → the same object in another process

What always holds:
1. `build` changes nothing, and raises LayoutError for a tree that does not fit. `finish` can fail
   for want of memory only.
2. What is there stays the same object and is filled. What is missing is made, if it is of Python,
   torch or numpy.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy
import torch

from elastic_trainer.state.values.forms import FACTORIES
from elastic_trainer.state.values.layout import DTYPES, LayoutError
from elastic_trainer.state.values.nodes import (
    LEFT,
    MADE,
    MISSING,
    SPAWNED,
    Node,
    class_of,
    fields,
    from_json,
    spawned_by,
)

MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a node that no Walk has made raises where it is built."""
BITS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
"""The generators of bits that numpy has."""


class Filling:
    """One pass over a tree. `kept` returns what a node ["kept", …] names."""

    def __init__(self, kept: Callable[[Node], Any], device: torch.device,
                 owned: Collection[int] = ()):
        self._kept, self._device, self._owned = kept, device, owned
        """`owned` has the ids of the objects, and the addresses of the memories, that the state
        keeps elsewhere."""
        self._found: list[Any] = []
        """What the numbers of nodes ["same", number] mean."""
        self._last: list[Callable[[], Any]] = []
        self._filled = set[int]()
        """The objects and memories here that are filled already."""

    def finish(self) -> None:
        """Change the objects that are there."""
        with torch.no_grad():
            for change in self._last:
                change()

    def build(self, node: Node, mine: Any = MISSING) -> Any:
        """Return the value of a node; `mine` is the value that stands in its place here. Raises
        LayoutError."""
        if not isinstance(node, (list, tuple)):
            if isinstance(node, (dict, torch.Tensor)):
                raise LayoutError("an attribute holds a value that is no node")
            return node
        try:
            return self._build(str(node[0]), list(node[1:]), mine)
        except LayoutError:
            raise
        except MALFORMED as error:
            raise LayoutError(f"an attribute has a malformed value: {error!r}"[:200]) from error

    def _build(self, kind: str, parts: list[Any], mine: Any) -> Any:
        if kind in ("items", "pairs", "object", "module", "enum", "tensor", "view", "array",
                    "random"):
            number = len(self._found)
            self._found.append(MISSING)
            build: Any = getattr(self, f"_{kind}")
            if kind in ("items", "pairs"):
                return build(number, mine, *parts)
            found = build(mine, *parts) if kind != "view" else self._view(number, mine, *parts)
            self._found[number] = found
            return found
        match kind, parts:
            case "left", []:
                if mine is MISSING:
                    raise LayoutError("an attribute holds code that this worker does not have")
                return mine
            case "kept", _:
                return self._kept(["kept", *parts])
            case "same", [int(number)]:
                if self._found[number] is MISSING:
                    raise LayoutError("an attribute refers to itself")
                return self._found[number]
            case "id", [inner]:
                return id(self.build(inner))
            case _:
                return self._small(kind, *parts)

    def _small(self, kind: str, *parts: Any) -> Any:
        match kind, parts:
            case "numpy", [name, text]:
                return numpy.frombuffer(bytes.fromhex(text), dtype=name)[0]
            case "bytes", [name, text]:
                return bytearray.fromhex(text) if name == "bytearray" else bytes.fromhex(text)
            case "complex", [real, imag]:
                return complex(real, imag)
            case "dtype", [name]:
                return DTYPES[name]
            case "device", [name]:
                return torch.device("cpu") if name else self._device
            case "size", [sides]:
                return torch.Size(sides)
            case _:
                raise LayoutError(f"an attribute has a value of the kind {kind!r}"[:80])

    # --- tensors ----------------------------------------------------------------------------------

    def _tensor(self, mine: Any, value: torch.Tensor, on: str, has_gradient: bool,
                kind: str) -> torch.Tensor:
        if (isinstance(mine, torch.Tensor) and mine.shape == value.shape
                and mine.dtype == value.dtype and mine.layout == torch.strided
                and self._is_free(mine)):
            self._last.append(lambda: mine.copy_(value))
            return mine
        found = value if value.is_meta else own(value.to("cpu" if on else self._device))
        if kind == "parameter":
            return torch.nn.Parameter(found, requires_grad=bool(has_gradient))
        return found.requires_grad_() if has_gradient else found

    def _is_free(self, mine: torch.Tensor) -> bool:
        """True if a tensor has a memory of its own that no other value of the tree fills."""
        memory = mine.untyped_storage()
        at, is_whole = memory.data_ptr(), mine.numel() * mine.element_size() == memory.nbytes()
        if not is_whole or at in self._owned or (at and at in self._filled):
            return False
        self._filled.add(at)
        return True

    def _view(self, number: int, mine: Any, base: Node, name: str, offset: int, shape: list[int],
              stride: list[int]) -> torch.Tensor:
        whole = self.build(base)
        if not isinstance(whole, torch.Tensor) or whole.dtype != DTYPES[name]:
            raise LayoutError("an attribute is a view of something else")
        if isinstance(mine, torch.Tensor) and list(mine.shape) == list(shape) and (
                mine.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()):
            return mine
        if isinstance(mine, torch.Tensor) and base[0] == "tensor" and (
                mine.dtype == whole.dtype and list(mine.shape) == list(shape)):
            memory = torch.empty(0, dtype=mine.dtype, device=mine.device).set_(
                mine.untyped_storage())
            if memory.shape == whole.shape and self._is_free(memory):
                self._last.append(lambda: memory.copy_(whole))
                self._found[number + 1] = memory
                return mine
        return whole.detach().as_strided(shape, stride, offset)

    def _array(self, mine: Any, value: torch.Tensor, shape: list[int]) -> Any:
        if value.is_meta:
            return mine
        found = value.numpy().reshape(shape)
        if isinstance(mine, numpy.ndarray) and (mine.shape, mine.dtype) == (
                found.shape, found.dtype) and mine.flags.writeable:
            self._last.append(lambda: numpy.copyto(mine, found))
            return mine
        return found.copy()

    # --- containers -------------------------------------------------------------------------------

    def _place(self, mine: Any, name: str, extra: Any) -> Any:
        """Return the container to fill: mine if it is of the class, else a new one."""
        if class_of(mine) == name and id(mine) not in self._owned and id(mine) not in self._filled:
            self._filled.add(id(mine))
            return mine
        if name == "defaultdict":
            return defaultdict(FACTORIES[extra] if extra else None)
        if name == "deque":
            return deque(maxlen=extra)
        if name not in MADE:
            raise LayoutError(f"an attribute holds a {name}, which this worker does not have there")
        return MADE[name]()

    def _items(self, number: int, mine: Any, name: str, extra: Any, nodes: list[Node],
               own: Sequence[list[Any]] = ()) -> Any:
        if name == "frozenset":
            found: Any = frozenset(self.build(one) for one in nodes)
            self._found[number] = found
            return found
        is_fixed = name not in MADE and (isinstance(mine, tuple) or name == "tuple")
        if is_fixed and name != "tuple" and class_of(mine) != name:
            raise LayoutError(f"an attribute holds a {name}, which this worker does not have there")
        target: Any = None if is_fixed else self._place(mine, name, extra)
        self._found[number] = MISSING if is_fixed else target
        has_places = class_of(mine) == name and not isinstance(mine, (set, frozenset))
        inner = list(mine) if has_places else []
        items = [self.build(one, inner[place] if place < len(inner) else MISSING)
                 for place, one in enumerate(nodes)]
        if is_fixed:
            found = tuple(items) if name == "tuple" else (
                type(mine)(*items) if hasattr(mine, "_fields") else type(mine)(items))
            self._found[number] = found
            self.attributes(found, own, mine)
            return found
        fill = target.update if isinstance(target, set) else target.extend
        self._fill(target, mine, lambda: fill(items))
        self.attributes(target, own)
        return target

    def _pairs(self, number: int, mine: Any, name: str, extra: Any,
               pairs: list[list[Node]], own: Sequence[list[Any]] = ()) -> Any:
        target = self._place(mine, name, extra)
        self._found[number] = target
        found = {}
        for key_node, node in pairs:
            key = self.build(key_node)
            inner = dict.get(target, key, MISSING) if target is mine else MISSING
            if not (is_left(node) and inner is MISSING):  # a cache of code fills itself again
                found[key] = self.build(node, inner)
        self._fill(target, mine, lambda: target.update(found))
        self.attributes(target, own)
        return target

    def _fill(self, target: Any, mine: Any, fill: Callable[[], Any]) -> None:
        """Fill a container of mine in the end, and a new one too: its content may come late."""
        if target is mine:
            self._last.append(target.clear)
        self._last.append(fill)

    # --- objects ----------------------------------------------------------------------------------

    def _require(self, mine: Any, name: str) -> None:
        if class_of(mine) != name:
            raise LayoutError(f"an attribute holds a {name}, and this worker has "
                              f"{'nothing' if mine is MISSING else class_of(mine)} there")

    def _object(self, mine: Any, name: str, pairs: list[list[Any]]) -> Any:
        self._require(mine, name)
        self._found[-1] = mine  # it may refer to itself
        self.attributes(mine, pairs)
        return mine

    def attributes(self, mine: Any, pairs: Sequence[list[Any]], was: Any = None) -> None:
        """Build the attributes of an object, which `finish` sets. `was`: the object that stands in
        its place here, if it is a new one."""
        here = fields(mine if was is None else was) if pairs else {}
        for name, node in pairs:
            if not isinstance(name, str):
                raise LayoutError("an attribute has a name that is no text")
            if is_left(node):
                continue
            value = self.build(node, here.get(name, MISSING))
            if value is not here.get(name, MISSING) or was is not None:
                self._last.append(partial(set_field, mine, name, value))

    def _module(self, mine: Any, name: str, pairs: list[list[Any]],
                own: Sequence[list[Any]] = ()) -> Any:
        self._require(mine, name)
        self._found[-1] = mine  # it may refer to itself
        here = {**dict(mine.named_parameters()), **dict(mine.named_buffers())}
        for one, node in pairs:
            if self.build(node, here.get(one, MISSING)) is not here.get(one, MISSING):
                raise LayoutError(f"{one} of a {name} is another tensor here")
        modules = dict(mine.named_modules())
        for path, inner in own:
            if path not in modules:
                raise LayoutError(f"the module {path} of a {name} is not there here"[:200])
            self.attributes(modules[path], inner)
        return mine

    def _enum(self, mine: Any, name: str, member: str) -> Any:
        self._require(mine, name)
        return type(mine)[member]

    def _random(self, mine: Any, kind: str, extra: str, state: Any) -> Any:
        source, change = seeded(mine, kind, extra, state, self._device)
        self._last.append(change)
        return source


def seeded(mine: Any, kind: str, extra: str, state: Any,
           device: torch.device) -> tuple[Any, Callable[[], Any]]:
    """Return a generator of random numbers, mine if it is of the kind, and what sets its state.

    Raises LayoutError, and what the generator raises for a state that is none.
    """
    match kind:
        case "random.Random":
            numbers = mine if type(mine) is random.Random else random.Random()
            whole = (int(state[0]), tuple(state[1]), state[2])
            random.Random().setstate(whole)
            return numbers, partial(numbers.setstate, whole)
        case "torch.Generator":
            source = mine if isinstance(mine, torch.Generator) else torch.Generator(
                torch.device("cpu") if extra else device)
            if (state.shape, state.dtype) != (source.get_state().shape, torch.uint8):
                raise LayoutError("an attribute holds a torch.Generator of another kind")
            # A clone: torch reads it as a struct, which must be aligned.
            return source, lambda: source.set_state(state.cpu().clone())
        case "numpy.Generator" if extra in BITS:
            bits, found = getattr(numpy.random, extra), from_json(state)
            seeds = found.pop(SPAWNED, {})
            bits(0).state = found
            drawn = mine
            if not isinstance(mine, numpy.random.Generator) or (
                    type(mine.bit_generator) is not bits):
                drawn = numpy.random.Generator(bits(0))
            if spawned_by(drawn) != seeds:  # a number of children cannot be set
                children = {**spawned_by(drawn), "n_children_spawned": 0, **seeds}
                drawn = numpy.random.Generator(bits(numpy.random.SeedSequence(**children)))
            return drawn, partial(setattr, drawn.bit_generator, "state", found)
        case "numpy.RandomState":
            legacy = mine if isinstance(mine, numpy.random.RandomState) else (
                numpy.random.RandomState())
            numpy.random.RandomState().set_state(from_json(state))
            return legacy, partial(legacy.set_state, from_json(state))
    raise LayoutError(f"an attribute holds a generator of the kind {kind} {extra}"[:80])


def own(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a memory of its own: a part of all received bytes would keep them."""
    is_whole = value.numel() * value.element_size() == value.untyped_storage().nbytes()
    return value if is_whole else value.clone()


def is_left(node: Node) -> bool:
    """True for the node of code."""
    return isinstance(node, (list, tuple)) and list(node) == LEFT


def set_field(owner: Any, name: str, value: Any) -> None:
    """Set an attribute as it was read: beside properties of the same name."""
    if name in getattr(owner, "__dict__", {}) or not hasattr(type(owner), name):
        if hasattr(owner, "__dict__"):
            owner.__dict__[name] = value
            return
    object.__setattr__(owner, name, value)

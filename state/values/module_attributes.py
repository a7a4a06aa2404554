"""Plain attributes of a model's modules (`p` of a dropout, a temperature): part of the state where
they have changed since the model was built.

model → here → vote (a checksum), each step's begin and end, checkpoint, newcomer

What always holds:
1. Followed are numbers, texts, truth values, None, and tuples, lists and dicts of these, of each
   module and of each dataclass, namespace and list of modules that a module holds. An attribute
   that was not changed since the model was built is no part of the state: a resumed run has that
   of its script.
2. All workers begin a step with the same changes. The vote compares a checksum of them.
3. A step that broke begins again with the attributes of its begin.
4. The code of a batch may set an attribute to a value that is the same for each micro-batch of the
   step. The step ends with it, in every world. Other changes there are errors
   (training/differing.py).
5. Sizes that follow from the batch (`self.length = len(x)`) belong to the process, as the tensors
   beside them do (`self.mask`): they are no part of the state, and nothing puts them back.
6. What the script sets between two steps to another kind of value (None becomes a tensor) is handed
   to other_attributes.py: it is part of the state, or an error. What a batch sets is a cache.

Cost: all attributes are compared at a step's begin and end, and after each micro-batch. Measured:
0.15 µs a module (12 layers of a transformer: 18 µs), and 0.4 ms more where one has changed.

What it does not do: follow tensors, other objects and containers of more than MOST_VALUES values
(other_attributes.py), attributes of classes, and modules that are no part of the model. It leaves
out modules that keep their values by get_extra_state (forward.py), and those that adapters follow
(OF_OTHERS).
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from argparse import Namespace
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from elastic_trainer.state.values.names import plain
from elastic_trainer.state.values.other_attributes import OtherAttributes, others_of_evaluation
from elastic_trainer.state.values.plain_values import MOST_VALUES, is_plain, is_same, number_of

OWN = frozenset(vars(torch.nn.Module())) | {"_is_torch_compile", "_compile_kwargs"}
"""What torch itself keeps in a module, and Lightning, whose import wraps torch.compile
(lightning/fabric/wrappers.py, _capture_compile_kwargs). forward.py has `training`."""
OF_OTHERS = ("lightning", "pytorch_lightning", "torchmetrics")
"""The packages whose modules adapters/lightning_attributes.py and lightning_metrics.py follow."""
BARE = torch.nn.Module.get_extra_state


def plain_attributes(model: torch.nn.Module) -> dict[str, Any]:
    """Return copies of the plain attributes of all modules as they are now, by path ("drop.p")."""
    return {f"{path}{name}": copy.deepcopy(value) for path, owner in owners_of(model)
            for name, value in _plain_of(owner)}


@contextmanager
def attributes_put_back(model: torch.nn.Module) -> Iterator[None]:
    """Let a block change plain attributes, and put them back after it."""
    places = _Places([_Place(path, owner) for path, owner in owners_of(model)])
    try:
        with others_of_evaluation(model):
            yield
    finally:
        for place in places.changed():
            place.reset()


def kinds_of_modules(model: torch.nn.Module) -> dict[str, str]:
    """Return the class of each module, by its plain name."""
    return {plain(name): type(module).__qualname__ for name, module in model.named_modules()}


class ModuleAttributes:
    """The plain attributes of one model's modules."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.built = plain_attributes(model)
        """The attributes as they were when the model was built."""
        self._paths = {path for path, owner in owners_of(model)
                       if getattr(type(owner), "get_extra_state", BARE) is BARE}
        """What holds attributes. What is added later is not followed."""
        self._kinds = kinds_of_modules(model)
        self.others = OtherAttributes(model, {
            f"{path}{name}": (vars(owner), name) for path, owner in owners_of(model)
            if path in self._paths for name, value in vars(owner).items()
            if name not in OWN and not is_plain(value) and not is_namespace(value)},
            [*model.parameters(), *model.buffers(), *model.modules()], self._place_of)
        self._sizes = set[str]()
        """The paths of the sizes that follow from the batch."""
        self._strange: dict[str, Any] | None = None
        """The values that are not plain, by path, as the last step has left them."""
        self._caches = set[str]()
        """Their paths, where a batch has changed them."""
        self._places = self._all_places()
        self._is_in_flight = False
        self._checksum: int | None = None
        """That of the step's begin, if it is known."""
        self.after = dict[str, Any]()
        """What the micro-batches of the prepared step have left, where it differs from the step's
        begin."""

    def _all_places(self) -> _Places:
        return _Places([_Place(path, owner, self._sizes) for path, owner in owners_of(self._model)
                        if path in self._paths])

    def leave_out(self, sizes: Iterable[str]) -> None:
        """Do not follow these attributes from now on: the batch sets them."""
        if new := set(sizes) - self._sizes:
            self._sizes |= new
            for place in self._places.all:
                place.leave_out(self._sizes)
            self._places, self._checksum = _Places(self._places.all), None

    # --- a step's life ----------------------------------------------------------------------------

    def begin(self) -> None:
        self._is_in_flight, self.after = True, {}
        changed = self._places.changed()
        self._follow_strange(changed)
        self.others.begin()
        if not changed:
            return
        if any(one.has_other_parts() for one in changed):
            self._places = self._all_places()
        else:
            self._places = _Places([one.again() if one in changed else one
                                    for one in self._places.all])
        self._checksum = None

    def note(self) -> None:
        """Note what the script has changed since the last step's end: a checkpoint may be next."""
        if self._strange is not None and not self._is_in_flight:
            self._follow_strange(self._places.changed())

    def _follow_strange(self, changed: Iterable[_Place]) -> None:
        """Let others follow what the script has set since the last step's end, and note the
        values of the begin."""
        now = self._strangers(changed)
        was = now if self._strange is None else self._strange
        for path, value in now.items():
            if value is not was.get(path) and path not in self._caches and _is_told(path, value):
                self.others.follow(path, self.built)
        self._strange = now

    def _strangers(self, changed: Iterable[_Place]) -> dict[str, Any]:
        """Return the values that are not plain, by path; `changed`: where there may be new ones."""
        found = {path: one.vars.get(name) for one in self._places.strange
                 for path, name in one.strange}
        for one in changed:
            found |= {f"{one.path}{name}": value for name, value in one.strangers()}
        return found

    def check(self) -> None:
        """Raise RuntimeError if a module was replaced by one of another class, or an attribute was
        changed that cannot be kept."""
        self.others.check()
        if self._checksum is not None:
            return  # nothing has changed since this was called last
        now = kinds_of_modules(self._model)
        if bad := [name for name, kind in self._kinds.items() if now.get(name) != kind]:
            raise RuntimeError(
                f"the module {bad[0] or 'the model'} was a {self._kinds[bad[0]]} when the trainer "
                f"was built, and now it is {now.get(bad[0], 'gone')}. A worker that joins, or a "
                f"resumed run, would have the first one. Keep the module and change its "
                f"attributes, or build both and choose between them by an attribute.")

    def moved(self) -> dict[str, Any]:
        """Return the attributes that have another value than at the step's begin, by path."""
        return {f"{place.path}{name}": value for place in self._places.changed()
                for name, value in place.moved()}

    def reset(self) -> None:
        for place in self._places.changed() if self._is_in_flight else ():
            place.reset()

    def apply(self) -> None:
        """End a step with what its micro-batches have left."""
        self.reset()
        self._write(self.after)

    def forget(self) -> None:
        if self._is_in_flight:
            now, was = self._strangers(self._places.changed()), self._strange or {}
            self._caches |= {path for path, value in now.items() if value is not was.get(path)}
            self._strange = now
        self._is_in_flight, self.after = False, {}
        self.others.end()

    def checksum(self) -> int:
        """Return 32 bits of what differed at the step's begin from what was built."""
        if self._checksum is None:
            changed = self.changed_before()
            self._checksum = zlib.crc32(repr(sorted(
                (path, number_of(value)) for path, value in changed.items())).encode()
                ) if changed else 0
        return self._checksum ^ self.others.checksum()

    # --- as values --------------------------------------------------------------------------------

    def changed(self) -> dict[str, Any]:
        """Return the attributes that differ from those that were built, by path."""
        if self._checksum == 0 and not self._places.changed():
            return {}  # as at the step's begin (a walk takes 0.7 ms)
        return self._changed(
            (f"{path}{name}", value) for path, owner in owners_of(self._model)
            if path in self._paths for name, value in _plain_of(owner))

    def changed_before(self) -> dict[str, Any]:
        """Return those that differed at the step's begin."""
        return self.changed() if not self._is_in_flight else self._changed(
            (f"{place.path}{name}", value) for place in self._places.all
            for name, value in place.kept())

    def _changed(self, values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        return {path: copy.deepcopy(value) for path, value in values
                if path not in self._sizes
                and (path not in self.built or not is_same(value, self.built[path]))}

    def misfit(self, values: Mapping[str, Any]) -> str:
        """Return why the changes in a state's values are not of this model; "": they are."""
        changed, others = values.get("attributes", {}), values.get("other_attributes", {})
        bad = [path for path in changed if not self._owner_of(path, self._paths)[1]]
        return (f"the attributes {bad[:5]} were changed there, but this model has no such modules"
                if bad else self.others.misfit(others))

    def load(self, changed: Mapping[str, Any], of_others: Mapping[str, Any]) -> None:
        """Take over the changes; all other attributes are as they were built."""
        self._load(changed)
        self.others.load(of_others)
        if of_others:
            self._places = self._all_places()
        self._strange = self._strangers(self._places.changed())

    def _load(self, changed: Mapping[str, Any]) -> None:
        others = self.changed().keys() & self.built.keys() - changed.keys()
        self._write({path: self.built[path] for path in others} | dict(changed))
        self._places, self._checksum, self.after = self._all_places(), None, {}

    def in_flight(self) -> list[dict[str, Any]]:
        return [self.changed_before(), self.after]

    def take_up(self, in_flight: Sequence[dict[str, Any]]) -> None:
        before, after = in_flight
        self._load(before)
        self._is_in_flight, self.after = True, dict(after)

    def _write(self, values: Mapping[str, Any]) -> None:
        owners = dict(owners_of(self._model)) if values else {}
        for path, value in values.items():
            start, name = self._owner_of(path, owners)
            _set(vars(owners[start]), name, value)

    def _place_of(self, path: str) -> tuple[dict[str, Any], str] | None:
        """Return the dict and the name of an attribute; None: no module here could have it."""
        owners = {start: owner for start, owner in owners_of(self._model) if start in self._paths}
        start, name = self._owner_of(path, owners)
        return (vars(owners[start]), name) if name else None

    @staticmethod
    def _owner_of(path: str, owners: Container[str]) -> tuple[str, str]:
        """Return the beginning of a path that is an owner, and the attribute; "": there is none."""
        start, _, name = path.rpartition(".")
        start = f"{start}." if start else ""
        return (start, name) if start in owners else ("", "")


class _Place:
    """The plain attributes of one module or namespace, as they were when this was made."""

    def __init__(self, path: str, owner: Any, left_out: Container[str] = ()):
        self.path, self._owner, self.vars, self._left_out = path, owner, vars(owner), left_out
        self._take(dict(self._plain()))
        self.containers = [(value, copy.deepcopy(value)) for value in self._values
                           if type(value) in (list, dict)]
        self.count, self._all = len(self.vars), frozenset(self.vars)
        self.modules = self.vars.get("_modules", {}).values()
        self.children = list(self.modules)
        self.namespaces = [(name, value) for name, value in self.vars.items()
                            if name not in OWN and is_namespace(value)]
        self.strange = [(f"{self.path}{name}", name) for name, _ in self.strangers()]

    def strangers(self) -> Iterator[tuple[str, Any]]:
        """Yield the values of now that are not plain, and hold no plain attributes."""
        return ((name, value) for name, value in self.vars.items()
                if name not in OWN and not is_plain(value) and not is_namespace(value))

    def again(self) -> _Place:
        """Return the attributes of the same owner as they are now."""
        return _Place(self.path, self._owner, self._left_out)

    def _plain(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in _plain_of(self._owner)
                if f"{self.path}{name}" not in self._left_out)

    def _take(self, named: dict[str, Any]) -> None:
        self._names, self._values = tuple(named), tuple(named.values())
        self.get: Callable[[dict[str, Any]], Any] = itemgetter(*named) if named else _nothing
        self.got = self.get(named)  # one value, or a tuple of several

    def leave_out(self, paths: Container[str]) -> None:
        """Forget the values of attributes that are not followed from now on."""
        self._left_out = paths
        self._take({name: value for name, value in self.kept()
                    if f"{self.path}{name}" not in paths})
        self.containers = []  # the values are copies

    def is_same(self) -> bool:
        """True if nothing has changed since."""
        try:
            return (len(self.vars) == self.count and bool(self.get(self.vars) == self.got)
                    and not self.has_other_parts()
                    and all(one == was for one, was in self.containers))
        except Exception:  # an attribute is gone, or is now of a kind that has no comparison
            return False

    def has_other_parts(self) -> bool:
        """True if a module or a namespace was added, or replaced by another one."""
        return list(self.modules) != self.children or any(
            self.vars.get(name) is not value for name, value in self.namespaces)

    def kept(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and the values as they were."""
        copies = {id(value): was for value, was in self.containers}
        for name, value in zip(self._names, self._values, strict=True):
            yield name, copies.get(id(value), value)

    def moved(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and the values of now that are others than before."""
        kept = dict(self.kept())
        for name, value in self._plain():
            if name not in kept or not is_same(value, kept[name]):
                yield name, copy.deepcopy(value)

    def reset(self) -> None:
        """Put the values back, and drop attributes that are new."""
        kept = dict(self.kept())
        for name, value in dict(self._plain()).items():
            if name not in self._all:
                del self.vars[name]
            elif name in kept and not is_same(value, kept[name]):
                _set(self.vars, name, kept[name])


class _Places:
    """All places together, so that a comparison of all takes few calls of Python."""

    def __init__(self, places: list[_Place]):
        self.all = places
        self._pairs = [(one.get, one.vars) for one in places if one.get is not _nothing]
        self._got = [one.got for one in places if one.get is not _nothing]
        self._vars = [one.vars for one in places]
        self._counts = [one.count for one in places]
        self._modules = [one.modules for one in places if one.children]
        self._children = [one.children for one in places if one.children]
        self._rest = [one for one in places if one.containers or one.namespaces]
        self.strange = [one for one in places if one.strange]

    def changed(self) -> list[_Place]:
        """Return those in which something has changed."""
        return [] if self._are_same() else [one for one in self.all if not one.is_same()]

    def _are_same(self) -> bool:
        try:
            return (list(map(len, self._vars)) == self._counts
                    and [get(owner) for get, owner in self._pairs] == self._got
                    and list(map(list, self._modules)) == self._children
                    and all(one.is_same() for one in self._rest))
        except Exception:  # as in _Place.is_same
            return False


def _is_told(path: str, value: Any) -> bool:
    """Return whether a new value is followed. Private objects are tools of a class."""
    return isinstance(value, (torch.Tensor, numpy.ndarray)) or (
        not path.rpartition(".")[2].startswith("_") and not isinstance(value, torch.nn.Module)
        and not any(True for _ in _held(path, value)))


def _nothing(_: dict[str, Any]) -> tuple[()]:
    return ()


def _set(owner: dict[str, Any], name: str, value: Any) -> None:
    was, value = owner.get(name), copy.deepcopy(value)
    if type(was) is list and type(value) is list:
        was[:] = value  # others may hold the same list
    elif type(was) is dict and type(value) is dict:
        was.clear()
        was.update(value)
    else:
        owner[name] = value


def owners_of(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what holds plain attributes, each once, with the beginning of their paths."""
    seen = set[int]()
    for name, module in model.named_modules():
        yield from _with_inner(f"{plain(name)}." if plain(name) else "", module, seen)


def _with_inner(path: str, owner: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield an owner and the owners that it holds: modules in containers, and namespaces."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if _is_of_others(owner):
        return
    yield path, owner
    for name, value in vars(owner).items():
        if name not in OWN:
            for inner, held in _held(f"{path}{name}", value):
                yield from _with_inner(f"{inner}.", held, seen)


def _held(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if is_namespace(value):
        yield path, value
    elif type(value) in (list, tuple) and len(value) <= MOST_VALUES:
        yield from ((f"{path}.{number}", one) for number, one in enumerate(value)
                    if isinstance(one, torch.nn.Module))
    elif type(value) is dict and len(value) <= MOST_VALUES:
        yield from ((f"{path}.{key}", one) for key, one in value.items()
                    if isinstance(one, torch.nn.Module))


def is_namespace(value: Any) -> bool:
    """Return whether the attributes of a value are followed as those of a module."""
    return isinstance(value, (SimpleNamespace, Namespace)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, (type, torch.nn.Module))
        and hasattr(value, "__dict__"))


def _is_of_others(owner: Any) -> bool:
    """Return whether an adapter follows this owner, or it only wraps a module (torch.compile)."""
    return any(kind.__module__.startswith("torch._dynamo.")
               or kind.__module__.split(".", 1)[0] in OF_OTHERS for kind in type(owner).__mro__)


def _plain_of(owner: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        if name not in OWN and is_plain(value):
            yield name, value

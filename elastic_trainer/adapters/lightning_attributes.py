"""Plain attributes of modules and callbacks: part of the run's state, and constant within a batch.

hooks after a step change self.weight → here → checkpoint, newcomer; training_step changes
self.losses → here → an error

What always holds:
1. A number, a text, a tensor, or a list, tuple or dict of these, that hooks have changed since
   the beginning is part of the run's state. What was not changed is not, so a resumed run has the
   values of its script.
2. An attribute of the module that changes while a worker has a batch in hand is an error. In the
   batches that are only tried (the warm-up) it may change: a module may build a cache there.

What it does not do: look into other objects, and into submodules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from elastic_trainer.state.values.forms import as_built

CHANGED = (
    "{where} has changed self.{name}. A worker computes some of the batches, so workers would hold "
    "different values. Log sums with self.log, keep them in a torchmetrics object, or change the "
    "attribute in {instead}.")
DEEPEST = 4
MOST_COMPARED = 64
"""The longest container whose numbers and texts are compared within a batch."""
Plain = (bool, int, float, str, type(None))


class Attributes:
    def __init__(self, of: Any, without: frozenset[str] = frozenset()):
        self._of, self._without = of, without
        self._initial = {name: copy.deepcopy(value) for name, value in self._plain()}

    def _plain(self) -> Iterator[tuple[str, Any]]:
        for name, value in vars(self._of).items():
            if name not in self._without and is_plain(value):
                yield name, value

    @contextmanager
    def constant(self, where: str, instead: str, is_trial: bool = False) -> Iterator[None]:
        before = self._marks()
        yield
        if is_trial or (after := self._marks()) == before:
            return
        name = min(name for name in before.keys() | after.keys()
                   if before.get(name) != after.get(name))
        raise RuntimeError(CHANGED.format(where=where, name=name, instead=instead))

    def _marks(self) -> dict[str, Any]:
        return {name: _mark(value) for name, value in vars(self._of).items()
                if name not in self._without}

    # --- in the state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self._plain()
                if name not in self._initial or not _is_same(value, self._initial[name])}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over the attributes that have changed; others are as at the beginning."""
        for name in self.state_dict().keys() & self._initial.keys() - values.keys():
            setattr(self._of, name, copy.deepcopy(self._initial[name]))
        for name, value in values.items():
            mine = getattr(self._of, name, None)
            setattr(self._of, name, copy.deepcopy(as_built(mine, value)))


def is_plain(value: Any, depth: int = 0) -> bool:
    if type(value) in Plain:
        return True
    if type(value) is torch.Tensor:
        return value.layout == torch.strided and value.grad_fn is None
    if depth > DEEPEST:
        return False
    if type(value) in (list, tuple):
        return all(is_plain(one, depth + 1) for one in value)
    return type(value) is dict and all(
        type(key) in (str, int) and is_plain(one, depth + 1) for key, one in value.items())


def _mark(value: Any) -> Any:
    """Return what differs after a change of a value. Nothing is read from a GPU."""
    if type(value) in Plain:
        return type(value), value
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, dict) and len(value) <= MOST_COMPARED:
        return id(value), [(key, _mark_in(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple, set)) and len(value) <= MOST_COMPARED:
        return id(value), [_mark_in(one) for one in value]
    return id(value), len(value) if hasattr(type(value), "__len__") else 0


def _mark_in(value: Any) -> Any:
    """Return the mark of a value in a container: that of a metric of torchmetrics, which is no
    submodule there, has the number of its updates."""
    return value if type(value) in Plain else (id(value), getattr(value, "_update_count", 0))


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return bool(one == other or (one != one and other != other))

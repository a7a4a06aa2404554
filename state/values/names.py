"""The parameters and buffers of a model: their names in the state, and whether the parameters are
still those of the start.

model → here → each name in the state, a checkpoint, an export or a digest

What always holds:
1. Names are those of the model before torch.compile, which wraps a module: `0.weight` becomes
   `_orig_mod.0.weight` (torch/_dynamo/eval_frame.py, OptimizedModule). With plain names a compiled
   model can restore the checkpoint of one that is not compiled, and the reverse.
2. The set of parameters stays what it was at the start. Else no worker could join or resume.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, TypeVar

import torch

from elastic_trainer.config import ConfigError

COMPILED = "_orig_mod"
Tensor = TypeVar("Tensor", bound=torch.Tensor)


def plain(name: str) -> str:
    """Return a name without what torch.compile has put into it."""
    if COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != COMPILED)


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the model's parameters by name, tied ones once."""
    return _by_name(model.named_parameters())


def named_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's buffers by name, shared ones once."""
    return _by_name(model.named_buffers())


def _by_name(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    pairs = [(plain(name), tensor) for name, tensor in named]
    found = dict(pairs)
    names = [name for name, _ in pairs]
    if len(found) != len(pairs):
        raise ConfigError(f"two tensors of the model have one name without {COMPILED}, which "
                          f"torch.compile puts in: {names[:8]}. Name no attribute {COMPILED}, and "
                          f"let a compiled module have no others.")
    return found


def with_plain_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return a state's values with plain names. Version 0.1 wrote other names for a compiled
    model."""
    if not any(COMPILED in name for kind in ("parameters", "buffers") for name in values[kind]):
        return values
    optimizer = values["optimizer"]
    renamed: dict[str, Any] = {kind: _renamed(values[kind]) for kind in ("parameters", "buffers")}
    renamed["optimizer"] = {
        **optimizer, "state": _renamed(optimizer["state"]),
        "members": [list(map(plain, names)) for names in optimizer["members"]]}
    if "trained" in values:
        renamed["trained"] = list(map(plain, values["trained"]))
    aliases = {plain(name): plain(own) for name, own in values.get("aliases", {}).items()}
    return {**values, **renamed, "aliases": aliases,
            "left_out": list(map(plain, values.get("left_out", [])))}


def _renamed(named: dict[str, Any]) -> dict[str, Any]:
    return {plain(name): value for name, value in named.items()}


class Table:
    """What the modules of a model have in one of their tables: buffers, parameters or modules.

    To look whether it is the same takes 10 µs for 160 modules, and a walk through the tree of
    modules 1 to 2 ms (measured).
    """

    def __init__(self, modules: Sequence[torch.nn.Module], kind: str):
        self._modules, self._kind = modules, kind
        self._every = self._tables()
        self._full = [table for table in self._every if len(table)]
        self._empty = [table for table in self._every if not len(table)]
        self._held, self._names = self._values(), self._keys()

    def has_same(self) -> bool:
        """True if each module has the same objects."""
        now = self._values()
        return (len(now) == len(self._held) and all(map(is_, now, self._held))
                and not any(map(len, self._empty)))

    def is_same(self) -> bool:
        """True if each module has the same objects under the same names."""
        return (all(map(is_, self._tables(), self._every)) and self.has_same()
                and self._keys() == self._names)

    def _tables(self) -> list[dict[str, Any]]:
        return [*map(attrgetter(self._kind), self._modules)]

    def _values(self) -> list[Any]:
        return [*chain.from_iterable(map(methodcaller("values"), self._full))]

    def _keys(self) -> list[str]:
        return [*chain.from_iterable(map(methodcaller("keys"), self._full))]


class ModelParameters:
    """The parameters of one model, by their plain names."""

    def __init__(self, model: torch.nn.Module):
        modules = list(model.modules())
        self._model, self._at_start = model, list(model.parameters())
        self._tables = [Table(modules, "_parameters"), Table(modules, "_modules")]

    def check(self) -> None:
        """Raise RuntimeError if the model has other parameters than at the start."""
        if all(table.is_same() for table in self._tables):
            return
        if [*map(id, self._model.parameters())] != [*map(id, self._at_start)]:
            own = {id(p) for p in self._at_start}
            new = [name for name, p in self.named().items() if id(p) not in own]
            raise RuntimeError(
                f"the model has other parameters than at the start "
                f"({', '.join(new[:8]) or 'some are gone or renamed'}), so no worker could join or "
                "resume. Build all before the training, and change values in place (copy_).")

    def checked(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters, if they are those of the start. Raises RuntimeError."""
        self.check()
        return self.named()

    def named(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters, tied ones once."""
        return named_parameters(self._model)

    def trained(self) -> list[str]:
        """Return the names of those that require a gradient."""
        return [name for name, p in self.named().items() if p.requires_grad]

    def load(self, values: dict[str, torch.Tensor], trained: list[str] | None) -> None:
        """Take over values, and which of them require a gradient if that is given."""
        parameters, wanted = self.named(), set(self.trained() if trained is None else trained)
        with torch.no_grad():
            for name, tensor in values.items():
                parameters[name].copy_(tensor)
            for name, parameter in parameters.items():  # frozen content is not in the values
                if parameter.requires_grad != (name in wanted):
                    parameter.requires_grad_(name in wanted)

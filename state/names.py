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

from collections.abc import Iterable
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


class ModelParameters:
    """The parameters of one model, by their plain names."""

    def __init__(self, model: torch.nn.Module):
        self._model, self._modules = model, list(model.modules())
        self._at_start = list(model.parameters())
        self._outlined = self._outline()

    def _outline(self) -> list[int]:
        """Return numbers that change if the modules or parameters do. This takes a tenth of the
        time of `model.parameters()`."""
        return [id(part)
                for module in self._modules for parts in (module._parameters, module._modules)
                for part in parts.values()]

    def check(self) -> None:
        """Raise RuntimeError if the model has other parameters than at the start."""
        if self._outline() == self._outlined:
            return
        if [*map(id, self._model.parameters())] != [*map(id, self._at_start)]:
            own = {id(p) for p in self._at_start}
            new = [name for name, p in self.named().items() if id(p) not in own]
            raise RuntimeError(
                f"the model has other parameters than at the start "
                f"({', '.join(new[:8]) or 'some are gone or renamed'}), so no worker could join or "
                "resume. Build all before the training, and change values in place (copy_).")

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
                if parameters[name].requires_grad != (name in wanted):
                    parameters[name].requires_grad_(name in wanted)

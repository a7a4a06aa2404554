"""The names of parameters and buffers in the state: those of the model before torch.compile.

torch.compile wraps a module: `0.weight` becomes `_orig_mod.0.weight` (torch/_dynamo/eval_frame.py,
OptimizedModule). With plain names a compiled model can restore the checkpoint of one that is not
compiled, and the reverse.

What always holds:
1. Each name in the state, a checkpoint, an export or a digest comes from here.
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
        "members": [[plain(name) for name in names] for names in optimizer["members"]]
    }
    if "trained" in values:
        renamed["trained"] = [plain(name) for name in values["trained"]]
    return {
        **values, **renamed, "aliases": {
            plain(name): plain(own)
            for name, own in values.get("aliases", {}).items()
        }, "left_out": [plain(name) for name in values.get("left_out", [])]
    }


def _renamed(named: dict[str, Any]) -> dict[str, Any]:
    return {plain(name): value for name, value in named.items()}

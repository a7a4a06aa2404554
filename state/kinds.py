"""Whether values that were received are of the kinds that a live state relies on.

header of a newcomer's values, or of a checkpoint → here → live_state.py; LayoutError
"""

from __future__ import annotations

from typing import Any

import numpy
import torch

from elastic_trainer.state.findings import are_sound
from elastic_trainer.state.values.layout import LayoutError
from elastic_trainer.state.values.plain_values import is_plain

OPTIONAL: dict[str, Any] = {
    "samples": 0, "evaluating": [], "trained": [], "aliases": {}, "left_out": [], "rate_used": 0.0,
    "scheduler": None, "extra_state": {}, "settings": {}, "phase": 0, "clock_ms": 0,
    "findings": {}, "attributes": {}, "other_attributes": {}, "frozen": {}}
"""What version 0.1 has not written."""


def check_kinds(values: Any) -> None:
    """Raise LayoutError unless values are of the kinds that `load` relies on.

    A value with the right digest may still have been written by another program. If `load` raised
    at it, each start of the run would end, with half of the state changed.
    """
    if not isinstance(values, dict):
        raise LayoutError("the header holds no state")
    found: dict[str, Any] = OPTIONAL | values
    kinds: dict[str, Any] = {
        "identity": dict, "optimizer": dict, "base_rates": (list, tuple),
        "rate_used": (int, float), "scheduler": (dict, type(None)), "scaler": (dict, type(None)),
        "loss": (int, float), "last_vote": (list, tuple), "step": int, "samples": int,
        "lineage": int, "phase": int, "clock_ms": int}
    bad = [name for name, kind in kinds.items()
           if name not in found or not isinstance(found[name], kind)]
    bad += [name for name in ("evaluating", "trained", "left_out")
            if not _is_list(found[name], str)]
    named = {"parameters": torch.Tensor, "buffers": torch.Tensor, "extras": object,
             "extra_state": object, "settings": object, "aliases": str, "findings": object,
             "attributes": object, "other_attributes": object, "frozen": str}
    bad += [name for name, kind in named.items() if not _is_dict(found.get(name), kind)]
    if not bad:
        bad = [name for name, is_sound in _contents(found).items() if not is_sound]
    if bad:
        raise LayoutError(f"the header holds no state of ours: {', '.join(bad)} are not what this "
                          f"version writes")


def _contents(found: dict[str, Any]) -> dict[str, bool]:
    """Return, by name, whether the values in containers are sound; the containers are."""
    optimizer, scheduler = found["optimizer"], found["scheduler"]
    groups, members = optimizer.get("groups"), optimizer.get("members")
    return {
        "optimizer": (_is_dict(optimizer.get("state"), object)
                      and isinstance(optimizer.get("shared", {}), dict)
                      and _is_list(groups, dict) and _is_list(members, (list, tuple))
                      and len(groups) == len(members)
                      and all(_is_list(names, str) for names in members)),
        "base_rates": _is_list(
            found["base_rates"], (int, float, numpy.number, torch.Tensor)) and (
            isinstance(groups, (list, tuple)) and len(found["base_rates"]) == len(groups)),
        "scheduler": not scheduler or (isinstance(scheduler.get("class"), str)
                                       and isinstance(scheduler.get("state"), dict)),
        "last_vote": _is_list(found["last_vote"], int) and len(found["last_vote"]) in (2, 4),
        "findings": are_sound(found["findings"]),
        "attributes": all(map(is_plain, found["attributes"].values())),
        "settings": not found["settings"] or isinstance(found["settings"].get("optimizer"), str),
        "aliases": (set(found["aliases"].values())
                    <= found["parameters"].keys() | found["buffers"].keys()
                    | found["frozen"].keys()),
    } | {name: found[name] >= 0 for name in ("step", "samples", "lineage", "phase")}


def _is_dict(value: Any, kind: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(k, str) and isinstance(v, kind) for k, v in value.items())


def _is_list(value: Any, kind: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, kind) for one in value)

"""Values that were received or restored: whether they are of the kinds that this version writes.

header of a checkpoint or a giver → here → live_state.py, which loads them

What always holds:
1. A value with the right digest may still have been written by another program. A value at which
   `load` raised would end each start of the run, with half of the state changed. So all kinds are
   checked first.
2. All workers hold the same findings of a step (losses, and what was logged). A worker that joins
   between two phases receives those of the phases that it has not seen. They change in `apply`
   only, with everything else that outlives a phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch

from elastic_trainer.state.layout import LayoutError
from elastic_trainer.state.module_attributes import is_plain

OPTIONAL: dict[str, Any] = {
    "samples": 0, "evaluating": [], "trained": [], "aliases": {}, "left_out": [], "rate_used": 0.0,
    "scheduler": None, "extra_state": {}, "settings": {}, "phase": 0, "clock_ms": 0,
    "findings": {}, "attributes": {}}
"""What version 0.1 has not written."""


def check_kinds(values: Any) -> None:
    """Raise LayoutError unless values are of the kinds that `load` relies on."""
    if not isinstance(values, dict):
        raise LayoutError("the header holds no state")
    found: dict[str, Any] = OPTIONAL | values
    kinds: dict[str, Any] = {
        "identity": dict, "optimizer": dict, "base_rates": (list, tuple),
        "rate_used": (int, float), "scheduler": (dict, type(None)), "scaler": (dict, type(None)),
        "loss": (int, float), "last_vote": (list, tuple), "step": int, "samples": int,
        "lineage": int, "phase": int, "clock_ms": int
    }
    bad = [name for name, kind in kinds.items()
           if name not in found or not isinstance(found[name], kind)]
    texts = ("evaluating", "trained", "left_out")
    bad += [name for name in texts if not _is_list(found[name], str)]
    named = {"parameters": torch.Tensor, "buffers": torch.Tensor, "extras": object,
             "extra_state": object, "settings": object, "aliases": str, "findings": object,
             "attributes": object}
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
                    <= found["parameters"].keys() | found["buffers"].keys()),
    } | {name: found[name] >= 0 for name in ("step", "samples", "lineage", "phase")}


def _is_dict(value: Any, kind: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(k, str) and isinstance(v, kind) for k, v in value.items())


def _is_list(value: Any, kind: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, kind) for one in value)


class Findings:
    """The losses and sums of the step in flight, or of the last finished step."""

    def __init__(self) -> None:
        self.losses: dict[str, float] = {}
        """By the name of the phase."""
        self.sums: dict[str, tuple[float, float]] = {}
        """Total and weight of what was logged, by name, over all micro-batches and phases."""

    def add(self, phase: str, loss: float, sums: Mapping[str, tuple[float, float]],
            is_first: bool) -> None:
        """Add those of a phase. The first phase of a step begins anew."""
        if is_first:
            self.losses, self.sums = {}, {}
        self.losses[phase] = loss
        for name, (total, weight) in sums.items():
            total_before, weight_before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (total_before + total, weight_before + weight)

    def values(self) -> dict[str, Any]:
        """Return them as numbers and texts in containers."""
        return {"losses": dict(self.losses), "sums": dict(self.sums)}

    def load(self, values: Mapping[str, Any]) -> None:
        """Take over values of `values`, or none."""
        self.losses = dict(values.get("losses", {}))
        self.sums = {name: (float(total), float(weight))
                     for name, (total, weight) in values.get("sums", {}).items()}


def are_sound(values: Mapping[str, Any]) -> bool:
    """Return whether values are of the kinds that `load` relies on."""
    losses, sums = values.get("losses", {}), values.get("sums", {})
    return (isinstance(losses, dict) and all(map(_is_number, losses.values()))
            and isinstance(sums, dict)
            and all(isinstance(pair, (list, tuple)) and len(pair) == 2
                    and all(map(_is_number, pair)) for pair in sums.values()))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

"""The losses and sums of a step, which its commit makes final.

reduced micro-batches (commit_step.py) → here → step.losses, step.metrics; newcomer, checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Findings:
    """The losses and sums of the step in flight, or of the last finished step.

    All workers hold the same ones. A worker that joins between two phases receives those of the
    phases that it has not seen, so they change in `apply` only.
    """

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

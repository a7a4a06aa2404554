"""What a measurement of scaling compares: cases, their rates, and the part of a step that costs.

seconds of steps, times of their parts → here → tables, plot

What always holds: everything here is a pure function of values.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PEER = "ddp"
PARTS = ("load", "forward", "backward and reduce", "vote", "apply", "other")
SHARED = ("load", "forward", "backward and reduce")
"""The parts that N workers share, if the global batch is that of one worker."""
LITTLE = 0.97
"""A ratio below this is a cost whose part is named."""


@dataclass(frozen=True, order=True)
class Case:
    """One thing to measure: an arm with a number of workers."""

    arm: str
    """"ring", "exact" or "ddp"."""
    workers: int
    scale: int = 1
    """The multiple of the global batch: the number of workers for weak scaling."""


@dataclass(frozen=True)
class Row:
    """A case with its numbers."""

    case: Case
    batch: int
    step_s: float
    """The median."""
    speedup: float
    """Its samples/s by those of one worker of the same arm."""
    to_peer: float | None
    """Its samples/s by those of DDP with as many workers and the same batch."""

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.batch / self.step_s

    @property
    def efficiency(self) -> float:
        return self.speedup / self.case.workers

    @property
    def costs(self) -> bool:
        """True if it is slower than what it is compared with by more than 3 %."""
        return (self.efficiency if self.to_peer is None else self.to_peer) < LITTLE


def cases_of(arms: Sequence[str], workers: Sequence[int], modes: Sequence[str]) -> list[Case]:
    """Return the cases in the order of their runs: arms take turns."""
    sizes = [(1, 1)]
    for number in sorted(set(workers) - {1}):
        sizes += [(number, 1)] if "strong" in modes else []
        sizes += [(number, number)] if "weak" in modes else []
    return [Case(arm, number, scale) for number, scale in sizes for arm in arms]


def rows_of(seconds: Mapping[Case, Sequence[float]], batch: int) -> list[Row]:
    """Return the numbers of all cases; `batch` is that of one worker."""
    medians = {case: statistics.median(found) for case, found in seconds.items()}
    rates = {case: batch * case.scale / step_s for case, step_s in medians.items()}
    rows = []
    for case, step_s in medians.items():
        peer = Case(PEER, case.workers, case.scale)
        rows.append(Row(case, batch * case.scale, step_s, rates[case] / rates[Case(case.arm, 1)],
                        rates[case] / rates[peer] if peer in rates and case.arm != PEER else None))
    return rows


def parts_of(phases: Mapping[str, float]) -> dict[str, float]:
    """Return the milliseconds of PARTS from those of the phases of a timeline, or of DDP's loop.
    DDP reduces in its backward pass."""
    known = {name: phases.get(name, 0.0) for name in ("load", "forward", "vote", "apply")}
    known["backward and reduce"] = phases.get("backward", 0.0) + phases.get("reduce", 0.0)
    whole = phases.get("step", sum(known.values()))
    return {name: known.get(name, max(0.0, whole - sum(known.values()))) for name in PARTS}


def shared(parts: Mapping[str, float], case: Case) -> dict[str, float]:
    """Return what the parts of one worker's step would be for each worker of a case, if sharing
    cost nothing."""
    return {name: value * case.scale / case.workers if name in SHARED else value
            for name, value in parts.items()}


def costliest(ours: Mapping[str, float], peer: Mapping[str, float]) -> tuple[str, float, float]:
    """Return the part that takes the most longer than the peer's, by how many milliseconds, and by
    how many the whole step does."""
    more = {name: ours[name] - peer.get(name, 0.0) for name in PARTS}
    name = max(more, key=lambda name: more[name])
    return name, more[name], sum(more.values())

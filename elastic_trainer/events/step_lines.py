"""The lines of an event log about committed steps, in 45 bytes a step.

judge, due → here
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from elastic_trainer.events.step_table import StepTable


class StepLine(NamedTuple):
    """The content of one line about a committed step."""

    step: int
    line: int
    life: int
    """The attempt, counted over all invocations."""
    generation: int
    samples: int
    digest: int
    loss: float


class StepLines:
    """Step lines by step, packed."""

    def __init__(self) -> None:
        self._rows = StepTable("qiqqqd")
        self.samples = 0
        """The sum over all steps."""

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, step: StepLine) -> None:
        """Add a step; a line of the same step is replaced."""
        if not self._rows.add(step.step, step[1:]):
            self.pop(step.step)
            self._rows.add(step.step, step[1:])
        self.samples += step.samples

    def get(self, number: int) -> StepLine | None:
        row = self._rows.get(number)
        return None if row is None else StepLine(number, *row)  # type: ignore[arg-type]

    def pop(self, number: int) -> StepLine | None:
        """Remove a step's line and return it."""
        row = self._rows.pop(number) if len(self._rows) else None
        if row is None:
            return None
        step = StepLine(number, *row)  # type: ignore[arg-type]
        self.samples -= step.samples
        return step

    def numbers(self, start: int | None = None) -> Iterator[int]:
        """Yield the steps from `start` on, in order. No step may be added or removed meanwhile."""
        return self._rows.steps(start)


def is_same(now: float, then: float) -> bool:
    """True for equal numbers, and for two NaNs."""
    return now == then or (math.isnan(now) and math.isnan(then))


def is_about(now: float, then: float) -> bool:
    """True for numbers that are equal but for a rounding."""
    return is_same(now, then) or math.isclose(now, then, rel_tol=1e-4, abs_tol=1e-4)

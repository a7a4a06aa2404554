"""The lines of an event log about committed steps, in 49 bytes a step.

judge, due → here

A million steps take 49 MB here, and 0.5 GB as objects in a dict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import compress
from struct import Struct
from typing import NamedTuple

ROWS = 4096
_ROW = Struct("=qqqqqd")


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


class _Block:
    """The rows of ROWS steps, and which of them are there."""

    def __init__(self) -> None:
        self.has, self.rows = bytearray(ROWS), bytearray(ROWS * _ROW.size)


class StepLines:
    """Step lines by step, packed."""

    def __init__(self) -> None:
        self._blocks = dict[int, _Block]()
        self._count = self.samples = 0
        """The sum over all steps."""

    def __len__(self) -> int:
        return self._count

    def put(self, step: StepLine) -> None:
        """Add a step; a line of the same step is replaced."""
        self.pop(step.step)
        number, at = divmod(step.step, ROWS)
        block = self._blocks.get(number) or self._blocks.setdefault(number, _Block())
        _ROW.pack_into(block.rows, at * _ROW.size, *step[1:])
        block.has[at] = 1
        self._count, self.samples = self._count + 1, self.samples + step.samples

    def get(self, number: int) -> StepLine | None:
        block, at = self._blocks.get(number // ROWS), number % ROWS
        if block is None or not block.has[at]:
            return None
        return StepLine(number, *_ROW.unpack_from(block.rows, at * _ROW.size))

    def pop(self, number: int) -> StepLine | None:
        """Remove a step's line and return it."""
        if (step := self.get(number)) is not None:
            block = self._blocks[number // ROWS]
            block.has[number % ROWS] = 0
            if not block.has.count(1):
                del self._blocks[number // ROWS]
            self._count, self.samples = self._count - 1, self.samples - step.samples
        return step

    def numbers(self, start: int = 0) -> Iterator[int]:
        """Yield the steps from `start` on, in order. No step may be added or removed meanwhile."""
        for number in sorted(self._blocks):
            steps = compress(range(number * ROWS, (number + 1) * ROWS), self._blocks[number].has)
            yield from (step for step in steps if step >= start)


def is_same(now: float, then: float) -> bool:
    """True for equal numbers, and for two NaNs."""
    return now == then or (math.isnan(now) and math.isnan(then))


def is_about(now: float, then: float) -> bool:
    """True for numbers that are equal but for a rounding."""
    return is_same(now, then) or math.isclose(now, then, rel_tol=1e-4, abs_tol=1e-4)

"""How far the run has come, as most of its workers report it: what the driver logs.

heartbeats → membership → here → driver (event driver.step_reached) → past.py, supervisor

A single worker that is wrong, or lies, can claim neither progress nor a checkpoint. A run that
claims progress is tried without a limit, and a claimed checkpoint that is not there would keep
every later attempt from starting. In a world of 3 or more it cannot hide either.
"""

from __future__ import annotations

from collections.abc import Iterable

TELL_S = 10.0
"""The interval of the events: a driver that is killed takes this much news with it. A day has 8,640
such lines."""


def of_most(numbers: Iterable[int]) -> int:
    """Return the largest number that more than half of them have reached; there is at least one."""
    ordered = sorted(numbers)
    return ordered[(len(ordered) - 1) // 2]


class Reached:
    """The steps and the checkpoint of this attempt, and when to log them.

    They are logged at once with the attempt's first step, and when the run comes further than ever;
    else at most every TELL_S, and at the end. `steps` and `checkpoint` are of the attempts before.
    """

    def __init__(self, steps: int, checkpoint: int):
        self.steps = self.checkpoint = 0
        self._ever = steps, checkpoint
        self._told, self._told_at = (0, 0), 0.0

    def hear(self, steps: int, checkpoint: int) -> None:
        """Take what most living members report."""
        self.steps = max(self.steps, steps)
        self.checkpoint = max(self.checkpoint, min(checkpoint, self.steps))

    def news(self, now: float, *, is_last: bool = False) -> dict[str, int] | None:
        """Return what is to be logged now, if anything is; it counts as logged then."""
        told, reached = self._told, (self.steps, self.checkpoint)
        if reached == told:
            return None
        passes_ever = any(old <= ever < new
                          for old, ever, new in zip(told, self._ever, reached, strict=True))
        is_due = now - self._told_at >= TELL_S
        if not (not told[0] or passes_ever or is_last or is_due):
            return None
        self._told, self._told_at = reached, now
        return {"steps": self.steps, "checkpoint": self.checkpoint}

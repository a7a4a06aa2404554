"""How far the run has come, as most of its workers report it: what the driver logs.

heartbeats → membership → here → driver (event driver.step_reached) → past.py, supervisor

A single worker with a false report can claim neither progress nor a checkpoint. Claimed progress
would allow attempts without a limit, and a claimed checkpoint that does not exist would keep every
later attempt from starting. In a world of 3 or more it cannot hide progress either.
"""

from __future__ import annotations

from collections.abc import Iterable

LOG_EVERY_S = 10.0
"""The interval of the events. A driver that is killed loses at most this much progress in the log.
A day has 8,640 such lines."""


def of_most(numbers: Iterable[int]) -> int:
    """Return the largest number that more than half of them have reached; there is at least one."""
    ordered = sorted(numbers)
    return ordered[(len(ordered) - 1) // 2]


class Reached:
    """The steps and the checkpoint of this attempt, and when to log them.

    They are logged at once with the attempt's first step, and when the run comes further than
    ever. Otherwise they are logged at most every LOG_EVERY_S, and at the end. `steps` and
    `checkpoint` are of the attempts before.
    """

    def __init__(self, steps: int, checkpoint: int):
        self.steps = self.checkpoint = 0
        self._ever = steps, checkpoint
        self._logged, self._logged_at = (0, 0), 0.0

    def receive(self, steps: int, checkpoint: int) -> None:
        """Take what most living members report."""
        self.steps = max(self.steps, steps)
        self.checkpoint = max(self.checkpoint, min(checkpoint, self.steps))

    def news(self, now: float, *, is_last: bool = False) -> dict[str, int] | None:
        """Return what is to be logged now, if anything is; it counts as logged then."""
        logged, reached = self._logged, (self.steps, self.checkpoint)
        if reached == logged:
            return None
        passes_ever = any(old <= ever < new
                          for old, ever, new in zip(logged, self._ever, reached, strict=True))
        is_due = now - self._logged_at >= LOG_EVERY_S
        if not (not logged[0] or passes_ever or is_last or is_due):
            return None
        self._logged, self._logged_at = reached, now
        return {"steps": self.steps, "checkpoint": self.checkpoint}

"""How far the run has come, by the word of most of its workers: what the driver tells the supervisor.

workers' heartbeats → membership → here → driver (event driver.step_reached) → past.py, supervisor

One worker that is wrong, or lies, can neither claim progress for a run that has none, which would be retried for ever, nor
a checkpoint that is not there, without which no later attempt would start; in a world of 3 or more it cannot hide any.
"""

from __future__ import annotations

from collections.abc import Iterable

TELL_S = 10.0
"""A driver that is killed takes the news of at most so many seconds with it. A day has 8,640 such lines."""


def of_most(numbers: Iterable[int]) -> int:
    """Return the largest number that more than half of them have reached; there is at least one."""
    ordered = sorted(numbers)
    return ordered[(len(ordered) - 1) // 2]


class Reached:
    """The steps and the checkpoint of this attempt, and when there is news of them: at once with the attempt's first step
    and when the run has come further than ever; else at most every TELL_S, and at the end.
    """

    def __init__(self, steps: int, checkpoint: int):
        self.steps = self.checkpoint = 0
        self._ever = steps, checkpoint
        """Of the attempts before."""
        self._told, self._told_at = (0, 0), 0.0

    def hear(self, steps: int, checkpoint: int) -> None:
        """Take what most living members say."""
        self.steps = max(self.steps, steps)
        self.checkpoint = max(self.checkpoint, min(checkpoint, self.steps))

    def news(self, now: float, *, is_last: bool = False) -> dict[str, int] | None:
        """Return what is to be told now, if anything is; it counts as told then."""
        told, reached = self._told, (self.steps, self.checkpoint)
        if reached == told:
            return None
        is_first = not told[0] or any(old <= ever < new for old, ever, new in zip(told, self._ever, reached, strict=True))
        if not (is_first or is_last or now - self._told_at >= TELL_S):
            return None
        self._told, self._told_at = reached, now
        return {"steps": self.steps, "checkpoint": self.checkpoint}

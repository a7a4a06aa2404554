"""The cost of a change of the world: the time between two steps' ends, less a normal step.

world (its time stamps) → here → worker.pause_ended → the books of report

The parts follow each other, and add up to the pause. Each part ends at a moment:
    noticing   this worker leaves the generation (all wait for a frozen worker for seconds)
    deciding   the last place is given (failed tries to form a world included)
    forming    hvd.init() has returned
    transfer   all members hold the state
    redoing    the step is done; its normal time is not counted

What always holds: a step takes its normal time also without a fault. That time is first taken off
the wait before the fault was noticed, and then off the step after the change. So a planned change
costs no noticing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

NORMAL_STEPS = 9
"""The time of a normal step is the median of this number of steps."""


class Survivor(NamedTuple):
    """What a worker that holds the state knows when a generation has formed."""

    since_step_ms: int
    """The time since its last step ended."""
    since_left_ms: int
    """The time since it left the generation of that step."""
    normal_ms: int


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of one pause, in seconds."""

    noticing_s: float
    deciding_s: float
    forming_s: float
    transfer_s: float
    redoing_s: float

    @property
    def duration_s(self) -> float:
        return float(sum(vars(self).values()))


def parts_of(survivors: Iterable[Survivor], *, forming_s: float, transfer_s: float,
             step_s: float) -> Parts:
    """Return the parts of a pause, by what the survivors knew when the world had formed."""
    longest = max(survivors)
    since_step_s, since_left_s, normal_s = (milliseconds / 1000.0 for milliseconds in longest)
    waited_s = max(0.0, since_step_s - since_left_s)
    noticing_s = max(0.0, waited_s - normal_s)
    redoing_s = max(0.0, step_s - max(0.0, normal_s - waited_s))
    return Parts(noticing_s=noticing_s,
                 deciding_s=max(0.0, since_left_s - forming_s),
                 forming_s=forming_s,
                 transfer_s=transfer_s,
                 redoing_s=redoing_s)


class Pauses:
    """One worker's clock of steps and pauses."""

    def __init__(self, since: float | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.step_ended = clock() if since is None else since
        self._left: float | None = None
        self._steps: deque[float] = deque(maxlen=NORMAL_STEPS)
        self._placed = self._formed = self._entered = 0.0
        self._survivors: list[Survivor] = []

    def leave(self) -> None:
        """Note that the generation is left; once since the last finished step."""
        self._left = self._left or self._clock()

    def place(self) -> None:
        """Note that a place has been given."""
        self._placed, self._survivors = self._clock(), []

    def form(self) -> Survivor:
        """Note that the world has formed; return what this worker sends to the other members."""
        self._formed = now = self._clock()
        normal_s = median(self._steps) if self._steps else 0.0
        stamps = (now - self.step_ended, now - (self._left or self.step_ended), normal_s)
        return Survivor(*(int(1000 * seconds) for seconds in stamps))

    def enter(self, survivors: Iterable[Survivor]) -> None:
        """Note that all members hold the state, and which held it before. None did: no pause."""
        self._entered, self._survivors = self._clock(), list(survivors)

    def step(self, step_s: float) -> Parts | None:
        """Note the end of a step; return the parts of the pause that it has ended, if any."""
        ended, self._survivors = self._survivors, []
        self.step_ended, self._left = self._clock(), None
        if not ended:
            self._steps.append(step_s)
            return None
        return parts_of(ended,
                        forming_s=self._formed - self._placed,
                        transfer_s=self._entered - self._formed,
                        step_s=self.step_ended - self._entered)

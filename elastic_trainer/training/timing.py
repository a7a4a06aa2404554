"""What steps and checkpoints cost, as rank 0 measures it: when the next checkpoint is due, and whether steps became slower.

loop (each step's time) → here → cadence (the interval) → the vote's wish for a checkpoint
"""

from __future__ import annotations

import math
import time
from statistics import median

from elastic_trainer.config import Launch
from elastic_trainer.observe.events import Events
from elastic_trainer.state.checkpoint import Checkpoints

OVERDUE_S = 60.0
"""The last good checkpoint may always be so old before an alarm is raised."""
PACE_STEPS, PACE_S = 5, 3.0
"""A pace is the median of so many steps at least, and of so much time."""
SLOWER, AS_BEFORE = 1.5, 1.2
"""So many times their best pace in this world, steps are slower; and are again as before."""


class Timing:
    """What steps and checkpoints cost, as rank 0 measures it, and so when the next checkpoint is due."""

    def __init__(self) -> None:
        self.started = self.begun_at = time.monotonic()
        self.begun_step: int | None = None
        self.pause_s = 0.0
        self._seconds = {False: 0.0, True: 0.0}
        """Moving averages of a step's time, without and with an upload in flight."""
        self._uploading_steps = self._in_flight = 0
        self._is_alarmed = False

    def step(self, seconds: float, is_uploading: bool) -> None:
        """Note a step's time, without the pause at its end."""
        before = self._seconds[is_uploading]
        self._seconds[is_uploading] = 0.9 * before + 0.1 * seconds if before else seconds
        self._in_flight += is_uploading

    def begun(self, step: int, checkpoints: Checkpoints) -> None:
        """Note that a checkpoint was begun."""
        self._uploading_steps, self._in_flight = self._in_flight, 0
        self.begun_at, self.begun_step = time.monotonic(), step
        self.pause_s = checkpoints.share.pause_s if checkpoints.share else 0.0

    def cost_s(self) -> float:
        """Return what a checkpoint costs the training: its pause, and what the steps beside its upload take longer."""
        slower = max(0.0, self._seconds[True] - self._seconds[False]) if self._seconds[False] else 0.0
        return self.pause_s + slower * self._uploading_steps

    def is_due(self, checkpoints: Checkpoints, step: int, launch: Launch, events: Events) -> bool:
        """True if a checkpoint after `step` is due; says it when the last good one is too old, so ask after each step."""
        now, every = time.monotonic(), checkpoints.plan.every
        begun_step = step - 1 if self.begun_step is None else self.begun_step
        self.begun_step = begun_step
        interval_s = every.interval_s(cost_s=self.cost_s(), losses=launch.lost_attempts, step_s=self._seconds[False],
                                      observed_s=launch.run_s + now - self.started)
        age_s = now - (checkpoints.published_at or now)
        is_overdue = age_s > max(OVERDUE_S, 3.0 * interval_s)
        if is_overdue and not self._is_alarmed:
            events.emit("state.checkpoint_overdue", step=step, age_s=round(age_s, 1), newest_step=checkpoints.newest_step)
        self._is_alarmed = is_overdue
        waited_s = now - self.begun_at
        if checkpoints.failures and waited_s < min(60.0, 2.0 ** min(checkpoints.failures, 6)):
            return False
        if checkpoints.failures:
            return True  # the last one came to nothing
        return step // every.steps > begun_step // every.steps if every.steps else waited_s >= interval_s


class Pace:
    """How long the steps of one generation take: says when they become slower, and when they no longer are.

    A line that is slow, a host that is: nobody dies of it, and everybody waits for the slowest. How long rank 0 waits for
    the others and the network (and its own GPU, which computes behind it) says whether it is itself the slow one.
    """

    def __init__(self, events: Events):
        self.events, self.best_s = events, math.inf
        self.told_s = 0.0
        """The pace that was told as slower; 0.0 while steps are as before."""
        self._steps: list[tuple[float, float]] = []
        self._took_s = 0.0

    def step(self, step: int, step_s: float, waited_s: float) -> None:
        """Note how long a step took, and how long of that this worker waited for the others' gradients and votes."""
        self._steps.append((step_s, waited_s))
        self._took_s += step_s
        if len(self._steps) < PACE_STEPS or self._took_s < PACE_S:
            return
        pace_s, waited_s = (median(times) for times in zip(*self._steps, strict=True))
        self._steps.clear()
        self._took_s = 0.0
        if pace_s > SLOWER * (self.told_s or self.best_s):
            self.told_s = pace_s
            self.events.emit("worker.steps_slower", step=step, step_s=round(pace_s, 4), waited_s=round(waited_s, 4),
                             best_s=round(self.best_s, 4))
        elif self.told_s and pace_s < AS_BEFORE * self.best_s:
            self.told_s = 0.0
            self.events.emit("worker.steps_as_before", step=step, step_s=round(pace_s, 4))
        self.best_s = min(self.best_s, pace_s)

"""What steps and checkpoints cost, as rank 0 measures it, and so when the next checkpoint is due.

loop (each step's time) → here → cadence (the interval) → the vote's wish for a checkpoint
"""

from __future__ import annotations

import time

from elastic_trainer.config import Launch
from elastic_trainer.events import Events
from state.checkpoint import Checkpoints

OVERDUE_S = 60.0
"""The last good checkpoint may always be so old before an alarm is raised."""


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

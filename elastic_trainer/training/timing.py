"""Measure what steps and checkpoints cost, and tell a person what is late or was not written.

loop (the time of each step) → here → cadence (the interval) → checkpointing → the vote;
checkpointing (failed checkpoints) → here → stderr, and the error of a run without its last one

What always holds:
1. `tick` acts: it emits events and starts clocks. `is_due`, `cost_s` and `interval_s` only answer.
2. Only rank 0 calls `tick` and `is_due`. The other workers follow the vote.
"""

from __future__ import annotations

import math
import sys
import time
from statistics import median

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.events.log import Events
from elastic_trainer.state.checkpoints.cadence import Cadence, UploadCost
from elastic_trainer.state.checkpoints.publish import Known
from elastic_trainer.world.place import Unsaved

OVERDUE_S = 60.0
"""The smallest age of the newest checkpoint at which `state.checkpoint_overdue` is emitted."""
OVERDUE_INTERVALS = 3.0
"""The newest checkpoint is overdue at this multiple of the planned interval."""
LONGEST_RETRY_S = 60.0
"""The longest wait between a failed checkpoint and the next one. It doubles with each failure."""
PACE_STEPS, PACE_S = 5, 3.0
"""A pace is the median of at least PACE_STEPS steps that took at least PACE_S seconds together."""
SLOWER, AS_BEFORE = 1.5, 1.2
"""Steps are slower at SLOWER times the best pace of this world, as before at AS_BEFORE times."""


def is_checkpoint_due(every: Cadence, *, step: int, begun_step: int, waited_s: float,
                      interval_s: float, failures: int) -> bool:
    """Return whether a checkpoint after `step` is due.

    The last one was begun at `begun_step`, `waited_s` seconds ago. `failures` have failed since the
    last one that did not.
    """
    if every.is_last_only:
        return False
    if failures:
        return waited_s >= min(LONGEST_RETRY_S, 2.0 ** min(failures, 6))
    if every.steps:
        return step // every.steps > begun_step // every.steps
    return waited_s >= interval_s


def is_overdue(age_s: float, interval_s: float) -> bool:
    return age_s > max(OVERDUE_S, OVERDUE_INTERVALS * interval_s)


class Timing:
    """What steps and checkpoints cost, as this worker measures it."""

    def __init__(self, every: Cadence, launch: Launch, events: Events) -> None:
        self.every, self.launch, self.events = every, launch, events
        self.started = self.begun_at = time.monotonic()
        self.pause_s = 0.0
        """The pause of the last snapshot."""
        self._new_pause_s = 0.0
        self._begun_step: int | None = None
        """The step of the last checkpoint begun; or the first step at which rank 0 was asked."""
        self._upload = UploadCost()
        self._step_s = 0.0
        """A step's time without an upload; of the worlds before, until this one has had one."""
        self._is_overdue = False

    def enter(self) -> None:
        self._upload.enter()

    def step(self, seconds: float, is_uploading: bool) -> None:
        """Note a step's time, without the pause at its end."""
        self._upload.step(seconds, is_uploading)
        self._step_s = self._upload.alone_s or self._step_s

    def begun(self, step: int, pause_s: float) -> None:
        """Note that a checkpoint of `step` was begun, and that its snapshot took `pause_s`."""
        self._upload.begin()
        self.begun_at, self._begun_step, self.pause_s = time.monotonic(), step, pause_s
        self._new_pause_s += pause_s

    def taken(self) -> dict[str, float]:
        """Return the pauses of snapshots since the last call as a field of an event, if any."""
        pause_s, self._new_pause_s = self._new_pause_s, 0.0
        return {"checkpoint_s": round(pause_s, 5)} if pause_s else {}

    def cost_s(self) -> float:
        """Return what a checkpoint costs: its pause, and the time its upload adds to steps."""
        return self.pause_s + self._upload.added_s

    def interval_s(self) -> float:
        """Return the planned time between two checkpoints."""
        observed_s = self.launch.run_s + time.monotonic() - self.started
        return self.every.interval_s(cost_s=self.cost_s(), losses=self.launch.lost_attempts,
                                     step_s=self._step_s, observed_s=observed_s)

    def tick(self, step: int, newest_step: int, published_at: float | None) -> None:
        """Emit, once, that the newest checkpoint is too old. To be called before each vote."""
        if self._begun_step is None:
            self._begun_step = step - 1
        now = time.monotonic()
        age_s = now - (published_at or now)
        was_overdue, self._is_overdue = self._is_overdue, is_overdue(age_s, self.interval_s())
        if self._is_overdue and not was_overdue:
            self.events.emit("state.checkpoint_overdue", step=step, age_s=round(age_s, 1),
                             newest_step=newest_step)

    def is_due(self, step: int, failures: int) -> bool:
        begun_step = step - 1 if self._begun_step is None else self._begun_step
        return is_checkpoint_due(self.every, step=step, begun_step=begun_step, failures=failures,
                                 waited_s=time.monotonic() - self.begun_at,
                                 interval_s=self.interval_s())


class Pace:
    """Emit when the steps of one generation become slower, and when they are as before.

    A slow network or host ends no worker, but all workers wait for the slowest one. `waited_s`
    is the time that rank 0 waits for the other workers, the network and its own GPU. A small
    `waited_s` means that rank 0 itself is slow.
    """

    def __init__(self, events: Events):
        self.events, self.best_s = events, math.inf
        self.slow_s = 0.0
        """The pace that was last emitted as slower; 0.0 while steps are as before."""
        self._steps: list[tuple[float, float]] = []
        self._took_s = 0.0

    def step(self, step: int, step_s: float, waited_s: float) -> None:
        """Note the time of a step, and how much of it was spent waiting for other workers."""
        self._steps.append((step_s, waited_s))
        self._took_s += step_s
        if len(self._steps) < PACE_STEPS or self._took_s < PACE_S:
            return
        pace_s, waited_s = (median(times) for times in zip(*self._steps, strict=True))
        self._steps.clear()
        self._took_s = 0.0
        if pace_s > SLOWER * (self.slow_s or self.best_s):
            self.slow_s = pace_s
            self.events.emit("worker.steps_slower", step=step, step_s=round(pace_s, 4),
                             waited_s=round(waited_s, 4), best_s=round(self.best_s, 4))
        elif self.slow_s and pace_s < AS_BEFORE * self.best_s:
            self.slow_s = 0.0
            self.events.emit("worker.steps_as_before", step=step, step_s=round(pace_s, 4))
        self.best_s = min(self.best_s, pace_s)


class Told:
    """What a person was told of failed checkpoints."""

    def __init__(self) -> None:
        self._errors = 0
        """The number of failed checkpoints when this was last looked at."""

    def look(self, known: Known) -> None:
        """Tell a person that checkpoints fail again and again: after 2, 4, 8, … of them."""
        errors, before, self._errors = known.errors, self._errors, known.errors
        if errors > 1 and errors != before and errors & (errors - 1) == 0:
            _print(f"{errors} checkpoints in a row were not written ({known.why}). {newest(known)} "
                   f"The training goes on, and checkpoints are tried again. Mend the store.")


def newest(known: Known) -> str:
    return (f"The newest checkpoint is that of step {known.newest_step}." if known.newest_step > 0
            else "There is no checkpoint.")


def tell_last(step: int, known: Known) -> None:
    _print(f"the checkpoint of step {step} was not written ({known.why}). {newest(known)} The same "
           f"command does the steps after it again.")


def unsaved(steps: int, known: Known, tried_s: float, rank: int, events: Events) -> Unsaved:
    """Return what ends a run that has done all its steps without its last checkpoint. Rank 0 logs
    it."""
    if rank == 0:
        events.emit("job.left_unsaved", step=steps, error=known.why,
                    newest_checkpoint=known.newest_step)
    return Unsaved(
        f"the run has done all its {steps} steps, but its last checkpoint could not be written in "
        f"{tried_s:g} s: {known.why or 'rank 0 has the error'}. {newest(known)} The steps after it "
        f"are lost with this process. Mend the store, and give the same command: it does them "
        f"again.")


def no_checkpoint(launch: Launch) -> ConfigError:
    """Return what to raise if the folder of a run that has checkpoints has none on this host."""
    return ConfigError(
        f"the run has a checkpoint of step {launch.resume_step}, but {launch.run_dir} on this host "
        f"has none. Give the same --store as before, or put the folder of runs (--runs-dir) on a "
        f"disk that all hosts share.")


def _print(sentence: str) -> None:
    print(f"elastic-trainer: {sentence}", file=sys.stderr, flush=True)

"""The samples that each step of a run must have, by the job that the event log describes.

judge → here → Findings (lineage)
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule.order import known_by
from elastic_trainer.schedule.schedule import Schedule, samples_digest
from elastic_trainer.views.lineage import Findings, StepLine, StepLines

LENGTH_KEYS = ("epochs", "max_steps")
"""The keys that may change when a run is resumed: the finished steps do not depend on them."""
SCHEDULE_KEYS = ("dataset_size", "global_batch", "microbatches", "seed", *LENGTH_KEYS)
DIGEST_CHUNK_SAMPLES = 2**20
DUE_CHUNK_SAMPLES = 2**16
"""The samples of the steps that are computed together. A call for each step took 40 µs a step."""
DUE_CHUNKS = 4
"""The chunks that are kept: a start from a checkpoint goes back a few."""


class Due:
    """The job, and the samples that its steps must have."""

    def __init__(self, findings: Findings):
        self.findings = findings
        self.job: dict[str, Any] | None = None
        self.line = 0
        """The line that describes the job."""
        self.schedule: Schedule | None = None
        self._digests: dict[int, list[int]] = {}
        """First step of a chunk → digests."""

    def describe(self, event: dict[str, Any], *, may_be_longer: bool) -> bool:
        """Take a job.described. Returns True if the job is a new one, or has a new length."""
        job = {key: event[key] for key in (*SCHEDULE_KEYS, "reduce")}
        job["drop_last"] = bool(event.get("drop_last"))  # older lines have none
        job["order"] = known_by(event)
        before = self.job
        if before is None:
            self._take(job)
            return True
        may_change = LENGTH_KEYS if may_be_longer else ()
        changed = {key for key, value in job.items() if value != before[key]}
        for key in sorted(changed.difference(may_change)):
            self.findings.violate(f"the job's {key} is {job[key]!r}, but {before[key]!r} in line "
                                  f"{self.line}.")
        if not changed or not changed <= {*may_change}:
            return False
        self._take(job)
        return True

    def _take(self, job: dict[str, Any]) -> None:
        self.job, self.line = job, self.findings.line
        try:
            self.schedule = Schedule(**{key: value for key, value in job.items()
                                        if key != "reduce"})
        except ConfigError as error:
            self.findings.violate(f"the job has no schedule, so no step can be checked: {error}")

    @property
    def steps(self) -> int | None:
        """The steps of the whole run; None if no job with a schedule was described."""
        return None if self.schedule is None else self.schedule.steps

    def check(self, step: StepLine) -> None:
        """Compare a step's samples and digest with the schedule's."""
        schedule, violate = self.schedule, self.findings.violate
        if schedule is None:
            return
        if not 0 <= step.step < schedule.steps:
            violate(f"step {step.step} is none of the run's {schedule.steps} steps.")
            return
        samples, digest = schedule.batch_size(step.step), self._digest(schedule, step.step)
        if step.samples != samples:
            violate(f"step {step.step} counted {step.samples} samples, but {samples} were due.")
        if step.digest != digest:
            violate(f"step {step.step} has digest {step.digest}, but {digest} was due: other "
                    f"samples.")

    def _digest(self, schedule: Schedule, step: int) -> int:
        in_epoch = step % schedule.steps_per_epoch
        length = max(1, DUE_CHUNK_SAMPLES // schedule.global_batch)
        first = step - in_epoch % length
        if first not in self._digests:
            while len(self._digests) >= DUE_CHUNKS:
                del self._digests[next(iter(self._digests))]
            left = schedule.steps_per_epoch - (first % schedule.steps_per_epoch)
            self._digests[first] = schedule.batch_digests(range(first, first + min(length, left)))
        return self._digests[first][step - first]

    def whole_epochs(self, kept: StepLines) -> tuple[list[int], list[int]]:
        """Return the epochs that have all steps: those whose digests add up, and the others."""
        if self.schedule is None:
            return [], []
        each = self.schedule.steps_per_epoch
        digests: Counter[int] = Counter()
        steps: Counter[int] = Counter()
        for number in kept.numbers():
            step = kept.get(number)
            assert step is not None
            digests[number // each] += step.digest
            steps[number // each] += 1
        complete = sorted(epoch for epoch, count in steps.items() if count == each)
        everything = dataset_digest(self.schedule.dataset_size) if complete else 0
        whole = [epoch for epoch in complete
                 if digests[epoch] + self.schedule.dropped_digest(epoch) == everything]
        return whole, [epoch for epoch in complete if epoch not in whole]


def dataset_digest(size: int) -> int:
    starts = range(0, size, DIGEST_CHUNK_SAMPLES)
    stops = [*starts[1:], size]
    chunks = (np.arange(start, stop, dtype=np.int64)
              for start, stop in zip(starts, stops, strict=True))
    return sum(samples_digest(chunk) for chunk in chunks)

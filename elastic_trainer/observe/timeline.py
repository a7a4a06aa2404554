"""The timeline of a run, for its pictures: 24 bytes of each step, each change of the fleet and each
recovery.

event log → here → picture (text), svg
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from elastic_trainer.observe import sentences
from elastic_trainer.observe.story import Recovery, recovery_of

CHUNK_STEPS = 2**16


class Mark(Enum):
    """A change of the fleet."""

    LOST = "a worker lost"
    SMALLER = "smaller world"
    LARGER = "larger world"
    RESTART = "everybody gone: a new attempt"
    LEAVES = "a host leaves the list"
    CHECKPOINT = "a checkpoint"


@dataclass(frozen=True)
class Change:
    """A mark, and the time and the size of the world from then on."""

    time: float
    mark: Mark
    size: int
    how: str = ""
    """How the worker was lost: "killed", "frozen"."""


class Timeline:
    """A run's steps and changes, in the order of its events."""

    def __init__(self) -> None:
        self._times, self._seconds, self._samples = array("d"), array("d"), array("d")
        self.changes: list[Change] = []
        self.size = 0
        """Workers in the newest world."""
        self.first_size = 0
        self.recoveries: list[Recovery] = []
        self.checkpoints = array("d")
        """When each was published."""

    def through(self, events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Take the events, and yield them."""
        for event in events:
            self.take(event)
            yield event

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one more event."""
        match event["event"]:
            case "worker.step_committed" if not event.get("repeated"):
                self._times.append(float(event["time"]))
                self._seconds.append(float(event.get("step_s") or 0.0))
                self._samples.append(int(event["samples"]))
            case "driver.worker_gone":
                ending = sentences.ENDINGS.get(str(event.get("reason")))
                if ending and ending.is_lost and ending.has_booted:
                    self._mark(event, Mark.LOST, sentences.loss(event))
            case "worker.generation_started":
                before, self.size = self.size, int(event["size"])
                self.first_size = self.first_size or self.size
                if before and self.size != before:
                    self._mark(event, Mark.LARGER if self.size > before else Mark.SMALLER)
            case "attempt.started" if self.size:
                self._mark(event, Mark.RESTART)
            case "driver.host_removed":
                self._mark(event, Mark.LEAVES)
            case "worker.pause_ended":
                self.recoveries.append(recovery_of(event))
            case "state.checkpoint_published":
                self.checkpoints.append(float(event["time"]))

    def _mark(self, event: Mapping[str, Any], mark: Mark, how: str = "") -> None:
        self.changes.append(Change(float(event["time"]), mark, self.size, how))

    @property
    def steps(self) -> int:
        """The number of steps, those included that a start from a checkpoint dropped."""
        return len(self._times)

    @property
    def span(self) -> tuple[float, float] | None:
        """The start of the first step and the end of the last; None before two steps."""
        if len(self._times) < 2:
            return None
        return self._times[0] - self._seconds[0], self._times[-1]

    def done_by(self, moments: Sequence[float]) -> list[float]:
        """Return the number of samples that were done at each moment.

        The samples of a step are spread over its time: otherwise slow steps would look like pauses.
        """
        totals = [0.0] * len(moments)
        for low in range(0, len(self._times), CHUNK_STEPS):
            ends, seconds, samples = (
                np.frombuffer(numbers, dtype=np.float64)[low : low + CHUNK_STEPS]
                for numbers in (self._times, self._seconds, self._samples))
            first, last = float((ends - seconds).min()), float(ends.max())
            whole = float(samples.sum())
            for place, moment in enumerate(moments):
                if moment >= last:
                    totals[place] += whole
                elif moment > first:
                    done = np.clip(1.0 - (ends - moment) / np.maximum(seconds, 1e-9), 0.0, 1.0)
                    totals[place] += float(done @ samples)
        return totals

    def rates(self, moments: Sequence[float]) -> list[float]:
        """Return the samples a second between each two neighbours of the moments."""
        done = self.done_by(moments)
        return [max(0.0, after - before) / max(end - start, 1e-9)
                for before, after, start, end
                in zip(done, done[1:], moments, moments[1:], strict=False)]

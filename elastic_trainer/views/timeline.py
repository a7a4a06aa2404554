"""The timeline of a run, for its pictures: 24 bytes of each step, each change of the fleet and each
recovery.

event log → here → picture (text), svg

A script in Horovod's own style logs commits, and no samples. Its pictures have steps a second.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.events import sentences
from elastic_trainer.events.lifetime import Lifetime
from elastic_trainer.views.story import Recovery, recovery_of

CHUNK_STEPS = 2**16


class Mark(Enum):
    """A change of the fleet."""

    LOST = "a worker lost"
    SMALLER = "smaller world"
    LARGER = "larger world"
    JOINED = "a worker takes a free place"
    RESTART = "everybody gone: a new attempt"
    LEAVES = "a host leaves the list"
    CHECKPOINT = "a checkpoint"


@dataclass(frozen=True)
class Change:
    """A mark, and its time."""

    time: float
    mark: Mark
    how: str = ""
    """How the worker was lost: "killed", "frozen"."""


class Timeline:
    """A run's steps and changes, in the order of its events."""

    def __init__(self) -> None:
        self._times, self._seconds, self._samples = array("d"), array("d"), array("d")
        self.unit = "samples"
        """What the rates count: samples, or steps if the log has no samples."""
        self.changes: list[Change] = []
        self.sizes: list[tuple[float, int]] = []
        """Times, and how many workers the world had from then on."""
        self.recoveries: list[Recovery] = []
        self.checkpoints = array("d")
        """When each was published."""
        self._life = Lifetime()
        self._size = 0
        """Workers in the newest world."""
        self._formed = self._world = self._alive = frozenset[str]()
        """The members that the driver last named, those of the newest world that has trained, and
        those whose processes run."""

    def through(self, events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Take the events, and yield them."""
        for event in events:
            self.take(event)
            yield event

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one more event."""
        name = event["event"]
        if name == "worker.step_committed":
            if not event.get("repeated"):
                self._step(event, event.get("step_s"), event["samples"])
            return
        if name == "worker.commit_kept":
            self.unit = "samples" if self._times and self.unit == "samples" else "steps"
            self._step(event, event.get("commit_s"), 1)
            return
        self._life.take(event)
        match name:
            case "driver.worker_gone":
                ending = sentences.ENDINGS.get(str(event.get("reason")))
                if ending and ending.is_lost and ending.has_booted:
                    self._mark(event, Mark.LOST, sentences.loss(event))
                self._lose(event)
            case "driver.generation_formed":
                self._formed = self._alive = frozenset(map(str, event.get("workers") or ()))
            case "worker.generation_started":
                self._begin_world(event)
            case "attempt.started":
                if self._size:
                    self._mark(event, Mark.RESTART)
                self._end_world(self._life.before)
            case "attempt.ended":
                self._end_world(float(event["time"]))
            case "driver.host_removed":
                self._mark(event, Mark.LEAVES)
            case "worker.pause_ended":
                self.recoveries.append(recovery_of(event))
            case "state.checkpoint_published":
                self.checkpoints.append(float(event["time"]))

    def _step(self, event: Mapping[str, Any], seconds: Any, samples: int) -> None:
        time = float(event["time"])
        self._times.append(time)
        self._seconds.append(float(seconds or 0.0))
        self._samples.append(samples)
        self._life.step(time)

    def _begin_world(self, event: Mapping[str, Any]) -> None:
        before, self._size = self._size, int(event["size"])
        if before and self._size != before:
            self._mark(event, Mark.LARGER if self._size > before else Mark.SMALLER)
        if self._world and self._formed - self._world and self._size <= before:
            self._mark(event, Mark.JOINED)
        self._world = self._formed
        self.sizes.append((float(event["time"]), self._size))

    def _lose(self, event: Mapping[str, Any]) -> None:
        """Take the end of a worker. A world without a living member has no workers."""
        worker = str(event.get("worker"))
        if worker in self._alive:
            self._alive -= {worker}
            if not self._alive:
                self._end_world(float(event["time"]))

    def _end_world(self, time: float) -> None:
        self._world = self._alive = frozenset()
        if self.sizes and self.sizes[-1][1]:
            self.sizes.append((time, 0))

    def _mark(self, event: Mapping[str, Any], mark: Mark, how: str = "") -> None:
        self.changes.append(Change(float(event["time"]), mark, how))

    @property
    def steps(self) -> int:
        """The number of steps, those included that a start from a checkpoint dropped."""
        return len(self._times)

    @property
    def span(self) -> tuple[float, float] | None:
        """The start of the first step, and the time of the last event of the run: its end, if it
        is over. None before two steps."""
        if len(self._times) < 2:
            return None
        return self._times[0] - self._seconds[0], self._life.end

    @property
    def stops(self) -> Sequence[tuple[float, float]]:
        """Start and end of each time in which the run was stopped, and was started again."""
        return self._life.stops

    def done_by(self, moments: Sequence[float]) -> NDArray[np.float64]:
        """Return the number of samples that were done at each moment; the moments rise.

        The samples of a step are spread over its time: otherwise slow steps would look like pauses.
        """
        edges, totals = np.asarray(moments), np.zeros(len(moments))
        for low in range(0, len(self._times), CHUNK_STEPS):
            ends, seconds, samples = (
                np.frombuffer(numbers, dtype=np.float64)[low : low + CHUNK_STEPS]
                for numbers in (self._times, self._seconds, self._samples))
            seconds = np.maximum(seconds, 1e-9)
            at, last = edges.searchsorted(ends - seconds, side="right"), edges.searchsorted(ends)
            totals += np.bincount(last, samples, len(edges) + 1)[:-1].cumsum()
            while len(within := np.flatnonzero(at < last)):  # few steps have a moment within
                done = 1.0 - (ends[within] - edges[at[within]]) / seconds[within]
                totals += np.bincount(at[within], done * samples[within], len(edges))
                at[within] += 1
        return totals

    def rates(self, moments: Sequence[float], width_s: float) -> list[float]:
        """Return the samples a second between each two neighbours of the moments, which are
        `width_s` apart without the stops."""
        rates = np.diff(self.done_by(moments)).clip(min=0.0) / max(width_s, 1e-9)
        return [float(rate) for rate in rates]

"""What a page about a run tells beside its numbers: the events in words, the longest recoveries,
the checkpoints, the configuration.

event log → here → page

What always holds:
1. Its memory does not grow with the run: of the events the first and the newest ones are kept, and
   of recoveries and checkpoints the longest and the newest ones. The others are counted.
2. An event that cannot be read is left out.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.events import sentences
from elastic_trainer.events.event_kind import PAUSE_PARTS, Level
from elastic_trainer.events.event_table import KINDS
from elastic_trainer.events.schema import UNREADABLE
from elastic_trainer.wire.plain import plain

FIRST_EVENTS, NEWEST_EVENTS = 50, 250
NEWEST_CHECKPOINTS = 10
LONGEST_RECOVERIES = 12
MAX_SENTENCE = 500

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Telling:
    """An event in words."""

    time: float
    level: str
    text: str


@dataclass(frozen=True, order=True)
class Recovery:
    """A pause after a change of the world."""

    duration_s: float
    time: float
    """Its end."""
    step: int
    parts: tuple[float, ...] = ()
    """The seconds of PAUSE_PARTS."""


def recovery_of(event: Event) -> Recovery:
    """Return the pause that a worker.pause_ended reports."""
    parts = tuple(float(event.get(f"{part}_s") or 0.0) for part in PAUSE_PARTS)
    return Recovery(float(event["duration_s"]), event["time"], int(event["step"]), parts)


@dataclass
class Story:
    """The story so far; `through` takes the events."""

    first: list[Telling] = field(default_factory=list)
    newest: deque[Telling] = field(default_factory=lambda: deque(maxlen=NEWEST_EVENTS))
    left_out: int = 0
    """Events between the first and the newest ones."""
    levels: Counter[str] = field(default_factory=Counter)
    longest: list[Recovery] = field(default_factory=list)
    """A heap."""
    recoveries: int = 0
    recovered_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PAUSE_PARTS, 0.0))
    checkpoints: deque[Event] = field(default_factory=lambda: deque(maxlen=NEWEST_CHECKPOINTS))
    published: int = 0
    published_bytes: int = 0
    snapshot_s: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    """Of Python and the packages, where the run was started."""
    job: Mapping[str, Any] = field(default_factory=dict)
    _workers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def through(self, events: Iterable[Event]) -> Iterator[Event]:
        """Take the events, and yield them."""
        for event in events:
            if event["event"] not in _UNTOLD:
                self.take(event)
            yield event

    def take(self, event: Event) -> None:
        """Take one more event."""
        if (name := event["event"]) in _UNTOLD or (kind := KINDS.get(name)) is None:
            return
        try:
            if reader := _READERS.get(kind.name):
                reader(self, event)
            if kind.level is not Level.DETAIL:
                self._tell(event, kind.level)
        except UNREADABLE:
            return

    def longest_recoveries(self) -> list[Recovery]:
        """Return the longest recoveries, the longest first."""
        return sorted(self.longest, reverse=True)

    def _tell(self, event: Event, level: Level) -> None:
        self.levels[level.value] += 1
        known = self._workers.get(event.get("worker", ""), {})
        text = sentences.filled(KINDS[event["event"]].sentence, {"run": "", **known, **event})
        if text:
            told = Telling(event["time"], level.value, plain(text)[:MAX_SENTENCE])
            self.left_out += len(self.newest) == NEWEST_EVENTS
            (self.first if len(self.first) < FIRST_EVENTS else self.newest).append(told)

    def _run_started(self, event: Event) -> None:
        self.options = event.get("options") or {}
        self.versions = event.get("versions") or {}

    def _job_described(self, event: Event) -> None:
        self.job = event

    def _worker(self, event: Event) -> None:
        known = self._workers.setdefault(event["worker"], {})
        known |= {key: event[key] for key in ("host", "pid") if event.get(key) is not None}

    def _pause_ended(self, event: Event) -> None:
        recovery = recovery_of(event)
        self.recoveries += 1
        for part, seconds in zip(PAUSE_PARTS, recovery.parts, strict=True):
            self.recovered_s[part] += seconds
        if len(self.longest) < LONGEST_RECOVERIES:
            heapq.heappush(self.longest, recovery)
        else:
            heapq.heappushpop(self.longest, recovery)

    def _published(self, event: Event) -> None:
        self.published += 1
        self.published_bytes += int(event.get("uploaded_bytes") or 0)
        self.snapshot_s += float(event.get("pause_s") or 0.0)
        self.checkpoints.append(event)


_READERS = {
    "run.started": Story._run_started,
    "job.described": Story._job_described,
    "driver.worker_started": Story._worker,
    "driver.worker_ready": Story._worker,
    "worker.pause_ended": Story._pause_ended,
    "state.checkpoint_published": Story._published,
}
_UNTOLD = frozenset(kind.name for kind in KINDS.values()
                    if kind.level is Level.DETAIL and kind.name not in _READERS)
"""Nearly all events of a log: the steps."""

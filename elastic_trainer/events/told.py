"""The events of a run in words: the first and the newest ones; the others are counted.

run (which reads the event log) → here → watch, page, trace
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elastic_trainer.events.accounts import Event
from elastic_trainer.events.event_kind import Level
from elastic_trainer.events.event_table import KINDS
from elastic_trainer.events.sentences import filled
from elastic_trainer.wire.plain import plain

FIRST_EVENTS, NEWEST_EVENTS = 50, 250
MAX_SENTENCE = 1000
"""Characters of an event's sentence: the text of an error may have 50,000."""


class Telling(NamedTuple):
    """An event in words."""

    time: float
    level: str
    text: str
    event: str = ""
    host: str = ""
    worker: str = ""
    step: int | None = None


@dataclass
class Told:
    """The events in words: the first and the newest ones, and how many are between them."""

    most_first: int = FIRST_EVENTS
    most_newest: int = NEWEST_EVENTS
    first: list[Telling] = field(default_factory=list)
    newest: deque[Telling] = field(default_factory=deque)
    left_out: int = 0
    levels: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.first) + self.left_out + len(self.newest)

    def take(self, event: Event, known: Mapping[str, Mapping[str, Any]]) -> None:
        """Take an event, if a person needs to know of it. `known`: host and pid of each worker.
        Raises one of UNREADABLE."""
        kind = KINDS.get(event["event"])
        if kind is None or kind.level is Level.DETAIL:
            return
        worker, level = str(event.get("worker") or ""), kind.level.value
        facts = {"run": "", **known.get(worker, {}), **event}
        text = plain(filled(kind.sentence, facts))[:MAX_SENTENCE]
        self.levels[level] += 1
        if not text:
            return
        telling = Telling(event["time"], level, text, kind.name, str(facts.get("host") or ""),
                          worker, event.get("step"))
        if len(self.first) < self.most_first:
            self.first.append(telling)
            return
        self.newest.append(telling)
        if len(self.newest) > self.most_newest:
            self.newest.popleft()
            self.left_out += 1

    def last(self, most: int) -> list[Telling]:
        """Return at most the last `most` tellings that are kept."""
        there = [*self.first, *self.newest] if len(self.newest) < most else self.newest
        return list(there)[-most:] if most else []

"""What is declared of an event: level, fields, the sentence for people, its account in the books.

here → event_table (the events), schema (the checks), report, watch, events page
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elastic_trainer.events.fields import Field
from elastic_trainer.events.sentences import Sentence


class Level(str, Enum):
    """How much a person needs to know of an event."""

    DETAIL = "detail"
    """For readers of the log; `watch` does not show it."""
    INFO = "info"
    WARNING = "warning"
    """The run goes on with less."""
    ERROR = "error"
    """The run, a worker or a checkpoint is lost, or a person is needed."""


class Phase(str, Enum):
    """What a run does in a second of its wall time: the accounts of the report's books."""

    BOOTING = "booting"
    TRAINING = "training"
    PAUSING = "pausing"
    RESTARTING = "restarting"
    STOPPED = "stopped"


PAUSE_PARTS = ("noticing", "deciding", "forming", "transfer", "redoing")
"""The parts of a pause, in their order; worker.pause_ended has the seconds of each."""


@dataclass(frozen=True)
class EventKind:
    """One kind of event."""

    name: str
    level: Level
    meaning: str
    """One sentence for the documentation."""
    fields: tuple[Field, ...] = ()
    sentence: Sentence = ""
    """The sentence that `watch` shows; "": `watch` does not show the event."""
    closes: Phase | None = None
    """The account of the report's books that the time before this event is booked on."""
    remedy: str = ""

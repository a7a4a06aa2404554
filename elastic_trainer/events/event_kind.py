"""What is declared of an event: level, account, sentence for people, fields with their types.

here → event_table (the events), schema (the checks), report, watch, events page

What always holds:
1. A flaw is a fixed sentence. It names the field and its type, and never the value: the sender of
   an event does not choose what the driver logs.
2. Readers check a field only if one of them uses it (`reads`, `may_read`). The tests check the
   other fields (`has`, `may_have`), too, when an event is emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from elastic_trainer.events.sentences import Sentence
from elastic_trainer.host.names import HOST_NAME

MAX_NAME = 300
"""Characters of a name: a worker, a reason, a kind of event."""
MAX_PEERS = 4096
MAX_ERROR = 50_000
"""Characters of a traceback (place.MAX_ERROR_CHARACTERS)."""

Check = Callable[[Any], bool]


@dataclass(frozen=True)
class Numbers:
    """A range of numbers: from `low` on, below `high`."""

    types: tuple[type, ...]
    low: float
    high: float

    def __call__(self, value: Any) -> bool:
        return type(value) in self.types and self.low <= value < self.high


@dataclass(frozen=True)
class Kind:
    """A type of values."""

    noun: str
    """What a value is, with its article and its range: "a whole number from 0"."""
    check: Check
    unit: str = ""


def _is_number(value: Any) -> bool:
    """True for a number that a float can hold; NaN and the infinities are numbers."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


@dataclass(frozen=True)
class Text:
    """Texts of at most `longest` characters."""

    longest: int

    def __call__(self, value: Any) -> bool:
        return type(value) is str and len(value) <= self.longest


def _is_host(value: Any) -> bool:
    """True for a possible host name. It goes into an ssh command."""
    return type(value) is str and HOST_NAME.fullmatch(value) is not None


_is_name = Text(MAX_NAME)


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple)


def _are_names(value: Any) -> bool:
    return _is_list(value) and len(value) <= MAX_PEERS and all(map(_is_name, value))


def _in_whole_numbers(low: int, high: int) -> Numbers:
    return Numbers((int,), low, high)


_FROM_0 = _in_whole_numbers(0, 2**63)
_SECONDS = Numbers((float, int), 0.0, 2.0**33)
"""A duration; or seconds since 1970, until the year 2242."""

WHOLE = Kind("a whole number from 0", _FROM_0)
STEP = Kind("a whole number from 0", _FROM_0, "steps")
SAMPLES = Kind("a whole number from 0", _FROM_0, "samples")
BYTES = Kind("a whole number from 0", _FROM_0, "bytes")
WHOLE_OR_MINUS_ONE = Kind("a whole number from -1", _in_whole_numbers(-1, 2**63))
SEED = Kind("a whole number from 0, below 2^64", _in_whole_numbers(0, 2**64))
PID = Kind("a process id", _in_whole_numbers(1, 2**31))
"""0 and negative numbers name groups of processes, or all processes."""
EXIT_CODE = Kind("an exit code (negative: a signal)", _in_whole_numbers(-(2**31), 2**31))
ATTEMPT = Kind("a whole number from 0, below 2^31", _in_whole_numbers(0, 2**31))
PORT = Kind("a port number", _in_whole_numbers(0, 2**16))
SECONDS = Kind("a number of seconds from 0", _SECONDS, "s")
TIME = Kind("a time", _SECONDS, "s since 1970-01-01 UTC")
NUMBER = Kind("a number (NaN and infinities included)", _is_number)
SIGNED_SECONDS = Kind("a number of seconds", _is_number, "s")
NAME = Kind(f"a text of at most {MAX_NAME} characters", _is_name)
TEXT = Kind(f"a text of at most {MAX_ERROR} characters", Text(MAX_ERROR))
HOST = Kind("a host name", _is_host)
FLAG = Kind("true or false", lambda value: type(value) is bool)
LIST = Kind("a list", _is_list)
NAMES = Kind("a list of names", _are_names)
OBJECT = Kind("an object", lambda value: type(value) is dict)
ANY = Kind("any JSON value", lambda value: True)


def one_of(*values: str) -> Kind:
    """Return the type of a text that has one of these values."""
    return Kind(f"one of {', '.join(values)}", lambda value: type(value) is str and value in values)


@dataclass(frozen=True)
class Field:
    """A field of an event or of a message."""

    name: str
    kind: Kind
    is_required: bool
    is_read: bool
    """A reader uses the field, so an event in which the value is wrong is malformed."""

    @property
    def flaw(self) -> str:
        missing = "missing, or " if self.is_required else ""
        return f"its {self.name} is {missing}not {self.kind.noun}"


def reads(**kinds: Kind) -> tuple[Field, ...]:
    """Declare fields that a reader needs."""
    return tuple(Field(name, kind, True, True) for name, kind in kinds.items())


def may_read(**kinds: Kind) -> tuple[Field, ...]:
    """Declare fields that a reader uses; they may be absent or null."""
    return tuple(Field(name, kind, False, True) for name, kind in kinds.items())


def has(**kinds: Kind) -> tuple[Field, ...]:
    """Declare fields that each event has, and no reader depends on."""
    return tuple(Field(name, kind, True, False) for name, kind in kinds.items())


def may_have(**kinds: Kind) -> tuple[Field, ...]:
    """Declare fields that an event may have, and no reader depends on."""
    return tuple(Field(name, kind, False, False) for name, kind in kinds.items())


class Checked(NamedTuple):
    """Fields as `flaw_in` reads them. The log of 10^6 steps has 10^7 numbers and texts: a call for
    each of them took 2 s."""

    numbers: tuple[tuple[str, tuple[type, ...], float, float, bool, str], ...]
    """Name; types, low and high of the range; whether the value may be absent or null; the flaw."""
    texts: tuple[tuple[str, int, bool, str], ...]
    """Name; the most characters; as above."""
    others: tuple[tuple[str, Check, bool, str], ...]


def checked(fields: Iterable[Field]) -> Checked:
    """Return fields in the form that is checked fast."""
    numbers, texts, others = [], [], []
    for field in fields:
        check, may_be_none = field.kind.check, not field.is_required
        if isinstance(check, Numbers):
            numbers.append((field.name, check.types, check.low, check.high, may_be_none,
                            field.flaw))
        elif isinstance(check, Text):
            texts.append((field.name, check.longest, may_be_none, field.flaw))
        else:
            others.append((field.name, check, may_be_none, field.flaw))
    return Checked(tuple(numbers), tuple(texts), tuple(others))


def flaw_in(fields: Checked, values: Mapping[str, Any]) -> str:
    """Describe a wrong value; "" if all are right."""
    value: Any
    get = values.get
    for name, types, low, high, may_be_none, wrong in fields.numbers:
        value = get(name)
        if type(value) in types and low <= value < high:
            continue
        if value is not None or not may_be_none:
            return wrong
    for name, longest, may_be_none, wrong in fields.texts:
        value = get(name)
        if type(value) is str and len(value) <= longest:
            continue
        if value is not None or not may_be_none:
            return wrong
    for name, is_right, may_be_none, wrong in fields.others:
        value = get(name)
        if value is None:
            if not may_be_none:
                return wrong
        elif not is_right(value):
            return wrong
    return ""


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

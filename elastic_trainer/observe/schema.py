"""What an event and a heartbeat are: fields, types and ranges, checked where they arrive and where the event log is read.

worker's words → here → driver        event log → here → every reader

What always holds:
1. An event in which a field that any reader uses is absent, of another type or out of range is malformed as a whole. The
   driver refuses it; a reader leaves it out and counts it.
2. A flaw is described by a fixed sentence, never with the value: what a worker sends does not choose what the driver says.
3. Fields that no reader uses may hold anything. A line has at most MAX_LINE_BYTES.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_LINE_BYTES = (1 << 19) - 4096
"""An event's line. A traceback of 50,000 characters fits, also where most are escaped. On its way to the driver each quote
and backslash is escaped once more, and the word must stay under wire.MAX_BODY_BYTES."""
MAX_NAME = 300
"""Characters of a name: a worker, a reason, a kind of event."""
MAX_PEERS = 4096
MAX_ERROR = 50_000
"""Characters of a traceback (place.MAX_ERROR_CHARACTERS)."""
HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9]([A-Za-z0-9_-]{0,62}))*")
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""The exceptions of code that reads a field which this module does not check."""

Check = Callable[[Any], bool]


@dataclass(frozen=True)
class Numbers:
    """A range of numbers: from `low` on, below `high`."""

    types: tuple[type, ...]
    low: float
    high: float

    def __call__(self, value: Any) -> bool:
        """True for a number of the range."""
        return type(value) in self.types and self.low <= value < self.high


WHOLE = Numbers((int,), 0, 2**63)
"""A count, the number of a step, a digest."""
WHOLE_OR_MINUS_ONE = Numbers((int,), -1, 2**63)
SECONDS = TIME = Numbers((float, int), 0, 2**33)
"""A duration; or seconds since 1970, until the year 2242."""
SEED = Numbers((int,), 0, 2**64)
PID = Numbers((int,), 1, 2**31)
"""0 and negative ones name groups of processes, or all."""
EXIT_CODE = Numbers((int,), -(2**31), 2**31)
ATTEMPT = Numbers((int,), 0, 2**31)
PORT = Numbers((int,), 0, 2**16)


def is_number(value: Any) -> bool:
    """True for a number that a float can hold; NaN and the infinities are numbers."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def is_name(value: Any) -> bool:
    """True for a short text."""
    return type(value) is str and len(value) <= MAX_NAME


def is_host(value: Any) -> bool:
    """True for what can be a host's name: it goes into an ssh command."""
    return type(value) is str and HOST_NAME.fullmatch(value) is not None


def is_flag(value: Any) -> bool:
    """True for true and false."""
    return type(value) is bool


def _verdict(value: Any) -> bool:
    return value in ("finished", "failed", "user_error", "interrupted")


def _phase(value: Any) -> bool:
    return value in ("booting", "standby", "training", "waiting", "finished", "reviving")


def _text(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_ERROR


def _line(value: Any) -> bool:
    return type(value) is str


def _peers(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) <= MAX_PEERS and all(map(is_name, value))


def _arithmetic(value: Any) -> bool:
    """True for what Arithmetic.to_words returns."""
    return value == {} or (
        type(value) is dict and type(value.get("is_exact")) is bool
        and all(type(value.get(name)) is int and abs(value[name]) < 2**64 for name in ("program", "inputs", "result"))
        and type(facts := value.get("facts")) is dict and len(facts) <= 100
        and all(is_name(name) and _text(fact) for name, fact in facts.items()))


def _machine(value: Any) -> bool:
    """True for the fields of membership.MachineFault that a worker tells."""
    return value == {} or (type(value) is dict and value.keys() == {"step", "shard", "kind", "text"}
                         and WHOLE_OR_MINUS_ONE(value["step"]) and WHOLE_OR_MINUS_ONE(value["shard"])
                         and is_name(value["kind"]) and _text(value["text"]))


Field = tuple[str, tuple[type, ...], float, float, Check, bool, str]
"""A field's name; of a range of numbers its types, low and high; the check of anything else; whether the field may be
absent or null; the sentence of its flaw. A long log has ten million ranges to check: a call for each took a second."""
Fields = tuple[Field, ...]


def _field(name: str, check: Check, may_be_none: bool) -> Field:
    types, low, high = (check.types, check.low, check.high) if isinstance(check, Numbers) else ((), 0, 0)
    missing, noun = "" if may_be_none else "missing, or ", _NOUNS.get(check, "value that makes sense")
    return name, types, low, high, check, may_be_none, f"its {name} is {missing}no {noun}"


def _fields(**checks: Check) -> Fields:
    return tuple(_field(name, check, False) for name, check in checks.items())


def _optional(**checks: Check) -> Fields:
    return tuple(_field(name, check, True) for name, check in checks.items())


_NOUNS: dict[Check, str] = {
    WHOLE: "whole number from 0 on", is_number: "number", SECONDS: "number of seconds", is_name: "short text",
    is_host: "host's name", is_flag: "truth value", PID: "process id"}
_EVERY = (*_fields(event=is_name, time=TIME), *_optional(attempt=ATTEMPT, run=is_name, worker=is_name))
_STEP = _fields(attempt=ATTEMPT, step=WHOLE)
_WORKER = _fields(worker=is_name, host=is_host, pid=PID)
_EVENTS: dict[str, Fields] = {
    "attempt.started": (*_fields(attempt=ATTEMPT), *_optional(counted_by=is_name)),
    "attempt.ended": (*_fields(attempt=ATTEMPT, verdict=_verdict), *_optional(exit_code=EXIT_CODE)),
    "driver.host_added": _fields(host=is_host, slots=WHOLE),
    "driver.worker_started": (*_WORKER, *_optional(over_ssh=is_flag)),
    "driver.worker_ready": (*_fields(worker=is_name), *_optional(host=is_host, pid=PID, boot_s=SECONDS)),
    "driver.worker_gone": (*_fields(worker=is_name),
                           *_optional(host=is_host, pid=PID, exit_code=EXIT_CODE, reason=is_name)),
    "driver.generation_formed": _fields(attempt=ATTEMPT, generation=WHOLE),
    "driver.step_reached": _fields(attempt=ATTEMPT, steps=WHOLE, checkpoint=WHOLE),
    "job.described": (*_fields(attempt=ATTEMPT, dataset_size=WHOLE, global_batch=WHOLE, shards=WHOLE,
                               seed=SEED),
                      *_optional(epochs=WHOLE, max_steps=WHOLE, steps=WHOLE, reduce=is_name, drop_last=is_flag)),
    "worker.generation_started": (*_STEP, *_fields(generation=WHOLE, size=WHOLE, source=is_name),
                                  *_optional(pause_s=SECONDS)),
    "worker.step_redone": _STEP,
    "worker.step_committed": (*_STEP, *_fields(generation=WHOLE, size=WHOLE, samples=WHOLE, digest=WHOLE,
                                               loss=is_number), *_optional(step_s=SECONDS)),
    "worker.pause_ended": _fields(duration_s=SECONDS),
    "state.checkpoint_published": _STEP,
    "state.checkpoint_restored": _STEP,
    "run.finished": (*_fields(attempt=ATTEMPT, steps=WHOLE, samples=WHOLE, weights_sha256=is_name),
                     *_optional(loss=is_number)),
}
_ALL = {name: (*_EVERY, *fields) for name, fields in _EVENTS.items()}
REQUIRED = {name: {field[0] for field in fields if not field[5]} for name, fields in _ALL.items()}
"""The fields without which an event of this name is malformed."""
_WORDS = (
    *_fields(worker=is_name, count=WHOLE, phase=_phase, generation=WHOLE),
    *_optional(pid=PID, time=is_number, accepted=WHOLE, holds_state=is_flag, drains=is_flag, step=WHOLE, error=_text,
               unreachable=_peers, door=PORT, meets_at_once=is_flag, saves=is_flag, published=WHOLE_OR_MINUS_ONE,
               hold_s=SECONDS, seen=is_name, arithmetic=_arithmetic, machine=_machine))
_NULLABLE = ("unreachable", "arithmetic", "machine")
_LINE_WORDS = _fields(worker=is_name, courier=is_name, number=WHOLE, line=_line)


def flaw(event: Mapping[str, Any]) -> str:
    """Describe what is wrong with an event; "" if it can be read."""
    name = event.get("event")
    return _flaw(_ALL.get(name, _EVERY) if type(name) is str else _EVERY, event)


def _flaw(fields: Fields, values: Mapping[str, Any]) -> str:
    for name, types, low, high, is_right, may_be_none, wrong in fields:
        value = values.get(name)
        if value is None:
            if not may_be_none:
                return wrong
        elif types:
            if type(value) not in types or not low <= value < high:
                return wrong
        elif not is_right(value):
            return wrong
    return ""


def parse(line: bytes | str) -> dict[str, Any] | None:
    """Return the event of a line; None if it is malformed."""
    event = parse_object(line)
    return None if event is None or flaw(event) else event


def parse_object(line: bytes | str) -> dict[str, Any] | None:
    """Return a line's JSON object; None if there is none."""
    try:
        # To look for another encoding than UTF-8 takes half as long as the parsing.
        event = json.loads(line.decode() if isinstance(line, bytes) else line)
    except (ValueError, RecursionError):
        return None
    return event if type(event) is dict else None


def flaw_of_words(words: Any) -> str:
    """Describe what is wrong with what a worker has sent to the driver; "" if it can be used."""
    if type(words) is not dict:
        return "it is no object"
    if wrong := _flaw(_LINE_WORDS if "line" in words else _WORDS, words):
        return wrong
    if any(value is None and name not in _NULLABLE for name, value in words.items()):
        return "one of its values is null"
    return "" if math.isfinite(words.get("time", 0.0)) else "its time is no time"

"""Whether an event, or a heartbeat, can be used: checked where it arrives and where it is read.

worker's messages → here → driver        event log → here → every reader

What always holds:
1. An event is malformed as a whole if a field that any reader uses is absent, of another type or
   out of range. The driver refuses it; a reader leaves it out and counts it.
2. An event of another name than event_table has is written and read, and readers count it: a log
   of a newer version is readable, and no fact is lost. The tests refuse to emit one (`misfit`).
3. A line has at most MAX_LINE_BYTES.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from elastic_trainer.events.event_kind import (
    FLAG,
    MAX_ERROR,
    MAX_NAME,
    MAX_PEERS,
    NAME,
    NAMES,
    NUMBER,
    PID,
    PORT,
    SECONDS,
    TEXT,
    WHOLE,
    WHOLE_OR_MINUS_ONE,
    Check,
    EventKind,
    Field,
    Kind,
    checked,
    flaw_in,
    may_read,
    one_of,
    reads,
)
from elastic_trainer.events.event_table import COMMON, KINDS
from elastic_trainer.renamed import FIELDS, present
from elastic_trainer.wire.proof import Proof

__all__ = ["MAX_ERROR", "MAX_LINE_BYTES", "MAX_NAME", "MAX_PEERS", "REQUIRED", "UNREADABLE",
           "fields_of", "flaw", "flaw_of_message", "misfit", "parse", "parse_named",
           "parse_object"]

MAX_LINE_BYTES = (1 << 19) - 4096
"""The longest line of an event. A traceback of 50,000 characters fits, also where most of them are
escaped. In the message to the driver each quote and backslash of the line is escaped once more,
and that message must stay under wire.MAX_BODY_BYTES."""
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""The exceptions of code that reads a field which no check covers."""


def fields_of(kind: EventKind) -> dict[str, Field]:
    """Return all fields of an event by name. A common field may be declared again, as required."""
    found: dict[str, Field] = {}
    for field in (*COMMON, *kind.fields):
        if common := found.get(field.name):
            field = replace(field, is_required=field.is_required or common.is_required,
                            is_read=field.is_read or common.is_read)
        found[field.name] = field
    return found


_FIELDS = {name: fields_of(kind) for name, kind in KINDS.items()}
_EVERY = checked(field for field in COMMON if field.is_read)
_READ = {name: checked(field for field in fields.values() if field.is_read)
         for name, fields in _FIELDS.items()}
REQUIRED = {name: {field.name for field in fields.values() if field.is_read and field.is_required}
            for name, fields in _FIELDS.items()}
"""The fields without which an event of this name is malformed."""
_EMITTED = {name: checked(fields.values()) for name, fields in _FIELDS.items()}


def flaw(event: Mapping[str, Any]) -> str:
    """Describe what makes an event malformed for its readers; "" if it can be read."""
    name = event.get("event")
    return flaw_in(_READ.get(name, _EVERY) if type(name) is str else _EVERY, event)


def misfit(event: Mapping[str, Any]) -> str:
    """Describe where an event differs from its declaration in any way; "" if it does not."""
    name = str(event.get("event"))
    if name not in KINDS:
        return f"{name} is not declared in event_table.py"
    if unknown := sorted(event.keys() - _FIELDS[name].keys()):
        return f"{name} has fields that event_table.py does not declare: {', '.join(unknown)}"
    wrong = flaw_in(_EMITTED[name], event)
    return f"{name}: {wrong}" if wrong else ""


def parse(line: bytes | str) -> dict[str, Any] | None:
    """Return the event of a line; None if it is malformed."""
    event = parse_named(line)
    return None if event is None or flaw(event) else event


def parse_named(line: bytes | str) -> dict[str, Any] | None:
    """Return a line's JSON object with the present names of fields; None if there is none."""
    event = parse_object(line)
    if event is not None and not event.keys().isdisjoint(FIELDS):  # a look-up for each old name
        event = present(event)  # of version 0.1
    return event


def parse_object(line: bytes | str) -> dict[str, Any] | None:
    """Return a line's JSON object; None if there is none."""
    try:
        event = orjson.loads(line)  # a quarter of the time of the module json
    except ValueError:
        try:  # NaN, an infinity or half a character (\ud800), which json writes and reads
            event = json.loads(line.decode() if isinstance(line, bytes) else line)
        except (ValueError, RecursionError):
            return None
    return event if type(event) is dict else None


# --- a worker's messages to the driver ---------------------------------------------------------


def _is_arithmetic(value: Any) -> bool:
    """True for what Arithmetic.to_dict returns."""
    if value == {}:
        return True
    if type(value) is not dict or type(value.get("is_exact")) is not bool:
        return False
    sums = [value.get(name) for name in ("program", "inputs", "result")]
    facts = value.get("facts")
    return (all(type(number) is int and abs(number) < 2**64 for number in sums)
            and type(facts) is dict and len(facts) <= 100
            and all(NAME.check(name) and TEXT.check(fact) for name, fact in facts.items()))


def _is_machine_fault(value: Any) -> bool:
    """True for the fields of membership.MachineFault that a worker sends."""
    if value == {}:
        return True
    checks: dict[str, Check] = {"step": WHOLE_OR_MINUS_ONE.check,
                                "microbatch": WHOLE_OR_MINUS_ONE.check,
                                "kind": NAME.check, "text": TEXT.check}
    return (type(value) is dict and value.keys() == checks.keys()
            and all(is_right(value[name]) for name, is_right in checks.items()))


_AT: dict[str, Check] = {
    "phase": NAME.check, "what": TEXT.check, "step": WHOLE_OR_MINUS_ONE.check, "steps": WHOLE.check,
    **dict.fromkeys(("for_s", "waits_s", "usual_s", "own_s"), SECONDS.check)}


def _is_at(value: Any) -> bool:
    """True for the fields of heartbeat.At; a newer worker may send more."""
    return (type(value) is dict and len(value) <= 100 and NAMES.check(value.get("unsent", []))
            and all(name in value and is_right(value[name]) for name, is_right in _AT.items()))


_PHASE = one_of("booting", "standby", "training", "waiting", "finished", "reviving")
_HEARTBEAT = checked((
    *reads(worker=NAME, count=WHOLE, phase=_PHASE, generation=WHOLE),
    *may_read(pid=PID, time=NUMBER, accepted=WHOLE, holds_state=FLAG, drains=FLAG, step=WHOLE,
              error=TEXT, left=TEXT, unsaved=TEXT, unreachable=NAMES, probe_port=PORT,
              meets_at_once=FLAG, saves=FLAG, published=WHOLE_OR_MINUS_ONE, differs=FLAG,
              needs=WHOLE,
              at=Kind("what a worker's loop does", _is_at), hold_s=SECONDS, seen=NAME,
              arithmetic=Kind("the facts of a worker's arithmetic", _is_arithmetic),
              proof=Kind("a worker's proof", lambda value: not value or (
                  Proof.from_dict(value) is not None)),
              machine=Kind("the facts of a machine's fault", _is_machine_fault))))
_NULLABLE = ("unreachable", "arithmetic", "proof", "machine", "at")
_LINE = Kind("a text", lambda value: type(value) is str)
_CARRIED_LINE = checked(reads(worker=NAME, shipper=NAME, number=WHOLE, line=_LINE))


def flaw_of_message(message: Any) -> str:
    """Describe what is wrong with a worker's message to the driver; "" if it can be used."""
    if type(message) is not dict:
        return "it is no object"
    if wrong := flaw_in(_CARRIED_LINE if "line" in message else _HEARTBEAT, message):
        return wrong
    if any(value is None and name not in _NULLABLE for name, value in message.items()):
        return "one of its values is null"
    return "" if math.isfinite(message.get("time", 0.0)) else "its time is no time"

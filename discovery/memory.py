"""The facts that a poller leaves to the next one, which may replace it at any moment.

poll → `hosts.memory`, beside the hosts file → here → the next poll

What always holds:
1. A file that is incomplete, or has another form than this code's, is refused: ValueError.
2. The time in which no poller ran does not count as an agent's silence or as a host's stay.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from elastic_trainer.discovery.hosts import History, Instance
from elastic_trainer.discovery.refusals import Reported


@dataclass(frozen=True)
class Memory:
    """The facts."""

    clock: float
    """The poller's own clock, when this was written."""
    answered_at: float
    """When the cloud gave its last believed answer (seconds since 1970)."""
    instances: tuple[Instance, ...]
    history: History
    reasons: Mapping[str, str]
    refused: Mapping[str, int]
    """The number of clients that each host's agent has refused."""
    reported: Reported
    """The refusals of AWS that are in the event log."""


def write_down(memory: Memory) -> str:
    """Return it as JSON."""
    return json.dumps(memory, default=vars)


def recall(text: str, now: float) -> Memory:
    """Read it, with its times shifted to the reader's clock. Raises ValueError."""
    memory: Memory = _as(Memory, json.loads(text))
    by = now - memory.clock

    def later(at: float | None) -> float | None:
        return None if at is None else at + by

    past = {
        identity: replace(p, first_fit=later(p.first_fit), first_unfit=later(p.first_unfit),
                          heard_at=later(p.heard_at), held_until=p.held_until + by,
                          seen_at=p.seen_at + by, arrivals=tuple(at + by for at in p.arrivals))
        for identity, p in memory.history.past.items()
    }
    logged_at = {code: at + by for code, at in memory.reported.logged_at.items()}
    return replace(memory, clock=now, history=replace(memory.history, past=past),
                   reported=replace(memory.reported, logged_at=logged_at))


def _as(kind: Any, value: Any) -> Any:
    """Return a JSON value as a value of a type. Raises ValueError if it is none."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        if value.keys() == (hints := _hints(kind)).keys():
            return kind(**{name: _as(hints[name], value[name]) for name in hints})
    if origin is types.UnionType:
        return None if value is None and type(None) in inner else _as(inner[0], value)
    if origin is tuple and isinstance(value, list) and (inner[-1] is ...
                                                        or len(inner) == len(value)):
        return tuple(_as(inner[0 if inner[-1] is ... else n], item) for n, item in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {name: _as(inner[1], item) for name, item in value.items()}
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ValueError(f"{value!r:.60} is no {kind}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)

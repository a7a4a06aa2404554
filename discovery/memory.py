"""The facts that a poller leaves to the next one, which may replace it at any moment.

poll → `hosts.memory`, beside the hosts file → here → the next poll

What always holds:
1. A file that is incomplete, or has another form than this code's, is refused: ValueError.
2. The time in which no poller ran does not count as an agent's silence or as a host's stay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from elastic_trainer.discovery.hosts import History
from elastic_trainer.discovery.place_protocol import Instance, Reported


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


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def recall(text: str, now: float) -> Memory:
    """Read it, with its times shifted to the reader's clock. Raises ValueError."""
    from pydantic import TypeAdapter  # 12 MB of memory, which the first poller of a run saves

    memory = TypeAdapter(Memory).validate_json(text, strict=True)
    if json.loads(text, parse_constant=_no_number) != json.loads(write_down(memory)):
        raise ValueError("it has other fields than this code's")
    by = now - memory.clock

    def later(at: float | None) -> float | None:
        return None if at is None else at + by

    past = {identity: replace(p, first_fit=later(p.first_fit), first_unfit=later(p.first_unfit),
                              heard_at=later(p.heard_at), held_until=p.held_until + by,
                              seen_at=p.seen_at + by, arrivals=tuple(at + by for at in p.arrivals))
            for identity, p in memory.history.past.items()}
    logged_at = {code: at + by for code, at in memory.reported.logged_at.items()}
    return replace(memory, clock=now, history=replace(memory.history, past=past),
                   reported=replace(memory.reported, logged_at=logged_at))

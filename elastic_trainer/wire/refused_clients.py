"""Refused clients in the event log: one event at once, then one a minute for each address.

messages, rendezvous → here → driver → event log

What always holds:
1. An address has at most one event in EVERY_S. It counts all connections refused since the last
   one.
2. At most MOST_ADDRESSES are known at a time. All others share the name OTHERS, so clients at many
   addresses do not fill the log.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

EVERY_S = 60.0
MOST_ADDRESSES = 64
MOST_REASONS = 8
OTHERS = "others"


@dataclass
class _Known:
    logged_at: float = -math.inf
    refused: int = 0
    reasons: list[str] = field(default_factory=list)


class RefusedClients:
    """The addresses whose clients were refused recently. `log` is called with the fields of each
    event. Any thread may call the methods."""

    def __init__(self, log: Callable[..., None]):
        self.known: dict[str, _Known] = {}
        self._log, self._lock = log, threading.Lock()

    def refuse(self, address: str, why: str) -> None:
        """Count a refused connection, and log it unless this address was logged within a minute."""
        with self._lock:
            self.count(address, why)
        self.log(time.monotonic())

    def log(self, now: float) -> None:
        """Log what is due."""
        with self._lock:
            due = self.due(now)
        for fields in due:
            self._log(**fields)

    def count(self, address: str, why: str) -> None:
        """Count a refused connection. The caller has the lock."""
        if address not in self.known and len(self.known) >= MOST_ADDRESSES:
            address = OTHERS
        one = self.known.setdefault(address, _Known())
        one.refused += 1
        if why not in one.reasons and len(one.reasons) < MOST_REASONS:
            one.reasons.append(why[:200])

    def due(self, now: float) -> list[dict[str, Any]]:
        """Return the fields of the events that are due now."""
        found = []
        for address, one in list(self.known.items()):
            if now - one.logged_at < EVERY_S:
                continue
            if one.refused:
                found.append({"address": address, "reason": "; ".join(one.reasons),
                              "refused": one.refused})
                self.known[address] = _Known(logged_at=now)
            else:
                del self.known[address]
        return found

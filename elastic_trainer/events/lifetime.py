"""Until when a run went on: where an attempt without an end has ended, and when no supervisor ran.

event → here → timeline, tracks, spans

What always holds:
1. An attempt whose supervisor was killed ends at its last event, not at the start of the next one.
2. Events behind the end of an invocation do not prolong the run.
3. The clock never goes back, as in history.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FINAL = ("finished", "interrupted", "user_error", "unsaved")
"""The verdicts of an attempt that none follows (driver/supervisor.py)."""
BEGINS = ("run.started", "attempt.started")
_LATE = "run.host_not_reached"
"""The next supervisor logs it before it starts the run: it may be days later."""


def ends_run(event: Mapping[str, Any]) -> bool:
    """True if no attempt follows, until the run is started again."""
    name = event["event"]
    return name in ("run.given_up", "run.stopped") or (
        name == "attempt.ended" and event.get("verdict") in FINAL)


class Lifetime:
    """A fold over the events of a run."""

    def __init__(self) -> None:
        self.end = -math.inf
        """The time of the newest event while the run went on."""
        self.before = -math.inf
        """The same, without the newest event."""
        self.is_over = False
        self.stops: list[tuple[float, float]] = []
        """Start and end of the time between two invocations."""

    def step(self, time: float) -> None:
        """Take the end of a step: nearly all events of a log, of a run that goes on."""
        if time > self.end:
            self.end = time

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one more event."""
        name, self.before = event["event"], self.end
        now = max(self.end, float(event["time"]))
        if name in BEGINS:
            if name == "run.started" and not math.isinf(self.end):
                self.stops.append((self.end, now))
            self.is_over = False
        if name != _LATE and not self.is_over:
            self.end = now
        self.is_over = self.is_over or name == "run.finished" or ends_run(event)

"""Steps that stood still, slow hosts, and the `hang_s` that fits a run: a fold over its events.

event log → history → here → report (result.json, table)

What it does not do: find them. The driver does (driver/stalls.py, driver/stragglers.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LEAST_HANG_S, TIMES = 60.0, 3.0
"""The suggested `hang_s` is TIMES the longest time between two steps, and at least LEAST_HANG_S."""


@dataclass
class Standstills:
    """What a log says of steps that did not end in time."""

    count: int = 0
    longest_s: float = 0.0
    slow: dict[str, float] = field(default_factory=dict)
    """Slow hosts: how many times longer than its peers a worker there computed."""
    longest_step_s: float = 0.0
    """The longest time from the end of a step to the end of the next one in the same generation,
    also if it stood still: what ended by itself was no hang."""
    _ended: float | None = None

    def step(self, now: float) -> None:
        """Take the end of a step."""
        if self._ended is not None and now - self._ended > self.longest_step_s:
            self.longest_step_s = now - self._ended
        self._ended = now

    def read(self, event: Mapping[str, Any]) -> None:
        """Take one more event."""
        match event["event"]:
            case "driver.step_stalled":
                self.count += 1
                self.longest_s = max(self.longest_s, float(event["stood_s"]))
            case "driver.step_resumed":
                self.longest_s = max(self.longest_s, float(event["stood_s"]))
            case "driver.straggler_found":
                own_s, peers_s = float(event["own_s"]), float(event["peers_s"])
                self.slow[str(event["host"])] = own_s / peers_s if peers_s > 0 else math.inf
            case "worker.generation_started" | "run.started" | "attempt.started":
                self._ended = None  # the time until the next step is no usual one

    def facts(self) -> dict[str, Any]:
        """Return the fields of result.json; none if there was nothing.

        stalls: how often the driver found that a step stood still, the longest time in seconds,
            and the `hang_s` that fits this run.
        slow_hosts: how many times longer than its peers a worker on the host computed.
        """
        found: dict[str, Any] = {}
        if self.count:
            hang_s = max(LEAST_HANG_S, 10 * math.ceil(TIMES * self.longest_step_s / 10))
            found["stalls"] = {"count": self.count, "longest_s": round(self.longest_s, 1),
                               "suggested_hang_s": hang_s}
        if self.slow:
            found["slow_hosts"] = {host: round(min(times, 1e6), 2)
                                   for host, times in self.slow.items()}
        return found

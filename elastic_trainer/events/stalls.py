"""Steps that stood still, slow hosts, and the `hang_s` that fits a run.

run (which reads the event log) → here → summary

What it does not do: find them. The driver does (driver/stalls.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from elastic_trainer.events.accounts import Event

LEAST_HANG_S, TIMES = 60.0, 3.0
"""The suggested `hang_s` is TIMES the longest time between two steps, and at least LEAST_HANG_S."""


@dataclass
class Stalls:
    """What a log says of steps that did not end in time."""

    count: int = 0
    longest_s: float = 0.0
    slow: dict[str, float] = field(default_factory=dict)
    """Slow hosts: how many times longer than its peers a worker there computed."""
    longest_step_s: float = 0.0
    """The longest time from the end of a step to the end of the next one in the same generation,
    also if it stood still: what ended by itself was no hang."""
    _ended: float | None = None

    @property
    def suggested_hang_s(self) -> float:
        return max(LEAST_HANG_S, 10 * math.ceil(TIMES * self.longest_step_s / 10))

    def step(self, now: float) -> None:
        """Take the end of a step."""
        if self._ended is not None and now - self._ended > self.longest_step_s:
            self.longest_step_s = now - self._ended
        self._ended = now

    def read(self, event: Event) -> None:
        """Take one more event."""
        match event["event"]:
            case "driver.step_stalled" | "driver.step_resumed" as name:
                self.count += name == "driver.step_stalled"
                self.longest_s = max(self.longest_s, float(event["stood_s"]))
            case "driver.straggler_found":
                own_s, peers_s = float(event["own_s"]), float(event["peers_s"])
                self.slow[str(event["host"])] = own_s / peers_s if peers_s > 0 else math.inf
            case "worker.generation_started" | "run.started" | "attempt.started":
                self._ended = None  # the time until the next step is no usual one

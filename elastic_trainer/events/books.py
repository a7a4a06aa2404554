"""What a history adds up: the run's wall time by phase, the workers of hosts, the log's clock.

event log → history → here → report, page

What always holds:
1. The periods follow each other without a gap. A sum of them costs the same for any log.
2. A copy that is not drawn has the sums of the whole, and only the last period.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.events.event_kind import Phase

Period = tuple[Phase, float, float]
"""Phase, start, end."""
SET_BACK_S = 60.0
"""Events of several hosts may be out of order by less: their clocks differ."""


class Books:
    """The periods of a run's wall time, one after another."""

    def __init__(self) -> None:
        self.until = math.inf
        """The books are written up to here."""
        self._past: list[Period] = []
        self._before = dict.fromkeys(Phase, 0.0)
        """The seconds of the past periods."""
        self._phase: Phase | None = None
        self._since = 0.0
        """The last period, which goes on."""

    def book(self, phase: Phase, until: float) -> None:
        """Book the time since the last booking as `phase`."""
        if until <= self.until:
            return
        if phase is not self._phase:
            for period in self._last():
                self._past.append(period)
                self._before[period[0]] += period[2] - period[1]
            self._phase, self._since = phase, self.until
        self.until = until

    @property
    def periods(self) -> list[Period]:
        """All periods. Neighbours have different phases."""
        return [*self._past, *self._last()]

    def _last(self) -> list[Period]:
        return [] if self._phase is None else [(self._phase, self._since, self.until)]

    def seconds(self) -> dict[Phase, float]:
        """Return the seconds of each phase."""
        found = dict(self._before)
        for phase, start, end in self._last():
            found[phase] += end - start
        return found

    def share(self, useful_s: float, *without: Phase) -> float | None:
        """Return `useful_s` by the booked time without some phases; None if that is 0 s."""
        time_s = sum(s for phase, s in self.seconds().items() if phase not in without)
        return min(1.0, useful_s / time_s) if time_s > 0 else None

    def copy(self, *, is_drawn: bool) -> Books:
        """Return a copy; without `is_drawn` it has only the last period, and the same sums."""
        found = copy(self)
        found._past, found._before = self._past[:] if is_drawn else [], dict(self._before)
        return found


@dataclass
class Host:
    """The workers of one host, and their seconds booting and working (from ready until gone)."""

    workers: int = 0
    booting_s: float = 0.0
    working_s: float = 0.0
    booting: dict[str, float] = field(default_factory=dict)  # worker → since
    working: dict[str, float] = field(default_factory=dict)  # worker → since

    def start(self, worker: str, now: float) -> None:
        self.workers += 1
        self.booting[worker] = now

    def ready(self, worker: str, now: float) -> None:
        self._end_boot(worker, now)
        self.working[worker] = now

    def gone(self, worker: str, now: float) -> None:
        self._end_boot(worker, now)
        self.working_s += now - self.working.pop(worker, now)

    def summary(self, now: float) -> dict[str, Any]:
        """Return the host's part of result.json, with the workers that still boot or work."""
        booting_s = self.booting_s + sum(now - since for since in self.booting.values())
        working_s = self.working_s + sum(now - since for since in self.working.values())
        return {"workers": self.workers, "booting_s": round(booting_s, 3),
                "working_s": round(working_s, 3)}

    def _end_boot(self, worker: str, now: float) -> None:
        self.booting_s += now - self.booting.pop(worker, now)


@dataclass
class Fleet:
    """The workers and the machines of all hosts."""

    hosts: dict[str, Host] = field(default_factory=dict)
    machines: dict[str, dict[str, str]] = field(default_factory=dict)
    """Type, zone and lifecycle of each host of a cloud, as far as they are known."""
    _host_of: dict[str, str] = field(default_factory=dict)

    def of(self, event: Mapping[str, Any]) -> Host:
        """Return the host of a worker. Only the worker's first event must name it."""
        name = self._host_of.setdefault(event["worker"], str(event.get("host", "")))
        return self.hosts.setdefault(name, Host())

    def name_of(self, worker: str) -> str:
        """Return the host of a worker. Its name begins with its host (place.py)."""
        return self._host_of.get(worker) or worker.partition("/")[0]

    def take_machine(self, event: Mapping[str, Any]) -> None:
        self.machines[str(event["host"])] = {
            name: str(event[name]) for name in ("type", "zone", "lifecycle") if event.get(name)}


@dataclass
class Clock:
    """The largest step back of the log's clock."""

    by_s: float = 0.0
    event: str = ""
    time: float = 0.0
    """Of the event, as it says."""

    def read(self, event: Mapping[str, Any], now: float) -> None:
        """Take an event; `now`: the latest time of the events so far."""
        back_s = now - float(event["time"])
        if back_s > max(self.by_s, SET_BACK_S):
            self.by_s, self.event, self.time = back_s, str(event["event"]), float(event["time"])

    def facts(self) -> dict[str, Any]:
        """Return the fields of result.json; none if the clock was not set back.

        clock_set_back: by how many seconds an event is earlier than one before it, the event's
            name, and its time. The events count as of the latest time before (history.py, rule 3).
        """
        return {"clock_set_back": {"by_s": round(self.by_s, 1), "event": self.event,
                                   "time": self.time}} if self.event else {}

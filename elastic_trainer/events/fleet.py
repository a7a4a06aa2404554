"""The hosts and workers of a run: who is there now, what each was since when, and which were slow.

run (which reads the event log) → here → status, traces, summary

What it does not do: find steps that stand still, and slow hosts. driver/stalls.py does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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
        match event["event"]:
            case "driver.step_stalled" | "driver.step_resumed" as name:
                self.count += name == "driver.step_stalled"
                self.longest_s = max(self.longest_s, float(event["stood_s"]))
            case "driver.straggler_found":
                own_s, peers_s = float(event["own_s"]), float(event["peers_s"])
                self.slow[str(event["host"])] = own_s / peers_s if peers_s > 0 else math.inf
            case "worker.generation_started" | "run.started" | "attempt.started":
                self._ended = None  # the time until the next step is no usual one


GONE_HOSTS = 5


@dataclass
class Lane:
    """What a host or a worker was, and since when."""

    states: list[tuple[float, str, Mapping[str, Any]]] = field(default_factory=list)
    """"": it is gone."""

    def become(self, time: float, state: str, **facts: object) -> None:
        """Begin a state, unless it is gone and stays so."""
        if state or (self.states and self.states[-1][1]):
            self.states.append((time, state, facts))


@dataclass(frozen=True, kw_only=True)
class LiveWorker:
    """A worker whose process runs."""

    host: str
    pid: int
    """Of a worker on another host: the pid of our ssh, until the worker is ready and reports its
    own."""
    over_ssh: bool = False
    by_agent: bool = False
    """It is reached by its host's agent, and not by ssh."""
    is_ready: bool = False
    lane: Lane = field(default_factory=Lane, compare=False, repr=False)


@dataclass
class Fleet:
    """A fold over the events of a run."""

    now: float = 0.0
    workers: dict[str, LiveWorker] = field(default_factory=dict)
    """The workers whose processes run."""
    members: tuple[str, ...] = ()
    """The workers of the newest world, in the order of their ranks."""
    listed: set[str] = field(default_factory=set)
    """The hosts that the discovery lists."""
    noticed: set[str] = field(default_factory=set)
    """The hosts that a rehearsal's trace has announced to take."""
    gone: dict[str, float] = field(default_factory=dict)
    """The last GONE_HOSTS hosts that have left, and when: neither listed nor with a worker."""
    machines: dict[str, Event] = field(default_factory=dict)
    """What the poller says of each host of a cloud that is there."""
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Host and pid of each worker, also of those that have gone."""
    hosts: dict[str, Lane] = field(default_factory=dict)
    """When each host was on the list."""
    lives: list[tuple[str, str, Lane]] = field(default_factory=list)
    """Name and host of each worker that was started, and what it did."""

    def read(self, event: Event, now: float) -> None:
        """Take one more event. `now`: the latest time of the events so far."""
        if reader := _READERS.get(event["event"]):
            self.now = now
            reader(self, event)

    def begin(self) -> None:
        self.noticed.clear()
        self.gone.clear()

    def end_attempt(self, time: float, *, ends_listing: bool) -> None:
        """Take the end of all workers. The next attempt lists the hosts that are there."""
        for worker in self.workers.values():
            worker.lane.become(time, "")
        for host in self.listed:
            self.hosts[host].become(time, "")
        if ends_listing:
            self.listed.clear()
        self.workers, self.members = {}, ()

    def _host_added(self, event: Event) -> None:
        host = str(event["host"])
        self.listed.add(host)
        self.hosts.setdefault(host, Lane()).become(self.now, "on the list", slots=event["slots"])
        self.noticed.discard(host)
        self.gone.pop(host, None)

    def _host_removed(self, event: Event) -> None:
        host = str(event["host"])
        self.listed.discard(host)
        self.hosts.setdefault(host, Lane()).become(self.now, "")
        self._leave(host)

    def _host_out(self, event: Event) -> None:
        self.machines.pop(str(event["host"]), None)

    def _worker_started(self, event: Event) -> None:
        name, host, lane = event["worker"], event["host"], Lane()
        self.workers[name] = LiveWorker(host=host, pid=int(event["pid"]), lane=lane,
                                        over_ssh=bool(event.get("over_ssh")),
                                        by_agent=bool(event.get("by_agent")))
        lane.become(self.now, "boots", pid=event["pid"])
        self.lives.append((name, host, lane))
        self._know(event)

    def _worker_ready(self, event: Event) -> None:
        self._know(event)
        if worker := self.workers.get(name := event["worker"]):
            worker.lane.become(self.now, "ready", boot_s=event.get("boot_s"))
            self.workers[name] = replace(worker, is_ready=True,
                                         pid=int(event.get("pid") or worker.pid))

    def _worker_gone(self, event: Event) -> None:
        if worker := self.workers.pop(event["worker"], None):
            worker.lane.become(self.now, "")
            self._leave(worker.host)

    def _know(self, event: Event) -> None:
        known = self.known.setdefault(event["worker"], {})
        known |= {key: event[key] for key in ("host", "pid") if event.get(key) is not None}

    def _leave(self, host: str) -> None:
        """Count a host as gone if it is neither listed nor has a worker."""
        if host in self.listed or any(it.host == host for it in self.workers.values()):
            return
        self.gone.pop(host, None)
        self.gone[host] = self.now
        self.noticed.discard(host)
        if len(self.gone) > GONE_HOSTS:
            del self.gone[next(iter(self.gone))]

    def _generation_formed(self, event: Event) -> None:
        if not isinstance(event.get("workers"), (list, tuple)):
            return
        before, self.members = self.members, tuple(map(str, event["workers"]))
        for name in {*before, *self.members} & self.workers.keys():
            if name not in before:
                self.workers[name].lane.become(self.now, "in the world",
                                               generation=event["generation"])
            elif name not in self.members:
                self.workers[name].lane.become(self.now, "leaves")


_READERS: dict[str, Callable[[Fleet, Event], None]] = {
    "driver.host_added": Fleet._host_added,
    "driver.host_removed": Fleet._host_removed,
    "driver.worker_started": Fleet._worker_started,
    "driver.worker_ready": Fleet._worker_ready,
    "driver.worker_gone": Fleet._worker_gone,
    "driver.generation_formed": Fleet._generation_formed,
    "rehearsal.host_noticed": lambda fleet, event: fleet.noticed.add(str(event["host"])),
    "discovery.host_in": lambda fleet, event: fleet.machines.update({str(event["host"]): event}),
    "discovery.host_out": Fleet._host_out,
}

"""The hosts and workers that the driver knows, the members of the newest generation, and what the
driver may have to do (actions).

discovery, heartbeats, exits → membership → here ← ends, differences, rounds
membership → actions (Start, Stop, Form, End, Report) → driver: processes, rendezvous, event log

The roster answers questions and changes nothing by them. The worker's phases:

    booting → standby → training ⇄ waiting → finished; gone from any of them
                 (training → booting: the worker revives itself after `hvd.init()` failed in it)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from operator import attrgetter
from typing import Any

from elastic_trainer.events.mark import FORMING, PHASES
from elastic_trainer.wire.heartbeat import At, Heartbeat
from elastic_trainer.wire.proof import Proof
from elastic_trainer.world.arithmetic import Arithmetic


@dataclass(frozen=True)
class Start:
    """Start a worker's process."""

    host: str
    slot: int
    worker: str


@dataclass(frozen=True)
class Stop:
    """End a worker's process."""

    worker: str
    reason: str
    at_once: bool
    """True: the worker does not answer, so SIGKILL; False: SIGTERM first."""


@dataclass(frozen=True)
class Form:
    """Open the rendezvous store of a new generation."""

    generation: int
    members: tuple[str, ...]
    """The workers' names by rank."""
    reason: str


@dataclass(frozen=True)
class End:
    """End the attempt."""

    verdict: str
    """finished · failed · user_error · interrupted · unsaved"""
    detail: str


@dataclass(frozen=True)
class Report:
    """Log an event, and print a sentence for people."""

    event: str
    fields: dict[str, Any]
    sentence: str = ""
    """"": nothing is printed."""


Action = Start | Stop | Form | End | Report


def report(event: str, sentence: str = "", **fields: Any) -> Report:
    """Return the order to log an event with these fields, and to print a sentence."""
    return Report(event, fields, sentence)



MAX_BACK_OFF_S = 60.0
OUT_S, MAX_OUT_S = 600.0, 86400.0
"""The first and the longest time for which a host is kept out on which a replica has differed for
the second time or more. The time doubles with each difference."""
REFUSED_S, MAX_REFUSED_S = 60.0, 3600.0
"""The first and the longest time until a host whose arithmetic differs from the world's is tried
again."""
MAX_GAPS = 64
HOST_KEPT_S = 3600.0
"""How long the failures of a host that has left the list are remembered."""


class Phase(str, Enum):
    """What a worker does, see the diagram above."""

    BOOTING = "booting"
    STANDBY = "standby"
    TRAINING = "training"
    WAITING = "waiting"
    FINISHED = "finished"
    GONE = "gone"


@dataclass
class Worker:
    """One worker, as its heartbeats and its process show it."""

    name: str
    host: str
    slot: int
    started_at: float
    heard_at: float
    phase: Phase = Phase.BOOTING
    generation: int = 0
    """The newest generation in which this worker has a place."""
    rank: int = -1
    accepted: int = 0
    """The newest round whose offer the worker has accepted."""
    ready_at: float = 0.0
    formed_at: float = 0.0
    """When its first generation was formed; 0: it was in none."""
    waits_since: float = 0.0
    holds_state: bool = False
    drains: bool = False
    count: int = -1
    """The number of its newest heartbeat. An older one, late or replayed, changes nothing."""
    refused_offers: int = 0
    failed_joins: int = 0
    failed_in: int = 0
    """The generation of the newest failed join."""
    unreachable: tuple[str, ...] | None = ()
    """The peers that did not answer its newest attempt to connect; None: no attempt yet."""
    dismissed: bool = False
    needs: int = 0
    """How many workers a world must have for its memory; 0: any number."""
    step: int = 0
    published: int = -1
    """The newest checkpoint that the worker knows to be published."""
    at: At | None = None
    """What its loop did at its newest heartbeat; None: it was in no step."""
    has_failed_machine: bool = False
    """The worker has reported that its machine failed, so it leaves as a dead one does."""
    has_differed: bool = False
    """The worker has reported that it holds other bits than most of its world."""
    ended_by: str = ""
    """The reason for which the driver has ended the worker, if it has."""
    arithmetic: Arithmetic | None = None
    """How the worker computes; None: not reported."""
    proof: Proof | None = None
    """That it has the run's dataset and program; None: not reported."""
    is_proved: bool = False
    """Its proof has been compared with the run's."""
    is_compared: bool = False
    """Its arithmetic has been compared with the world's."""
    has_exited: bool = False
    """Its process has exited: no heartbeat can come from it."""

    def is_credible(self, heartbeat: Heartbeat) -> bool:
        """True if what the heartbeat says of the worker's loop may be so, in this generation."""
        at = heartbeat.at
        return (at is not None and heartbeat.phase == Phase.TRAINING.value
                and heartbeat.generation == self.generation and at.phase in PHASES
                and (at.phase == FORMING or abs(at.step - heartbeat.step) <= 1))

    def __repr__(self) -> str:
        return f"<{self.name} {self.phase.value} g{self.generation} r{self.rank}>"


loud = attrgetter(*(f.name for f in fields(Worker) if f.name not in (
    "heard_at", "started_at", "count", "step", "published", "at")))
"""What decisions rest on, as one value. A heartbeat without news leaves all of it as it was."""


@dataclass
class Host:
    """One machine, and what has gone wrong on it."""

    slots: int
    order: int
    """The host's place in the order of arrival."""
    failures: int = 0
    not_before: float = 0.0
    """No worker is started on the host before this time."""
    listed_at: float = 0.0
    differences: int = 0
    """How often a worker here has held other bits than the others, a sign of bad memory or a bad
    processor."""
    refusals: int = 0
    """How often a worker here computed other bits than the world."""

    def refuse(self, now: float) -> float:
        """Keep the host out, for twice as long each time: its processor seldom changes. Returns
        for how many seconds."""
        self.refusals += 1
        kept_out_s = min(MAX_REFUSED_S, REFUSED_S * 2.0 ** min(self.refusals - 1, 9))
        self.not_before = now + kept_out_s
        return kept_out_s

    def differ(self, now: float) -> None:
        """Count a replica that differs. One may be a cosmic ray; two are the host's fault."""
        self.fail(now)
        self.differences += 1
        if self.differences > 1:
            doubled_s = OUT_S * 2.0 ** min(self.differences - 2, 9)
            self.not_before = now + min(MAX_OUT_S, doubled_s)

    def keep_out(self, until: float) -> None:
        """Start nothing here before this time."""
        self.not_before = max(self.not_before, until)

    def fail(self, now: float) -> None:
        """Count a failure, and start nothing here until a back-off, doubled each time, is over."""
        self.failures += 1
        self.keep_out(now + min(MAX_BACK_OFF_S, 0.5 * 2 ** min(self.failures, 9)))


@dataclass
class Roster:
    """Workers, hosts, and the seats of the newest generation."""

    workers: dict[str, Worker] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)
    """Every host that was listed lately, with its failures. `listed` has the present ones."""
    listed: dict[str, int] = field(default_factory=dict)
    """Host → slots, in the order of the discovery's newest answer."""
    generation: int = 0
    members: tuple[str, ...] = ()
    """The names of the newest generation's members, by rank."""
    tried: set[tuple[str, int]] = field(default_factory=set)
    """The slots (host, number) in which a worker has ended."""
    gaps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_GAPS))
    """When the driver went on after it had stood still itself, and for how long it had."""
    _hosts_seen: int = 0
    _workers_named: int = 0

    # --- changes --------------------------------------------------------------------------------

    def list_hosts(self, hosts: Mapping[str, int], now: float) -> None:
        """Take a new list, and forget hosts that left the list more than HOST_KEPT_S ago."""
        for host in self.listed:
            self.hosts[host].listed_at = now
        self.listed = dict(hosts)
        for host, slots in hosts.items():
            if host not in self.hosts:
                self.hosts[host] = Host(slots, self._hosts_seen)
                self._hosts_seen += 1
            self.hosts[host].slots = slots
        used = {w.host for w in self.workers.values()} | self.listed.keys()
        for host in [h for h, known in self.hosts.items()
                     if h not in used and now - known.listed_at > HOST_KEPT_S]:
            del self.hosts[host]
            self.tried = {(h, slot) for h, slot in self.tried if h != host}

    def add(self, host: str, slot: int, now: float) -> Worker:
        """Name a new worker and add it."""
        self._workers_named += 1
        name = f"{host}/{slot}/{self._workers_named}"
        worker = self.workers[name] = Worker(name, host, slot, started_at=now, heard_at=now)
        return worker

    def forget(self, offered: Collection[str]) -> None:
        """Drop workers that have exited and are in no present generation or offer.

        A run of weeks has 10,000 of them, and each decision looked at all (0.9 of a core).
        """
        kept = {*self.members, *offered}
        for name in [w.name for w in self.workers.values() if w.has_exited and w.name not in kept]:
            del self.workers[name]

    def forgive(self, gap_s: float, now: float) -> None:
        """Do not count a time in which the driver stood still as the workers' silence."""
        self.gaps.append((now, gap_s))
        for worker in self.alive():
            worker.heard_at = min(now, worker.heard_at + gap_s)
            worker.started_at += gap_s

    # --- questions ------------------------------------------------------------------------------

    def awake_s(self, age_s: float, now: float) -> float:
        """Return an age that a worker has reported, without the time in which the driver stood
        still: the machine may have, and the worker with it."""
        return max(0.0, age_s - sum(gap_s for at, gap_s in self.gaps if at > now - age_s))

    def slots(self) -> set[tuple[str, int]]:
        """Return all slots of the list, as (host, number)."""
        return {(host, slot) for host, slots in self.listed.items() for slot in range(slots)}

    def alive(self) -> list[Worker]:
        """Return the workers that are not gone."""
        return [w for w in self.workers.values() if w.phase is not Phase.GONE]

    def current(self) -> list[Worker]:
        """Return the living members of the newest generation, by rank."""
        members = (self.workers[name] for name in self.members)
        return [w for w in members if w.phase is not Phase.GONE]

    def newcomers(self) -> list[Worker]:
        """Return the workers that stand ready and may join."""
        return [w for w in self.alive() if w.phase is Phase.STANDBY and self.is_wanted(w)]

    def is_broken(self) -> bool:
        """True when a member of the newest generation has left it or is gone.

        Then no member can complete the rendezvous of that generation any more.
        """
        return any(self.workers[name].phase is not Phase.TRAINING for name in self.members)

    def is_wanted(self, worker: Worker) -> bool:
        """True if the list has a slot for the worker, and neither driver nor host lets it go."""
        has_slot = worker.slot < self.listed.get(worker.host, 0)
        return has_slot and not worker.dismissed and not worker.drains

    def is_let_go(self, worker: Worker) -> bool:
        """True if no world counts on this worker.

        An error of its code may then come from a host that shuts down.
        """
        is_newcomer = worker.generation == 0
        is_unwanted = is_newcomer and not self.is_wanted(worker)
        return bool(worker.ended_by) or worker.dismissed or is_unwanted

    def may_hold_state(self, worker: Worker) -> bool:
        """True if the worker holds the state, or has not reported yet whether it does.

        The newest heartbeat of a training member may be from before its first step in this
        generation. A waiting worker has reported it.
        """
        is_in_it = worker.phase is Phase.TRAINING and worker.generation == self.generation
        return worker.holds_state or is_in_it

    def holder(self) -> Worker | None:
        """Return the member to rely on for the state: the first of those with the newest step.

        When a vote breaks, one member may have completed it: that one has finished a step more.
        """
        holders = (w for w in self.current() if w.holds_state)
        return max(holders, key=lambda w: (not w.dismissed, w.step), default=None)

    def is_writer(self, name: str) -> bool:
        """True for the one worker that stores what only memory holds while no member trains."""
        holder = self.holder()
        return holder is not None and holder.name == name

    def reaches_all(self, newcomer: Worker) -> bool:
        """True if a newcomer has connected to every member. Without members the offer asks."""
        current = {w.name for w in self.current()}
        tried = newcomer.unreachable
        return not current or (tried is not None and current.isdisjoint(tried))

"""Slow steps: why a step does not end, and which worker is slower than its peers over many steps.

heartbeats (wire.At), roster → here → a question for stacks (host/stacks.py) → driver.step_stalled
heartbeats (own time of a micro-batch) → here → driver.straggler_found → the host drains, if asked

What always holds:
1. A step is judged by how long workers have waited in its collectives, beside its usual time. The
   first steps of a process, a checkpoint and the user's code between two steps may take `stuck_s`,
   and as long as they like while no worker waits for them.
2. A worker that is silent is judged by its last heartbeat, its stacks and its process's state: a
   worker that holds the GIL sends no heartbeats.
3. If all wait in collectives, it is the network. The host is named that most connections with
   unsent bytes have at one of their ends, of those connections that had some most of the time.
4. A step has one verdict. Nothing here ends a worker: ends.py does.
5. A straggler is compared by its own time for one micro-batch: forward and backward. Waiting for
   others, or for its loader, is no part of it. A host is named when its workers, and those of no
   other, were the slowest in WINDOWS windows in a row, which together last `straggler_s`.
6. The slow workers of a host leave between two steps, so no step is done again. They leave only
   while the others are at least --min-np, and the host gets no worker for OUT_S.
7. At most one host leaves within OUT_S. If one of its peers becomes slow with the rank that it had,
   the script has more work for that rank, and no straggler leaves any more in this attempt.

What it does not do: judge scripts in Horovod's own style, which mark no phases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_high
from typing import Any, Protocol

from elastic_trainer.driver.ends import hang_s, hold_s, silence_s
from elastic_trainer.driver.membership import Membership
from elastic_trainer.driver.progress import of_most
from elastic_trainer.driver.roster import OUT_S, Phase, Roster, Stop, Worker
from elastic_trainer.events.mark import FIRST_STEPS, FORMING, PHASES, USERS_CODE, WINDOW
from elastic_trainer.host.stacks import Answer

TIMES, LEAST_S = 5.0, 4.0
"""A step has stalled when a worker has waited for TIMES its usual time, and at least LEAST_S."""
ALL_LATE_S = 60.0
"""The time in one phase, while no worker waits for another one: their common batch may compile a
kernel. Also the wait in the first step of a world, whose usual time is not known."""
ANSWER_S = 1.0
"""The time between the question for stacks and the verdict."""
SILENT_S = 1.5
"""The silence, beyond the time between two heartbeats, during which a worker may have gone on."""
LOOK_S = 0.25
LONG = ("after", "evaluate", "upload", FORMING)
MAX_CHARACTERS = 40_000
"""Of all stacks in one event."""
_ORDER = {phase: number for number, phase in enumerate(PHASES)}
MOST_ASKED = 8
"""The number of workers that are asked for their stacks: those that are waited for come first."""

Link = tuple[str, str]
"""The hosts of a sender and of a receiver."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A member of the generation, as the driver knows it now."""

    name: str
    host: str
    rank: int
    phase: str
    what: str = ""
    for_s: float = 0.0
    """How long it has been in this phase."""
    step: int = 0
    waits_s: float = 0.0
    """How long it has waited in collectives of this step."""
    usual_s: float = 0.0
    steps: int = 0
    is_silent: bool = False
    is_known: bool = True
    """It has reported what it does."""
    unsent: tuple[str, ...] = ()

    @property
    def waits(self) -> bool:
        """True if it is in a collective, as far as it is known."""
        return self.waits_s > 0 and not self.is_silent


def member(worker: Worker, roster: Roster, now: float, allowed_s: float) -> Member:
    """Return what is known of a worker. `allowed_s`: the silence that means nothing."""
    at, silent_s = worker.at, now - worker.heard_at
    is_silent = silent_s > allowed_s
    facts: dict[str, Any] = {"name": worker.name, "host": worker.host, "rank": worker.rank,
                             "is_silent": is_silent}
    if at is None:
        return Member(phase=FORMING, for_s=silent_s, is_known=False, **facts)
    # A worker that waits, or computes, may have done so until its heartbeat only.
    for_s = roster.awake_s(at.for_s, now) + (silent_s if is_silent else 0.0)
    return Member(phase=at.phase, what=at.what, for_s=for_s, step=at.step, usual_s=at.usual_s,
                  steps=at.steps, waits_s=roster.awake_s(at.waits_s, now), unsent=at.unsent,
                  **facts)


def waited_for(members: Sequence[Member]) -> list[Member]:
    """Return the members that the others wait for, the one furthest behind first."""
    late = [one for one in members if not one.waits]
    return sorted(late, key=lambda m: (not m.is_silent, not m.is_known, m.step, _ORDER[m.phase],
                                       -m.for_s))


def stood_s(members: Sequence[Member]) -> float:
    """Return for how long a step stands still: since the first worker waits, or, if all wait, since
    the last one does. If no worker waits, all are in a phase of their own for so long.
    """
    waits_s = [one.waits_s for one in members if one.waits]
    if waits_s:
        return min(waits_s) if len(waits_s) == len(members) else max(waits_s)
    return min((one.for_s for one in members), default=0.0)


def limit_s(members: Sequence[Member], late: Sequence[Member], stuck_s: float) -> float | None:
    """Return how long it may stand still; None: as long as it likes."""
    usual_s = TIMES * median([one.usual_s for one in members if one.usual_s] or [0.0])
    judged = late[:1] or members
    is_any_waiting = any(one.waits for one in members)
    if late and late[0].phase in LONG and not is_any_waiting:
        return None
    if any(one.steps < FIRST_STEPS or one.phase in LONG for one in judged):
        return max(stuck_s, usual_s)
    return max(LEAST_S, usual_s) if is_any_waiting and usual_s else max(ALL_LATE_S, usual_s)


def lasting(links: Mapping[Link, int]) -> set[Link]:
    """Return the links that were seen at least half as often as the one that was seen most."""
    most = max(links.values(), default=0)
    return {link for link, times in links.items() if 2 * times >= most}


def slow_host(links: Collection[Link]) -> str:
    """Return the host at an end of most links; of equals, one that sends. "": there is no link."""
    ends, senders = Counter(host for link in links for host in link), {link[0] for link in links}
    return max(sorted(ends), key=lambda host: (ends[host], host in senders), default="")


class Process(Protocol):
    """What is asked of a worker's process (process.py)."""

    answer: Answer
    """Its stacks, as far as it has answered."""

    def ask_stacks(self) -> None:
        """Ask for its stacks and its state."""

    def state(self) -> str:
        """Return the state of its process in /proc; "": not known."""


class Stalls:
    """Watches the steps of one attempt. The driver calls it under its lock."""

    def __init__(self, membership: Membership, processes: Mapping[str, Process],
                 addresses: Callable[[], Mapping[str, str]], emit: Callable[..., None]):
        """`addresses` returns those of the workers, by name."""
        self.roster, self.limits, self.processes = membership.roster, membership.limits, processes
        self._addresses, self._emit = addresses, emit
        self._looked_at = 0.0
        self._key = 0, -1
        """The generation and the step that most members have begun."""
        self._asked: dict[str, float] = {}
        """When a worker was asked in this step."""
        self._links: Counter[Link] = Counter()
        """How often a connection had unsent bytes while all waited."""
        self._is_judged = False
        self._stalled: tuple[int, float] | None = None
        """The newest step with a verdict that has not ended, and since when it stands."""

    def look(self, now: float) -> None:
        """Ask, judge, or do nothing."""
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        members = self._members(now)
        if not members:
            return
        self._begin(members, now)
        late, stood = waited_for(members), stood_s(members)
        limit = limit_s(members, late, self.limits.stuck_s)
        if all(one.waits or one.is_silent for one in members):
            self._links.update(self._unsent(members))
        is_any_waiting = len(late) < len(members)
        for one in late:
            if self._ends_soon(one, is_any_waiting, now):
                self._ask(one, now)
        if limit is None or self._is_judged or stood <= limit - ANSWER_S:
            return
        for one in [*late, *members][:MOST_ASKED]:
            self._ask(one, now)
        if stood > limit and now - min(self._asked.values(), default=0.0) >= ANSWER_S:
            self._judge(members, late, stood, limit, now)

    def give_up(self, stop: Stop, now: float) -> None:
        """Give the verdict on a worker that is about to be evicted, if its step has none."""
        if stop.reason not in ("frozen", "hung"):
            return
        worker, roster, allowed_s = self.roster.workers[stop.worker], self.roster, self._allowed_s()
        one = member(worker, roster, now, allowed_s)
        others = [member(w, roster, now, allowed_s) for w in roster.current() if w is not worker]
        if worker.at is None:
            return
        self._begin([*others, one], now)
        if not self._is_judged:
            limit = (hang_s(self.limits, any(other.waits for other in others))
                     if stop.reason == "hung" else self.limits.silence_s)
            self._judge([*others, one], [one], stood_s([*others, one]), limit, now)

    def _ends_soon(self, one: Member, is_any_waiting: bool, now: float) -> bool:
        """True if a late member is about to be evicted: as frozen, or as hung."""
        limits, silent_s = self.limits, now - self.roster.workers[one.name].heard_at
        if one.is_silent and silent_s > silence_s(limits, len(self.roster.workers)) / 2:
            return True
        before_s = hang_s(limits, is_any_waiting) - ANSWER_S - 2 * LOOK_S
        return limits.hang_s > 0 and one.phase in USERS_CODE and one.for_s > before_s

    def _members(self, now: float) -> list[Member]:
        """Return the members of a generation that trains; none while a generation ends."""
        current = self.roster.current()
        if len(current) < len(self.roster.members) or any(
                w.phase is not Phase.TRAINING for w in current):
            return []
        allowed_s = self._allowed_s()
        return [member(w, self.roster, now, allowed_s) for w in current]

    def _allowed_s(self) -> float:
        return SILENT_S + hold_s(self.limits, len(self.roster.workers))

    def _begin(self, members: Sequence[Member], now: float) -> None:
        """Forget what was asked in another step, and log that a step with a verdict has ended."""
        key = self.roster.generation, max(0, of_most(one.step for one in members))
        if key != self._key:
            self._key, self._asked, self._is_judged = key, {}, False
            self._links.clear()
        if self._stalled and key[1] > self._stalled[0]:
            self._emit("driver.step_resumed", step=self._stalled[0],
                       stood_s=round(now - self._stalled[1], 1))
            self._stalled = None

    def _ask(self, one: Member, now: float) -> None:
        if one.name not in self._asked and one.name in self.processes:
            self._asked[one.name] = now
            self.processes[one.name].ask_stacks()

    def _unsent(self, members: Sequence[Member]) -> set[Link]:
        """Return the links with unsent bytes."""
        known = self._addresses()
        hosts = {known[one.name]: one.host for one in members if one.name in known}
        return {(one.host, hosts[address]) for one in members for address in one.unsent
                if hosts.get(address, one.host) != one.host}

    def _judge(self, members: Sequence[Member], late: Sequence[Member], stood: float,
               limit: float, now: float) -> None:
        self._is_judged, self._stalled = True, (self._key[1], now - stood)
        late = [one for one in late if not self._waits(one)]
        facts: dict[str, Any] = {"cause": "worker", "waited_for": [one.name for one in late]}
        named: Member | None
        if late:
            named, facts["state"] = self._looked_into(late[0])
        else:
            links = lasting(self._links)
            facts |= {"cause": "network", "links": sorted(" → ".join(it) for it in links)}
            host = slow_host(links)
            silent = next((one for one in members if one.is_silent), None)
            named = next((one for one in members if one.host == host), silent)
        if named:
            facts |= {"worker": named.name, "host": named.host, "rank": named.rank,
                      "phase": named.phase, "what": named.what, "since_s": round(named.for_s, 1)}
        self._emit("driver.step_stalled", step=self._key[1], stood_s=round(stood, 1),
                   limit_s=round(limit, 1), **facts,
                   phases={one.name: one.phase for one in members},
                   waiting=[one.name for one in members if one.waits],
                   stacks=self._stacks([*late, *(one for one in members if one not in late)]))

    def _stacks(self, members: Sequence[Member]) -> dict[str, str]:
        """Return the stacks of those that were asked, as many as an event may have."""
        left, found = MAX_CHARACTERS, {}
        for one in members:
            answer = self._answer(one)
            if answer and (text := answer.text()[:left]):
                found[one.name] = text
                left -= len(text)
        return found

    def _answer(self, one: Member) -> Answer | None:
        is_asked = one.name in self._asked and one.name in self.processes
        return self.processes[one.name].answer if is_asked else None

    def _waits(self, one: Member) -> bool:
        """True if a silent member waits, too: a line that is full delays its heartbeats."""
        answer = self._answer(one)
        return one.is_silent and answer is not None and answer.waits()

    def _looked_into(self, one: Member) -> tuple[Member, str]:
        """Return a late member with the phase that its process shows, and its state in a word."""
        process = self.processes.get(one.name)
        if process and process.state() in ("T", "t"):
            return one, "stopped"
        if not one.is_silent:
            return one, "answers"
        # Its heartbeat may be older than the phase.
        answer = self._answer(one)
        if answer is None or not answer.lines:
            return one, "silent"
        # In none of our functions it is in the user's own loop.
        own = one.phase if one.phase in USERS_CODE else "forward"
        phase = answer.phase() or own
        return replace(one, phase=phase, what=one.what if phase == one.phase else ""), "silent"


SLOWER = 1.5
"""A straggler takes this many times the median of its peers."""
LEAST_SLOWER_S = 0.005
"""A smaller difference for a micro-batch is no reason to replace a host."""
WINDOWS = 3
LEAST_PEERS = 2


def slowest(own_s: Mapping[str, float], host_of: Mapping[str, str]) -> tuple[list[str], float]:
    """Return the workers of one host that are slower than their peers, the slowest first, and the
    median of their peers: the workers on other hosts, or if these are too few, all others. A worker
    without micro-batches has 0.
    """
    own_s = {name: seconds for name, seconds in own_s.items() if seconds}
    if len(own_s) <= LEAST_PEERS:
        return [], 0.0
    worst = max(own_s, key=lambda one: own_s[one])
    here = {name for name in own_s if host_of[name] == host_of[worst]}
    if len(own_s) - len(here) < LEAST_PEERS:
        here = {worst}
    # Of two peers the slower one: a worker that is as slow is no reason to name the other.
    peers_s = median_high(seconds for name, seconds in own_s.items() if name not in here)
    slow = [name for name in here
            if own_s[name] > SLOWER * peers_s and own_s[name] - peers_s > LEAST_SLOWER_S]
    return sorted(slow, key=lambda one: -own_s[one]), peers_s


class Stragglers:
    """Compares the workers of one attempt. The driver calls it under its lock."""

    def __init__(self, membership: Membership, replaces: bool, emit: Callable[..., None]):
        """`replaces`: the slow workers of a host leave, and are replaced."""
        self.roster, self.rounds = membership.roster, membership.rounds
        self.window_s = membership.limits.straggler_s / WINDOWS
        self.replaces = replaces
        self.emit = emit
        self._window = 0, -1, 0.0
        """The generation, step and time of the last window's end."""
        self._slow, self._times, self._named = "", 0, ""
        self._left_rank, self._left_at = -1, -OUT_S
        """The rank of the slowest worker that has left last, and when it was told to."""
        self._peers: set[str] = set()
        """The workers on other hosts then."""

    def look(self, now: float) -> None:
        """End a window if it is long enough."""
        current = self.roster.current()
        if any(w.phase is not Phase.TRAINING or w.at is None for w in current) or not current:
            return
        step = min(w.at.step for w in current if w.at)
        generation, since, at = self._window
        if generation != self.roster.generation:
            self._window, self._times = (self.roster.generation, step, now), 0
        elif step - since >= WINDOW and now - at >= self.window_s:
            self._window = generation, step, now
            self._compare(current, step, now)

    def _compare(self, current: list[Worker], step: int, now: float) -> None:
        own_s = {w.name: w.at.own_s for w in current if w.at and w.at.steps >= WINDOW}
        all_have = len(own_s) == len(current)
        slow, peers_s = slowest(own_s, {w.name: w.host for w in current}) if all_have else ([], 0.0)
        host = self.roster.workers[slow[0]].host if slow else ""
        if host != self._slow:
            self._slow, self._times = host, 0
            self._named = self._named if host else ""
        if not host:
            return
        self._times += 1
        if self._times < WINDOWS:
            return
        worker = self.roster.workers[slow[0]]
        leaves = (self.replaces and len(current) - len(slow) >= self.rounds.least
                  and not worker.drains and self._may_leave(worker, now))
        if self._named == host and not leaves:
            return
        self._named = host
        self.emit("driver.straggler_found", worker=worker.name, host=worker.host,
                  rank=worker.rank, step=step, own_s=round(own_s[worker.name], 4),
                  peers_s=round(peers_s, 4), is_replaced=leaves)
        if leaves:
            self._left_rank, self._left_at = worker.rank, now
            self._peers = {w.name for w in current if w.host != host}
            for name in slow:
                self.roster.workers[name].drains = True
            self.roster.hosts[worker.host].keep_out(now + OUT_S)

    def _may_leave(self, worker: Worker, now: float) -> bool:
        if worker.rank == self._left_rank and worker.name in self._peers:
            self.replaces = False
        return self.replaces and now - self._left_at >= OUT_S

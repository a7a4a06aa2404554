"""The accounts of each host's seconds, and its lane: what it did, and when.

accounts (what the run does, and the events of hosts) → here, ledger → summary, charts

What always holds:
1. Each second of a host's life is on exactly one account. A host lives from its first event (listed
   by the discovery, or a worker started) until it is neither listed nor has a worker.
2. A host costs a few numbers for each change of its own, and nothing for a step: the run's seconds
   are summed for each `Part`, and a host takes the difference since its last change.

What it does not do: follow clocks. The times of the log are those of several machines; a change
that is dated before the last booking counts from that booking on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic_trainer.events.ledger import NO_SECONDS, SHORT_S, Account, Lane, Ledger, Part

USEFUL, IDLE = Account.USEFUL, Account.IDLE
"""Each step needs them, and a member of an enum that is looked up costs 0.1 µs."""


@dataclass
class Crew:
    """The workers of one host, as the events so far tell."""

    slots: int = 0
    """As the discovery lists it; 0: it does not."""
    booting: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)
    spares: set[str] = field(default_factory=set)
    """The members without a micro-batch."""
    is_doubtful: bool = False
    """It was listed when the last attempt ended, and this attempt has not listed it yet."""

    @property
    def part(self) -> Part | None:
        """The host's part in the run; None: it is gone."""
        if self.members - self.spares:
            return Part.MEMBER
        if self.members:
            return Part.SPARE
        if self.ready:
            return Part.READY
        return Part.BOOTING if self.booting or self.slots else None

    def forget(self, worker: str) -> None:
        for workers in (self.booting, self.ready, self.members, self.spares):
            workers.discard(worker)


@dataclass
class Life:
    """The booked seconds of one host."""

    part: Part | None = None
    since: float = 0.0
    mark: dict[Account, float] = field(default_factory=dict)
    """What the ledger had of this part then."""
    seconds: dict[Account, float] = field(default_factory=NO_SECONDS.copy)
    periods: list[tuple[Part, float, float]] = field(default_factory=list)

    def leave(self, ledger: Ledger, now: float) -> None:
        """Take the seconds of this part, and have none."""
        if self.part is not None and now > self.since:
            for account, seconds in ledger.seconds[self.part].items():
                if taken := seconds - self.mark[account]:
                    self.seconds[account] += taken
                    ledger.taken[account] += taken
            self.periods.append((self.part, self.since, now))
        self.part = None

    def enter(self, part: Part | None, ledger: Ledger, now: float) -> None:
        self.leave(ledger, now)
        if part is not None:
            self.part, self.since, self.mark = part, now, dict(ledger.seconds[part])

    def copy(self) -> Life:
        """Return a copy. The mark is shared: none is ever changed."""
        return Life(self.part, self.since, self.mark, dict(self.seconds), self.periods[:])


class Change(NamedTuple):
    """A change of a host that is not booked yet."""

    time: float
    host: str
    part: Part | None
    """Its part from then on."""
    slots: int = 0
    """More or fewer."""
    is_cut: bool = False
    """The host has been gone since its last change: the seconds since then are not booked."""


class HostAccounts:
    """The accounts of all hosts. `book` and `book_step` are called for each period of the run, in
    order. A change of a host that is later than the last booking waits until its time is booked."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.crews = defaultdict[str, Crew](Crew)
        self.lives = defaultdict[str, Life](Life)
        self._open: dict[str, Life] = {}
        """The lives that have not ended."""
        self.until = math.inf
        self.least, self.microbatches = 1, 0
        """The fewest workers with which the run trains; the micro-batches of a batch, 0:
        unknown."""
        self._slots, self._has_list = 0, False
        self._waiting: deque[Change] = deque()
        self._steps_from = math.inf
        self._in_steps = {Account.USEFUL: 0.0, Account.IDLE: 0.0, Account.CHECKPOINT: 0.0}
        """The seconds since `_steps_from`, which are not in the ledger yet."""
        self._worlds: list[tuple[int, tuple[str, ...]]] = []
        """The first step and the hosts of each world."""
        self._hosts: tuple[str, ...] = ()

    # --- the run ----------------------------------------------------------------------------------

    def book(self, run: Account, until: float) -> None:
        """Book the time since the last booking."""
        while self._waiting and self._waiting[0].time <= until:
            change = self._waiting.popleft()
            self._advance(run, change.time)
            self._end_steps()
            self._slots += change.slots
            life = self.lives[change.host]
            if change.is_cut:
                life.part = None
            life.enter(change.part, self.ledger, self.until)
            self._open.pop(change.host, None)
            if change.part is not None:
                self._open[change.host] = life
        self._advance(run, until)

    def book_step(self, step_s: float, checkpoint_s: float, until: float) -> None:
        """Book a finished step, and before it the time after the last one."""
        gap_s = until - step_s - self.until
        if not self._waiting and 0.0 <= gap_s < SHORT_S and not checkpoint_s:  # nearly all steps
            if self.until < self._steps_from:
                self._steps_from = self.until
            self._in_steps[IDLE] += gap_s
            self._in_steps[USEFUL] += step_s
            self.until = until
            return
        begins = min(max(self.until, until - step_s), until)
        pause_ends = min(self.until + checkpoint_s, begins)
        self.book(Account.CHECKPOINT, pause_ends)
        self.book(Account.IDLE, begins)
        self.book(Account.USEFUL, until)

    def _advance(self, run: Account, until: float) -> None:
        if until <= self.until:
            return
        seconds = until - self.until
        if run in self._in_steps and (run is Account.USEFUL or seconds < SHORT_S):
            self._steps_from = min(self._steps_from, self.until)
            self._in_steps[run] += seconds
        else:
            self._end_steps()
            has_capacity = self._slots >= self.least or not self._has_list
            self.ledger.add(run, seconds, has_capacity)
            self.ledger.show(run, has_capacity, self.until, until)
        self.until = until

    def _end_steps(self) -> None:
        """Move the seconds of the steps into the ledger: a few numbers for many steps."""
        if math.isinf(self._steps_from):
            return
        for account, seconds in self._in_steps.items():
            self.ledger.add(account, seconds, True)
            self._in_steps[account] = 0.0
        self.ledger.show(Account.USEFUL, True, self._steps_from, self.until)
        self._steps_from = math.inf

    def begin_world(self, step: int) -> None:
        """Note that the members train from this step on."""
        self._worlds.append((step, self._hosts))

    def drop_steps(self, dropped: Mapping[int, float], since: float) -> None:
        """Book steps (with their seconds) as redone: a start from a checkpoint has dropped them.
        `since`: the start of the first of them."""
        self._end_steps()
        self.ledger.redo(since)
        firsts, lost = [first for first, _ in self._worlds], dict[int, float]()
        for step, seconds in dropped.items():
            world = bisect_right(firsts, step) - 1
            lost[world] = lost.get(world, 0.0) + seconds
        for world, seconds in lost.items():
            for host in self._worlds[world][1] if world >= 0 else ():
                booked = self.lives[host].seconds
                moved = min(seconds, booked[Account.USEFUL])
                for seconds_of in (booked, self.ledger.taken):
                    seconds_of[Account.USEFUL] -= moved
                    seconds_of[Account.REDONE] += moved
        while dropped and self._worlds and self._worlds[-1][0] >= min(dropped):
            self._worlds.pop()

    # --- hosts ------------------------------------------------------------------------------------

    def list_host(self, host: str, slots: int, now: float) -> None:
        """Take a host of the discovery's list; 0 slots: it is listed no longer."""
        crew = self.crews[host]
        self._has_list = True
        more, crew.slots, crew.is_doubtful = slots - crew.slots, slots, False
        self._change(host, now, more)

    def take_worker(self, worker: str, host: str, does: str, now: float) -> None:
        """Take what a worker does from now on: "booting", "ready", or nothing, as it is gone."""
        crew = self.crews[host]
        if does == "booting":
            crew.booting.add(worker)
        else:
            crew.forget(worker)
            crew.ready |= {worker} if does else set()
        self._change(host, now)

    def form(self, members: Mapping[str, str], now: float) -> None:
        """Take the workers of a new world in the order of their ranks, with their hosts."""
        self._hosts = tuple(dict.fromkeys(members.values()))
        spares = list(members)[self.microbatches:] if self.microbatches else []
        for host, crew in list(self.crews.items()):
            if crew.is_doubtful:
                self._cut(host, now)
            crew.ready |= crew.members
            crew.members, crew.spares = set(), set()
        for worker, host in members.items():
            crew = self.crews[host]
            crew.forget(worker)
            crew.members.add(worker)
            if worker in spares:
                crew.spares.add(worker)
        for host in list(self.crews):
            self._change(host, now)

    def booted(self) -> list[str]:
        """Return the workers that are ready, or members."""
        return [worker for crew in self.crews.values() for worker in crew.ready | crew.members]

    def end_attempt(self, now: float) -> None:
        """Take the end of all workers. The next attempt lists the hosts that are there."""
        for host, crew in self.crews.items():
            if crew.part is not None and not crew.is_doubtful:
                self.crews[host] = Crew(slots=crew.slots, is_doubtful=True)
                self._wait(Change(now, host, Part.BOOTING))
        self._hosts = ()

    def close(self) -> None:
        """End the lives of all hosts, at the time of the last booking."""
        for host, crew in list(self.crews.items()):
            if crew.is_doubtful:
                self._cut(host, self.until)
        self.book(Account.IDLE, self.until)
        self._end_steps()
        for life in self._open.values():
            life.leave(self.ledger, self.until)
        self._open = {}

    def copy(self, *, is_drawn: bool) -> HostAccounts:
        """Return a copy that can be closed while this one goes on.

        What a close does not change is shared: crews, worlds, and the lives that have ended.
        """
        found = copy(self)
        found.ledger, found._in_steps = self.ledger.copy(is_drawn=is_drawn), dict(self._in_steps)
        found.crews, found._waiting = self.crews.copy(), self._waiting.copy()
        changing = {*self._open, *(change.host for change in self._waiting)}
        copies = {host: self.lives[host].copy() for host in changing if host in self.lives}
        found.lives = defaultdict(Life, {**self.lives, **copies})
        found._open = {host: found.lives[host] for host in self._open}
        return found

    def _cut(self, host: str, now: float) -> None:
        """End the life of a host that went with its attempt: the next one has not listed it."""
        self._wait(Change(now, host, None, -self.crews.pop(host).slots, is_cut=True))

    def _change(self, host: str, now: float, slots: int = 0) -> None:
        part = self.crews[host].part
        if part is None:
            del self.crews[host]  # each machine of a cloud has a name of its own: there are many
        before = next((change.part for change in reversed(self._waiting) if change.host == host),
                      self.lives[host].part)
        if part is not before or slots:
            self._wait(Change(now, host, part, slots))

    def _wait(self, change: Change) -> None:
        last = self._waiting[-1].time if self._waiting else self.until
        earliest = change.time if math.isinf(last) else last
        self._waiting.append(change._replace(time=max(change.time, earliest)))

    # --- what is read -----------------------------------------------------------------------------

    def totals(self) -> dict[Account, float]:
        found = dict(self.ledger.taken)
        for host, life in self._open.items():
            for account, seconds in self.seconds(host).items():
                found[account] += seconds - life.seconds[account]
        return found

    def seconds(self, host: str) -> dict[Account, float]:
        """Return the seconds of a host up to the last booking, by account."""
        life = self.lives[host]
        if life.part is None:
            return life.seconds
        self._end_steps()
        now = self.ledger.seconds[life.part]
        return {account: seconds + now[account] - life.mark[account]
                for account, seconds in life.seconds.items()}

    def lives_of(self, host: str) -> list[tuple[float, float]]:
        """Return the start and end of each life of a host, up to the last booking."""
        found: list[tuple[float, float]] = []
        for _, start, end in self._periods(host):
            if found and found[-1][1] == start:
                found[-1] = found[-1][0], end
            else:
                found.append((start, end))
        return found

    def _periods(self, host: str) -> list[tuple[Part, float, float]]:
        life = self.lives[host]
        open_one = [] if life.part is None else [(life.part, life.since, self.until)]
        return life.periods + open_one

    def lane(self, host: str) -> Lane:
        """Return what a host did. There is a gap while the host was gone."""
        self._end_steps()
        found: Lane = []
        for part, start, end in self._periods(host):
            lane = self.ledger.lanes[part]
            at = bisect_right(lane, start, key=lambda period: period[2])
            while at < len(lane) and lane[at][1] < end:
                account, begin, until = lane[at][0], max(lane[at][1], start), min(lane[at][2], end)
                if found and found[-1][0] is account and found[-1][2] == begin:
                    found[-1] = account, found[-1][1], until
                else:
                    found.append((account, begin, until))
                at += 1
        return found

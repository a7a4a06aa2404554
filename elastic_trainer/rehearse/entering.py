"""When each host's worker enters the world: boots, waits for others, and starts again in a restart.

lives of hosts, costs → here → model

What always holds:
1. A newcomer that stands ready waits while others boot, at most `settle_s` (driver/rounds.py).
2. An attempt ends when nobody is left that has trained in it. All who boot or stand ready start
   again in the next one, which begins after `give_up_s`.
3. If the last members are under notice, they wait with their state until they are lost. A newcomer
   that stands ready before then receives it, and the attempt goes on.

4. Hosts that start, stand ready or go at one moment are one event: a fleet loses and gets them in
   bulk. Host by host a month of 1,000 hosts took twice the time.

What it does not do: count workers of one host.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class _Kind(IntEnum):
    """What happens. Of one moment in this order."""

    GONE = 0
    READY = 1
    START = 2
    SETTLED = 3
    ENDED = 4


_Event = tuple[float, int, tuple[int, ...], int]
"""Time, kind, hosts, attempt."""


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Seconds that were drawn for each host, and for each attempt in turn."""

    boots: Sequence[float]
    """Beside training."""
    attempts: Sequence[tuple[float, float, float]]
    """The boot of an attempt's first world; from the end of the attempt to the next one, and until
    that has a list."""


class Entering:
    """The workers of a run. All lists are by host."""

    def __init__(self, starts: Sequence[float], gone: Sequence[float], lost: Sequence[float],
                 draws: Draws, settle_s: float):
        self.starts, self.gone, self.draws, self.settle_s = starts, gone, draws, settle_s
        self.lost = lost
        """When a host under notice is lost; of another one that is `gone`."""
        self.enters = [math.inf] * len(starts)
        self._later: list[_Event] = []
        self._attempt, self._since = 0, -math.inf
        """The attempt, and when it begins."""
        self._is_formed = False
        """The attempt has had a world."""
        self._members = set[int]()
        self._booting, self._ready = set[int](), set[int]()
        self._settled = math.inf
        """When those who stand ready wait no longer."""

    def run(self, until: float) -> list[float]:
        """Return when each host's worker enters; infinite: never."""
        for now, kind, hosts, attempt in self._events(until):
            if kind == _Kind.GONE:
                self._leave(hosts, now)
            elif kind == _Kind.START:
                self._start(hosts, now)
            elif attempt != self._attempt:
                continue
            elif kind == _Kind.READY:
                self._stand(self._booting.intersection(hosts), now)
            elif kind == _Kind.ENDED and not self._members:
                self._end(now)
            if self._ready:
                self._enter(now)
        return self.enters

    def _events(self, until: float) -> Iterator[_Event]:
        """Yield what happens in order: starts and ends of hosts, and what follows from them."""
        later = self._later
        for event in sorted([*_moments(self.starts, _Kind.START, until),
                             *_moments(self.gone, _Kind.GONE, until)]):
            while later and later[0] < event:
                yield heapq.heappop(later)
            yield event
        while later and later[0][0] < until:
            yield heapq.heappop(later)

    def _start(self, hosts: Sequence[int], now: float) -> None:
        hosts = [host for host in hosts if self.gone[host] > now]
        if now < self._since:  # the attempt begins later
            self._plan(self._since, _Kind.START, hosts)
            return
        boots = defaultdict[float, list[int]](list)
        if self._is_formed:
            for host in hosts:
                boots[self.draws.boots[host]].append(host)
        else:
            boots[self._drawn()[0]] += hosts
        self._booting.update(hosts)
        for boot_s, group in boots.items():
            self._plan(now + boot_s, _Kind.READY, group)

    def _plan(self, time: float, kind: _Kind, hosts: Iterable[int] = ()) -> None:
        heapq.heappush(self._later, (time, kind, tuple(hosts), self._attempt))

    def _stand(self, hosts: set[int], now: float) -> None:
        self._booting -= hosts
        if not self._ready and hosts:
            self._settled = now + self.settle_s
            self._plan(self._settled, _Kind.SETTLED)
        self._ready |= hosts

    def _enter(self, now: float) -> None:
        """Let those who stand ready enter, if they have waited long enough. Members under notice
        that wait with their state take each one at once."""
        is_left = self._is_formed and not self._members
        if self._booting and now < self._settled and not is_left:
            return
        for host in self._ready:
            self.enters[host] = now
        self._members |= self._ready
        self._ready.clear()
        self._is_formed = True

    def _leave(self, hosts: Sequence[int], now: float) -> None:
        self._booting.difference_update(hosts)
        self._ready.difference_update(hosts)
        if not self._members.intersection(hosts):
            return
        last = self._members if len(self._members) <= len(hosts) else ()
        lost = max((self.lost[host] for host in last), default=now)
        self._members.difference_update(hosts)
        if not self._members and lost <= now:
            self._end(now)
        elif not self._members:
            self._plan(lost, _Kind.ENDED)

    def _end(self, now: float) -> None:
        """End the attempt. The workers that boot or stand ready start again in the next one."""
        _, give_up_s, listed_s = self._drawn()
        self._attempt, self._since, self._is_formed = (
            self._attempt + 1, now + give_up_s + listed_s, False)
        self._plan(self._since, _Kind.START, sorted(self._booting | self._ready))
        self._booting.clear()
        self._ready.clear()

    def _drawn(self) -> tuple[float, float, float]:
        return self.draws.attempts[self._attempt % len(self.draws.attempts)]


def _moments(times: Sequence[float], kind: _Kind, until: float) -> Iterator[_Event]:
    """Yield what happens to which hosts at one moment."""
    known = np.asarray(times, dtype=float)
    order = np.argsort(known, kind="stable")[: int((known < until).sum())]
    ordered = known[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=-np.inf))
    for first, hosts in zip(firsts.tolist(), np.split(order, firsts[1:]), strict=False):
        yield float(ordered[first]), int(kind), tuple(hosts.tolist()), 0

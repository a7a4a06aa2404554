"""When each host's worker enters the world: boots, waits for others, and starts again in a restart.

lives of hosts, costs → here → model

What always holds:
1. A newcomer that stands ready waits while others boot, at most `settle_s` (launch/rounds.py).
2. An attempt ends when nobody is left that has trained in it. All who boot or stand ready start
   again in the next one, which begins after `give_up_s`.
3. If the last members are under notice, they wait with their state until they are lost. A newcomer
   that stands ready before then receives it, and the attempt goes on.

What it does not do: count workers of one host.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum


class _Kind(IntEnum):
    """What happens. Of one moment in this order."""

    GONE = 0
    READY = 1
    START = 2
    SETTLED = 3
    ENDED = 4


_Event = tuple[float, int, int, int]
"""Time, kind, host, attempt."""


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
        for now, kind, host, attempt in self._events(until):
            if kind == _Kind.GONE:
                self._leave(host, now)
            elif kind == _Kind.START:
                self._start(host, now)
            elif attempt != self._attempt:
                continue
            elif kind == _Kind.READY and host in self._booting:
                self._stand(host, now)
            elif kind == _Kind.ENDED and not self._members:
                self._end(now)
            if self._ready:
                self._enter(now)
        return self.enters

    def _events(self, until: float) -> Iterator[_Event]:
        """Yield what happens in order: starts and ends of hosts, and what follows from them."""
        known = sorted([(time, int(_Kind.START), host, 0) for host, time in enumerate(self.starts)
                        if time < until] + [(time, int(_Kind.GONE), host, 0)
                                            for host, time in enumerate(self.gone) if time < until])
        later = self._later
        for event in known:
            while later and later[0] < event:
                yield heapq.heappop(later)
            yield event
        while later and later[0][0] < until:
            yield heapq.heappop(later)

    def _start(self, host: int, now: float) -> None:
        if self.gone[host] <= now:
            return
        if now < self._since:  # the attempt begins later
            heapq.heappush(self._later, (self._since, _Kind.START, host, 0))
            return
        boot_s = self.draws.boots[host] if self._is_formed else self._drawn()[0]
        self._booting.add(host)
        heapq.heappush(self._later, (now + boot_s, _Kind.READY, host, self._attempt))

    def _stand(self, host: int, now: float) -> None:
        self._booting.discard(host)
        if not self._ready:
            self._settled = now + self.settle_s
            heapq.heappush(self._later, (self._settled, _Kind.SETTLED, host, self._attempt))
        self._ready.add(host)

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

    def _leave(self, host: int, now: float) -> None:
        self._booting.discard(host)
        self._ready.discard(host)
        if host not in self._members:
            return
        self._members.discard(host)
        if not self._members and self.lost[host] <= now:
            self._end(now)
        elif not self._members:
            heapq.heappush(self._later, (self.lost[host], _Kind.ENDED, host, self._attempt))

    def _end(self, now: float) -> None:
        """End the attempt. The workers that boot or stand ready start again in the next one."""
        _, give_up_s, listed_s = self._drawn()
        self._attempt, self._since, self._is_formed = (
            self._attempt + 1, now + give_up_s + listed_s, False)
        for host in sorted(self._booting | self._ready):
            heapq.heappush(self._later, (self._since, _Kind.START, host, 0))
        self._booting.clear()
        self._ready.clear()

    def _drawn(self) -> tuple[float, float, float]:
        return self.draws.attempts[self._attempt % len(self.draws.attempts)]

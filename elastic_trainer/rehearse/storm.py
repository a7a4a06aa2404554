"""A storm: the trace of a fleet whose hosts are lost at random, alone, in bulk or all at once.

"rate=12/h,bulk=0.4,zero=0.1,seed=7", or the name of a shipped storm → here → trace

The distribution:
- Losses come at `rate` an hour, each independent of the others (a Poisson process).
- A share `zero` of them takes all hosts. A share `bulk` takes several: between 2 and a quarter of
  the fleet (2 of a small one), each number equally likely. The others take one host.
- A share `notice` of them comes with a notice of 120 s (trace.NOTICE_S).
- The hosts of a loss are replaced together. That takes `replace` seconds on average from the moment
  they are gone: one half is fixed, the other one is the mean of an exponential distribution. After
  a zero all hosts return together.

What always holds:
1. The same storm and number of hosts give the same rows, on each machine and version of Python:
   only random.Random.random() is drawn from, whose sequence Python keeps.
2. Only a zero takes the last host.
"""

from __future__ import annotations

import heapq
import math
import random
import re
from dataclasses import dataclass, fields

from elastic_trainer.config import ConfigError
from elastic_trainer.rehearse.trace import JOIN, LOSS, NOTICE, NOTICE_S, Row, completed

HOUR_S = 3600.0
HOURS = 24.0
"""Of a storm that is played, if it does not say how long it lasts."""
SHIPPED = {
    "calm": "rate=20/h,bulk=0,notice=1,replace=60,seed=1",
    "rough": "rate=40/h,bulk=0.4,notice=0.5,replace=60,seed=7",
    "zeros": "rate=24/h,bulk=0.2,zero=0.4,notice=0.5,replace=90,seed=3",
}
"""The storms that have a name."""


@dataclass(frozen=True, kw_only=True)
class Storm:
    """What a storm is drawn from."""

    rate: float
    """Losses an hour."""
    bulk: float = 0.4
    """The share of losses that take several hosts. Of the p3 trace's 79 removals 40 do."""
    zero: float = 0.0
    """The share of losses that take all hosts."""
    notice: float = 0.8
    """The share of losses with a notice."""
    replace: float = 180.0
    """The mean seconds until lost hosts are replaced."""
    hours: float | None = None
    """After this time nothing more is lost. None: 24 in a replay, and never in a plan."""
    seed: int = 0


def parse_storm(text: str) -> Storm:
    """Read the name of a shipped storm, or its values. Raises ConfigError."""
    given: dict[str, float] = {}
    for item in SHIPPED.get(text, text).split(","):
        name, _, value = item.strip().partition("=")
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(/h)?", value)
        if name not in {one.name for one in fields(Storm)} or not found or (
                found[2] and name != "rate"):
            raise ConfigError(f"--storm has {item!r}. Use one of {', '.join(SHIPPED)}, or "
                              f"NAME=NUMBER with {', '.join(one.name for one in fields(Storm))}, "
                              f"e.g. rate=12/h,bulk=0.4,zero=0.1,seed=7.")
        given[name] = float(found[1])
    if not 0.0 < given.get("rate", 0.0) <= 3600.0:
        raise ConfigError(f"--storm {text} has no rate between 0 and 3600 an hour. Use e.g. "
                          f"rate=12/h.")
    storm = Storm(**given | {"seed": int(given.get("seed", 0))})  # type: ignore[arg-type]
    shares = {"bulk": storm.bulk, "zero": storm.zero, "notice": storm.notice,
              "bulk + zero": storm.bulk + storm.zero}
    for name, share in shares.items():
        if share > 1.0:
            raise ConfigError(f"--storm {text} has {name} {share:g}, which is no share of the "
                              f"losses. Use a number between 0 and 1.")
    if (losses := hours_of(storm) * storm.rate) > 1e6:
        raise ConfigError(f"--storm {text} has {losses:.0f} losses. Use fewer "
                          f"hours: a storm may have 1,000,000.")
    return storm


def hours_of(storm: Storm) -> float:
    """Return the hours after which nothing more is lost in a replay."""
    return HOURS if storm.hours is None else storm.hours


def rows_of(storm: Storm, hosts: int) -> list[Row]:
    """Return the trace of a storm over a fleet of this size."""
    return _Fleet(storm, hosts).rows()


class _Fleet:
    """The hosts of a storm while its rows are drawn."""

    def __init__(self, storm: Storm, hosts: int):
        self.storm, self.chance = storm, random.Random(storm.seed)
        self.here: list[str] = []
        self.back: list[tuple[float, int]] = []
        """When how many hosts return, as a heap."""
        self.found: list[Row] = []
        self.named = 0
        self.hosts = hosts
        self._join(0.0, hosts)

    def rows(self) -> list[Row]:
        now, end = self._exponential(HOUR_S / self.storm.rate), hours_of(self.storm) * HOUR_S
        while now < end:
            while self.back and self.back[0][0] <= now:
                self._join(*heapq.heappop(self.back))
            self._lose(now)
            now += self._exponential(HOUR_S / self.storm.rate)
        for time_s, count in sorted(self.back):
            self._join(time_s, count)
        return completed(self.found, "--storm")

    def _join(self, now: float, count: int) -> None:
        names = [f"host{self.named + number}" for number in range(1, count + 1)]
        self.named += count
        self.here += names
        self.found += [Row(now, JOIN, name) for name in names]

    def _lose(self, now: float) -> None:
        kind, size, is_noticed = (self.chance.random() for _ in range(3))
        is_zero = kind < self.storm.zero
        is_bulk = not is_zero and kind < self.storm.zero + self.storm.bulk
        several = 2 + int(size * (max(2, self.hosts // 4) - 1))
        count = len(self.here) if is_zero else min(several if is_bulk else 1, len(self.here) - 1)
        taken = [self.here.pop(int(self.chance.random() * len(self.here)))
                 for _ in range(max(0, count))]
        gone_s = now + (NOTICE_S if is_noticed < self.storm.notice else 0.0)
        for name in taken:
            if gone_s > now:
                self.found.append(Row(now, NOTICE, name))
            self.found.append(Row(gone_s, LOSS, name))
        again_s = gone_s + (self.storm.replace + self._exponential(self.storm.replace)) / 2
        if is_zero:  # until then nobody may return
            count += sum(others for _, others in self.back)
            self.back = []
        if count > 0:
            heapq.heappush(self.back, (again_s, count))

    def _exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self.chance.random())

"""Pools of hosts, and the changes that they bring: losses one by one, in bulk, or of all at once.

--pool, storm, trace → here → list of changes → model

What always holds:
1. The same pool, seed and duration give the same changes. Pools do not depend on each other.
2. A pool never loses more hosts than it has, and only a zero takes the last one.
"""

from __future__ import annotations

import heapq
import itertools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from elastic_trainer.config import ConfigError
from elastic_trainer.rehearse.storm import HOUR_S, Storm
from elastic_trainer.rehearse.trace import JOIN, LOSS, NOTICE, NOTICE_S, Row

_SCALES = {"s": 1.0, "m": 60.0, "min": 60.0, "h": HOUR_S, "d": 24 * HOUR_S, "day": 24 * HOUR_S}


class Change(NamedTuple):
    """A moment at which hosts come or go."""

    time_s: float
    joined: int = 0
    noticed: int = 0
    """Hosts that leave under notice."""
    lost: int = 0
    """Hosts that vanish."""
    crashed: int = 0
    """Workers that die while their hosts stay."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Hosts of one type in one zone, for one price."""

    name: str = "fleet"
    hosts: int = 0
    """How many are wanted."""
    price: float = 1.0
    """Of a host for an hour."""
    loss: float = 0.0
    """Losses of a host in an hour."""
    rate: float = 0.0
    """Events of loss of the whole pool in an hour, however many hosts it has; besides `loss`."""
    bulk: float = 0.0
    """The share of the events of loss that take several hosts: between 2 and a quarter of them."""
    zero: float = 0.0
    """The share of the events of loss that take all hosts of the pool."""
    notice: float = 0.0
    """The share of the events of loss that come with a notice."""
    crash: float = 0.0
    """Crashes of a worker in an hour, on a host that stays."""
    replace: float = 180.0
    """The mean seconds until lost hosts are replaced: one half fixed, one half exponential."""


    @property
    def event_size(self) -> float:
        """The mean number of hosts that an event of loss takes."""
        several = (2 + max(2, self.hosts // 4)) / 2.0
        return (1.0 - self.bulk - self.zero) + self.bulk * several + self.zero * self.hosts


def changes_of(pool: Pool, seconds: float, seed: int) -> list[Change]:
    """Return what happens to a pool: by the distribution of storm.py, without names of hosts."""
    return _Drawn(pool, seconds, seed).changes()


class _Drawn:
    """A pool while its changes are drawn."""

    def __init__(self, pool: Pool, seconds: float, seed: int):
        self.pool, self.seconds = pool, seconds
        self.chance = random.Random(f"{pool.name} {seed}")
        self.here = pool.hosts
        self.found = [Change(0.0, joined=pool.hosts)]
        self.back: list[tuple[float, int]] = []
        """When how many hosts return, as a heap."""

    def changes(self) -> list[Change]:
        """Draw event after event: the time to the next one is exponential."""
        pool, now = self.pool, 0.0
        per_host = pool.loss / HOUR_S / pool.event_size
        while True:
            losses, crashes = pool.rate / HOUR_S + self.here * per_host, self.here * pool.crash
            rate = losses + crashes / HOUR_S
            following = now + self.chance.expovariate(rate) if rate else self.seconds
            if self.back and self.back[0][0] <= min(following, self.seconds):
                now, count = heapq.heappop(self.back)
                self.here += count
                self.found.append(Change(now, joined=count))
            elif following >= self.seconds:
                return self.found
            elif self.chance.random() * rate < losses:
                now = following
                self._lose(now)
            else:
                now = following
                self.found.append(Change(now, crashed=1))

    def _lose(self, now: float) -> None:
        pool, kind = self.pool, self.chance.random()
        count = min(1, self.here - 1)
        if kind < pool.zero:
            count = self.here
        elif kind < pool.zero + pool.bulk:
            count = min(self.chance.randint(2, max(2, pool.hosts // 4)), self.here - 1)
        if count < 1:
            return
        is_noticed = self.chance.random() < pool.notice
        self.here -= count
        self.found.append(Change(now, noticed=count) if is_noticed else Change(now, lost=count))
        if kind < pool.zero:  # until all return nobody may
            count += sum(others for _, others in self.back)
            self.back = []
        again_s = now + NOTICE_S * is_noticed + (
            pool.replace + self.chance.expovariate(1.0 / pool.replace)) / 2
        heapq.heappush(self.back, (again_s, count))


def of_storm(storm: Storm, hosts: int, price: float) -> Pool:
    """Return the pool whose changes have the distribution of a storm."""
    return Pool(name=f"storm {storm.seed}", hosts=hosts, price=price, rate=storm.rate,
                bulk=storm.bulk, zero=storm.zero, notice=storm.notice, replace=storm.replace)


def of_rows(rows: Iterable[Row]) -> list[Change]:
    """Return the changes of a trace. A host under notice leaves the world at its notice."""
    noticed, found = set[str](), list[Change]()
    for time_s, group in itertools.groupby(rows, key=lambda row: row.time_s):
        events = list(group)
        noticed |= {row.host for row in events if row.event == NOTICE}
        lost = [row.host for row in events if row.event == LOSS]
        change = Change(time_s, joined=sum(row.event == JOIN for row in events),
                        noticed=sum(row.event == NOTICE for row in events),
                        lost=sum(host not in noticed for host in lost))
        noticed -= set(lost)
        found += [change] if any(change[1:]) else []
    return found


def merged(lists: Iterable[Sequence[Change]]) -> list[Change]:
    """Return the changes of several pools in the order of time."""
    return sorted((change for changes in lists for change in changes),
                  key=lambda change: change.time_s)


def host_hours(changes: Iterable[Change], seconds: float) -> float:
    """Return the hours of hosts that are paid, from joining until they are taken."""
    return sum((change.joined - change.lost) * (seconds - change.time_s)
               - change.noticed * max(0.0, seconds - change.time_s - NOTICE_S)
               for change in changes if change.time_s < seconds) / HOUR_S


def parse_pool(text: str) -> Pool:
    """Read e.g. "name=a,hosts=500,price=0.9,loss=0.05/h,replace=3min". Raises ConfigError."""
    given: dict[str, Any] = {}
    kinds = {one.name: one.type for one in fields(Pool)}
    for item in text.split(","):
        name, _, value = item.strip().partition("=")
        try:
            given[name] = value if kinds[name] == "str" else number(value)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"--pool has {item!r}. Use NAME=VALUE with one of "
                              f"{', '.join(kinds)}, e.g. loss=0.05/h,replace=3min.") from error
    if not 1 <= given.get("hosts", 0) == int(given.get("hosts", 0)):
        raise ConfigError(f"--pool {text!r} has no whole number of hosts. Use e.g. hosts=100.")
    given["hosts"] = int(given["hosts"])
    pool = Pool(**given)
    shares = {"bulk": pool.bulk, "zero": pool.zero, "bulk + zero": pool.bulk + pool.zero,
              "notice": pool.notice}
    if pool.replace <= 0.0:
        raise ConfigError(f"--pool {pool.name} has replace 0. Use the mean seconds until a lost "
                          f"host is replaced, e.g. replace=3min.")
    for name, share in shares.items():
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"--pool {pool.name} has {name} {share:g}, which is no share of the "
                              f"losses. Use a number between 0 and 1.")
    return pool


def number(text: str) -> float:
    """Read a number with a unit: "0.05/h" an hour, "3min" in seconds. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)(/?)(s|min|m|h|day|d)?", text)
    if not found:
        raise ValueError(text)
    value, slash, unit = float(found[1]), found[2], found[3]
    if slash and not unit:
        raise ValueError(text)
    if slash:
        return value * HOUR_S / _SCALES[unit]  # an hour
    return value * _SCALES[unit] if unit else value

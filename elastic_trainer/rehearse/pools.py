"""Pools of hosts, and the changes that they bring: losses one by one, in bulk, or of all at once.

--pool, --storm → here → list of changes → model

What always holds:
1. The same pool, seed and duration give the same changes. Pools do not depend on each other.
2. A pool never loses more hosts than it has.
"""

from __future__ import annotations

import heapq
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from elastic_trainer.config import ConfigError

HOUR_S = 3600.0
BULK_SIZE = 3.2
"""The mean number of hosts that a loss in bulk takes: 40 of 79 removals of the p3 trace take more
than one node, at most 6 and 3.2 on average."""
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
    bulk: float = 0.0
    """The share of the events of loss that take several hosts."""
    zero: float = 0.0
    """The share of the events of loss that take all hosts of the pool."""
    notice: float = 0.0
    """The share of the events of loss that come with a notice."""
    crash: float = 0.0
    """Crashes of a worker in an hour, on a host that stays."""
    replace: float = 180.0
    """The mean seconds until hosts that were lost are replaced."""


def changes_of(pool: Pool, seconds: float, seed: int) -> list[Change]:
    """Return what happens to a pool. A group of hosts that is lost is replaced at once."""
    chance = random.Random(f"{pool.name} {seed}")
    found, here = [Change(0.0, joined=pool.hosts)], pool.hosts
    back: list[tuple[float, int]] = []
    size = (1.0 - pool.bulk - pool.zero) + pool.bulk * BULK_SIZE + pool.zero * pool.hosts
    events_per_host_s = pool.loss / HOUR_S / size if size else 0.0
    crashes_per_host_s = pool.crash / HOUR_S
    now = 0.0
    while True:
        rate = here * (events_per_host_s + crashes_per_host_s)
        following = now + chance.expovariate(rate) if rate else seconds
        if back and back[0][0] <= min(following, seconds):
            now, count = heapq.heappop(back)
            here += count
            found.append(Change(now, joined=count))
            continue
        now = following
        if now >= seconds:
            return found
        if chance.random() * rate < here * crashes_per_host_s:
            found.append(Change(now, crashed=1))
            continue
        count = min(here, _size(pool, chance, here))
        here -= count
        is_noticed = chance.random() < pool.notice
        found.append(Change(now, noticed=count) if is_noticed else Change(now, lost=count))
        heapq.heappush(back, (now + chance.expovariate(1.0 / max(pool.replace, 1e-9)), count))


def _size(pool: Pool, chance: random.Random, here: int) -> int:
    """Return how many hosts an event of loss takes: 2 or more in bulk, geometrically."""
    kind = chance.random()
    if kind < pool.zero:
        return here
    if kind >= pool.zero + pool.bulk:
        return 1
    count = 2
    while chance.random() < 1.0 - 1.0 / (BULK_SIZE - 1.0):
        count += 1
    return count


def merged(lists: Iterable[Sequence[Change]]) -> list[Change]:
    """Return the changes of several pools in the order of time."""
    return sorted((change for changes in lists for change in changes),
                  key=lambda change: change.time_s)


def host_hours(changes: Iterable[Change], seconds: float) -> float:
    """Return the hours of hosts, from joining to leaving."""
    return sum((change.joined - change.noticed - change.lost) * (seconds - change.time_s)
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

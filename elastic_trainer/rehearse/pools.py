"""Pools of hosts, and the lives of their hosts: lost one by one, in bulk, or all at once.

--pool, storm, trace → here → lives → model

What always holds:
1. The same pool, seed and duration give the same lives. Pools do not depend on each other.
2. A pool never loses more hosts than it has, and only a zero takes the last one.
"""

from __future__ import annotations

import heapq
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from elastic_trainer.config import ConfigError
from elastic_trainer.rehearse.storm import HOUR_S, Storm
from elastic_trainer.rehearse.trace import JOIN, LOSS, NOTICE, NOTICE_S, Row

RATES, TIMES = ("loss", "rate", "crash"), ("replace", "until")
"""The keys of a pool whose values may have a unit."""
MOST = 1e9
"""The largest value of a key."""
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
_SCALES = {"s": 1.0, "m": 60.0, "min": 60.0, "h": HOUR_S, "d": 24 * HOUR_S, "day": 24 * HOUR_S}


class Lives(NamedTuple):
    """The hosts of a fleet, in the order of joining. Where a worker crashes and its host stays, the
    life ends, and the next one of the host begins (`again`)."""

    joined: Floats
    gone: Floats
    """When the host vanished or got its notice; infinite: it stays."""
    noticed: Flags
    again: Flags
    notice_s: float = NOTICE_S
    """From a notice to the loss."""

    @staticmethod
    def of(rows: Iterable[tuple[float, float, bool, bool]], notice_s: float = NOTICE_S) -> Lives:
        """Return the lives of (joined, gone, noticed, again)."""
        table = np.array(sorted(rows, key=lambda row: row[0]), dtype=np.float64).reshape(-1, 4)
        return Lives(table[:, 0], table[:, 1], table[:, 2] > 0, table[:, 3] > 0, notice_s)

    @property
    def most(self) -> int:
        """The largest number of hosts at a time."""
        return int(self._counts().max(initial=0))

    def cpu_s(self, seconds: float) -> float:
        """Return the processor's time that they take in `plan`, repeated for a time."""
        moments = np.unique(np.concatenate([self.gone, self.joined])).size
        zeros = int((self._counts() == 0).sum())
        return cpu_s(self.joined.size, moments, zeros) * (1.0 + seconds / max(self.length_s, 1e-3))

    def _counts(self) -> npt.NDArray[np.int64]:
        """Return the number of hosts after each end and each beginning."""
        ends = self.gone[np.isfinite(self.gone)]
        times = np.concatenate([ends, self.joined])  # of equal times the ends first
        signs = np.concatenate([np.full(ends.size, -1), np.ones(self.joined.size, dtype=int)])
        return np.cumsum(signs[np.argsort(times, kind="stable")])

    @property
    def length_s(self) -> float:
        """The time of the last change."""
        ends = self.gone[np.isfinite(self.gone)]
        return max(float(self.joined.max(initial=0.0)), float(ends.max(initial=0.0)))

    def hours(self, seconds: float) -> float:
        """Return the hours of hosts that are paid: until they are taken."""
        ends = np.minimum(self.gone + self.notice_s * self.noticed, seconds)
        return float(np.maximum(0.0, ends - self.joined).sum()) / HOUR_S


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
    until: float = math.inf
    """After these seconds nothing more is lost."""

    @property
    def event_size(self) -> float:
        """The mean number of hosts that an event of loss takes."""
        several = (2 + max(2, self.hosts // 4)) / 2.0
        return (1.0 - self.bulk - self.zero) + self.bulk * several + self.zero * self.hosts

    def cpu_s(self, seconds: float) -> float:
        """Return the processor's time that its lives take in `plan`, at most."""
        losses = min(seconds, self.until) / HOUR_S * (
            self.rate + self.hosts * self.loss / self.event_size)
        crashes = seconds / HOUR_S * self.hosts * self.crash
        return cpu_s(self.hosts + losses * self.event_size + crashes, losses + crashes,
                     losses * self.zero)


def cpu_s(lives: float, moments: float, zeros: float) -> float:
    """Return the processor's time that lives of hosts take in `plan`: they begin and end at
    moments, and at some of them no host is left. Measured on 2 cores, with all its choices."""
    return 6e-6 * lives + 60e-6 * moments + 6e-3 * zeros


def lives_of(pool: Pool, seconds: float, seed: int) -> Lives:
    """Return what happens to a pool: by the distribution of storm.py, without names of hosts."""
    return _Drawn(pool, seconds, seed).lives()


class _Drawn:
    """A pool while its lives are drawn."""

    def __init__(self, pool: Pool, seconds: float, seed: int):
        self.pool, self.seconds = pool, seconds
        self.chance = random.Random(f"{pool.name} {seed}")
        self.joined, self.gone = list[float](), list[float]()
        self.noticed, self.again = list[bool](), list[bool]()
        self.here: list[int] = []
        """The places of the hosts that are there."""
        self.back: list[tuple[float, int]] = []
        """When how many hosts return, as a heap."""
        self._join(0.0, pool.hosts)

    def lives(self) -> Lives:
        """Draw event after event: the time to the next one is exponential."""
        pool, now = self.pool, 0.0
        per_host = pool.loss / HOUR_S / pool.event_size
        while True:
            is_over = now >= pool.until
            losses = 0.0 if is_over else pool.rate / HOUR_S + len(self.here) * per_host
            rate = losses + len(self.here) * pool.crash / HOUR_S
            following = now + self.chance.expovariate(rate) if rate else self.seconds
            if self.back and self.back[0][0] <= min(following, self.seconds):
                now, count = heapq.heappop(self.back)
                self._join(now, count)
                continue
            if not is_over and pool.until <= min(following, self.seconds):
                now = pool.until  # drawn again: an exponential time has no memory
                continue
            if following >= self.seconds:
                return Lives(np.array(self.joined), np.array(self.gone), np.array(self.noticed),
                             np.array(self.again))
            now = following
            if self.chance.random() * rate < losses:
                self._lose(now)
            else:
                self._leave(1, now)
                self._join(now, 1, again=True)

    def _join(self, now: float, count: int, *, again: bool = False) -> None:
        self.here += range(len(self.joined), len(self.joined) + count)
        self.joined += [now] * count
        self.gone += [math.inf] * count
        self.noticed += [False] * count
        self.again += [again] * count

    def _leave(self, count: int, now: float, *, is_noticed: bool = False) -> None:
        here, draw, gone, noticed = self.here, self.chance.random, self.gone, self.noticed
        for size in range(len(here), len(here) - count, -1):  # millions of hosts in a month
            place = int(draw() * size)
            host, last = here[place], here.pop()
            if host != last:
                here[place] = last
            gone[host], noticed[host] = now, is_noticed

    def _lose(self, now: float) -> None:
        pool, kind, here = self.pool, self.chance.random(), len(self.here)
        count = min(1, here - 1)
        if kind < pool.zero:
            count = here
        elif kind < pool.zero + pool.bulk:
            count = min(self.chance.randint(2, max(2, pool.hosts // 4)), here - 1)
        if count < 1:
            return
        is_noticed = self.chance.random() < pool.notice
        self._leave(count, now, is_noticed=is_noticed)
        if kind < pool.zero:  # until all return nobody may
            count += sum(others for _, others in self.back)
            self.back = []
        again_s = now + NOTICE_S * is_noticed + (
            pool.replace + pool.replace * self.chance.expovariate(1.0)) / 2
        heapq.heappush(self.back, (again_s, count))


def of_storm(storm: Storm, hosts: int, price: float) -> Pool:
    """Return the pool whose lives have the distribution of a storm."""
    return Pool(name=f"storm {storm.seed}", hosts=hosts, price=price, rate=storm.rate,
                bulk=storm.bulk, zero=storm.zero, notice=storm.notice, replace=storm.replace,
                until=math.inf if storm.hours is None else storm.hours * HOUR_S)


def of_rows(rows: Iterable[Row]) -> Lives:
    """Return the lives of a trace. A host under notice leaves the world at its notice."""
    open_lives, found = dict[str, float](), list[tuple[float, float, bool, bool]]()
    told, notices = dict[str, float](), list[float]()
    for row in rows:
        if row.event == NOTICE:
            told[row.host] = row.time_s
        elif row.event == LOSS and row.host in told:
            notices.append(row.time_s - told.pop(row.host))
        if row.event == JOIN:
            open_lives[row.host] = row.time_s
        elif row.host in open_lives:
            found.append((open_lives.pop(row.host), row.time_s, row.event == NOTICE, False))
    return Lives.of([*found, *((joined, math.inf, False, False)
                               for joined in open_lives.values())],
                    median(notices) if notices else NOTICE_S)


def merged(parts: Sequence[Lives]) -> Lives:
    """Return the lives of several pools."""
    order = np.argsort(np.concatenate([part.joined for part in parts]), kind="stable")
    return Lives(np.concatenate([part.joined for part in parts])[order],
                 np.concatenate([part.gone for part in parts])[order],
                 np.concatenate([part.noticed for part in parts])[order],
                 np.concatenate([part.again for part in parts])[order])


def repeated(trace: Lives, seconds: float, seed: int) -> Lives:
    """Return a trace for a time: as it is, or if it is at most half as long, again and again from a
    place that depends on the seed. Hosts that are there at its end are those of the next beginning.
    If their numbers differ, the others join or leave under notice."""
    length = trace.length_s
    if 2.0 * length > seconds or length <= 0.0:
        return trace
    start = -float(np.random.default_rng(seed).uniform(0.0, length))
    rows, staying = list[tuple[float, float, bool, bool]](), list[float]()
    while start < seconds:
        for joined, gone, noticed in zip(trace.joined.tolist(), trace.gone.tolist(),
                                         trace.noticed.tolist(), strict=True):
            since = staying.pop() if joined == 0.0 and staying else start + joined
            if gone < math.inf and start + gone > 0.0:
                rows.append((max(0.0, since), start + gone, noticed, False))
            elif gone == math.inf:
                staying.insert(0, since)
        fits = int((trace.joined == 0.0).sum())
        start += length
        rows += [(max(0.0, since), start, True, False) for since in staying[fits:]
                 if since < start]
        staying = staying[:fits]
    return Lives.of([*rows, *((max(0.0, since), math.inf, False, False) for since in staying)],
                    trace.notice_s)


def parse_pool(text: str) -> Pool:
    """Read e.g. "name=a,hosts=500,price=0.9,loss=0.05/h,replace=3min". Raises ConfigError."""
    given: dict[str, Any] = {}
    kinds = {one.name: one.type for one in fields(Pool)}
    for item in text.split(","):
        name, _, value = item.strip().partition("=")
        try:
            given[name] = value if kinds[name] == "str" else _value(name, value)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"--pool has {item!r}. Use NAME=VALUE with one of "
                              f"{', '.join(kinds)}, e.g. loss=0.05/h,replace=3min.") from error
    for name, value in given.items():
        if name != "name" and value > MOST:
            raise ConfigError(f"--pool has {name} {value:g}. Use at most {MOST:g}.")
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


def _value(name: str, text: str) -> float:
    """Read the value of a key: one in an hour, a time, or a number. Raises ValueError."""
    is_each, has_unit = "/" in text, text[-1:].isalpha()
    if is_each and name not in RATES or has_unit and not is_each and name not in TIMES:
        raise ValueError(text)
    return number(text)


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

"""Storms and pools: fleets whose hosts are lost at random, alone, in bulk or all at once.

--storm, --pool, a trace → here → lives → model (plan); storm → here → trace (replay)

The distribution:
- Losses come at `rate` an hour, each independent of the others (a Poisson process). A pool loses
  `loss` hosts an hour for each that it has, too.
- A share `zero` of them takes all hosts. A share `bulk` takes several: between 2 and a quarter of
  the fleet (2 of a small one), each number equally likely. The others take one host.
- A share `notice` of them comes with a notice of 120 s (trace.NOTICE_S).
- The hosts of a loss are replaced together. That takes `replace` seconds on average from the moment
  they are gone: one half is fixed, the other one is the mean of an exponential distribution. After
  a zero all hosts return together.

What always holds:
1. The same storm and number of hosts give the same rows, on each machine and version of Python:
   only random.Random.random() is drawn from, whose sequence Python keeps.
2. The same pool, seed and duration give the same lives. Pools do not depend on each other.
3. A fleet never loses more hosts than it has, and only a zero takes the last one.
"""

from __future__ import annotations

import heapq
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from elastic_trainer.config import ConfigError
from elastic_trainer.rehearse.trace import JOIN, LOSS, NOTICE, NOTICE_S, Row, completed

HOUR_S = 3600.0
HOURS = 24.0
"""Of a storm that is played, if it does not say how long it lasts."""
SHIPPED = {"calm": "rate=20/h,bulk=0,notice=1,replace=60,seed=1",
           "rough": "rate=40/h,bulk=0.4,notice=0.5,replace=60,seed=7",
           "zeros": "rate=24/h,bulk=0.2,zero=0.4,notice=0.5,replace=90,seed=3"}
"""The storms that have a name."""
RATES, TIMES = ("loss", "rate", "crash"), ("replace", "until")
"""The keys whose values may have a unit."""
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
        return cpu_s(self.joined.size, moments, zeros, self.most) * (
            1.0 + seconds / max(self.length_s, 1e-3))

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
                     losses * self.zero, self.hosts)


@dataclass(frozen=True, kw_only=True)
class Storm:
    """A pool for `replay`, whose number of hosts is not known yet."""

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

    def pool(self, hosts: int, price: float = 1.0) -> Pool:
        """Return the pool whose lives have this distribution."""
        return Pool(name=f"storm {self.seed}", hosts=hosts, price=price, rate=self.rate,
                    bulk=self.bulk, zero=self.zero, notice=self.notice, replace=self.replace,
                    until=math.inf if self.hours is None else self.hours * HOUR_S)


def cpu_s(lives: float, moments: float, zeros: float, hosts: int) -> float:
    """Return the processor's time that lives of hosts take in `plan`: they begin and end at
    moments, and at some of them no host is left. Measured on 2 cores, with all its choices."""
    return (6e-6 + 2e-10 * hosts) * lives + 60e-6 * moments + 6e-3 * zeros


# --- what is drawn --------------------------------------------------------------------------------

def lives_of(pool: Pool, seconds: float, seed: int) -> Lives:
    """Return what happens to a pool."""
    return _Drawn(pool, seconds, random.Random(f"{pool.name} {seed}")).lives()


def rows_of(storm: Storm, hosts: int) -> list[Row]:
    """Return the trace of a storm over a fleet of this size, until all hosts are back."""
    pool = storm.pool(hosts)
    if storm.hours is None:
        pool = replace(pool, until=HOURS * HOUR_S)
    rows, found = list[Row](), _Drawn(pool, math.inf, random.Random(storm.seed)).lives()
    for number, (joined, gone, is_noticed, _) in enumerate(
            zip(*(column.tolist() for column in found[:4]), strict=True), 1):
        rows.append(Row(joined, JOIN, f"host{number}"))
        if gone < math.inf and is_noticed:
            rows.append(Row(gone, NOTICE, f"host{number}"))
        if gone < math.inf:
            rows.append(Row(gone + NOTICE_S * is_noticed, LOSS, f"host{number}"))
    return completed(rows, "--storm")


class _Drawn:
    """A pool while its lives are drawn."""

    def __init__(self, pool: Pool, seconds: float, chance: random.Random):
        self.pool, self.seconds, self.draw = pool, seconds, chance.random
        self.joined, self.gone = list[float](), list[float]()
        self.noticed, self.again = list[bool](), list[bool]()
        self.here: list[int] = []
        """The numbers of the hosts that are there, in the order of joining."""
        self.back: list[tuple[float, int]] = []
        """When how many hosts return, as a heap."""
        self._join(0.0, pool.hosts)

    def lives(self) -> Lives:
        """Draw event after event: the time to the next one is exponential."""
        now, known, following = 0.0, -1.0, self.seconds
        while True:
            losses, rate = self._rates(now)
            if rate != known:  # drawn again: an exponential time has no memory
                known = rate
                following = now + self._exponential(1.0 / rate) if rate else self.seconds
            until = self.pool.until if now < self.pool.until else math.inf
            if self.back and self.back[0][0] <= min(following, until, self.seconds):
                now, count = heapq.heappop(self.back)
                self._join(now, count)
            elif until < math.inf and until <= min(following, self.seconds):
                now, known = until, -1.0
            elif following >= self.seconds:
                return Lives(np.array(self.joined), np.array(self.gone), np.array(self.noticed),
                             np.array(self.again))
            else:
                now, known = following, -1.0
                if losses == rate or self.draw() * rate < losses:
                    self._lose(now)
                else:
                    self._leave(1, now)
                    self._join(now, 1, again=True)

    def _rates(self, now: float) -> tuple[float, float]:
        """Return the losses, and the losses and crashes, that come in a second."""
        pool, here = self.pool, len(self.here)
        losses = 0.0 if now >= pool.until else (
            pool.rate + here * pool.loss / pool.event_size) / HOUR_S
        return losses, losses + here * pool.crash / HOUR_S

    def _join(self, now: float, count: int, *, again: bool = False) -> None:
        self.here += range(len(self.joined), len(self.joined) + count)
        self.joined += [now] * count
        self.gone += [math.inf] * count
        self.noticed += [False] * count
        self.again += [again] * count

    def _leave(self, count: int, now: float, *, is_noticed: bool = False) -> None:
        here, draw, gone, noticed = self.here, self.draw, self.gone, self.noticed
        for size in range(len(here), len(here) - count, -1):  # millions of hosts in a month
            host = here.pop(int(draw() * size))
            gone[host], noticed[host] = now, is_noticed

    def _lose(self, now: float) -> None:
        pool, here = self.pool, len(self.here)
        kind, size, told = self.draw(), self.draw(), self.draw()
        is_zero, is_noticed = kind < pool.zero, told < pool.notice
        is_bulk = not is_zero and kind < pool.zero + pool.bulk
        several = 2 + int(size * (max(2, pool.hosts // 4) - 1))
        count = max(0, here if is_zero else min(several if is_bulk else 1, here - 1))
        self._leave(count, now, is_noticed=is_noticed)
        again_s = now + NOTICE_S * is_noticed + (pool.replace
                                                 + self._exponential(pool.replace)) / 2
        if is_zero:  # until all return nobody may
            count += sum(others for _, others in self.back)
            self.back = []
        if count:
            heapq.heappush(self.back, (again_s, count))

    def _exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self.draw())


# --- traces ---------------------------------------------------------------------------------------

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
    joined, gone, noticed, again = (np.concatenate(column)[order] for column in zip(
        *((part.joined, part.gone, part.noticed, part.again) for part in parts), strict=True))
    return Lives(joined, gone, noticed, again)


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


# --- the command line -----------------------------------------------------------------------------

def parse_storm(text: str) -> Storm:
    """Read the name of a shipped storm, or its values. Raises ConfigError."""
    known = [one.name for one in fields(Storm)]
    given = _parsed("--storm", SHIPPED.get(text, text), known,
                    f"one of {', '.join(SHIPPED)}, or NAME=NUMBER with {', '.join(known)}, e.g. "
                    f"rate=12/h,bulk=0.4,zero=0.1,seed=7")
    if not 0.0 < given.get("rate", 0.0) <= 3600.0:
        raise ConfigError(f"--storm {text} has no rate between 0 and 3600 an hour. Use e.g. "
                          f"rate=12/h.")
    storm = Storm(**given | {"seed": int(given.get("seed", 0))})
    _require_shares(f"--storm {text}", storm)
    if (losses := (HOURS if storm.hours is None else storm.hours) * storm.rate) > 1e6:
        raise ConfigError(f"--storm {text} has {losses:.0f} losses. Use fewer hours: a storm may "
                          f"have 1,000,000.")
    return storm


def parse_pool(text: str) -> Pool:
    """Read e.g. "name=a,hosts=500,price=0.9,loss=0.05/h,replace=3min". Raises ConfigError."""
    known = [one.name for one in fields(Pool)]
    given = _parsed("--pool", text, known,
                    f"NAME=VALUE with one of {', '.join(known)}, e.g. loss=0.05/h,replace=3min")
    if not 1 <= given.get("hosts", 0) == int(given.get("hosts", 0)):
        raise ConfigError(f"--pool {text!r} has no whole number of hosts. Use e.g. hosts=100.")
    pool = Pool(**given | {"hosts": int(given["hosts"])})
    _require_shares(f"--pool {pool.name}", pool)
    return pool


def _parsed(option: str, text: str, known: Sequence[str], remedy: str) -> dict[str, Any]:
    """Read NAME=VALUE,NAME=VALUE: numbers, but for a name. Raises ConfigError."""
    given: dict[str, Any] = {}
    for item in text.split(","):
        name, _, value = item.strip().partition("=")
        try:
            if name not in known:
                raise ValueError(name)
            given[name] = value if name == "name" else _value(name, value)
        except ValueError as error:
            raise ConfigError(f"{option} has {item!r}. Use {remedy}.") from error
        if name != "name" and given[name] > MOST:
            raise ConfigError(f"{option} has {name} {given[name]:g}. Use at most {MOST:g}.")
    return given


def _require_shares(what: str, of: Pool | Storm) -> None:
    shares = {"bulk": of.bulk, "zero": of.zero, "notice": of.notice,
              "bulk + zero": of.bulk + of.zero}
    for name, share in shares.items():
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"{what} has {name} {share:g}, which is no share of the losses. Use "
                              f"a number between 0 and 1.")


def _value(name: str, text: str) -> float:
    """Read the value of a key, with its unit: "0.05/h" an hour, "3min" in seconds. Raises
    ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)(?:(/?)(s|min|m|h|day|d))?", text)
    if not found or found[3] and name not in (RATES if found[2] else TIMES):
        raise ValueError(text)
    value, scale = float(found[1]), _SCALES[found[3]] if found[3] else 1.0
    return value * HOUR_S / scale if found[2] else value * scale

"""EC2's prices over time: `report --prices ec2`, `watch --prices ec2`.

hosts of the log (type, zone, lives) → here → EC2's price history, AWS's price list → prices

What always holds:
1. The spot price of a host is the mean of the history over the host's lives, so its cost is the
   integral of the price. A host on demand has the price of the list.
2. A price that is not known is an error that names the host, or the permission, and never 0.
3. `report` waits for AWS. A live view does not: `follow` asks in a thread, for the first time when
   a pool (a type in a zone) is asked for, and then once in ASK_S for what has changed since.
4. Nothing is asked for but prices: of types, zones and times, and of no instance.

What it does not do: know the account's discounts, or the bill. EC2 bills a machine from its start,
and a host lives from its first event.

Source: DescribeSpotPriceHistory also gives the last change before the start, and keeps 90 days
(EC2's API reference). GetProducts is answered in a few regions (AWS's price list reference).
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
from botocore.parsers import ResponseParserError

from elastic_trainer.config import ConfigError
from elastic_trainer.views.prices import Price

ASK_S = 300.0
"""How often a live view asks. A spot price changes a few times a day."""
AGAIN_S = 60.0
"""The same after a question without an answer."""
SINCE_S = 3600.0
"""Of a pool that no host has lived in yet, the history is asked for from so long ago."""
MOST_PAGES, MOST_OF_ERROR = 100, 300
CONFIG = Config(retries={"mode": "standard", "total_max_attempts": 4}, connect_timeout=5,
                read_timeout=20)
FORBIDDEN = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException")
LINUX, ON_DEMAND = "Linux/UNIX", "on-demand"
NO_ANSWER = (BotoCoreError, ClientError, ResponseParserError, LookupError, TypeError, ValueError)
A_FILE = "or name a file of prices (--prices FILE, docs/guide/report.md)"

Client = Callable[[str, str], Any]
"""Returns boto3's client for a service in a region."""


class Pool(NamedTuple):
    """What has a spot price of its own."""

    zone: str
    type: str

    @property
    def region(self) -> str:
        """The region of the zone: eu-central-1 of eu-central-1a. Raises ConfigError."""
        match = re.match(r"[a-z]{2}(-[a-z]+)+-[0-9]+", self.zone)
        if not match:
            raise ConfigError(f"{self.zone!r} is no zone of AWS. Name a file of prices (--prices "
                              f"FILE, docs/guide/report.md).")
        return match[0]


class Changes(NamedTuple):
    """The price of a pool: when it changed, and to what."""

    times: Sequence[float]
    prices: Sequence[float]

    def mean(self, lives: Iterable[Sequence[float]]) -> float:
        """Return the mean over some times. The first change is at their start, or before."""
        spent = total = 0.0
        for start, end in lives:
            at = max(0, bisect_right(self.times, start) - 1)
            while start < end:
                until = min(end, self.times[at + 1] if at + 1 < len(self.times) else math.inf)
                spent, total = spent + self.prices[at] * (until - start), total + until - start
                start, at = until, at + 1
        return spent / total if total else self.prices[-1]


class Aws:
    """The questions to AWS."""

    def __init__(self, client: Client | None = None):
        self._client = client or _client

    def spot(self, region: str, pools: Sequence[Pool], since: float
             ) -> Iterator[tuple[Pool, float, float]]:
        """Yield the price changes of pools of a region: pool, time, price. Raises ConfigError."""
        asked = {
            "InstanceTypes": sorted({pool.type for pool in pools}),
            "ProductDescriptions": [LINUX],
            "Filters": [{"Name": "availability-zone",
                         "Values": sorted({pool.zone for pool in pools})}],
            "StartTime": datetime.fromtimestamp(since, timezone.utc)}
        try:
            ec2, token = self._client("ec2", region), dict[str, str]()
            for _ in range(MOST_PAGES):
                page = ec2.describe_spot_price_history(**asked, **token)
                for entry in page["SpotPriceHistory"]:
                    yield (Pool(entry["AvailabilityZone"], entry["InstanceType"]),
                           entry["Timestamp"].timestamp(), _money(entry["SpotPrice"]))
                if not page.get("NextToken"):
                    return
                token = {"NextToken": page["NextToken"]}
        except NO_ANSWER as error:
            raise _refused("ec2:DescribeSpotPriceHistory", region, error) from error
        raise ConfigError(f"EC2's price history of {region} has more than {MOST_PAGES} pages. "
                          f"Report a shorter run, {A_FILE}.")

    def on_demand(self, region: str, kind: str) -> float:
        """Return the price of an hour of a type on demand, in dollars. Raises ConfigError."""
        wanted = {"instanceType": kind, "regionCode": region, "operatingSystem": "Linux",
                  "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used",
                  "licenseModel": "No License required"}
        home = "cn-northwest-1" if region.startswith("cn-") else "us-east-1"
        try:
            answer = self._client("pricing", home).get_products(
                ServiceCode="AmazonEC2", FormatVersion="aws_v1", Filters=[
                    {"Type": "TERM_MATCH", "Field": name, "Value": value}
                    for name, value in wanted.items()])
            found = {price for text in answer["PriceList"] for price in _hourly(json.loads(text))}
        except NO_ANSWER as error:
            raise _refused("pricing:GetProducts", home, error) from error
        if len(found) != 1:
            raise ConfigError(f"AWS's price list has {len(found)} prices of {kind} on demand in "
                              f"{region}, and one is needed. Name a file of prices (--prices FILE, "
                              f"docs/guide/report.md).")
        return found.pop()


class Ec2Prices:
    """The prices of hosts, as far as AWS was asked. Threads share it."""

    currency = "USD"

    def __init__(self, aws: Aws, clock: Callable[[], float] = time.time):
        self.trouble = ""
        self._aws, self._clock = aws, clock
        self._lock = threading.Lock()
        self._changes: dict[Pool, dict[float, float]] = {}
        self._on_demand: dict[Pool, float] = {}
        self._wanted: dict[Pool, float] = {}
        """Since when the history of each pool is needed."""
        self._asked: dict[Pool, tuple[float, float]] = {}
        """From when until when it has been asked for."""
        self._is_live = False
        self._has_news = threading.Event()

    def follow(self) -> None:
        """Ask in a thread from now on, so that no view waits for AWS."""
        self._is_live = True
        threading.Thread(target=self._follow, name="prices", daemon=True).start()

    def find(self, host: str, kind: str, zone: str = "", lifecycle: str = "") -> Price | None:
        """Return the newest price of a host of a type; None if it is not known, or not yet."""
        pool = Pool(zone, kind)
        if not kind or not zone or not self._has({pool: self._clock() - SINCE_S}):
            return None
        changes, on_demand = self._known(pool), self._on_demand[pool]
        is_spot = lifecycle != ON_DEMAND and changes.times
        return Price(spot=changes.prices[-1] if is_spot else on_demand, on_demand=on_demand)

    def of_hosts(self, hosts: Mapping[str, Any]) -> dict[str, Price]:
        """Return the mean price of each host of a result over its lives. Raises ConfigError."""
        wanted, of_spot = dict[Pool, float](), dict[Pool, float]()
        for name, host in hosts.items():
            pool = _pool_of(name, host)
            start = min((life[0] for life in host.get("lives", ())), default=self._clock())
            wanted[pool] = min(start, wanted.get(pool, math.inf))
            if host.get("lifecycle") != ON_DEMAND:
                of_spot[pool] = min(start, of_spot.get(pool, math.inf))
        if not self._has(wanted):
            raise ConfigError(self.trouble or "AWS is being asked for the prices.")
        known = {pool: self._known(pool) for pool in wanted}
        for pool, start in of_spot.items():
            _check_start(pool, known[pool], start)
        return {name: self._mean(_pool_of(name, host), host, known) for name, host in hosts.items()}

    def _mean(self, pool: Pool, host: Mapping[str, Any], known: Mapping[Pool, Changes]) -> Price:
        on_demand = self._on_demand[pool]
        return Price(on_demand=on_demand, spot=on_demand if host.get("lifecycle") == ON_DEMAND
                     else known[pool].mean(host.get("lives", ())))

    def _known(self, pool: Pool) -> Changes:
        with self._lock:
            changes = sorted(self._changes.get(pool, {}).items())
        return Changes([at for at, _ in changes], [price for _, price in changes])

    def _has(self, wanted: Mapping[Pool, float]) -> bool:
        """True if the history of pools is known since a time. Otherwise it is asked for."""
        with self._lock:
            missing = {pool: since for pool, since in wanted.items()
                       if pool not in self._wanted or since < self._wanted[pool]}
            self._wanted.update(missing)
        if self._is_live:
            if missing:
                self._has_news.set()
        elif missing:
            self.ask()
        with self._lock:
            return all(self._asked.get(pool, (math.inf,))[0] <= since and pool in self._on_demand
                       for pool, since in wanted.items())

    def ask(self) -> None:
        """Ask for what is wanted and not known yet. Network. Raises ConfigError."""
        with self._lock:
            wanted, asked = dict(self._wanted), dict(self._asked)
        now = self._clock()
        since = {pool: asked[pool][1] if pool in asked and asked[pool][0] <= start else start
                 for pool, start in wanted.items()}
        for region in sorted({pool.region for pool in since}):
            pools = [pool for pool in since if pool.region == region]
            self._take(region, pools, min(since[pool] for pool in pools))
        with self._lock:
            for pool, start in wanted.items():
                self._asked[pool] = min(start, asked.get(pool, (math.inf,))[0]), now

    def _take(self, region: str, pools: Sequence[Pool], since: float) -> None:
        changes = list(self._aws.spot(region, pools, since))
        new = {pool.type for pool in pools if pool not in self._on_demand}
        on_demand = {kind: self._aws.on_demand(region, kind) for kind in sorted(new)}
        with self._lock:
            for pool, at, price in changes:
                self._changes.setdefault(pool, {})[at] = price
            self._on_demand.update({pool: on_demand[pool.type] for pool in pools
                                    if pool.type in on_demand})

    def _follow(self) -> None:
        while True:
            self._has_news.wait(AGAIN_S if self.trouble else ASK_S)
            self._has_news.clear()
            try:
                if self._wanted:
                    self.ask()
                self.trouble = ""
            except ConfigError as error:
                self.trouble = str(error)


def _pool_of(name: str, host: Mapping[str, Any]) -> Pool:
    """Return the pool of a host of a result. Raises ConfigError."""
    if not host.get("type") or not host.get("zone"):
        raise ConfigError(f"The event log has no type and zone of host {name}, which only a poller "
                          f"of EC2 logs (--events). Name a file of prices (--prices FILE, "
                          f"docs/guide/report.md).")
    return Pool(str(host["zone"]), str(host["type"]))


def _check_start(pool: Pool, changes: Changes, start: float) -> None:
    """Raise ConfigError if a pool has no price at a time."""
    if not changes.times:
        raise ConfigError(f"EC2 has no spot price of {pool.type} in {pool.zone} for {LINUX}. Use "
                          f"the credentials of the account that has the fleet, {A_FILE}.")
    if changes.times[0] > start:
        first = datetime.fromtimestamp(changes.times[0], timezone.utc).isoformat(" ", "minutes")
        raise ConfigError(f"EC2's price history of {pool.type} in {pool.zone} begins at {first}, "
                          f"after the start of the run: EC2 keeps 90 days. Name a file of prices "
                          f"(--prices FILE, docs/guide/report.md).")


def _hourly(product: Mapping[str, Any]) -> Iterator[float]:
    """Yield the prices of an hour on demand in a product of AWS's price list."""
    for term in product["terms"].get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            price = _money(dimension["pricePerUnit"].get("USD", "0"))
            if dimension.get("unit") == "Hrs" and price > 0:
                yield price


def _money(text: str) -> float:
    """Return a price. Raises ValueError."""
    price = float(text)
    if not 0.0 <= price < math.inf:
        raise ValueError(f"{text} is no price")
    return price


def _refused(action: str, region: str, error: Exception) -> ConfigError:
    """Return the error for a question that AWS did not answer."""
    code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else ""
    if code in FORBIDDEN:
        return ConfigError(f"AWS does not let these credentials ask for prices ({code}). Allow "
                           f'{action} on "*", {A_FILE}.')
    if isinstance(error, NoCredentialsError):
        return ConfigError(f"{action} needs credentials, and AWS's chain has none. Set "
                           f"AWS_PROFILE, {A_FILE}.")
    reason = str(error)[:MOST_OF_ERROR]
    return ConfigError(f"AWS did not answer {action} in {region}: {reason}. Call the command again "
                       f"later, {A_FILE}.")


def _client(service: str, region: str) -> Any:
    return boto3.session.Session().client(service, region_name=region, config=CONFIG)

"""EC2's present prices: `report --prices ec2`, `watch --prices ec2`.

hosts of the log (type, zone) → here → EC2's spot prices, AWS's price list → prices

What always holds:
1. A spot host has today's spot price of its type in its zone, also for the time before. A host on
   demand has the price of the list.
2. A price that is not known is an error that names the host, or the permission, and never 0.
3. `report` waits for AWS. A live view does not: `follow` asks in a thread, when a pool (a type in a
   zone) is asked for, and then once in ASK_S.
4. Nothing is asked for but prices: of types and zones, and of no instance.

What it does not do: know what the price was (a file of prices can have the mean), the account's
discounts, or the bill. EC2 bills a machine from its start, and a host lives from its first event.

Source: DescribeSpotPriceHistory from a time on begins with the price at that time (EC2's API
reference). GetProducts is answered in a few regions (AWS's price list reference).
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
MOST_ENTRIES, MOST_OF_ERROR = 10_000, 300
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


def client_of(service: str, region: str) -> Any:
    """Return boto3's client, with the credentials of AWS's chain."""
    return boto3.session.Session().client(service, region_name=region, config=CONFIG)


class Ec2Prices:
    """The present prices of hosts, as far as AWS was asked. Threads share it."""

    currency = "USD"

    def __init__(self, client: Client = client_of, *, ask_s: float = ASK_S,
                 again_s: float = AGAIN_S):
        self.trouble = ""
        self._client, self._ask_s, self._again_s = client, ask_s, again_s
        self._spot: dict[Pool, float] = {}
        self._on_demand: dict[Pool, float] = {}
        self._wanted: set[Pool] = set()
        self._is_live = False
        self._has_news = threading.Event()

    def follow(self) -> None:
        """Ask in a thread from now on, so that no view waits for AWS."""
        self._is_live = True
        threading.Thread(target=self._follow, name="prices", daemon=True).start()

    def find(self, host: str, kind: str, zone: str = "", lifecycle: str = "") -> Price | None:
        """Return the price of a host of a type; None if it is not known, or not yet."""
        pool = Pool(zone, kind)
        return self._price(pool, lifecycle) if kind and zone and self._has([pool]) else None

    def of_hosts(self, hosts: Mapping[str, Any]) -> dict[str, Price]:
        """Return the price of each host of a result. Raises ConfigError."""
        pools = {name: _pool_of(name, host) for name, host in hosts.items()}
        if not self._has(pools.values()):
            raise ConfigError(self.trouble or "AWS is being asked for the prices.")
        for name, pool in pools.items():
            if hosts[name].get("lifecycle") != ON_DEMAND and pool not in self._spot:
                raise ConfigError(f"EC2 has no spot price of {pool.type} in {pool.zone} for "
                                  f"{LINUX}. Use the credentials of the account that has the "
                                  f"fleet, {A_FILE}.")
        return {name: self._price(pool, hosts[name].get("lifecycle", ""))
                for name, pool in pools.items()}

    def _price(self, pool: Pool, lifecycle: str) -> Price:
        on_demand = self._on_demand[pool]
        spot = on_demand if lifecycle == ON_DEMAND else self._spot.get(pool, on_demand)
        return Price(spot=spot, on_demand=on_demand)

    def _has(self, pools: Collection[Pool]) -> bool:
        """True if the prices of pools are known. Otherwise they are asked for."""
        if unknown := set(pools) - self._on_demand.keys():
            is_new = not unknown <= self._wanted
            self._wanted = self._wanted | unknown
            if not self._is_live:
                self._ask()
            elif is_new:
                self._has_news.set()
        return all(pool in self._on_demand for pool in pools)

    def _follow(self) -> None:
        while True:
            self._has_news.wait(self._again_s if self.trouble else self._ask_s)
            self._has_news.clear()
            try:
                self._ask()
                self.trouble = ""
            except ConfigError as error:
                self.trouble = str(error)

    def _ask(self) -> None:
        """Ask for the prices of all pools that are wanted. Network. Raises ConfigError."""
        wanted, spot, on_demand = self._wanted, dict[Pool, float](), dict[Pool, float]()
        for region in sorted({pool.region for pool in wanted}):
            pools = [pool for pool in wanted if pool.region == region]
            spot.update(self._spot_of(region, pools))
            new = [pool for pool in pools if pool not in self._on_demand]
            listed = {kind: self._listed(region, kind) for kind in {pool.type for pool in new}}
            on_demand |= {pool: listed[pool.type] for pool in new}
        self._spot = spot
        self._on_demand = self._on_demand | on_demand  # last: it tells that a pool is known

    def _spot_of(self, region: str, pools: Iterable[Pool]) -> dict[Pool, float]:
        """Return the present spot price of each pool of a region. Raises ConfigError."""
        newest = dict[Pool, tuple[float, float]]()
        try:
            pages = self._client("ec2", region).get_paginator("describe_spot_price_history")
            found = pages.paginate(
                InstanceTypes=sorted({pool.type for pool in pools}), ProductDescriptions=[LINUX],
                Filters=[{"Name": "availability-zone",
                          "Values": sorted({pool.zone for pool in pools})}],
                StartTime=datetime.now(timezone.utc),
                PaginationConfig={"MaxItems": MOST_ENTRIES})
            for entry in found.search("SpotPriceHistory[]"):
                pool = Pool(entry["AvailabilityZone"], entry["InstanceType"])
                change = entry["Timestamp"].timestamp(), _money(entry["SpotPrice"])
                newest[pool] = max(change, newest.get(pool, change))
        except NO_ANSWER as error:
            raise _refused("ec2:DescribeSpotPriceHistory", region, error) from error
        return {pool: price for pool, (_, price) in newest.items()}

    def _listed(self, region: str, kind: str) -> float:
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


def _pool_of(name: str, host: Mapping[str, Any]) -> Pool:
    """Return the pool of a host of a result. Raises ConfigError."""
    if not host.get("type") or not host.get("zone"):
        raise ConfigError(f"The event log has no type and zone of host {name}, which only a poller "
                          f"of EC2 logs (--events). Name a file of prices (--prices FILE, "
                          f"docs/guide/report.md).")
    return Pool(str(host["zone"]), str(host["type"]))


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

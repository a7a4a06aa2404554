"""EC2's prices: the cost of a host is today's spot price, times its lives."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber
from folds import status_of
from stories import STORY, event, write
from waiting import until

from elastic_trainer.__main__ import main
from elastic_trainer.config import ConfigError
from elastic_trainer.events.summary import summarize
from elastic_trainer.views.ec2_prices import Ec2Prices
from elastic_trainer.views.prices import costs
from elastic_trainer.views.status import cells, columns, host_rows

KIND, ZONE, OTHER = "p3.2xlarge", "eu-central-1a", "eu-central-1b"
AT = datetime(2026, 11, 1, tzinfo=timezone.utc).timestamp()
HOSTS = {"a": (ZONE, "spot"), "b": (ZONE, "spot"), "c": (OTHER, ""), "d": (OTHER, "on-demand")}


def events(**hosts: tuple[str, str]) -> list[dict[str, Any]]:
    """Return the story of test_accounts on machines of EC2, at AT."""
    machines = [event(0.0, "discovery.host_in", host=name, id=f"i-{name}", why="", type=KIND,
                      zone=zone, **({"lifecycle": lifecycle} if lifecycle else {}))
                for name, (zone, lifecycle) in (hosts or HOSTS).items()]
    return [dict(it) | {"time": it["time"] + AT} for it in (STORY[0], *machines, *STORY[1:])]


def change(seconds: float, price: str, zone: str = ZONE) -> dict[str, Any]:
    return {"AvailabilityZone": zone, "InstanceType": KIND, "ProductDescription": "Linux/UNIX",
            "SpotPrice": price, "Timestamp": datetime.fromtimestamp(AT + seconds, timezone.utc)}


def product(price: str) -> str:
    terms = {"x.y": {"priceDimensions": {"x.y.z": {"unit": "Hrs", "pricePerUnit": {"USD": price}}}}}
    return json.dumps({"product": {"sku": "x"}, "terms": {"OnDemand": terms}})


class Stubs:
    """boto3's clients, whose answers are given by the test and checked by botocore's models."""

    def __init__(self) -> None:
        self.clients = {name: boto3.client(
            name, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
            for name in ("ec2", "pricing")}
        self.stubs = {name: Stubber(client) for name, client in self.clients.items()}
        for stub in self.stubs.values():
            stub.activate()
        self.asked: list[tuple[str, str]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self, service: str, region: str) -> Any:
        self.asked.append((service, region))
        assert self.may_answer.wait(60)
        return self.clients[service]

    def spot(self, *changes: dict[str, Any], token: str = "", **asked: Any) -> None:
        self.stubs["ec2"].add_response(
            "describe_spot_price_history",
            {"SpotPriceHistory": list(changes), "NextToken": token},
            {"StartTime": ANY, **asked} if asked else None)

    def on_demand(self, *prices: str) -> None:
        self.stubs["pricing"].add_response("get_products",
                                           {"PriceList": [product(price) for price in prices]})

    def refuse(self, service: str, code: str) -> None:
        method = "describe_spot_price_history" if service == "ec2" else "get_products"
        self.stubs[service].add_client_error(method, code, "no", 403)


@pytest.fixture
def stubs() -> Iterator[Stubs]:
    yield (made := Stubs())
    for stub in made.stubs.values():
        stub.assert_no_pending_responses()


def test_the_cost_of_a_host_is_the_spot_price_times_its_lives(stubs: Stubs) -> None:
    """Each zone has a price of its own, from all pages: the newest one. A host on demand has the
    price of the list."""
    result = summarize(events())
    asked = {"InstanceTypes": [KIND], "ProductDescriptions": ["Linux/UNIX"],
             "Filters": [{"Name": "availability-zone", "Values": [ZONE, OTHER]}]}
    stubs.spot(change(10.0, "7200", OTHER), change(6.0, "360"), token="more", **asked)
    stubs.spot(change(-900.0, "36"), change(-50.0, "3600", OTHER), NextToken="more", **asked)
    stubs.on_demand("36000", "0.0000")
    found = costs(result, Ec2Prices(stubs))
    hours = {name: sum(end - start for start, end in host["lives"]) / 3600
             for name, host in result["hosts"].items()}
    assert hours["c"] == pytest.approx(6.5 / 3600)
    assert found["cost"] == pytest.approx(
        360 * (hours["a"] + hours["b"]) + 7200 * hours["c"] + 36000 * hours["d"], rel=1e-6)
    assert sum(found["by_account"].values()) == pytest.approx(found["cost"])
    assert found["currency"] == "USD"
    assert stubs.asked == [("ec2", "eu-central-1"), ("pricing", "us-east-1")]


@pytest.mark.parametrize(("service", "action"), [("ec2", "ec2:DescribeSpotPriceHistory"),
                                                 ("pricing", "pricing:GetProducts")])
def test_a_missing_permission_is_named(stubs: Stubs, service: str, action: str) -> None:
    """As IAM writes it, so that it can be pasted into a policy."""
    if service == "pricing":
        stubs.spot(change(-1.0, "1"))
    stubs.refuse(service, "UnauthorizedOperation" if service == "ec2" else "AccessDeniedException")
    with pytest.raises(ConfigError, match=rf'Allow {action} on "\*", or name a file of prices'):
        costs(summarize(events()), Ec2Prices(stubs))


def test_a_price_that_is_not_known_is_an_error_and_never_0(
        stubs: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """A pool without a price, two prices on demand, a host of no cloud, an answer that is no
    price, no credentials."""
    for changes, prices, why in (
            ([], ["3"], f"no spot price of {KIND} in {ZONE}"),
            ([change(-1.0, "1")], ["3", "4"], f"has 2 prices of {KIND} on demand in eu-central-1")):
        stubs.spot(*changes)
        stubs.on_demand(*prices)
        with pytest.raises(ConfigError, match=why):
            costs(summarize(events(**{name: (ZONE, "") for name in HOSTS})), Ec2Prices(stubs))
    for price in ("nan", "-1", "none"):
        stubs.spot(change(-1.0, price))
        with pytest.raises(ConfigError, match="did not answer ec2:DescribeSpotPriceHistory"):
            costs(summarize(events()), Ec2Prices(stubs))
    with pytest.raises(ConfigError, match="no type and zone of host b"):
        costs(summarize(events(a=(ZONE, ""))), Ec2Prices(stubs))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    write(tmp_path, events())
    assert main(["report", str(tmp_path), "--prices", "ec2"]) == 2
    assert "needs credentials, and AWS's chain has none" in capsys.readouterr().err


def test_a_view_does_not_wait_for_prices_and_follows_them(stubs: Stubs) -> None:
    """Until AWS has answered a row has none. The reason why AWS does not answer is shown, with the
    last prices."""
    status = status_of(events()[:-1])
    prices = Ec2Prices(stubs, ask_s=0.02, again_s=0.02)
    stubs.may_answer.clear()
    prices.follow()

    def shown() -> set[str]:
        rows = host_rows(status)
        return {cell[-1] for cell in cells(rows, columns(status, None, prices), prices, AT)}

    assert shown() == {"-"}
    with pytest.raises(ConfigError, match="AWS is being asked for the prices"):
        prices.of_hosts(summarize(events())["hosts"])
    stubs.spot(change(-5000.0, "1"), change(-4000.0, "2", OTHER))
    stubs.on_demand("9")
    stubs.refuse("ec2", "UnauthorizedOperation")
    stubs.may_answer.set()
    until(lambda: "ec2:DescribeSpotPriceHistory" in prices.trouble)
    assert shown() == {"1", "2", "9"}  # d is on demand
    stubs.spot(change(900.0, "1.5"), change(-4000.0, "2", OTHER))
    until(lambda: shown() == {"1.5", "2", "9"})


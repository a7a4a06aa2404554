"""How many machines the group is asked for: the wish, a lost coordinator, machines of which none
works.

(By EC2's API: test_fleet.py.)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from cloud import AWS

from elastic_trainer.discovery.place_protocol import PlaceUnavailable
from elastic_trainer.discovery.places.ec2 import BUDGET, AutoScalingGroup
from elastic_trainer.discovery.places.ec2_group import (
    LOST_S,
    USELESS_CALLS,
    Group,
    Past,
    decide,
    keep,
    working,
)


class Substitute:
    """A group that remembers what it was asked for, in order."""

    name = "mine-workers"

    def __init__(self, wish: int = 8):
        self.wish, self.size, self.is_armed = wish, 0, False
        self.affordable: int | None = None
        self.asked: list[tuple[str, float]] = []
        self.fails: set[str] = set()

    def read(self) -> Group:
        return Group(wish=self.wish, size=self.size, is_armed=self.is_armed,
                     affordable=self.affordable)

    def empty_in(self, seconds: float) -> None:
        self._ask("empty_in", seconds)
        self.is_armed = True

    def resize(self, size: int) -> None:
        self._ask("resize", size)
        self.size = size

    def _ask(self, what: str, value: float) -> None:
        if what in self.fails:
            raise PlaceUnavailable(what)
        self.asked.append((what, value))

    def go_off(self) -> None:
        """Do what AWS does after LOST_S without a request of the coordinator."""
        self.size, self.is_armed = 0, False


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


def events(here: Path) -> list[dict[str, Any]]:
    file = here.with_name("events.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def call(group: Substitute, here: Path) -> list[tuple[str, float]]:
    """Do what one call does; returns what the group was asked for."""
    group.asked.clear()
    keep(group, here, here.with_name("events.jsonl"))
    return group.asked


def table(here: Path, *is_in: bool, age_s: float = 0.0) -> None:
    at = time.time() - age_s
    here.with_name("hosts.json").write_text(
        json.dumps({"time": at, "hosts": [{"is_in": one} for one in is_in]}))


def test_the_order_to_empty_the_group_stands_before_a_machine_is_asked_for(here: Path) -> None:
    """The first call asks for the wish; later ones put the emptying off and ask for nothing."""
    group = Substitute()
    assert call(group, here) == [("empty_in", LOST_S), ("resize", 8)]
    assert call(group, here) == [("empty_in", LOST_S)]
    assert [(e["event"], e["size"]) for e in events(here)] == [("discovery.group_resized", 8)]


def test_nothing_is_asked_for_when_the_emptying_cannot_be_ordered(here: Path) -> None:
    """No machine without a bound; the next call asks again."""
    group = Substitute()
    group.fails = {"empty_in"}
    with pytest.raises(PlaceUnavailable):
        call(group, here)
    assert group.size == 0
    group.fails = set()
    assert call(group, here)[-1] == ("resize", 8)


def test_the_wish_is_obeyed_in_the_end_when_asking_for_it_fails(here: Path) -> None:
    """Also where the order to empty the group, by whose absence the need was seen, stands
    meanwhile."""
    group = Substitute()
    call(group, here)
    group.go_off()
    group.fails = {"resize"}
    with pytest.raises(PlaceUnavailable):
        call(group, here)
    group.fails = set()
    assert call(group, here)[-1] == ("resize", 8)


def test_a_size_set_by_hand_stays_until_another_is_wished(here: Path) -> None:
    """Also zero, by which a person pauses the run; the next `apply` with another number counts."""
    group = Substitute()
    call(group, here)
    group.size = 0
    assert call(group, here) == [("empty_in", LOST_S)]
    group.wish = 4
    assert call(group, here)[-1] == ("resize", 4)


def test_the_machines_come_back_with_a_coordinator_that_was_lost(here: Path) -> None:
    """It was stopped for longer than LOST_S, and AWS has emptied the group."""
    group = Substitute()
    call(group, here)
    group.go_off()
    assert call(group, here)[-1] == ("resize", 8)


def test_machines_of_which_none_works_for_an_hour_are_sent_away(here: Path) -> None:
    """With an event that says where to look; they stay away until a person asks for another
    number."""
    group = Substitute()
    call(group, here)
    table(here, False, False)
    for _ in range(USELESS_CALLS - 1):
        assert call(group, here) == [("empty_in", LOST_S)]
    assert call(group, here)[-1] == ("resize", 0)
    assert "logs/" in events(here)[-1]["why"]
    table(here)
    assert call(group, here) == [("empty_in", LOST_S)]


def test_one_that_works_begins_the_hour_anew() -> None:
    """Machines that boot beside it are not counted."""
    group, past = Group(wish=8, size=8, is_armed=True), Past(wish=8, useless=USELESS_CALLS - 1)
    order = decide(group, past, (3, 1))
    assert order.size is None and order.past.useless == 0


def test_workers_that_fail_together_are_sent_away_although_there_is_none_between_two_lots(
        here: Path) -> None:
    """Each lot gives up, is terminated and replaced; this is not to go on for ever."""
    group = Substitute()
    call(group, here)
    for minute in range(1, 4 * USELESS_CALLS):
        table(here, *([] if minute % 8 == 0 else [False, False]))
        if ("resize", 0) in call(group, here):
            break
    assert group.size == 0 and USELESS_CALLS <= minute < 2 * USELESS_CALLS


def test_an_event_that_cannot_be_written_repeats_no_order(here: Path) -> None:
    """A size that a person sets then stays, as always."""
    group = Substitute()
    here.with_name("events.jsonl").mkdir()
    with pytest.raises(OSError):
        call(group, here)
    assert group.size == 8
    assert call(group, here) == [("empty_in", LOST_S)]


def test_a_table_that_is_missing_old_or_broken_is_unknown(here: Path) -> None:
    """It neither counts against the machines nor for them."""
    file = here.with_name("hosts.json")
    assert working(file) is None
    table(here, False, age_s=61)
    assert working(file) is None
    table(here, False, age_s=-5)
    assert working(file) is None
    for text in ("{", "[]", '{"time": 1e300}', '{"time": "x", "hosts": 3}'):
        file.write_text(text)
        assert working(file) is None
    assert decide(Group(wish=8, size=8, is_armed=True), Past(wish=8, useless=7),
                  None).past.useless == 7


def test_a_memory_that_is_damaged_costs_an_order_and_no_more(here: Path) -> None:
    """The wish is obeyed anew; it does not end the unit for good."""
    group = Substitute()
    for text in ("", "[]", '{"wish": "x", "useless": 0}'):
        here.with_name("group.json").write_text(text)
        assert call(group, here)[-1] == ("resize", 8)


def test_a_group_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    """The command ends with 1, and the next minute asks again."""
    env = os.environ | AWS | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-m", "elastic_trainer.discovery", "group", "--group",
                           "mine", "--hosts-file", tmp_path / "hosts"], env=env,
                          capture_output=True, text=True)
    assert done.returncode == 1 and "Auto Scaling did not answer" in done.stderr


# --- max_price_per_hour ---------------------------------------------------------------------------

def sizes(group: Substitute, here: Path) -> list[float]:
    return [value for what, value in call(group, here) if what == "resize"]


def test_the_price_brakes_the_group_and_lets_it_grow_again(here: Path) -> None:
    """From the first order on; each change is one event, which names the cause."""
    group = Substitute(wish=8)
    group.affordable = 5
    assert sizes(group, here) == [5] and sizes(group, here) == []
    group.affordable = 3  # the prices rise
    assert sizes(group, here) == [3] and sizes(group, here) == []
    group.affordable = 6
    assert sizes(group, here) == [6]
    group.affordable = 20
    assert sizes(group, here) == [8] and sizes(group, here) == []
    whys = [event["why"] for event in events(here)]
    assert "max_price_per_hour allows no more" in whys[0] and "max_price_per_hour" in whys[1]
    assert whys[2:] == ["the spot prices allow more machines again"] * 2


def test_a_size_that_a_person_has_set_stays_below_the_brake_and_not_above_it(here: Path) -> None:
    """A sum of dollars is a limit for both."""
    group = Substitute(wish=8)
    group.affordable = 5
    assert sizes(group, here) == [5]
    group.size = 2
    assert sizes(group, here) == []
    group.size = 7
    assert sizes(group, here) == [5]


def test_a_lost_group_comes_back_within_the_brake(here: Path) -> None:
    """After the scheduled action, and for a new wish."""
    group = Substitute(wish=8)
    group.affordable = 5
    assert sizes(group, here) == [5]
    group.go_off()
    assert sizes(group, here) == [5]
    group.wish = 4
    assert sizes(group, here) == [4]
    group.affordable = 9
    assert sizes(group, here) == []


class Prices:
    """EC2's spot prices in pages, and Auto Scaling's group."""

    def __init__(self, tags: dict[str, str], prices: dict[tuple[str, str], str]):
        self.tags, self.prices = tags, prices

    def describe_auto_scaling_groups(self, **_: Any) -> dict[str, Any]:
        machine = {"InstanceType": "p5.48xlarge", "AvailabilityZone": "a"}
        return {"AutoScalingGroups": [{
            "DesiredCapacity": 2, "AvailabilityZones": ["a", "b"],
            "Tags": [{"Key": key, "Value": value} for key, value in self.tags.items()],
            "Instances": [{**machine, "LifecycleState": "InService"},
                          {**machine, "LifecycleState": "Terminating:Wait"}],
            "MixedInstancesPolicy": {"LaunchTemplate": {"Overrides": [
                {"InstanceType": "p5.48xlarge"}, {"InstanceType": "p4d.24xlarge"}]}}}]}

    def describe_scheduled_actions(self, **_: Any) -> dict[str, Any]:
        return {"ScheduledUpdateGroupActions": []}

    def describe_spot_price_history(self, NextToken: str = "", **asked: Any) -> dict[str, Any]:
        assert asked["InstanceTypes"] == ["p4d.24xlarge", "p5.48xlarge"]
        pools = sorted(self.prices)
        here = int(NextToken or 0)
        entries = [{"InstanceType": kind, "AvailabilityZone": zone,
                    "SpotPrice": self.prices[kind, zone], "Timestamp": datetime.now(timezone.utc)}
                   for kind, zone in pools[here:here + 1]]
        more = {"NextToken": str(here + 1)} if here + 1 < len(pools) else {}
        return {"SpotPriceHistory": entries, **more}


@pytest.mark.parametrize(("tags", "prices", "count"), [
    ({}, {}, None),  # without the tag nobody asks for prices
    ({BUDGET: "50"}, {("p5.48xlarge", "a"): "20", ("p4d.24xlarge", "b"): "10"}, 2),
    ({BUDGET: "70"}, {("p5.48xlarge", "a"): "20", ("p4d.24xlarge", "b"): "25"}, 3),
    # Another zone's price does not count.
    ({BUDGET: "70"}, {("p5.48xlarge", "a"): "20", ("p5.48xlarge", "z"): "60"}, 3)])
def test_the_sum_allows_machines_by_the_prices_of_the_groups_types_and_zones(
        tags: dict[str, str], prices: dict[tuple[str, str], str], count: int | None) -> None:
    """A machine that leaves is not counted; further ones may be of the dearest type."""
    cloud = Prices({"Workers": "8"} | tags, prices)
    assert AutoScalingGroup("mine-workers", (cloud, cloud)).read().affordable == count


def test_without_prices_no_machine_is_asked_for() -> None:
    """The next call asks again."""
    cloud = Prices({"Workers": "8", BUDGET: "50"}, {})
    cloud.prices = {("p5.48xlarge", "z"): "1"}
    with pytest.raises(PlaceUnavailable, match="no spot price of p5.48xlarge, p4d.24xlarge"):
        AutoScalingGroup("mine-workers", (cloud, cloud)).read()

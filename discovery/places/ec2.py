"""EC2's answer to "who is here", by the calls that the coordinator's role may make.

EC2, Auto Scaling → here → poll (who lives), ec2_group (how many are wanted)

What always holds:
1. An answer is complete, or PlaceUnavailable is raised: there is no answer of some pages.
2. `hosts.decide` checks again what the filters should exclude: servers other than AWS's ignore
   filters.
3. A poll costs one call per API and 1,000 instances, and one more for the group. While the group
   lacks machines, one more asks why.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from elastic_trainer.discovery.place_protocol import Instance, PlaceUnavailable, Refusal, Supply
from elastic_trainer.discovery.places.ec2_costs import affordable
from elastic_trainer.discovery.places.ec2_group import Group
from elastic_trainer.discovery.places.ec2_refusals import Activity, Shortage, refusal_of

PAGE = 1000
WISH = "Workers"
"""The group's tag with the wished number of machines (deploy/terraform/fleet/workers.tf)."""
BUDGET = "MaxPricePerHour"
"""The group's tag with the dollars an hour that its machines may cost together."""
EMPTY = "empty-without-coordinator"
"""The scheduled action that empties a group."""
CONFIG = Config(retries={"mode": "standard", "total_max_attempts": 3}, connect_timeout=2,
                read_timeout=5)
NO_ANSWER = (BotoCoreError, ClientError, ResponseParserError, LookupError, TypeError, ValueError)
FORBIDDEN = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")
MAY_NOT_ASK = (
    "The group lacks machines, and the coordinator may not ask why. Its role needs "
    "autoscaling:DescribeScalingActivities (deploy/terraform/fleet/iam.tf): apply, and check that "
    "no policy of your organization denies it.")
LIVING = ["pending", "running", "shutting-down", "stopping"]
HOST_NAMES = ("private-dns", "private-ip", "instance-id")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose machines of EC2."""
    add = parser.add_argument
    add("--tag", type=_tag, action="append", required=True, metavar="NAME=VALUE",
        help="only instances with this tag (more than one: with all of them)")
    add("--group", help="only instances InService in this auto scaling group")
    add("--cpu-slots", type=int, default=1, help="slots of a type without GPUs (%(default)s)")
    add("--host-name", choices=HOST_NAMES, default=HOST_NAMES[0],
        help="private-dns must be unique to the incarnation: resource names, not ip names. "
             "instance-id always is, and the host is reached by its private address")


def place_of(options: argparse.Namespace) -> Ec2:
    """Return the place that these options choose."""
    tags = dict(tag.split("=", 1) for tag in options.tag)
    return Ec2(tags, options.group, cpu_slots=options.cpu_slots, host_name=options.host_name)


def _tag(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return text


@contextmanager
def answering(else_: str) -> Iterator[None]:
    """Map the errors of boto3 in this block to PlaceUnavailable."""
    try:
        yield
    except NO_ANSWER as error:
        raise PlaceUnavailable(f"{else_}: {error!r}") from error


def clients(*services: str) -> list[Any]:
    """Return clients of services. Raises PlaceUnavailable."""
    try:
        session = boto3.session.Session()
        return [session.client(service, config=CONFIG) for service in services]
    except (BotoCoreError, ValueError) as error:
        raise PlaceUnavailable(f"No EC2 client can be made: {error}. Set AWS_DEFAULT_REGION, e.g. "
                               f"to eu-central-1.") from error


class Ec2:
    """The instances with some tags, and perhaps of one auto scaling group: a Place."""

    def __init__(self, tags: dict[str, str], group: str | None = None, *, cpu_slots: int = 1,
                 host_name: str = "private-dns", page: int = PAGE):
        self.tags, self.group, self.cpu_slots, self.host_name = tags, group, cpu_slots, host_name
        self.page = page
        self.calls = 0
        """API calls so far."""
        self._ec2, *scaling = clients("ec2", *(["autoscaling"] if group else []))
        self._scaling = scaling[0] if scaling else None
        self._gpus: dict[str, int] = {}
        self._vcpus: dict[str, int] = {}
        self._group: dict[str, Any] = {}
        """The group, as the last answer described it."""

    def instances(self) -> list[Instance]:
        """Return all instances that are not terminated. Raises PlaceUnavailable."""
        filters = [{"Name": f"tag:{name}", "Values": [value]} for name, value in self.tags.items()]
        filters.append({"Name": "instance-state-name", "Values": LIVING})
        with answering("EC2 did not answer"):
            described = [
                one for page in self._pages("describe_instances", Filters=filters,
                                            MaxResults=self.page)
                for reservation in page["Reservations"] for one in reservation["Instances"]
                if one["State"]["Name"] != "terminated"
                and self.group in (None, _tags(one).get("aws:autoscaling:groupName"))]
            # Status checks and scheduled events, without ids, which needs fewer calls.
            status = {one["InstanceId"]: one
                      for page in self._pages("describe_instance_status", MaxResults=self.page)
                      for one in page["InstanceStatuses"]} if described else {}
            if self._scaling:
                self.calls += 1
                self._group = _described(self._scaling, self.group)
            in_group = {one["InstanceId"]: one["LifecycleState"]
                        for one in self._group.get("Instances", [])}
            self._learn_types({one["InstanceType"] for one in described} - self._gpus.keys())
            return [self._instance(one, status.get(one["InstanceId"], {}), in_group)
                    for one in described]

    def supply(self) -> Supply | None:
        """Return the number of the group's machines in the last answer, and why it gets no others.

        None: there is no group. Raises PlaceUnavailable.
        """
        if self._scaling is None or not self._group:
            return None
        there = sum(_stays(one) for one in self._group["Instances"])
        wanted = int(self._group["DesiredCapacity"])
        if there >= wanted:
            return Supply(there=there, wanted=wanted)
        with answering("Auto Scaling did not answer"):
            try:
                refusal = self._refusal(there, wanted)
            except ClientError as error:
                if error.response["Error"]["Code"] not in FORBIDDEN:
                    raise
                refusal = Refusal(code="AccessDenied", says=str(error), remedy=MAY_NOT_ASK)
        return Supply(there=there, wanted=wanted, refusal=refusal)

    def _refusal(self, there: int, wanted: int) -> Refusal | None:
        assert self._scaling
        self.calls += 1
        answer = self._scaling.describe_scaling_activities(AutoScalingGroupName=self.group,
                                                           MaxRecords=100)
        template = self._group.get("MixedInstancesPolicy", {}).get("LaunchTemplate", {})
        types = [one["InstanceType"] for one in template.get("Overrides", [])
                 if "InstanceType" in one]
        self._learn_types(set(types) - self._vcpus.keys())
        vcpus = {kind: self._vcpus[kind] for kind in types if kind in self._vcpus}
        activities = [Activity(started=one["StartTime"].timestamp(), status=one["StatusCode"],
                               description=one.get("Description", ""),
                               says=one.get("StatusMessage", "")) for one in answer["Activities"]]
        return refusal_of(activities, Shortage(
            group=str(self.group), region=self._scaling.meta.region_name, there=there,
            wanted=wanted, vcpus=vcpus), time.time())

    def _instance(self, described: dict[str, Any], status: dict[str, Any],
                  in_group: dict[str, str]) -> Instance:
        identity, kind = described["InstanceId"], described["InstanceType"]
        address = described.get("PrivateIpAddress", "")
        name = {"private-ip": address, "instance-id": identity}.get(
            self.host_name, described.get("PrivateDnsName") or address)
        checks = [status.get(kind, {}).get("Status") for kind in ("InstanceStatus", "SystemStatus")]
        return Instance(
            id=identity, name=name, type=kind,
            address=address if self.host_name == "instance-id" else "",
            zone=described.get("Placement", {}).get("AvailabilityZone", ""),
            launched=described["LaunchTime"].timestamp(),
            lifecycle="spot" if described.get("InstanceLifecycle") == "spot" else "on-demand",
            state=described["State"]["Name"],
            group_state=in_group.get(identity, "not in the group") if self.group else "",
            is_impaired="impaired" in checks,
            events=tuple((event["Code"], _seconds_until(event.get("NotBefore")))
                         for event in status.get("Events", [])
                         if not event.get("Description", "").startswith("[Completed]")),
            slots=(self._gpus[kind] or self.cpu_slots) if name and address else 0,
            gpus=self._gpus[kind])

    def _learn_types(self, new: set[str]) -> None:
        for start in range(0, len(new), 100):
            for page in self._pages("describe_instance_types",
                                    InstanceTypes=sorted(new)[start:start + 100]):
                for entry in page["InstanceTypes"]:
                    self._gpus[entry["InstanceType"]] = nvidia_gpus(entry)
                    self._vcpus[entry["InstanceType"]] = int(entry["VCpuInfo"]["DefaultVCpus"])

    def _pages(self, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        token: dict[str, str] = {}
        while True:
            self.calls += 1
            page = getattr(self._ec2, operation)(**arguments, **token)
            yield page
            if not page.get("NextToken"):
                return
            token = {"NextToken": page["NextToken"]}


class AutoScalingGroup:
    """One auto scaling group, whose size is the coordinator's (ec2_group.py)."""

    def __init__(self, name: str, api: tuple[Any, Any] | None = None):
        """`api`: boto3's clients of Auto Scaling and EC2, in place of those of this machine."""
        self.name = name
        self._scaling, self._ec2 = api or clients("autoscaling", "ec2")

    def read(self) -> Group:
        """Return the wish and the present state. Raises PlaceUnavailable."""
        with answering("Auto Scaling did not answer"):
            group = _described(self._scaling, self.name)
            actions = self._scaling.describe_scheduled_actions(
                AutoScalingGroupName=self.name,
                ScheduledActionNames=[EMPTY])["ScheduledUpdateGroupActions"]
            return Group(wish=int(_tags(group)[WISH]), size=int(group["DesiredCapacity"]),
                         is_armed=any(_seconds_until(action.get("StartTime")) > 0
                                      for action in actions),
                         affordable=self._affordable(group))

    def _affordable(self, group: dict[str, Any]) -> int | None:
        """Return how many machines the group's sum of dollars allows now; None: it has no sum.

        Raises PlaceUnavailable where prices are not known: without them no machine is asked for.
        """
        budget = _tags(group).get(BUDGET)
        if budget is None:
            return None
        template = group["MixedInstancesPolicy"]["LaunchTemplate"]
        types, zones = [one["InstanceType"] for one in template["Overrides"]], set(
            group["AvailabilityZones"])
        prices = {pool: price for pool, price in spot_prices(self._ec2, types).items()
                  if pool[1] in zones}
        if not prices:
            raise PlaceUnavailable(f"AWS has no spot price of {', '.join(types)} in the zones of "
                                   f"{self.name}, which max_price_per_hour needs.")
        dearest = max(prices.values())
        running = [prices.get((one["InstanceType"], one["AvailabilityZone"]), dearest)
                   for one in group["Instances"] if _stays(one)]
        return affordable(float(budget), running, dearest)

    def empty_in(self, seconds: float) -> None:
        """Schedule AWS to empty the group, in place of an earlier schedule. Raises
        PlaceUnavailable."""
        at = datetime.fromtimestamp(time.time() + seconds, timezone.utc)
        with answering(f"Auto Scaling did not accept the order to empty {self.name}"):
            self._scaling.put_scheduled_update_group_action(
                AutoScalingGroupName=self.name, ScheduledActionName=EMPTY, StartTime=at,
                DesiredCapacity=0)

    def resize(self, size: int) -> None:
        """Set the group's desired number of machines. Raises PlaceUnavailable."""
        with answering(f"Auto Scaling did not accept the size {size} of {self.name}"):
            self._scaling.set_desired_capacity(AutoScalingGroupName=self.name, DesiredCapacity=size)


def spot_prices(ec2: Any, types: Iterable[str]) -> dict[tuple[str, str], float]:
    """Return the present spot price of each type in each zone, in dollars an hour.

    DescribeSpotPriceHistory from a time on begins with the price at that time.
    """
    newest: dict[tuple[str, str], tuple[float, float]] = {}
    token: dict[str, str] = {}
    while True:
        page = ec2.describe_spot_price_history(
            InstanceTypes=sorted(types), ProductDescriptions=["Linux/UNIX"],
            StartTime=datetime.now(timezone.utc), **token)
        for entry in page["SpotPriceHistory"]:
            pool = entry["InstanceType"], entry["AvailabilityZone"]
            change = entry["Timestamp"].timestamp(), float(entry["SpotPrice"])
            newest[pool] = max(change, newest.get(pool, change))
        if not page.get("NextToken"):
            return {pool: price for pool, (_, price) in newest.items()}
        token = {"NextToken": page["NextToken"]}


def nvidia_gpus(described: Mapping[str, Any]) -> int:
    """Return the number of NVIDIA's GPUs of an instance type; torch here uses no others."""
    return sum(int(gpu["Count"]) for gpu in described.get("GpuInfo", {}).get("Gpus", [])
               if gpu.get("Manufacturer", "").lower() == "nvidia")


def _stays(member: Mapping[str, Any]) -> bool:
    """Return whether a machine of a group does not leave it."""
    return not member["LifecycleState"].startswith(("Terminat", "Detach"))


def _described(scaling: Any, name: str | None) -> dict[str, Any]:
    """Return a group as Auto Scaling describes it. Raises PlaceUnavailable if there is none."""
    found = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
    if not found:
        raise PlaceUnavailable(f"There is no auto scaling group {name}. Correct --group.")
    group: dict[str, Any] = found[0]
    return group


def _seconds_until(at: datetime | None) -> float:
    return max(0.0, at.timestamp() - time.time()) if at else 0.0


def _tags(described: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags", [])}

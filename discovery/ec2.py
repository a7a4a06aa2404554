"""EC2's answer to "who is here": the one module of discovery that touches boto3.

EC2, Auto Scaling → here → hosts (the decision)

What always holds:
1. An answer is complete, or CloudUnavailable is raised: there is no answer of some pages.
2. `hosts.decide` checks again what the filters should exclude: servers other than AWS's ignore
   filters.
3. A poll costs one call per API and 1,000 instances, and one more for the group. While the group
   lacks machines, one more asks why.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from elastic_trainer.discovery.hosts import Group, Instance
from elastic_trainer.discovery.refusals import Activity, Refusal, Shortage, Supply, refusal_of

PAGE = 1000
WISH = "Workers"
"""The group's tag with the wished number of machines (deploy/terraform/fleet/workers.tf)."""
EMPTY = "empty-without-coordinator"
"""The scheduled action that empties a group."""
CONFIG = Config(retries={"mode": "standard", "total_max_attempts": 3},
                connect_timeout=2,
                read_timeout=5)
NO_ANSWER = (BotoCoreError, ClientError, ResponseParserError, LookupError, TypeError, ValueError)
FORBIDDEN = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")
MAY_NOT_ASK = (
    "The group lacks machines, and the coordinator may not ask why. Its role needs "
    "autoscaling:DescribeScalingActivities (deploy/terraform/fleet/iam.tf): apply, and check that "
    "no policy of your organization denies it.")
NO_CLIENT = "No EC2 client can be made: {}. Set AWS_DEFAULT_REGION, e.g. to eu-central-1."
HOST_NAMES = ("private-dns", "private-ip")


class CloudUnavailable(OSError):
    """The cloud gave no complete answer; the earlier one stays valid."""


class Ec2:
    """The instances with some tags, and perhaps of one auto scaling group."""

    def __init__(self, tags: dict[str, str], group: str | None = None, *, cpu_slots: int = 1,
                 host_name: str = "private-dns"):
        self.tags, self.group, self.cpu_slots, self.host_name = tags, group, cpu_slots, host_name
        self.calls = 0
        """API calls so far."""
        try:
            session = boto3.session.Session()
            self._ec2 = session.client("ec2", config=CONFIG)
            self._scaling = session.client("autoscaling", config=CONFIG) if group else None
        except (BotoCoreError, ValueError) as error:
            raise CloudUnavailable(NO_CLIENT.format(error)) from error
        self._gpus: dict[str, int] = {}
        self._vcpus: dict[str, int] = {}
        self._group: dict[str, Any] = {}
        """The group, as the last answer described it."""

    def instances(self) -> list[Instance]:
        """Return all instances that are not terminated. Raises CloudUnavailable."""
        try:
            described = [
                i for page in self._pages(
                    "describe_instances", Filters=self._filters(), MaxResults=PAGE)
                for reservation in page["Reservations"] for i in reservation["Instances"]
            ]
            if self.group:
                described = [
                    i for i in described if _tags(i).get("aws:autoscaling:groupName") == self.group
                ]
            described = [i for i in described if i["State"]["Name"] != "terminated"]
            status = self._status() if described else {}
            in_group = self._group_states()
            self._learn_types({i["InstanceType"] for i in described} - self._gpus.keys())
            return [self._instance(i, status.get(i["InstanceId"], {}), in_group) for i in described]
        except NO_ANSWER as error:
            raise CloudUnavailable(f"EC2 did not answer: {error!r}") from error

    def supply(self) -> Supply | None:
        """Return the number of the group's machines in the last answer, and why it gets no others.

        None: there is no group. Raises CloudUnavailable.
        """
        if self._scaling is None or not self._group:
            return None
        there, wanted = _living(self._group), int(self._group["DesiredCapacity"])
        if there >= wanted:
            return Supply(there=there, wanted=wanted)
        try:
            self.calls += 1
            answer = self._scaling.describe_scaling_activities(AutoScalingGroupName=self.group,
                                                               MaxRecords=100)
            types = _types(self._group)
            self._learn_types(set(types) - self._vcpus.keys())
            vcpus = {kind: self._vcpus[kind] for kind in types if kind in self._vcpus}
            shortage = Shortage(group=str(self.group), region=self._scaling.meta.region_name,
                                there=there, wanted=wanted, vcpus=vcpus)
            refusal = refusal_of(map(_activity, answer["Activities"]), shortage, time.time())
        except ClientError as error:
            if error.response["Error"]["Code"] not in FORBIDDEN:
                raise CloudUnavailable(f"Auto Scaling did not answer: {error!r}") from error
            refusal = Refusal(code="AccessDenied", says=str(error), remedy=MAY_NOT_ASK)
        except NO_ANSWER as error:
            raise CloudUnavailable(f"Auto Scaling did not answer: {error!r}") from error
        return Supply(there=there, wanted=wanted, refusal=refusal)

    def _instance(self, described: dict[str, Any], status: dict[str, Any],
                  in_group: dict[str, str]) -> Instance:
        identity = described["InstanceId"]
        address = described.get("PrivateIpAddress", "")
        name = address if self.host_name == "private-ip" else described.get(
            "PrivateDnsName") or address
        checks = [status.get(kind, {}).get("Status") for kind in ("InstanceStatus", "SystemStatus")]
        return Instance(
            id=identity,
            name=name,
            type=described["InstanceType"],
            zone=described.get("Placement", {}).get("AvailabilityZone", ""),
            launched=described["LaunchTime"].timestamp(),
            lifecycle="spot" if described.get("InstanceLifecycle") == "spot" else "on-demand",
            state=described["State"]["Name"],
            group_state=in_group.get(identity, "not in the group") if self.group else "",
            is_impaired="impaired" in checks,
            events=tuple((event["Code"], _seconds_until(event.get("NotBefore")))
                         for event in status.get("Events", [])
                         if not event.get("Description", "").startswith("[Completed]")),
            slots=(self._gpus[described["InstanceType"]] or self.cpu_slots) if name else 0)

    def _filters(self) -> list[dict[str, Any]]:
        wanted = [{"Name": f"tag:{name}", "Values": [value]} for name, value in self.tags.items()]
        return [
            *wanted, {
                "Name": "instance-state-name",
                "Values": ["pending", "running", "shutting-down", "stopping"]
            }
        ]

    def _status(self) -> dict[str, dict[str, Any]]:
        """Return status checks and scheduled events of running instances, by id.

        The question has no ids, which needs fewer calls.
        """
        return {
            entry["InstanceId"]: entry
            for page in self._pages("describe_instance_status", MaxResults=PAGE)
            for entry in page["InstanceStatuses"]
        }

    def _group_states(self) -> dict[str, str]:
        if self._scaling is None:
            return {}
        self.calls += 1
        groups = self._scaling.describe_auto_scaling_groups(
            AutoScalingGroupNames=[self.group])["AutoScalingGroups"]
        if not groups:
            raise CloudUnavailable(f"There is no auto scaling group {self.group}. Correct --group.")
        self._group = groups[0]
        return {i["InstanceId"]: i["LifecycleState"] for i in groups[0]["Instances"]}

    def _learn_types(self, new: set[str]) -> None:
        for start in range(0, len(new), 100):
            for page in self._pages("describe_instance_types",
                                    InstanceTypes=sorted(new)[start:start + 100]):
                for entry in page["InstanceTypes"]:
                    gpus = entry.get("GpuInfo", {}).get("Gpus", [])
                    self._gpus[entry["InstanceType"]] = sum(int(gpu["Count"]) for gpu in gpus)
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
    """One auto scaling group, whose size is the coordinator's (group.py)."""

    def __init__(self, name: str):
        self.name = name
        try:
            self._scaling = boto3.session.Session().client("autoscaling", config=CONFIG)
        except (BotoCoreError, ValueError) as error:
            raise CloudUnavailable(NO_CLIENT.format(error)) from error

    def read(self) -> Group:
        """Return the wish and the present state. Raises CloudUnavailable."""
        try:
            groups = self._scaling.describe_auto_scaling_groups(
                AutoScalingGroupNames=[self.name])["AutoScalingGroups"]
            if not groups:
                raise CloudUnavailable(
                    f"There is no auto scaling group {self.name}. Correct --group.")
            actions = self._scaling.describe_scheduled_actions(
                AutoScalingGroupName=self.name,
                ScheduledActionNames=[EMPTY])["ScheduledUpdateGroupActions"]
            return Group(wish=int(_tags(groups[0])[WISH]),
                         size=int(groups[0]["DesiredCapacity"]),
                         is_armed=any(
                             _seconds_until(action.get("StartTime")) > 0 for action in actions))
        except NO_ANSWER as error:
            raise CloudUnavailable(f"Auto Scaling did not answer: {error!r}") from error

    def empty_in(self, seconds: float) -> None:
        """Schedule AWS to empty the group, in place of an earlier schedule.

        Raises CloudUnavailable.
        """
        at = datetime.fromtimestamp(time.time() + seconds, timezone.utc)
        try:
            self._scaling.put_scheduled_update_group_action(AutoScalingGroupName=self.name,
                                                            ScheduledActionName=EMPTY,
                                                            StartTime=at,
                                                            DesiredCapacity=0)
        except NO_ANSWER as error:
            raise CloudUnavailable(
                f"Auto Scaling did not accept the order to empty {self.name}: {error!r}") from error

    def resize(self, size: int) -> None:
        """Set the group's desired number of machines. Raises CloudUnavailable."""
        try:
            self._scaling.set_desired_capacity(AutoScalingGroupName=self.name, DesiredCapacity=size)
        except NO_ANSWER as error:
            raise CloudUnavailable(
                f"Auto Scaling did not accept the size {size} of {self.name}: {error!r}") from error


def _living(group: dict[str, Any]) -> int:
    """Return the number of a group's machines, without those that leave it."""
    return sum(not i["LifecycleState"].startswith(("Terminat", "Detach"))
               for i in group["Instances"])


def _types(group: dict[str, Any]) -> list[str]:
    overrides = group.get("MixedInstancesPolicy", {}).get("LaunchTemplate", {}).get("Overrides", [])
    return [override["InstanceType"] for override in overrides if "InstanceType" in override]


def _activity(described: dict[str, Any]) -> Activity:
    return Activity(started=described["StartTime"].timestamp(),
                    status=described["StatusCode"],
                    description=described.get("Description", ""),
                    says=described.get("StatusMessage", ""))


def _seconds_until(at: datetime | None) -> float:
    return max(0.0, at.timestamp() - time.time()) if at else 0.0


def _tags(described: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags", [])}

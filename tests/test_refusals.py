"""Why a group gets no machines: AWS's sentence, the remedy, and when it is logged.

(The group's size: test_group.py.)
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from botocore.stub import ANY, Stubber
from cloud import AWS
from rich.console import Console

from elastic_trainer.__main__ import main
from elastic_trainer.discovery.ec2 import CloudUnavailable, Ec2
from elastic_trainer.discovery.hosts import Policy
from elastic_trainer.discovery.poll import Poller
from elastic_trainer.discovery.quotas import ON_DEMAND, SPOT, quota_of
from elastic_trainer.discovery.refusals import (
    AGAIN_S,
    MOST_LETTERS,
    RECENT_S,
    Activity,
    Refusal,
    Reported,
    Shortage,
    Supply,
    explain,
    refusal_of,
    report,
)
from elastic_trainer.views.status import Status, fold
from elastic_trainer.views.watch import panel, plain_line

NOW = 1_800_000_000.0
STANDARD = {"c6i.2xlarge": 8, "m6i.2xlarge": 8}
SHORTAGE = Shortage(group="mine-workers", region="eu-central-1", there=0, wanted=4, vcpus=STANDARD)
LAUNCHING = "Launching a new EC2 instance"
NO_QUOTA = (
    "Could not launch Spot Instances. MaxSpotInstanceCountExceeded - Max spot instance count "
    "exceeded. Launching EC2 instance failed."
)
NO_CAPACITY = (
    "Could not launch Spot Instances. InsufficientInstanceCapacity - There is no Spot capacity "
    "available that matches your request. Launching EC2 instance failed."
)


def launch(ago_s: float, status: str = "Failed", says: str = NO_QUOTA) -> Activity:
    return Activity(
        started=NOW - ago_s,
        status=status,
        says=says if status == "Failed" else "",
        description=f"{LAUNCHING}.  Status Reason: {says}"
        if status == "Failed"
        else f"{LAUNCHING}: i-0a1b",
    )


# --- AWS's sentences ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "code", "remedy"),
    [
        (
            NO_QUOTA,
            "MaxSpotInstanceCountExceeded",
            "request-service-quota-increase --region eu-central-1 --service-code ec2 "
            "--quota-code L-34B43A08 --desired-value 32",
        ),
        (
            "Max spot instance count exceeded. Launching EC2 instance failed.",
            "MaxSpotInstanceCountExceeded",
            "L-34B43A08",
        ),
        (
            "You have requested more vCPU capacity than your current vCPU limit of 5 allows for "
            "the instance bucket that the specified instance type belongs to. Please visit "
            "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this "
            "limit. Launching EC2 instance failed.",
            "VcpuLimitExceeded",
            "--quota-code L-1216C47A --desired-value 32",
        ),
        (
            "You've reached your quota for maximum Fleet Requests for this account. Launching "
            "EC2 instance failed.",
            "fleet_quota",
            "AWS Support",
        ),
        (NO_CAPACITY, "InsufficientInstanceCapacity", "more types in instance_types"),
        (
            "There is no Spot capacity available that matches your request. Launching EC2 "
            "instance failed.",
            "InsufficientInstanceCapacity",
            "more types in instance_types",
        ),
        (
            "We currently do not have sufficient c6i.2xlarge capacity in the Availability Zone "
            "you requested (eu-central-1a). Our system will be working on provisioning "
            "additional capacity.",
            "InsufficientInstanceCapacity",
            "instance_types",
        ),
        (
            "Could not launch Spot Instances. UnfulfillableCapacity - Unable to fulfill capacity "
            "due to your request configuration. Please adjust your request and try again. "
            "Launching EC2 instance failed.",
            "UnfulfillableCapacity",
            "deploy/check.sh",
        ),
        (
            "Could not launch Spot Instances. AuthFailure.ServiceLinkedRoleCreationNotPermitted "
            "- The provided credentials do not have permission to create the service-linked role "
            "for EC2 Spot Instances. Launching EC2 instance failed.",
            "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
            "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com",
        ),
        (
            "Could not launch Spot Instances. UnauthorizedOperation - You are not authorized to "
            "perform this operation. Encoded authorization failure message: " + "x" * 900,
            "UnauthorizedOperation",
            "aws sts decode-authorization-message",
        ),
        (
            "Authentication Failure. Launching EC2 instance failed.",
            "AuthFailure",
            "AWS keeps trying",
        ),
        (
            "Could not launch Spot Instances. InvalidBlockDeviceMapping - Volume of size 22GB is "
            "smaller than  snapshot 'snap-0b5c5ea11d58e1fec', expect size >= 30GB. Launching EC2 "
            "instance failed.",
            "InvalidBlockDeviceMapping",
            "worker_disk_gb = 30 ",
        ),
        (
            "Could not launch Spot Instances. InvalidAMIID.NotFound - The image id "
            "'[ami-02c7e84c65fcfecee]' does not exist. Launching EC2 instance failed.",
            "InvalidAMIID.NotFound",
            "image_id",
        ),
        (
            "Could not launch Spot Instances. InvalidFleetConfiguration - Your requested "
            "instance type (p3.8xlarge) is not supported in your requested Availability Zone "
            "(us-east-2c). Launching EC2 instance failed.",
            "InvalidFleetConfiguration",
            "or the zone out of zones",
        ),
        (
            "Could not launch Spot Instances. InvalidParameterCombination - The specified "
            "instance type is not eligible for Free Tier. Launching EC2 instance failed.",
            "InvalidParameterCombination",
            "aws freetier upgrade-account-plan",
        ),
        (
            "InvalidParameterValue - Invalid IAM Instance Profile name. Launching EC2 instance "
            "failed.",
            "InvalidParameterValue",
            "Correct the setting that it names",
        ),
        (
            "Client.InternalError: Client error on launch.",
            "Client.InternalError",
            "get-ebs-default-kms-key-id",
        ),
        (
            "This account is currently blocked and not recognized as a valid account. Launching "
            "EC2 instance failed.",
            "account_blocked",
            "AWS Support",
        ),
        (
            "Something new. Launching EC2 instance failed.",
            "Unknown",
            "aws autoscaling describe-scaling-activities --region eu-central-1 "
            "--auto-scaling-group-name mine-workers",
        ),
        (
            "Could not launch Spot Instances. NeverHeardOf - It is so. Launching EC2 instance "
            "failed.",
            "NeverHeardOf",
            "describe-scaling-activities",
        ),
    ],
)
def test_each_refusal_has_awss_code_its_sentence_and_a_remedy(
    says: str, code: str, remedy: str
) -> None:
    """With the key or the command to use, filled in; also for an unknown refusal."""
    refusal = explain(says, SHORTAGE)
    assert refusal.code == code and remedy in refusal.remedy
    assert (
        refusal.says.startswith(" ".join(says.split())[:100]) and len(refusal.says) <= MOST_LETTERS
    )
    assert not re.search(r"[{}]", refusal.remedy)


def test_a_quota_is_named_for_each_kind_of_type_that_the_group_has() -> None:
    """With as many vCPUs as the wish needs of the largest type; an unknown type names none."""
    gpus = Shortage(
        group="g",
        region="us-east-1",
        there=0,
        wanted=3,
        vcpus={"g5.xlarge": 4, "g5.12xlarge": 48, "p4d.24xlarge": 96},
    )
    refusal = explain(NO_QUOTA, gpus)
    assert refusal.quotas == ("L-3819A6DF", "L-7212CCBC")
    assert "L-3819A6DF (All G and VT Spot Instance Requests) to 144 vCPUs" in refusal.remedy
    assert (
        "--quota-code L-7212CCBC --desired-value 288" in refusal.remedy
        and "workers lower" in refusal.remedy
    )
    for vcpus in ({}, {"quantum1.large": 2}):
        refusal = explain(NO_QUOTA, Shortage(group="g", region="r", there=0, wanted=1, vcpus=vcpus))
        assert refusal.quotas == () and "workers lower" in refusal.remedy


@pytest.mark.parametrize(
    ("kind", "spot", "on_demand"),
    [
        ("c6i.2xlarge", "L-34B43A08", "L-1216C47A"),
        ("im4gn.large", "L-34B43A08", "L-1216C47A"),
        ("z1d.large", "L-34B43A08", "L-1216C47A"),
        ("g4dn.xlarge", "L-3819A6DF", "L-DB2E81BA"),
        ("gr6.4xlarge", "L-3819A6DF", "L-DB2E81BA"),
        ("vt1.3xlarge", "L-3819A6DF", "L-DB2E81BA"),
        ("p5.48xlarge", "L-7212CCBC", "L-417A185B"),
        ("p6-b200.48xlarge", "L-7212CCBC", "L-417A185B"),
        ("dl1.24xlarge", "L-85EED4F7", "L-6E869C2A"),
        ("inf2.xlarge", "L-B5D1601B", "L-1945791B"),
        ("trn1.2xlarge", "L-6B0D517C", "L-2C3B7624"),
        ("x2iedn.xlarge", "L-E3A00192", "L-7295265B"),
        ("hpc7g.4xlarge", None, None),
        ("mac2.metal", None, None),
        ("u7i-12tb.224xlarge", None, None),
        ("", None, None),
    ],
)
def test_a_type_counts_against_the_quota_of_its_family(
    kind: str, spot: str | None, on_demand: str | None
) -> None:
    """None is named where none is known."""
    found = quota_of(kind, spot=True), quota_of(kind, spot=False)
    assert tuple(quota and quota.code for quota in found) == (spot, on_demand)
    assert SPOT.keys() == ON_DEMAND.keys()


# --- which activity counts ------------------------------------------------------------------------


def test_the_last_launch_that_has_ended_decides_in_whatever_order_they_come() -> None:
    """Not one that goes on, not one that ended a machine, not one before machines came again."""
    ending = Activity(
        started=NOW, status="Failed", description="Terminating EC2 instance: i-0a", says="…"
    )
    going_on = launch(1, "WaitingForSpotInstanceId")
    failed, newer, success = launch(60), launch(30, says=NO_CAPACITY), launch(45, "Successful")
    for activities in (
        [ending, going_on, newer, success, failed],
        [failed, success, newer, going_on, ending],
    ):
        refusal = refusal_of(activities, SHORTAGE, NOW)
        assert refusal and refusal.code == "InsufficientInstanceCapacity"
    assert refusal_of([failed, success, going_on], SHORTAGE, NOW) is None
    assert refusal_of([ending, going_on], SHORTAGE, NOW) is None
    assert refusal_of([], SHORTAGE, NOW) is None


def test_a_group_that_lacks_nothing_or_failed_another_day_is_not_refused() -> None:
    """Its activities are kept for six weeks."""
    assert refusal_of([launch(1)], Shortage(group="g", region="r", there=4, wanted=4), NOW) is None
    assert refusal_of([launch(1)], Shortage(group="g", region="r", there=0, wanted=0), NOW) is None
    assert refusal_of([launch(RECENT_S + 1)], SHORTAGE, NOW) is None
    assert refusal_of([launch(-120)], SHORTAGE, NOW) is not None  # our clock is behind


# --- when it is logged ----------------------------------------------------------------------------


def supply(code: str | None = None, there: int = 0) -> Supply:
    return Supply(
        there=there,
        wanted=4,
        refusal=Refusal(code=code, says=f"{code}!", remedy="Do it.") if code else None,
    )


def logged_of(polls: list[tuple[float, Supply]]) -> list[str]:
    reported, logged = Reported(), []
    for now, found in polls:
        reported, events = report(found, reported, now)
        logged += [f"{event.rpartition('.')[2]} {facts['code']}" for event, facts in events]
    return logged


def test_a_refusal_is_logged_once_and_its_end_once() -> None:
    """Also when it lasts for hours."""
    polls = [(5.0 * n, supply("A")) for n in range(2000)]
    assert logged_of([*polls, *((10_000.0 + n, supply(there=4)) for n in range(9))]) == [
        "launch_refused A",
        "launch_refusal_ended A",
    ]


def test_another_refusal_is_logged_and_two_that_alternate_are_logged_seldom() -> None:
    """Zones and types differ: each is logged at once, and again after AGAIN_S at the earliest."""
    turns = [(5.0 * n, supply("AB"[n % 2])) for n in range(1000)]
    logged = logged_of(turns)
    assert logged[:2] == ["launch_refused A", "launch_refused B"]
    assert len(logged) <= 2 * (5 * 1000 / AGAIN_S + 1)
    flapping = [(5.0 * n, supply("A") if n % 2 else supply(there=1)) for n in range(1000)]
    assert len(logged_of(flapping)) <= 2 * (5 * 1000 / AGAIN_S + 1)


def test_a_refusal_stands_while_no_machine_comes_however_seldom_aws_tries() -> None:
    """No attempt of the last hour has failed, and nothing else is better than before."""
    polls = [(0.0, supply("A", there=1)), (5.0, supply(there=1)), (10.0, supply())]
    assert logged_of(polls) == ["launch_refused A"]
    assert logged_of([*polls, (15.0, supply(there=1))]) == [
        "launch_refused A",
        "launch_refusal_ended A",
    ]


def test_a_refusal_that_lasts_is_logged_again_although_it_had_just_ended() -> None:
    """The event log's last entry is not that machines come."""
    polls = [
        (0.0, supply("A")),
        (1.0, supply(there=1)),
        *((2.0 + n, supply("A")) for n in range(int(AGAIN_S))),
    ]
    assert logged_of(polls) == ["launch_refused A", "launch_refusal_ended A", "launch_refused A"]


# --- the group's answer ---------------------------------------------------------------------------


def group(there: int = 0, wanted: int = 4, **more: Any) -> dict[str, Any]:
    """Return a group as Auto Scaling describes it."""
    instance = {
        "AvailabilityZone": "eu-central-1a",
        "LifecycleState": "InService",
        "HealthStatus": "Healthy",
        "ProtectedFromScaleIn": False,
    }
    at = datetime.fromtimestamp(NOW, timezone.utc)
    overrides = [{"InstanceType": kind} for kind in STANDARD]
    return {
        "AutoScalingGroups": [
            {
                "AutoScalingGroupName": "mine-workers",
                "MinSize": 0,
                "MaxSize": 8,
                "DesiredCapacity": wanted,
                "DefaultCooldown": 300,
                "AvailabilityZones": ["eu-central-1a"],
                "HealthCheckType": "EC2",
                "CreatedTime": at,
                "MixedInstancesPolicy": {"LaunchTemplate": {"Overrides": overrides}},
                "Instances": [{"InstanceId": f"i-{n}", **instance} for n in range(there)]
                + [{"InstanceId": "i-ending", **instance, "LifecycleState": "Terminating:Wait"}],
                **more,
            }
        ]
    }


def activity(status: str, says: str = "", ago_s: float = 60.0) -> dict[str, Any]:
    """Return an activity as Auto Scaling describes it (aws/aws-parallelcluster 1944)."""
    return {
        "ActivityId": "9ed5d008",
        "AutoScalingGroupName": "mine-workers",
        "StatusCode": status,
        **({"StatusMessage": says} if says else {}),
        "Description": f"{LAUNCHING}.  Status Reason: {says}" if says else f"{LAUNCHING}: i-0a1b",
        "Progress": 100,
        "Cause": "At 2020-08-18T15:46:11Z …",
        "StartTime": datetime.fromtimestamp(time.time() - ago_s, timezone.utc),
        "Details": '{"Subnet ID":"subnet-0","Availability Zone":"eu-central-1a"}',
    }


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Ec2, Stubber]]]:
    """A maker of an Ec2 whose group is as given; the test gives the answers about activities."""
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)

    def make(described: dict[str, Any]) -> tuple[Ec2, Stubber]:
        cloud = Ec2({"Fleet": "mine"}, "mine-workers")
        machines, scaling = Stubber(cloud._ec2), Stubber(cloud._scaling)
        machines.add_response(
            "describe_instances", {"Reservations": []}, {"Filters": ANY, "MaxResults": ANY}
        )
        machines.add_response(
            "describe_instance_types",
            {
                "InstanceTypes": [
                    {"InstanceType": kind, "VCpuInfo": {"DefaultVCpus": count}}
                    for kind, count in STANDARD.items()
                ]
            },
            {"InstanceTypes": sorted(STANDARD)},
        )
        scaling.add_response(
            "describe_auto_scaling_groups", described, {"AutoScalingGroupNames": ["mine-workers"]}
        )
        machines.activate()
        scaling.activate()
        return cloud, scaling

    yield make


ASKS = {"AutoScalingGroupName": "mine-workers", "MaxRecords": 100}


def test_a_group_that_lacks_machines_is_reported_with_the_quota_of_its_types(
        ec2: Callable[..., tuple[Ec2, Stubber]]) -> None:
    """In the shape in which AWS answers. Machines that end do not count."""
    cloud, scaling = ec2(group(there=1))
    scaling.add_response(
        "describe_scaling_activities",
        {
            "Activities": [
                activity("InProgress", ago_s=5),
                activity("Failed", NO_QUOTA),
                activity("Successful", ago_s=90),
            ]
        },
        ASKS,
    )
    assert cloud.instances() == []
    found = cloud.supply()
    assert found and (found.there, found.wanted) == (1, 4)
    assert found.refusal and found.refusal.quotas == ("L-34B43A08",)
    assert (
        "--region us-east-1 --service-code ec2 --quota-code L-34B43A08 --desired-value 32"
        in found.refusal.remedy
    )


def test_a_whole_group_is_asked_nothing_more(ec2: Callable[..., tuple[Ec2, Stubber]]) -> None:
    """Its polls cost as many calls as ever."""
    cloud, _ = ec2(group(there=4))
    cloud.instances()
    calls = cloud.calls
    assert cloud.supply() == Supply(there=4, wanted=4) and cloud.calls == calls
    assert Ec2({"Fleet": "mine"}).supply() is None


def test_a_coordinator_that_may_not_ask_names_the_permission_that_it_needs(
        ec2: Callable[..., tuple[Ec2, Stubber]]) -> None:
    """Everything else that keeps it from knowing is an error, not "nothing was refused"."""
    cloud, scaling = ec2(group())
    scaling.add_client_error(
        "describe_scaling_activities", "AccessDenied", "User: … is not authorized", 403
    )
    scaling.add_client_error("describe_scaling_activities", "Throttling", "Rate exceeded", 400)
    cloud.instances()
    found = cloud.supply()
    assert (
        found and found.refusal and "autoscaling:DescribeScalingActivities" in found.refusal.remedy
    )
    with pytest.raises(CloudUnavailable):
        cloud.supply()


# --- the poller, and what people see --------------------------------------------------------------


class Nobody:
    """A cloud without machines."""

    def instances(self) -> list[Any]:
        return []


class Story:
    """A poller of an empty fleet whose group's supply the test sets."""

    def __init__(self, folder: Path):
        self.folder, self.now = folder, 0.0
        self.found: Supply | Exception = supply()
        self.restart()

    def restart(self) -> None:
        self.poller = Poller(
            Nobody(),
            self.folder / "hosts",
            Policy(settle_s=0.0),
            clock=lambda: self.now,
            patience_s=20.0,
            supply=self.answer,
            events_file=self.folder / "events.jsonl",
        )

    def answer(self) -> Supply:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def poll(self, found: Supply | Exception, times: int = 1) -> list[str]:
        """Poll the cloud `times` times; returns the names of all events about refusals."""
        self.found = found
        with ThreadPoolExecutor(1) as pool:
            for _ in range(times):
                self.now += 10.0
                self.poller.poll(pool)
        return [event["event"].rpartition(".")[2] for event in self.events()]

    def events(self) -> list[dict[str, Any]]:
        file = self.folder / "events.jsonl"
        events = map(json.loads, file.read_text().splitlines()) if file.exists() else []
        return [event for event in events if "launch_refus" in event["event"]]


REFUSED = Supply(there=0, wanted=4, refusal=explain(NO_QUOTA, SHORTAGE))


def test_a_refusal_is_in_the_event_log_the_table_and_watch_until_machines_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the quota's name, its code and the command; one event for it, one for its end."""
    story = Story(tmp_path)
    assert story.poll(REFUSED, times=5) == ["launch_refused"]
    (event,) = story.events()
    assert event["quotas"] == ["L-34B43A08"] and (event["machines"], event["wanted"]) == (0, 4)
    assert main(["hosts", str(tmp_path / "hosts")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "0 of 4 machines run. AWS refuses more:" in shown
        and "MaxSpotInstanceCountExceeded" in shown
    )
    assert (
        "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests" in shown
        and "L-34B43A08" in shown
    )
    status = fold(Status(run="mine"), event)
    assert (
        "MaxSpotInstanceCountExceeded" in plain_line(status)
        and "--desired-value 32" in status.recent[-1]
    )
    console = Console(width=400, record=True, file=open("/dev/null", "w"))
    console.print(panel(status))
    assert console.export_text().count("AWS refuses machines (0 of 4 run)") == 2
    assert story.poll(supply(there=4), times=5) == ["launch_refused", "launch_refusal_ended"]
    status = fold(status, story.events()[-1])
    assert "refuses" not in plain_line(status) and "4 of 4" in status.recent[-1]
    assert main(["hosts", str(tmp_path / "hosts")]) == 0
    assert "refuses" not in capsys.readouterr().out


def test_missing_machines_without_a_refusal_are_on_their_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no event, and the table shows the number of missing machines."""
    story = Story(tmp_path)
    assert story.poll(supply(there=1), times=3) == []
    assert main(["hosts", str(tmp_path / "hosts")]) == 0
    assert "1 of 4 machines run. AWS has refused none" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_new_poller_neither_logs_it_again_nor_forgets_its_end(tmp_path: Path) -> None:
    """It takes over the earlier poller's memory."""
    story = Story(tmp_path)
    story.poll(REFUSED)
    story.restart()
    assert story.poll(REFUSED) == ["launch_refused"]
    story.restart()
    assert story.poll(supply(there=4)) == ["launch_refused", "launch_refusal_ended"]


def test_what_is_known_stands_while_the_group_does_not_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The list of machines is used. The poller prints once that the supply is unknown."""
    story = Story(tmp_path)
    story.poll(REFUSED)
    assert story.poll(CloudUnavailable("as planned"), times=3) == ["launch_refused"]
    assert (
        story.poller.question.failures == 0
        and json.loads((tmp_path / "hosts.json").read_text())["supply"]["refusal"]
    )
    assert capfd.readouterr().err.count("as planned") == 1


def test_an_image_s_name_in_brackets_and_control_characters_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """AWS's text is neither markup nor a terminal's control sequence."""
    says = "The image id '[ami-02c7e84c65fcfecee]' does not exist\x1b[2J"
    Story(tmp_path).poll(Supply(there=0, wanted=4, refusal=explain(says, SHORTAGE)))
    assert main(["hosts", str(tmp_path / "hosts")]) == 0
    shown = capsys.readouterr().out
    assert "'[ami-02c7e84c65fcfecee]'" in shown and "\x1b[2J" not in shown

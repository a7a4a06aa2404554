"""Why a group gets no machines: AWS's sentence, the remedy, and when it is logged.

(The group's size: test_ec2_group.py.)
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from botocore.stub import ANY, Stubber
from cloud import AWS
from folds import status_of
from rich.console import Console
from test_poll import Story

from elastic_trainer.__main__ import main
from elastic_trainer.discovery.hosts import Policy
from elastic_trainer.discovery.place_protocol import (
    AGAIN_S,
    PlaceUnavailable,
    Refusal,
    Reported,
    Supply,
    report,
)
from elastic_trainer.discovery.places.ec2 import Ec2
from elastic_trainer.discovery.places.ec2_refusals import (
    MOST_LETTERS,
    ON_DEMAND,
    RECENT_S,
    SPOT,
    Activity,
    Shortage,
    explain,
    quotas_of,
    refusal_of,
)
from elastic_trainer.views.watch import Watch, plain_line

NOW = 1_800_000_000.0
STANDARD = {"c6i.2xlarge": 8, "m6i.2xlarge": 8}
SHORTAGE = Shortage(group="mine-workers", region="eu-central-1", there=0, wanted=4, vcpus=STANDARD)
LAUNCHING = "Launching a new EC2 instance"
FAILED, COULD_NOT = " Launching EC2 instance failed.", "Could not launch Spot Instances. "
NO_QUOTA = (f"{COULD_NOT}MaxSpotInstanceCountExceeded - Max spot instance count exceeded."
            f"{FAILED}")
NO_CAPACITY = (f"{COULD_NOT}InsufficientInstanceCapacity - There is no Spot capacity available "
               f"that matches your request.{FAILED}")


def launch(ago_s: float, status: str = "Failed", says: str = NO_QUOTA) -> Activity:
    is_failed = status == "Failed"
    return Activity(
        started=NOW - ago_s, status=status, says=says if is_failed else "",
        description=LAUNCHING + (f".  Status Reason: {says}" if is_failed else ": i-0a1b"))


# --- AWS's sentences ------------------------------------------------------------------------------

@pytest.mark.parametrize(("says", "code", "remedy"), [
    (NO_QUOTA, "MaxSpotInstanceCountExceeded",
     "request-service-quota-increase --region eu-central-1 --service-code ec2 --quota-code "
     "L-34B43A08 --desired-value 32"),
    (f"Max spot instance count exceeded.{FAILED}", "MaxSpotInstanceCountExceeded", "L-34B43A08"),
    (f"You have requested more vCPU capacity than your current vCPU limit of 5 allows for the "
     f"instance bucket that the specified instance type belongs to. Please visit "
     f"http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit."
     f"{FAILED}", "VcpuLimitExceeded", "--quota-code L-1216C47A --desired-value 32"),
    (f"You've reached your quota for maximum Fleet Requests for this account.{FAILED}",
     "fleet_quota", "AWS Support"),
    (NO_CAPACITY, "InsufficientInstanceCapacity", "more types in instance_types"),
    (f"There is no Spot capacity available that matches your request.{FAILED}",
     "InsufficientInstanceCapacity", "more types in instance_types"),
    ("We currently do not have sufficient c6i.2xlarge capacity in the Availability Zone you "
     "requested (eu-central-1a). Our system will be working on provisioning additional capacity.",
     "InsufficientInstanceCapacity", "instance_types"),
    (f"{COULD_NOT}UnfulfillableCapacity - Unable to fulfill capacity due to your request "
     f"configuration. Please adjust your request and try again.{FAILED}", "UnfulfillableCapacity",
     "deploy/check.sh"),
    (f"{COULD_NOT}AuthFailure.ServiceLinkedRoleCreationNotPermitted - The provided credentials do "
     f"not have permission to create the service-linked role for EC2 Spot Instances.{FAILED}",
     "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
     "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"),
    (f"{COULD_NOT}UnauthorizedOperation - You are not authorized to perform this operation. "
     f"Encoded authorization failure message: {'x' * 900}", "UnauthorizedOperation",
     "aws sts decode-authorization-message"),
    (f"Authentication Failure.{FAILED}", "AuthFailure", "AWS keeps trying"),
    (f"{COULD_NOT}InvalidBlockDeviceMapping - Volume of size 22GB is smaller than  snapshot "
     f"'snap-0b5c5ea11d58e1fec', expect size >= 30GB.{FAILED}", "InvalidBlockDeviceMapping",
     "worker_disk_gb = 30 "),
    (f"{COULD_NOT}InvalidAMIID.NotFound - The image id '[ami-02c7e84c65fcfecee]' does not exist."
     f"{FAILED}", "InvalidAMIID.NotFound", "image_id"),
    (f"{COULD_NOT}InvalidFleetConfiguration - Your requested instance type (p3.8xlarge) is not "
     f"supported in your requested Availability Zone (us-east-2c).{FAILED}",
     "InvalidFleetConfiguration", "or the zone out of zones"),
    (f"{COULD_NOT}InvalidParameterCombination - The specified instance type is not eligible for "
     f"Free Tier.{FAILED}", "InvalidParameterCombination", "aws freetier upgrade-account-plan"),
    (f"InvalidParameterValue - Invalid IAM Instance Profile name.{FAILED}",
     "InvalidParameterValue", "Correct the setting that it names"),
    ("Client.InternalError: Client error on launch.", "Client.InternalError",
     "get-ebs-default-kms-key-id"),
    ("VolumeLimitExceeded - You have exceeded your maximum gp3 storage limit of 50 TiB.",
     "VolumeLimitExceeded", "Raise the quota L-7A658B76"),
    (f"This account is currently blocked and not recognized as a valid account.{FAILED}",
     "account_blocked", "AWS Support"),
    (f"Something new.{FAILED}", "Unknown",
     "aws autoscaling describe-scaling-activities --region eu-central-1 "
     "--auto-scaling-group-name mine-workers"),
    (f"{COULD_NOT}NeverHeardOf - It is so.{FAILED}", "NeverHeardOf", "describe-scaling-activities"),
])
def test_each_refusal_has_awss_code_its_sentence_and_a_remedy(
        says: str, code: str, remedy: str) -> None:
    """With the key or the command to use, filled in; also for an unknown refusal."""
    refusal = explain(says, SHORTAGE)
    assert refusal.code == code and remedy in refusal.remedy
    assert refusal.says.startswith(" ".join(says.split())[:100])
    assert len(refusal.says) <= MOST_LETTERS and not re.search(r"[{}]", refusal.remedy)


def test_a_quota_is_named_for_each_kind_of_type_that_the_group_has() -> None:
    """With as many vCPUs as the wish needs of the largest type; an unknown type names none."""
    gpus = Shortage(group="g", region="us-east-1", there=0, wanted=3,
                    vcpus={"g5.xlarge": 4, "g5.12xlarge": 48, "p4d.24xlarge": 96})
    refusal = explain(NO_QUOTA, gpus)
    assert refusal.quotas == ("L-3819A6DF", "L-7212CCBC")
    assert "L-3819A6DF (All G and VT Spot Instance Requests) to 144 vCPUs" in refusal.remedy
    assert "--quota-code L-7212CCBC --desired-value 288" in refusal.remedy
    assert "workers lower" in refusal.remedy
    for vcpus in ({}, {"quantum1.large": 2}):
        refusal = explain(NO_QUOTA, Shortage(group="g", region="r", there=0, wanted=1, vcpus=vcpus))
        assert refusal.quotas == () and "workers lower" in refusal.remedy


@pytest.mark.parametrize(("kinds", "spot", "on_demand"), [
    ("c6i.2xlarge im4gn.large z1d.large", "L-34B43A08", "L-1216C47A"),
    ("g4dn.xlarge gr6.4xlarge vt1.3xlarge", "L-3819A6DF", "L-DB2E81BA"),
    ("p4d.24xlarge p6-b200.48xlarge", "L-7212CCBC", "L-417A185B"),
    ("p5.48xlarge p5en.48xlarge", "L-7212CCBC L-C4BD4855", "L-417A185B"),
    ("f2.6xlarge", "L-88CF9481", "L-74FC7D96"),
    ("dl1.24xlarge", "L-85EED4F7", "L-6E869C2A"), ("inf2.xlarge", "L-B5D1601B", "L-1945791B"),
    ("trn1.2xlarge", "L-6B0D517C", "L-2C3B7624"), ("x2iedn.xlarge", "L-E3A00192", "L-7295265B"),
    ("hpc7g.4xlarge mac2.metal u7i-12tb.224xlarge 1", "", "")])
def test_a_type_counts_against_the_quota_of_its_family(
        kinds: str, spot: str, on_demand: str) -> None:
    """None is named where none is known. P5 has two, of which an account may have one."""
    for kind in kinds.split():
        found = quotas_of(kind, spot=True), quotas_of(kind, spot=False)
        codes = [" ".join(quota.code for quota in quotas) for quotas in found]
        assert codes == [spot, on_demand]
    assert SPOT.keys() == ON_DEMAND.keys() and SPOT["inf"].name == "All Inf Spot Instance Requests"


# --- which activity counts ------------------------------------------------------------------------

ENDING = Activity(started=NOW, status="Failed", description="Terminating EC2 instance: i-0a",
                  says="…")
GOING_ON = launch(1, "WaitingForSpotInstanceId")
OLD, NEWER, SUCCESS = launch(60), launch(30, says=NO_CAPACITY), launch(45, "Successful")
WHOLE = Shortage(group="g", region="r", there=4, wanted=4)
NOTHING = Shortage(group="g", region="r", there=0, wanted=0)


@pytest.mark.parametrize(("activities", "shortage", "code"), [
    ([ENDING, GOING_ON, NEWER, SUCCESS, OLD], SHORTAGE, "InsufficientInstanceCapacity"),
    ([OLD, SUCCESS, NEWER, GOING_ON, ENDING], SHORTAGE, "InsufficientInstanceCapacity"),
    ([OLD, SUCCESS, GOING_ON], SHORTAGE, None), ([ENDING, GOING_ON], SHORTAGE, None),
    ([], SHORTAGE, None), ([launch(1)], WHOLE, None), ([launch(1)], NOTHING, None),
    ([launch(RECENT_S + 1)], SHORTAGE, None),  # activities are kept for six weeks
    ([launch(-120)], SHORTAGE, "MaxSpotInstanceCountExceeded"),  # our clock is behind
])
def test_the_last_launch_that_has_ended_decides_if_the_group_lacks_machines(
        activities: list[Activity], shortage: Shortage, code: str | None) -> None:
    """Not one that goes on, not one that ended a machine, not one before machines came again."""
    refusal = refusal_of(activities, shortage, NOW)
    assert (refusal and refusal.code) == code


# --- when it is logged ----------------------------------------------------------------------------

def supply(code: str | None = None, there: int = 0) -> Supply:
    refusal = Refusal(code=code, says=f"{code}!", remedy="Do it.") if code else None
    return Supply(there=there, wanted=4, refusal=refusal)


def logged_of(polls: list[tuple[float, Supply]]) -> list[str]:
    reported, logged = Reported(), []
    for now, found in polls:
        reported, events = report(found, reported, now)
        logged += [f"{event.rpartition('.')[2]} {facts['code']}" for event, facts in events]
    return logged


BEGIN, END = "launch_refused A", "launch_refusal_ended A"
SELDOM = [(0.0, supply("A", there=1)), (5.0, supply(there=1)), (10.0, supply())]


@pytest.mark.parametrize(("polls", "logged"), [
    # It lasts for hours.
    ([*((5.0 * n, supply("A")) for n in range(2000)),
      *((10_000.0 + n, supply(there=4)) for n in range(9))], [BEGIN, END]),
    # No attempt of the last hour has failed, and nothing else is better than before.
    (SELDOM, [BEGIN]), ([*SELDOM, (15.0, supply(there=1))], [BEGIN, END]),
    # The event log's last entry is not that machines come.
    ([(0.0, supply("A")), (1.0, supply(there=1)),
      *((2.0 + n, supply("A")) for n in range(int(AGAIN_S)))], [BEGIN, END, BEGIN])])
def test_a_refusal_is_logged_once_and_its_end_once(
        polls: list[tuple[float, Supply]], logged: list[str]) -> None:
    """It stands while no machine comes, however seldom AWS tries."""
    assert logged_of(polls) == logged


def test_another_refusal_is_logged_and_two_that_alternate_are_logged_seldom() -> None:
    """Zones and types differ: each is logged at once, and again after AGAIN_S at the earliest."""
    logged = logged_of([(5.0 * n, supply("AB"[n % 2])) for n in range(1000)])
    assert logged[:2] == ["launch_refused A", "launch_refused B"]
    flapping = [(5.0 * n, supply("A") if n % 2 else supply(there=1)) for n in range(1000)]
    assert max(len(logged), len(logged_of(flapping))) <= 2 * (5 * 1000 / AGAIN_S + 1)


# --- the group's answer ---------------------------------------------------------------------------

def group(there: int = 0, wanted: int = 4) -> dict[str, Any]:
    """Return a group as Auto Scaling describes it."""
    instance = {"AvailabilityZone": "eu-central-1a", "LifecycleState": "InService",
                "HealthStatus": "Healthy", "ProtectedFromScaleIn": False}
    overrides = [{"InstanceType": kind} for kind in STANDARD]
    return {"AutoScalingGroups": [{
        "AutoScalingGroupName": "mine-workers", "MinSize": 0, "MaxSize": 8,
        "DesiredCapacity": wanted, "DefaultCooldown": 300, "AvailabilityZones": ["eu-central-1a"],
        "HealthCheckType": "EC2", "CreatedTime": datetime.fromtimestamp(NOW, timezone.utc),
        "MixedInstancesPolicy": {"LaunchTemplate": {"Overrides": overrides}},
        "Instances": [*({"InstanceId": f"i-{n}", **instance} for n in range(there)),
                      {"InstanceId": "i-ending", **instance,
                       "LifecycleState": "Terminating:Wait"}]}]}


def activity(status: str, says: str = "", ago_s: float = 60.0) -> dict[str, Any]:
    """Return an activity as Auto Scaling describes it (aws/aws-parallelcluster 1944)."""
    return {
        "ActivityId": "9ed5d008", "AutoScalingGroupName": "mine-workers", "StatusCode": status,
        **({"StatusMessage": says} if says else {}), "Progress": 100,
        "Description": f"{LAUNCHING}.  Status Reason: {says}" if says else f"{LAUNCHING}: i-0a1b",
        "Cause": "At 2020-08-18T15:46:11Z …",
        "StartTime": datetime.fromtimestamp(time.time() - ago_s, timezone.utc),
        "Details": '{"Subnet ID":"subnet-0","Availability Zone":"eu-central-1a"}'}


Make = Callable[..., tuple[Ec2, Stubber]]


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Make:
    """A maker of an Ec2 whose group is as given; the test gives the answers about activities."""
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)

    def make(described: dict[str, Any]) -> tuple[Ec2, Stubber]:
        place = Ec2({"Fleet": "mine"}, "mine-workers")
        machines, scaling = Stubber(place._ec2), Stubber(place._scaling)
        machines.add_response("describe_instances", {"Reservations": []},
                              {"Filters": ANY, "MaxResults": ANY})
        types = [{"InstanceType": kind, "VCpuInfo": {"DefaultVCpus": count}}
                 for kind, count in STANDARD.items()]
        machines.add_response("describe_instance_types", {"InstanceTypes": types},
                              {"InstanceTypes": sorted(STANDARD)})
        scaling.add_response("describe_auto_scaling_groups", described,
                             {"AutoScalingGroupNames": ["mine-workers"]})
        machines.activate()
        scaling.activate()
        return place, scaling

    return make


def test_a_group_that_lacks_machines_is_reported_with_the_quota_of_its_types(ec2: Make) -> None:
    """In the shape in which AWS answers. Machines that end do not count."""
    place, scaling = ec2(group(there=1))
    scaling.add_response(
        "describe_scaling_activities",
        {"Activities": [activity("InProgress", ago_s=5), activity("Failed", NO_QUOTA),
                        activity("Successful", ago_s=90)]},
        {"AutoScalingGroupName": "mine-workers", "MaxRecords": 100})
    assert place.instances() == []
    found = place.supply()
    assert found and (found.there, found.wanted) == (1, 4)
    assert found.refusal and found.refusal.quotas == ("L-34B43A08",)
    assert ("--region us-east-1 --service-code ec2 --quota-code L-34B43A08 --desired-value 32"
            in found.refusal.remedy)


def test_a_whole_group_is_asked_nothing_more(ec2: Make) -> None:
    """Its polls cost as many calls as ever."""
    place, _ = ec2(group(there=4))
    place.instances()
    calls = place.calls
    assert place.supply() == Supply(there=4, wanted=4) and place.calls == calls
    assert Ec2({"Fleet": "mine"}).supply() is None


def test_a_coordinator_that_may_not_ask_names_the_permission_that_it_needs(ec2: Make) -> None:
    """Everything else that keeps it from knowing is an error, not "nothing was refused"."""
    place, scaling = ec2(group())
    asks = "describe_scaling_activities"
    scaling.add_client_error(asks, "AccessDenied", "User: … is not authorized", 403)
    scaling.add_client_error(asks, "Throttling", "Rate exceeded", 400)
    place.instances()
    found = place.supply()
    assert found and found.refusal
    assert "autoscaling:DescribeScalingActivities" in found.refusal.remedy
    with pytest.raises(PlaceUnavailable):
        place.supply()


# --- the poller, and what people see --------------------------------------------------------------

class Refused(Story):
    """A poller of an empty fleet: the test sets the group's supply."""

    def __init__(self, folder: Path):
        super().__init__(folder, 0, policy=Policy(settle_s=0.0), agent_port=None, interval_s=5.0)

    def polled(self, found: Supply | Exception, times: int = 1) -> list[str]:
        """Poll the place `times` times; returns the names of all events about refusals."""
        self.cloud.found = found
        for _ in range(times):
            self.poll(10.0)
        return [event["event"].rpartition(".")[2] for event in self.refusals()]

    def refusals(self) -> list[dict[str, Any]]:
        return self.logged("launch_refused", "launch_refusal_ended")

    def shown(self, capsys: pytest.CaptureFixture[str]) -> str:
        """Return what `elastic-trainer hosts` prints, in one line."""
        assert main(["hosts", str(self.hosts)]) == 0
        return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Refused]:
    story = Refused(tmp_path)
    yield story
    story.end()


REFUSED = Supply(there=0, wanted=4, refusal=explain(NO_QUOTA, SHORTAGE))


def test_a_refusal_is_in_the_event_log_the_table_and_watch_until_machines_come(
        story: Refused, capsys: pytest.CaptureFixture[str]) -> None:
    """With the quota's name, its code and the command; one event for it, one for its end."""
    assert story.polled(REFUSED, times=5) == ["launch_refused"]
    (event,) = story.refusals()
    assert event["quotas"] == ["L-34B43A08"] and (event["machines"], event["wanted"]) == (0, 4)
    shown = story.shown(capsys)
    for sentence in ("0 of 4 machines run. More are refused:", "MaxSpotInstanceCountExceeded",
                     "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
                     "L-34B43A08"):
        assert sentence in shown
    status = status_of([event], "mine")
    assert "MaxSpotInstanceCountExceeded" in plain_line(status)
    assert "--desired-value 32" in status.recent[-1]
    console = Console(width=400, record=True, file=open("/dev/null", "w"))
    shown_by = Watch("mine", console)
    shown_by.status = status
    console.print(shown_by.picture())
    assert console.export_text().count("machines are refused (0 of 4 run)") == 2
    assert story.polled(supply(there=4), times=5) == ["launch_refused", "launch_refusal_ended"]
    status = status_of([event, story.refusals()[-1]], "mine")
    assert "refuses" not in plain_line(status) and "4 of 4" in status.recent[-1]
    assert "refuses" not in story.shown(capsys)


def test_missing_machines_without_a_refusal_are_on_their_way(
        story: Refused, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no event, and the table shows the number of missing machines."""
    assert story.polled(supply(there=1), times=3) == []
    assert "1 of 4 machines run. The place has refused none" in story.shown(capsys)


def test_a_new_poller_neither_logs_it_again_nor_forgets_its_end(story: Refused) -> None:
    """It takes over the earlier poller's memory."""
    story.polled(REFUSED)
    story.restart()
    assert story.polled(REFUSED) == ["launch_refused"]
    story.restart()
    assert story.polled(supply(there=4)) == ["launch_refused", "launch_refusal_ended"]


def test_what_is_known_stands_while_the_group_does_not_answer(
        story: Refused, capfd: pytest.CaptureFixture[str]) -> None:
    """The list of machines is used. The poller prints once that the supply is unknown."""
    story.polled(REFUSED)
    assert story.polled(PlaceUnavailable("as planned"), times=3) == ["launch_refused"]
    assert story.poller.question.failures == 0
    assert json.loads((story.folder / "hosts.json").read_text())["supply"]["refusal"]
    assert capfd.readouterr().err.count("as planned") == 1


def test_an_image_s_name_in_brackets_and_control_characters_are_shown_as_they_are(
        story: Refused, capsys: pytest.CaptureFixture[str]) -> None:
    """AWS's text is neither markup nor a terminal's control sequence."""
    says = "The image id '[ami-02c7e84c65fcfecee]' does not exist\x1b[2J"
    story.polled(Supply(there=0, wanted=4, refusal=explain(says, SHORTAGE)))
    shown = story.shown(capsys)
    assert "'[ami-02c7e84c65fcfecee]'" in shown and "\x1b[2J" not in shown

"""The fleet, from terraform to the last step: what is applied, hosts that are its machines, and
what a destroy leaves.

terraform → EC2's API on loopback → namespaces with those very names and addresses → poller and
agents → training
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import s3_servers
from cloud import AWS, BUCKET, IMAGE_GB, NOT_SAID, OPEN_BUCKET, OTHER_IMAGE, Cloud
from faulty_proxy import FaultyProxy
from netlab import COORDINATOR, RUBBISH, Fleet, Lab, Pickled, command_of, knock, overheard
from terraform import DEPLOY, no_secret_in, user_data

import elastic_trainer.discovery.__main__
from elastic_trainer.discovery.places.ec2_group import LOST_S
from elastic_trainer.events.log import EVENTS_FILE

Twin = Callable[..., str]
ROOT = DEPLOY.parent
DISCOVER = Path(elastic_trainer.discovery.__file__).with_name("__main__.py")
JOB = ("--steps", "140", "--step-s", "0.5", "--checkpoint-every", "5")
"""More than a minute, unless `Fleet.finish` ends it earlier."""
UNAVAILABLE = {"request_limit": "(RequestLimitExceeded)", "internal": "(Unknown)",
               "rubbish": "KeyError"}
"""What the API does (faulty_proxy.py), and how the event log tells it."""


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """The fleet, applied once for all tests here, in their order."""
    with s3_servers.or_skip(), Cloud(tmp_path_factory.mktemp("cloud")) as cloud:
        yield cloud


@pytest.fixture
def applied(cloud: Cloud) -> Cloud:
    """The fleet, where terraform could apply it."""
    if cloud.why_not_terraform:
        pytest.skip(cloud.why_not_terraform)
    return cloud


def policy_of(cloud: Cloud, role: str) -> dict[str, Any]:
    """Return what a role of the fleet may do."""
    policy = cloud.client("iam").get_role_policy(
        RoleName=f"mine-us-east-1-{role}", PolicyName=role)["PolicyDocument"]
    return dict(json.loads(policy) if isinstance(policy, str) else policy)


def template_of(cloud: Cloud) -> dict[str, Any]:
    """Return what the workers are launched from."""
    (template,) = cloud.ec2.describe_launch_templates()["LaunchTemplates"]
    (version,) = cloud.ec2.describe_launch_template_versions(
        LaunchTemplateId=template["LaunchTemplateId"], Versions=["$Latest"]
        )["LaunchTemplateVersions"]
    return dict(version["LaunchTemplateData"])


def test_a_fleet_is_applied_and_found(applied: Cloud) -> None:
    """Spot workers that discovery lists, locked doors, no secret, no `*`."""
    fleet_is_as_wanted(applied)
    for role in ("coordinator", "workers"):
        nothing_is_open(policy_of(applied, role), role)
    no_secret_in(applied.state())


def test_no_machine_is_started_before_its_coordinator_can_use_it_and_none_stays_without_one(
        applied: Cloud) -> None:
    """An apply starts the coordinator alone; its first order fills the group, behind an order of
    AWS's own to empty it."""
    assert applied.size_when_applied == 0 and applied.group()["DesiredCapacity"] == 2
    (switch, ) = applied.scaling.describe_scheduled_actions(
        AutoScalingGroupName="mine-workers")["ScheduledUpdateGroupActions"]
    in_s = switch["StartTime"].timestamp() - time.time()
    assert switch["DesiredCapacity"] == 0 and LOST_S - 600 < in_s <= LOST_S
    assert template_of(applied)["InstanceInitiatedShutdownBehavior"] == "terminate"


def test_an_apply_without_code_is_refused_with_the_command_that_puts_it_there(
        applied: Cloud) -> None:
    """Before a machine is rented that would have nothing to run."""
    output = applied.plan_refused_without_code()
    assert f"s3://{OPEN_BUCKET}/mine/code.tar.gz is not there" in output
    assert f"Run: deploy/push.sh {OPEN_BUCKET} mine" in output


def test_the_coordinator_is_in_a_zone_that_offers_its_type(applied: Cloud) -> None:
    """Not simply in the first one (us-east-1e has no m6i); where none does, the plan fails, with
    the zones that do."""
    (coordinator, ) = (i for i in applied.instances()
                       if i["InstanceId"] == applied.outputs["coordinator"])
    assert coordinator["Placement"]["AvailabilityZone"] == "us-east-1a"
    output = applied.plan_refused(zones='["us-east-1e"]')
    assert "No zone of us-east-1e offers m6i.large. Set coordinator_type, or zones to" in output
    assert "some of: us-east-1a, us-east-1b," in output


def test_every_disk_has_at_least_its_images_size(applied: Cloud) -> None:
    """EC2 refuses less, and each machine keeps torch and the release beside the image."""
    of_coordinator = {"Name": "attachment.instance-id", "Values": [applied.outputs["coordinator"]]}
    (disk,) = applied.ec2.describe_volumes(Filters=[of_coordinator])["Volumes"]
    assert disk["Size"] == IMAGE_GB + 40

    disk = template_of(applied)["BlockDeviceMappings"][0]["Ebs"]
    assert (disk["VolumeSize"], disk["Throughput"]) == (IMAGE_GB + 30, 125)


def test_the_names_in_iam_carry_the_region(applied: Cloud) -> None:
    """IAM has one set of names for all regions: a run of the same name in another one could not be
    applied."""
    iam = applied.client("iam")
    names = {role["RoleName"]
             for role in iam.list_roles()["Roles"]} | {
                 profile["InstanceProfileName"]
                 for profile in iam.list_instance_profiles()["InstanceProfiles"]
             }
    assert names == {"mine-us-east-1-coordinator", "mine-us-east-1-workers"}


def test_a_stopped_coordinator_stays_at_the_next_apply(applied: Cloud) -> None:
    """Also with a newer image, other zones and settings meanwhile; its keys and its run's diary are
    on its disk."""
    applied.ec2.stop_instances(InstanceIds=[applied.outputs["coordinator"]])
    others = {"zones": '["us-east-1c", "us-east-1a", "us-east-1e"]', "slots": "2",
              "command": '["true"]'}
    try:
        for values in (dict[str, str](), others | {"image_id": OTHER_IMAGE}):
            change = applied.planned(**values).get("aws_instance.coordinator", {})
            assert {path[0] for path in change.get("replace_paths", [])} <= NOT_SAID
    finally:
        applied.ec2.start_instances(InstanceIds=[applied.outputs["coordinator"]])


def test_secrets_are_read_by_name_and_by_the_fleets_machines_only(applied: Cloud) -> None:
    """Both roles may read those parameters and no other; workers by a way of the network's own."""
    for role in ("coordinator", "workers"):
        policy = policy_of(applied, role)
        allowed = {action: statement["Resource"] for statement in policy["Statement"]
                   for action in [statement["Action"]] if isinstance(action, str)}
        parameters = [resource.split(":parameter")[1] for resource in allowed["ssm:GetParameter"]]
        assert sorted(parameters) == ["/aws/reference/secretsmanager/hub/token", "/mine/token"]
        assert allowed["secretsmanager:GetSecretValue"].endswith(":secret:hub/token-??????")
        assert "kms:Decrypt" not in allowed
    ways = applied.ec2.describe_vpc_endpoints()["VpcEndpoints"]
    (way,) = (w for w in ways if w["ServiceName"] == "com.amazonaws.us-east-1.ssm")
    assert way["VpcEndpointType"] == "Interface" and way["PrivateDnsEnabled"] and len(
        way["SubnetIds"]) == 1
    plan = applied.planned(secrets="{}")
    assert "TOKEN is in environment and in secrets." in applied.plan_refused(
        environment='{"TOKEN" = "x"}')
    for address in ("aws_vpc_endpoint.ssm[0]", "aws_security_group.ssm[0]"):
        assert plan[address]["actions"] == ["delete"]


def test_the_network_reaches_the_fleets_buckets_and_the_packages_and_no_other(
        applied: Cloud) -> None:
    """Whatever credentials a process brings along: a machine's own lead to the run's part of the
    bucket only, and anonymous ones to the packages of Amazon Linux. What the roles may do in S3,
    the network lets through."""
    (way,) = (w for w in applied.ec2.describe_vpc_endpoints()["VpcEndpoints"]
              if w["ServiceName"] == "com.amazonaws.us-east-1.s3")
    statements = json.loads(way["PolicyDocument"])["Statement"]
    through = {(action, resource): statement for statement in statements
               for action in listed(statement["Action"])
               for resource in listed(statement["Resource"])}
    ours, packages = f"arn:aws:s3:::{OPEN_BUCKET}", "arn:aws:s3:::al2023-repos-us-east-1-de612dc2/*"
    assert {resource for _, resource in through} == {ours, f"{ours}/mine/*", packages}
    assert [action for action, resource in through if resource == packages] == ["s3:GetObject"]
    machines = {f"arn:aws:iam::123456789012:role/mine-us-east-1-{role}"
                for role in ("coordinator", "workers")}
    for (action, resource), statement in through.items():
        assert statement["Effect"] == "Allow" and "*" not in action
        if resource != packages:
            names = statement["Condition"]["StringEquals"]["aws:PrincipalArn"]
            assert set(listed(names)) == machines
    for role in ("coordinator", "workers"):
        policy = policy_of(applied, role)
        for statement in policy["Statement"]:
            for action in listed(statement["Action"]):
                for resource in listed(statement["Resource"]):
                    if action.startswith("s3:"):
                        assert any(action == other and fnmatch(resource, pattern)
                                   for other, pattern in through), (role, action, resource)


def test_the_network_lets_workers_read_the_buckets_with_data(applied: Cloud) -> None:
    """And write nothing there; the coordinator does not reach them."""
    change = applied.planned(data_buckets='["data-of-others"]')["aws_vpc_endpoint.s3"]
    statements = json.loads(change["after"]["policy"])["Statement"]
    (found,) = (s for s in statements if "data-of-others" in str(s["Resource"]))
    assert sorted(found["Action"]) == ["s3:GetObject", "s3:ListBucket"]
    assert sorted(found["Resource"]) == [
        "arn:aws:s3:::data-of-others", "arn:aws:s3:::data-of-others/*"]
    assert str(found["Condition"]["StringEquals"]["aws:PrincipalArn"]).endswith("-workers")


def listed(one_or_more: str | list[str]) -> list[str]:
    return [one_or_more] if isinstance(one_or_more, str) else one_or_more


def fleet_is_as_wanted(cloud: Cloud) -> None:
    ec2, outputs = cloud.ec2, cloud.outputs
    done = subprocess.run([sys.executable, "-m", "elastic_trainer.discovery", "ec2", "--once",
                           "--tag", "Fleet=mine", "--tag", "Role=worker", "--group",
                           outputs["group"], "--cpu-slots", "2"], cwd=ROOT, capture_output=True,
                          text=True, env=os.environ | AWS | {"AWS_ENDPOINT_URL": cloud.endpoint})
    assert done.returncode == 0 and done.stdout.count(":2\n") == 2, done.stderr
    instances = {i["InstanceId"]: i for r in ec2.describe_instances()["Reservations"]
                 for i in r["Instances"]}
    coordinator = instances.pop(outputs["coordinator"])
    assert "InstanceLifecycle" not in coordinator and coordinator["MetadataOptions"][
        "HttpTokens"] == "required"
    assert [i["InstanceLifecycle"] for i in instances.values()] == ["spot"] * 2

    (group,) = cloud.scaling.describe_auto_scaling_groups()["AutoScalingGroups"]
    policy = group["MixedInstancesPolicy"]
    assert policy["InstancesDistribution"]["SpotAllocationStrategy"] == "price-capacity-optimized"
    assert len(policy["LaunchTemplate"]["Overrides"]) > 3 and group["MinSize"] == 0
    assert len(group["VPCZoneIdentifier"].split(",")) == 2
    hooks = cloud.scaling.describe_lifecycle_hooks(AutoScalingGroupName="mine-workers")
    (hook,) = hooks["LifecycleHooks"]
    assert hook["LifecycleTransition"] == "autoscaling:EC2_INSTANCE_TERMINATING" and hook[
        "DefaultResult"] == "CONTINUE"
    template = template_of(cloud)
    assert template["MetadataOptions"]["HttpTokens"] == "required"
    assert template["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    assert template["PrivateDnsNameOptions"]["HostnameType"] == "resource-name"
    assert template["BlockDeviceMappings"][0]["Ebs"]["Encrypted"] is True

    # Only the fleet reaches the fleet.
    rules = ec2.describe_security_group_rules()["SecurityGroupRules"]
    names = {g["GroupId"]: g["GroupName"] for g in ec2.describe_security_groups()["SecurityGroups"]}
    ours = [r for r in rules if names[r["GroupId"]].startswith("mine-")]
    assert all("ReferencedGroupInfo" in r for r in ours if not r["IsEgress"])
    open_ways = {(names[r["GroupId"]], r["FromPort"]) for r in ours if r.get("CidrIpv4")}
    assert open_ways == {("mine-coordinator", 443)}

    # User data: whole, and the worker's names the coordinator whose keys it trusts.
    given = ec2.describe_instance_attribute(InstanceId=outputs["coordinator"],
                                            Attribute="userData")["UserData"]["Value"]
    files = user_data(base64.b64decode(given).decode())
    assert files["/etc/elastic-trainer/command"] == "python\nit's \"mine\".py\n${x}\n"
    assert files["/etc/elastic-trainer/environment"] == (
        "ELASTIC_TRAINER_LIMITS=hang_s=120\nMODE=${x}='y'\n")
    assert files["/etc/elastic-trainer/secrets"] == (
        "OTHER_TOKEN=/aws/reference/secretsmanager/hub/token\nTOKEN=/mine/token\n")
    no_secret_in(json.dumps(outputs))
    worker = user_data(base64.b64decode(template["UserData"]).decode())
    assert f":{outputs['coordinator']}/release.tar.zst" in worker["/etc/elastic-trainer/fleet.env"]


def nothing_is_open(policy: Any, role: str) -> None:
    """No `*` for an action; a `*` resource only for what AWS cannot confine; deletions never reach
    the log."""
    for statement in policy["Statement"]:
        actions, resources = listed(statement["Action"]), listed(statement["Resource"])
        assert not any("*" in action for action in actions)
        assert "*" not in resources or (role == "coordinator" and all(":Describe" in action
                                                                      for action in actions))
        if "s3:DeleteObject" in actions:
            assert all(re.search(r"/mine/checkpoints/\*/(parts|probe)/\*$", r) for r in resources)
        if "s3:PutObject" in actions:
            assert all(r.startswith(f"arn:aws:s3:::{OPEN_BUCKET}/mine/") for r in resources)


# --- its machines ---------------------------------------------------------------------------------


def test_follows_the_cloud_from_notices_to_terminations(cloud: Cloud, lab: Lab, tmp_path: Path,
                                                        twin_of: Twin) -> None:
    """EC2's API, agents, metadata services, poller, driver and S3 together, from the first host to
    none and back: no worker is lost but those that are taken without notice, and nothing is done
    again but what the last checkpoint does not have.

    The group has two hosts, then six, of which one has a wrong clock and never works. A stranger
    talks to an agent. The API returns no machines, is throttled, fails, and returns rubbish;
    meanwhile a host gets its notice, leaves, and is terminated; the disk of another one fills again
    and again, until it is held back. Then all are taken at once, and the group starts three others.

    The hosts are the machines that terraform has asked for, by name and address. Agents and poller
    are called as their units call them, the run as train.sh does, with the values of user data.
    Other than on EC2: no cloud-init, no systemd, no standbys; root in place of `trainer`, the
    tests' job, and keys for S3 in variables, not from the machine's role; and the agents watch a
    small disk of their own.
    """
    if cloud.why_not_terraform:
        print(
            f"{cloud.why_not_terraform} The instances of this story are made by boto3, not by "
            f"deploy/terraform."
        )
    settings, folder = cloud.settings(), tmp_path / "fleet"
    with ExitStack() as stack:
        lab.addresses |= {COORDINATOR: cloud.coordinator()}
        lab.boot(COORDINATOR)
        with lab.network_of(COORDINATOR):
            api, store = (FaultyProxy(cloud.endpoint, lab.address(COORDINATOR)) for _ in "es")
        for proxy in (api, store):
            stack.enter_context(proxy)  # here: its threads are to find the API outside the lab
        fleet = Fleet(lab, folder, run=settings["FLEET"], job=JOB, start_with=int(settings["NP"]),
                      min_workers=int(settings["MIN_NP"]), own_disks=True,
                      options=["--elastic-timeout", "604800", "--store",
                               f"s3://{OPEN_BUCKET}/{settings['FLEET']}/checkpoints"],
                      discovery=f"{sys.executable} -S {DISCOVER} hosts-file {folder}/hosts 120")
        fleet.hosts_file.unlink()
        fleet.run_dir.mkdir()
        fleet.env |= AWS | {"AWS_ENDPOINT_URL_S3": store.endpoint}
        shutil.copy2(lab.folder / "agent.key", folder)

        def boot(names: list[str]) -> None:
            lab.addresses |= {name: cloud.workers()[name]["PrivateIpAddress"] for name in names}
            lab.boot(*names)

        def row(name: str) -> dict[str, Any]:
            hosts = json.loads((folder / "hosts.json").read_text())["hosts"]
            return next((h for h in hosts if h["name"] == name), {"why": ""})

        def why(name: str) -> str:
            return str(row(name)["why"])

        def unavailable() -> list[str]:
            return [e["error"] for e in fleet.events("discovery.cloud_unavailable")]

        def fill_disk(name: str) -> None:
            lab.fill(name, "/run/disk")
            fleet.wait_for("full disk", lambda: why(name).startswith("sick: disk full"))

        def empty_disk(name: str) -> None:
            lab.inside(name, "rm", "/run/disk/full")
            fleet.wait_for("empty disk", lambda: not why(name).startswith("sick"))

        first = list(cloud.workers())
        lab.start(COORDINATOR, [*command_of("elastic-poll", settings, folder), "--interval", "1"],
                  env=os.environ | AWS | {"AWS_ENDPOINT_URL": api.endpoint})
        # An empty list: workers boot after their coordinator.
        fleet.wait_for("list", fleet.hosts_file.exists)
        assert fleet.hosts_file.read_text() == ""
        with fleet:
            boot(first)
            fleet.wait_for_world(2)
            more = cloud.scale(6)
            lab.clocks[more[-1]] = 300
            boot(more)
            generation = fleet.wait_for_world(5)
            knock(lab, more[-1], more[1], 7411,
                  [RUBBISH, pickle.dumps(Pickled(f"touch {tmp_path}/executed")),
                   overheard(lab, more[1], b"GET /health")])
            fleet.wait_for("refusals", lambda: row(more[1])["refused"] == 3)
            diary = fleet.run_dir / EVENTS_FILE
            api.on_request = lambda method, path: None if "answer_doubted" in diary.read_text(
            ) else "empty"
            fleet.wait_for("doubt", lambda: fleet.events("discovery.answer_doubted"))
            fleet.wait_for("whole answer", lambda: why(first[0]) == "in")
            for kind, error in UNAVAILABLE.items():
                logged = len(unavailable())
                api.on_request = lambda method, path, kind=kind: kind  # type: ignore[misc]
                if kind == "internal":
                    lab.metadata[first[0]].announce()
                    generation = fleet.wait_for_world(4, after=generation)
                fleet.wait_for(kind, lambda logged=logged, error=error: error in "".join(
                    unavailable()[logged:]))
            api.on_request = lambda method, path: None
            cloud.terminate(first[0])
            lab.power_cut(first[0])
            fill_disk(more[0])
            generation = fleet.wait_for_world(3, after=generation)
            empty_disk(more[0])
            fill_disk(more[0])
            empty_disk(more[0])
            assert why(more[0]).startswith("held back: it came 3 times")
            (replacement,) = cloud.workers().keys() - {*first, *more}
            fleet.wait_for("replacement", lambda: why(replacement).startswith("booting"))
            assert why(more[-1]).startswith("sick: its clock is +300 s off")
            fleet.wait_for("checkpoint", lambda: fleet.events("state.checkpoint_published"))
            fleet.wait_for_step(fleet.newest_step() + 2)
            last = [name for name in cloud.workers() if lab.hosts.get(name)
                    and lab.hosts[name].is_up()]
            cloud.scale(0)
            lab.power_cut(*last)
            fleet.wait_for("end of the attempt", lambda: fleet.events("attempt.ended"))
            fleet.wait_for("empty list", lambda: fleet.hosts_file.read_text() == "")
            boot(cloud.scale(3))
            fleet.wait_for("restart", lambda: fleet.events("state.checkpoint_restored"))
            fleet.wait_for("world of all three",
                           lambda: [e for e in fleet.events("worker.generation_started")
                                    if (e["attempt"], e["size"]) == (2, 3)])
            assert fleet.finish() == 0
            result = fleet.assert_nothing_lost(twin_of(*JOB), victims=3)
            print(fleet.story())
            output = {e["host"]: e["why"] for e in fleet.events("discovery.host_out")}
            assert output[first[0]].startswith("notice") and output[more[0]].startswith(
                "sick: disk full")
            (held,) = fleet.events("discovery.host_held_back")
            assert held["host"] == more[0] and held["why"].startswith("held back: it came 3 times")
            added = [e["time"] for e in fleet.events("driver.host_added") if e["host"] == more[0]]
            assert added and max(added) < held["time"]
            assert fleet.events("discovery.answer_doubted")[0]["lacks"] == 5
            assert [(e["host"], e["why"][:20]) for e in fleet.events("discovery.host_sick")
                    if e["host"] == more[-1]] == [(more[-1], "sick: its clock is +")]
            assert {output[name]
                    for name in (first[1], more[1], more[2])
                    } == {"the cloud does not know it any more"}
            assert {e["host"]
                    for e in fleet.events("discovery.host_gone")
                    } >= {first[0], more[0], more[-1], replacement}
            assert {e["host"] for e in fleet.events("discovery.stranger_refused")} == {more[1]}
            assert more[-1] not in {e["host"] for e in fleet.events("driver.worker_started")}
    assert result["steps_redone"] <= 10  # two checkpoints: the newer one may have been on its way
    assert result["attempts"] == 2
    assert not (tmp_path / "executed").exists()


def test_the_old_coordinator_has_gone_when_a_new_one_comes(applied: Cloud) -> None:
    """Two of them would give the group their orders. Its workers are to be renewed: they have the
    old one's keys."""
    (old_template,) = applied.ec2.describe_launch_templates()["LaunchTemplates"]
    output = applied.replace_coordinator()
    assert output.index("aws_instance.coordinator: Destruction complete") < output.index(
        "aws_instance.coordinator: Creating")
    assert applied.outputs["coordinator"] not in [i["InstanceId"] for i in applied.instances()]
    (template,) = applied.ec2.describe_launch_templates()["LaunchTemplates"]
    assert template["LaunchTemplateId"] != old_template["LaunchTemplateId"]


# --- its end --------------------------------------------------------------------------------------


def test_a_destroyed_fleet_leaves_nothing_but_the_bucket(applied: Cloud) -> None:
    """Whatever became of its machines meanwhile; and the bucket, with what is in it, is locked.

    What machines need for their last logs (the way out, S3, the right to write there) goes when
    they have gone.
    """
    assert applied.left()
    output = applied.destroy()
    assert applied.left() == set()
    gone = [output.index(f"{machines}: Destruction complete") for machines in (
        "aws_autoscaling_group.workers", "aws_instance.coordinator")]
    for need in ("aws_main_route_table_association.fleet", "aws_vpc_endpoint.s3",
                 "aws_iam_role_policy.coordinator",
                 'aws_vpc_security_group_egress_rule.out["coordinator: APIs, packages"]'):
        assert output.index(f"{need}: Destroying") > max(gone), need
    applied.bucket.result()
    bucket_is_locked(applied.client("s3"), BUCKET)


def bucket_is_locked(s3: Any, bucket: str) -> None:
    (rule,) = s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    assert all(s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"].values())
    (rule,) = s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert not rule.keys() & {"Expiration", "NoncurrentVersionExpiration", "Transitions"}
    denied = {s["Sid"]: s
              for s in json.loads(s3.get_bucket_policy(Bucket=bucket)["Policy"])["Statement"]}
    assert denied["LogRecordsOnlyIfAbsent"]["Condition"] == {"Null": {"s3:if-none-match": "true"}}
    assert {s["Effect"] for s in denied.values()} == {"Deny"}

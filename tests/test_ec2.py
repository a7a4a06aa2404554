"""EC2 over HTTP on loopback (moto's server): who is here, in every state, with pages, throttling
and rubbish."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from cloud import AWS
from faulty_proxy import FaultyProxy
from moto_server import moto_server
from s3_servers import Unavailable

from elastic_trainer.discovery.hosts import History, Policy, decide, lines
from elastic_trainer.discovery.place_protocol import PlaceUnavailable
from elastic_trainer.discovery.places.ec2 import Ec2
from elastic_trainer.discovery.poll import once
from elastic_trainer.driver.hosts import zones_in

ROOT = Path(__file__).resolve().parent.parent
TAGS = {"Job": "mine"}


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An EC2 API server."""
    try:
        with moto_server(tmp_path_factory.mktemp("moto")) as endpoint:
            yield endpoint
    except Unavailable as error:
        pytest.skip(str(error))


def client(service: str, endpoint: str) -> Any:
    return boto3.client(service, endpoint_url=endpoint, region_name="us-east-1",
                        aws_access_key_id="x", aws_secret_access_key="x")


@pytest.fixture
def proxy(moto: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before a fresh account, to which AWS's variables point."""
    urllib.request.urlopen(urllib.request.Request(f"{moto}/moto-api/reset", method="POST")).read()
    with FaultyProxy(moto) as proxy:
        for name, value in {**AWS, "AWS_ENDPOINT_URL": proxy.endpoint}.items():
            monkeypatch.setenv(name, value)
        yield proxy


def launch(endpoint: str, count: int, *, spot: bool = True, kind: str = "c5.large",
           tags: dict[str, str] | None = None) -> list[str]:
    """Start instances; returns their ids."""
    ec2 = client("ec2", endpoint)
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    how = {"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {}
    labels = [{"Key": k, "Value": v} for k, v in (tags or TAGS).items()]
    started = ec2.run_instances(
        ImageId=image, MinCount=count, MaxCount=count, InstanceType=kind,
        TagSpecifications=[{"ResourceType": "instance", "Tags": labels}], **how)
    return [i["InstanceId"] for i in started["Instances"]]


def run_once(*more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic_trainer.discovery", "ec2", "--once", "--tag",
               "Job=mine", *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_spot_instances_with_the_tags_are_the_hosts(moto: str, proxy: FaultyProxy) -> None:
    """Not on-demand ones, not another job's, not stopped ones; slots by the type's GPUs."""
    spot, on_demand = launch(moto, 2), launch(moto, 1, spot=False)
    gpus = launch(moto, 1, kind="g5.12xlarge")
    launch(moto, 1, tags={"Job": "another"})
    client("ec2", moto).stop_instances(InstanceIds=launch(moto, 1))
    found = {i.id: i for i in Ec2(TAGS, cpu_slots=3).instances()}
    assert found.keys() == {*spot, *on_demand, *gpus}
    assert [found[i].lifecycle for i in (spot[0], on_demand[0])] == ["spot", "on-demand"]
    assert found[gpus[0]].slots == 4 and found[spot[0]].slots == 3
    assert all(i.name and i.launched > 0 for i in found.values())
    hosts = once(Ec2(TAGS, cpu_slots=3), Policy()).splitlines()
    assert sorted(hosts) == sorted(f"{found[i].name}:{found[i].slots}" for i in spot + gpus)
    assert len(once(Ec2(TAGS), Policy(lifecycle="any")).splitlines()) == 4


def test_the_list_has_the_zone_of_each_instance(moto: str, proxy: FaultyProxy) -> None:
    """EC2's availability zone, in the form in which the driver reads it."""
    ec2, found = client("ec2", moto), launch(moto, 2)
    placement = {it["InstanceId"]: it["Placement"]["AvailabilityZone"] for it in
                 ec2.describe_instances(InstanceIds=found)["Reservations"][0]["Instances"]}
    decision = decide(Ec2(TAGS, host_name="instance-id").instances(), {}, History(), 0.0, Policy())
    assert zones_in(lines(decision.history, with_zones=True)) == placement


def test_all_pages_are_read_or_none(moto: str, proxy: FaultyProxy) -> None:
    """A page that does not come makes the whole answer unknown."""
    launch(moto, 13)
    place = Ec2(TAGS, page=5)
    assert len(place.instances()) == 13 and place.calls >= 3
    pages = 0

    def second_page_fails(method: str, path: str) -> str | None:
        nonlocal pages
        pages += 1
        return "internal" if pages >= 2 else None

    proxy.on_request = second_page_fails
    with pytest.raises(PlaceUnavailable):
        place.instances()


@pytest.mark.parametrize("kind", ["internal", "slow_down", "request_limit", "throttling", "reset",
                                  "rubbish", "torn_xml", "forbidden"])
def test_an_answer_that_is_none_is_unknown_and_never_empty(moto: str, proxy: FaultyProxy,
                                                           kind: str) -> None:
    """The world's faults, throttling and lost permission: PlaceUnavailable, and exit code 1 without
    a line."""
    launch(moto, 1)
    proxy.fault(kind, times=10**6)
    with pytest.raises(PlaceUnavailable):
        Ec2(TAGS).instances()
    done = run_once()
    assert (done.returncode, done.stdout) == (1, "") and "EC2 did not answer" in done.stderr


@pytest.mark.parametrize("kind", ["slow_down", "request_limit", "throttling"])
def test_a_short_fault_is_tried_again(moto: str, proxy: FaultyProxy, kind: str) -> None:
    """Throttled once, as EC2 or Auto Scaling say it: asked once more."""
    launch(moto, 1)
    fault = proxy.fault(kind, times=1)
    assert len(Ec2(TAGS).instances()) == 1 and fault.fired == 1


def changed(pattern: str, text: str, times: int = 1) -> Callable[[bytes], bytes]:
    """Return what changes an answer's text, in this many places; moto has no such answers as EC2
    gives on bad days."""
    return lambda data: re.sub(pattern.encode(), text.encode(), data, count=times)


@pytest.mark.parametrize("state", ["pending", "shutting-down", "stopping", "stopped", "terminated"])
def test_an_instance_that_does_not_run_is_out(moto: str, proxy: FaultyProxy, state: str) -> None:
    """In whichever state the API describes it (moto's are in none for long); one that has ended is
    no host at all."""
    ids = launch(moto, 2)
    proxy.on_answer = changed(
        f"(?s)(<instanceId>{ids[0]}</instanceId>.*?<instanceState>.*?<name>)running", rf"\1{state}")
    found = Ec2(TAGS).instances()
    out = {ids[0]: state} if state != "terminated" else {}
    assert {i.id: i.state for i in found} == out | {ids[1]: "running"}
    decision = decide(found, {}, History(), 0.0, Policy())
    assert decision.reasons == {i: f"the cloud reports {out[i]}" for i in out} | {ids[1]: "in"}
    assert len(decision.hosts) == 1


def test_an_empty_list_is_an_answer(moto: str, proxy: FaultyProxy) -> None:
    """The API has answered without instances: it does not describe ended ones. No lines, and
    exit code 0."""
    client("ec2", moto).terminate_instances(InstanceIds=launch(moto, 1))
    client("ec2", moto).stop_instances(InstanceIds=launch(moto, 1))
    assert Ec2(TAGS).instances() == []
    done = run_once()
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_an_impaired_host_and_one_with_an_event_are_out(moto: str, proxy: FaultyProxy) -> None:
    """As DescribeInstanceStatus reports it: by its checks, and by events that are near and not
    completed."""
    ids = launch(moto, 3)
    place = Ec2(TAGS)

    def out() -> dict[str, str]:
        decision = decide(place.instances(), {}, History(), 0.0, Policy())
        return {i: why for i, why in decision.reasons.items() if why != "in"}

    assert out() == {}
    for kind in ("instanceStatus", "systemStatus"):
        proxy.on_answer = changed(f"(?s)<{kind}>.*?</{kind}>",
                                  f"<{kind}><status>impaired</status></{kind}>")
        assert list(out().values()) == ["the cloud reports impaired"]

    def event(in_s: float, description: str = "The instance is running on degraded hardware"
              ) -> dict[str, str]:
        at = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time.time() + in_s))
        proxy.on_answer = changed(
            f"(?s)(<instanceId>{ids[1]}</instanceId>.*?)(<systemStatus>)",
            rf"\1<eventsSet><item><code>instance-retirement</code><description>{description}"
            rf"</description><notBefore>{at}</notBefore></item></eventsSet>\2")
        return out()

    assert event(600) == event(-600) == {ids[1]: "scheduled: instance-retirement"}
    assert event(7200) == {}
    assert [round(in_s, -2) for i in place.instances() for _, in_s in i.events] == [7200]
    assert event(600, "[Completed] The instance is running on degraded hardware") == {}


def test_only_hosts_in_service_of_the_group_work(moto: str, proxy: FaultyProxy) -> None:
    """A lifecycle hook's Terminating:Wait, a detached one, or another machine with the same tags is
    out."""
    ec2, scaling = client("ec2", moto), client("autoscaling", moto)
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    ec2.create_launch_template(LaunchTemplateName="template",
                               LaunchTemplateData={"ImageId": image, "InstanceType": "c5.large"})
    scaling.create_auto_scaling_group(
        AutoScalingGroupName="g", MinSize=0, MaxSize=5, DesiredCapacity=3,
        AvailabilityZones=["us-east-1a"], LaunchTemplate={"LaunchTemplateName": "template"},
        Tags=[{"Key": "Job", "Value": "mine", "PropagateAtLaunch": True}])
    stranger = launch(moto, 1)
    place = Ec2(TAGS, "g")
    found = {i.id: i for i in place.instances()}
    assert len(found) == 3 and stranger[0] not in found
    gone = next(iter(found))
    scaling.enter_standby(AutoScalingGroupName="g", InstanceIds=[gone],
                          ShouldDecrementDesiredCapacity=True)
    after = {i.id: i.group_state for i in place.instances()}
    assert after.pop(gone) == "Standby" and set(after.values()) == {"InService"}
    assert len(once(place, Policy(lifecycle="any")).splitlines()) == 2
    proxy.on_answer = changed("(<LifecycleState>)InService", r"\1Terminating:Wait")
    decision = decide(place.instances(), {}, History(), 0.0, Policy(lifecycle="any"))
    assert sorted(decision.reasons.values()) == [
        "in", "the group reports Standby", "the group reports Terminating:Wait"]
    proxy.on_answer = changed("", "", 0)
    with pytest.raises(PlaceUnavailable, match="--group"):
        Ec2(TAGS, "nobody").instances()


@pytest.mark.parametrize(("pattern", "text"), [
    ("(?s)<launchTime>.*?</launchTime>", ""), ("(<launchTime>)[^<]*", r"\1soon"),
    ("(?s)<instanceState>.*?</instanceState>", ""), ("(?s)<instanceId>.*?</instanceId>", "")])
def test_an_answer_of_another_form_is_unknown(moto: str, proxy: FaultyProxy, pattern: str,
                                              text: str) -> None:
    """Without what belongs to it, or with other values: PlaceUnavailable, and nothing else that
    could end a poller."""
    launch(moto, 1)
    proxy.on_answer = changed(pattern, text, 100)
    with pytest.raises(PlaceUnavailable):
        Ec2(TAGS).instances()


def test_once_prints_what_horovodrun_reads(moto: str, proxy: FaultyProxy) -> None:
    """Good enough for plain horovodrun: lines of host:slots and nothing else."""
    launch(moto, 2)
    done = run_once("--host-name", "private-ip", "--cpu-slots", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(line.endswith(":2") and line.count(".") == 3 for line in lines)
    for line in run_once("--host-name", "instance-id").stdout.splitlines():
        assert re.fullmatch(r"i-[0-9a-f]+:1 [0-9.]+", line)  # the name is of one incarnation


def test_the_poller_keeps_the_file_true(moto: str, proxy: FaultyProxy, tmp_path: Path) -> None:
    """Instances come, one is terminated, the API fails, the poller is killed: the file follows, and
    stays while nothing is known; the next poller goes on; at SIGTERM it does not wait for an API
    that hangs."""
    hosts, events, table = (tmp_path / name for name in ("hosts", "events.jsonl", "hosts.json"))
    ids = launch(moto, 3)

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "elastic_trainer.discovery", "poll", "ec2", "--hosts-file",
             hosts, "--tag", "Job=mine", "--interval", "0.5", "--events", events], cwd=ROOT,
            env=os.environ)

    poller = start()

    def until(is_so: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline and poller.poll() is None
            time.sleep(0.05)

    def has(count: int) -> bool:
        return hosts.exists() and len(hosts.read_text().splitlines()) == count

    try:
        until(lambda: has(3))
        client("ec2", moto).terminate_instances(InstanceIds=ids[:1])
        until(lambda: has(2))
        fault = proxy.fault("internal", times=10**6)
        until(lambda: "discovery.cloud_unavailable" in events.read_text())
        poller.kill()
        poller.wait()
        table.unlink()
        poller = start()
        until(table.exists)
        assert has(2) and fault.fired
        proxy.clear()
        launch(moto, 1)
        until(lambda: has(3))
        fault = proxy.fault("timeout", times=10**6)
        until(lambda: fault.fired)
    finally:
        poller.send_signal(signal.SIGTERM)
        assert poller.wait(60) == 0
    logged = [json.loads(line) for line in events.read_text().splitlines()]
    (out,) = [e for e in logged if e["event"] == "discovery.host_out"]
    assert out["id"] == ids[0] and out["why"]
    assert sum(host["is_in"] for host in json.loads(table.read_text())["hosts"]) == 3

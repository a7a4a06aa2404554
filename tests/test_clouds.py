"""Google Cloud and Azure over HTTP on loopback: who is here, in every state, with pages, throttling
and rubbish; and the notices of their metadata services."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cloud_apis import AzureApi, CloudApi, GoogleApi
from cluster import run_alone
from metadata_server import AzureMetadata, GoogleMetadata, MetadataServer
from netlab import COORDINATOR, Fleet, Lab

from elastic_trainer.discovery.commands import run
from elastic_trainer.discovery.health import Agent
from elastic_trainer.discovery.hosts import History, Policy, decide
from elastic_trainer.discovery.place_protocol import Place, PlaceUnavailable
from elastic_trainer.discovery.places import azure, azure_metadata, gcp, gcp_metadata
from elastic_trainer.discovery.places.own import AZURE_TAG, own_place
from elastic_trainer.discovery.places.rest import Api
from elastic_trainer.discovery.poll import Poller
from elastic_trainer.events.log import read_events

DISCOVERY = Path(run.__code__.co_filename).with_name("__main__.py")
CLOUDS: dict[str, tuple[type[CloudApi], type[MetadataServer], Any, list[str]]] = {
    "gcp": (GoogleApi, GoogleMetadata, gcp, ["--group", "workers"]),
    "azure": (AzureApi, AzureMetadata, azure, ["--scale-set", "workers"])}
FIRST, SECOND = "workers_1", "workers_2"


class World:
    """One cloud: its API and a machine's metadata service."""

    def __init__(self, name: str, api: CloudApi, metadata: MetadataServer):
        self.name, self.api, self.metadata = name, api, metadata
        self.module, self.chosen = CLOUDS[name][2:]

    def options(self, *more: str) -> list[str]:
        return [*self.chosen, "--api", self.api.endpoint, "--metadata", self.metadata.endpoint,
                *more]

    def place(self, *more: str) -> Place:
        parser = argparse.ArgumentParser()
        self.module.add_options(parser)
        place: Place = self.module.place_of(parser.parse_args(self.options(*more)))
        return place


@pytest.fixture(params=CLOUDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Each cloud, with two machines."""
    api_of, metadata_of, *_ = CLOUDS[request.param]
    with api_of() as api, metadata_of() as metadata:
        api.add(FIRST, "10.0.0.4", 1)
        api.add(SECOND, "10.0.0.5", 2)
        yield World(request.param, api, metadata)


def patient(endpoint: str, metadata_of: Callable[..., Any]) -> Any:
    return metadata_of(endpoint, timeout_s=60.0)


# ---- who is here ----


def test_the_machines_of_the_group_are_the_hosts(world: World) -> None:
    """With their addresses; a machine has the slots of its type, and the names are those of one
    incarnation."""
    found = world.place("--cpu-slots", "3").instances()
    assert [(i.address, i.slots, i.gpus, i.lifecycle, i.state) for i in found] == [
        ("10.0.0.4", 3, 0, "spot", "running"), ("10.0.0.5", 3, 0, "spot", "running")]
    assert found[0].launched < found[1].launched and found[0].launched > 1.7e9
    before = {i.id for i in found}, {i.name for i in found}
    world.api.add(FIRST, "10.0.0.9", 3)  # the group has replaced it, under its old name
    after = world.place().instances()
    assert len({i.id for i in after} & before[0]) == len({i.name for i in after} & before[1]) == 1


def test_gpus_are_counted(world: World) -> None:
    """Attached ones and those of the type; those of other makers are none of ours."""
    if isinstance(world.api, GoogleApi):
        world.api.types = {"a3-highgpu-8g": {"accelerators": [
            {"guestAcceleratorType": "nvidia-h100-80gb", "guestAcceleratorCount": 8}]}}
        world.api.add("workers_3", "10.0.0.6", kind="a3-highgpu-8g")
        world.api.add("workers_4", "10.0.0.7", guestAccelerators=[{
            "acceleratorType": "…/acceleratorTypes/nvidia-tesla-t4", "acceleratorCount": 2}])
        world.api.add("workers_5", "10.0.0.8", guestAccelerators=[{
            "acceleratorType": "…/acceleratorTypes/ct5lp", "acceleratorCount": 4}])
    else:
        assert isinstance(world.api, AzureApi)
        world.api.skus = [
            {"resourceType": "disks", "name": "Standard_N"},
            *({"resourceType": "virtualMachines", "name": name, "capabilities": [
                {"name": "vCPUs", "value": "40"}, {"name": "GPUs", "value": str(count)}]}
              for name, count in (("Standard_ND96isr_H100_v5", 8), ("Standard_NC16as_T4_v3", 2),
                                  ("Standard_NV32as_v4", 1)))]
        for number, sku in enumerate(world.api.skus[1:], 3):
            world.api.add(f"workers_{number}", f"10.0.0.{number + 3}", kind=sku["name"])
        world.api.page = 1
    found = {i.address: (i.slots, i.gpus) for i in world.place("--cpu-slots", "3").instances()}
    assert found == {"10.0.0.4": (3, 0), "10.0.0.5": (3, 0), "10.0.0.6": (8, 8),
                     "10.0.0.7": (2, 2), "10.0.0.8": (3, 0)}


def test_all_pages_are_read_or_none(world: World) -> None:
    """A page that does not come makes the whole answer unknown."""
    world.api.page = 2
    for number in range(3, 8):
        world.api.add(f"workers_{number}", f"10.0.1.{number}", number)
    place = world.place()
    assert len(place.instances()) == 7
    count = len(world.api.requests)
    place.instances()
    calls = len(world.api.requests) - count
    for failing in range(calls):
        true, world.api.respond = world.api.respond, failing_at(world.api, failing)
        with pytest.raises(PlaceUnavailable):
            place.instances()
        world.api.respond = true
    assert calls >= 8


def failing_at(api: CloudApi, number: int) -> Callable[..., Any]:
    """Return a `respond` that fails at the n-th request."""
    true, seen = api.respond, iter(range(1000))

    def respond(*request: str) -> tuple[int, dict[str, str], bytes]:
        return (500, {}, b"") if next(seen) == number else true(*request)

    return respond


ODD = {"server error": (500, b""), "gateway": (502, b"<html>Bad Gateway</html>"),
       "no json": (200, b"<html>a captive portal</html>"), "a list": (200, b"[]"),
       "half": (200, b'{"value": [{"na'), "no list": (200, b'{"value": 7, "managedInstances": 7}'),
       "strange items": (200, b'{"value": ["x"], "managedInstances": ["x"]}'),
       "no fields": (200, b'{"value": [{}], "managedInstances": [{"id": "1"}], "sku": {}}'),
       "other kinds": (200, b'{"value": [], "properties": [], "managedInstances": [{"id": "1", '
                            b'"instance": "/zones/z/x"}], "items": [{"id": "1", "scheduling": [], '
                            b'"creationTimestamp": "2026-11-27T08:00:00Z", '
                            b'"machineType": "/zones/z/machineTypes/n"}]}'),
       "denied": (403, None), "throttled": (429, None)}


@pytest.mark.parametrize("kind", ODD)
def test_an_answer_that_is_none_is_unknown_and_never_empty(world: World, kind: str,
                                                           capsys: pytest.CaptureFixture[str]
                                                           ) -> None:
    """PlaceUnavailable, and exit code 1 without a line."""
    place = world.place()
    world.api.fail(*ODD[kind], lasting=True)
    with pytest.raises(PlaceUnavailable):
        place.instances()
    assert run([world.name, "--once", *world.options()]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("discovery: ")


def test_an_answer_that_ends_early_is_unknown(world: World) -> None:
    """As a connection that breaks in the middle leaves it."""
    place = world.place()
    world.api.fail(200, b'{"managedInstances": [], "value": []}', Content_Length="4000")
    with pytest.raises(PlaceUnavailable):
        place.instances()


def test_once_prints_the_list(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Name, slots and address of each host."""
    assert run([world.name, "--once", *world.options()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[1] for line in lines] == ["10.0.0.4", "10.0.0.5"]
    assert all(line.split(" ")[0].endswith(":1") for line in lines)


def test_the_api_is_left_alone_as_long_as_it_asks_for() -> None:
    """429 with Retry-After: no request before its end, and a bounded wait."""
    now = [0.0]
    with GoogleApi() as api, GoogleMetadata() as metadata:
        asked = Api(api.endpoint, gcp_metadata.Metadata(metadata.endpoint, 60.0).token, {},
                    clock=lambda: now[0])
        for given, wait_s in (("7", 7.0), ("100000", 300.0)):
            api.fail(429, Retry_After=given)
            with pytest.raises(PlaceUnavailable):
                asked.ask(api.GROUP)
            count = len(api.requests)
            with pytest.raises(PlaceUnavailable, match="asked to wait"):
                asked.ask(api.GROUP)
            assert len(api.requests) == count
            now[0] += wait_s
            assert asked.ask(api.GROUP) == {"targetSize": 0}


def test_a_token_is_renewed_before_its_end_and_when_it_is_refused() -> None:
    """It is asked for once in its life otherwise."""
    now = [0.0]
    with GoogleApi() as api, GoogleMetadata() as metadata:
        asked = Api(api.endpoint, gcp_metadata.Metadata(metadata.endpoint, 60.0).token, {},
                    clock=lambda: now[0])
        name = "instance/service-accounts/default/token"
        asked.ask(api.GROUP)
        metadata.documents[name] = metadata.documents[name].replace("google", "new")
        asked.ask(api.GROUP)
        api.token = "new"
        asked.ask(api.GROUP)  # the old one was refused, and the new one taken
        metadata.documents[name] = metadata.documents[name].replace("new", "newest")
        api.token = "newest"
        now[0] += 3600.0 - 60.0
        before = len(api.requests)
        asked.ask(api.GROUP)
        assert len(api.requests) == before + 1


def test_a_token_goes_to_no_other_host(world: World) -> None:
    """A page's link that leads elsewhere is refused, and so is plain HTTP to another machine."""
    if world.name == "azure":
        place = world.place()
        world.api.changed = lambda page: page | {"nextLink": "https://elsewhere.example/x"}
        with pytest.raises(PlaceUnavailable, match="elsewhere.example"):
            place.instances()
    assert run([world.name, "--once", *world.options("--api", "http://10.0.0.1:80")]) == 1


@pytest.mark.parametrize(("fault", "remedy"), [
    (401, "is not accepted. Check that it"), (403, "Reader|compute.viewer"),
    (404, "--project|--scale-set")])
def test_what_the_user_must_correct_is_an_error_at_the_start(world: World, fault: int, remedy: str
                                                             ) -> None:
    """With the role or the options; later it is retried."""
    place = world.place()
    world.api.fail(fault, lasting=True)
    with pytest.raises(ValueError, match=remedy):
        world.place()
    with pytest.raises(PlaceUnavailable):
        place.instances()


def test_the_last_good_list_holds_while_the_cloud_refuses(world: World, tmp_path: Path) -> None:
    """The failure is an event with the remedy, and the next answer is taken."""
    times = iter(range(0, 10**6, 100))
    poller = Poller(world.place(), tmp_path / "hosts", Policy(lifecycle="any", settle_s=0),
                    patience_s=60, events_file=tmp_path / "events.jsonl",
                    clock=lambda: next(times))
    with ThreadPoolExecutor(1) as pool:
        poller.poll(pool)
        listed = (tmp_path / "hosts").read_text()
        assert len(listed.splitlines()) == 2
        world.api.fail(403, lasting=True)
        poller.poll(pool)
        assert (tmp_path / "hosts").read_text() == listed
        [event] = [e for e in read_events(tmp_path) if e["event"].endswith("cloud_unavailable")]
        assert re.search("Reader|compute.viewer", event["error"])


def test_a_machine_outside_of_the_cloud_or_without_an_account_is_an_error(world: World) -> None:
    """There is no token."""
    if isinstance(world.metadata, AzureMetadata):
        world.metadata.has_identity = False
    else:
        del world.metadata.documents["instance/service-accounts/default/token"]
    with pytest.raises(ValueError, match=r"service account|managed identity"):
        world.place()
    with pytest.raises(ValueError, match="The poller runs on a machine of"):
        world.place("--metadata", "http://127.0.0.1:1")


# ---- what leaves ----


@pytest.mark.parametrize(("status", "action", "why"), [
    ("RUNNING", "DELETING", "notice: the group is deleting it"),
    ("RUNNING", "RECREATING", "notice: the group is recreating it"),
    ("STOPPING", "NONE", "notice: preempted"), ("TERMINATED", "NONE", "notice: preempted"),
    ("STAGING", "CREATING", "Google reports STAGING"), ("RUNNING", "VERIFYING", "in")])
def test_a_machine_of_google_that_leaves_is_under_notice(status: str, action: str,
                                                         why: str) -> None:
    """All of them at once, too, is no odd answer."""
    with GoogleApi() as api, GoogleMetadata() as metadata:
        api.add(FIRST, "10.0.0.4")
        place = World("gcp", api, metadata).place()
        policy = Policy(settle_s=0.0)
        before = decide(place.instances(), {}, History(), 0.0, policy)
        api.members[FIRST] |= {"instanceStatus": status, "currentAction": action}
        api.machines[FIRST]["status"] = status
        after = decide(place.instances(), {}, before.history, 1.0, policy)
        expected = () if why != "in" else before.hosts
        if status != "STAGING":  # a machine that ran starts again only as another incarnation
            assert len(before.hosts) == 1 and after.hosts == expected
        assert why in [*after.reasons.values()][0]


@pytest.mark.parametrize(("power", "made", "why"), [
    ("running", "Deleting", "notice: the scale set deletes it"),
    ("deallocating", "Updating", "notice: Azure reports deallocating"),
    ("stopped", "Succeeded", "notice: Azure reports stopped"),
    ("", "Creating", "Azure reports Creating"), ("running", "Updating", "in"),
    ("", "Failed", "Azure reports Failed"), ("starting", "Updating", "Azure reports Updating")])
def test_a_machine_of_azure_that_leaves_is_under_notice(power: str, made: str, why: str) -> None:
    """A machine without a state of power is being made, or unknown."""
    with AzureApi() as api, AzureMetadata() as metadata:
        api.add(FIRST, "10.0.0.4")
        place = World("azure", api, metadata).place()
        api.power(FIRST, power, made)
        decision = decide(place.instances(), {}, History(), 0.0, Policy(settle_s=0.0))
        assert why in [*decision.reasons.values()][0]
        assert bool(decision.hosts) == (why == "in")
        api.power(FIRST, "", "Succeeded")
        with pytest.raises(PlaceUnavailable, match="power state"):
            place.instances()


def test_a_running_member_that_the_list_of_machines_lacks_makes_it_unknown() -> None:
    """A list that leaves machines out is not believed. One that the group deletes may be gone."""
    with GoogleApi() as api, GoogleMetadata() as metadata:
        api.add(FIRST, "10.0.0.4")
        api.add(SECOND, "10.0.0.5", 1)
        place = World("gcp", api, metadata).place()
        del api.machines[SECOND]
        with pytest.raises(PlaceUnavailable, match=SECOND):
            place.instances()
        api.members[SECOND]["currentAction"] = "DELETING"
        assert len(place.instances()) == 1


@pytest.mark.parametrize(("change", "remedy"), [
    ({"orchestrationMode": "Flexible"}, "--orchestration-mode Uniform"),
    ({"virtualMachineProfile": {"priority": "Spot", "evictionPolicy": "Deallocate"}},
     "--eviction-policy Delete")])
def test_a_scale_set_whose_machines_come_back_under_their_id_is_refused(
        change: dict[str, Any], remedy: str) -> None:
    """At the start, with the option of az."""
    with AzureApi() as api, AzureMetadata() as metadata:
        api.properties |= change
        with pytest.raises(ValueError, match=remedy):
            World("azure", api, metadata).place()


# ---- what is lacking ----


GOOGLES = [
    ("ZONE_RESOURCE_POOL_EXHAUSTED", "The zone does not have enough resources available.",
     "ZONE_RESOURCE_POOL_EXHAUSTED", "another machine type"),
    ("QUOTA_EXCEEDED", "Instance 'w-1' creation failed: Quota 'PREEMPTIBLE_NVIDIA_T4_GPUS' "
     "exceeded.  Limit: 1.0 in region europe-west4.", "QUOTA_EXCEEDED",
     "PREEMPTIBLE_NVIDIA_T4_GPUS"),
    ("ODD", "Something else.", "ODD", "list-errors workers")]
AZURES = [
    ("AllocationFailed", "Allocation failed. We do not have sufficient capacity.",
     "AllocationFailed", "another size"),
    ("OperationNotAllowed", "Operation could not be completed as it results in exceeding approved "
     "LowPriorityCores quota.", "OperationNotAllowed", "LowPriorityCores"),
    ("Odd", "Something else.", "Odd", "get-instance-view")]


@pytest.mark.parametrize("number", range(3))
def test_why_machines_are_lacking_is_known(world: World, number: int) -> None:
    """With the cloud's code and sentence, and the remedy; without a machine lacking nothing is
    asked."""
    code, says, expected, remedy = (GOOGLES if world.name == "gcp" else AZURES)[number]
    place = world.place()
    count = len(world.api.requests)
    place.instances()
    supply = place.supply()
    assert supply and (supply.there, supply.wanted, supply.refusal) == (2, 2, None)
    assert len(world.api.requests) - count == 3
    world.api.target = 5  # type: ignore[attr-defined]
    if isinstance(world.api, GoogleApi):
        at = time.strftime("%Y-%m-%dT%H:%M:%S.000-00:00", time.gmtime())
        world.api.errors = [
            {"timestamp": "2020-01-01T00:00:00.000-08:00", "error": {"code": "OLD"}},
            {"timestamp": at, "error": {"code": code, "message": says}}]
    else:
        assert isinstance(world.api, AzureApi)
        world.api.statuses = [{"code": f"ProvisioningState/failed/{code}", "level": "Error",
                               "message": says}]
    place.instances()
    supply = place.supply()
    assert supply and supply.refusal and (supply.there, supply.wanted) == (2, 5)
    assert supply.refusal.code == expected and remedy in supply.refusal.remedy
    if isinstance(world.api, GoogleApi):  # the last attempt at a member is newer than the list
        world.api.members["w-9"] = {"name": "w-9", "currentAction": "CREATING", "lastAttempt": {
            "errors": {"errors": [{"code": "NEWER", "message": "x"}]}}}
        place.instances()
        newer = place.supply()
        assert newer and newer.refusal and newer.refusal.code == "NEWER"
    world.api.fail(500, lasting=True)
    with pytest.raises(PlaceUnavailable):
        place.supply()


# ---- notices ----


def test_google_s_preemption_is_a_notice_at_once() -> None:
    """The first question is answered at once; the next ones wait for the change. The deadline does
    not move."""
    with GoogleMetadata() as service:
        metadata = patient(service.endpoint, gcp_metadata.Metadata)
        assert metadata.notice() is None and service.waited == 0
        assert metadata.notice() is None and service.waited == 1
        before = time.time()
        service.announce()
        notice = metadata.notice()
        assert notice and notice.action == "preempted" and notice.for_good
        assert before + 30.0 <= notice.deadline <= time.time() + 30.0
        assert metadata.notice() == notice and metadata.rebalance() is False


@pytest.mark.parametrize(("event", "action"), [
    ("TERMINATE_ON_HOST_MAINTENANCE", "stopped for the maintenance of its host"),
    ("MIGRATE_ON_HOST_MAINTENANCE", None), ("NONE", None)])
def test_google_s_maintenance_is_a_notice_if_it_stops_the_machine(event: str,
                                                                  action: str | None) -> None:
    """A live migration is none."""
    with GoogleMetadata() as service:
        service.announce(name="instance/maintenance-event", text=event)
        notice = patient(service.endpoint, gcp_metadata.Metadata).notice()
        assert (notice and notice.action) == action


@pytest.mark.parametrize(("kind", "in_s", "action", "for_good"), [
    ("Preempt", 30.0, "preempted", True), ("Terminate", 600.0, "deleted by its scale set", True),
    ("Reboot", 60.0, "rebooted by Azure", False), ("Reboot", 900.0, None, False),
    ("Redeploy", 60.0, "moved to another host by Azure", False), ("Freeze", 10.0, None, False)])
def test_azure_s_events_of_this_machine_are_notices(kind: str, in_s: float, action: str | None,
                                                    for_good: bool) -> None:
    """Those of other machines of the scale set are none. A machine that comes back leaves late."""
    with AzureMetadata() as service:
        metadata = patient(service.endpoint, azure_metadata.Metadata)
        service.announce(kind="Preempt", resource="workers_9")
        assert metadata.notice() is None
        before = time.time()
        service.announce(kind=kind, in_s=in_s)
        notice = metadata.notice()
        assert (notice and notice.action) == action
        if notice:
            assert notice.for_good == for_good
            assert before + in_s - 1.0 <= notice.deadline <= time.time() + in_s


def test_azure_s_event_without_a_time_is_a_notice() -> None:
    """Its time is unknown, or it has begun; the soonest event that is for good counts."""
    with AzureMetadata() as service:
        metadata = patient(service.endpoint, azure_metadata.Metadata)
        service.announce(kind="Reboot", in_s=5.0)
        service.announce(at="soon")
        first = metadata.notice()
        assert first.action == "preempted" and first.deadline <= time.time() + 30.0
        assert metadata.notice() == first
        service.events[-1] |= {"EventStatus": "Started", "NotBefore": "", "EventId": "x"}
        assert metadata.notice().deadline <= time.time()


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize("fault", [500, 404, "portal", "silent"])
def test_no_answer_of_a_metadata_service_is_unknown_and_no_notice(cloud: str, fault: int | str,
                                                                  tmp_path: Path) -> None:
    """The host stays ready, and says that it is unknown."""
    with CLOUDS[cloud][1]() as service:
        module = gcp_metadata if cloud == "gcp" else azure_metadata
        if fault == "silent":
            service.is_hung.set()
        elif fault == "portal":
            service.respond = lambda *_: (200, "<html>", {})  # type: ignore[method-assign]
        else:
            service.respond = lambda *_: (int(fault), "", {})  # type: ignore[method-assign]
        agent = Agent(module.Metadata(service.endpoint, 0.5 if fault == "silent" else 60.0),
                      tmp_path, find_illness=lambda folder: "", count_gpus=lambda: None)
        agent.read_notices()
        health = agent.health()
        if (cloud, fault) != ("gcp", 404):  # that is no preemption, on Google
            assert health["why"]
        assert health["state"] == "ready"


@pytest.mark.parametrize(("files", "place"), [
    ({"product_name": "Google Compute Engine\n"}, "gcp"), ({"chassis_asset_tag": AZURE_TAG},
                                                           "azure"),
    ({"product_name": "Virtual Machine", "chassis_asset_tag": "none"}, "ec2"),
    ({"product_name": "c5.large", "sys_vendor": "Amazon EC2"}, "ec2"), ({}, "ec2")])
def test_an_agent_knows_its_cloud_by_the_firmware(tmp_path: Path, files: dict[str, str],
                                                  place: str) -> None:
    """Hyper-V outside of Azure is not Azure."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert own_place(tmp_path) == place


def test_an_agent_imports_none_of_the_clouds_libraries(tmp_path: Path) -> None:
    """A host's process has the standard library, psutil and ours."""
    for name in ("gcp_metadata", "azure_metadata", "own"):
        run_alone([sys.executable, "-c", f"import sys, elastic_trainer.discovery.places.{name}; "
                   "assert not {'boto3', 'google', 'azure', 'requests', 'aiohttp'} & "
                   "set(sys.modules)"], tmp_path)


# ---- the story ----


JOB = ("--steps", "140", "--step-s", "0.5", "--checkpoint-every", "5")
THREE = ["h1", "h2", "h3"]


@pytest.mark.parametrize("cloud", ["gcp", pytest.param("azure", marks=pytest.mark.long)])
def test_a_notice_becomes_a_drain(lab: Lab, tmp_path: Path, twin_of: Callable[..., str],
                                  cloud: str) -> None:
    """Real agents, poller, driver and workers, without ssh. A machine's metadata service announces
    its preemption: it leaves without a lost step. The group replaces it under its old name, and it
    joins. A machine that the group deletes leaves without a lost step, too. The weights are the
    twin's."""
    api_of, metadata_of, _, chosen = CLOUDS[cloud]
    lab.cloud, lab.has_sshd = (cloud, metadata_of), False
    lab.boot(COORDINATOR, *THREE)
    fleet = Fleet(lab, tmp_path / "fleet", run="clouds", job=JOB, start_with=2, min_workers=1,
                  discovery=f"{sys.executable} -S {DISCOVERY} hosts-file {tmp_path}/fleet/hosts",
                  options=["--elastic-timeout", "600", "--reach", "agent", "--agent-key-file",
                           str(lab.folder / "agent.key")])
    fleet.hosts_file.unlink()
    fleet.run_dir.mkdir(parents=True)
    with lab.network_of(COORDINATOR):
        api, own = api_of(("127.0.0.1", 7001)), metadata_of(("127.0.0.1", 7002))
    with api, own:
        for number, name in enumerate(THREE, 1):
            api.add(f"workers_{number}", lab.address(name), number)
        lab.start(COORDINATOR, [
            sys.executable, "-m", "elastic_trainer.discovery", "poll", cloud, *chosen,
            "--api", api.endpoint, "--metadata", own.endpoint, "--interval", "1",
            "--hosts-file", fleet.hosts_file, "--key-file", lab.folder / "agent.key",
            "--events", fleet.run_dir / "events.jsonl"],
            env=fleet.env)
        with fleet:
            generation = fleet.wait_for_world(3)
            fleet.wait_for_step(3)
            lab.metadata["h1"].announce("")
            generation = fleet.wait_for_world(2, after=generation)
            lab.power_cut("h1")
            lab.boot("h4")
            api.add("workers_1", lab.address("h4"), 9)
            generation = fleet.wait_for_world(3, after=generation)
            fleet.wait_for_step(fleet.newest_step() + 2)
            if isinstance(api, GoogleApi):
                api.members["workers_2"]["currentAction"] = "DELETING"
            else:
                api.power("workers_2", "running", "Deleting")
            fleet.wait_for_world(2, after=generation)
            assert not fleet.lost(), fleet.lost()
            assert fleet.finish() == 0
            result = fleet.assert_nothing_lost(twin_of(*JOB), victims=0)
    assert result["attempts"] == 1 and result["steps_redone"] == 0
    out = [event["why"] for event in fleet.events("discovery.host_out")]
    assert out[0].startswith("notice: preempted") and "delet" in out[-1]
    assert len({event["host"] for event in fleet.events("discovery.host_in")}) == 4

"""A fleet with GPUs pays for no machine that cannot use them: before an apply (check.sh's
decisions), at the apply (terraform), on the coordinator (its image), and on each host (agent and
poller)."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from cloud import AWS, GPU_IMAGE, IMAGE, NAME, OPEN_BUCKET
from moto_server import moto_server
from s3_servers import Unavailable
from terraform import DEPLOY, Root
from test_agent import KEY, agent_process
from test_ec2 import launch

from elastic_trainer.discovery.hosts import Health, History, Policy, decide
from elastic_trainer.discovery.place_protocol import Instance
from elastic_trainer.discovery.places import ec2_gpus
from elastic_trainer.discovery.places.ec2 import Ec2, nvidia_gpus
from elastic_trainer.discovery.places.ec2_checks import (
    Finding,
    Image,
    Kind,
    Unanswered,
    Wish,
    quotas,
    quotas_needed,
    zones,
    zones_of,
)
from elastic_trainer.discovery.places.ec2_costs import Gradients, affordable, costs, traffic
from elastic_trainer.discovery.places.ec2_gpus import gpus
from elastic_trainer.discovery.poll import Poller
from elastic_trainer.doctor import image as doctor_image
from elastic_trainer.doctor.facts import Facts
from elastic_trainer.doctor.image import driver_version, faults

ZONES = ["us-east-1a", "us-east-1b", "us-east-1c"]
KINDS = {"p5.48xlarge": Kind(vcpus=192, is_spot=True, gpus=8),
         "p4d.24xlarge": Kind(vcpus=96, is_spot=True, gpus=8),
         "g5.xlarge": Kind(vcpus=4, is_spot=True, gpus=1),
         "g4ad.xlarge": Kind(vcpus=4, is_spot=True, has_other_gpus=True),
         "c6i.2xlarge": Kind(vcpus=8, is_spot=True), "m6i.large": Kind(vcpus=2, is_spot=True)}
PLAIN = Image(id="ami-1", architecture="x86_64", snapshot_gb=8,
              name="al2023-ami-2023.9-kernel-6.1-x86_64", description="Amazon Linux 2023 AMI")
WITH_DRIVER = replace(PLAIN, snapshot_gb=65, name="Deep Learning Base OSS Nvidia Driver GPU AMI "
                                                  "(Amazon Linux 2023)")
NEURON = replace(PLAIN, name="Deep Learning Base Neuron AMI (Amazon Linux 2023)")
WISH = Wish(region="us-east-1", bucket="b", name="gpt-1", workers=4,
            instance_types=["p5.48xlarge", "p4d.24xlarge"], zones=[], coordinator_type="m6i.large",
            image_id="ami-1", worker_disk_gb=30)
P4, P5 = "L-7212CCBC", "L-C4BD4855"
ON_DEMAND = "L-1216C47A"
UNKNOWN = Unanswered(action="servicequotas:GetServiceQuota", code="NoSuchResourceException",
                     says="The request failed because the specified resource does not exist.")


def of(*names: str, **more: Any) -> Wish:
    return replace(WISH, instance_types=list(names), **more)


# --- before an apply ------------------------------------------------------------------------------

@pytest.mark.parametrize(("found", "fact", "remedy"), [
    (gpus(WISH, KINDS, PLAIN), "The types have 8 GPUs, and the image ami-1 (al2023-ami-2023.9",
     "base-oss-nvidia-driver-gpu-al2023"),
    (gpus(WISH, KINDS, NEURON), "names no NVIDIA driver", "image_has_gpu_driver = true"),
    (gpus(replace(WISH, image_has_gpu_driver=False), KINDS, WITH_DRIVER), "names no NVIDIA driver",
     "image_id"),
    (gpus(of("p5.48xlarge", "c6i.2xlarge"), KINDS, WITH_DRIVER),
     "different numbers of GPUs: c6i.2xlarge has 0, p5.48xlarge has 8", "instance_types"),
    (gpus(of("p5.48xlarge", "g5.xlarge"), KINDS, WITH_DRIVER), "g5.xlarge has 1", "instance_types"),
    (gpus(of("g4ad.xlarge"), KINDS, WITH_DRIVER), "not NVIDIA's", "instance_types"),
    (gpus(replace(WISH, slots=1), KINDS, WITH_DRIVER), "slots is 1, and each machine has 8 GPUs",
     "Remove slots"),
])
def test_types_slots_and_image_that_do_not_fit_together_are_refused(
        found: Finding, fact: str, remedy: str) -> None:
    """With the values, and the key that mends it."""
    assert not found.is_well and fact in found.fact and remedy in found.remedy, found
    assert found.fact.endswith(".") and found.remedy.endswith(".")


@pytest.mark.parametrize(("wish", "image", "fact"), [
    (WISH, WITH_DRIVER, "8 on each machine, with 8 workers"),
    (replace(WISH, slots=8), WITH_DRIVER, "with 8 workers"),
    (replace(WISH, image_has_gpu_driver=True), PLAIN, "8 on each machine"),
    (of("g5.xlarge"), replace(PLAIN, description="my CUDA image"), "1 on each machine"),
    (WISH, None, "8 on each machine"),  # the check of the image has failed already
    (of("c6i.2xlarge", slots=2), PLAIN, "none; each machine has 2 workers"),
    (of("c6i.2xlarge"), PLAIN, "none; each machine has 1 workers"),
])
def test_types_slots_and_image_that_fit_together_pass(wish: Wish, image: Image | None,
                                                      fact: str) -> None:
    """Slots follow the GPUs; an image of one's own passes by its owner's word."""
    found = gpus(wish, KINDS, image)
    assert found.is_well and fact in found.fact and not found.remedy


def test_what_decides_about_images_is_the_same_here_and_in_terraform() -> None:
    """The words in an image's name."""
    text = (DEPLOY / "terraform" / "fleet" / "types.tf").read_text()
    assert f'"(?i){ec2_gpus.WITH_DRIVER.pattern}"' in text
    assert f'"(?i){ec2_gpus.WITHOUT_DRIVER.pattern}"' in text


def test_types_with_gpus_are_in_the_one_zone_that_offers_most_of_them() -> None:
    """And the coordinator's type. Named zones are taken as they are; types without GPUs get
    three."""
    every = set(KINDS)
    offers = {"us-east-1a": {"p5.48xlarge", "m6i.large"}, "us-east-1b": every - {"m6i.large"},
              "us-east-1c": every}
    assert zones_of(WISH, ZONES, offers, 8) == ["us-east-1c"]
    assert zones_of(WISH, ZONES, dict.fromkeys(ZONES, every), 8) == ["us-east-1a"]
    assert zones_of(of("c6i.2xlarge"), ZONES, offers, 0) == ZONES
    named = replace(WISH, zones=["us-east-1b", "us-east-1a"])
    assert zones_of(named, ZONES, offers, 8) == ["us-east-1b", "us-east-1a"]
    assert [one.is_well for one in zones(WISH, ZONES, offers, 8)] == [True, True]


def of_p5(**limits: float | Unanswered) -> Finding:
    answers: dict[str, float | Unanswered] = {P4: UNKNOWN, P5: UNKNOWN, ON_DEMAND: 5.0}
    answers |= {"L-" + code: value for code, value in limits.items()}
    return quotas(of("p5.48xlarge"), KINDS, answers, [])[0]


def test_p5_is_held_against_each_of_its_two_quotas_that_the_account_has() -> None:
    """Both are asked for; the request names the one that is too small; none of them is an error."""
    assert [one.code for one in quotas_needed(of("p5.48xlarge"))] == [P4, P5, ON_DEMAND]
    assert of_p5(**{"7212CCBC": 768.0}).is_well and of_p5(C4BD4855=768.0).is_well
    found = of_p5(**{"7212CCBC": 768.0, "C4BD4855": 192.0})
    assert not found.is_well and f"{P5} (All P5 Spot Instance Requests) is 192" in found.fact
    assert f"--quota-code {P5} --desired-value 768" in found.remedy and P4 not in found.remedy
    assert "set workers = 1 " in found.remedy
    assert "did not answer" in of_p5().fact
    denied = replace(UNKNOWN, code="AccessDeniedException")
    assert "AccessDeniedException" in of_p5(**{"7212CCBC": 768.0, "C4BD4855": denied}).fact


# --- what it costs --------------------------------------------------------------------------------

PRICES = {("p5.48xlarge", zone): 20.0 + index for index, zone in enumerate(ZONES)} | {
    ("p4d.24xlarge", "us-east-1a"): 10.0, ("c6i.2xlarge", "us-east-1a"): 0.1}


def test_gradients_between_zones_are_priced_beside_the_machines() -> None:
    """8 machines in 3 zones: two thirds of what each sends and receives, at 2 cents a GB."""
    assert traffic(8, 3, Gradients(gigabytes=0.5, step_s=1.0)) == pytest.approx(384.0)
    assert traffic(8, 1, Gradients()) == 0.0
    found = costs(WISH, ZONES, PRICES, Gradients(gigabytes=1.0, step_s=2.0))
    assert found.is_well and "4 machines cost 40.00 to 88.00 dollars an hour" in found.fact
    assert "p4d.24xlarge in us-east-1a, 10.0000" in found.fact
    assert "3 zones cost 192.00 dollars an hour or more, with 1 GB" in found.fact
    assert "1 zone cost nothing" in costs(WISH, ZONES[:1], PRICES, Gradients()).fact


def test_a_sum_that_allows_fewer_machines_than_are_wished_is_refused() -> None:
    """With the number that it allows."""
    cheap = replace(WISH, max_price_per_hour=35.0)
    found = costs(cheap, ZONES, PRICES, Gradients())
    assert not found.is_well and "max_price_per_hour is 35, which allows 3 machines." in found.fact
    assert costs(replace(WISH, max_price_per_hour=40.0), ZONES, PRICES, Gradients()).is_well
    assert not costs(WISH, ["us-east-1z"], PRICES, Gradients()).is_well
    denied = replace(UNKNOWN, action="ec2:DescribeSpotPriceHistory", code="UnauthorizedOperation")
    assert "ec2:DescribeSpotPriceHistory" in costs(WISH, ZONES, denied, Gradients()).remedy


@pytest.mark.parametrize(("budget", "running", "count"), [
    (100.0, [], 5), (99.0, [], 4), (100.0, [10.0, 10.0], 6), (25.0, [10.0, 10.0, 10.0], 2),
    (25.0, [30.0], 0), (29.0, [20.0, 9.0], 2), (19.0, [], 0)])
def test_the_brake_counts_machines_that_run_at_their_price_and_others_at_the_dearest(
        budget: float, running: list[float], count: int) -> None:
    """So no choice of the group's exceeds the sum."""
    assert affordable(budget, running, dearest=20.0) == count


# --- at the apply ---------------------------------------------------------------------------------

VARIABLES = {"region": "us-east-1", "bucket": OPEN_BUCKET, "name": NAME, "workers": 2,
             "image_id": GPU_IMAGE, "instance_types": ["p5.48xlarge", "p4d.24xlarge"],
             "placement_group": True, "max_price_per_hour": 50}


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """EC2's API, with the run's code in its bucket."""
    try:
        with moto_server(tmp_path_factory.mktemp("moto")) as endpoint:
            s3 = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1",
                              aws_access_key_id="x", aws_secret_access_key="x")
            s3.create_bucket(Bucket=OPEN_BUCKET)
            s3.put_object(Bucket=OPEN_BUCKET, Key=f"{NAME}/code.tar.gz", Body=b"code")
            yield endpoint
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def fleet(moto: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Root]:
    """The fleet's root, of which nothing is applied."""
    try:
        with Root(tmp_path_factory.mktemp("fleet"), "fleet", moto, VARIABLES) as root:
            yield root
    except Unavailable as error:
        pytest.skip(str(error))


def test_a_fleet_with_gpus_is_planned_as_its_types_need_it(fleet: Root) -> None:
    """One zone, EFA on each network card, a larger and faster disk, a worker for each GPU; the sum
    of dollars is a tag of the group."""
    plan = fleet.planned()
    template = plan["aws_launch_template.worker"]["after"]
    cards = [(one["interface_type"], one["network_card_index"], one["device_index"])
             for one in template["network_interfaces"]]
    assert cards == [("efa", 0, 0), *(("efa-only", card, 1) for card in (1, 2, 3))]  # p4d has four
    (disk,) = (one["ebs"][0] for one in template["block_device_mappings"])
    assert (disk["volume_size"], disk["throughput"], disk["iops"]) == (15 + 30, 500, 3000)
    zones = [one["after"]["availability_zone"] for address, one in plan.items()
             if address.startswith("aws_subnet.zone")]
    assert zones == ["us-east-1a"]
    assert plan["aws_placement_group.workers[0]"]["after"]["strategy"] == "cluster"
    group = plan["aws_autoscaling_group.workers"]["after"]
    assert group["placement_group"] == "mine-workers"
    assert {"MaxPricePerHour": "50", "Workers": "2"}.items() <= {
        tag["key"]: tag["value"] for tag in group["tag"]}.items()
    assert "ec2:DescribeSpotPriceHistory" in plan["aws_iam_role_policy.coordinator"]["after"][
        "policy"]
    rules = {address: one["after"] for address, one in plan.items() if "workers: EFA" in address}
    assert len(rules) == 2 and {rule["ip_protocol"] for rule in rules.values()} == {"-1"}
    assert not any(rule.get("cidr_ipv4") for rule in rules.values())


def test_the_outputs_name_machines_workers_gpus_and_zone(fleet: Root) -> None:
    """Before they are rented."""
    assert fleet.outputs_planned()["size"] == (
        "2 machines of 8 workers (8 GPUs) in us-east-1a, with 4 EFA interfaces")
    spread = {"zones": '["us-east-1a", "us-east-1b"]', "placement_group": "false"}
    assert fleet.outputs_planned(**spread)["size"].endswith(
        "in us-east-1a, us-east-1b, with 0 EFA interfaces")


@pytest.mark.parametrize(("values", "fact"), [
    ({"image_id": IMAGE}, "names no NVIDIA driver, so the training would be on CPUs."),
    ({"instance_types": '["p5.48xlarge", "c6i.2xlarge"]'},
     "instance_types must have the same number of GPUs: c6i.2xlarge has 0, p5.48xlarge has 8."),
    ({"slots": "2"}, "slots is 2, and each machine has 8 GPUs"),
    ({"zones": '["us-east-1a", "us-east-1b"]'}, "A placement group has one zone."),
    ({"command": json.dumps(["python", "x" * 12000])}, "bytes, and EC2 takes 16384."),
])
def test_a_plan_that_would_pay_for_nothing_is_refused(fleet: Root, values: dict[str, str],
                                                      fact: str) -> None:
    """By its precondition, with the values, before anything is made."""
    assert fact in fleet.plan_refused(**values)


def test_a_fleet_without_gpus_gets_none_of_it(fleet: Root) -> None:
    """Three zones, plain interfaces, no rule for EFA; its image needs no driver."""
    plan = fleet.planned(instance_types='["c6i.2xlarge"]', image_id=IMAGE, placement_group="false")
    template = plan["aws_launch_template.worker"]["after"]
    (interface,) = template["network_interfaces"]
    assert not interface["interface_type"]
    assert not any("EFA" in address or "placement_group" in address for address in plan)
    assert sum(address.startswith("aws_subnet.zone") for address in plan) == 3


def test_the_coordinator_may_read_prices_only_for_a_sum_of_dollars() -> None:
    """The statement that allows it depends on the variable."""
    text = (DEPLOY / "terraform" / "fleet" / "iam.tf").read_text()
    assert re.search(r'for_each = var.max_price_per_hour\[\*\]\s+content {\s+'
                     r'actions   = \["ec2:DescribeSpotPriceHistory"\]', text)
    assert text.count("SpotPrice") == 1


# --- on the coordinator ---------------------------------------------------------------------------

FIT = Facts(host="c", torch="2.13.0", cuda="13.0", nccl=True, gloo=True)


@pytest.mark.parametrize(("facts", "driver", "words"), [
    (FIT, "580.95.05", []), (FIT, "610.1", []), (replace(FIT, cuda="12.6"), "535.1", []),
    (FIT, "", ["no NVIDIA driver (modinfo nvidia). Set image_id"]),
    (FIT, "570.86.15", ["driver 570.86.15, and torch 2.13.0 is built for CUDA 13.0, which needs "
                        "580 or newer. Set image_id"]),
    (replace(FIT, cuda="", nccl=False, torch="2.13.0+cpu"), "580.1",
     ["torch 2.13.0+cpu is built for CPUs. Set torch_spec"]),
    (replace(FIT, nccl=False), "580.1", ["Horovod has no NCCL (its build had no NCCL)"]),
    (replace(FIT, nccl=False, horovod_error="no libcudart"), "",
     ["Horovod has no NCCL (no libcudart)", "no NVIDIA driver"]),
])
def test_an_image_that_cannot_train_on_gpus_is_found_before_machines_are_asked_for(
        facts: Facts, driver: str, words: list[str]) -> None:
    """Driver, torch's CUDA, Horovod's NCCL: each fault has its remedy."""
    found = list(faults(facts, driver, 8))
    assert len(found) == len(words)
    assert all(word in fault for word, fault in zip(words, found, strict=True))
    assert all("apply -replace=aws_instance.coordinator" in fault for fault in found)


def test_the_driver_is_found_by_its_library_where_no_module_names_it(tmp_path: Path) -> None:
    """Not by the link of an interface version."""
    (tmp_path / "libcuda.so.1").touch()
    assert driver_version([str(tmp_path)]) == ""
    (tmp_path / "libcuda.so.580.95.05").touch()
    assert driver_version([str(tmp_path)]) == "580.95.05"


def test_the_check_of_an_image_ends_with_one_line_for_each_fault() -> None:
    """By the command that the coordinator calls, on this machine, which has no GPU."""
    done = subprocess.run([sys.executable, "-I", "-m", doctor_image.__package__, "image", "8"],
                          capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.count("image: The worker machines have 8 GPUs") >= 1
    assert not done.stderr


# --- on each host ---------------------------------------------------------------------------------

MACHINE = Instance(id="i-1", name="a", type="p5.48xlarge", slots=8, gpus=8)
ASKED = Policy(agents=True, settle_s=0.0)


@pytest.mark.parametrize(("count", "why"), [
    (8, "in"), (None, "in"),
    (7, "sick: p5.48xlarge has 8 GPUs, and nvidia-smi finds 7"),
    (0, "sick: p5.48xlarge has 8 GPUs, and nvidia-smi finds none. Set image_id to an image with "
        "NVIDIA's driver (deploy/README.md)")])
def test_a_host_with_fewer_gpus_than_its_type_is_sick(count: int | None, why: str) -> None:
    """None, or some. An agent that tells no number is no fault."""
    health = {"i-1": Health("ready", gpus=count)}
    assert decide([MACHINE], health, History(), 0.0, ASKED).reasons == {"i-1": why}


@pytest.fixture
def ec2(moto: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Ec2]:
    """A maker of places, each with one machine of a type."""
    for name, value in {**AWS, "AWS_ENDPOINT_URL": moto}.items():
        monkeypatch.setenv(name, value)

    def start(kind: str) -> Ec2:
        tags = {"Job": secrets.token_hex(8)}
        launch(moto, 1, kind=kind, tags=tags)
        return Ec2(tags, host_name="private-ip")

    return start


class AtLoopback:
    """A place whose machines have their agent on loopback."""

    def __init__(self, place: Ec2):
        self.place = place

    def instances(self) -> list[Instance]:
        return [replace(one, name="127.0.0.1") for one in self.place.instances()]

    def supply(self) -> None:
        return None


@pytest.mark.parametrize(("gpus_found", "why"), [
    (4, "in"), (3, "sick: g5.12xlarge has 4 GPUs, and nvidia-smi finds 3"),
    (0, "sick: g5.12xlarge has 4 GPUs, and nvidia-smi finds none"),
    (None, "sick: g5.12xlarge has 4 GPUs, and nvidia-smi finds none")])
def test_agent_and_poller_hold_nvidia_smi_against_ec2s_type(
        gpus_found: int | None, why: str, ec2: Callable[[str], Ec2], tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """The real agent with a nvidia-smi on its PATH (or none), and EC2's own facts of the type. The
    host is not listed, and the event log has the sentence."""
    programs = tmp_path / "bin"
    programs.mkdir()
    if gpus_found is not None:
        lines = "".join(f"echo 'GPU {number}: A10G'\n" for number in range(gpus_found))
        (programs / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}")
        (programs / "nvidia-smi").chmod(0o755)
    elif shutil.which("nvidia-smi"):
        pytest.skip("this machine has a nvidia-smi of its own.")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    key, hosts = tmp_path / "key", tmp_path / "hosts"
    key.write_bytes(KEY)
    key.chmod(0o600)
    place = AtLoopback(ec2("g5.12xlarge"))
    with agent_process(key, "--no-metadata") as (_, port), ThreadPoolExecutor(2) as pool:
        poller = Poller(place, hosts, Policy(agents=True, settle_s=0.0), key=KEY, agent_port=port,
                        agent_timeout_s=60.0, agents_patience_s=60.0,
                        events_file=tmp_path / "events.jsonl")
        while not hosts.with_name("hosts.json").exists():
            poller.poll(pool)
        (row,) = json.loads(hosts.with_name("hosts.json").read_text())["hosts"]
    assert row["why"].startswith(why)
    assert hosts.read_text() == ("127.0.0.1:4 zone=us-east-1a\n" * (row["why"] == "in"))
    sick = [line for line in (tmp_path / "events.jsonl").read_text().splitlines()
            if "discovery.host_sick" in line]
    assert bool(sick) == (gpus_found != 4) and all("nvidia-smi finds" in line for line in sick)


def test_only_nvidias_gpus_are_slots() -> None:
    """A type of another maker counts as one without GPUs."""
    assert nvidia_gpus({"GpuInfo": {"Gpus": [{"Count": 4, "Manufacturer": "NVIDIA"}]}}) == 4
    assert nvidia_gpus({"GpuInfo": {"Gpus": [{"Count": 4, "Manufacturer": "AMD"}]}}) == 0
    assert nvidia_gpus({}) == 0


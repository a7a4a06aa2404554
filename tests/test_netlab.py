"""Real hosts, as far as one machine can have them: every worker is reached by ssh, and hosts end as clouds end them.

Each test is a real run that ends proved, with the undisturbed twin's bits and no victim but the planned ones.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import netlab
import pytest
from faulty_proxy import FaultyProxy
from metadata_server import MetadataServer
from netlab import COORDINATOR, Fleet, Lab

import discovery

Twin = Callable[..., str]
DISCOVERY = [sys.executable, "-m", "discovery"]
DISCOVER = Path(discovery.__file__).with_name("__main__.py")
FOUR = ["h1", "h2", "h3", "h4"]
JOB = ("--steps", "150", "--step-s", "0.15", "--checkpoint-every", "5")
"""A minute and more, if nobody says that the story is over (`Fleet.finish`)."""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A lab with a coordinator and nobody else."""
    try:
        netlab.prepare()
    except netlab.Unavailable as error:
        pytest.skip(str(error))
    folder = tmp_path / "lab"
    folder.mkdir()
    with Lab(folder) as lab:
        lab.boot(COORDINATOR)
        yield lab


def test_follows_the_cloud_from_notices_to_terminations(lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """EC2's API, agents, metadata services, poller and driver together: nobody is lost, and no step is done again.

    Two hosts, then five, of which one has a wrong clock and never works; the API is throttled, fails, talks rubbish and
    says that there is nobody; meanwhile a host gets its notice, leaves, and is terminated; the disk of another one fills.
    """
    key, folder = tmp_path / "key", tmp_path / "fleet"
    key.write_text("5ec4e7" * 10)
    key.chmod(0o600)
    metadata: dict[str, MetadataServer] = {}
    with ExitStack() as stack:
        try:
            endpoint = stack.enter_context(netlab.ec2_server(tmp_path))
        except netlab.Unavailable as error:
            pytest.skip(str(error))
        cloud = netlab.Cloud(endpoint)
        with lab.network_of(COORDINATOR):
            api = FaultyProxy(endpoint, lab.address(COORDINATOR))
        stack.enter_context(api)  # here: its threads are to find the API outside the lab

        def boot(addresses: list[str]) -> None:
            lab.boot(*addresses)
            for address in addresses:
                with lab.network_of(address):
                    metadata[address] = MetadataServer((netlab.METADATA, 80))
                stack.enter_context(metadata[address])
                if address == with_wrong_clock:
                    lab.inside(address, "sh", "-c", "echo 300 > /run/clock-off")
                lab.start(address, [*DISCOVERY, "agent", "--bind", address, "--key-file", key, "--folder", "/run/disk"],
                          env=fleet.env)

        first, more = cloud.launch(2), cloud.launch(3)
        with_wrong_clock = more[-1]
        fleet = Fleet(lab, folder, first, job=JOB, start_with=2, min_workers=1,
                      discovery=shlex.join([sys.executable, "-S", str(DISCOVER), "hosts-file", f"{folder}/hosts", "60"]))
        fleet.hosts_file.unlink()
        fleet.run_dir.mkdir(parents=True)
        aws = {"AWS_ENDPOINT_URL": api.endpoint, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
               "AWS_DEFAULT_REGION": "us-east-1"}
        poll = ["poll", "--hosts-file", fleet.hosts_file, "--tag", "Job=mine", "--key-file", key, "--interval", "1",
                "--host-name", "private-ip", "--events", fleet.run_dir / "events.jsonl"]
        lab.start(COORDINATOR, [*DISCOVERY, *poll], env=os.environ | aws)
        boot(first)
        with fleet:
            fleet.wait_for_world(2)
            boot(more)
            generation = fleet.wait_for_world(4)
            for kind in ("slow_down", "internal", "rubbish", "empty"):
                asked = len(api.seen)
                api.on_request = lambda method, path, kind=kind: kind  # type: ignore[misc]
                fleet.wait_for("question", lambda asked=asked: len(api.seen) > asked)  # type: ignore[misc]
                if kind == "internal":
                    metadata[first[0]].announce()
                    generation = fleet.wait_for_world(3, after=generation)
            api.on_request = lambda method, path: None
            cloud.terminate(first[0])
            lab.power_cut(first[0])
            lab.inside(more[0], "sh", "-c", "cat /dev/zero > /run/disk/full; true")
            generation = fleet.wait_for_world(2, after=generation)
            assert fleet.finish() == 0
            result = fleet.assert_nothing_lost(twin_of(*JOB), victims=0)
            print(fleet.story())
            said = {e["host"]: e["why"] for e in fleet.events("discovery.host_out")}
            assert said[first[0]].startswith("notice") and said[more[0]].startswith("sick: disk full")
            assert fleet.events("discovery.cloud_unavailable")
            hosts = json.loads(fleet.hosts_file.with_name("hosts.json").read_text())["hosts"]
            assert {h["name"]: h["why"] for h in hosts}[with_wrong_clock].startswith("sick: its clock is +300 s off")
            assert with_wrong_clock not in {e["host"] for e in fleet.events("driver.worker_started")}
    assert result["steps_redone"] == 0
    assert result["attempts"] == 1


def test_goes_on_when_a_host_is_cut_off_without_a_word(lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """No RST, no FIN: the beats' silence ends it, be it a worker's host or rank 0's; when it is back it joins again."""
    lab.boot(*FOUR)
    with Fleet(lab, tmp_path, FOUR, job=JOB) as fleet:
        fleet.wait_for_step(3)
        lab.unplug("h3")
        generation = fleet.wait_for_world(3)
        lab.plug_in("h3")
        generation = fleet.wait_for_world(4, after=generation)
        lab.unplug("h1")
        fleet.wait_for_world(3, after=generation)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=2)
        evicted = [(e["worker"].split("/")[0], e["reason"]) for e in fleet.events("driver.worker_evicted")]
        assert evicted == [("h3", "frozen"), ("h1", "frozen")]
        print(fleet.story())
    assert result["attempts"] == 1
    assert result["steps_redone"] <= 2


def test_goes_on_when_two_hosts_are_taken_without_notice(lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """Half of the fleet is gone between two instructions, rank 0's host with it; three new hosts join the other two."""
    lab.boot(*FOUR)
    with Fleet(lab, tmp_path, FOUR, job=JOB) as fleet:
        fleet.wait_for_step(3)
        lab.power_cut("h1", "h3")
        generation = fleet.wait_for_world(2)
        lab.boot("h5", "h6", "h7")
        fleet.set_hosts(["h2", "h4", "h5", "h6", "h7"])
        fleet.wait_for_world(5, after=generation)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=2)
        print(fleet.story())
    assert result["attempts"] == 1
    assert result["steps_redone"] <= 1


def test_resumes_without_a_human_when_all_hosts_are_gone(lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """Capacity goes to zero at once, and comes back under other names: the next attempt goes on from the checkpoint."""
    lab.boot(*FOUR)
    with Fleet(lab, tmp_path, FOUR, job=JOB) as fleet:
        fleet.wait_for_step(8)
        lab.power_cut(*FOUR)
        fleet.set_hosts([])
        fleet.wait_for("end", lambda: fleet.events("attempt.ended"))
        lab.boot("h5", "h6", "h7", "h8")
        fleet.set_hosts(["h5", "h6", "h7", "h8"])
        fleet.wait_for("restart", lambda: fleet.events("state.checkpoint_restored"))
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=4)
        print(fleet.story())
    assert result["attempts"] == 2


def test_resumes_when_the_coordinator_is_taken(lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """Workers notice, leave with a checkpoint, and none of them is left when the next coordinator calls the same run."""
    lab.boot(*FOUR)
    with Fleet(lab, tmp_path, FOUR, job=JOB) as fleet:
        fleet.wait_for_step(8)
        lab.power_cut(COORDINATOR)
        lab.boot(COORDINATOR)
        fleet.start()
        fleet.wait_for("restart", lambda: fleet.events("state.checkpoint_restored"))
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=0)
        print(fleet.story())
    assert result["attempts"] == 2


def test_one_of_two_goes_when_they_do_not_hear_each_other(lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """Both still reach the driver; the younger one goes, and comes back when the line is mended."""
    lab.boot(*FOUR)
    with Fleet(lab, tmp_path, FOUR, job=JOB) as fleet:
        fleet.wait_for_step(3)
        lab.cut("h2", "h4")
        generation = fleet.wait_for_world(3)
        fleet.wait_for("new worker", lambda: [e for e in fleet.events("driver.worker_ready")
                                              if e["worker"].startswith("h4")][1:])
        lab.mend("h2", "h4")
        fleet.wait_for_world(4, after=generation)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=1)
        evicted = [(e["worker"].split("/")[0], e["reason"]) for e in fleet.events("driver.worker_evicted")]
        assert evicted == [("h4", "cut_off")]
        print(fleet.story())
    assert result["attempts"] == 1
    assert result["steps_redone"] <= 1

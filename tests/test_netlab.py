"""Real hosts, as far as one machine can have them: every worker is reached by ssh, and hosts end as clouds end them.

Each test is a real run that ends proved, with the undisturbed twin's bits and no victim but the planned ones.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import netlab
import pytest
import s3_servers
from faulty_proxy import FaultyProxy
from metadata_server import MetadataServer
from moto_server import moto_server
from netlab import COORDINATOR, Fleet, Lab

import discovery

Twin = Callable[..., str]
DISCOVERY = [sys.executable, "-m", "discovery"]
DISCOVER = Path(discovery.__file__).with_name("__main__.py")
FOUR = ["h1", "h2", "h3", "h4"]
JOB = ("--steps", "100", "--step-s", "0.15", "--checkpoint-every", "5")
"""A minute and more, if nobody says that the story is over (`Fleet.finish`)."""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A lab with a coordinator and nobody else."""
    try:
        netlab.prepare()
    except s3_servers.Unavailable as error:
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
            endpoint = stack.enter_context(moto_server(tmp_path))
        except s3_servers.Unavailable as error:
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


class Pickled:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def overheard_word(lab: Lab) -> bytes:
    """Return a worker's signed word as it passes on the coordinator's line."""
    with lab.network_of(COORDINATOR):
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
    streams: dict[bytes, bytes] = {}
    with tap:
        tap.bind((lab.hosts[COORDINATOR].interface, 0x0800))
        tap.settimeout(20.0)
        while True:
            frame = tap.recv(65536)
            header = 4 * (frame[14] & 15)
            tcp = frame[14 + header : 14 + int.from_bytes(frame[16:18], "big")]
            if frame[23] != socket.IPPROTO_TCP or frame[14 + 16 : 14 + 20] != socket.inet_aton(lab.address(COORDINATOR)):
                continue
            source, payload = frame[26:30] + tcp[:2], tcp[4 * (tcp[12] >> 4) :]
            streams[source] = payload if payload.startswith(b"POST /word") else streams.get(source, b"") + payload
            head, _, body = streams[source].partition(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            if head.startswith(b"POST /word") and length and len(body) == int(length[1]):
                return streams[source]


def open_ports(lab: Lab, name: str) -> list[int]:
    """Return the TCP ports of a host that others can connect to."""
    rows = [line.split() for line in lab.inside(name, "cat", "/proc/net/tcp").splitlines()[1:]]
    return sorted({int(row[1].partition(":")[2], 16) for row in rows
                   if row[3] == "0A" and not row[1].startswith(("0100007F", "FEA9FEA9"))})


def test_a_stranger_is_refused_at_every_open_port(lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """Rubbish, a pickle, and a worker's own words played back: refused and told; the training does not even pause."""
    lab.boot(*FOUR, "h9")
    with Fleet(lab, tmp_path, FOUR, job=JOB) as fleet:
        fleet.wait_for_step(3)
        pickled = pickle.dumps(Pickled(f"touch {tmp_path}/executed"))
        words = [b"\x16\x03\x01" + os.urandom(500) + b"\r\n\r\n", pickled, overheard_word(lab),
                 *(b"%s HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (line, len(pickled), pickled)
                   for line in (b"PUT /worker_addresses/h1:0", b"POST /word", b"PUT /global/0"))]
        knocked = 0
        with lab.network_of("h9"):
            for name in (COORDINATOR, *FOUR):
                for port in open_ports(lab, name):
                    for word in words:
                        with suppress(OSError), socket.create_connection((lab.address(name), port), 5.0) as connection:
                            knocked += 1
                            connection.sendall(word)
                            connection.shutdown(socket.SHUT_WR)
                            connection.settimeout(1.0)
                            answer = connection.recv(65536)
                            assert b" 200 " not in answer, (name, port, word, answer)
        fleet.wait_for_step(fleet.newest_step() + 3)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=0)
        print(fleet.story())
        refused = {e["reason"] for e in fleet.events("driver.stranger_refused") if e["address"] == lab.address("h9")}
    assert knocked >= 11 * len(words)  # sshd and the worker's door on each host, sshd and two ports of the driver's
    assert {"signature does not match", "a word of another's, played back", "not a member of this generation",
            "bytes that are no word"} <= refused
    assert not (tmp_path / "executed").exists()
    assert result["generations"] == 1


def test_goes_on_when_lines_are_slow_or_flap_or_lose_the_store(lab: Lab, tmp_path: Path, twin_of: Twin,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """One host does not reach the store: no checkpoint, and the training goes on; then its line is slow; then it comes and
    goes within the time limits: nobody is evicted for any of these. Another host's clock is wrong by minutes.
    """
    lab.boot(*FOUR, "h8")
    lab.inside("h4", "sh", "-c", "echo -240 > /run/clock-off")
    with ExitStack() as stack:
        try:
            endpoint = stack.enter_context(s3_servers.ministack(tmp_path / "s3"))
        except s3_servers.Unavailable as error:
            pytest.skip(str(error))
        with lab.network_of("h8"):
            store = FaultyProxy(endpoint, lab.address("h8"))
        stack.enter_context(store)
        for name, value in s3_servers.environment(store.endpoint).items():
            monkeypatch.setenv(name, value)
        fleet = stack.enter_context(Fleet(lab, tmp_path, FOUR, job=(*JOB, "--part-bytes", "65536"),
                                          options=["--store", f"s3://{s3_servers.BUCKET}/lab"]))
        fleet.wait_for("checkpoint", lambda: fleet.events("state.checkpoint_published"))
        lab.cut("h3", "h8")
        step = fleet.newest_step()
        fleet.wait_for_step(step + 12)  # one checkpoint may have been whole before the cut
        assert max(e["step"] for e in fleet.events("state.checkpoint_published")) <= step + 6, fleet.story()
        lab.mend("h3", "h8")
        fleet.wait_for("checkpoint", lambda: fleet.events("state.checkpoint_published")[-1]["step"] > step + 6)
        lab.slow("h2", 4000)
        fleet.wait_for_step(fleet.newest_step() + 5)
        lab.slow("h2", 0)
        for _ in range(3):
            lab.unplug("h3")
            with lab.network_of(COORDINATOR), pytest.raises(OSError):
                socket.create_connection((lab.address("h3"), 22), timeout=1.0)
            lab.plug_in("h3")
            fleet.wait_for_step(fleet.newest_step() + 2)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=0)
        print(fleet.story())
    assert result["generations"] == 1

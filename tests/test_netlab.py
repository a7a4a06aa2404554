"""Real hosts, as far as one machine can have them: every worker is reached by ssh, and hosts end as
clouds end them.

Each test is a real run that ends proved, with the undisturbed twin's bits and no victim but the
planned ones.
"""

from __future__ import annotations

import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import hanging
import pytest
import s3_servers
from cluster import weights_alone
from netlab import (
    COORDINATOR,
    RUBBISH,
    Fleet,
    Lab,
    Pickled,
    knock,
    overheard,
    sent_gradients,
    store_on,
)
from waiting import wait_for

Twin = Callable[..., str]
FOUR = ["h1", "h2", "h3", "h4"]
THREE = FOUR[:3]
STORE = f"s3://{s3_servers.BUCKET}/lab"
JOB = ("--steps", "140", "--step-s", "0.5", "--checkpoint-every", "5")
"""Two minutes and more, if nobody says that the story is over (`Fleet.finish`)."""


@contextmanager
def store(lab: Lab, name: str, folder: Path) -> Iterator[dict[str, str]]:
    """An S3 server on a host of the lab, or the test is skipped."""
    with ExitStack() as stack:
        try:
            environment = stack.enter_context(store_on(lab, name, folder / "s3"))
        except s3_servers.Unavailable as error:
            pytest.skip(str(error))
        yield environment


def test_goes_on_when_hosts_are_cut_off_without_a_signal(lab: Lab, tmp_path: Path,
                                                         twin_of: Twin) -> None:
    """No RST, no FIN: the beats' silence ends it, be it a worker's host, rank 0's, or rank 0's that
    its peers still hear; when it is back it joins again, and may go again. No step was voted on
    before the last one's line was kept, so at most one is told again. A full disk of a worker's
    host is nothing to it: it keeps nothing there.
    """
    fleet = Fleet(lab, tmp_path, FOUR, job=JOB, own_disks=True,
                  options=["--store", str(tmp_path / "store")])
    lab.boot(COORDINATOR, *FOUR)
    for folder in (tmp_path / "runs", "/run/disk"):
        lab.fill("h4", folder)
    wait_for("full disk", lambda: lab.health("h4").why.startswith("disk full"))
    with fleet:
        fleet.wait_for_step(3)
        lab.unplug("h3")
        generation = fleet.wait_for_world(3)
        lab.plug_in("h3")
        lab.cut("h1", COORDINATOR)
        fleet.wait_for("eviction", lambda: fleet.evicted()[1:])
        names = [e["event"] for e in fleet.events()]
        second = [at for at, name in enumerate(names) if name == "driver.worker_evicted"][1]
        told = [
            e["step"] for e in fleet.events()[:second] if e["event"] == "worker.step_committed"][-1]
        lab.mend("h1", COORDINATOR)
        generation = fleet.wait_for_world(4, after=generation)
        begun = [
            e for e in fleet.events("worker.generation_started") if e["worker"].startswith("h2/")]
        assert begun[0]["step"] - (told + 1) in (0, 1), fleet.story()
        assert len(fleet.events("worker.step_redone")) <= 2, fleet.story()
        assert begun[-1]["generation"] == generation  # rank 0 writes that
        lab.unplug("h2")
        fleet.wait_for_world(3, after=generation)
        lab.unplug("h3")
        fleet.wait_for_world(2, after=generation)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=4)
        assert fleet.evicted() == [("h3", "frozen"), ("h1", "frozen"), ("h2", "frozen"),
                                   ("h3", "frozen")]
        print(fleet.story())
    assert result["attempts"] == 1
    assert result["steps_redone"] <= 4


def test_goes_on_or_resumes_when_hosts_are_taken_without_notice(lab: Lab, tmp_path: Path,
                                                                twin_of: Twin) -> None:
    """Half of the fleet is gone between two instructions, rank 0's host with it: the others go on.
    All are: the next attempt goes on from the checkpoint in S3 when there are hosts again, under
    other names and with empty disks. The coordinator is: workers leave with a checkpoint, and none
    of them is left when the next coordinator calls the same run.
    """
    others = ["h5", "h6", "h7", "h8"]
    fleet = Fleet(lab, tmp_path, FOUR, job=JOB, own_disks=True, options=["--store", STORE])
    lab.boot(COORDINATOR, "h9", *FOUR)
    with ExitStack() as stack:
        fleet.env |= stack.enter_context(store(lab, "h9", tmp_path))
        stack.enter_context(fleet)
        fleet.wait_for_step(8)
        lab.power_cut("h1", "h3")
        fleet.wait_for_world(2)
        fleet.wait_for_step(fleet.newest_step() + 1)
        assert len(fleet.events("worker.step_redone")) <= 1, fleet.story()
        fleet.wait_for("checkpoint", lambda: fleet.events("state.checkpoint_published"))
        lab.power_cut("h2", "h4")
        fleet.set_hosts([])
        fleet.wait_for("end", lambda: fleet.events("attempt.ended"))
        lab.boot(*others)
        fleet.set_hosts(others)
        fleet.wait_for("restart", lambda: fleet.events("state.checkpoint_restored"))
        fleet.wait_for_step(fleet.newest_step() + 3)
        lab.power_cut(COORDINATOR)
        lab.boot(COORDINATOR)
        fleet.start()
        fleet.wait_for(
            "restart",
            lambda: [e for e in fleet.events("state.checkpoint_restored") if e["attempt"] == 3])
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=4)
        print(fleet.story())
    assert result["attempts"] == 3


def test_one_of_two_leaves_when_they_do_not_reach_each_other(lab: Lab, tmp_path: Path,
                                                             twin_of: Twin) -> None:
    """Both still reach the driver; the younger one goes, and comes back when the line is mended."""
    lab.boot(COORDINATOR, *THREE)
    with Fleet(lab, tmp_path, THREE, job=JOB) as fleet:
        fleet.wait_for_step(3)
        lab.cut("h2", "h3")
        generation = fleet.wait_for_world(2)
        fleet.wait_for(
            "new worker", lambda: [
                e for e in fleet.events("driver.worker_ready") if e["worker"].startswith("h3")][1:])
        lab.mend("h2", "h3")
        fleet.wait_for_world(3, after=generation)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=1)
        assert fleet.evicted() == [("h3", "cut_off")]
        print(fleet.story())
    assert result["attempts"] == 1
    assert result["steps_redone"] <= 1


WORDS = 6
"""The number of different ones that the client sends."""


def open_ports(lab: Lab, name: str) -> list[int]:
    """Return the TCP ports of a host that others can connect to."""
    rows = [line.split() for line in lab.inside(name, "cat", "/proc/net/tcp").splitlines()[1:]]
    return sorted({
        int(row[1].partition(":")[2], 16)
        for row in rows if row[3] == "0A" and not row[1].startswith(("0100007F", "FEA9FEA9"))})


def test_a_slow_or_flapping_line_and_an_unauthenticated_client_disturb_no_worker(
        lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """One host does not reach the store: no checkpoint, and the training goes on; then its line is
    slow; then it comes and goes within the time limits. Another's clock is wrong by minutes. A
    client sends rubbish, a pickle, and a worker's own messages at every open port: refused and
    logged. Nobody is evicted for any of these, and the training does not even pause; each is told
    all the same."""
    lab.clocks["h1"] = -240
    lab.boot(COORDINATOR, *THREE, "h8", "h9")
    job = ("--steps", "250", "--step-s", "0.1", "--checkpoint-every", "5", "--part-bytes", "65536")
    fleet = Fleet(lab, tmp_path, THREE, job=job, options=["--store", STORE],
                  limits="silence_s=20,gloo_s=40")

    def told(event: str, name: str) -> list[dict[str, Any]]:
        return [e for e in fleet.events(event) if e["worker"].startswith(f"{name}/")]

    def later(event: str, step: int) -> list[dict[str, Any]]:
        return [e for e in fleet.events(event) if e["step"] > step]

    with ExitStack() as stack:
        fleet.env |= stack.enter_context(store(lab, "h8", tmp_path))
        stack.enter_context(fleet)
        fleet.wait_for("checkpoint", lambda: fleet.events("state.checkpoint_published"))
        lab.cut("h3", "h8")
        step = fleet.newest_step()
        for name in THREE:
            wait_for("agent", lambda name=name: lab.health(name).state)  # type: ignore[misc]
        knocked = knock_everywhere(lab, "h9", [COORDINATOR, *THREE], tmp_path / "executed")
        fleet.wait_for("word", lambda: told("state.upload_stalled", "h3"))
        fleet.wait_for_step(step + 12)  # one checkpoint may have been whole before the cut
        assert max(e["step"]
                   for e in fleet.events("state.checkpoint_published")) <= step + 6, fleet.story()
        assert all(lab.health(name).refused >= WORDS for name in THREE)
        assert re.fullmatch("its clock is -2[0-9]{2} s off", lab.health("h1").why)
        assert [lab.health(name).state for name in ("h2", "h3")] == ["ready", "ready"]
        lab.mend("h3", "h8")
        fleet.wait_for("checkpoint",
                       lambda: fleet.events("state.checkpoint_published")[-1]["step"] > step + 6)
        fleet.wait_for("steady pace", lambda: [
            e["event"] for e in fleet.events() if e["event"].startswith("worker.steps_")][-1:] != [
                "worker.steps_slower"])  # the machine has other work too
        before = fleet.newest_step()
        lab.slow("h2", 4000)
        slower = fleet.wait_for("word", lambda: later("worker.steps_slower", before))[0]
        lab.slow("h2", 0)
        fleet.wait_for("word", lambda: later("worker.steps_as_before", slower["step"]))
        # A driver that stands still itself has not missed it.
        while len(told("driver.worker_heard_again", "h3")) < 3:
            lab.unplug("h3")
            with lab.network_of(COORDINATOR), pytest.raises(OSError):
                socket.create_connection((lab.address("h3"), 22), timeout=1.0)
            lab.plug_in("h3")
            fleet.wait_for_step(fleet.newest_step() + 4)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*job), victims=0)
        print(fleet.story())
        [differs] = fleet.events("driver.clock_differs")
        (formed, ), (started, ) = fleet.events("driver.generation_formed"), fleet.events(
            "worker.generation_started")
        refused = {
            reason
            for e in fleet.events("driver.stranger_refused") if e["address"] == lab.address("h9")
            for reason in e["reason"].split("; ")}
    # Sshd, the agent and the worker's door on each host, sshd and two ports of the driver's.
    assert knocked >= 12 * WORDS
    assert {
        "signature does not match", "a repeated message", "not a member of this generation",
        "not a request"} <= refused
    assert not (tmp_path / "executed").exists()
    # How much of it is the line's depends on what else the machine does (test_timing.py).
    assert 0 < slower["waited_s"] <= slower["step_s"]
    assert differs["host"] == "h1" and -300 < differs["off_s"] < -180
    assert started["worker"].startswith("h1/") and 180 < formed["time"] - started["time"] < 300
    assert result["generations"] == 1


def knock_everywhere(lab: Lab, stranger: str, names: list[str], executed: Path) -> int:
    """Say words to all open ports of hosts: what they answer must be no consent. Returns how often
    one was listened to."""
    pickled = pickle.dumps(Pickled(f"touch {executed}"))
    words = [
        RUBBISH, pickled,
        overheard(lab, COORDINATOR, b"POST /message"),
        *(b"%s HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (line, len(pickled), pickled)
          for line in (b"PUT /worker_addresses/h1:0", b"POST /message", b"PUT /global/0"))]
    assert len(words) == WORDS
    return sum(
        knock(lab, stranger, name, port, words) for name in names for port in open_ports(lab, name))


HOLDER = """
import sys, time
from pathlib import Path
import netlab
with netlab.Lab(Path(sys.argv[1])) as lab:
    lab.boot("h1", "h2")
    print(lab.switch.pid, *(host.pid for host in lab.hosts.values()), flush=True)
    time.sleep(600)
"""


def test_a_lab_vanishes_with_its_test_and_no_other_lab_with_it(lab: Lab, tmp_path: Path) -> None:
    """However the test dies; the other one has hosts of the same names and addresses."""
    lab.boot("h1", "h2")
    (tmp_path / "other").mkdir()
    other = subprocess.Popen([sys.executable, "-c", HOLDER,
                              str(tmp_path / "other")], stdout=subprocess.PIPE, text=True,
                             cwd=Path(__file__).parent, start_new_session=True)
    try:
        assert other.stdout
        processes = [Path(f"/proc/{pid}") for pid in other.stdout.readline().split()]
        assert len(processes) == 3 and all(process.exists() for process in processes)
    finally:
        other.kill()
        other.wait()
    wait_for("end of the other lab", lambda: not any(process.exists() for process in processes))
    assert lab.inside("h1", "ssh", "h2", "hostname") == "h2\n"


def test_a_slow_line_is_named_and_stacks_of_far_workers_come(lab: Lab, tmp_path: Path) -> None:
    """All workers wait in a collective: the host is named that is at an end of each connection with
    unsent bytes. Stacks come back over ssh."""
    command = [*hanging.JOB, "--steps", "120", "--width", "20000"]
    lab.boot(COORDINATOR, *FOUR)
    with Fleet(lab, tmp_path, FOUR, command=command) as fleet:
        fleet.wait_for_step(5)
        lab.slow("h3", 1500)
        slow = fleet.wait_for("verdict", lambda: fleet.events("driver.step_stalled"))[0]
        lab.slow("h3", 0)
        fleet.wait_for("a next step", lambda: fleet.events("driver.step_resumed"))
        hanging.hang(tmp_path, "lock", "h2")
        lock = fleet.wait_for("verdict", lambda: fleet.events("driver.step_stalled")[1:])[0]
        (tmp_path / "released").touch()
        assert fleet.finish() == 0
        fleet.assert_nothing_lost(weights_alone(command, tmp_path), victims=0)
    assert (slow["cause"], slow["host"], slow["phase"]) == ("network", "h3", "reduce"), slow
    assert slow["what"].startswith("exact."), slow
    # A link between two others may have bytes on their way at half of the looks.
    assert 2 * sum("h3" in link for link in slow["links"]) > len(slow["links"]), slow
    assert (lock["host"], lock["rank"], lock["phase"]) == ("h2", 1, "forward"), lock
    assert "in loss" in lock["stacks"][lock["worker"]]


def test_a_host_sends_its_gradient_once_whatever_the_number_of_its_workers(
        lab: Lab, tmp_path: Path) -> None:
    """Four workers of each of two hosts: half a gradient goes to the other host, and 7/8 of the sum
    passes on, beside the state at the start. If each worker sent its own, it were 3.1 gradients."""
    sent = sent_gradients(lab, tmp_path, slots=4, mib=4, steps=20)
    assert 1.375 <= sent <= 2, sent

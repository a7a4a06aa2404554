"""Runs whose hosts have no ssh, as pods: each host's agent starts its workers.

The hosts' names are in no /etc/hosts: the hosts file has their addresses. Each test is a real run
that ends proved, with the undisturbed twin's bits and no victim but the planned ones.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from netlab import COORDINATOR, Fleet, Lab
from waiting import wait_for

Twin = Callable[..., str]
FOUR = ["h1", "h2", "h3", "h4"]
JOB = ("--steps", "140", "--step-s", "0.5", "--checkpoint-every", "5")
"""Two minutes and more, if nobody says that the story is over (`Fleet.finish`)."""


class Pods(Fleet):
    """A run on hosts without sshd. Host h1 of the lab is called h1-x7k2q, at its address."""

    def __init__(self, lab: Lab, folder: Path, names: Sequence[str], **how: Any):
        lab.has_sshd = False
        options = ["--reach", "agent", "--agent-key-file", str(lab.folder / "agent.key")]
        super().__init__(lab, folder, names, options=options, **how)

    def set_hosts(self, hosts: Sequence[str]) -> None:
        """Replace the hosts file whole."""
        new = self.hosts_file.with_suffix(".new")
        new.write_text("".join(f"{name_of(host)}:1 {self.lab.address(host)}\n" for host in hosts))
        new.replace(self.hosts_file)

    def kill_worker(self, host: str) -> None:
        """SIGKILL the worker on a host."""
        pid = [e["pid"] for e in self.events("driver.worker_ready")
               if e["worker"].split("/")[0] == name_of(host)][-1]
        self.lab.inside(host, "kill", "-9", str(pid))

    def kill_agent(self, host: str) -> None:
        """SIGKILL the agent of a host, and nothing that it has started."""
        process = self.lab.hosts[host].agent
        assert process
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        process.wait()

    def processes(self, host: str) -> str:
        """Return the command lines of all processes of a host."""
        return self.lab.inside(host, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")


def name_of(host: str) -> str:
    """Return the name of a host of the lab: that of one incarnation."""
    return f"{host}-x7k2q"


def test_a_fleet_without_ssh_outlives_every_end(lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """A worker is killed: its exit is seen at once, and its host gets another one. An agent is
    killed: its worker trains on, in the same generation. A host loses its power: the others go on.
    A host leaves the list: no step is lost. The driver is killed: its workers end by themselves or
    by the supervisor's order, and the next attempt goes on with the same hosts.
    """
    fleet = Pods(lab, tmp_path, FOUR, job=JOB)
    lab.boot(COORDINATOR, *FOUR)
    with fleet:
        fleet.wait_for_step(3)
        assert all(e["by_agent"] for e in fleet.events("driver.worker_started"))
        for host in ("h1", COORDINATOR):
            assert "ssh" not in lab.inside(host, "sh", "-c", "cat /proc/[0-9]*/comm; true")
            assert (lab.folder / "agent.key").read_text() not in fleet.processes(host)
        generation = fleet.wait_for_world(4)
        fleet.kill_worker("h3")
        gone = fleet.wait_for("its end", lambda: fleet.events("driver.worker_gone"))[0]
        assert (gone["host"], gone["exit_code"]) == (name_of("h3"), -9)
        generation = fleet.wait_for_world(4, after=generation)

        fleet.kill_agent("h2")
        fleet.wait_for_step(fleet.newest_step() + 3)
        lab.hosts["h2"].start_agent()
        wait_for("the next agent", lambda: lab.health("h2").facts["workers"])
        assert fleet.events("worker.generation_started")[-1]["generation"] == generation

        lab.power_cut("h4")
        generation = fleet.wait_for_world(3, after=generation)
        fleet.set_hosts(FOUR[1:3])
        generation = fleet.wait_for_world(2, after=generation)
        assert len(fleet.lost()) == 2, fleet.story()
        fleet.wait_for_step(fleet.newest_step() + 2)

        os.kill(fleet.driver_pid(), signal.SIGKILL)
        fleet.wait_for("next attempt", lambda: [
            e for e in fleet.events("worker.generation_started") if e["attempt"] == 2])
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=2)
        assert not fleet.events("run.host_not_reached"), fleet.story()
        print(fleet.story())
    assert result["attempts"] == 2


def test_no_worker_is_left_when_the_coordinator_comes_back(lab: Lab, tmp_path: Path,
                                                           twin_of: Twin) -> None:
    """The coordinator loses its power, so no worker hears the end of its connection. Each ends by
    itself, or by the next coordinator's order to its agent, before the next attempt starts."""
    fleet = Pods(lab, tmp_path, FOUR, job=JOB)
    lab.boot(COORDINATOR, *FOUR)
    with fleet:
        fleet.wait_for_step(8)
        lab.power_cut(COORDINATOR)
        lab.boot(COORDINATOR)
        fleet.start()
        fleet.wait_for("restart", lambda: [
            e for e in fleet.events("state.checkpoint_restored") if e["attempt"] == 2])
        assert len(fleet.events("driver.worker_started")) == 8
        for host in FOUR:
            assert len(lab.health(host).facts["workers"]) == 1  # type: ignore[arg-type]
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=0)
        assert not fleet.events("run.host_not_reached"), fleet.story()
        print(fleet.story())
    assert result["attempts"] == 2

"""Runs whose hosts are agents of this machine, each on a port of its own: names, addresses, agents
and slots that change under workers. tests/test_no_ssh.py has hosts with networks of their own.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster import Cluster, is_running
from ports import free_port
from waiting import wait_for

from elastic_trainer.discovery.client import AgentUnreachable, ask, read_key

Twin = Callable[..., str]
ROOT = Path(__file__).resolve().parent.parent
JOB = ("--steps", "90", "--step-s", "0.5", "--checkpoint-every", "5")
FOUR = ("a-1", "b-1", "c-1", "d-1")


class Agents:
    """The agents of a run's hosts."""

    def __init__(self, folder: Path):
        self.key = folder / "key"
        self.key.touch(mode=0o600)
        self.key.write_text(secrets.token_hex(32))
        self.living: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, int] = {}
        self.ends = ExitStack()

    def start(self, host: str) -> None:
        """Start an agent, at the port of the one before it."""
        port = self.ports.setdefault(host, free_port())
        self.living[host] = self.ends.enter_context(subprocess.Popen(
            [sys.executable, "-m", "elastic_trainer.discovery", "agent", "--bind", "127.0.0.1",
             "--port", str(port), "--key-file", self.key, "--folder", "/", "--no-metadata",
             "--starts-workers"], cwd=ROOT, stdout=subprocess.DEVNULL))
        self.ends.callback(self.living[host].kill)
        wait_for(f"the agent of {host}", lambda: self.workers(host) is not None)

    def kill(self, host: str) -> None:
        """SIGKILL an agent, and nothing that it has started."""
        self.living[host].kill()
        self.living[host].wait()

    def workers(self, host: str) -> int | None:
        """Return how many workers an agent counts; None: it does not answer."""
        try:
            return len(ask(f"127.0.0.1:{self.ports[host]}", read_key(self.key), 5.0)
                       .facts["workers"])  # type: ignore[arg-type]
        except AgentUnreachable:
            return None


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Four agents that end with the test."""
    agents = Agents(tmp_path)
    with agents.ends:
        for host in "abcd":
            agents.start(host)
        yield agents


class Run(Cluster):
    """A run with these agents. Host b-1 is the first life of the host at b's address."""

    def __init__(self, folder: Path, agents: Agents):
        self.agents = agents
        super().__init__(folder, names=FOUR, job=JOB, forks=False, options=[
            "--reach", "agent", "--agent-key-file", str(agents.key)])

    def set_hosts(self, hosts: Sequence[str]) -> None:
        """Replace the hosts file whole. `hosts` are names, with slots if they are not 1."""
        new = self.hosts_file.with_suffix(".new")
        lines = [host if ":" in host else f"{host}:1" for host in hosts]
        new.write_text("".join(f"{line} 127.0.0.1:{self.agents.ports[line[0]]}\n"
                               for line in lines))
        new.replace(self.hosts_file)

    def pid_on(self, host: str) -> int:
        """Return the pid of the worker on a host."""
        [pid] = [pid for name, pid in self.live_pids().items() if name.startswith(f"{host}/")]
        return pid


def test_names_addresses_agents_and_slots_change_under_workers(
        agents: Agents, tmp_path: Path, twin_of: Twin) -> None:
    """An agent is killed and the next one is there: nothing happens. A host's next life has its
    address while the worker of the life before still runs there: that one leaves, the other joins.
    Slots come and go. No worker is lost, no step done again. Then the driver is killed while the
    agents of two workers are dead: no worker of the old attempt lives beside the new one."""
    with Run(tmp_path, agents) as run:
        generation = run.wait_for_world(4)
        agents.kill("a")
        run.wait_for_step(5)
        agents.start("a")
        wait_for("its worker", lambda: agents.workers("a") == 1)
        old = run.pid_on("b-1")
        run.set_hosts(("a-1", "b-2", "c-1", "d-1"))
        run.wait_for("the next life", lambda: [
            e for e in run.events("driver.generation_formed")
            if set(e["hosts"]) == {"a-1", "b-2", "c-1", "d-1"}])
        wait_for("its end", lambda: not is_running(old))
        generation = run.events("driver.generation_formed")[-1]["generation"]
        run.set_hosts(("a-1", "b-2", "c-1:2", "d-1"))
        generation = run.wait_for_world(5, after=generation)
        assert agents.workers("c") == 2
        run.set_hosts(("a-1", "b-2", "c-1", "d-1"))
        generation = run.wait_for_world(4, after=generation)
        run.wait_for("the end of one", lambda: agents.workers("c") == 1)
        run.wait_for("its event", lambda: len(run.live_pids()) == 4)
        assert not run.lost() and not run.events("worker.step_redone"), run.story()

        agents.kill("a")
        agents.kill("d")
        before = list(run.live_pids().values())
        assert len(before) == 4, run.story()
        os.kill(run.driver_pid(), signal.SIGKILL)
        run.wait_for("a start", lambda: [e for e in run.events("driver.worker_started")
                                         if e["attempt"] == 2])
        assert not any(map(is_running, before)), run.story()
        agents.start("a")
        agents.start("d")
        run.wait_for("next attempt", lambda: [
            e for e in run.events("worker.generation_started")
            if e["attempt"] == 2 and e["size"] == 4])
        assert run.finish() == 0
        result = run.assert_nothing_lost(twin_of(*JOB), victims=len(
            [e for e in run.lost() if e["attempt"] == 2 and e["reason"] == "boot_failed"]))
    assert result["attempts"] == 2

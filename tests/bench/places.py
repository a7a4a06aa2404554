"""What a run on Ray, Google Cloud or Azure costs beside one on local hosts: a killed worker, a
notice, a host without power, and new hosts, of 3 workers.

    .venv/bin/python tests/bench/places.py [--rounds 2] [--places gcp,azure,ray]

All arms have the same job and the same kind of hosts: network namespaces of this machine, whose
agents start the workers. In each round a worker is killed and comes back; a host leaves with a
notice, and a new one comes; a host loses its power, and a new one comes. The notice and the list:

- local: the bench writes the hosts file
- ray: `ray drain-node` of a real Ray; a new host is a new node
- gcp: `instance/preempted` of the metadata service, and the list API of the tests
- azure: scheduled events (Preempt), and the list API of the tests

All times are of events:

- kill_s, power_s, drain_pause_s, join_pause_s: the pause of the world (`worker.pause_ended`),
  without the time until it is noticed, and without the repeated step
- kill_noticed_s, power_noticed_s: the time until it is noticed
- boot_s: a worker's boot on a host that is up, in place of the killed one
- drain_s: from the host's leave of the driver's list to the next generation
- join_s: from the host's entry into the list to the generation with its worker, which boots

Last line: one JSON object: for each place and figure the medians of the place and of local hosts,
and their ratio.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
import netlab
from cloud_apis import AzureApi, CloudApi, GoogleApi
from metadata_server import AzureMetadata, GoogleMetadata, MetadataServer
from netlab import COORDINATOR, Fleet, Lab
from ray_lab import RayFleet, RayLab

JOB = ("--steps", "100000", "--step-s", "0.05", "--checkpoint-every", "1000")
FIRST = ["h1", "h2", "h3"]
CLOUDS: dict[str, tuple[type[CloudApi], type[MetadataServer], list[str]]] = {
    "gcp": (GoogleApi, GoogleMetadata, ["--group", "workers"]),
    "azure": (AzureApi, AzureMetadata, ["--scale-set", "workers"])}
NOTICES_SOON = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
"""Ray's head takes a silent node for lost after seconds, and moves its agent; by default after a
minute."""
Figures = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A run, and how its place gives a notice and a new host."""

    lab: Lab
    fleet: Fleet
    notify: Callable[[str], object]
    add: Callable[[str, str], object]
    """The new host, and the one that it replaces."""


def play(name: str, arm: Arm, rounds: int) -> Figures:
    """Kill a worker, take a host with a notice and one without; return the times."""
    fleet, figures, hosts = arm.fleet, defaultdict[str, list[float]](list), list(FIRST)
    names = (f"h{number}" for number in itertools.count(4))
    generation = fleet.wait_for_world(3)
    fleet.wait_for_step(0)
    for _ in range(rounds):
        for kind in ("kill", "drain", "power"):
            fleet.wait_for_step(fleet.newest_step() + 8)
            victim = hosts[1]
            if kind == "kill":
                kill_worker(arm, victim)
            elif kind == "drain":
                arm.notify(victim)
            else:
                arm.lab.power_cut(victim)
            generation = fleet.wait_for_world(2, after=generation)
            paused = pause(fleet, generation)
            if kind == "drain":
                left = fleet.events("driver.host_removed")[-1]["time"]
                figures["drain_s"].append(formed(fleet, generation) - left)
                figures["drain_pause_s"].append(of_world(paused))
            else:
                figures[f"{kind}_s"].append(of_world(paused))
                figures[f"{kind}_noticed_s"].append(paused.get("noticing_s", 0.0))
            if kind != "kill":
                if kind == "drain":
                    arm.lab.power_cut(victim)  # its workers have left
                arm.add(new := next(names), victim)
                hosts = [*(host for host in hosts if host != victim), new]
            generation = fleet.wait_for_world(3, after=generation)
            if kind == "kill":
                figures["boot_s"].append(fleet.events("driver.worker_ready")[-1]["boot_s"])
            else:
                entered = fleet.events("driver.host_added")[-1]["time"]
                figures["join_s"].append(formed(fleet, generation) - entered)
                figures["join_pause_s"].append(of_world(pause(fleet, generation)))
        print(name, {figure: bench.rounded(times) for figure, times in figures.items()},
              flush=True)
    return figures


def kill_worker(arm: Arm, host: str) -> None:
    """Kill the worker on a host of the lab."""
    lines = [line.split() for line in arm.fleet.hosts_file.read_text().splitlines()]
    address = arm.lab.address(host)
    name = next((words[0].rpartition(":")[0] for words in lines
                 if words[-1].partition(":")[0] == address), host)
    pid = [e["pid"] for e in arm.fleet.events("driver.worker_ready")
           if e["worker"].startswith(f"{name}/")][-1]
    arm.lab.inside(host, "kill", "-9", str(pid))


def pause(fleet: Fleet, generation: int) -> dict[str, Any]:
    """Return the pause of a generation."""
    found: dict[str, Any] = fleet.wait_for("end of the pause", lambda: [
        e for e in fleet.events("worker.pause_ended") if e["generation"] >= generation])[0]
    return found


def of_world(paused: dict[str, Any]) -> float:
    """Return the part of a pause that the change of the world takes."""
    return float(paused["duration_s"] - paused.get("noticing_s", 0) - paused.get("redoing_s", 0))


def formed(fleet: Fleet, generation: int) -> float:
    return next(float(e["time"]) for e in fleet.events("driver.generation_formed")
                if e["generation"] == generation)


@contextmanager
def local(folder: Path) -> Iterator[Arm]:
    """A run on local hosts."""
    with Lab(folder / "lab") as lab:
        lab.has_sshd = False
        lab.boot(COORDINATOR, *FIRST)
        listed = list(FIRST)
        with Fleet(lab, folder / "fleet", FIRST, job=JOB, min_workers=1,
                   options=by_agent(lab)) as fleet:
            def notify(host: str) -> None:
                listed.remove(host)
                fleet.set_hosts(listed)

            def add(new: str, old: str) -> None:
                if old in listed:
                    listed.remove(old)
                lab.boot(new)
                listed.append(new)
                fleet.set_hosts(listed)

            yield Arm(lab=lab, fleet=fleet, notify=notify, add=add)


@contextmanager
def on_ray(folder: Path) -> Iterator[Arm]:
    """A run on a real Ray."""
    with RayLab(folder / "lab") as lab:
        lab.seen |= NOTICES_SOON
        with RayFleet(lab, folder / "fleet", FIRST, job=JOB) as fleet:
            yield Arm(lab=lab, fleet=fleet, notify=lambda host: lab.drain_node(host, 60),
                      add=lambda new, _: lab.add_nodes(new))


@contextmanager
def on_cloud(name: str, folder: Path) -> Iterator[Arm]:
    """A run on machines with a cloud's metadata service, which its list API tells."""
    api_of, metadata_of, chosen = CLOUDS[name]
    with Lab(folder / "lab") as lab:
        lab.cloud, lab.has_sshd = (name, metadata_of), False
        lab.boot(COORDINATOR, *FIRST)
        hosts_file = folder / "fleet" / "hosts"
        fleet = Fleet(lab, folder / "fleet", FIRST, job=JOB, min_workers=1, options=by_agent(lab),
                      discovery=f"{sys.executable} -S -m elastic_trainer.discovery hosts-file "
                                f"{hosts_file}")
        hosts_file.unlink()
        fleet.run_dir.mkdir(parents=True)
        with lab.network_of(COORDINATOR):
            api, own = api_of(("127.0.0.1", 7001)), metadata_of(("127.0.0.1", 7002))
        starts = itertools.count(1)

        def add(new: str, old: str) -> None:
            """Let the group replace a machine: Google's under the old name."""
            number = next(starts)
            place_name = members.pop(old) if old in members else f"workers_{number}"
            if name == "azure":
                api.machines.pop(place_name, None)
                place_name = f"workers_{number}"
            if new not in lab.hosts:
                lab.boot(new)
            members[new] = place_name
            api.add(place_name, lab.address(new), number)

        members: dict[str, str] = {}
        with api, own:
            for host in FIRST:
                add(host, "")
            lab.start(COORDINATOR, [
                sys.executable, "-m", "elastic_trainer.discovery", "poll", name, *chosen,
                "--api", api.endpoint, "--metadata", own.endpoint, "--interval", "1",
                "--hosts-file", hosts_file, "--key-file", lab.folder / "agent.key",
                "--events", fleet.run_dir / "events.jsonl"], env=fleet.env)
            with fleet:
                yield Arm(lab=lab, fleet=fleet, add=add,
                          notify=lambda host: lab.metadata[host].announce(""))


def by_agent(lab: Lab) -> list[str]:
    return ["--elastic-timeout", "600", "--reach", "agent", "--agent-key-file",
            str(lab.folder / "agent.key")]


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the local arm, then each place's."""
    netlab.prepare()
    with local(folder / "local") as arm:
        beside = play("local", arm, options.rounds)
    found: dict[str, Any] = {}
    for name in options.places.split(","):
        opened = on_ray(folder / name) if name == "ray" else on_cloud(name, folder / name)
        with opened as arm:
            theirs = play(name, arm, options.rounds)
        pairs = {figure: [statistics.median(times) for times in (theirs[figure], beside[figure])]
                 for figure in beside}
        found[name] = {figure: [*bench.rounded(pair), round(pair[0] / pair[1], 2)
                                if pair[1] > 0.001 else None] for figure, pair in pairs.items()}
    return found


if __name__ == "__main__":
    bench.run(measure, rounds=2, places="gcp,azure,ray")

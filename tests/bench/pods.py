"""What a drain, a loss and a join cost on pods, beside local hosts; and the coordinator's memory.

    .venv/bin/python tests/bench/pods.py

Both arms run the same job with 4 workers and no standby, one after the other. On pods: the
manifests of deploy/kubernetes on a real API server; a pod is evicted, and one is deleted without
grace; the Job replaces each. Local hosts: a host is taken out of the hosts file, and a worker gets
SIGKILL; each host comes back.

A pause is the longest time between two finished steps around the change, less a step's usual time
before. The time until a lost pod is replaced is the Job controller's, and no part of a pause.

Last line: one JSON object with the medians drain_s, loss_s, join_s, local_drain_s, …, the ratios
drain_ratio, …; coordinator_mib, the memory of the coordinator's pod with the pages that its
processes share counted once, as the limit of a pod counts them; and the resident memory poller_mib,
driver_mib (supervisor, driver, and a tunnel for each worker), log_mib.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench
import netlab
import psutil
from cluster import Cluster
from pod_fleet import PodFleet, started

STEPS_AFTER = 3
JOB = ("--steps", "100000", "--step-s", "0.2", "--checkpoint-every", "50")


def pauses(fleet: Cluster, changes: list[tuple[str, Callable[[], None]]],
           back: Callable[[], None]) -> Iterator[tuple[str, float]]:
    """Make each change, let the fleet be whole again, and yield the pauses of both."""
    seen = wait_for_world(fleet, 4, 0.0)
    fleet.wait_for_step(0)
    for name, change in changes:
        fleet.wait_for_step(int(fleet.events("worker.step_committed")[-1]["step"]) + 8)
        changed_at = time.time()
        change()
        seen = wait_for_world(fleet, 3, seen)
        yield name, print_pause(name, pause(fleet, changed_at))
        back_at = time.time()
        back()
        seen = wait_for_world(fleet, 4, seen)
        yield "join", print_pause("join", pause(fleet, back_at))


def print_pause(name: str, seconds: float) -> float:
    print(f"{name}: a pause of {seconds:.3f} s", flush=True)
    return seconds


def wait_for_world(fleet: Cluster, size: int, after: float) -> float:
    """Wait until a world of this size has formed; returns when."""
    return float(fleet.wait_for(f"world of {size}", lambda: [
        e["time"] for e in fleet.events("worker.generation_started")
        if e["size"] == size and e["time"] > after])[-1])


def pause(fleet: Cluster, since: float) -> float:
    """Return the pause between a moment and STEPS_AFTER steps from now."""
    here = time.time()
    end = fleet.wait_for("steps", lambda: [e["time"] for e in fleet.committed()
                                           if e["time"] > here][STEPS_AFTER - 1:])[0]
    times = [e["time"] for e in fleet.committed() if e["time"] > since - 20]
    return bench.longest_pause(times, since, end)


def on_pods(folder: Path, turns: int) -> tuple[list[tuple[str, float]], dict[str, float]]:
    """Return the pauses of pods, and the coordinator's memory."""
    netlab.prepare()
    with netlab.Lab(folder / "lab") as lab, started(lab, folder, JOB, workers=4,
                                                    nodes=7) as fleet:
        changes = [("drain", lambda: fleet.evict(fleet.workers()[0])),
                   ("loss", lambda: fleet.delete_at_once(fleet.workers()[1]))] * turns
        return list(pauses(fleet, changes, lambda: None)), memory(fleet)


def local(folder: Path, turns: int) -> list[tuple[str, float]]:
    """Return the pauses of local hosts."""
    with Cluster(folder, job=JOB, min_workers=1, options=["--standby", "0"]) as cluster:
        hosts = cluster.all_hosts

        def lose() -> None:
            cluster.signal_worker(hosts[1], signal.SIGKILL)

        changes = [("drain", lambda: cluster.set_hosts(hosts[1:])), ("loss", lose)] * turns
        return list(pauses(cluster, changes, lambda: cluster.set_hosts(hosts)))


def memory(fleet: PodFleet) -> dict[str, float]:
    """Return the memory of the coordinator's containers, in MiB."""
    assert fleet.kubelet
    pod = next(one for one in fleet.kubelet.running.values() if one.name == fleet.coordinator())
    # The tests' own unshare and shell, above a container's processes, are no part of it.
    sizes = {name: [one.memory_full_info() for one
                    in psutil.Process(process.pid).children(recursive=True)
                    if "python" in one.name() or "elastic" in one.name()]
             for name, process in (*pod.containers.items(), *pod.sidecars.items())}
    return {"coordinator_mib": round(sum(
        one.pss for found in sizes.values() for one in found) / 2**20, 1)} | {
            f"{name}_mib": round(sum(one.rss for one in found) / 2**20, 1)
            for name, found in sizes.items()}


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    found, sizes = on_pods(folder / "pods", options.turns)
    beside = local(folder / "local", options.turns)
    figures: dict[str, Any] = {}
    for name in ("drain", "loss", "join"):
        ours, theirs = (statistics.median(seconds for one, seconds in arm if one == name)
                        for arm in (found, beside))
        figures |= {f"{name}_s": round(ours, 3), f"local_{name}_s": round(theirs, 3),
                    f"{name}_ratio": round(ours / theirs, 2) if theirs else None}
    return figures | sizes


if __name__ == "__main__":
    bench.run(measure, turns=3)

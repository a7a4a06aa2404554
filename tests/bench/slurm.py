"""What a run on Slurm costs beside one on local hosts: recovery, drain and join, of 3 workers.

    .venv/bin/python tests/bench/slurm.py [--rounds 3]

Both arms do the same: a worker is killed and comes back, then a host leaves with a notice and comes
back. On Slurm the host leaves because a job of a higher priority preempts its task, and comes back
because the task is requeued; a local host leaves the hosts file. All times are of events:

- recovery: the pause after a death (`worker.pause_ended`)
- drain: from the host's leave of the driver's list to the next generation, and its pause
- join: from the host's entry to the generation with its worker, which boots

The memory is the sum of the proportional sizes of the coordinator's processes: its batch script,
the poller, the supervisor, the driver.

Last line: one JSON object with both arms' medians, their ratios, and coordinator_mib.
"""

from __future__ import annotations

import argparse
import signal
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench
import netlab
import slurm_lab
from cluster import Cluster
from netlab import Lab
from slurm_lab import Slurm, SlurmFleet

JOB = ("--steps", "100000", "--step-s", "0.05", "--checkpoint-every", "1000")
NODES = ["h1", "h2", "h3"]
Figures = dict[str, list[float]]


def play(cluster: Cluster, rounds: int, kill: Callable[[], object],
         take: Callable[[], object]) -> Figures:
    """Kill a worker, and take a host with a notice, again and again; return the times."""
    figures: Figures = defaultdict(list)
    generation = cluster.wait_for_world(3)
    for strike in [kill, take] * rounds:
        cluster.wait_for_step(newest_step(cluster) + 5)
        strike()
        generation = cluster.wait_for_world(2, after=generation)
        cluster.wait_for("pause", lambda since=generation: pauses(cluster, since))
        begun = formed(cluster, generation)
        if strike is kill:
            figures["recovery_s"].append(pauses(cluster, generation)[0]["duration_s"])
        else:
            left = cluster.events("driver.host_removed")[-1]["time"]
            figures["drain_s"].append(begun - left)
            figures["drain_pause_s"].append(pauses(cluster, generation)[0]["duration_s"])
        generation = cluster.wait_for_world(3, after=generation)
        if strike is take:
            entered = cluster.events("driver.host_added")[-1]["time"]
            figures["join_s"].append(formed(cluster, generation) - entered)
        print({name: bench.rounded(seconds) for name, seconds in figures.items()}, flush=True)
    return figures


def newest_step(cluster: Cluster) -> int:
    steps = cluster.events("worker.step_committed")
    return int(steps[-1]["step"]) if steps else 0


def pauses(cluster: Cluster, generation: int) -> list[dict[str, Any]]:
    """Return the pauses that have ended in a generation or after it."""
    return [e for e in cluster.events("worker.pause_ended") if e["generation"] >= generation]


def formed(cluster: Cluster, generation: int) -> float:
    return next(float(e["time"]) for e in cluster.events("driver.generation_formed")
                if e["generation"] == generation)


def on_slurm(folder: Path, rounds: int) -> tuple[Figures, float]:
    """Return the figures of a run on Slurm, and the MiB of its coordinator."""
    netlab.prepare()
    slurm_lab.prepare()
    with Lab(folder / "lab") as lab, Slurm(
            lab, folder / "slurm", {"spot": NODES, "cpu": ["h9"]}) as slurm, SlurmFleet(
            slurm, folder / "fleet", tasks=["--array=0-2", "--partition=spot"],
            job=JOB) as fleet:
        figures = play(fleet, rounds, lambda: fleet.signal_worker(
            next(host for host in fleet.hosts() if host.startswith("h2")), signal.SIGKILL),
            lambda: slurm.preempt("h1"))
        return figures, slurm.memory_mib("h9")


def on_local_hosts(folder: Path, rounds: int) -> Figures:
    """Return the figures of a run on loopback addresses."""
    with Cluster(folder, hosts=3, min_workers=1, job=JOB, limits="") as cluster:
        names = cluster.all_hosts

        def take() -> None:
            cluster.set_hosts(names[1:])
            cluster.wait_for_world(2, after=max(
                e["generation"] for e in cluster.events("worker.generation_started")))
            cluster.set_hosts(names)

        return play(cluster, rounds, lambda: cluster.signal_worker(names[1], signal.SIGKILL), take)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run both arms."""
    theirs = on_local_hosts(folder / "local", options.rounds)
    ours, memory_mib = on_slurm(folder, options.rounds)
    medians = {name: [statistics.median(arm[name]) for arm in (ours, theirs)] for name in theirs}
    return {**{f"{name}": bench.rounded(pair) for name, pair in medians.items()},
            "ratios": {name: round(pair[0] / pair[1], 2) for name, pair in medians.items()},
            "coordinator_mib": round(memory_mib, 1)}


if __name__ == "__main__":
    bench.run(measure, rounds=3)

"""How long a death costs: SIGKILL of a random rank out of 4, until the next finished step.

    .venv/bin/python tests/bench/recovery.py [--kills 10] [--peer-kills 3]

Ours: one run; a worker is killed, the world goes on with 3, its host gets a new worker, and when 4
train again the next one is killed. The peer: stock horovodrun with `hvd.elastic.run` and
`TorchState` at its defaults, a fresh job for each kill (it bans the host). Same model, same
machine, one after the other.

Last line: one JSON object with median_s, peer_median_s, ratio, second_victims, steps_redone_max.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bench
from cluster import Cluster
from stock_job import HOSTS, StockJob

PEER_DEADLINE_S = 120.0


class Losses(NamedTuple):
    """What losses cost."""

    seconds: list[float]
    """From each one to the next finished step."""
    redone: list[int]
    second_victims: int


def after_losses(cluster: Cluster, count: int, strike: Callable[[], str],
                 mend: Callable[[str], object] = lambda host: None) -> Losses:
    """Lose the worker of a host again and again. `strike` names the host; `mend` lets it come
    back."""
    seconds, redone, struck, generation = [], [], set(), 0
    for _ in range(count):
        generation = cluster.wait_for_world(4, after=generation)
        first = cluster.events("worker.step_committed")[-1:]
        cluster.wait_for_step((first[0]["step"] if first else 0) + 3)
        lost_at, members = time.time(), cluster.events("driver.generation_formed")[-1]["workers"]
        host = strike()
        struck |= {name for name in members if name.startswith(f"{host}/")}
        generation += 1
        after = cluster.wait_for("a step after the loss", lambda since=lost_at, new=generation: [
            e for e in cluster.committed(new) if e["time"] > since])
        seconds.append(after[0]["time"] - lost_at)
        redone.append(sum(e["time"] > lost_at for e in cluster.events("worker.step_redone")))
        print(f"ours: {host} lost, next step after {seconds[-1]:.3f} s", flush=True)
        mend(host)
    # A worker that goes some steps after a loss is its victim, too.
    cluster.wait_for_world(4, after=generation - 1)
    others = [e for e in cluster.lost() if e["worker"] not in struck]
    return Losses(seconds, redone, len(others) + len(cluster.events("worker.revives")))


def after_kills(folder: Path, kills: int, chance: random.Random, job: list[str],
                reduce: str = "exact") -> Losses:
    """Return what SIGKILL of a random worker costs."""
    with Cluster(folder, command=job, min_workers=1, options=["--reduce", reduce]) as cluster:
        def strike() -> str:
            cluster.signal_worker(victim := chance.choice(cluster.all_hosts), signal.SIGKILL)
            return victim

        return after_losses(cluster, kills, strike)


def peer(folder: Path, chance: random.Random) -> tuple[float, int]:
    """Run one stock job, kill one rank; return the seconds to the next finished step and healthy
    workers lost."""
    with StockJob(folder, HOSTS[:4]) as job:
        job.wait_for_step(5, 180)
        pids = job.pids()
        killed_at = time.time()
        os.kill(chance.choice(sorted(pids)), signal.SIGKILL)
        seconds = job.next_step_after(killed_at, 4, PEER_DEADLINE_S)
        return seconds, sum(not Path(f"/proc/{pid}").exists() for pid in pids) - 1


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run both arms."""
    chance = random.Random(options.seed)
    mine = after_kills(folder / "ours", options.kills, chance, bench.ENDLESS, options.reduce)
    theirs = []
    for number in range(options.peer_kills):
        theirs.append(peer(folder / f"peer-{number}", chance))
        print(f"peer: kill {number + 1}, next step after {theirs[-1][0]:.3f} s, {theirs[-1][1]} "
              f"healthy lost", flush=True)
    median_s = statistics.median(mine.seconds)
    peer_median_s = statistics.median(seconds for seconds, _ in theirs) if theirs else float("nan")
    return {"median_s": round(median_s, 3), "peer_median_s": round(peer_median_s, 3),
            "ratio": round(median_s / peer_median_s, 4), "second_victims": mine.second_victims,
            "steps_redone_max": max(mine.redone), "seconds": bench.rounded(mine.seconds),
            "peer_seconds": bench.rounded(seconds for seconds, _ in theirs),
            "peer_second_victims": sum(lost for _, lost in theirs),
            "met": (median_s < 1.0 and median_s < peer_median_s / 10
                    and not mine.second_victims and max(mine.redone) <= 1)}


if __name__ == "__main__":
    bench.run(measure, kills=10, peer_kills=3, reduce=("exact", "ring"), seed=0)

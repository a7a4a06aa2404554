"""How long the survivors pause when a host joins: 4 workers become 5.

    .venv/bin/python tests/bench/join.py [--joins 3] [--cold-joins 2] [--peer-joins 1]

The pause is the longest time between two finished steps from the moment the hosts file names the
fifth host until three steps after it trains, less a step's usual time before. In the cold arm no
standby waits on the fifth host, as none does for the peer: its worker boots while the others train,
and then joins. The peer: stock horovodrun with `hvd.elastic.run` and `TorchState`, at its defaults.
Same model, same machine, one after the other.

A peer that does not train with five within 180 s has failed: its seconds are null, and where that
is half of the peer's joins or more there is no median to compare with, and nothing is met.

Last line: one JSON object with median_s, median_cold_s, peer_median_s, ratio, ratio_cold,
peer_failed, met.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import bench
from cluster import Cluster
from stock_job import HOSTS, StockJob

STEPS_AFTER = 3
PEER_DEADLINE_S = 180.0


def ours(folder: Path, joins: int, standby: int) -> list[float]:
    """Return the pause of each join, with `standby` workers standing by. The fifth host leaves
    between two joins."""
    pauses, generation = [], 0
    with Cluster(folder, hosts=5, start_with=4, command=bench.ENDLESS,
                 options=["--standby", str(standby)]) as cluster:
        for number in range(joins):
            generation = cluster.wait_for_world(4, after=generation)
            if standby:
                cluster.wait_for("standby",
                                 lambda n=number: len(cluster.events("standby.booted")) > n)
            started = len(cluster.events("worker.step_committed"))
            cluster.wait_for("steps",
                             lambda n=started: len(cluster.events("worker.step_committed")) > n + 8)
            joined_at = time.time()
            cluster.set_hosts(cluster.all_hosts)
            generation = cluster.wait_for_world(5, after=generation)
            with_five = cluster.wait_for("steps", lambda g=generation: [
                e["time"] for e in cluster.committed(g) if e["generation"] == g][STEPS_AFTER - 1:])
            times = [e["time"] for e in cluster.committed() if e["time"] > joined_at - 20]
            pauses.append(bench.longest_pause(times, joined_at, with_five[0]))
            print(f"ours, {standby} standing by: join {number + 1}, a pause of {pauses[-1]:.3f} s",
                  flush=True)
            cluster.set_hosts(cluster.all_hosts[:4])
    return pauses


def peer(folder: Path) -> float:
    """Return the pause of one join; infinite if none was seen in PEER_DEADLINE_S."""
    with StockJob(folder, HOSTS[:4]) as job:
        job.wait_for_step(8, 180)
        joined_at = time.time()
        job.set_hosts(HOSTS)
        with_five = job.wait(lambda: sorted(line.time for line in job.lines() if line.size == 5
                                            and line.rank == 0)[STEPS_AFTER - 1:], PEER_DEADLINE_S)
        times = sorted(line.time for line in job.lines() if line.rank == 0)
        return bench.longest_pause(times, joined_at, with_five[0]) if with_five else math.inf


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run all arms."""
    mine = ours(folder / "ours", options.joins, standby=1)
    cold = ours(folder / "cold", options.cold_joins, standby=0)
    theirs = []
    for number in range(options.peer_joins):
        theirs.append(peer(folder / f"peer-{number}"))
        print(f"peer: join {number + 1}, " + (
            f"a pause of {theirs[-1]:.3f} s" if math.isfinite(theirs[-1]) else
            f"failed: it did not train with five in {PEER_DEADLINE_S:.0f} s"), flush=True)
    median_s, cold_s, peer_median_s = (statistics.median(pauses) for pauses in (mine, cold, theirs))
    is_measured = math.isfinite(peer_median_s)
    return {"median_s": round(median_s, 3), "median_cold_s": round(cold_s, 3),
            "peer_median_s": round(peer_median_s, 3) if is_measured else None,
            "ratio": round(median_s / peer_median_s, 4) if is_measured else None,
            "ratio_cold": round(cold_s / peer_median_s, 4) if is_measured else None,
            "seconds": bench.rounded(mine), "cold_seconds": bench.rounded(cold),
            "peer_seconds": bench.rounded(theirs), "peer_failed": sum(map(math.isinf, theirs)),
            "met": is_measured and median_s < 1.0 and median_s < peer_median_s / 10}


if __name__ == "__main__":
    bench.run(measure, joins=3, cold_joins=2, peer_joins=1)

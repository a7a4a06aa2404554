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
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bounded import bounded

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from cluster import Cluster  # noqa: E402
from stock_job import HOSTS, StockJob  # noqa: E402

STEPS_AFTER = 3
PEER_DEADLINE_S = 180.0


def pause(times: list[float], since: float, until: float) -> float:
    """Return the longest gap between steps that overlaps [since, until], less the median gap before
    it."""
    gaps = list(zip(times, times[1:], strict=False))
    usual = statistics.median(b - a for a, b in gaps if b <= since)
    return max(b - a for a, b in gaps if b > since and a < until) - usual


def ours(folder: Path, joins: int, standby: int) -> list[float]:
    """Return the pause of each join, with `standby` workers standing by. The fifth host leaves
    between two joins."""
    pauses, generation = [], 0
    job = [sys.executable, str(HERE / "jobs" / "mlp.py"), "--steps", "1000000"]
    with Cluster(folder, hosts=5, start_with=4, command=job, options=["--standby",
                                                                      str(standby)]) as cluster:
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

            def with_five(g: int = generation) -> list[float]:
                return [e["time"] for e in cluster.events("worker.step_committed")
                        if e["generation"] == g and not e.get("repeated")]

            cluster.wait_for("steps", lambda seen=with_five: len(seen()) >= STEPS_AFTER)
            times = [
                e["time"] for e in cluster.events("worker.step_committed") if not e.get("repeated")
            ]
            pauses.append(
                pause([t for t in times if t > joined_at - 20], joined_at,
                      with_five()[STEPS_AFTER - 1]))
            print(f"ours, {standby} standing by: join {number + 1}, a pause of {pauses[-1]:.3f} s",
                  flush=True)
            cluster.set_hosts(cluster.all_hosts[:4])
    return pauses


def peer(folder: Path) -> float:
    """Return the pause of one join; infinite if none was seen in PEER_DEADLINE_S."""
    with StockJob(folder, HOSTS[:4]) as job:
        assert job.wait(lambda: any(line.step >= 8 for line in job.lines()), 180), job.output()
        joined_at = time.time()
        job.set_hosts(HOSTS)

        def with_five() -> list[float]:
            return sorted(line.time for line in job.lines() if line.size == 5 and line.rank == 0)

        if not job.wait(lambda: len(with_five()) >= STEPS_AFTER, PEER_DEADLINE_S):
            return float("inf")
        times = sorted(line.time for line in job.lines() if line.rank == 0)
        return pause(times, joined_at, with_five()[STEPS_AFTER - 1])


def main() -> None:
    """Run both arms and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--joins", type=int, default=3)
    parser.add_argument("--cold-joins", type=int, default=2)
    parser.add_argument("--peer-joins", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mine = ours(Path(folder), options.joins, standby=1)
    with tempfile.TemporaryDirectory() as folder:
        cold = ours(Path(folder), options.cold_joins, standby=0)
    theirs = []
    for number in range(options.peer_joins):
        with tempfile.TemporaryDirectory() as folder:
            theirs.append(peer(Path(folder)))
            print(f"peer: join {number + 1}, " + (f"a pause of {theirs[-1]:.3f} s" if math.isfinite(
                theirs[-1]) else f"failed: it did not train with five in {PEER_DEADLINE_S:.0f} s"),
                  flush=True)
    median_s, cold_s, peer_median_s = (statistics.median(pauses) for pauses in (mine, cold, theirs))
    is_measured = math.isfinite(peer_median_s)
    print(
        json.dumps({
            "median_s": round(median_s, 3), "median_cold_s": round(cold_s, 3),
            "peer_median_s": round(peer_median_s, 3) if is_measured else None,
            "ratio": round(median_s / peer_median_s, 4) if is_measured else None,
            "ratio_cold": round(cold_s / peer_median_s, 4) if is_measured else None,
            "seconds": [round(s, 3) for s in mine], "cold_seconds": [round(s, 3) for s in cold],
            "peer_seconds": [round(s, 3) if math.isfinite(s) else None
                             for s in theirs], "peer_failed": sum(math.isinf(s) for s in theirs),
            "met": is_measured and median_s < 1.0 and median_s < peer_median_s / 10
        }))


if __name__ == "__main__":
    sys.exit(bounded(main))

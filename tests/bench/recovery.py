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
import json
import os
import random
import signal
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

PEER_DEADLINE_S = 120.0


def after_kills(folder: Path, kills: int, chance: random.Random, job: list[str],
                reduce: str = "exact") -> dict[str, list[float]]:
    """Return the seconds from each kill to the next finished step, and what else it cost."""
    seconds, redone, struck = [], [], set()
    with Cluster(folder, command=job, min_workers=1, options=["--reduce", reduce]) as cluster:
        generation = 0
        for _ in range(kills):
            generation = cluster.wait_for_world(4, after=generation)
            first = cluster.events("worker.step_committed")[-1:]
            cluster.wait_for_step((first[0]["step"] if first else 0) + 3)
            killed_at = time.time()
            victim = chance.choice(cluster.all_hosts)
            struck.add(cluster.signal_worker(victim, signal.SIGKILL))

            def after_the_kill(since: float = killed_at,
                               old: int = generation) -> list[dict[str, float]]:
                return [e for e in cluster.events("worker.step_committed")
                        if e["generation"] > old and not e.get("repeated") and e["time"] > since]

            cluster.wait_for("a step after the kill", after_the_kill)
            seconds.append(after_the_kill()[0]["time"] - killed_at)
            redone.append(
                len([e for e in cluster.events("worker.step_redone") if e["time"] > killed_at]))
            generation += 1
            print(f"ours: rank on {victim} killed, next step after {seconds[-1]:.3f} s", flush=True)
        # Also who goes some steps after a kill is its victim.
        cluster.wait_for_world(4, after=generation - 1)
        second = [e for e in cluster.lost() if e["pid"] not in struck]
        revived = cluster.events("worker.revives")
    return {"seconds": seconds, "redone": redone, "second_victims": [len(second) + len(revived)]}


def peer(folder: Path, chance: random.Random) -> tuple[float, int]:
    """Run one stock job, kill one rank; return the seconds to the next finished step and healthy
    workers lost."""
    with StockJob(folder, HOSTS[:4]) as job:
        assert job.wait(lambda: any(line.step >= 5 for line in job.lines()), 180), job.output()
        pids = job.pids()
        killed_at = time.time()
        os.kill(chance.choice(sorted(pids)), signal.SIGKILL)
        seconds = job.next_step_after(killed_at, 4, PEER_DEADLINE_S)
        return seconds, sum(not Path(f"/proc/{pid}").exists() for pid in pids) - 1


def main() -> None:
    """Run both arms and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--peer-kills", type=int, default=3)
    parser.add_argument("--reduce",
                        choices=("exact", "ring"),
                        default="exact",
                        help="the peer's is a ring (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        job = [sys.executable, str(HERE / "jobs" / "mlp.py"), "--steps", "1000000"]
        mine = after_kills(Path(folder), options.kills, chance, job, options.reduce)
    theirs = []
    for number in range(options.peer_kills):
        with tempfile.TemporaryDirectory() as folder:
            theirs.append(peer(Path(folder), chance))
            print(
                f"peer: kill {number + 1}, next step after {theirs[-1][0]:.3f} s, {theirs[-1][1]} "
                f"healthy lost",
                flush=True)
    median_s = statistics.median(mine["seconds"])
    peer_median_s = statistics.median(seconds for seconds, _ in theirs) if theirs else float("nan")
    print(
        json.dumps({
            "median_s": round(median_s, 3), "peer_median_s": round(peer_median_s, 3),
            "ratio": round(median_s / peer_median_s, 4),
            "second_victims": sum(mine["second_victims"]), "steps_redone_max": max(mine["redone"]),
            "seconds": [round(s, 3)
                        for s in mine["seconds"]], "peer_seconds": [round(s, 3) for s, _ in theirs],
            "peer_second_victims": sum(lost for _, lost in theirs),
            "met": (median_s < 1.0 and median_s < peer_median_s / 10
                    and not sum(mine["second_victims"]) and max(mine["redone"]) <= 1)
        }))


if __name__ == "__main__":
    sys.exit(bounded(main))

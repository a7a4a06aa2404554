"""What a sharded optimizer keeps and costs, against the same run without sharding.

    .venv/bin/python tests/bench/sharded.py [--steps 24] [--rounds 2]

Four workers train the demo model with AdamW; the arms take turns. Then one of the four is killed
in each arm, and a fifth one joins in the sharded arm.

The last line is one JSON object with optimizer_bytes_ratio_4 (the most that a worker keeps, over
all; bar 0.55), step_ratio (medians; bar 1.08), recovery_ratio (from the kill to the next step; bar
1.5), join_bytes_ratio (what the newcomer receives, over 1/5 of the state), rollbacks, bits_equal.
"""

from __future__ import annotations

import argparse
import signal
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench
from cluster import Cluster

ARMS, WARM_UP_STEPS = ("none", "optimizer"), 4


def run(folder: Path, arm: str, steps: int, *, kills: bool = False,
        joins: bool = False) -> tuple[Cluster, list[float], list[int]]:
    """Train; return the run, the seconds of each step, and what each worker keeps at the end."""
    with Cluster(folder, hosts=5 if joins else 4, start_with=4,
                 command=bench.job("sharded.py", arm, str(steps), str(folder))) as cluster:
        if joins:
            cluster.wait_for_step(4)
            cluster.set_hosts(cluster.all_hosts)
        if kills:
            cluster.wait_for_step(steps // 2)
            cluster.signal_worker("127.0.0.2", signal.SIGKILL)
        assert cluster.wait(bench.LIMIT_S) == 0, cluster.story()
        seconds = [end - before for before, end in pairwise(
            e["time"] for e in cluster.committed() if e["step"] >= WARM_UP_STEPS)]
        return cluster, seconds, [int(file.read_text()) for file in folder.glob("held-*")]


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    held, pauses, hashes = dict[str, int](), dict[str, list[float]](), set[str]()
    rollbacks = 0
    for number in range(options.rounds):
        for arm in ARMS:
            cluster, its, kept = run(folder / f"{arm}-{number}", arm, options.steps)
            seconds[arm] += its
            held[arm] = max(kept)
            hashes.add(cluster.events("run.finished")[0]["weights_sha256"])
            cluster, _, _ = run(folder / f"{arm}-kill-{number}", arm, options.steps, kills=True)
            hashes.add(cluster.events("run.finished")[0]["weights_sha256"])
            pauses.setdefault(arm, []).append(max(
                e["duration_s"] for e in cluster.events("worker.pause_ended")))
            rollbacks += len(cluster.events("worker.shards_lost"))
            print(arm, its[-1], pauses[arm], flush=True)
    cluster, _, _ = run(folder / "join", "optimizer", 4 * options.steps, joins=True)
    joined = [e for e in cluster.events("worker.shards_moved")
              if e["worker"].startswith("127.0.0.5/")]
    median = {arm: statistics.median(its) for arm, its in seconds.items()}
    result = {
        "optimizer_bytes_ratio_4": round(held["optimizer"] / held["none"], 3),
        "step_ratio": round(median["optimizer"] / median["none"], 3),
        "recovery_ratio": round(statistics.median(pauses["optimizer"])
                                / statistics.median(pauses["none"]), 2),
        "join_bytes_ratio": round(5 * sum(e["bytes"] for e in joined) / held["none"], 2),
        "rollbacks": rollbacks, "bits_equal": len(hashes) == 1}
    return result | {"met": (result["optimizer_bytes_ratio_4"] <= 0.55
                             and result["step_ratio"] <= 1.08 and result["recovery_ratio"] <= 1.5
                             and not rollbacks and result["bits_equal"])}


if __name__ == "__main__":
    bench.run(measure, steps=24, rounds=2)

"""What the size of a world costs: forming it, going on after a kill, taking a newcomer.

    .venv/bin/python tests/bench/world_size.py [--sizes 4,16,48]

For each size one run of a tiny job whose workers are real processes, on this machine. `form_s`:
from the moment at which the last worker stands ready until the first generation trains.
`kill_to_step_s`: from the SIGKILL of a worker that is not rank 0 until the next finished step.
`join_pause_s`: the longest time between two finished steps while the killed worker's host comes
back with a new one, less a step's usual time. `revived`: workers that restarted in place, in all
runs.

Last line: one JSON object with form_s, kill_to_step_s, join_pause_s (by size), revived, lost
(healthy workers), met.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench
from cluster import Cluster

LIMITS = "boot_s=900,start_s=900"
"""The workers that boot at once, each importing torch, on a few cores."""
BOOT_S = 900.0
STEPS_AFTER = 3
BARS = {"form_s": 15.0, "kill_to_step_s": 6.0}


def measured(size: int, folder: Path) -> dict[str, Any]:
    """Run one world of this size; return its seconds, revivals and healthy workers lost."""
    os.environ["ELASTIC_TRAINER_LIMITS"] = LIMITS
    with Cluster(folder, hosts=size, command=bench.job("tiny.py"), min_workers=1,
                 options=["--standby", "0"]) as cluster:
        def steps(generation: int = 0) -> list[float]:
            return [e["time"] for e in cluster.committed(generation)]

        def wait_for_world(after: int) -> int:
            return int(cluster.wait_for(f"world of {size}", lambda: [
                e["generation"] for e in cluster.events("worker.generation_started")
                if e["size"] == size and e["generation"] > after], BOOT_S)[-1])

        first = wait_for_world(0)
        ready = max(e["time"] for e in cluster.events("driver.worker_ready"))
        formed = next(e["time"] for e in cluster.events("worker.generation_started")
                      if e["generation"] == first)
        cluster.wait_for("steps", lambda: len(steps()) > 2 * STEPS_AFTER, BOOT_S)
        formed_of = cluster.events("driver.generation_formed")[-1]
        killed_at = time.time()
        struck = cluster.signal_worker(formed_of["hosts"][-1], signal.SIGKILL)
        cluster.wait_for("a step after the kill", lambda: steps(first + 1), BOOT_S)
        went_on_s = steps(first + 1)[0] - killed_at
        joined = wait_for_world(first)
        cluster.wait_for("steps after the join", lambda: len(steps(joined)) > STEPS_AFTER, BOOT_S)
        times = [t for t in steps(first + 1) if t <= steps(joined)[STEPS_AFTER]]
        gaps = [b - a for a, b in pairwise(times)]
        pause_s = max(gaps) - statistics.median(gaps) if gaps else float("nan")
        lost = [e for e in cluster.lost() if e["pid"] != struck]
        result = {"form_s": formed - ready, "kill_to_step_s": went_on_s, "join_pause_s": pause_s,
                  "revived": len(cluster.events("worker.revives")), "lost": len(lost),
                  "step_s": statistics.median(gaps) if gaps else float("nan")}
        print(f"{size} workers: " + ", ".join(f"{name} {value:.2f}" for name,
                                              value in result.items()), flush=True)
        return result


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure each size."""
    results = {size: measured(size, folder / f"{size}")
               for size in map(int, options.sizes.split(","))}
    figures = {name: {size: round(result[name], 2) for size, result in results.items()}
               for name in ("form_s", "kill_to_step_s", "join_pause_s")}
    revived, lost = (sum(result[name] for result in results.values())
                     for name in ("revived", "lost"))
    met = not revived and not lost and all(figures[name][size] < bar for name, bar in BARS.items()
                                           for size in results)
    return figures | {"revived": revived, "lost": lost, "met": met}


if __name__ == "__main__":
    bench.run(measure, sizes="4,16,48")

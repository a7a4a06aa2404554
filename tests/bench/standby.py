"""What a standby costs: its memory, and the step of four workers while it boots and while it waits.

    .venv/bin/python tests/bench/standby.py [--rounds 2] [--steps 30]

Four workers train on all cores. In each round: steps with no standby, steps while one boots, steps
while it waits; then it is ended, and in the end there are steps with none again. Ratios are of
medians over all steps: to the extent that a machine's pace drifts, those with none are on both
sides of the others. Memory is the standby's and its monitor's together: resident, and the part that
no other process shares (what the host would have without it).

Last line: one JSON object with standby_memory_mb, standby_own_memory_mb, boot_s, booting_ratio,
waiting_ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench
import psutil
from cluster import Cluster

from elastic_trainer.host.standbys import FOLDER_VARIABLE  # noqa: E402

NOTHING_MEASURABLE = 1.03


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train, and let standbys boot and wait."""
    seconds: dict[str, list[float]] = {"none": [], "booting": [], "waiting": []}
    boots, resident, own = [], [], []
    with Cluster(folder, command=bench.ENDLESS) as cluster:
        def note(what: str, since: float, until: float) -> None:
            times = [e["time"] for e in cluster.events("worker.step_committed")
                     if since <= e["time"] <= until]
            seconds[what] += [b - a for a, b in pairwise(times)]

        def let_pass(steps: int) -> tuple[float, float]:
            since, step = time.time(), cluster.events("worker.step_committed")[-1]["step"]
            while cluster.events("worker.step_committed")[-1]["step"] < step + steps:
                time.sleep(1.0)  # to look more often would take part of the cores
            return since, time.time()

        cluster.wait_for_step(10)
        for number in range(options.rounds):
            note("none", *let_pass(options.steps))
            service = subprocess.Popen(
                [sys.executable, "-m", "elastic_trainer", "standby", "--run-dir",
                 str(cluster.run_dir), "--", *bench.ENDLESS], stdin=subprocess.DEVNULL,
                env=os.environ | {FOLDER_VARIABLE: f"{folder}/standbys"})
            try:
                since = time.time()
                booted = cluster.wait_for("standby",
                                          lambda n=number: cluster.events("standby.booted")[n:])[0]
                note("booting", since, booted["time"])
                boots.append(booted["boot_s"])
                note("waiting", *let_pass(options.steps))
                monitor = psutil.Process(booted["pid"])
                both = [one.memory_full_info() for one in (monitor, *monitor.children()[:1])]
                resident.append(sum(one.rss for one in both) / 1e6)
                own.append(sum(one.uss for one in both) / 1e6)
            finally:
                service.terminate()
                service.wait()
            print({what: round(statistics.median(found), 4) for what, found in seconds.items()},
                  f"{resident[-1]:.0f} MB, {own[-1]:.0f} of them its own; booted in "
                  f"{boots[-1]:.1f} s", flush=True)
        note("none", *let_pass(options.steps))
    median = {what: statistics.median(found) for what, found in seconds.items()}
    waiting = median["waiting"] / median["none"]
    return {"standby_memory_mb": round(statistics.median(resident)),
            "standby_own_memory_mb": round(statistics.median(own)),
            "boot_s": round(statistics.median(boots), 2),
            "booting_ratio": round(median["booting"] / median["none"], 3),
            "waiting_ratio": round(waiting, 3),
            "step_s": {what: round(s, 4) for what, s in median.items()},
            "steps": {what: len(found) for what, found in seconds.items()},
            "met": waiting <= NOTHING_MEASURABLE}


if __name__ == "__main__":
    bench.run(measure, rounds=2, steps=30)

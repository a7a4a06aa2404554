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
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bounded import bounded

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from cluster import Cluster  # noqa: E402

from elastic_trainer.host.standbys import FOLDER_VARIABLE  # noqa: E402

NOTHING_MEASURABLE = 1.03


def memory_mb(pid: int) -> tuple[float, float]:
    """Return the megabytes of a process that are resident, and those that only it has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kb = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kb["Rss"] * 1024 / 1e6, (kb["Private_Clean"] + kb["Private_Dirty"]) * 1024 / 1e6


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    job = [sys.executable, str(HERE / "jobs" / "mlp.py"), "--steps", "1000000"]
    seconds: dict[str, list[float]] = {"none": [], "booting": [], "waiting": []}
    boots, resident, own = [], [], []
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), command=job) as cluster:
        def measure(what: str, since: float, until: float) -> None:
            times = [
                e["time"] for e in cluster.events("worker.step_committed")
                if since <= e["time"] <= until
            ]
            seconds[what] += [b - a for a, b in zip(times, times[1:], strict=False)]

        def let_pass(steps: int) -> tuple[float, float]:
            since, step = time.time(), cluster.events("worker.step_committed")[-1]["step"]
            while cluster.events("worker.step_committed")[-1]["step"] < step + steps:
                time.sleep(1.0)  # to look more often would take part of the cores
            return since, time.time()

        cluster.wait_for_step(10)
        for number in range(options.rounds):
            measure("none", *let_pass(options.steps))
            service = subprocess.Popen([
                sys.executable, "-m", "elastic_trainer", "standby", "--run-dir",
                str(cluster.run_dir), "--", *job
            ],
                                       env=os.environ | {FOLDER_VARIABLE: f"{folder}/standbys"},
                                       stdin=subprocess.DEVNULL)
            try:
                since = time.time()
                booted = cluster.wait_for("standby",
                                          lambda n=number: cluster.events("standby.booted")[n:])[0]
                measure("booting", since, booted["time"])
                boots.append(booted["boot_s"])
                measure("waiting", *let_pass(options.steps))
                monitor = booted["pid"]
                children = Path(f"/proc/{monitor}/task/{monitor}/children").read_text()
                standby = int(children.split()[0])
                both = [memory_mb(pid) for pid in (monitor, standby)]
                resident.append(sum(mb for mb, _ in both))
                own.append(sum(mb for _, mb in both))
            finally:
                service.terminate()
                service.wait()
            print(
                {what: round(statistics.median(found), 4)
                 for what, found in seconds.items()},
                f"{resident[-1]:.0f} MB, {own[-1]:.0f} of them its own; booted in {boots[-1]:.1f} "
                f"s",
                flush=True)
        measure("none", *let_pass(options.steps))
    median = {what: statistics.median(found) for what, found in seconds.items()}
    waiting = median["waiting"] / median["none"]
    print(
        json.dumps({
            "standby_memory_mb": round(statistics.median(resident)),
            "standby_own_memory_mb": round(statistics.median(own)),
            "boot_s": round(statistics.median(boots),
                            2), "booting_ratio": round(median["booting"] / median["none"],
                                                       3), "waiting_ratio": round(waiting, 3),
            "step_s": {what: round(s, 4)
                       for what, s in median.items()},
            "steps": {what: len(found)
                      for what, found in seconds.items()}, "met": waiting <= NOTHING_MEASURABLE
        }))


if __name__ == "__main__":
    sys.exit(bounded(main))

"""A hundred faults in one run of 4 to 6 workers: kill, freeze, leave, join, at random.

    .venv/bin/python tests/bench/soak.py [--faults 30] [--steps-per-fault 150] [--measure-at 100]

A fault is due each --steps-per-fault steps, but not before 4 workers train again (a new worker
boots for about 100 steps), so that the run ends by itself soon after the last one. Data take a
while to read, so that a fast machine does not run out of steps while frozen workers are waited for.
Compared with the twin: the same job alone, undisturbed, in one process, without that wait.

What grows is measured after 100 faults (--measure-at) and after the last one, when 4 workers train
and no other lives (further hosts are taken off the list for that moment): the resident memory and
the open files of the driver's process and of a worker's. Workers are replaced, so the worker's
figures are the medians of the four; `open_files` is the driver's and a worker's together.

Last line: one JSON object with driver_mb_100, driver_mb_end, worker_mb_100, worker_mb_end,
open_files_100, open_files_end (those of 100 are null in a run with fewer faults), and faults,
second_victims, bits_equal, evict_max_s (null when a frozen worker was never evicted: `not_evicted`
names them), finished.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import bench
import psutil
from cluster import JOB, Cluster, weights_alone

from elastic_trainer.views.verify import verify  # noqa: E402

MOST, FEWEST = 6, 4
KINDS = ("kill", "freeze", "leave", "join")
FOOTPRINT = ("driver_mb", "worker_mb", "open_files", "driver_open_files", "worker_open_files")
STEP_S = 0.015
"""How long each of a step's 8 micro-batches takes to read, at least."""
SPARE_STEPS = 3000
"""A host that was struck again and again is left alone for up to a minute, and the others train on
meanwhile."""


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the soak and its twin."""
    folder = options.keep or folder
    folder.mkdir(parents=True, exist_ok=True)
    chance, done, struck = random.Random(options.seed), Counter[str](), set[str]()
    frozen: dict[str, float] = {}
    grown: dict[str, float | None] = dict.fromkeys(f"{name}_100" for name in FOOTPRINT)
    steps = options.steps_per_fault * (options.faults + 1) + options.spare_steps
    job = ["--steps", str(steps), "--checkpoint-every", "500", "--step-s", str(STEP_S)]
    with Cluster(folder, hosts=MOST, start_with=FEWEST, job=job, min_workers=1) as cluster:
        listed = list(cluster.all_hosts[:FEWEST])
        for number in range(1, options.faults + 1):
            cluster.wait_for_step(min(number * options.steps_per_fault, steps - 5))
            cluster.wait_for("world of 4", lambda: len(training(cluster, struck, listed)) >= FEWEST,
                             300)
            workers = {name.split("/")[0]: name for name in training(cluster, struck, listed)}
            kind = chance.choice(KINDS)
            absent = [h for h in cluster.all_hosts if h not in listed]
            if kind == "join" and not absent:
                kind = "leave"
            if kind == "leave" and len(listed) <= FEWEST:
                kind = "join" if absent else "kill"
            if kind == "join":
                listed.append(chance.choice(absent))
                cluster.set_hosts(listed)
            elif kind == "leave":
                listed.remove(chance.choice(listed))
                cluster.set_hosts(listed)
            else:
                host = chance.choice(sorted(workers))
                struck.add(workers[host])
                frozen |= {workers[host]: time.time()} if kind == "freeze" else {}
                cluster.signal_worker(host, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            done[kind] += 1
            print(f"fault {number}: {kind}, {len(workers)} train", flush=True)
            if number in (options.measure_at, options.faults):
                calm = listed[:FEWEST]  # each worker more is some sockets more
                cluster.set_hosts(calm)
                now = cluster.wait_for("calm world",
                                       lambda calm=calm: footprint(cluster, struck, calm), 300)
                cluster.set_hosts(listed)
                grown |= {f"{name}_100": value
                          for name, value in now.items()} if number == options.measure_at else {}
                grown |= {f"{name}_end": value for name, value in now.items()}
        exit_code = cluster.wait(1800)
        evictions = {e["worker"]: e["time"] for e in cluster.events("driver.worker_evicted")}
        missed = sorted(frozen.keys() - evictions.keys())
        victims = [e for e in cluster.lost() if e["worker"] not in struck]
        revivals = cluster.events("worker.revives")
        verdict = verify(cluster.run_dir)
        result = json.loads((cluster.run_dir / "result.json").read_text())
    (folder / "hurry").touch()
    twin = weights_alone([*JOB, *job], folder, None)
    return {
        "faults": sum(done.values()),
        "second_victims": len(victims) + len([e for e in revivals if e["where"] != "init"]),
        "bits_equal": result["weights_sha256"] == twin,
        "evict_max_s": None if missed else round(
            max((evictions[w] - t for w, t in frozen.items()), default=0.0), 2),
        "not_evicted": missed, **grown, "finished": exit_code == 0, "verified": verdict.is_proved,
        "kinds": dict(done), "steps": result["steps"], "revived_in_init": len(revivals),
        "generations": result["generations"], "attempts": result["attempts"],
        "steps_redone": result["steps_redone"], "wall_s": result["wall_s"],
        "goodput": result["goodput"],
        "victims": [{k: e[k]
                     for k in ("worker", "exit_code", "reason")} for e in victims]
    }


def footprint(cluster: Cluster, struck: set[str], listed: list[str]) -> dict[str, float]:
    """Return FOOTPRINT of the driver and of the median worker; nothing unless FEWEST workers train
    and no other lives."""
    live, workers = cluster.live_pids(), training(cluster, struck, listed)
    if len(workers) != FEWEST or len(live) != FEWEST:
        return {}
    try:
        driver, *others = (psutil.Process(pid)
                           for pid in (cluster.driver_pid(), *(live[name] for name in workers)))
        driver_files = driver.num_fds()
        worker_files = statistics.median(worker.num_fds() for worker in others)
        worker_bytes = statistics.median(worker.memory_info().rss for worker in others)
        return dict(zip(FOOTPRINT, (
            round(driver.memory_info().rss / 2**20, 1), round(worker_bytes / 2**20, 1),
            driver_files + worker_files, driver_files, worker_files), strict=True))
    except (psutil.NoSuchProcess, StopIteration):  # one ended meanwhile
        return {}


def training(cluster: Cluster, struck: set[str], listed: list[str]) -> list[str]:
    """Return the living workers of the newest generation that no fault has met yet (the driver may
    not know so soon)."""
    formed, live = cluster.events("driver.generation_formed"), cluster.live_pids()
    return [name for name in (formed[-1]["workers"] if formed else [])
            if name in live and name not in struck and name.split("/")[0] in listed]


if __name__ == "__main__":
    bench.run(measure, faults=30, steps_per_fault=150, spare_steps=SPARE_STEPS, measure_at=100,
              seed=0, keep=Path)

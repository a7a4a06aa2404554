"""The forecast of `plan` beside a real run: the goodput of both.

    .venv/bin/python tests/bench/plan.py [--seconds 150] [--keep FOLDER]

Two storms of kills, notices, newcomers and one loss of everybody, by two seeds, on local hosts. The
costs are those of the first run's event log; the changes are those of the second storm. So nothing
of the second run is in its forecast but when hosts came and went.

--keep leaves the data that tests/test_plan.py reads: storm-N.jsonl.gz (the events that the books
need, until the storm's end) and storm-N.csv (the changes, in seconds since the run's first event).

Last line: one JSON object with goodput, forecast, error_points, met (at most 3), and both seeds'
numbers of changes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from cluster import Cluster  # noqa: E402

from elastic_trainer.host.processes import is_worker  # noqa: E402
from elastic_trainer.observe.report import summarize  # noqa: E402
from elastic_trainer.rehearse.costs import costs_of  # noqa: E402
from elastic_trainer.rehearse.model import Policy, simulate  # noqa: E402
from elastic_trainer.rehearse.pools import Lives, of_rows  # noqa: E402
from elastic_trainer.rehearse.trace import read_trace  # noqa: E402
from elastic_trainer.state.cadence import Cadence  # noqa: E402

FIRST, MOST, EVERY_STEPS = 4, 5, 60
LIMIT_POINTS = 3.0
FIELDS = ("time", "event", "attempt", "generation", "size", "step", "samples", "loss", "step_s",
          "repeated", "reason", "duration_s", "pause_s", "boot_s", "source", "shards",
          "global_batch", "run", "worker", "host", "verdict")
EVENTS = ("run.started", "attempt.started", "attempt.ended", "job.described",
          "driver.worker_started", "driver.worker_ready", "driver.worker_gone",
          "driver.generation_formed", "worker.generation_started", "worker.step_committed",
          "worker.step_redone", "worker.pause_ended", "state.checkpoint_published")
Event = dict[str, Any]


def storm(seed: int, seconds: float) -> list[tuple[float, str, str]]:
    """Return what happens when: (time, join or notice or loss, host). In the middle all are lost,
    and as many others join 6 s later."""
    chance, now, numbers = random.Random(seed), 12.0, iter(range(1, 250))
    here = [f"127.0.0.{next(numbers)}" for _ in range(FIRST)]
    found = [(0.0, "join", host) for host in here]
    is_over = False
    while now < seconds - 15.0:
        if not is_over and now > 0.5 * seconds:
            is_over = True
            found += [(now, "loss", host) for host in here]
            here = [f"127.0.0.{next(numbers)}" for _ in range(FIRST)]
            found += [(now + 6.0, "join", host) for host in here]
            now += 40.0
        elif len(here) >= MOST or (len(here) > 2 and chance.random() < 0.6):
            kind = "notice" if chance.random() < 0.35 else "loss"
            for host in chance.sample(here, 2 if len(here) > 3 and chance.random() < 0.3 else 1):
                here.remove(host)
                found.append((now, kind, host))
            now += chance.expovariate(1 / 14.0)
        else:
            here.append(f"127.0.0.{next(numbers)}")
            found.append((now, "join", here[-1]))
            now += chance.expovariate(1 / 14.0)
    return sorted(found)


def play(folder: Path, seed: int, seconds: float) -> tuple[list[Event], list[Any]]:
    """Run a job through a storm; return its events until then, and the changes in seconds since
    the first event."""
    rows = storm(seed, seconds)
    hosts = [host for at, _, host in rows if at == 0.0]
    job = ["--steps", "100000", "--step-s", "0.05", "--checkpoint-every", str(EVERY_STEPS)]
    with Cluster(folder, names=hosts, job=job, min_workers=1) as cluster:
        cluster.wait_for_world(len(hosts))
        cluster.wait_for_step(5)
        began = time.time()
        for at in sorted({at for at, *_ in rows if at > 0.0}):
            wait_until(began + at)
            now = [(event, host) for time_s, event, host in rows if time_s == at]
            hosts = [host for host in hosts if host not in {host for _, host in now}]
            hosts += [host for event, host in now if event == "join"]
            kill(cluster, {host for event, host in now if event == "loss"})
            cluster.set_hosts(hosts)
            print(f"{time.time() - began:.1f} s: {now}", flush=True)
        wait_until(began + seconds)
        ended, events = time.time(), cluster.events()
    first = events[0]["time"]
    changes = [(round(began - first + at, 2) if at else 0.0, *row) for at, *row in rows]
    return [event for event in events if event["time"] <= ended], changes


def wait_until(moment: float) -> None:
    """Wait for a time of the clock."""
    while (left := moment - time.time()) > 0:
        time.sleep(min(left, 0.2))


def kill(cluster: Cluster, hosts: set[str]) -> None:
    """SIGKILL the workers on these hosts."""
    for name, pid in cluster.live_pids().items():
        if name.split("/")[0] in hosts and is_worker(pid, name, cluster.run_dir):
            os.kill(pid, signal.SIGKILL)


def forecast(events: list[Event], lives: Lives, seconds: float) -> float:
    """Return the goodput of these changes by the costs of other events."""
    costs = costs_of(events)
    policy = Policy(shards=costs.shards, checkpoint=Cadence(steps=EVERY_STEPS), first=FIRST)
    found = [simulate(lives, costs, policy, seconds, seed).goodput for seed in range(20)]
    return sum(found) / len(found)


def keep(folder: Path, number: int, events: list[Event], changes: list[Any]) -> Path:
    """Write what a test needs; return the file of the changes."""
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(folder / f"storm-{number}.jsonl.gz", "wb", mtime=0) as file:
        for event in events:
            if event["event"] in EVENTS:
                kept = {name: event[name] for name in FIELDS if name in event}
                file.write(json.dumps(kept).encode() + b"\n")
    target = folder / f"storm-{number}.csv"
    with open(target, "w", newline="") as text:
        csv.writer(text).writerows([["time_s", "event", "host"], *changes])
    return target


def main() -> None:
    """Play both storms and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (first, calm), (second, changes) = (
            play(Path(folder, str(seed)), seed, options.seconds) for seed in (1, 2))
        kept = options.keep or Path(folder, "kept")
        keep(kept, 1, first, calm)
        trace = of_rows(read_trace(keep(kept, 2, second, changes)))
    seconds = second[-1]["time"] - second[0]["time"]
    goodput, foretold = summarize(second)["goodput"], forecast(first, trace, seconds)
    error = 100.0 * abs(goodput - foretold)
    print(json.dumps({"goodput": goodput, "forecast": round(foretold, 4),
                      "error_points": round(error, 2), "met": error <= LIMIT_POINTS,
                      "changes": [len(calm), len(changes)]}))


if __name__ == "__main__":
    main()

"""A hundred faults in one run of 4 to 6 workers: kill, freeze, leave, join, at random.

    .venv/bin/python tests/bench/soak.py [--faults 30] [--steps-per-fault 150] [--measure-at 100]
    .venv/bin/python tests/bench/soak.py --shard optimizer --faults 50 --steps-per-fault 20 \
        --step-s 0.1 --spare-steps 60 --seed 1

A fault is due each --steps-per-fault steps, but not before 4 workers train again (a new worker
boots for about 100 steps), so that the run ends by itself soon after the last one. Data take a
while to read, so that a fast machine does not run out of steps while frozen workers are waited for.
Compared with the twin: the same job alone, undisturbed, in one process, without that wait.

Half of the kills and freezes come at any moment, half at a point of the protocol. With --shard at
most one host is lost at a time: a fault comes only when the newest generation has all parts of the
optimizer's state where they belong and has finished a step, and no worker that was struck lives.
It waits for no number of steps; after the last one the run hurries.
Then no step may be lost; the twin is not sharded.

What grows is measured after 100 faults (--measure-at) and after the last one, when 4 workers train
and no other lives (further hosts are taken off the list for that moment): the resident memory and
the open files of the driver's process and of a worker's. Workers are replaced, so the worker's
figures are the medians of the four; `open_files` is the driver's and a worker's together.

Last line: one JSON object with driver_mb_100, driver_mb_end, worker_mb_100, worker_mb_end,
open_files_100, open_files_end (those of 100 are null in a run with fewer faults), and faults,
second_victims, bits_equal, evict_max_s (null when a frozen worker was never evicted: `not_evicted`
names them), rollbacks (attempts after the first one, and parts of the optimizer's state that were
lost or differed), steps_lost (finished, and done again), finished.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
import psutil
from cluster import JOB, Cluster, weights_alone
from faults import Plan

from elastic_trainer.views.verify import verify  # noqa: E402

MOST, FEWEST = 6, 4
KINDS = ("kill", "freeze", "leave", "join")
POINTS = ("step.computed", "step.prepared", "step.voted", "step.applied", "world.transfer_ended")
SHARD_POINTS = ("shards.computed", "shards.moving", "shards.moving")
WHILE_JOINING = ("world.transfer_ended", "shards.moving")
"""Points that are reached when a host joins."""
FOOTPRINT = ("driver_mb", "worker_mb", "open_files", "driver_open_files", "worker_open_files")
STEP_S = 0.015
"""How long each of a step's 8 micro-batches takes to read, at least."""
SPARE_STEPS = 3000
"""A host that was struck again and again is left alone for up to a minute, and the others train on
meanwhile."""


@dataclass(frozen=True)
class Fault:
    """One fault of the soak."""

    kind: str
    at: str
    """The point of the protocol at which a worker is struck; "": at any moment, from outside."""
    joins: bool
    """Another host joins."""


def drawn(chance: random.Random, count: int, points: Sequence[str]) -> list[Fault]:
    """Draw the faults. There are from FEWEST to MOST hosts."""
    faults, hosts = list[Fault](), FEWEST
    for _ in range(count):
        kind = chance.choice(KINDS)
        if (kind, hosts) in (("join", MOST), ("leave", FEWEST)):
            kind = "join" if kind == "leave" else "leave"
        at = chance.choice(points) if kind in ("kill", "freeze") and chance.random() < 0.5 else ""
        if at in WHILE_JOINING and hosts == MOST:
            at = ""
        joins = kind == "join" or at in WHILE_JOINING
        hosts += joins - (kind == "leave")
        faults.append(Fault(kind, at, joins))
    return faults


class Soak:
    """A run under faults: what was struck, and what is listed."""

    def __init__(self, cluster: Cluster, chance: random.Random, is_calm: bool):
        self.cluster, self.chance = cluster, chance
        self.is_calm = is_calm
        """At most one host is lost at a time."""
        self.listed = list(cluster.all_hosts[:FEWEST])
        self.struck, self.frozen = set[str](), dict[str, float]()
        self.planned = 0

    def strike(self, fault: Fault) -> None:
        """Let one fault happen, whatever the world does then."""
        cluster, workers = self.cluster, self.training()
        if fault.at:
            cluster.ask_for(self.planned)
        if fault.joins:
            self.listed.append(self.chance.choice(
                [host for host in cluster.all_hosts if host not in self.listed]))
        if fault.kind == "leave":
            self.listed.remove(self.chance.choice(workers).split("/")[0])
        cluster.set_hosts(self.listed)
        if fault.at:
            fired = cluster.folder / f"fired-{self.planned}"
            cluster.wait_for("fault", lambda: fired.exists() and fired.read_text().endswith("}"))
            self._note(fault, _worker_of(cluster, json.loads(fired.read_text())["pid"]))
            self.planned += 1
        elif fault.kind in ("kill", "freeze"):
            worker = self.chance.choice(workers)
            time.sleep(self.chance.random() * STEP_S * 20)  # so that it is any moment of a step
            self._note(fault, worker)
            cluster.signal_worker(worker.split("/")[0],
                                  signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _note(self, fault: Fault, worker: str) -> None:
        self.struck.add(worker)
        self.frozen |= {worker: time.time()} if fault.kind == "freeze" else {}

    def training(self) -> list[str]:
        """Return the living workers of the newest generation that no fault has met yet (the driver
        may not know so soon)."""
        formed, live = self.cluster.events("driver.generation_formed"), self.cluster.live_pids()
        return [name for name in (formed[-1]["workers"] if formed else [])
                if name in live and name not in self.struck and name.split("/")[0] in self.listed]

    def is_due(self) -> bool:
        """Return whether the next fault may come."""
        workers = self.training()
        return len(workers) >= FEWEST and (not self.is_calm or self._is_settled(workers))

    def _is_settled(self, workers: Sequence[str]) -> bool:
        """True if these are all members of the newest generation, it has finished a step, and no
        worker that was struck lives."""
        newest = self.cluster.events("driver.generation_formed")[-1]
        steps = self.cluster.events("worker.step_committed")[-1:]
        return (set(workers) == set(newest["workers"])
                and not self.struck & self.cluster.live_pids().keys()
                and any(step["generation"] == newest["generation"] and not step.get("repeated")
                        for step in steps))


def _worker_of(cluster: Cluster, pid: int) -> str:
    """Return the newest worker of a process."""
    return next(str(e["worker"]) for e in reversed(cluster.events())
                if e["event"] in ("driver.worker_started", "driver.worker_ready")
                and e["pid"] == pid)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the soak and its twin."""
    folder = options.keep or folder
    folder.mkdir(parents=True, exist_ok=True)
    chance, shard = random.Random(options.seed), options.shard != "none"
    faults = drawn(chance, options.faults, (*POINTS, *SHARD_POINTS) if shard else POINTS)
    plan = Plan()
    for fault in faults:
        if fault.at:
            plan.add(fault.kind, at=fault.at, is_asked_for=True)
    steps = options.steps_per_fault * (options.faults + 1) + options.spare_steps
    alone = ["--steps", str(steps), "--checkpoint-every", "500", "--step-s", str(options.step_s)]
    alone += ["--layers", "8"] * shard
    job = alone + ["--shard", options.shard, "--buddies", "1"] * shard
    with Cluster(folder, hosts=MOST, start_with=FEWEST, job=job, min_workers=1,
                 plan=plan) as cluster:
        soak = Soak(cluster, chance, is_calm=shard)
        grown = played(soak, faults, options, steps)
        if shard:
            cluster.wait_for("settled world", soak.is_due, 300)
            (folder / "hurry").touch()
        exit_code = cluster.wait(1800)
        evictions = {e["worker"]: e["time"] for e in cluster.events("driver.worker_evicted")}
        missed = sorted(soak.frozen.keys() - evictions.keys())
        victims = [e for e in cluster.lost() if e["worker"] not in soak.struck]
        revivals = cluster.events("worker.revives")
        verdict = verify(cluster.run_dir)
        result = json.loads((cluster.run_dir / "result.json").read_text())
        done = cluster.committed()
        rollbacks = (result["attempts"] - 1 + len(cluster.events("worker.shards_lost"))
                     + len(cluster.events("worker.shards_differ")))
    (folder / "hurry").touch()
    twin = weights_alone([*JOB, *alone], folder, None)
    return {
        "seed": options.seed, "faults": len(faults), "struck": len(soak.struck),
        "lost": len(cluster.lost()),
        "second_victims": len(victims) + len([e for e in revivals if e["where"] != "init"]),
        "bits_equal": result["weights_sha256"] == twin, "rollbacks": rollbacks,
        "steps_lost": len(done) - len({e["step"] for e in done}),
        "evict_max_s": None if missed else round(
            max((evictions[w] - t for w, t in soak.frozen.items()), default=0.0), 2),
        "not_evicted": missed, **grown, "finished": exit_code == 0, "verified": verdict.is_proved,
        "kinds": dict(Counter(f"{fault.kind} {fault.at}".strip() for fault in faults)),
        "steps": result["steps"], "revived_in_init": len(revivals),
        "generations": result["generations"], "attempts": result["attempts"],
        "steps_redone": result["steps_redone"], "wall_s": result["wall_s"],
        "goodput": result["goodput"],
        "victims": [{k: e[k]
                     for k in ("worker", "exit_code", "reason")} for e in victims]
    }


def played(soak: Soak, faults: Sequence[Fault], options: argparse.Namespace,
           steps: int) -> dict[str, float | None]:
    """Let the faults happen, each when it is due; return what has grown."""
    grown: dict[str, float | None] = dict.fromkeys(f"{name}_100" for name in FOOTPRINT)
    cluster = soak.cluster
    for number, fault in enumerate(faults, 1):
        if not soak.is_calm:
            cluster.wait_for_step(min(number * options.steps_per_fault, steps - 5))
        cluster.wait_for("world of 4", soak.is_due, 300)
        print(f"fault {number}: {fault.kind} {fault.at}, {len(soak.training())} train", flush=True)
        soak.strike(fault)
        if number in (options.measure_at, options.faults) and not soak.is_calm:
            now = calm_footprint(soak)
            grown |= {f"{name}_100": value
                      for name, value in now.items()} if number == options.measure_at else {}
            grown |= {f"{name}_end": value for name, value in now.items()}
    return grown


def calm_footprint(soak: Soak) -> dict[str, float]:
    """Return FOOTPRINT once FEWEST workers train and no other lives. Further hosts are taken off
    the list for that moment."""
    calm = soak.listed[:FEWEST]  # each worker more is some sockets more
    soak.cluster.set_hosts(calm)
    kept, soak.listed = soak.listed, calm
    found: dict[str, float] = soak.cluster.wait_for("calm world", lambda: footprint(soak), 300)
    soak.listed = kept
    soak.cluster.set_hosts(kept)
    return found


def footprint(soak: Soak) -> dict[str, float]:
    """Return FOOTPRINT of the driver and of the median worker; nothing unless FEWEST workers train
    and no other lives."""
    cluster, live, workers = soak.cluster, soak.cluster.live_pids(), soak.training()
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


if __name__ == "__main__":
    bench.run(measure, faults=30, steps_per_fault=150, spare_steps=SPARE_STEPS, measure_at=100,
              seed=0, keep=Path, shard=("none", "optimizer", "gradients"), step_s=STEP_S)

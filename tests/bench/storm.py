"""An hour of a real spot fleet in a few minutes: what is left of the work that the hosts present
could have done.

    .venv/bin/python tests/bench/storm.py TRACE [--seconds 180] [--hosts 6] [--arm both|ours|peer]
    (as root)

TRACE has lines `milliseconds,add|remove,node`, e.g. the p3 trace of uclasystem/bamboo. Its first
hour is played in --seconds, and the number of nodes is scaled to --hosts hosts. A host is a
namespace with an sshd, and has a new name for each incarnation. A host that is removed gets two
minutes' notice, in the time of the trace: it leaves the list, and then its power is cut.

goodput: useful samples, divided by those that the present hosts (booting ones too) would have done
undisturbed, at the pace of the run between the changes with as many workers (its median step).
Reading a sample takes time, so that more hosts do more also on few cores. A change takes the same
time at each speed of the trace, so goodput_at_trace_rate is computed: the share that the measured
cost of a change leaves of an hour with the changes of the trace's first hour. The peer: stock
horovodrun, `hvd.elastic.run`, a commit each step, its defaults, over the same ssh.

Last line: one JSON object with goodput, goodput_at_trace_rate, peer_goodput, bits_equal, changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
import netlab
from cluster import JOB, weights_alone
from netlab import COORDINATOR, Fleet, Lab
from stock_job import StockJob

from elastic_trainer.rehearse.trace import listed, read_trace

HOUR_S = 3600.0
NOTICE_S = 120.0
STEP_S = 0.15
"""How long a worker takes to read one of the 8 micro-batches of a batch (the peer: its part of a
batch)."""
MICROBATCHES = 8
AIM = 0.95


@dataclass(frozen=True)
class Step:
    """One finished step: when, with how many workers, how many samples."""

    time: float
    size: int
    samples: int


def capacity(trace: Path) -> list[tuple[float, int]]:
    """Return (seconds, nodes present from then on) of the trace's first hour."""
    return [(at, nodes) for at, nodes in listed(read_trace(trace, notice_s=0.0)) if at < HOUR_S]


def scaled(nodes: Sequence[tuple[float, int]], hosts: int,
           seconds: float) -> list[tuple[float, int]]:
    """Return the plan: (seconds of ours, hosts present from then on), without what changes
    nothing."""
    most = max(count for _, count in nodes)
    plan: list[tuple[float, int]] = []
    for at, count in nodes:
        wanted = max(2, round(count * hosts / most))
        if not plan or plan[-1][1] != wanted:
            plan.append((at * seconds / HOUR_S, wanted))
    return plan


class Storm:
    """Plays the plan; `present` is (time, hosts that have power)."""

    def __init__(self, lab: Lab, set_hosts: Callable[[Sequence[str]], None], first: int):
        self.lab, self.set_hosts = lab, set_hosts
        self.names = [f"h{number}" for number in range(1, first + 1)]
        self.next, self.doomed = first + 1, list[tuple[float, str]]()
        self.present: list[tuple[float, int]] = []

    def play(self, plan: Sequence[tuple[float, int]], seconds: float) -> tuple[float, float]:
        """Play it in real time; returns when it began and ended."""
        began = time.time()
        self.present.append((began, len(self.names)))
        for at, wanted in [*plan[1:], (seconds, plan[-1][1])]:
            self._pass(began + at)
            for _ in range(wanted - len(self.names)):
                self._add()
            for _ in range(len(self.names) - wanted):
                name = self.names.pop(0)  # the oldest: rank 0's host is always among the taken
                self.doomed.append((time.time() + NOTICE_S * seconds / HOUR_S, name))
            self.set_hosts(self.names)
            self._note()
        return began, time.time()

    def _add(self) -> None:
        name, self.next = f"h{self.next}", self.next + 1
        self.lab.boot(name)
        self.names.append(name)

    def _pass(self, until: float) -> None:
        while (now := time.time()) < until:
            due = [(at, name) for at, name in self.doomed if at <= now]
            for entry in due:
                self.lab.power_cut(entry[1])
                self.doomed.remove(entry)
            time.sleep(min(0.05, until - now))

    def _note(self) -> None:
        """A host under notice is not counted: it may work, and need not."""
        self.present.append((time.time(), len(self.names)))


def goodput(steps: Sequence[Step], present: Sequence[tuple[float, int]], began: float,
            ended: float) -> float:
    """Return useful samples by those that the hosts present would have done undisturbed, between
    two moments."""
    pace: dict[int, float] = {}
    steps = [step for step in steps if step.time <= ended]  # the pace is kept until then
    for size in {step.size for step in steps}:
        gaps = [after.time - before.time for before, after in itertools.pairwise(steps)
                if before.size == after.size == size]
        if len(gaps) >= 5:
            pace[size] = statistics.median(
                step.samples for step in steps if step.size == size) / statistics.median(gaps)
    possible = 0.0
    for (start, hosts), (stop, _) in itertools.pairwise([*present, (ended, 0)]):
        best = max((rate for size, rate in pace.items() if size <= hosts),
                   default=min(pace.values()))
        possible += max(0.0, min(stop, ended) - max(start, began)) * pace.get(hosts, best)
    return sum(step.samples for step in steps if began < step.time) / possible


def ours(folder: Path, plan: Sequence[tuple[float, int]], seconds: float) -> dict[str, Any]:
    """Run ours through the storm and to its end, and compare with the undisturbed twin."""
    job = ["--steps", str(int(1.2 * seconds / (STEP_S * 1.3))), "--checkpoint-every", "50"]
    with Lab(folder / "lab", has_agents=False) as lab:
        first = [f"h{number}" for number in range(1, plan[0][1] + 1)]
        lab.boot(COORDINATOR, *first)
        with Fleet(lab, folder, first, job=[*job, "--step-s", str(STEP_S)], min_workers=1) as fleet:
            fleet.wait_for_world(len(first))
            fleet.wait_for_step(5)
            storm = Storm(lab, fleet.set_hosts, len(first))
            began, ended = storm.play(plan, seconds)
            assert fleet.process and fleet.process.poll() is None, fleet.story()
            (folder / "hurry").touch()
            exit_code = fleet.wait(280.0)
            kept = {e["step"]: e for e in fleet.committed()}  # what was done again counts once
            steps = [Step(e["time"], e["size"], e["samples"])
                     for e in sorted(kept.values(), key=lambda e: e["time"])]
            result = json.loads((fleet.run_dir / "result.json").read_text())
            lost, generations = len(fleet.lost()), result["generations"]
    twin = weights_alone([*JOB, *job], folder, None)
    return {"goodput": goodput(steps, storm.present, began, ended), "finished": exit_code == 0,
            "generations": generations, "bits_equal": result["weights_sha256"] == twin,
            "second_victims": lost, "steps": len(steps), "steps_redone": result["steps_redone"],
            "attempts": result["attempts"]}


def peer(folder: Path, plan: Sequence[tuple[float, int]], seconds: float) -> float:
    """Run stock Horovod through the same storm; returns its goodput."""
    first = [f"h{number}" for number in range(1, plan[0][1] + 1)]
    with StockJob.in_lab(folder, first, [str(2 * STEP_S), "256"]) as (lab, job):
        job.wait_for_step(5, 120)
        storm = Storm(lab, job.set_hosts, len(first))
        began, ended = storm.play(plan, seconds)
        done: dict[int, Step] = {}
        for line in job.lines():
            if line.rank == 0:
                done.setdefault(line.step, Step(line.time, line.size, 16 * line.size))
    return goodput(sorted(done.values(), key=lambda step: step.time), storm.present, began, ended)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the arms."""
    netlab.prepare()
    nodes = capacity(options.trace)
    plan = scaled(nodes, options.hosts, options.seconds)
    print(f"plan: {plan}", flush=True)
    changes = len(plan) - 1
    result: dict[str, Any] = {"changes": changes, "changes_per_hour_of_the_trace": len(nodes) - 1}
    if options.arm != "peer":
        result |= ours(folder / "ours", plan, options.seconds)
        cost_s = (1.0 - result["goodput"]) * options.seconds / changes
        at_rate = 1.0 - cost_s * (len(nodes) - 1) / HOUR_S
        result |= {"goodput": round(result["goodput"], 4), "cost_of_a_change_s": round(cost_s, 2),
                   "goodput_at_trace_rate": round(at_rate, 4),
                   "met": at_rate >= AIM and result["bits_equal"]}
    if options.arm != "ours":
        result["peer_goodput"] = round(peer(folder / "peer", plan, options.seconds), 4)
    return result


if __name__ == "__main__":
    bench.run(measure, trace=..., seconds=180.0, hosts=6, arm=("both", "ours", "peer"))

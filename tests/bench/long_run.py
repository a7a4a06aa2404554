"""What the event log of a long run costs its readers: `verify`, `report` and `report --trace`, each
in a process of its own.

    python tests/bench/long_run.py [--steps 1000000] [--faults 10000]

The log has the lines that a run writes (a worker lost and a step done again at each fault, a
checkpoint every 200 steps, every 50th fault the end of the attempt and a start from the newest
checkpoint), in sealed and compressed segments.

Last line: one JSON object with verify_s, verify_mb, report_s, report_mb, trace_s, trace_mb (the
peak of resident memory), trace_file_mb, and what was read.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bench

from elastic_trainer.events.log import Events
from elastic_trainer.events.segments import compress, segments
from elastic_trainer.schedule.schedule import Schedule

BATCH, SIZE, WORLD = 32, 320_000, 8
CHECKPOINT_STEPS = 200
FAULTS_AN_ATTEMPT = 50
READ = "--read"


class Run:
    """Writes a run's log as its processes do; its clock is its own."""

    def __init__(self, run_dir: Path, steps: int):
        self.events = Events(run_dir, run=run_dir.name)
        self.schedule = Schedule(dataset_size=SIZE, global_batch=BATCH, microbatches=16, seed=7,
                                 epochs=None, max_steps=steps)
        self.digests: list[int] = []
        each = self.schedule.steps_per_epoch
        for first in range(0, steps, each):
            self.digests += self.schedule.batch_digests(range(first, min(first + each, steps)))
        self.now, self.attempt, self.generation, self.number, self.step = 1.7e9, 0, 0, 0, 0
        self.samples = 0
        self.workers: dict[int, str] = {}

    def say(self, event: str, **facts: Any) -> None:
        common = {"time": round(self.now, 4), "run": "long", "attempt": self.attempt}
        self.events.write(json.dumps({"event": event} | common | facts))

    def by_rank_0(self, event: str, **facts: Any) -> None:
        self.say(event, worker=f"10.0.0.1/0/{self.generation}", generation=self.generation, rank=0,
                 size=WORLD, **facts)

    def start(self) -> None:
        self.attempt, self.generation = self.attempt + 1, 0
        self.say("attempt.started")
        for slot in range(WORLD):
            self.say("driver.host_added", host=f"10.0.0.{slot}", slots=1)
        for slot in range(WORLD):
            self.boot(slot)
        self.step -= self.step % CHECKPOINT_STEPS
        if self.step:
            self.by_rank_0("state.checkpoint_restored", step=self.step, record=self.step,
                           bytes=10**9, list_s=0.1)
            self.say("job.program_proved", step=self.step)
        self.enter("checkpoint" if self.step else "fresh", 0.5)

    def boot(self, slot: int) -> None:
        self.number += 1
        self.workers[slot] = f"10.0.0.{slot}/0/{self.number}"
        worker = {"worker": self.workers[slot], "host": f"10.0.0.{slot}"}
        self.say("driver.worker_started", **worker, pid=self.number)
        self.say("driver.worker_ready", **worker, pid=self.number, boot_s=3.0)
        self.say("worker.program_proved", worker=worker["worker"], proof="5a")

    def enter(self, source: str, pause_s: float) -> None:
        self.generation += 1
        self.now += pause_s
        self.say("driver.generation_formed", generation=self.generation, size=WORLD,
                 hosts=[f"10.0.0.{slot}" for slot in self.workers],
                 workers=list(self.workers.values()),
                 reason="death" if source == "memory" else "start")
        if source == "memory":
            self.by_rank_0("worker.step_redone", step=self.step)
        self.by_rank_0("worker.generation_started", step=self.step, source=source, pause_s=pause_s)
        schedule = self.schedule
        keys = ("dataset_size", "global_batch", "microbatches", "epochs", "seed", "max_steps",
                "steps")
        self.by_rank_0("job.described", **{key: getattr(schedule, key) for key in keys},
                       reduce="exact")
        if self.step:
            self.committed(self.step - 1, repeated=True)

    def committed(self, step: int, **more: Any) -> None:
        self.by_rank_0("worker.step_committed", step=step, samples=self.schedule.batch_size(step),
                       digest=self.digests[step], loss=1.0 + 1000.0 / (step + 1000), lr=0.1,
                       step_s=0.21012, **more)

    def train(self, until: int) -> None:
        while self.step < until:
            self.now += 0.2105
            self.committed(self.step)
            self.step += 1
            if self.step % CHECKPOINT_STEPS == 0:
                self.by_rank_0("state.checkpoint_published", step=self.step, bytes=10**9,
                               record=self.step, lineage=1, parts=60, pause_s=0.08,
                               uploaded_bytes=10**9, duration_s=8.0)

    def lose(self, fault: int) -> None:
        slot = fault % WORLD
        self.say("driver.worker_gone", worker=self.workers[slot], host=f"10.0.0.{slot}",
                 pid=int(self.workers[slot].rpartition("/")[2]), exit_code=-9, reason="crashed")
        if fault % FAULTS_AN_ATTEMPT == 0:
            self.say("attempt.ended", exit_code=1, verdict="failed")
            self.start()
        else:
            self.boot(slot)
            self.enter("memory", 0.6)


def write(run_dir: Path, steps: int, faults: int) -> None:
    """Write the log of a run of `steps` steps."""
    run = Run(run_dir, steps)
    run.say("run.started", options={})
    run.start()
    for fault in range(1, faults + 1):
        run.train(steps * fault // (faults + 1))
        run.lose(fault)
    run.train(steps)
    samples = sum(run.schedule.batch_size(step) for step in range(steps))
    run.by_rank_0("run.finished", steps=steps, samples=samples, loss=1.0 + 1000.0 / (steps + 999),
                  weights_sha256="5a" * 32)
    run.say("attempt.ended", exit_code=0, verdict="finished")
    compress(run_dir, late_s=0.0)


def cost(command: str, run_dir: Path, *options: str) -> tuple[float, float, str]:
    """Return how long a command takes on a run, its peak of resident memory in MB, and what it
    says."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, __file__, READ, command, str(run_dir), *options],
                          capture_output=True, text=True, check=True)
    output, _, peak_kb = done.stdout.rstrip().rpartition("\n")
    return time.monotonic() - started, int(peak_kb) / 1024, output


def read(command: list[str]) -> int:
    """Be the process of a command: run it, and print the peak of its memory in kB."""
    from elastic_trainer.__main__ import main as command_line

    code = command_line(command)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return code


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write the log, and read it with each command."""
    run_dir = folder / "long"
    write(run_dir, options.steps, options.faults)
    found: dict[str, Any] = {
        "steps": options.steps, "faults": options.faults, "segments": len(segments(run_dir)) + 1,
        "on_disk_mb": round(sum(path.stat().st_size for path in run_dir.iterdir()) / 2**20)}
    said = {}
    for name, command in {"verify": ["verify"], "report": ["report"],
                          "trace": ["report", "--trace", f"{folder}/trace"]}.items():
        seconds, mb, said[name] = cost(command[0], run_dir, *command[1:])
        print(said[name])
        found |= {f"{name}_s": round(seconds, 1), f"{name}_mb": round(mb)}
    assert f"in {options.steps} of {options.steps} steps, each counted exactly once" in (
        said["verify"])
    return found | {"trace_file_mb": round((folder / "trace").stat().st_size / 1e6, 1)}


if __name__ == "__main__":
    if sys.argv[1:2] == [READ]:
        sys.exit(read(sys.argv[2:]))
    bench.run(measure, steps=10**6, faults=10**4)

"""The forecast of `plan` for a storm that nobody has seen, beside a real replay of it.

    .venv/bin/python tests/bench/plan.py [--seed N] [--zero 0.4] [--checkpoint-every 10s]
                                         [--steps N] [--costs FOLDER] [--keep FOLDER]

A storm from a fresh random seed is replayed for real: the demo on 4 local hosts, 10 times as fast
as the storm. The costs are those of another run, a replay of the shipped storm `zeros`, or of the
run in --costs. So the model knows of the second run only when hosts came and went, and how long it
was. The clock of a replay's storm starts with the first step, so the first boot, which is no part
of the goodput, belongs to the times of the hosts.

The books of both are compared by account. A run that loses everybody depends on the age of the
newest checkpoint. With `--checkpoint-every auto` its interval follows noisy measurements of the
run, so one short run is also compared with the bounds of 90 % of the repetitions.

--keep leaves what tests/test_plan.py reads of both runs: costs.jsonl.gz, played.jsonl.gz (events)
and played.csv (the trace as it was played).

Last line: one JSON object with seed, storm, goodput, forecast, error_points, met (at most 3),
bounds, is_within, and the seconds of each account in the run and in the plan.
"""

from __future__ import annotations

import argparse
import gzip
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from elastic_trainer.observe.report import read_log
from elastic_trainer.observe.segments import Reader
from elastic_trainer.rehearse.costs import costs_of

LIMIT_POINTS = 3.0
TRAINER = [sys.executable, "-m", "elastic_trainer"]
FIELDS = ("time", "event", "attempt", "generation", "size", "step", "samples", "loss", "step_s",
          "repeated", "reason", "duration_s", "pause_s", "boot_s", "source", "shards",
          "global_batch", "run", "worker", "host", "verdict", "checkpoint_s", "checkpoint_every")
EVENTS = ("run.started", "attempt.started", "attempt.ended", "job.described",
          "driver.host_removed", "driver.worker_started", "driver.worker_ready",
          "driver.worker_gone", "driver.generation_formed", "worker.generation_started",
          "worker.step_committed", "worker.step_redone", "worker.pause_ended",
          "state.checkpoint_published", "rehearsal.host_joined", "rehearsal.host_lost",
          "run.finished")


def replay(runs: Path, name: str, storm: str, options: argparse.Namespace) -> Path:
    """Replay a storm on the demo; return the run's folder."""
    demo = [sys.executable, "-m", "elastic_trainer.examples.gpt", "--steps", str(options.steps),
            "--checkpoint-every", options.checkpoint_every]
    subprocess.run([*TRAINER, "replay", "--storm", storm, "--hosts", "4", "--runs-dir", str(runs),
                    "--run", name, "--", *demo], check=True, stdout=sys.stderr)
    return runs / name


def forecast(run: Path, costs: Path, every: str, seconds: float) -> dict[str, Any]:
    """Return what `plan` says of the trace that was played, by the costs of another run."""
    first_boot_s = costs_of(Reader(run).events(to_the_end=True)).first_boot_s[0]
    planned = subprocess.run(
        [*TRAINER, "plan", "--trace", str(run / "trace.csv"), "--costs", str(costs), "--hours",
         str(seconds / 3600), "--np", "1", "--no-standby", "--checkpoint-every", every, "--json",
         "--cost", f"first_boot_s={first_boot_s}"],
        check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(planned.stdout.splitlines()[-1])["forecast"]
    return found


def keep(folder: Path, costs: Path, run: Path) -> None:
    """Write what a test needs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in (("costs", costs), ("played", run)):
        with gzip.GzipFile(folder / f"{name}.jsonl.gz", "wb", mtime=0) as file:
            for event in Reader(source).events(to_the_end=True):
                if event["event"] in EVENTS:
                    kept = {name: event[name] for name in FIELDS if name in event}
                    file.write(json.dumps(kept).encode() + b"\n")
    shutil.copy(run / "trace.csv", folder / "played.csv")


def compare(run: Path, planned: dict[str, Any]) -> dict[str, Any]:
    """Return both books, account by account, and the distance."""
    history, result = read_log(run)
    books = result["books"]
    low, foretold, high = planned["goodput"]
    error = 100.0 * abs(result["goodput"] - foretold)
    return {"goodput": result["goodput"], "forecast": round(foretold, 4),
            "error_points": round(error, 2), "met": error <= LIMIT_POINTS,
            "bounds": [round(low, 4), round(high, 4)],
            "is_within": low <= result["goodput"] <= high,
            "wall_s": result["wall_s"], "attempts": [result["attempts"], planned["attempts"]],
            "pausing_s": [books["pausing_s"], planned["pausing_s"]],
            "restarting_s": [books["restarting_s"], planned["waiting_s"]],
            "redone_s": [round(history.dropped_s, 2), planned["redone_s"]]}


def main() -> None:
    """Play both storms and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9))
    parser.add_argument("--zero", type=float, default=0.0)
    parser.add_argument("--checkpoint-every", default="10s")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    storm = (f"rate=24/h,bulk=0.2,zero={options.zero:g},notice=0.5,replace=90,"
             f"seed={options.seed}")
    with tempfile.TemporaryDirectory() as folder:
        costs = options.costs or replay(Path(folder), "costs", "zeros", options)
        run = replay(Path(folder), "played", storm, options)
        seconds = read_log(run)[1]["wall_s"]
        found = compare(run, forecast(run, costs, options.checkpoint_every, seconds))
        if options.keep:
            keep(options.keep, costs, run)
    print(json.dumps({"seed": options.seed, "storm": storm, **found}))


if __name__ == "__main__":
    main()

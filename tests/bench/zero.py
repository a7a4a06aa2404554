"""The time after the loss of all workers: four hosts vanish at once, four others come, until the
first new step.

    .venv/bin/python tests/bench/zero.py [--every 20]                                           (as
    root: tests/netlab.py)

Hosts are namespaces with an sshd each; they end without a FIN, and new ones, under other names,
boot at once. The clock starts when ssh on the new ones answers: in it are what is left of the time
to find out that the old ones are gone, the next attempt, the workers' boot over ssh, the restore
from the last checkpoint, which is in S3 (ministack), and the first step. The new hosts' disks are
empty.

Last line: one JSON object with first_step_s, steps_lost, phases.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bench
import netlab
from netlab import COORDINATOR, Fleet, Lab, store_on
from s3_servers import BUCKET

OLD, NEW = ["h1", "h2", "h3", "h4"], ["h5", "h6", "h7", "h8"]
LIMIT_S = 30.0


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what it cost; --every are the steps between checkpoints."""
    every: int = options.every
    netlab.prepare()
    with Lab(folder / "lab", has_agents=False) as lab:
        fleet = Fleet(lab, folder, OLD, command=[*bench.ENDLESS, "--checkpoint-every", str(every)],
                      min_workers=1, own_disks=True, options=["--store", f"s3://{BUCKET}/zero"])
        lab.boot(COORDINATOR, "h9", *OLD)
        with store_on(lab, "h9", folder / "s3") as environment, ExitStack() as stack:
            fleet.env |= environment
            stack.enter_context(fleet)
            fleet.wait_for("checkpoint", lambda: fleet.events("state.checkpoint_published"))
            fleet.wait_for_step(fleet.events("worker.step_committed")[-1]["step"] + every // 2)
            lab.power_cut(*OLD)
            last = fleet.events("worker.step_committed")[-1]["step"]
            lab.boot(*NEW)
            ready_at = time.time()
            fleet.set_hosts(NEW)

            new_steps = fleet.wait_for("first new step", lambda: [
                e for e in fleet.committed() if e["attempt"] == 2])
            moments = [("old ones given up", "attempt.ended"), ("next attempt", "attempt.started"),
                       ("workers started", "driver.worker_started"),
                       ("workers ready", "driver.worker_ready"),
                       ("world formed", "driver.generation_formed"),
                       ("restored", "state.checkpoint_restored"),
                       ("first step", "worker.step_committed")]
            phases, before = {}, ready_at
            for phase, event in moments:
                attempt = 1 if event == "attempt.ended" else 2
                times = [e["time"] for e in fleet.events(event) if e["attempt"] == attempt]
                at = times[-1] if event == "driver.worker_ready" else times[0]
                phases[phase], before = round(at - before, 3), max(at, before)
            first = new_steps[0]
    first_step_s, lost = first["time"] - ready_at, last + 1 - first["step"]
    return {"first_step_s": round(first_step_s, 3), "steps_lost": lost, "checkpoint_every": every,
            "phases": phases, "met": first_step_s < LIMIT_S and lost <= every}


if __name__ == "__main__":
    bench.run(measure, every=20)

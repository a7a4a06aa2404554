"""Run a world of workers for a few steps: ours by `elastic-trainer run`, and DDP's.

scaling → here → processes → event log or output → here → seconds of steps, times of their parts

What always holds:
1. All arms have the same settings of the allocator (config.ALLOCATOR) and the same number of
   threads. The first steps do not count.
2. Each worker of each arm has a session of its own, as our driver gives it. Linux shares busy cores
   between sessions (sched(7), autogroup), so two ranks in one session would get less of a machine
   with other work.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from elastic_trainer.config import ALLOCATOR, ConfigError
from elastic_trainer.events.log import read_events
from elastic_trainer.host import own
from elastic_trainer.host.modes import private
from elastic_trainer.measure.cases import Case
from elastic_trainer.views import run_trace

WARM_UP_STEPS = 5
"""The steps at the start that do not count."""
OUTPUT, LAST_LINES = "output.log", 15


@dataclass(frozen=True)
class Ran:
    """What a world has shown."""

    seconds: list[float]
    batch: int
    """The global batch of one worker."""
    microbatches: int
    """Those of one worker's."""
    phases: dict[str, float] = field(default_factory=dict)
    """The mean milliseconds of each phase of a step."""


def ours(command: Sequence[str], case: Case, steps: int, numbers: Mapping[str, int], folder: Path,
         timeline: bool = False) -> Ran:
    """Run a script with the reducer and the number of workers of a case. `numbers` are options over
    the script's. Raises ConfigError if it fails."""
    name = f"{case.arm}-{case.workers}-{case.scale}" + ("-timeline" if timeline else "")
    shutil.rmtree(folder / name, ignore_errors=True)
    options = {"until": f"{steps + WARM_UP_STEPS} steps", "store": "", **numbers}
    run = own.command(
        "elastic_trainer", "run", "--run", name, "--runs-dir", str(folder), "--workers",
        str(case.workers), "--standby", "0", "--reduce", case.arm, "--store", "",
        *(f"--override={name}={json.dumps(value)}" for name, value in options.items()),
        *(["--timeline"] if timeline else []), "--", *command)
    log = folder / f"{name}.log"
    with open(log, "wb", opener=private) as output:
        done = subprocess.run(run, stdout=output, stderr=subprocess.STDOUT,
                              stdin=subprocess.DEVNULL, check=False)
    shutil.rmtree(folder / name / "checkpoints", ignore_errors=True)
    events = read_events(folder / name)
    facts = next((e for e in events if e["event"] == "job.overridden"), None)
    if done.returncode or facts is None:
        why = "it does not call train() or Trainer" if not done.returncode else "it has failed"
        raise ConfigError(f"{case.workers} workers with {case.arm} give no measurement: {why}. The "
                          f"output is in {log}.\n{last_lines(log)}")
    for event in events:
        if event["event"] == "job.option_ignored" and event["option"] == "--reduce":
            raise ConfigError(
                f"The script gives reduce itself, so it cannot be measured with {case.arm}. Leave "
                f"reduce out of the script, or use --arms with the script's reducer.")
    ends = [e["time"] for e in events
            if e["event"] == "worker.step_committed" and e["step"] >= WARM_UP_STEPS - 1]
    spans = run_trace.rows_of(run_trace.events_of(run_trace.files_of(folder / name)))
    return Ran([end - before for before, end in pairwise(ends)],
               int(facts["global_batch"]) // case.scale, int(facts["microbatches"]) // case.scale,
               {row.phase: row.step_ms for row in spans})


def peer(demo: str, case: Case, steps: int, batch: int, folder: Path) -> Ran:
    """Run a demo under DDP. Raises ConfigError if it fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = ALLOCATOR | os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(case.workers)}
    command = own.command("elastic_trainer.examples.ddp", demo, "--steps",
                          str(steps + WARM_UP_STEPS), "--global-batch", str(batch * case.scale))
    log = folder / f"{case.arm}-{case.workers}-{case.scale}.log"
    ranks: list[subprocess.Popen[str]] = []
    with open(log, "wb", opener=private) as output:
        try:
            ranks += [subprocess.Popen(command, env=env | {"RANK": str(rank)}, text=True,
                                       stdout=subprocess.PIPE, stderr=output,
                                       start_new_session=True)
                      for rank in range(case.workers)]
            printed = ranks[0].communicate()[0]
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    rank.send_signal(signal.SIGTERM if rank.poll() is None else 0)
                rank.wait()
    if ranks[0].returncode:
        raise ConfigError(f"DDP with {case.workers} workers has failed. The output is in {log}.\n"
                          f"{last_lines(log)}")
    found = json.loads(printed.splitlines()[-1])
    count = len(found["seconds"])
    return Ran(found["seconds"][WARM_UP_STEPS:], batch, 1,
               {name: 1000 * total / count for name, total in found["parts"].items()})


def last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])

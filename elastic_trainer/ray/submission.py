"""Submits a run to Ray and waits for its end, also across a restart of Ray's head.

script, `elastic-trainer ray`, ray job submit → here → follow.py (a process) → coordinator's actor

What always holds:
1. Bad input is an error before anything is started.
2. A process that has lost the cluster is followed by another one, until the run has ended: with the
   head back, the run resumes from its newest checkpoint.
3. The cluster's answer is bounded in time at the start only. Later, no head is no reason to give a
   run up.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from elastic_trainer.config import EXIT_INTERRUPTED, ConfigError
from elastic_trainer.host import own
from elastic_trainer.ray.job import CONNECTED, Job, job_of

FOLLOW = "elastic_trainer.ray.follow"
MOST_BACK_OFF_S = 30.0
LONG_S = 60.0
"""A process that has followed the run for so long had found the cluster."""


def submit(script: str | Sequence[str], arguments: Sequence[str] = (), *,
           workers: tuple[int, int] = (1, 1),
           resources_per_worker: Mapping[str, float] | None = None, workers_per_agent: int = 1,
           run: str, runs_dir: str = "runs", store: str = "", address: str = "",
           options: Sequence[str] = (), notices: str = "", wait_for_nodes: bool = False) -> int:
    """Train a script on a Ray cluster to its end; return the exit code (0: finished).

    `workers` are the fewest and the most. An agent keeps `workers_per_agent` workers on one node.
    `options` are more options of `elastic-trainer run`. `notices` names the cloud whose notices
    each agent reads ("ec2", …). The same call with the same `run` resumes the run.
    Raises ConfigError.
    """
    command = ["python", script, *arguments] if isinstance(script, str) else [*script, *arguments]
    job = job_of(command, workers=workers, run=run, runs_dir=runs_dir, store=store,
                 resources_per_worker=resources_per_worker or {"CPU": 1},
                 workers_per_agent=workers_per_agent, options=options, notices=notices)
    return submit_job(job, address, wait_for_nodes)


def submit_job(job: Job, address: str, waits: bool) -> int:
    """Follow a run to its end; return its exit code. Raises ConfigError."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("The package ray is not installed here. Install the cluster's version: "
                          "pip install 'elastic-trainer[ray]'.")
    stopping = threading.Event()
    failures, has_connected = 0, False
    while True:
        began = time.monotonic()
        told = _follow(job, {"address": address, "waits": waits or has_connected,
                             "again": has_connected}, stopping)
        has_connected = has_connected or CONNECTED in told
        if told and told[-1] != CONNECTED:
            return int(told[-1])
        if not has_connected:
            raise ConfigError("The process that connects to Ray has ended before it found the "
                              "cluster. Its last lines, above, say why.")
        if stopping.is_set():
            return EXIT_INTERRUPTED
        failures = 1 if time.monotonic() - began > LONG_S else failures + 1
        back_off_s = min(MOST_BACK_OFF_S, 2.0 ** failures)
        if failures == 1:
            print(f"elastic-trainer: The connection to Ray is lost. The run {job.name} goes on "
                  f"when its head answers again.", file=sys.stderr, flush=True)
        stopping.wait(back_off_s)


def _follow(job: Job, how: Mapping[str, object], stopping: threading.Event) -> list[str]:
    """Run one process that follows; return what it has told: that it has connected, and the run's
    exit code."""
    told, tells = os.pipe()
    process = subprocess.Popen(own.command(FOLLOW, str(tells)), stdin=subprocess.PIPE,
                               pass_fds=[tells])
    os.close(tells)
    before = {}
    if threading.current_thread() is threading.main_thread():
        def pass_on(number: int, _: object) -> None:
            stopping.set()
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

        before = {number: signal.signal(number, pass_on)
                  for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert process.stdin
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps({"job": job.to_json(), **how}).encode())
            process.stdin.close()
        with open(told) as answer:
            lines = answer.read().split()
        process.wait()
        return lines
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""The local hosts of a rehearsal: the list that the discovery prints, and the end of processes.

timetable → here → hosts file (the discovery of a real launcher), signals, event log

What always holds:
1. A host under notice leaves the list, so the launcher drains it. When it is lost, its workers get
   SIGKILL, and so does each worker that the launcher still starts on it.
2. Only workers of this run are killed: a process counts by its environment, and not by a pid alone.
3. The run ends with this process, also if that is killed (host/parent.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from elastic_trainer.events.fleet import LiveWorker
from elastic_trainer.events.log import Events
from elastic_trainer.host.modes import make_folder, replace_whole
from elastic_trainer.host.parent import end_with_parent
from elastic_trainer.host.processes import is_worker
from elastic_trainer.rehearse.trace import Moment
from elastic_trainer.views.status import Status

TURN_S = 0.1
STOP_S = 45.0
"""The time for the last step and checkpoint of a run that is stopped; the driver has 30 s."""


class Stage:
    """The hosts of one run, whose folder is there."""

    def __init__(self, run_dir: Path, hosts: Sequence[str]):
        make_folder(run_dir)
        self.run_dir, self.file = run_dir, run_dir / "hosts"
        self.events = Events(run_dir, run=run_dir.name)
        self.listed = list(hosts)
        self.present = set(hosts)
        """The hosts that have power."""
        self.noticed: set[str] = set()
        self.lost: set[str] = set()
        self._write()

    def act(self, moment: Moment, ends: Mapping[str, float], again_s: float) -> None:
        """Let a moment happen. `ends`: the time of each host's loss; `again_s`: the time until the
        next host joins."""
        leaving = {*moment.noticed, *moment.lost}
        self.listed = [host for host in [*self.listed, *moment.joined] if host not in leaving]
        self.noticed |= set(moment.noticed)
        self.lost |= set(moment.lost)
        self.present = (self.present | set(moment.joined)) - set(moment.lost)
        self._write()
        for host in moment.joined:
            self.events.emit("rehearsal.host_joined", host=host)
        for host in moment.noticed:
            self.events.emit("rehearsal.host_noticed", host=host,
                             notice_s=round(ends[host] - moment.at_s, 3))
        for host in moment.lost:
            self.events.emit("rehearsal.host_lost", host=host, noticed=host in self.noticed)
        if moment.lost and not self.present:
            self.events.emit("rehearsal.hosts_gone", again_s=round(again_s, 3))

    def kill_lost(self, workers: Mapping[str, LiveWorker]) -> None:
        """Kill the workers on lost hosts."""
        for name, worker in workers.items():
            if worker.host in self.lost and is_worker(worker.pid, name, self.run_dir):
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)

    def _write(self) -> None:
        """Replace the list whole: the discovery reads it at any moment."""
        replace_whole(self.file, "".join(f"{host}:1\n" for host in self.listed))


def play(process: subprocess.Popen[bytes], stage: Stage, moments: Sequence[Moment],
         status: Callable[[], Status], **facts: Any) -> int:
    """Play moments until the run ends, from its first finished step on; returns its exit code.

    `facts` are for rehearsal.started.
    """
    due = deque(moments)
    ends = {host: moment.at_s for moment in moments for host in moment.lost}
    began: float | None = None
    while process.poll() is None:
        now = status()
        if began is None and now.steps:
            began = time.monotonic()
            stage.events.emit("rehearsal.started", hosts=len(stage.listed), **facts)
        while began is not None and due and due[0].at_s <= time.monotonic() - began:
            moment = due.popleft()
            again_s = next((one.at_s for one in due if one.joined), moment.at_s) - moment.at_s
            stage.act(moment, ends, again_s)
        stage.kill_lost(now.workers)
        time.sleep(TURN_S)
    return process.returncode


@contextmanager
def started(command: Sequence[str], output: IO[Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a launcher, and end it with all its workers when the block is left."""
    parent = os.getpid()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C goes to this process, which passes it on once
        preexec_fn=lambda: end_with_parent(signal.SIGTERM, parent))  # noqa: PLW1509
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a launcher. A second Ctrl-C does not wait for the workers' last checkpoint."""
    for patience_s in (STOP_S, STOP_S):
        if process.poll() is not None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(patience_s)
    process.kill()  # its driver and the workers end without it
    process.wait()

"""The diary of a worker whose host does not share the folder of runs: its lines go to the driver, which writes them.

events → here → wire → driver → `runs/<name>/events.jsonl`

What always holds:
1. No step is voted on before the line of the step before stands in the driver's diary (loop.py flushes). So a host that
   vanishes, or loses the driver, takes at most its newest step's line with it, and the next rank 0 tells that again.
2. A line is written once, however often it is sent: lines are numbered, and each courier has a name of its own.
3. A worker can write of itself only, in this attempt, and nothing that driver and supervisor say; one that is given up,
   not at all: its late lines would stand behind its successor's.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_trainer.config import Launch
from elastic_trainer.state.modes import write_text
from elastic_trainer.wire import DriverClient, DriverUnreachable, WordRefused

RUN_ID_FILE = ".run-id"
RETRY_S = 0.02
WORKERS_EVENTS = ("worker.", "state.", "job.", "run.finished")


def shares_runs(launch: Launch) -> bool:
    """True if the run's folder on this host is the one that the supervisor has made (or nobody has said which is)."""
    if not launch.run_id or launch.run_dir is None:
        return True
    try:
        return (launch.run_dir / RUN_ID_FILE).read_text() == launch.run_id
    except OSError:
        return False


class Courier:
    """Carries one worker's lines to the driver, in order, by a thread and a connection of its own."""

    def __init__(self, launch: Launch):
        assert launch.driver is not None
        self.worker, self.patience_s = launch.worker, launch.limits.driver_lost_s
        self._client = DriverClient(launch.driver, launch.key, timeout_s=launch.limits.driver_lost_s / 2)
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, str]] = deque()
        self._name, self._number = secrets.token_hex(8), 0  # a process that starts anew in place has another one
        threading.Thread(target=self._carry, name="courier", daemon=True).start()

    def take(self, line: str) -> None:
        """Take a line to be carried, when the lines before it have arrived."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, self.patience_s)
            self._number += 1
            self._waiting.append((self._number, line))
            self._changed.notify_all()

    def flush(self) -> bool:
        """Wait until all lines have arrived; False if they have not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, self.patience_s)

    def _carry(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                number, line = self._waiting[0]
            try:
                self._client.ask({"worker": self.worker, "courier": self._name, "number": number, "line": line})
            except DriverUnreachable:
                time.sleep(RETRY_S)
                continue
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()


class Desk:
    """The driver's end: which line of which courier is written already, and which may not be. For one thread at a time."""

    def __init__(self, write: Callable[[str], None], attempt: int):
        self._write, self._attempt = write, attempt
        self._written: dict[str, int] = {}

    def take(self, words: dict[str, Any]) -> None:
        """Write a worker's line, once. Raises WordRefused for one that is no event of this worker's."""
        worker, line = str(words["worker"]), str(words["line"])
        courier, number = str(words["courier"]), int(words["number"])
        if not is_own(line, worker, self._attempt):
            raise WordRefused(f"a line that is no event of {worker}'s")
        if number > self._written.get(courier, 0):
            self._write(line)
            self._written[courier] = number


def is_own(line: str, worker: str, attempt: int) -> bool:
    """True if a line is one event that this worker can tell of: the supervisor acts on what driver and supervisor say."""
    try:
        event = json.loads(line)
    except ValueError:
        return False
    if not isinstance(event, dict) or "\n" in line:
        return False
    name, time_ = event.get("event"), event.get("time")
    return (isinstance(name, str) and name.startswith(WORKERS_EVENTS) and isinstance(time_, float)
            and event.get("worker") == worker and event.get("attempt") == attempt)


def new_run_id(run_dir: Path, run_id: str) -> None:
    """Leave in the run's folder what workers know it by."""
    write_text(run_dir / RUN_ID_FILE, run_id)

"""The diary of a worker whose host does not share the folder of runs: its lines go to the driver, which writes them.

events → here → wire → driver → `runs/<name>/events.jsonl`

What always holds:
1. A line is taken only when all lines before it stand in the driver's diary. So a host that vanishes takes at most its
   newest line with it, and the step that this line told of is told again by the next rank 0 (loop.py).
2. A line is written once, however often it is sent: lines are numbered.
3. Without a driver nobody waits: after `driver_lost_s` the training stops for that reason anyway.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_trainer.config import Launch
from elastic_trainer.wire import DriverClient, DriverUnreachable

RUN_ID_FILE = ".run-id"
RETRY_S = 0.02


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
        self._number = launch.revived_count  # a process that starts anew in place counts on
        threading.Thread(target=self._carry, name="courier", daemon=True).start()

    def take(self, line: str) -> None:
        """Take a line to be carried, when the lines before it have arrived."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, self.patience_s)
            self._number += 1
            self._waiting.append((self._number, line))
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines have arrived."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, self.patience_s)

    def _carry(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                number, line = self._waiting[0]
            try:
                self._client.ask({"worker": self.worker, "number": number, "line": line})
            except DriverUnreachable:
                time.sleep(RETRY_S)
                continue
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()


class Desk:
    """The driver's end: which line of which worker is written already."""

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self._written: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, words: dict[str, Any]) -> dict[str, Any]:
        """Write a line, once; returns the answer to the worker."""
        with self._lock:
            name, number = str(words["worker"]), int(words["number"])
            line = str(words["line"])
            if number > self._written.get(name, 0) and "\n" not in line:
                self._write(line)
                self._written[name] = number
        return {}


def new_run_id(run_dir: Path, run_id: str) -> None:
    """Leave in the run's folder what workers know it by."""
    (run_dir / RUN_ID_FILE).write_text(run_id)

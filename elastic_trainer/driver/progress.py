"""How far the run has come, and what each worker does now: what the driver logs and shows.

heartbeats → membership → here → event driver.step_reached → past.py, supervisor
                            └→ now.json beside the event log → events/now → watch

What always holds:
1. A single worker with a false report can claim neither progress nor a checkpoint. Claimed progress
   would allow attempts without a limit, and a claimed checkpoint that does not exist would keep
   every later attempt from starting. In a world of 3 or more it cannot hide progress either.
2. now.json costs the training nothing. A thread of its own writes it, and has the driver's lock
   only while it copies a few fields of each worker. A full disk or a slow one delays that thread.
3. It is replaced whole, at most once in EVERY_S, and only if a view would show something else, or
   ALIVE_S after the last time. Its own time tells a reader that the driver lives. If it cannot be
   written, stderr has one line, until it can be written again.

Why now.json is no event: a heartbeat a second of each worker would be most of the event log.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from elastic_trainer.driver.roster import Roster, Worker
from elastic_trainer.events.now import NOW_FILE
from elastic_trainer.host.modes import replace_whole
from elastic_trainer.wire.plain import plain

LOG_EVERY_S = 10.0
"""The interval of the events. A driver that is killed loses at most this much progress in the log.
A day has 8,640 such lines."""


def of_most(numbers: Iterable[int]) -> int:
    """Return the largest number that more than half of them have reached; there is at least one."""
    ordered = sorted(numbers)
    return ordered[(len(ordered) - 1) // 2]


class Reached:
    """The steps and the checkpoint of this attempt, and when to log them.

    They are logged at once with the attempt's first step, and when the run comes further than
    ever. Otherwise they are logged at most every LOG_EVERY_S, and at the end. `steps` and
    `checkpoint` are of the attempts before.
    """

    def __init__(self, steps: int, checkpoint: int):
        self.steps = self.checkpoint = 0
        self._ever = steps, checkpoint
        self._logged, self._logged_at = (0, 0), 0.0

    def receive(self, steps: int, checkpoint: int) -> None:
        """Take what most living members report."""
        self.steps = max(self.steps, steps)
        self.checkpoint = max(self.checkpoint, min(checkpoint, self.steps))

    def news(self, now: float, *, is_last: bool = False) -> dict[str, int] | None:
        """Return what is to be logged now, if anything is; it counts as logged then."""
        logged, reached = self._logged, (self.steps, self.checkpoint)
        if reached == logged:
            return None
        passes_ever = any(old <= ever < new
                          for old, ever, new in zip(logged, self._ever, reached, strict=True))
        is_due = now - self._logged_at >= LOG_EVERY_S
        if not (not logged[0] or passes_ever or is_last or is_due):
            return None
        self._logged, self._logged_at = reached, now
        return {"steps": self.steps, "checkpoint": self.checkpoint}


EVERY_S = 1.0
ALIVE_S = 5.0
MOST_WHAT = 100
"""Characters of what a phase works on. A worker may send 50,000."""
LAST_S = 1.0
"""The time for which the end of the attempt waits for the file's removal."""


def now_of(roster: Roster, monotonic: float, clock: float) -> dict[str, Any]:
    """Return the file's content at a time of both clocks. Times in the file are times of day."""
    seats = {name: rank for rank, name in enumerate(roster.members)}
    return {"time": round(clock, 1), "generation": roster.generation,
            "workers": [_worker(worker, seats.get(worker.name, -1), clock - monotonic)
                        for worker in roster.alive()]}


def _worker(worker: Worker, rank: int, offset_s: float) -> dict[str, Any]:
    has_reported = worker.count >= 0
    return {"worker": worker.name, "host": worker.host, "rank": rank, "phase": worker.phase.value,
            "step": worker.step, "drains": worker.drains,
            **({"heard": round(worker.heard_at + offset_s, 1)} if has_reported else {}),
            **_phase(worker, offset_s)}


def _phase(worker: Worker, offset_s: float) -> dict[str, Any]:
    """Return what the worker's loop did at its newest heartbeat, and since when."""
    at = worker.at
    if at is None:
        return {}
    return {"does": at.phase, "what": at.what[:MOST_WHAT],
            "since": round(max(0.0, worker.heard_at + offset_s - at.for_s), 1)}


def is_due(written: dict[str, Any] | None, now: dict[str, Any]) -> bool:
    """True if the file should be written again. The whole seconds since a heartbeat matter."""
    if written is None or now["time"] - written["time"] >= ALIVE_S:
        return True
    return _shown(written) != _shown(now)


def _shown(now: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**worker, **{name: int(now["time"] - worker[name]) for name in ("heard", "since")
                          if name in worker}} for worker in now["workers"]]


class NowFile:
    """Keeps the file of one attempt. `lock` guards the roster."""

    def __init__(self, run_dir: Path, roster: Roster, lock: AbstractContextManager[Any]):
        self.file, self.roster, self.lock = run_dir / NOW_FILE, roster, lock
        self._written: dict[str, Any] | None = None
        self._has_complained = False

    def write(self) -> None:
        """Write the file if that is due. Disk, or network."""
        with self.lock:
            now = now_of(self.roster, time.monotonic(), time.time())
        if not is_due(self._written, now):
            return
        try:
            replace_whole(self.file, json.dumps(now) + "\n")
        except OSError as error:
            self._complain(error)
        else:
            self._written, self._has_complained = now, False

    def remove(self) -> None:
        """Remove the file: the attempt is over."""
        with suppress(OSError):
            self.file.unlink(missing_ok=True)

    def _complain(self, error: OSError) -> None:
        if not self._has_complained:
            print(f"elastic-trainer: {plain(self.file)} cannot be written: {plain(error)}. The "
                  f"training goes on. Until there is room for the file, `elastic-trainer watch` "
                  f"shows no heartbeats.", file=sys.stderr)
        self._has_complained = True


@contextmanager
def kept(run_dir: Path | None, roster: Roster, lock: AbstractContextManager[Any]
         ) -> Iterator[None]:
    """Keep the file within the block."""
    if run_dir is None:
        yield
        return
    file, is_over = NowFile(run_dir, roster, lock), threading.Event()

    def keep() -> None:
        while not is_over.wait(EVERY_S):
            file.write()
        file.remove()

    thread = threading.Thread(target=keep, name="now", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(LAST_S)

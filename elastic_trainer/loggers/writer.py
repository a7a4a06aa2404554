"""One logger in a thread of its own, fed by a bounded queue: it never slows the training or ends
it.

rows.py (rank 0) → queue → here, in a thread → Logger

What always holds:
1. `put` never waits. If the queue is full because the logger blocks, the row is lost and counted.
2. An exception of the logger is an event once, without secrets. A logger that could not be opened
   is opened again, until the run ends.
3. A row is delivered when the flush after its `write` has returned. `close` comes after a flush, so
   what it raises costs no row. Each row that was handed over, that the logger had not before, and
   that is not delivered at the end is lost. So when a thread runs does not change what is counted.
4. A row is written once: rows before the first step that is lacking are left out. Rows that former
   workers could not write are read from the event log, where this host has it.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from elastic_trainer.events.schema import parse
from elastic_trainer.events.segments import Reader
from elastic_trainer.host.priority import LESS, yield_processor
from elastic_trainer.loggers.row import AFTER_STEP, Logger, Row, Run, numbers_of, values_of_step
from elastic_trainer.wire.redact import redacted

MOST_ROWS = 4096
"""The rows that wait for a logger at most."""
FLUSH_S = 1.0
OPEN_AGAIN_S = 30.0
"""Between two tries to open a logger."""
STEP, MORE = "worker.step_committed", {f"worker.{name}": before for name, before in
                                       AFTER_STEP.items()}
_NAMES = tuple(name.encode() for name in (STEP, *MORE))
MOST_READ = 100_000
"""The most rows that are read from the event log."""


class Emit(Protocol):
    """Emits an event with its facts."""

    def __call__(self, event: str, **facts: Any) -> None: ...


class Writer:
    """Writes the rows of one logger, in a thread."""

    def __init__(self, logger: Logger, run: Run, emit: Emit, most_rows: int = MOST_ROWS,
                 after: Writer | None = None):
        self.logger, self.run, self.emit = logger, run, emit
        self.name = type(logger).__name__
        self.given = 0
        """The rows that this worker has handed over."""
        self.filled = self.had = self.delivered = 0
        """The rows that were read from the event log, those that the logger had before, and those
        that are at their place. Counted by the logger's thread."""
        self._rows: queue.Queue[Row | Run | None] = queue.Queue(most_rows)
        self._is_filled = self._has_failed = False
        self._is_stopped = threading.Event()
        """Set when this worker is the first one no more: what waits is another worker's."""
        self._ends = threading.Event()
        """Set when no row comes any more."""
        self._lacking, self._unflushed, self._flushed_at = 0, 0, 0.0
        self._after = after
        """The writer of the same logger before this one."""
        self.thread = threading.Thread(target=self._work, name=f"logger {self.name}", daemon=True)
        self.thread.start()

    # --- the training's thread --------------------------------------------------------------------

    def put(self, row: Row | Run) -> None:
        """Hand over a row, or a run that has gone back."""
        self.given += isinstance(row, Row)
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._fail(f"{self._rows.maxsize} rows wait for it, so further ones are lost")

    def stop(self) -> None:
        """Let the thread end without the rows that wait. Does not wait for it."""
        self._is_stopped.set()
        self.put_end()

    def put_end(self) -> None:
        """Let the thread end after the rows that wait."""
        self._ends.set()
        while True:
            try:
                self._rows.put_nowait(None)
                return
            except queue.Full:
                with suppress(queue.Empty):
                    self._rows.get_nowait()

    def end(self, deadline: float) -> None:
        """Wait until the thread has ended, or until a time (time.monotonic), and log what was
        delivered and lost."""
        self.thread.join(max(0.0, deadline - time.monotonic()))
        if self.thread.is_alive():
            self._fail("it has not ended in time")
        rows = self.delivered
        lost = self.given + self.filled - self.had - rows
        self.emit("worker.logger_closed", logger=self.name, rows=rows, lost=lost)
        if lost:
            print(f"elastic-trainer: the logger {self.name} has lost {lost} rows of this worker.",
                  file=sys.stderr)

    # --- the logger's thread ----------------------------------------------------------------------

    def _work(self) -> None:
        if self._after:
            self._after.thread.join()
        goes_on = True
        while goes_on:
            while not self._guard(self._open):
                if self._ends.wait(OPEN_AGAIN_S):
                    return
            # Not before: W&B's process would inherit it, and not start in time on a busy machine.
            # And not the least: on a host with six busy threads a core, the end of the run came
            # before a row was sent.
            yield_processor(LESS)
            goes_on = self._take_rows()
            self._guard(self._flush)
            self._guard(self.logger.close)

    def _take_rows(self) -> bool:
        """Write rows until the end; return True if the run has gone back instead."""
        while True:
            try:
                row = self._rows.get(timeout=FLUSH_S)
            except queue.Empty:
                self._guard(self._flush)
                continue
            if row is None or self._is_stopped.is_set():
                return False  # what waits is the next first worker's
            if isinstance(row, Run):
                self.run = row
                return True
            self._guard(partial(self._take, row))

    def _guard(self, work: Callable[[], None]) -> bool:
        """Do a part of the work; log what it raises, and return False then."""
        try:
            work()
            return True
        except Exception:
            self._fail(traceback.format_exc())
            return False

    def _take(self, row: Row) -> None:
        if row.step >= self._lacking:
            self._write(self._after_lacking(row))
        else:
            self.had += 1
        if time.monotonic() - self._flushed_at > FLUSH_S:
            self._flush()

    def _after_lacking(self, row: Row) -> Row:
        """Write what is lacking between what the logger has and the first row of this worker;
        return that row, with the evaluations that a former worker has logged after its step."""
        if self._is_filled or not self.run.folder:
            return row
        self._is_filled = True
        logged = {one.step: one for one in rows_of(self.run.folder, self._lacking, row.step + 1)}
        its = logged.pop(row.step, row)
        self.filled += len(logged)
        for one in logged.values():
            self._write(one)
        return replace(row, values=its.values | row.values)

    def _write(self, row: Row) -> None:
        self._lacking = row.step + 1  # also if it raises: the row is lost then
        self.logger.write(row)
        self._unflushed += 1

    def _open(self) -> None:
        self._lacking = self.logger.open(self.run)
        where = redacted(self.logger.where())
        self._is_filled, self._flushed_at = False, time.monotonic()
        self.run = replace(self.run, goes_back=False)
        self.emit("worker.logger_opened", logger=self.name, where=where, step=self._lacking)

    def _flush(self) -> None:
        """Bring the rows that were written to their place. If that fails, they are lost."""
        self._flushed_at = time.monotonic()
        rows, self._unflushed = self._unflushed, 0
        if rows:
            self.logger.flush()
            self.delivered += rows

    def _fail(self, error: str) -> None:
        """Log a failure, once for this worker."""
        if self._has_failed:
            return
        self._has_failed = True
        error = redacted(error)
        print(f"elastic-trainer: the logger {self.name} has failed. The run goes on.\n{error}",
              file=sys.stderr)
        self.emit("worker.logger_failed", logger=self.name, error=error[-10_000:])


def rows_of(folder: Path, first: int, end: int) -> list[Row]:
    """Return from the event log the newest row of each step from `first` on, before `end`: former
    workers have died before they wrote them. Disk: the whole event log."""
    first = max(first, end - MOST_READ)
    steps, more = dict[int, dict[str, Any]](), dict[int, dict[str, float]]()
    for line in Reader(folder).lines(to_the_end=True):
        if not any(name in line for name in _NAMES) or not (event := parse(line)):
            continue
        step = event.get("step")
        if type(step) is not int or not first <= step < end:
            continue
        if (name := event["event"]) in MORE:
            more.setdefault(step, {}).update(numbers_of(event["metrics"], MORE[name]))
        elif name == STEP and not (event.get("repeated") and step in steps):
            steps[step] = event
    return [Row(step, values_of_step(steps[step]) | more.get(step, {}),
                float(steps[step]["time"])) for step in sorted(steps)]

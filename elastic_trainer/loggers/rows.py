"""One row for each finished step, made on every worker; the first worker's loggers write them.

points and events of a worker (Events.reach, Events.emit) → here → writers (writer.py)

What always holds:
1. Every worker makes each row, and keeps the newest ones. So a worker that becomes the first one
   has those that its predecessor had not written any more when it died.
2. A row is complete when the user's code after its step has run: it has the evaluations of that
   step.
3. A worker that is no longer the first one leaves its loggers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.loggers.row import AFTER_STEP, Logger, Row, Run, numbers_of, values_of_step
from elastic_trainer.loggers.writer import Emit, Writer

MOST_KEPT = 1024
"""The rows that each worker keeps for the case that it becomes the first one."""
POINTS = ("job.described", "step.noted", "step.evaluated", "step.logged", "step.handed_over")
CLOSE_S = 30.0
"""For how long the end of a run waits for its loggers."""
CONFIG = ("dataset_size", "global_batch", "microbatches", "epochs", "seed", "steps", "reduce")


class Rows:
    """A listener of a worker: makes rows, and has them written while this worker is the first."""

    def __init__(self, loggers: Sequence[Logger]):
        self._loggers = loggers
        self._folder: Path | None = None
        self._emit: Emit = lambda event, **facts: None
        self._kept: deque[Row] = deque(maxlen=MOST_KEPT)
        self._row: Row | None = None
        """The row of the last step, which is not complete."""
        self._early: dict[int, dict[str, float]] = {}
        """Evaluations after a step that this worker has not noted yet."""
        self._first: int | None = None
        """The first step that this worker has done since the run began, or has gone back."""
        self._is_first = False
        self._writers: list[Writer] = []
        self._left: list[Writer] = []
        """Those of a time when this worker was the first one, which may still end."""
        self._run: dict[str, Any] = {}
        self._config: dict[str, Any] = {}

    def listeners(self) -> list[Rows]:
        """Return what listens to the worker: this object, if there are loggers."""
        return [self] if self._loggers else []

    def begin(self, folder: Path | None, emit: Emit) -> None:
        """Take the folder of the run, and where events go."""
        self._folder, self._emit = folder, emit

    def __call__(self, point: str, facts: dict[str, Any]) -> None:
        """Take what has happened. Other events are of no concern, and may be of another thread."""
        if point not in POINTS:
            return
        self._is_first = facts.get("rank", 0) == 0
        match point:
            case "job.described":
                self._config = {name: facts[name] for name in CONFIG}
            case "step.noted":
                self._run = {"name": str(facts.get("run", "")), "id": facts["run_id"],
                             "attempt": int(facts.get("attempt", 1))}
                self._note(facts)
            case "step.evaluated" | "step.logged":
                before = AFTER_STEP[point.removeprefix("step.")]
                self._add(facts["step"], numbers_of(facts["metrics"], before))
            case "step.handed_over":
                self._complete()
        if self._writers and not self._is_first:
            self._leave()

    # --- rows -------------------------------------------------------------------------------------

    def _note(self, facts: Mapping[str, Any]) -> None:
        """Begin the row of a finished step. It may be noted again, when a generation begins."""
        step = int(facts["step"])
        newest = self._row.step if self._row else self._kept[-1].step if self._kept else -1
        if facts.get("repeated") and step == newest:
            return
        is_whole = not facts.get("repeated")
        if is_whole and step <= newest:
            self._go_back(step)
        if is_whole and self._first is None:
            self._first = step
        self._complete()
        self._row = Row(step, values_of_step(facts) | self._early.pop(step, {}), time.time())
        self._early.clear()

    def _add(self, step: int, values: dict[str, float]) -> None:
        if self._row and self._row.step == step:
            self._row.values.update(values)
        else:
            self._early.setdefault(step, {}).update(values)

    def _complete(self) -> None:
        """Hand the row of the last step to the loggers, if this worker is the first one."""
        if self._row is None:
            return
        row, self._row = self._row, None
        self._kept.append(row)
        self._hand_over(row)

    def _go_back(self, step: int) -> None:
        """Forget the rows from a step on: the run goes back, and does it again."""
        self._row = None
        self._kept = deque((row for row in self._kept if row.step < step), MOST_KEPT)
        self._first = step
        for writer in self._writers:
            writer.put(self._as_run(goes_back=True))

    # --- the loggers ------------------------------------------------------------------------------

    def _hand_over(self, row: Row) -> None:
        if not self._is_first:
            return
        if self._writers:
            for writer in self._writers:
                writer.put(row)
            return
        before, run = self._left, self._as_run()
        self._left = []
        for place, logger in enumerate(self._loggers):
            writer = Writer(logger, run, self._emit, after=before[place] if before else None)
            self._writers.append(writer)
            for kept in self._kept:
                writer.put(kept)

    def _as_run(self, goes_back: bool = False) -> Run:
        first = self._kept[-1].step + 1 if self._first is None else self._first
        return Run(folder=self._folder, first=first, goes_back=goes_back, config=self._config,
                   **self._run)

    def _leave(self) -> None:
        """Stop logging: another worker is the first one now. It has the same rows."""
        for writer in self._writers:
            writer.stop()
        self._left, self._writers = self._writers, []

    def close(self) -> None:
        """Log the last row, and wait for the loggers, CLOSE_S at most."""
        self._complete()
        for writer in self._writers:
            writer.put_end()
        deadline = time.monotonic() + CLOSE_S
        for writer in self._writers:
            writer.end(deadline)
        self._writers = []

"""Rows of former workers, from the event log: what a logger has not got because they all died.

event log → here → writer.py, when a logger is opened behind the first row that this worker has
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic_trainer.events.schema import parse
from elastic_trainer.events.segments import Reader
from elastic_trainer.loggers.row import Row, numbers_of, values_of_evaluation, values_of_step

STEP, EVALUATION, LOGGED = "worker.step_committed", "worker.evaluated", "worker.logged"
_NAMES = (STEP.encode(), EVALUATION.encode(), LOGGED.encode())
MOST = 100_000
"""The most rows that are read."""


def rows_of(folder: Path, first: int, end: int) -> list[Row]:
    """Return the newest row of each step from `first` on, before `end`. Disk: the whole event
    log."""
    first = max(first, end - MOST)
    steps, evaluations = dict[int, dict[str, Any]](), dict[int, dict[str, float]]()
    for line in Reader(folder).lines(to_the_end=True):
        if not any(name in line for name in _NAMES) or not (event := parse(line)):
            continue
        step = event.get("step")
        if type(step) is not int or not first <= step < end:
            continue
        if event["event"] == EVALUATION:
            evaluations.setdefault(step, {}).update(values_of_evaluation(event["metrics"]))
        elif event["event"] == LOGGED:
            evaluations.setdefault(step, {}).update(numbers_of(event["metrics"]))
        elif event["event"] == STEP and not (event.get("repeated") and step in steps):
            steps[step] = event
    return [Row(step, values_of_step(steps[step]) | evaluations.get(step, {}),
                float(steps[step]["time"])) for step in sorted(steps)]

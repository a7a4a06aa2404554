"""What a step consists of: a table of the timelines of all workers.

runs/NAME/timeline/*.json → here → `elastic-trainer report`, and one file for a viewer (--timeline)

What always holds:
1. A line that is no whole event is left out: a worker was killed, or its disk was full.
2. Steps that broke count in no row.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.events.trace import FOLDER
from elastic_trainer.host.modes import private

PHASES = ("load", "forward", "backward", "reduce", "vote", "apply", "behind", "checkpoint")
"""The parts of a step, in the order of the loop."""


@dataclass(frozen=True)
class Row:
    """One phase: its mean time in a step over all workers, and the worker with the longest."""

    phase: str
    step_ms: float
    share: float
    """Of the step."""
    slowest: str
    slowest_ms: float


def events_of(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield the events of timelines, file after file. Disk: one line at a time."""
    for file in files:
        with open(file, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    event = json.loads(line.strip().removesuffix(","))
                except (ValueError, RecursionError):
                    continue  # a bracket, or a torn line
                if isinstance(event, dict) and "ph" in event:
                    yield event


def files_of(run_dir: Path) -> list[Path]:
    """Return the timelines of a run, in the order of their names."""
    return sorted((run_dir / FOLDER).glob("*.json"))


def rows_of(events: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return the table of the phases: that of the whole step is last. Empty without a whole step.

    The spans of a step are before it in the file, so those of a broken one are known in time.
    """
    spent: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    in_step: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    names: dict[int, str] = {}
    steps: dict[int, int] = defaultdict(int)
    for event in events:
        worker, args = int(event.get("pid", 0)), event.get("args") or {}
        if event["ph"] == "M" and event.get("name") == "process_name":
            names[worker] = str(args.get("name")).partition(": ")[2]
            in_step[worker].clear()
        if event["ph"] != "X":
            continue
        name, milliseconds = str(event["name"]), float(event["dur"]) / 1000
        in_step[worker][name] += milliseconds
        if name == "step":
            found = in_step.pop(worker)
            if not args.get("broken"):
                steps[worker] += args.get("phase") == 0
                for phase in (*PHASES, "step"):
                    spent[phase][worker] += found.get(phase, 0.0)
    counted = [worker for worker, count in steps.items() if count]
    return [_row(phase, {worker: spent[phase][worker] / steps[worker] for worker in counted},
                 {worker: spent["step"][worker] / steps[worker] for worker in counted}, names)
            for phase in (*PHASES, "step") if counted]


def _row(phase: str, by_worker: Mapping[int, float], whole: Mapping[int, float],
         names: Mapping[int, str]) -> Row:
    slowest = max(by_worker, key=lambda worker: by_worker[worker])
    return Row(phase, sum(by_worker.values()) / len(by_worker),
               sum(by_worker.values()) / (sum(whole.values()) or 1.0),
               names.get(slowest, ""), by_worker[slowest])


def print_phases(rows: Iterable[Row]) -> None:
    """Print the table for a person."""
    from elastic_trainer.views.tables import Table, print_table

    print_table(Table(["phase", "ms", "share", "most ms", "on worker"], [
        [row.phase, f"{row.step_ms:.2f}", f"{row.share:.1%}", f"{row.slowest_ms:.2f}", row.slowest]
        for row in rows], title="a step"), numbers=("ms", "share", "most ms"))


def join(files: Iterable[Path], target: Path) -> None:
    """Write the events of all timelines into one file, which a viewer opens. Raises OSError."""
    with open(target, "w", encoding="utf-8", opener=private) as joined:
        mark = "[\n"
        for event in events_of(files):
            joined.write(mark + json.dumps(event))
            mark = ",\n"
        joined.write("\n]\n" if mark != "[\n" else "[]\n")

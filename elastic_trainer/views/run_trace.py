"""The whole run in the JSON of trace events (`elastic-trainer report --trace FILE`), and the table
of what a step consists of.

run (the fold of the event log), the workers' timelines → here → Perfetto, chrome://tracing, report

    run            its books with the parts of each pause, attempts, generations, steps,
                   checkpoints, marks, and counters: workers, samples/s, loss
    each host      on the list or not, marks; its workers: booting, ready, in the world, leaving;
                   after a worker the spans of its timeline, if the run has one

What always holds:
1. Slices of one row nest. `laned` puts a slice that would overlap on a further row.
2. The size is bounded. Beyond MAX_STEPS, neighbouring steps of one generation become one slice with
   their number, mean and loss. Beyond MAX_SPAN_BYTES of timelines, each k-th step keeps its spans,
   the same steps on all workers. Beyond MAX_MARKS, further marks are left out and counted.
3. A worker has one slice for all generations in a row of which it is a member.
4. Times are exact to the nanosecond: they count from `start`, which `otherData` has.
5. A line of a timeline that is no whole event is left out: a worker was killed, or its disk was
   full. Steps that broke count in no row of the table.

What it does not do: correct clocks. Times are those of the events and spans.

Source: "Trace Event Format" (Google, 2016), sections JSON Object Format and Complete Events.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from elastic_trainer import renamed
from elastic_trainer.events.event_kind import PAUSE_PARTS
from elastic_trainer.events.fleet import Lane
from elastic_trainer.events.run import Run
from elastic_trainer.events.told import Telling, Told
from elastic_trainer.events.trace import FOLDER, LOOP
from elastic_trainer.host.modes import private
from elastic_trainer.views.tables import Table, print_table

PHASES = ("load", "forward", "backward", "reduce", "vote", "apply", "after", "checkpoint")
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
        name = renamed.PHASES.get(name, name)
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


MAX_STEPS = 50_000
MAX_MARKS = 100_000
MAX_SPAN_BYTES = 64 << 20
"""Of the timelines' JSON: some 400,000 spans."""
SLACK_NS = 500
"""Times of timelines are floats of microseconds since 1970, which are exact to 250 ns."""
_SHOWN = ("driver.worker_started", "driver.worker_ready", "worker.generation_started",
          "attempt.started", "attempt.ended", "state.checkpoint_published")
"""Events that slices show."""
Facts = Mapping[str, object]


class Slice(NamedTuple):
    """A name for the time between two moments, in nanoseconds since 1970."""

    start: int
    end: int
    name: str
    facts: Facts = {}  # noqa: RUF012 (a tuple's default, never changed)


def nanoseconds(time: float) -> int:
    return round(time * 1e9)


def told_for_marks() -> Told:
    """Return what a run keeps of its events in words, if a trace is to be made of it."""
    return Told(most_first=MAX_MARKS)


def laned(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Distribute slices over as few rows as it takes for those of one row to nest."""
    lanes: list[tuple[list[Slice], list[int]]] = []
    for one in sorted(slices, key=lambda slice: (slice.start, -slice.end)):
        for placed, open_ends in lanes:
            start, depth = max(one.start, placed[-1].start), len(open_ends)
            while depth and open_ends[depth - 1] <= one.start + SLACK_NS:
                depth -= 1
                start = max(start, open_ends[depth])
            if not depth or one.end <= open_ends[depth - 1] + SLACK_NS:
                del open_ends[depth:]
                break
        else:
            placed, open_ends, start = [], [], one.start
            lanes.append((placed, open_ends))
        end = max(start, min([one.end, *open_ends[-1:]]))
        placed.append(one._replace(start=start, end=end))
        open_ends.append(end)
    return [placed for placed, _ in lanes]


class TraceFile:
    """Writes trace events, one on a line. A group of rows is a process to the viewers."""

    def __init__(self, file: TextIO, start: float):
        self._file, self._start = file, nanoseconds(start)
        self._groups = self._rows = self._group = 0
        file.write(json.dumps({"displayTimeUnit": "ms", "otherData": {"start": start}})[:-1])
        self._mark = ', "traceEvents": [\n'

    def close(self) -> None:
        self._file.write(f"{self._mark if not self._groups else ''}\n]}}\n")

    def group(self, name: str) -> None:
        """Begin a group. Groups and rows are shown in the order in which they are added."""
        self._groups += 1
        self._group = self._groups
        self._named("process", name, self._groups, 0)

    def row(self, name: str, slices: Iterable[Slice] = (), *, nests: bool = True) -> int:
        """Add a row of slices, or as many as it takes; return the number of the last one.
        `nests`: they nest already."""
        for lane in [slices] if nests else laned(slices):
            self._rows += 1
            self._named("thread", name, self._rows, self._rows)
            for one in lane:
                self._put("X", one.name, one.start, tid=self._rows,
                          dur=(one.end - one.start) / 1000, args=_known(one.facts))
        return self._rows

    def mark(self, row: int, told: Telling) -> None:
        self._put("i", told.event, nanoseconds(told.time), tid=row, s="t", args=_known({
            "says": told.text, "step": told.step, "worker": told.worker or None}))

    def count(self, name: str, at: int, value: float) -> None:
        """Add the value of a counter from a moment on."""
        self._put("C", name, at, args={name: value})

    def _named(self, what: str, name: str, order: int, row: int) -> None:
        for kind, args in ((f"{what}_name", {"name": name}),
                           (f"{what}_sort_index", {"sort_index": order})):
            self._write({"ph": "M", "name": kind, "pid": self._group, "tid": row, "args": args})

    def _put(self, kind: str, name: str, at: int, **more: Any) -> None:
        self._write({"ph": kind, "name": name, "pid": self._group,
                     "ts": (at - self._start) / 1000, **more})

    def _write(self, event: Facts) -> None:
        self._file.write(self._mark + json.dumps(event, default=str))
        self._mark = ",\n"


def _known(facts: Facts) -> dict[str, object]:
    """Return the facts that are known and that JSON has."""
    return {name: value for name, value in facts.items() if value is not None and not (
        isinstance(value, float) and not math.isfinite(value))}


def write_trace(run: Run, run_dir: Path, target: Path) -> str:
    """Write the trace of a run into a file; return a sentence about what it has. Raises OSError.

    `run` was read with `told_for_marks`.
    """
    files = files_of(run_dir)
    every = max(1, -(-sum(file.stat().st_size for file in files) // MAX_SPAN_BYTES))
    spans = spans_of(events_of(files), every)
    start = min([run.now if math.isinf(run.first) else run.first,
                 *(one.start / 1e9 for rows in spans.values() for one in rows[:1])])
    with open(target, "w", encoding="utf-8", opener=private) as file:
        trace = TraceFile(file, start if math.isfinite(start) else 0.0)
        merged = _write_run(trace, run)
        _write_hosts(trace, run, spans)
        trace.close()
        size = file.tell()
    told = [f"{target} has {len(run.steps)} steps, {len(run.generations)} generations, "
            f"{len(run.fleet.hosts)} hosts and {len(run.fleet.lives)} workers in "
            f"{size / 1e6:.1f} MB."]
    if merged > 1:
        told.append(f"A slice has up to {merged} steps.")
    if every > 1:
        told.append(f"Each {every}th step has its phases.")
    if left_out := run.told.left_out + len(run.told.newest):
        told.append(f"{left_out} marks after the first {MAX_MARKS} are left out.")
    return " ".join([*told, "Open it at https://ui.perfetto.dev."])


def _write_run(trace: TraceFile, run: Run) -> int:
    """Write the rows of the run; return how many steps a slice has at most."""
    trace.group(f"run {run.name}")
    periods = [Slice(nanoseconds(start), nanoseconds(end), phase.value)
               for phase, start, end in run.closed().periods.all()]
    trace.row("books", [*periods, *_parts_of_pauses(run)], nests=False)
    trace.row("attempts", (Slice(nanoseconds(it.start), _end(run, it.end), f"attempt {it.number}")
                           for it in run.attempts))
    trace.row("generations", (
        Slice(nanoseconds(it.start), _end(run, it.end), f"generation {it.number}", {
            "workers": it.size, "attempt": it.attempt.number if it.attempt else None,
            "step": it.step, "source": it.source}) for it in run.generations))
    trace.row("checkpoints", (
        Slice(nanoseconds(it.time - it.duration_s), nanoseconds(it.time), "checkpoint", {
            "step": it.step, "bytes": it.bytes, "uploaded_bytes": it.uploaded_bytes,
            "pause_s": it.pause_s}) for it in run.checkpoints), nests=False)
    at_most = -(-len(run.steps) // MAX_STEPS)
    trace.row("steps", steps_of(run, at_most))
    marks = trace.row("marks")
    for told in run.told.first:
        if told.host not in run.fleet.hosts and told.event not in _SHOWN:
            trace.mark(marks, told)
    for time, size in run.sizes:
        trace.count("workers", nanoseconds(time), size)
    for one in steps_of(run, at_most):  # made again: a list of them all takes 30 MB
        for name in (f"{run.steps.unit}/s", "loss"):
            if isinstance(value := one.facts[name], float) and math.isfinite(value):
                trace.count(name, one.end, value)
    return at_most


def _end(run: Run, end: float | None) -> int:
    return nanoseconds(run.now if end is None else end)


def _parts_of_pauses(run: Run) -> Iterator[Slice]:
    for pause in run.recoveries:
        start, last = nanoseconds(pause.time - pause.duration_s), nanoseconds(pause.time)
        for part, seconds in zip(PAUSE_PARTS, pause.parts, strict=True):
            end = min(last, start + nanoseconds(seconds))
            if seconds:
                yield Slice(start, end, part)
            start = end


def steps_of(run: Run, at_most: int) -> Iterator[Slice]:
    """Yield the slices of the steps, with up to `at_most` neighbours of one generation in each."""
    steps, busy, unit = run.steps, 0.0, f"{run.steps.unit}/s"
    firsts = [it.first for it in run.generations]
    for first, stop in zip([0, *firsts], [*firsts, len(steps)], strict=True):
        for low in range(first, stop, at_most or 1):
            high = min(stop, low + (at_most or 1))
            start = max(busy, steps.ends[low] - steps.seconds[low])
            busy = max(start, steps.ends[high - 1])
            total_s = sum(steps.seconds[low:high])
            done = sum(steps.samples[low:high]) if steps.counts_samples else high - low
            yield Slice(nanoseconds(start), nanoseconds(busy),
                        "step" if high - low == 1 else "steps",
                        {"step": steps.numbers[low], "last step": steps.numbers[high - 1],
                         "steps": high - low, "mean s": total_s / (high - low),
                         unit: done / total_s if total_s else None,
                         "loss": steps.losses[high - 1] if steps.counts_samples else None})


def _write_hosts(trace: TraceFile, run: Run, spans: Mapping[tuple[str, str], list[Slice]]) -> None:
    """Write the rows of hosts, of their workers, and of the workers' timelines."""
    marks, workers = defaultdict[str, list[Telling]](list), defaultdict[str, list[str]](list)
    for told in run.told.first:
        if told.event not in _SHOWN:
            marks[told.host].append(told)
    lanes = defaultdict[str, list[Lane]](list)
    for name, host, lane in run.fleet.lives:
        lanes[name].append(lane)
        if name not in workers[host]:
            workers[host].append(name)
    for name, _ in spans:
        if name not in lanes and name not in workers[host := name.partition("/")[0]]:
            workers[host].append(name)
    for host in dict.fromkeys([*run.fleet.hosts, *workers]):
        trace.group(f"host {host}")
        row = trace.row("list", _slices(run, run.fleet.hosts.get(host, Lane())))
        for told in marks.get(host, ()):
            trace.mark(row, told)
        for name in workers[host]:
            trace.row(f"worker {name}", (
                one for lane in lanes.get(name, ()) for one in _slices(run, lane)))
            for what in ("loop", "network"):
                if (name, what) in spans:
                    trace.row(f"{what} of {name}", spans[name, what], nests=False)


def _slices(run: Run, lane: Lane) -> Iterator[Slice]:
    ends = [*(time for time, *_ in lane.states[1:]), run.now]
    for (start, state, facts), end in zip(lane.states, ends, strict=False):
        if state:
            yield Slice(nanoseconds(start), nanoseconds(max(start, end)), state, facts)


def spans_of(events: Iterable[Mapping[str, Any]], every: int) -> dict[tuple[str, str], list[Slice]]:
    """Return the spans by worker and row: those of each `every`-th step, and those of no step."""
    found: dict[tuple[str, str], list[Slice]] = defaultdict(list)
    names: dict[int, str] = {}
    begun: dict[tuple[int, Any], Mapping[str, Any]] = {}
    for event in events:
        pid, args = int(event.get("pid", 0)), event.get("args") or {}
        if event["ph"] == "M" and event.get("name") == "process_name":
            names[pid] = str(args.get("name")).partition(": ")[2]
        if event["ph"] == "b":
            begun[pid, event["id"]] = event
        elif event["ph"] in "Xe":
            row = "loop" if event.get("tid") == LOOP else "network"
            whole = event if event["ph"] == "X" else begun.pop((pid, event["id"]), event)
            facts = whole.get("args") or {}
            if facts.get("step", 0) % every == 0:
                ends = event["ts"] + event.get("dur", 0.0)
                found[names.get(pid, ""), row].append(Slice(
                    round(whole["ts"] * 1000), round(ends * 1000), str(event["name"]), facts))
    return found

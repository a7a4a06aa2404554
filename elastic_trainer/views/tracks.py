"""The whole run as a Perfetto trace: what `elastic-trainer report --trace FILE` writes.

event log, history, timelines of the workers → here → perfetto (the file)

    run            its books with the parts of each pause, attempts, generations, steps,
                   checkpoints, marks, and counters: workers, samples/s, loss
    each host      on the list or not, marks; below it its workers: booting, ready, in the world,
                   leaving; below a worker the spans of its timeline, if the run has one

What always holds:
1. Slices of one track nest (perfetto.laned).
2. The size is bounded. Beyond MAX_STEPS, neighbouring steps of one generation become one slice with
   their number, mean and loss. Beyond MAX_SPAN_BYTES of timelines, each k-th step keeps its spans,
   the same steps on all workers. Beyond MAX_MARKS, further marks are left out and counted.
3. A worker has one slice for all generations in a row of which it is a member.
4. What goes on ends with its attempt at the latest: the next one lists its hosts and starts its
   workers anew. An attempt whose driver was killed ends at its last event.

What it does not do: correct clocks. Times are those of the events and spans.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_trainer.events.event_kind import PAUSE_PARTS, Level
from elastic_trainer.events.event_table import KINDS
from elastic_trainer.events.history import History
from elastic_trainer.events.lifetime import BEGINS, Lifetime
from elastic_trainer.events.schema import UNREADABLE
from elastic_trainer.events.sentences import filled
from elastic_trainer.events.trace import LOOP
from elastic_trainer.host.modes import private
from elastic_trainer.views import phases
from elastic_trainer.views.perfetto import Facts, Slice, TraceFile, laned

MAX_STEPS = 50_000
MAX_MARKS = 100_000
MAX_SPAN_BYTES = 64 << 20
"""Of the timelines' JSON: some 400,000 spans, 20 MB of the trace."""
_SHOWN = ("driver.worker_started", "driver.worker_ready", "worker.generation_started",
          "attempt.started", "attempt.ended", "state.checkpoint_published")
"""Events that slices show."""


def nanoseconds(time: float) -> int:
    """Return a time of the event log in nanoseconds."""
    return round(time * 1e9)


@dataclass
class Lane:
    """What one thing was, and since when: the slices of a track without overlap."""

    slices: list[Slice] = field(default_factory=list)
    open: tuple[int, str, Facts] | None = None

    def become(self, at: int, name: str, **facts: object) -> None:
        """End what is open, and begin `name`; "": nothing follows."""
        if self.open:
            start, before, known = self.open
            self.slices.append(Slice(start, max(start, at), before, known))
        self.open = (at, name, facts) if name else None


@dataclass
class Host:
    """A host of the run."""

    lane: Lane = field(default_factory=Lane)
    marks: list[tuple[int, str, Facts]] = field(default_factory=list)
    workers: dict[str, Lane] = field(default_factory=dict)


class Tracks:
    """A fold over the events of a run: what its trace shows."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self.host_of: dict[str, str] = {}
        self.members: frozenset[str] = frozenset()
        self.attempts, self.generations = Lane(), Lane()
        self.uploads: list[Slice] = []
        self.pauses: list[Slice] = []
        self.marks: list[tuple[int, str, Facts]] = []
        self.count = self.left_out = 0
        """Marks that are shown, and that are not."""
        self.sizes: list[tuple[int, int]] = []
        self.ends, self.seconds, self.losses = array("d"), array("d"), array("d")
        self.steps, self.samples = array("q"), array("q")
        self.firsts: list[int] = []
        """The places in these arrays at which a generation begins."""
        self.unit = "samples/s"
        """Of the rates. Horovod's own style logs commits without samples and loss: "steps/s"."""
        self.life = Lifetime()
        self.now = 0

    def through(self, events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Take the events, and yield them."""
        for event in events:
            self.take(event)
            yield event

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one more event."""
        name = event["event"]
        self.now = max(self.now, nanoseconds(float(event["time"])))
        if name in ("worker.step_committed", "worker.commit_kept"):
            if not event.get("repeated"):
                self._step(event)
            return
        self.life.take(event)
        if name.startswith("driver."):
            self._driver(name, event)
        elif name in BEGINS:
            self._end_attempt(self.life.before)
            if name == "attempt.started":
                self.attempts.become(self.now, f"attempt {event['attempt']}")
        elif name == "attempt.ended":
            self._end_attempt(float(event["time"]))
        elif name == "worker.generation_started":
            self._generation(event)
        elif name == "worker.pause_ended":
            self._pause(event)
        elif name == "state.checkpoint_published":
            took_ns = nanoseconds(float(event.get("duration_s") or 0.0))
            self.uploads.append(Slice(self.now - took_ns, self.now, "checkpoint", {
                "step": event["step"], "bytes": event.get("bytes"),
                "uploaded_bytes": event.get("uploaded_bytes"), "pause_s": event.get("pause_s")}))
        kind = KINDS.get(name)
        if kind and kind.sentence and kind.level is not Level.DETAIL and name not in _SHOWN:
            self._mark(event)

    def close(self) -> None:
        """End what is open at the end of the log."""
        self._end_attempt(self.now / 1e9)

    # --- the run --------------------------------------------------------------------------------

    def _end_attempt(self, time: float) -> None:
        """End what an attempt has left open. `time`: of its last event."""
        at = nanoseconds(time) if math.isfinite(time) else self.now
        for host in self.hosts.values():
            for lane in (host.lane, *host.workers.values()):
                lane.become(at, "")
        self.members = frozenset()
        if self.generations.open:
            self.generations.become(at, "")
            self.sizes.append((at, 0))
        self.attempts.become(at, "")

    def _step(self, event: Mapping[str, Any]) -> None:
        is_commit = event["event"] == "worker.commit_kept"
        if not self.ends:
            self.unit = "steps/s" if is_commit else "samples/s"
        time = float(event["time"])
        self.life.step(time)
        self.ends.append(time)
        self.seconds.append(float(event.get("commit_s" if is_commit else "step_s") or 0.0))
        self.losses.append(math.nan if is_commit else float(event["loss"]))
        self.steps.append(int(event["step"]))
        self.samples.append(1 if is_commit else int(event["samples"]))

    def _generation(self, event: Mapping[str, Any]) -> None:
        size = int(event["size"])
        self.generations.become(self.now, f"generation {event['generation']}", workers=size,
                                attempt=event["attempt"], step=event["step"],
                                source=event["source"])
        self.firsts.append(len(self.ends))
        self.sizes.append((self.now, size))

    def _pause(self, event: Mapping[str, Any]) -> None:
        start = self.now - nanoseconds(float(event["duration_s"]))
        for part in PAUSE_PARTS:
            took_ns = nanoseconds(float(event.get(f"{part}_s") or 0.0))
            end = min(self.now, start + took_ns)
            if took_ns:
                self.pauses.append(Slice(start, end, part))
            start = end

    def _mark(self, event: Mapping[str, Any]) -> None:
        if self.count >= MAX_MARKS:
            self.left_out += 1
            return
        self.count += 1
        try:
            says = filled(KINDS[event["event"]].sentence, event)
        except UNREADABLE:
            says = ""
        host = event.get("host") or self.host_of.get(str(event.get("worker")), "")
        marks = self.hosts[host].marks if host in self.hosts else self.marks
        marks.append((self.now, event["event"], {"says": says or None, "step": event.get("step"),
                                                 "worker": event.get("worker")}))

    # --- hosts and workers ----------------------------------------------------------------------

    def _driver(self, name: str, event: Mapping[str, Any]) -> None:
        worker = str(event.get("worker", ""))
        match name:
            case "driver.host_added":
                self._host(event).lane.become(self.now, "on the list", slots=event.get("slots"))
            case "driver.host_removed":
                self._host(event).lane.become(self.now, "")
            case "driver.worker_started":
                self.host_of[worker] = str(event["host"])
                self._host(event).workers[worker] = lane = Lane()
                lane.become(self.now, "boots", pid=event.get("pid"))
            case "driver.worker_ready":
                self._become(worker, "ready", boot_s=event.get("boot_s"))
            case "driver.worker_gone":
                self._become(worker, "")
            case "driver.generation_formed":
                self._form(event)

    def _form(self, event: Mapping[str, Any]) -> None:
        """Let the newcomers begin, and those who are no members any more end."""
        members = frozenset(map(str, event.get("workers") or ()))
        for worker in members - self.members:
            self._become(worker, "in the world", generation=event["generation"])
        for worker in self.members - members:
            self._become(worker, "leaves")
        self.members = members

    def _become(self, worker: str, state: str, **facts: object) -> None:
        host = self.hosts.get(self.host_of.get(worker, ""))
        lane = host.workers.get(worker) if host else None
        if lane and lane.open:
            lane.become(self.now, state, **facts)

    def _host(self, event: Mapping[str, Any]) -> Host:
        return self.hosts.setdefault(str(event["host"]), Host())


# --- the file -----------------------------------------------------------------------------------

def write_trace(tracks: Tracks, history: History, run_dir: Path, target: Path) -> str:
    """Write the trace of a run into a file; return a sentence about what it has. Raises OSError.

    `tracks` has taken the events of the history.
    """
    tracks.close()
    with open(target, "wb", opener=private) as file:
        trace = TraceFile(file)
        merged = _write_run(trace, tracks, history)
        workers = _write_hosts(trace, tracks)
        every = _write_spans(trace, phases.files_of(run_dir), workers)
        size = file.tell()
    told = [f"{target} has {len(tracks.ends)} steps, {len(tracks.firsts)} generations, "
            f"{len(tracks.hosts)} hosts and {len(workers)} workers in {size / 1e6:.1f} MB."]
    if merged > 1:
        told.append(f"A slice has up to {merged} steps.")
    if every > 1:
        told.append(f"Each {every}th step has its phases.")
    if tracks.left_out:
        told.append(f"{tracks.left_out} marks behind the first {MAX_MARKS} are left out.")
    return " ".join([*told, "Open it at https://ui.perfetto.dev."])


def _write_run(trace: TraceFile, tracks: Tracks, history: History) -> int:
    """Write the tracks of the run; return how many steps a slice has at most."""
    root = trace.track(f"run {history.run}")
    for mark in tracks.marks:
        trace.mark(root, *mark)
    periods = [Slice(nanoseconds(start), nanoseconds(end), phase.value)
               for phase, start, end in history.books.periods]
    _write(trace, "books", root, [*periods, *tracks.pauses])
    _write(trace, "attempts", root, tracks.attempts.slices)
    _write(trace, "generations", root, tracks.generations.slices)
    _write(trace, "checkpoints", root, tracks.uploads)
    at_most = -(-len(tracks.ends) // MAX_STEPS)
    slices = list(steps_of(tracks, at_most))
    _write(trace, "steps", root, slices)
    workers = trace.track("workers", root, unit="")
    for at, size in tracks.sizes:
        trace.count(workers, at, size)
    for name in (tracks.unit, *(["loss"] if tracks.unit == "samples/s" else [])):
        counter = trace.track(name, root, unit="")
        for one in slices:
            value = one.facts[name]
            if isinstance(value, float):
                trace.count(counter, one.end, value)
    return at_most


def steps_of(tracks: Tracks, at_most: int) -> Iterator[Slice]:
    """Yield the slices of the steps, with up to `at_most` neighbours of one generation in each."""
    ends, seconds, busy = tracks.ends, tracks.seconds, 0.0
    for first, stop in zip([0, *tracks.firsts], [*tracks.firsts, len(ends)], strict=True):
        for low in range(first, stop, at_most or 1):
            high = min(stop, low + (at_most or 1))
            start = max(busy, ends[low] - seconds[low])
            busy = max(start, ends[high - 1])
            total_s, samples = sum(seconds[low:high]), sum(tracks.samples[low:high])
            facts: dict[str, object] = {
                "step": tracks.steps[low], "last step": tracks.steps[high - 1],
                "steps": high - low, "mean s": total_s / (high - low),
                tracks.unit: samples / total_s if total_s else None,
                "loss": tracks.losses[high - 1] if tracks.unit == "samples/s" else None}
            yield Slice(nanoseconds(start), nanoseconds(busy), "step" if high - low == 1 else
                        "steps", facts)


def _write_hosts(trace: TraceFile, tracks: Tracks) -> dict[str, int]:
    """Write the tracks of hosts and workers; return the number of each worker's track."""
    numbers = {}
    for name, host in tracks.hosts.items():
        of_host = trace.track(f"host {name}")
        trace.slices(of_host, host.lane.slices)
        for mark in host.marks:
            trace.mark(of_host, *mark)
        for worker, lane in host.workers.items():
            numbers[worker] = trace.track(f"worker {worker}", of_host)
            trace.slices(numbers[worker], lane.slices)
    return numbers


def _write(trace: TraceFile, name: str, parent: int, slices: Iterable[Slice]) -> None:
    for lane in laned(slices):
        trace.slices(trace.track(name, parent), lane)


# --- the timelines of the workers ---------------------------------------------------------------

def _write_spans(trace: TraceFile, files: list[Path], workers: Mapping[str, int]) -> int:
    """Write the spans of the timelines below their workers; return of each how many steps."""
    every = max(1, -(-sum(file.stat().st_size for file in files) // MAX_SPAN_BYTES))
    for (worker, row), slices in spans_of(phases.events_of(files), every).items():
        parent = workers.get(worker) or trace.track(f"worker {worker}")
        _write(trace, row, parent, slices)
    return every


def spans_of(events: Iterable[Mapping[str, Any]],
             every: int) -> dict[tuple[str, str], list[Slice]]:
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

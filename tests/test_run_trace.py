"""The trace of a run, as a viewer reads the JSON of trace events."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from stories import RUN, Event, event, generation, step, write

from elastic_trainer.events.event_kind import PAUSE_PARTS
from elastic_trainer.events.run import Run
from elastic_trainer.events.summary import read_run
from elastic_trainer.events.told import Told
from elastic_trainer.events.trace import Trace
from elastic_trainer.views.run_trace import (
    SLACK_NS,
    Slice,
    laned,
    steps_of,
    told_for_marks,
    write_trace,
)


@dataclass
class Row:
    """What a viewer shows of one row."""

    group: str
    slices: list[tuple[float, float, str, int, dict[str, Any]]] = field(default_factory=list)
    """Start and end in seconds, name, depth, facts."""
    marks: list[str] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)


def viewed(file: Path) -> dict[str, list[Row]]:
    """Return the rows of a trace by name. Asserts that the slices of a row nest, in the order of
    their beginnings."""
    trace = json.loads(file.read_text())
    groups, names, rows = dict[int, str](), dict[tuple[int, int], str](), dict[Any, Row]()
    open_ends: dict[Any, list[float]] = defaultdict(list)
    for one in trace["traceEvents"]:
        key = one["pid"], one.get("tid", one["name"])
        match one["ph"], one["name"]:
            case "M", "process_name":
                groups[one["pid"]] = one["args"]["name"]
            case "M", "thread_name":
                names[key], rows[key] = one["args"]["name"], Row(groups[one["pid"]])
            case "C", name:
                names[key] = name
                rows.setdefault(key, Row(groups[one["pid"]])).counts.append(one["args"][name])
            case "i", name:
                rows[key].marks.append(name)
            case "X", name:
                ends, end = open_ends[key], round(one["ts"] + one["dur"], 3)
                while ends and ends[-1] <= one["ts"]:
                    ends.pop()
                assert not ends or end <= ends[-1], one
                rows[key].slices.append((trace["otherData"]["start"] + one["ts"] / 1e6,
                                         trace["otherData"]["start"] + end / 1e6, name, len(ends),
                                         one["args"]))
                ends.append(end)
    found: dict[str, list[Row]] = defaultdict(list)
    for key, row in rows.items():
        found[names[key]].append(row)
    return found


def written(folder: Path, events: list[Event]) -> Path:
    """Return the trace of a run with these events."""
    run, _ = read_run(write(folder, events), told_for_marks())
    write_trace(run, folder, folder / "run.json")
    return folder / "run.json"


FORMED = [event(5.9, "driver.host_added", host=f"local-{number}", slots=1) for number in (1, 2)]
WORLD = ["local-1/0/1", "local-2/0/1"]
STORY = sorted([
    *({**one, "workers": WORLD} if one["event"] == "driver.generation_formed" else one
      for one in RUN), *[one | {"time": 1.0} for one in FORMED],
    event(9.85, "driver.generation_formed", generation=2, size=1, hosts=["local-1"],
          workers=WORLD[:1], reason="death"),
    event(9.95, "worker.pause_ended", generation=2, step=2, duration_s=0.4, noticing_s=0.1,
          deciding_s=0.05, forming_s=0.1, transfer_s=0.05, redoing_s=0.1)],
    key=lambda one: one["time"])


def of(seen: Mapping[str, list[Row]], name: str) -> list[tuple[float, float, str]]:
    """Return the slices of the only row with a name."""
    (row,) = seen[name]
    return sorted((round(start, 6), round(end, 6), what) for start, end, what, *_ in row.slices)


def listed(seen: Mapping[str, list[Row]], host: str) -> Row:
    """Return the row of a host on the list."""
    (row,) = [row for row in seen["list"] if row.group == f"host {host}"]
    return row


def test_the_trace_has_all_of_the_run(tmp_path: Path) -> None:
    """Attempts, generations, steps, checkpoints, hosts, workers and marks, at their times."""
    seen = viewed(written(tmp_path, STORY))
    assert of(seen, "attempts") == [(1.0, 12.0, "attempt 1"), (13.0, 25.0, "attempt 2")]
    assert of(seen, "generations") == [(6.0, 9.9, "generation 1"), (9.9, 12.0, "generation 2"),
                                       (16.0, 25.0, "generation 1")]
    assert [what for *_, what in of(seen, "books") if what not in PAUSE_PARTS] == [
        "booting", "training", "pausing", "training", "restarting", "training"]
    assert of(seen, "checkpoints") == [(8.4, 8.5, "checkpoint")]
    steps = sorted(seen["steps"][0].slices)
    assert [facts["step"] for *_, facts in steps] == [0, 1, 2, 3, 2, 3]
    assert all(end <= start for (_, end, *_), (start, *_) in zip(steps, steps[1:], strict=False))
    assert of(seen, "worker local-2/0/1") == [
        (1.0, 5.0, "boots"), (5.0, 5.0, "ready"), (5.0, 9.6, "in the world")]
    assert of(seen, "worker local-1/0/1")[-1] == (5.0, 12.0, "in the world")
    assert of({"": [listed(seen, "local-1")]}, "") == [(1.0, 12.0, "on the list")]
    assert listed(seen, "local-2").marks == ["driver.host_added", "driver.worker_gone"]
    assert seen["workers"][0].counts == [2, 2, 0, 2, 0]
    assert len(seen["samples/s"][0].counts) == len(seen["loss"][0].counts) == 6


def test_nothing_of_an_attempt_goes_on_when_its_driver_was_killed(tmp_path: Path) -> None:
    """Its host, its worker, its generation and itself end with its last event; the run is started
    again on another host two days later."""
    def attempt(number: int, begins: float) -> list[Event]:
        host, worker = f"h-{number}", f"h-{number}/0/{number}"
        return [event(begins, "run.started", attempt=number, options={}),
                event(begins, "attempt.started", attempt=number),
                event(begins, "driver.host_added", attempt=number, host=host, slots=1),
                event(begins, "driver.worker_started", attempt=number, host=host, worker=worker,
                      pid=number, slot=0),
                event(begins + 4, "driver.worker_ready", attempt=number, worker=worker, boot_s=4.0),
                event(begins + 5, "driver.generation_formed", attempt=number, generation=1, size=1,
                      hosts=[host], workers=[worker], reason="start"),
                generation(begins + 5, 1, 2 * number - 2, "fresh", 0.0, attempt=number),
                step(begins + 6, 2 * number - 2, attempt=number),
                step(begins + 7, 2 * number - 1, attempt=number)]

    later = 172_800.0
    seen = viewed(written(tmp_path, [*attempt(1, 0.0), *attempt(2, later)]))
    assert of(seen, "attempts") == [(0.0, 7.0, "attempt 1"), (later, later + 7, "attempt 2")]
    assert [end for _, end, _ in of(seen, "generations")] == [7.0, later + 7]
    assert of({"": [listed(seen, "h-1")]}, "") == [(0.0, 7.0, "on the list")]
    assert of(seen, "worker h-1/0/1")[-1] == (5.0, 7.0, "in the world")
    assert of(seen, "worker h-2/0/2")[-1] == (later + 5, later + 7, "in the world")


def test_the_commits_of_horovods_own_style_are_steps(tmp_path: Path) -> None:
    """They have no samples and no loss, so the trace has steps a second."""
    commits = [event(7.0 + at / 2, "worker.commit_kept", step=at, commit_s=0.5) for at in range(10)]
    seen = viewed(written(tmp_path, [*RUN[:8], *commits]))
    assert len(seen["steps"][0].slices) == 10
    assert seen["steps/s"][0].counts == [2.0] * 10
    assert "loss" not in seen and "samples/s" not in seen


def test_the_parts_of_a_pause_are_inside_it(tmp_path: Path) -> None:
    """In their order, without a gap."""
    (books,) = viewed(written(tmp_path, STORY))["books"]
    pause = next(one for one in books.slices if one[2] == "pausing")
    parts = sorted(one for one in books.slices if one[3] == 1)
    assert [name for _, _, name, *_ in parts] == list(PAUSE_PARTS)
    assert parts[0][0] >= pause[0] and parts[-1][1] <= pause[1]
    assert all(first[1] == second[0] for first, second in zip(parts, parts[1:], strict=False))


def test_the_spans_of_a_worker_are_below_it(tmp_path: Path) -> None:
    """Each step with its phases inside, and collectives on a row of their own."""
    trace = Trace(tmp_path / "timeline")
    trace.open(worker="local-1/0/1", generation=1, rank=0, size=2)
    for number in range(3):
        trace.begin_step(number, 0)
        with trace.span("forward"):
            began = trace.now()
        trace.add_transfer("ring.0", began)
        trace.end_step()
    trace.close()
    seen = viewed(written(tmp_path, STORY))
    (loop,) = seen["loop of local-1/0/1"]
    assert sorted((name, depth, facts["step"]) for *_, name, depth, facts in loop.slices) == [
        ("forward", 1, 0), ("forward", 1, 1), ("forward", 1, 2),
        ("step", 0, 0), ("step", 0, 1), ("step", 0, 2)]
    assert len(seen["network of local-1/0/1"][0].slices) == 3
    assert loop.group == seen["worker local-1/0/1"][0].group == "host local-1"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 5_000)), max_size=40))
def test_slices_of_a_track_never_overlap_but_nest(times: list[tuple[int, int]]) -> None:
    """None is lost, and none is moved by more than the error of a timeline's clock."""
    slices = [Slice(start, start + length, "x") for start, length in times]
    lanes = laned(slices)
    assert sum(map(len, lanes)) == len(slices)
    moved = sorted((one.start, one.end) for lane in lanes for one in lane)
    assert all(end >= start for start, end in moved)
    assert all(any(abs(start - one.start) <= SLACK_NS and abs(end - one.end) <= SLACK_NS
                   for one in slices) for start, end in moved)
    for lane in lanes:
        for first in lane:
            for second in lane:
                inside = first.start <= second.start and second.end <= first.end
                behind = second.start >= first.end
                assert inside or behind or (second.start, -second.end) <= (first.start, -first.end)


def test_neighbouring_steps_of_a_long_run_share_a_slice() -> None:
    """Of one generation only; their number, samples and time are kept."""
    long = Run()
    for number in (1, 2):
        long.read(generation(100.0 * number, number, 0, "memory", 0.1))
        for at in range(25):
            long.read(step(100.0 * number + at + 1, at, generation=number))
    slices = list(steps_of(long, 10))
    assert [one.facts["steps"] for one in slices] == [10, 10, 5, 10, 10, 5]
    assert [one.facts["step"] for one in slices] == [0, 10, 20, 0, 10, 20]
    assert {one.facts["samples/s"] for one in slices} == {8.0}
    assert slices[0].start == 100 * 10**9 and slices[0].end == 110 * 10**9


def test_marks_beyond_the_limit_are_counted(tmp_path: Path) -> None:
    """The trace stays small, and says so."""
    run = Run(told=Told(most_first=3)).read_all(STORY)
    more = len(run.told) - 3
    assert more > 0 and f"{more} marks after the first" in write_trace(
        run, tmp_path, tmp_path / "run.json")
    assert sum(len(row.marks) for rows in viewed(tmp_path / "run.json").values()
               for row in rows) <= 3


def test_a_trace_has_more_marks_than_a_page_has_events(tmp_path: Path) -> None:
    """All of them, up to its own limit."""
    redone = [event(11.0 + at / 1e3, "worker.step_redone", step=at) for at in range(400)]
    seen = viewed(written(tmp_path, [*STORY[:12], *redone]))
    assert seen["marks"][0].marks.count("worker.step_redone") == 400


def test_a_run_without_steps_has_a_trace(tmp_path: Path) -> None:
    """Of what has happened so far."""
    seen = viewed(written(tmp_path, RUN[:5]))
    assert of(seen, "attempts") == [(1.0, 4.0, "attempt 1")]
    assert not seen["steps"][0].slices

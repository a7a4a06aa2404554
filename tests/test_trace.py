"""The timeline: what a viewer and the table get from a worker, also from one that was killed."""

from __future__ import annotations

import inspect
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster
from faults import Plan
from simulated import in_worlds
from test_faults import FEW, host

from elastic_trainer import ConfigError, Trainer, train
from elastic_trainer.events import trace as traces
from elastic_trainer.events.trace import LOOP, OLD, Trace, remove_oldest
from elastic_trainer.reduce.flat import Flat
from elastic_trainer.reduce.reducer import TracedWorld
from elastic_trainer.reduce.ring import RingReducer
from elastic_trainer.views.run_trace import PHASES, events_of, files_of, join, rows_of

Event = dict[str, Any]


def trained(**options: Any) -> tuple[torch.nn.Module, str]:
    """Train a small model for 6 steps of 4 micro-batches."""
    torch.manual_seed(0)
    model, points = torch.nn.Linear(8, 4), torch.randn(96, 8)
    result = train(model, torch.optim.SGD(model.parameters(), lr=0.1),
                   torch.utils.data.TensorDataset(points, points[:, :4].argmax(1)),
                   loss=lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]),
                   global_batch=32, microbatches=4, until="6 steps", progress=False, **options)
    return model, result.weights_sha256


def loaded(file: Path) -> tuple[list[Event], bool]:
    """Return the events of a file as a viewer does, and whether its worker has closed it."""
    text = file.read_text().rstrip()
    is_closed = text.endswith("]")
    events: list[Event] = json.loads(text if is_closed else text + "]")
    return events, is_closed


def require_sound(events: list[Event]) -> None:
    """Assert what a viewer needs: the fields of each span, and that the spans of a row nest."""
    open_until: list[float] = []
    spans = [event for event in events if event["ph"] == "X"]
    for span in spans:
        assert set(span) == {"pid", "tid", "name", "ph", "ts", "dur", "args"}, span
        assert span["dur"] >= 0 and span["tid"] == LOOP, span
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        while open_until and open_until[-1] <= span["ts"]:
            open_until.pop()
        end = span["ts"] + span["dur"]
        assert not open_until or end <= open_until[-1], span
        open_until.append(end)
    ends = Counter((event["id"], event["ph"]) for event in events if event["ph"] in "be")
    assert all(count == 1 and (number, "be"["b" == ph]) in ends
               for (number, ph), count in ends.items())


def test_each_step_has_all_of_its_spans_inside(tmp_path: Path) -> None:
    """Six steps of four micro-batches, and a checkpoint."""
    trained(timeline=True, run_dir=tmp_path, checkpoint_every=2)
    (file,) = files_of(tmp_path)
    events, is_closed = loaded(file)
    assert is_closed
    require_sound(events)
    spans = [event for event in events if event["ph"] == "X"]
    counts = Counter((event["args"].get("step"), event["name"]) for event in spans)
    steps = {event["args"]["step"]: event for event in spans if event["name"] == "step"}
    assert set(steps) == set(range(6))
    for number, step in steps.items():
        assert {name: counts[number, name] for name in PHASES[:-1]} == {
            "load": 4, "forward": 4, "backward": 4, "reduce": 1, "vote": 1, "apply": 1,
            "after": 1}
        for span in spans:
            if span["args"].get("step") == number:
                assert step["ts"] <= span["ts"]
                assert span["ts"] + span["dur"] <= step["ts"] + step["dur"]
    assert counts[1, "checkpoint"] == 1  # the next one waits until this one is in the store


def test_no_bit_is_another_with_a_timeline_and_nothing_is_written_without(tmp_path: Path) -> None:
    """Off is the default, and then no span is made."""
    on, off = tmp_path / "on", tmp_path / "off"
    assert trained(timeline=True, run_dir=on)[1] == trained(run_dir=off)[1]
    assert files_of(on) and not (off / traces.FOLDER).exists()
    silent = Trace()
    assert silent.span("a") is silent.span("b") and silent.now() == 0


def test_a_resumed_run_writes_other_files(tmp_path: Path) -> None:
    """The same attempt of the same worker never overwrites a timeline."""
    trace = Trace(tmp_path)
    for attempt in (1, 2):
        trace.open(worker="a/0/1", attempt=attempt, generation=1, rank=0)
    trace.close()
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_a_timeline_without_a_folder_is_refused() -> None:
    """Alone, without run_dir."""
    with pytest.raises(ConfigError, match="timeline is on, but there is no folder"):
        trained(timeline=True)
    assert "timeline" in inspect.signature(Trainer).parameters


def test_the_newest_spans_stay_when_a_file_is_full(tmp_path: Path) -> None:
    """The file and its older half are bounded, and both load."""
    trace = Trace(tmp_path, max_bytes=20_000)
    trace.open(worker="a/0/1", generation=1, rank=0)
    for step in range(1000):
        trace.begin_step(step, 0)
        with trace.span("vote"):
            pass
        trace.end_step()
    trace.close()
    old, new = sorted(tmp_path.glob("*.json"), key=lambda file: not file.name.endswith(OLD))
    assert old.stat().st_size + new.stat().st_size < 25_000
    events = loaded(old)[0] + loaded(new)[0]
    steps = [event["args"]["step"] for event in events if event["name"] == "step"]
    assert steps == list(range(steps[0], 1000)) and steps[0] > 0
    require_sound(loaded(new)[0])


def test_the_oldest_files_go_when_the_folder_is_full(tmp_path: Path) -> None:
    """By their time, whatever their names."""
    for age, name in enumerate("bca"):
        file = tmp_path / f"{name}.json"
        file.write_bytes(bytes(100))
        os.utime(file, (1000 - age, 1000 - age))
    remove_oldest(tmp_path, 200)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["b.json", "c.json"]


def test_each_write_ends_with_a_whole_event(tmp_path: Path) -> None:
    """So whatever a killed worker has left is an array without its end."""
    trace = Trace(tmp_path)
    trace.open(worker="a/0/1", generation=1, rank=0)
    (file,) = tmp_path.iterdir()
    for step in range(3):
        trace.begin_step(step, 0)
        trace.end_step()
        events, is_closed = loaded(file)
        assert not is_closed and events[-1]["args"]["step"] == step


def test_a_step_that_broke_is_marked_and_in_no_row(tmp_path: Path) -> None:
    """Its generation has ended in the middle of it."""
    trace = Trace(tmp_path)
    for generation in (1, 2):
        trace.open(worker="a/0/1", generation=generation, rank=0)
        trace.begin_step(7, 0)
        with trace.span("vote"):
            pass
        if generation == 2:
            trace.end_step()
    trace.close()
    steps = [event["args"] for event in events_of(sorted(tmp_path.iterdir()))
             if event["name"] == "step"]
    assert steps == [{"step": 7, "phase": 0, "broken": True}, {"step": 7, "phase": 0}]
    rows = {row.phase: row for row in rows_of(events_of(sorted(tmp_path.iterdir())))}
    assert rows["step"].share == 1.0 and rows["vote"].slowest == "a/0/1"


def test_the_training_goes_on_when_the_timeline_cannot_be_written(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder is a file here."""
    (tmp_path / traces.FOLDER).write_text("")
    assert trained(timeline=True, run_dir=tmp_path)[1]
    assert "cannot be written" in capsys.readouterr().err


def test_each_bucket_of_ring_is_on_the_network_once(tmp_path: Path) -> None:
    """In a world of two, and the sums are those without a timeline."""

    def act(member: Any) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(700, 700)  # two buckets of gradients
        flat = Flat(dict(model.named_parameters()), {}, torch.device("cpu"))
        trace = Trace(tmp_path / str(member.rank) if tmp_path else None)
        trace.open(worker=f"h/{member.rank}/0", generation=1, rank=member.rank)
        reducer, seen = RingReducer(flat, 2), TracedWorld(member, trace)
        trace.begin_step(0, 0)
        for microbatch in reducer.begin(member):
            reducer.microbatch(microbatch, is_last=True)
            flat.gradients.open()
            loss = model(torch.ones(1, 700) * (microbatch + 1)).sum()
            flat.add_statistics(0.5, loss, {}, {})
            loss.backward()
            flat.close_microbatch()
        flat.add_counts(reducer.mine(), 0)
        reducer.send(seen)
        with trace.span("reduce"):
            reducer.finish(seen)
        trace.end_step()
        trace.close()
        assert model.weight.grad is not None
        return [float(model.weight.grad[0, 0]), len(reducer.buckets)]

    (first, buckets), (second, _) = in_worlds(2, act)
    assert first == second == 3.0
    for rank in range(2):
        (file,) = (tmp_path / str(rank)).iterdir()
        events, _ = loaded(file)
        require_sound(events)
        sent = [event["name"] for event in events if event["ph"] == "b"]
        assert sorted(sent) == ["reduce.message", *(f"ring.{n}" for n in range(int(buckets)))]
        assert all(event["args"]["bytes"] for event in events if event["ph"] == "b")


def test_each_generation_has_its_timelines_when_a_worker_is_killed(
        tmp_path: Path, twin_of: Callable[..., str]) -> None:
    """Four files of the first generation, three of the next; that of the killed worker loads. A new
    worker of its host may come before the last step."""
    plan = Plan().kill(host=host(2), at="step.prepared", step=12)
    with Cluster(tmp_path, job=FEW, plan=plan, options=("--timeline",)) as cluster:
        assert cluster.finish() == 0
        cluster.assert_nothing_lost(twin_of(*FEW), victims=1)
        opened = cluster.events("worker.timeline_opened")
    assert {event["folder"] for event in opened} == {str(cluster.run_dir / traces.FOLDER)}
    generations: dict[int, dict[str, tuple[list[Event], bool]]] = {}
    workers = set[str]()
    for file in files_of(cluster.run_dir):
        events, is_closed = loaded(file)
        require_sound(events)
        (begin,) = [event["args"] for event in events if event["name"] == "generation"]
        workers.add(begin["worker"])
        generations.setdefault(begin["generation"], {})[begin["worker"].split("/")[0]] = (
            events, is_closed)
    before, *later = (generations[number] for number in sorted(generations))
    after = later[0]
    assert len(later) <= 2 and set(later[-1]) <= set(before)
    assert set(before) == {host(rank) for rank in range(4)} and set(after) == set(before) - {
        host(2)}
    assert {name for name, (_, is_closed) in before.items() if not is_closed} == {host(2)}
    killed = [event["args"]["step"] for event in before[host(2)][0] if event["name"] == "step"]
    assert killed == list(range(12))
    for name, (events, is_closed) in after.items():
        of_steps = [event["args"] for generation in (before, *later)
                    for event in generation[name][0] if event["name"] == "step"]
        assert is_closed and [step["step"] for step in of_steps if "broken" not in step] == [
            *range(40)]
        assert [step["step"] for step in of_steps if "broken" in step] == [12]
        assert "pause" in {event["name"] for event in events}
    join(files_of(cluster.run_dir), tmp_path / "all.json")
    joined = json.loads((tmp_path / "all.json").read_text())
    assert len({event["pid"] for event in joined}) == len(workers)
    # A vote ends on all workers at about the same time: their clocks are one.
    assert {row.phase for row in rows_of(joined)} == {*PHASES, "step"}

"""The laws of the one table of events: all that emit and all that read agree with it."""

from __future__ import annotations

import ast
import json
import string
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from folds import status_of

from elastic_trainer.events.event_kind import EventKind, Field, Level, Phase
from elastic_trainer.events.event_table import COMMON, GROUPS, KINDS
from elastic_trainer.events.log import Events, read_events
from elastic_trainer.events.run import Run
from elastic_trainer.events.schema import REQUIRED, fields_of, flaw, misfit, parse_object
from elastic_trainer.events.sentences import ENDINGS, filled
from elastic_trainer.events.summary import summarize_log
from elastic_trainer.renamed import present
from elastic_trainer.views.tables import summary_rows

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = sorted({path for folder in ("elastic_trainer", "state", "discovery")
                  for path in (ROOT / folder).rglob("*.py")
                  if "observe" not in path.parts})
ALL_KINDS = [kind for kinds in GROUPS.values() for kind in kinds]
NAMES = {field.name for field in COMMON}
BOUND = {"event", "time", "run", "attempt", "worker", "generation", "rank", "size"}
"""What Events puts on each line of a worker (the world binds the last three)."""
PACKAGES = tuple({f"{name.partition('.')[0]}." for name in KINDS})


class Place(NamedTuple):
    """A place in the code that emits an event."""

    where: str
    kind: str
    facts: set[str]
    has_more: bool
    """Some facts come from a dict (**facts)."""
    level: str


def emitted() -> list[Place]:
    """Return all places that emit an event by a literal name."""
    places = []
    for path in PRODUCT:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            called = ast.unparse(call.func).rpartition(".")[2]
            if called not in ("emit", "append_event", "Remark", "report"):
                continue
            literals = [it.value for argument in call.args[:2] for it in ast.walk(argument)
                        if isinstance(it, ast.Constant) and isinstance(it.value, str)]
            facts = {keyword.arg for keyword in call.keywords if keyword.arg}
            has_more = called == "Remark" or len(facts) < len(call.keywords)
            levels = [it.value.value for it in call.keywords
                      if it.arg == "level" and isinstance(it.value, ast.Constant)]
            places += [Place(f"{path.name}:{call.lineno}", kind, facts, has_more, *levels or [""])
                       for kind in literals if kind.startswith(PACKAGES)]
    return places


def example(field: Field) -> Any:
    """Return a right value of a field."""
    texts = field.kind.noun.removeprefix("one of ").split(", ")
    values: list[Any] = [1, *texts, "a", 1.5, True, [], {}]
    return next(value for value in values if field.kind.check(value))


def example_of(kind: EventKind, **facts: Any) -> dict[str, Any]:
    fields = (*COMMON, *kind.fields)
    return {field.name: example(field) for field in fields} | {"event": kind.name} | facts


def test_every_event_that_is_emitted_is_declared_with_its_fields() -> None:
    """No unknown event, no unknown field, no field that a declared event lacks, no other level."""
    wrong = []
    places = emitted()
    for place in places:
        kind = KINDS.get(place.kind)
        if kind is None:
            wrong.append(f"{place.where} emits {place.kind}, which event_table.py does not declare")
            continue
        known = NAMES | {field.name for field in kind.fields}
        needed = {field.name for field in kind.fields if field.is_required} - BOUND
        wrong += [
            f"{place.where}: {place.kind} has no field {name}" for name in place.facts - known
        ]
        if not place.has_more:
            wrong += [f"{place.where}: {place.kind} lacks {name}" for name in needed - place.facts]
        if place.level not in ("", kind.level.value):
            wrong.append(f"{place.where}: {place.kind} is {kind.level.value}, not {place.level}")
    assert not wrong
    assert len(places) > 60


def test_every_declared_event_is_emitted() -> None:
    """The table has no dead event: its name is a literal in the product."""
    texts = {it.value for path in PRODUCT for it in ast.walk(ast.parse(path.read_text()))
             if isinstance(it, ast.Constant) and isinstance(it.value, str)}
    assert {kind.name for kind in ALL_KINDS} - texts == set()


def test_names_are_unique_and_of_a_package() -> None:
    """`package.subject_participle`."""
    names = [kind.name for kind in ALL_KINDS]
    assert len(names) == len(set(names)) == len(KINDS)
    assert all(name.count(".") == 1 and name.islower() for name in names)


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.name)
def test_each_sentence_can_be_filled_from_the_declared_fields(kind: EventKind) -> None:
    """Of what the event itself has, and of the host and pid of its worker, which `watch` knows."""
    event = example_of(kind)
    assert misfit(event) == "" and flaw(event) == ""
    facts = {"host": "a", "pid": 7} | event
    if isinstance(kind.sentence, str):
        used = {name for _, name, _, _ in string.Formatter().parse(kind.sentence) if name}
        optional = {field.name for field in kind.fields if not field.is_required}
        always = {"host", "pid", "boot_s", "loss", "exit_code", "run_value", "given", "value"}
        assert used <= facts.keys() and used & optional <= always
    sentence = filled(kind.sentence, facts)
    if kind.name not in ("driver.worker_gone", "worker.stopped"):
        assert bool(sentence) == (kind.level is not Level.DETAIL)
    assert status_of([event])


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.name)
def test_an_event_that_lacks_a_field_or_has_an_unknown_one_is_a_misfit(kind: EventKind) -> None:
    """And one whose value is of another type."""
    event = example_of(kind)
    assert "surplus" in misfit(event | {"surplus": 1})
    for field in fields_of(kind).values():
        if field.name == "event":
            continue
        lacking = {name: value for name, value in event.items() if name != field.name}
        assert bool(misfit(lacking)) == field.is_required
        assert bool(flaw(lacking)) == (field.is_required and field.is_read)
        wrong = event | {field.name: object()}
        assert field.kind.check(object()) or field.name in misfit(wrong)
        assert field.kind.check(object()) or bool(flaw(wrong)) == field.is_read
        assert (field.name in REQUIRED[kind.name]) == (field.is_read and field.is_required)


def test_an_event_outside_the_table_is_written_and_counted(tmp_path: Path, made_up_events: None
                                                           ) -> None:
    """Silence would lose a fact, and raising would end a run. The report says how many there
    are."""
    events = Events(tmp_path, run="x", attempt=1)
    events.emit("worker.invented", step=3)
    events.emit("worker.left")
    assert [event["event"] for event in read_events(tmp_path)] == ["worker.invented", "worker.left"]
    result = summarize_log(tmp_path)
    assert (result["unknown_events"], result["skipped_lines"]) == (1, 0)
    assert "1 events that this version" in dict(summary_rows(result))["unknown"]


def test_warnings_and_errors_have_their_level_on_the_line(tmp_path: Path) -> None:
    """`jq 'select(.level == "error")'` finds what needs a person."""
    events = Events(tmp_path, run="x", attempt=1, worker="a/0/1")
    events.emit("worker.left")
    events.emit("worker.failed", error="ValueError")
    events.emit("state.store_unavailable", error="SlowDown")
    levels = [event.get("level") for event in read_events(tmp_path)]
    assert levels == [None, "error", "warning"]


@pytest.mark.parametrize("kind", [kind for kind in ALL_KINDS if kind.closes],
                         ids=lambda kind: kind.name)
def test_the_time_before_an_event_is_accounted_for_as_the_table_declares(kind: EventKind) -> None:
    """The account of the last period is the one that the event closes."""
    run = Run(name="x")
    start = 10.0
    run.read(example_of(KINDS["worker.generation_started"], time=start, attempt=1))
    if kind.name == "run.started":  # no attempt is left open by a stop
        run.read(example_of(KINDS["attempt.ended"], time=start + 1, attempt=1))
    attempt = 2 if kind.name in ("attempt.started", "worker.generation_started") else 1
    run.read(example_of(kind, time=start + 5, duration_s=2.0, attempt=attempt))
    phase, _, end = run.accounts.periods.all()[-1]
    assert (phase, end) == (kind.closes, start + 5)
    assert {kind.closes for kind in ALL_KINDS} == {*Phase, None} - {Phase.BOOTING}


def test_each_reason_of_the_table_is_one_of_the_drivers() -> None:
    """Whatever ends a worker has its meaning, and its place in the report. (That no other reason is
    emitted is checked in the event logs of all tests, by `misfit`.)"""
    texts = {it.value for path in (ROOT / "elastic_trainer" / "driver").glob("*.py")
             for it in ast.walk(ast.parse(path.read_text()))
             if isinstance(it, ast.Constant) and isinstance(it.value, str)}
    assert ENDINGS.keys() - texts <= {"evicted"}  # of version 0.1


def test_the_page_of_the_documentation_is_what_its_command_writes(tmp_path: Path) -> None:
    """When this fails: python -m elastic_trainer.views.events_page FILE."""
    subprocess.run([sys.executable, "-m", "elastic_trainer.views.events_page",
                    str(tmp_path / "events.md")], cwd=ROOT, check=True)
    assert (tmp_path / "events.md").read_bytes() == (ROOT / "docs" / "events.md").read_bytes()


def test_the_lines_of_version_0_1_are_events(tmp_path: Path) -> None:
    """A log is read by newer versions: what was written then has no flaw now."""
    text = (ROOT / "tests" / "data" / "events-0.1.jsonl").read_text()
    lines = [present(json.loads(line)) for line in text.splitlines()]
    assert len(lines) > 30
    assert [flaw(line) for line in lines if flaw(line)] == []
    assert {line["event"] for line in lines} <= KINDS.keys()


@pytest.mark.parametrize("value", [
    "NaN", "-Infinity", "\"\\ud800\"", "1e999", "18446744073709551615",
    "[" * 500 + "]" * 500, "\"\u00e9\"", "0.1", "-0.0", "1e-400"])
def test_a_line_is_read_as_by_the_module_json(value: str) -> None:
    """Also what orjson refuses and our writer may write: NaN, infinities, half a character."""
    line = f'{{"loss": {value}, "a": null}}'
    found = parse_object(line.encode())
    assert repr(found) == repr(json.loads(line)) == repr(parse_object(line))


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b'{"a": 1', b'{"a": "\xff"}', b'{"a": 1} {}',
                                  b"[" * 200_000])
def test_a_line_without_an_object_is_none(line: bytes) -> None:
    """Torn, of another kind, not UTF-8, or nested without an end."""
    assert parse_object(line) is None

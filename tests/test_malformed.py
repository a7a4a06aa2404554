"""What a worker sends is data to be checked: no event and no heartbeat stops a run, its driver or a
reader of its log."""

from __future__ import annotations

import io
import json
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from folds import past_of
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from test_verify import eventful

from elastic_trainer.config import Launch, Limits
from elastic_trainer.discovery import client
from elastic_trainer.driver.driver import MendedDriver
from elastic_trainer.driver.membership import Membership
from elastic_trainer.driver.past import COUNTED_BY, Follower
from elastic_trainer.driver.progress import LOG_EVERY_S, Reached, of_most
from elastic_trainer.driver.roster import Phase, Worker
from elastic_trainer.events.event_table import KINDS
from elastic_trainer.events.log import Events, newest_attempt, read_events
from elastic_trainer.events.log_shipper import (
    BURST_S,
    BYTES_PER_S,
    LINES_PER_S,
    LineHandler,
    LineRefused,
    LogShipper,
    TooEarly,
)
from elastic_trainer.events.run import Run
from elastic_trainer.events.schema import (
    MAX_LINE_BYTES,
    MAX_NAME,
    fields_of,
    flaw,
    flaw_of_message,
    parse,
)
from elastic_trainer.events.segments import LONGEST_LINE_BYTES, Reader
from elastic_trainer.events.summary import summarize, summarize_log, write_result
from elastic_trainer.schedule.schedule import MAX_DATASET_SIZE, MAX_GLOBAL_BATCH, Schedule
from elastic_trainer.views.page import page, read
from elastic_trainer.views.status import status_of
from elastic_trainer.views.tables import print_summary
from elastic_trainer.views.verify import verify
from elastic_trainer.views.watch import Watch, plain_line
from elastic_trainer.wire.messages import MAX_BODY_BYTES, MessageRefused, MessageServer
from elastic_trainer.wire.seal import SIGNATURE, Kind, seal, worker_key

Event = dict[str, Any]
KEY = b"the key of this run"
COMMITTED = {"time": 1.5, "event": "worker.step_committed", "worker": "a/0/1", "attempt": 1,
             "step": 0, "generation": 1, "size": 1, "samples": 8, "digest": 1, "loss": 0.5}
NO_STEP = {"time": 1.0, "event": "state.checkpoint_published", "attempt": 1}
STARTED = {"time": 1.0, "event": "driver.worker_started", "worker": "a/0/1", "attempt": 1, "pid": 1,
           "host": "a"}
MALFORMED = {
    "no step": json.dumps(NO_STEP),
    "a step that is a text": json.dumps(NO_STEP | {"step": "12"}),
    "a step that is not whole": json.dumps(NO_STEP | {"step": 1.5}),
    "a step that is too large for 64 bits": json.dumps(NO_STEP | {"step": 10**30}),
    "a step that is infinite": json.dumps(NO_STEP | {"step": float("inf")}),
    "a step of ten thousand digits": json.dumps(NO_STEP)[:-1] + f', "step": {"9" * 10_000}}}',
    "a committed step without its samples": json.dumps(
        {"time": 1.0, "event": "worker.step_committed", "attempt": 1, "step": 3}),
    "a time that is a text": json.dumps(NO_STEP | {"step": 1, "time": "now"}),
    "a time after the last day": json.dumps(NO_STEP | {"step": 1, "time": 1e300}),
    "a time that is none": json.dumps(NO_STEP | {"step": 1, "time": float("nan")}),
    "no time": '{"event": "attempt.started", "attempt": 2}',
    "an attempt that is a list": '{"time": 1.0, "event": "attempt.started", "attempt": []}',
    "an attempt that is too large": json.dumps(
        {"time": 1.0, "event": "worker.left", "attempt": 10**12}),
    "a name that is a number": '{"time": 1.0, "event": 7}',
    "lists in lists": "[" * 200_000 + "]" * 200_000,
    "lists in lists of an event": '{"time": 1.0, "event": "worker.left", "x": ' + (
        "[" * 100_000 + "]" * 100_000 + "}"),
    "no text": b"\xff\xfe\x00".decode("latin-1"),
    "a host that is an option of ssh": json.dumps(STARTED | {"host": "-oProxyCommand=id"}),
    "a process id that means all processes": json.dumps(STARTED | {"pid": -1}),
    **{f"{name} without its host or seconds": json.dumps(NO_STEP | {"event": name, "step": 1})
       for name in ("discovery.host_in", "discovery.host_out", "driver.host_removed",
                    "worker.commit_kept")},
}
PROVES_NOTHING = ("worker.left", "driver.worker", "driver.host", "discovery.", "worker.commit_kept")


def log_of(run_dir: Path, events: list[Event], *others: str) -> Path:
    """Write an event log with other lines in its middle."""
    run_dir.mkdir(exist_ok=True)
    lines = [json.dumps(event) for event in events]
    (run_dir / "events.jsonl").write_text("\n".join([*lines[:9], *others, *lines[9:]]) + "\n")
    return run_dir


@pytest.mark.parametrize("line", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_event_is_left_out_and_counted_by_every_reader(tmp_path: Path,
                                                                   line: str) -> None:
    """The supervisor starts, result.json is written, and both say what they say without that
    line."""
    events = [e | {"slots": 1} if e["event"] == "driver.host_added" else e for e in eventful()]
    clean = summarize_log(log_of(tmp_path / "clean", events))
    run_dir = log_of(tmp_path / "run", events, line)
    before = past_of(events)
    before.malformed = 1
    assert Follower(run_dir).read() == Follower(run_dir).read() == before
    assert write_result(run_dir) == clean | {"skipped_lines": 1}
    assert newest_attempt(run_dir) == max(event.get("attempt") or 0 for event in events)
    log = Reader(run_dir)
    assert status_of(Run().read_all(log.events())).is_over and log.malformed == 1
    proves_nothing = line.startswith("{") and "[[[" not in line and any(
        f'"{name}' in line for name in PROVES_NOTHING)
    verdict = verify(run_dir)
    assert verdict.is_proved == proves_nothing
    assert proves_nothing == any("1 malformed event of kinds that prove nothing" in note
                                 for note in verdict.notes)


def test_a_line_without_an_end_costs_its_reader_bounded_memory(tmp_path: Path) -> None:
    """It is read in pieces, left out, and what stands behind it is read."""
    events = eventful()
    run_dir = log_of(tmp_path, events, "x" * (3 * LONGEST_LINE_BYTES + 5))
    log = Reader(run_dir)
    assert max(map(len, log.lines())) <= LONGEST_LINE_BYTES
    assert read_events(run_dir) == events
    with (run_dir / "events.jsonl").open("a") as file:
        file.write("y" * (LONGEST_LINE_BYTES + 7))
    assert [len(line) for line in log.lines()] == [LONGEST_LINE_BYTES]


def test_the_event_that_is_glued_to_a_torn_line_is_read(tmp_path: Path) -> None:
    """A writer that was killed in its line has not ended it; the next event may be the end of the
    attempt."""
    events = eventful()
    torn = json.dumps(events[3])[:30] + json.dumps(events[4])
    assert read_events(log_of(tmp_path, events, torn)) == [*events[:9], events[4], *events[9:]]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-2, 60) | st.floats()
    | st.text(max_size=8) | st.sampled_from(
        [10**400, 2**63, -(2**63), 1e308, "finished", "memory", "a", "\x1b[31m", "[/x]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.text(max_size=4), inner, max_size=3), max_leaves=5)
NAMES = sorted(KINDS)
FIELDS = sorted({field.name for kind in KINDS.values() for field in fields_of(kind).values()
                 if field.is_read} | {"off_s", "error", "reason", "hosts"})


@st.composite
def harmed(draw: st.DrawFn) -> list[str]:
    """An honest run's lines, some with other values in some fields, and some that nobody has
    written."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    lines = []
    for event in eventful():
        if chance.random() < 0.1:
            event = event | {chance.choice(FIELDS): draw(VALUES)}
        if chance.random() < 0.05:
            event = {key: value for key, value in event.items() if chance.random() < 0.8}
        if chance.random() < 0.05:
            event = {"time": 1030.0, "event": chance.choice(NAMES), "attempt": 1} | draw(
                st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6))
        lines.append(json.dumps(event)[:: 1 if chance.random() < 0.98 else 2])
    return lines


@settings(max_examples=150, deadline=None)
@given(harmed())
def test_no_reader_fails_whatever_the_log_holds(lines: list[str]) -> None:
    """Supervisor, report, watch, page and verify: values of any type and size, in any field."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        (run_dir / "events.jsonl").write_text("\n".join(lines) + "\n")
        Follower(run_dir).read()
        events = read_events(run_dir)
        status = status_of(Run().read_all(events))
        assert page([read(run_dir)])
        console = Console(file=io.StringIO(), width=100)
        shown = Watch(run_dir, console)
        shown.status = status
        console.print(shown.picture())
        plain_line(status)
        print_summary(summarize(events), console)
        newest_attempt(run_dir)
        verify(run_dir).sentences()


# --- what the supervisor decides on ---------------------------------------------------------------

def test_the_supervisor_believes_driver_and_supervisor_only() -> None:
    """A worker that claims steps, checkpoints, attempts and deaths changes nothing."""
    events = [e | COUNTED_BY if e["event"] == "attempt.started" else e for e in eventful()]
    lies = [COMMITTED | {"time": 9e8 * number, "attempt": 7, "event": name, "step": 10**15}
            for number, name in enumerate(
                ("state.checkpoint_published", "worker.left", "worker.step_committed"))]
    assert [flaw(lie) for lie in lies] == [""] * 3
    assert past_of([*events, *lies]) == past_of(events)


def test_the_supervisor_reads_the_log_of_an_older_version() -> None:
    """Where no driver counts steps (also in plain horovodrun) the workers' lines do, until an
    attempt that is counted."""
    events = eventful()
    past = past_of(events)
    published = [e["step"] for e in events if e["event"] == "state.checkpoint_published"]
    committed = [e["step"] for e in events if e["event"] == "worker.step_committed"]
    assert (past.newest_checkpoint, past.newest_step) == (max(published), max(committed) + 1)
    assert past.trained == sorted(
        {e["attempt"] for e in events if e["event"] == "worker.step_committed"})
    started = {"time": 5000.0, "event": "attempt.started", "attempt": past.attempt + 1} | COUNTED_BY
    late = NO_STEP | {"time": 5001.0, "attempt": past.attempt, "step": 10**9}
    reached = {"time": 5002.0, "event": "driver.step_reached", "attempt": past.attempt + 1,
               "steps": 99, "checkpoint": 0}
    longer = past_of([*events, started, late, late | {"attempt": past.attempt + 1}, reached])
    assert (longer.newest_checkpoint, longer.newest_step) == (max(published), 99)


def test_the_driver_reports_to_the_supervisor_how_far_the_run_has_come() -> None:
    """Also after attempts that dropped steps: the furthest counts."""
    past = past_of({"time": 1.0, "event": "driver.step_reached", "attempt": attempt, "steps": steps,
                    "checkpoint": checkpoint}
                   for attempt, steps, checkpoint in ((1, 50, 40), (2, 45, 45), (3, 0, 0)))
    assert (past.newest_step, past.newest_checkpoint) == (50, 45)
    assert (past.trained, past.attempt) == ([1, 2], 3)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=9), st.integers(0, 10**18),
       st.integers(0, 8))
def test_one_worker_alone_does_not_decide_how_far_the_run_has_come(
        steps: list[int], lie: int, who: int) -> None:
    """More than half of them have finished so many steps; in a world of 3 or more one that says
    less counts for nothing."""
    output = of_most(steps)
    assert sum(step >= output for step in steps) > len(steps) / 2
    others = steps[: who % len(steps)] + steps[who % len(steps) + 1 :]
    with_lie = of_most([*others, lie])
    assert with_lie <= max(others, default=lie)
    if len(steps) >= 3:
        assert with_lie >= min(others)


def test_the_driver_reports_at_once_when_the_run_has_come_further_than_ever() -> None:
    """And that the attempt has trained; what follows is told every 10 s, and at the end."""
    reached = Reached(steps=50, checkpoint=40)
    assert reached.news(0.0, is_last=True) is None
    logged = []
    for second in range(40):
        reached.receive(30 + second, 30 if second < 25 else 45)
        if news := reached.news(float(second)):
            logged.append((second, news["steps"], news["checkpoint"]))
    assert logged == [(0, 30, 30), (10, 40, 30), (20, 50, 30), (21, 51, 30), (25, 55, 45),
                    (35, 65, 45)] and LOG_EVERY_S == 10
    assert reached.news(39.0, is_last=True) == {"steps": 69, "checkpoint": 45}
    assert reached.news(99.0, is_last=True) is None


def test_reports_of_dead_workers_count_when_all_are_dead() -> None:
    """The newest step that most have finished does not depend on who lives on."""
    members = Membership(first_workers=1, min_workers=1, max_workers=None)
    for number, (step, published) in enumerate([(7, 5), (8, 5), (10**12, 10**12)]):
        members.workers[f"w{number}"] = Worker(f"w{number}", "a", number, 0.0, 0.0, step=step,
                                               phase=Phase.TRAINING, published=published)
    members.roster.members = ("w0", "w1", "w2")
    assert members.reached() == (8, 5)
    for worker in members.workers.values():
        worker.phase = Phase.GONE
    assert members.reached() == (0, -1)


# --- what arrives at the driver -------------------------------------------------------------------

MESSAGE = {
    "worker": "a/0/1", "count": 1, "pid": 2, "time": 1.0, "meets_at_once": True, "saves": False,
    "published": -1, "phase": "training", "generation": 1, "accepted": 0, "holds_state": True,
    "drains": False, "step": 3, "probe_port": 9, "unreachable": None, "hold_s": 0.25, "seen": "",
    "arithmetic": {"program": 1, "inputs": 2, "result": 3, "facts": {"torch": "2"},
                   "is_exact": True}}


def driver_of(worker: Worker, events: Events | None = None) -> MendedDriver:
    """Return a driver that knows one worker."""
    numbers = SimpleNamespace(num_proc=1, min_num_proc=1, max_num_proc=None, elastic_timeout=None,
                              ssh_port=None, ssh_identity_file=None)
    driver = MendedDriver(numbers, {}, [], events or Events(None))
    driver.membership.workers[worker.name] = worker
    return driver


def carried(handler: LineHandler, number: int, line: str, shipper: str = "x",
            worker: str = "a/0/1") -> None:
    handler.take({"worker": worker, "shipper": shipper, "number": number, "line": line})


@pytest.mark.parametrize("line", [
    *MALFORMED.values(), json.dumps(COMMITTED | {"x": "y" * MAX_LINE_BYTES}),
    json.dumps(COMMITTED | {"x": "ä"}, ensure_ascii=False)])
def test_the_driver_writes_no_malformed_event(line: str) -> None:
    """It is refused with a sentence that says nothing of the value."""
    lines: list[str] = []
    handler = LineHandler(lines.append, attempt=1)
    with pytest.raises(LineRefused) as refused:
        carried(handler, 1, line)
    assert not lines and len(str(refused.value)) < 120 and "9999" not in str(refused.value)
    assert handler.refused["a/0/1"] == 1
    carried(handler, 2, json.dumps(COMMITTED))
    assert lines == [json.dumps(COMMITTED)]


def test_a_worker_cannot_fill_the_disk_of_the_driver() -> None:
    """So many lines and bytes a second, with a burst; the others are refused, and other workers are
    heard."""
    lines, now = list[str](), [0.0]
    handler = LineHandler(lines.append, 1, clock=lambda: now[0])

    def flood(line: str, seconds: int) -> int:
        before = len(lines)
        for _ in range(10 * seconds):
            now[0] += 0.1
            for _ in range(200):
                try:
                    carried(handler, len(lines) + 1, line)
                except TooEarly:
                    break
        return len(lines) - before

    line = json.dumps(COMMITTED)
    assert flood(line, 60) <= (60 + BURST_S) * LINES_PER_S + 1
    now[0] += 1000.0
    long = json.dumps(COMMITTED | {"x": "y" * 100_000})
    assert flood(long, 60) * 100_000 <= (60 + BURST_S) * BYTES_PER_S + 100_500
    carried(handler, 1, line.replace("a/0/1", "b/0/1"), worker="b/0/1")
    assert "b/0/1" in lines[-1]


def test_the_driver_remembers_few_shippers_of_a_worker() -> None:
    """One that names a new one with each line costs no memory, and the newest is still heard
    once."""
    lines: list[str] = []
    handler = LineHandler(lines.append, 1)
    for number in range(1000):
        for _ in range(2):
            carried(handler, 1, json.dumps(COMMITTED), shipper=f"c{number}")
    assert len(lines) == 1000 and len(handler._writers["a/0/1"].written) <= 16
    handler.forget("a/0/1")
    assert not handler._writers


def test_a_valid_message_is_accepted() -> None:
    """As our_driver.py sends them, and those of older workers."""
    for message in (
            MESSAGE, {"worker": "a/0/1", "count": 1, "phase": "booting", "generation": 0},
            MESSAGE | {"machine": {"step": -1, "microbatch": -1, "kind": "EIO", "text": "…"},
                       "error": ""},
            {"worker": "a/0/1", "shipper": "x", "number": 1, "line": "{}"}):
        assert flaw_of_message(message) == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [("phase", "bogus"), ("phase", []), ("step", "7"), ("step", -1), ("step", 2**64),
     ("generation", None), ("generation", 1.0), ("count", "1"), ("pid", -1), ("probe_port", 70_000),
     ("accepted", {}), ("unreachable", "all"), ("unreachable", [1]), ("unreachable", ["x"] * 5000),
     ("arithmetic", [1]), ("arithmetic", {"program": 1}), ("time", float("nan")), ("time", "now"),
     ("error", "x" * 60_000), ("error", ["x"]), ("machine", {"step": 1}),
     ("machine", {"step": 1, "microbatch": 0, "kind": "x", "text": "y", "host": "another"}),
     ("published", 10**30), ("holds_state", 1), ("seen", ["x"]), ("hold_s", "1"), ("worker", 7),
     ("step", None), ("accepted", None), ("published", None), ("error", None), ("probe_port", None),
     ("time", None), ("saves", None)])
def test_a_malformed_message_changes_nothing_at_the_driver(field: str, value: Any) -> None:
    """The driver decides on workers' reports: a text where a number belongs would end the
    attempt."""
    driver = driver_of(Worker("a/0/1", "a", 0, 0.0, 0.0, phase=Phase.TRAINING, generation=1))
    driver.membership.hosts_listed({"a": 1})
    driver.membership.roster.members = ("a/0/1",)
    before = repr(vars(driver.membership.workers["a/0/1"]))
    with pytest.raises(MessageRefused, match="a malformed message"):
        driver.messages.take(MESSAGE | {"hold_s": 0} | {field: value}, "127.0.0.1")
    assert repr(vars(driver.membership.workers["a/0/1"])) == before
    driver.messages.take(MESSAGE | {"hold_s": 0}, "127.0.0.1")
    assert driver.membership.workers["a/0/1"].step == 3


def test_an_honest_worker_does_not_wait_for_ever_with_a_line_that_is_refused(
        capsys: pytest.CaptureFixture[str]) -> None:
    """The driver says why, the shipper says it on stderr and goes on; a line that is too early is
    sent again."""
    lines, logged = list[str](), list[tuple[str, Event]]()
    events = Events(None, attempt=1)
    events.listeners.append(lambda event, facts: logged.append((event, facts)))
    driver = driver_of(Worker("a/0/1", "a", 0, 0.0, 0.0), events)
    driver.messages.lines, early = LineHandler(lines.append, attempt=1), [True, False, False]
    take = driver.messages.lines.take

    def too_early_at_first(words: Event) -> None:
        if early.pop(0):
            raise TooEarly
        take(words)

    driver.messages.lines.take = too_early_at_first  # type: ignore[method-assign]
    server = MessageServer("127.0.0.1", KEY, driver.messages.take, lambda *_: None)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    shipper = LogShipper(Launch(
        driver=f"127.0.0.1:{server.address[1]}", key=worker_key(KEY, "a/0/1"), worker="a/0/1",
        limits=Limits(driver_lost_s=60.0)))
    shipper.take(json.dumps(COMMITTED | {"step": "one"}))
    shipper.take(json.dumps(COMMITTED))
    assert shipper.flush()
    server.shutdown()
    assert lines == [json.dumps(COMMITTED)] and driver.messages.lines.forget("a/0/1") == 1
    assert "the driver refused a line of the event log" in capsys.readouterr().err
    assert [event for event, _ in logged] == ["driver.stranger_refused"]
    assert "its step is missing, or not a whole number" in logged[0][1]["reason"]


HEALTH = {"state": "ready", "why": "", "deadline": None, "for_good": False, "life": "1",
          "rebalance": False, "refused": 0, "workers": [{"doing": "step 7"}], "standby": 0}


@pytest.mark.parametrize(("field", "value"), [
    ("deadline", "soon"), ("deadline", float("inf")), ("deadline", [1]), ("refused", float("inf")),
    ("refused", "many"), ("workers", 7), ("workers", [{}]), ("workers", ["step 7"]),
    ("time", "now"), ("time", None), ("standby", {}), ("state", None)])
def test_an_agents_malformed_answer_is_no_answer(field: str, value: Any,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """The poller decides by the deadline, and `hosts` shows it; a long reason is cut."""
    # Now: an agent whose clock is a minute off is refused for that.
    well = HEALTH | {"time": time.time()}
    says = {k: v for k, v in (well | {field: value}).items() if k != "state" or v}

    def get(address: str, key: bytes, nonce: str,
            timeout_s: float) -> tuple[int, dict[str, str], bytes]:
        body = json.dumps(says).encode()
        return 200, {SIGNATURE: seal(key, Kind.HEALTH, nonce.encode(), body)}, body

    monkeypatch.setattr(client, "get_health", get)
    with pytest.raises(client.AgentUnreachable):
        client.ask("a:1", KEY, 1.0)
    says = well | {"why": "x" * 50_000, "deadline": 1.9e9}
    health = client.ask("a:1", KEY, 1.0)
    assert health.deadline == 1.9e9 and len(health.why) == client.MAX_TEXT


# --- what we write ourselves ----------------------------------------------------------------------


def test_a_long_event_is_shortened_where_it_is_written(tmp_path: Path,
                                                       made_up_events: None) -> None:
    """A NaN loss in a batch of a million samples names them all: its line would be refused, and the
    run would wait."""
    events, heard = Events(tmp_path), list[Event]()
    events.listeners.append(lambda event, facts: heard.append(facts))
    samples, error = [[*range(300_000)]], "ä" * 200_000 + "the end"
    events.emit("worker.loss_not_finite", attempt=1, step=7, samples=samples, error=error,
                microbatches=[*range(300_000)])
    [line] = Reader(tmp_path).lines()
    logged = parse(line)
    assert len(line) <= MAX_LINE_BYTES and logged and logged["shortened"] is True
    assert logged["step"] == 7 and logged["microbatches"] == [*range(100)]
    assert logged["error"].endswith("the end")
    assert heard[0]["samples"] is samples and heard[0]["error"] is error


def test_an_event_of_many_long_values_is_shortened_until_it_fits(tmp_path: Path,
                                                                 made_up_events: None) -> None:
    """Also a hundred tracebacks of characters that JSON writes as twelve."""
    events = Events(tmp_path)
    events.emit("worker.failed", **{f"error_{n}": "\U0001f600" * 50_000 for n in range(100)})
    [line] = Reader(tmp_path).lines()
    assert len(line) <= MAX_LINE_BYTES and parse(line)


def test_a_line_of_an_event_fits_into_a_message_to_the_driver() -> None:
    """Each quote and backslash of it is escaped once more on its way."""
    line = json.dumps(COMMITTED | {"x": "\\" * (MAX_LINE_BYTES // 2 - 400)})
    assert MAX_LINE_BYTES - 1000 < len(line) <= MAX_LINE_BYTES
    words = {"worker": "h" * MAX_NAME, "shipper": "0" * 16, "number": 2**63, "line": line}
    assert len(json.dumps(words)) < MAX_BODY_BYTES


def test_the_largest_honest_values_are_no_flaw() -> None:
    """A seed of 64 bits, a batch of the largest size, a loss that is NaN."""
    job = {"time": 1.7e9, "event": "job.described", "attempt": 1, "steps": 2**48, "epochs": None,
           "dataset_size": MAX_DATASET_SIZE, "global_batch": MAX_GLOBAL_BATCH, "reduce": "exact",
           "microbatches": MAX_GLOBAL_BATCH, "seed": 2**64 - 1, "max_steps": None,
           "drop_last": False}
    assert flaw(job) == ""
    schedule = Schedule(dataset_size=MAX_DATASET_SIZE, global_batch=2**16, microbatches=1,
                        seed=2**64 - 1)
    digest = schedule.batch_digests(range(1))[0]
    assert flaw(COMMITTED | {"loss": float("nan"), "digest": digest * 2**6, "step_s": 0.0}) == ""

"""The laws of `elastic-trainer replay`: a fleet is played as it was recorded, and the judgement
finds what is wrong."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import DEADLINE_S, JOB, PATIENT, Cluster, end_turn, is_running, take_turn
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verify import Story
from waiting import wait_for

from elastic_trainer.commands.command import main
from elastic_trainer.config import ConfigError
from elastic_trainer.events.fleet import LiveWorker
from elastic_trainer.events.log import read_events
from elastic_trainer.events.summary import summarize
from elastic_trainer.rehearse.outcome import (
    Outcome,
    forecast,
    outcome_of,
    played_of,
    rows_played,
)
from elastic_trainer.rehearse.pools import SHIPPED, Storm, of_rows, parse_storm, rows_of
from elastic_trainer.rehearse.replay import (
    Rehearsal,
    end_of,
    price_of,
    print_outcome,
    room_of,
    rows,
)
from elastic_trainer.rehearse.stage import Stage, started
from elastic_trainer.rehearse.trace import (
    JOIN,
    LOSS,
    NOTICE,
    Moment,
    Row,
    address,
    listed,
    parse_trace,
    peak,
    read_trace,
    text_of,
    timetable,
)
from elastic_trainer.views.verify import judge

ROOT = Path(__file__).resolve().parent.parent
Event = dict[str, Any]

# --- traces ---------------------------------------------------------------------------------------

RECORDED = "0,add,n1\n0,add,n2\n1000000,remove,n1\n1200000,add,n1\n"
SIMPLE = """# what the recorded one means
time_s,event,host
1200,join,n1
0,join,n1
0,join,n2
880,notice,n1
"""


def test_both_forms_of_a_trace_have_the_same_meaning() -> None:
    """A removed node had a notice of 120 s; a notice without a loss takes its host 120 s later; the
    order of lines does not matter."""
    rows = parse_trace(SIMPLE, "x")
    assert parse_trace(RECORDED, "x") == rows == [
        Row(0.0, JOIN, "n1"), Row(0.0, JOIN, "n2"), Row(880.0, NOTICE, "n1"),
        Row(1000.0, LOSS, "n1"), Row(1200.0, JOIN, "n1")]
    assert listed(rows) == [(0.0, 2), (880.0, 1), (1000.0, 1), (1200.0, 2)]


@pytest.mark.parametrize("text", [
    RECORDED, "time_s,event,host\n0,join,n1\n0,join,n2\n1000,notice,n1\n1000,loss,n1\n"
              "1200,join,n1\n"])
def test_a_notice_of_0_s_is_no_notice(text: str) -> None:
    """Neither for the judgement nor for `plan`: its host had no time to leave."""
    rows = parse_trace(text, "x", notice_s=0.0)
    assert [(row.time_s, row.event) for row in rows if row.host == "n1"] == [
        (0.0, JOIN), (1000.0, LOSS), (1200.0, JOIN)]
    assert not of_rows(rows).noticed.any()


def test_a_trace_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    """It begins with a byte order mark, and its lines end with CR and LF."""
    (tmp_path / "trace.csv").write_bytes(
        b"\xef\xbb\xbf" + SIMPLE.replace("# what the recorded one means\n", "").replace(
            "\n", "\r\n").encode())
    assert read_trace(tmp_path / "trace.csv") == parse_trace(SIMPLE, "x")


@pytest.mark.parametrize(("text", "fact"), [
    ("", "no row"),
    ("time_s,event,host\n", "no row"),
    ("0,add," + "a" * 200_000, "Line 1 of x is '0,add,aaa"),
    ("0,add,a\n5,lost,a", "Line 2 of x is '5,lost,a'"),
    ("# c\n\n-1,add,a", "Line 3"),
    ("time_s,event,host\n0,join,a\nnan,loss,a", "Line 3"),
    ("time_s,event,host\n0,join", "Line 2"),
    ("0,add,a\n5,add,a", "join of host a at 0.005 s, when it is there"),
    ("0,add,b\n0,remove,a", "loss of host a at 0 s, when it is not there"),
    ("time_s,event,host\n0,join,b\n5,notice,a", "notice of host a at 5 s"),
    ("time_s,event,host\n0,join,a\n5,notice,a\n6,join,a", "join of host a at 6 s"),
    ("0,add,a\n5000,remove,a", "ends without a host"),
])
def test_a_trace_that_contradicts_itself_is_refused_with_its_place(text: str, fact: str) -> None:
    """At once, with the line or the host, in a sentence and not in a page."""
    with pytest.raises(ConfigError) as error:
        parse_trace(text, "x", may_end_empty="no row" in fact)
    assert fact in str(error.value) and len(str(error.value)) < 400


DRAWN = [(117.394, NOTICE, "host2"), (117.394, NOTICE, "host3"), (237.394, LOSS, "host2"),
         (237.394, LOSS, "host3")]

# --- storms ---------------------------------------------------------------------------------------

STORMS = st.builds(Storm, rate=st.floats(1.0, 200.0), bulk=st.floats(0.0, 0.5),
                   zero=st.floats(0.0, 0.5), notice=st.floats(0.0, 1.0),
                   replace=st.floats(0.0, 900.0), hours=st.just(2.0),
                   seed=st.integers(0, 2**32))


def powered(rows: list[Row]) -> list[int]:
    """Return how many hosts have power after each row."""
    found, hosts = [], 0
    for row in rows:
        hosts += {JOIN: 1, NOTICE: 0, LOSS: -1}[row.event]
        found.append(hosts)
    return found


@given(STORMS, st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_a_storm_takes_the_last_host_only_in_a_zero_and_returns_all(storm: Storm,
                                                                     hosts: int) -> None:
    """Its rows are those of a trace, the fleet never grows beyond its size, and at the end it is
    whole."""
    rows = rows_of(storm, hosts)
    assert rows == rows_of(storm, hosts)
    counts = listed(rows)
    assert max(count for _, count in counts) == counts[-1][1] == hosts
    if not storm.zero:
        assert min(powered(rows)[hosts - 1:]) >= 1
    assert [row.time_s for row in rows] == sorted(row.time_s for row in rows)


def test_a_storm_has_the_shares_that_it_was_given() -> None:
    """Rate, bulk, zeros, notices and the time to replace, over 2,000 hours."""
    storm = parse_storm("rate=12/h,bulk=0.4,zero=0.1,notice=0.25,replace=100,hours=2000,seed=7")
    losses: dict[float, list[Row]] = {}
    noticed = 0
    for row in rows_of(storm, 32):
        if row.event == NOTICE:
            noticed += 1
            losses.setdefault(row.time_s, []).append(row)
        elif row.event == LOSS:
            losses.setdefault(row.time_s, []).append(row)
    sudden = [rows for rows in losses.values() if rows[0].event == LOSS]
    announced = [rows for rows in losses.values() if rows[0].event == NOTICE]
    count = len(announced) / 0.25
    assert abs(count / 2000 / 12 - 1) < 0.05
    sizes = [len(rows) for rows in announced]
    assert abs(sum(1 < size <= 8 for size in sizes) / len(sizes) - 0.4) < 0.03
    assert abs(sum(size > 8 for size in sizes) / len(sizes) - 0.1) < 0.02
    assert sudden and noticed


def test_a_storm_is_the_same_on_each_machine() -> None:
    """A seed names a storm, also in a bug report: these numbers were drawn once."""
    rows = rows_of(parse_storm("rate=12/h,bulk=0.4,zero=0.1,seed=7"), 4)
    assert [(round(row.time_s, 3), row.event, row.host) for row in rows[4:8]] == DRAWN


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_storm_shows_its_kind_in_the_first_minute(name: str) -> None:
    """At the default speed on 4 hosts: `calm` announces each loss and takes hosts one by one,
    `rough` does not, and `zeros` takes all."""
    rows = rows_of(parse_storm(name), 4)
    moments = [moment for moment in timetable(rows, 4, 10.0) if moment.at_s < 60.0]
    losses = [moment for moment in moments if moment.lost]
    assert len(losses) >= 3
    announced = {host for moment in moments for host in moment.noticed}
    is_announced = all(host in announced for moment in losses for host in moment.lost)
    assert is_announced == (name == "calm")
    assert (max(len(moment.lost) for moment in losses) > 1) == (name != "calm")
    assert (0 in powered([row for row in rows if row.time_s < 600.0])) == (name == "zeros")


def test_the_documentation_has_the_shipped_storms() -> None:
    """With their values, so that a user can change one."""
    page = (ROOT / "docs" / "guide" / "rehearse.md").read_text()
    assert [name for name, values in SHIPPED.items() if f"| `{name}` | {values} |" not in page
            ] == []


@pytest.mark.parametrize("text", ["", "gale", "rate=12/h,fog=1", "rate=0/h", "bulk=0.4",
                                  "rate=12/h,bulk=0.7,zero=0.4", "rate=12/h,seed=1/h",
                                  "rate=12/h,notice=2", "rate=1000,hours=10000"])
def test_a_storm_with_a_mistake_is_refused(text: str) -> None:
    """With the value and one that works."""
    with pytest.raises(ConfigError, match="--storm"):
        parse_storm(text)


# --- local hosts ----------------------------------------------------------------------------------

def test_a_fleet_that_fits_is_played_as_it_is() -> None:
    """A host that joins again has a new address; times are divided by the speed."""
    assert timetable(parse_trace(SIMPLE, "x"), 2, 10.0) == [
        Moment(0.0, ("127.0.0.1", "127.0.0.2"), (), ()), Moment(88.0, (), ("127.0.0.1",), ()),
        Moment(100.0, (), (), ("127.0.0.1",)), Moment(120.0, ("127.0.0.3",), (), ())]


@given(STORMS, st.integers(1, 60), st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_a_larger_fleet_keeps_its_shape(storm: Storm, fleet: int, hosts: int) -> None:
    """Scaled, it has no host only where the fleet has none, never more than asked for, and each
    address once; who is noticed is lost."""
    rows = rows_of(storm, fleet)
    moments = timetable(rows, hosts, 1.0)
    joined = [host for moment in moments for host in moment.joined]
    lost = [host for moment in moments for host in moment.lost]
    assert len(set(joined)) == len(joined) and len(set(lost)) == len(lost)
    assert {host for moment in moments for host in moment.noticed} <= set(lost) <= set(joined)
    counts, on_list = dict(listed(rows)), set[str]()
    most = peak(rows)
    for moment in moments:
        on_list = (on_list | set(moment.joined)) - set(moment.noticed) - set(moment.lost)
        assert len(on_list) <= hosts
        if moment.at_s in counts:
            wanted = counts[moment.at_s] if most <= hosts else counts[moment.at_s] * hosts / most
            assert abs(len(on_list) - wanted) < 1 and bool(on_list) == bool(wanted)


def test_addresses_are_of_the_loopback_network() -> None:
    """None is the address of a network, or for all of one."""
    found = [address(number) for number in range(1, 70_000)]
    assert len(set(found)) == len(found) and found[254] == "127.0.1.1"
    assert not any(one.endswith((".0", ".255")) for one in found)


def test_local_hosts_are_bounded_by_cores_and_memory() -> None:
    """Small machines get 4, large ones two for each core, and none more than fit the memory."""
    gibibyte = 2**30
    assert [room_of(2, 16 * gibibyte), room_of(16, 64 * gibibyte), room_of(16, 2 * gibibyte),
            room_of(2, 0)] == [4, 32, 2, 0]


@pytest.mark.parametrize(("argv", "fact"), [
    (["--storm", "rough", "--hosts", "9999"], "room for"),
    (["--storm", "rough", "--workers", "3"], "--workers is given"),
    (["--storm", "rough", "-np", "3", "--", "python", "x.py"], "-np is given"),
    (["--storm", "rough", "--speed", "0"], "--speed is 0"),
    (["--storm", "rough", "--steps", "5", "--", "python", "x.py"], "--steps is an option"),
    (["--storm", "rough", "python", "x.py"], "comes after --"),
    (["--trace", "nowhere.csv"], "nowhere.csv cannot be read"),
    (["--storm", "rough", "--run", "a/b"], "--run is 'a/b'"),
    (["--storm", "rough", "--run", "there"], "a rehearsal begins with new ones"),
    (["--storm", "rough", "--runs-dir", "file", "--run", "x", "--", "true"],
     "file/x cannot be a run's folder"),
    (["--storm", "rough", "--run", "x" * 300, "--", "true"], "cannot be a run's folder"),
])
def test_a_mistake_of_the_user_is_refused_before_anything_starts(
        argv: list[str], fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2, and no folder is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "there").mkdir(parents=True)
    (tmp_path / "runs" / "there" / "events.jsonl").write_text("{}\n")
    (tmp_path / "file").write_text("")
    assert main(["replay", *argv]) == 2
    assert fact in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["there"]


# --- the judgement --------------------------------------------------------------------------------

def rehearsed() -> list[Event]:
    """Return the events of a run through a loss, a notice and a zero."""
    story = Story()
    story.start(2)
    story.train(2)
    story.say("rehearsal.started", trace="x", speed=10.0, hosts=2)
    story.say("rehearsal.host_lost", host="a", noticed=False)
    story.lose_one(1)
    story.say("rehearsal.host_joined", host="c")
    story.train(2)
    story.publish()
    story.say("rehearsal.host_noticed", host="b", notice_s=12.0)
    story.say("rehearsal.host_lost", host="b", noticed=True)
    story.say("rehearsal.host_lost", host="c", noticed=False)
    story.say("rehearsal.hosts_gone", again_s=3.0)
    story.lose_all()
    story.say("rehearsal.host_joined", host="d")
    story.start(1)
    return story.finish()


def judged(events: list[Event], twin: str | None = "5a5a") -> Outcome:
    return outcome_of(played_of(events), judge(list(enumerate(events, 1))), summarize(events), twin)


def lose_a_sample(events: list[Event]) -> None:
    line = next(event for event in events if event["event"] == "worker.step_committed")
    line["samples"] -= 1


def repeat_a_step(events: list[Event]) -> None:
    at = next(i for i, e in enumerate(events) if e["event"] == "worker.step_committed")
    events.insert(at, events[at])


def start_another_lineage(events: list[Event]) -> None:
    at = next(i for i, e in enumerate(events) if e["event"] == "attempt.started")
    events.insert(at, events[at])


def stop_early(events: list[Event]) -> None:
    del events[next(i for i, e in enumerate(events) if e["event"] == "run.finished"):]


def differ(events: list[Event]) -> None:
    next(e for e in events if e["event"] == "run.finished")["weights_sha256"] = "5a5b"


def end_before_the_first_change(events: list[Event]) -> None:
    events[:] = [event for event in events if not event["event"].startswith("rehearsal.host")]


def test_a_run_that_lost_nothing_is_judged_right() -> None:
    """Through losses, a notice and a zero; the story of the trace is counted."""
    outcome = judged(rehearsed())
    assert outcome.is_right, outcome.faults
    assert outcome.played == "2 hosts joined, 3 lost (2 without a notice), 1 time without any host"
    rows = parse_trace(text_of(rows_played(rehearsed(), ["a", "b"])), "what was played")
    assert [(row.event, row.host) for row in rows] == [
        (JOIN, "a"), (JOIN, "b"), (LOSS, "a"), (JOIN, "c"), (NOTICE, "b"), (LOSS, "b"), (LOSS, "c"),
        (JOIN, "d")]
    assert "equal" in outcome.bits and outcome.lineage.startswith("one, through 2 attempts")
    assert judged(rehearsed(), None).is_right and "--twin" in judged(rehearsed(), None).bits


@pytest.mark.parametrize(("doctor", "fact"), [
    (lose_a_sample, "samples"), (repeat_a_step, "step 0"), (start_another_lineage, "lineage"),
    (stop_early, "did not finish"), (differ, "differ from the undisturbed twin's"),
    (end_before_the_first_change, "ended before the trace changed anything"),
])
def test_a_run_that_lost_something_is_judged_wrong(doctor: Callable[[list[Event]], None],
                                                   fact: str) -> None:
    """With the reason."""
    events = rehearsed()
    doctor(events)
    outcome = judged(events)
    assert not outcome.is_right and any(fact in fault for fault in outcome.faults), outcome.faults


def test_a_twin_that_did_not_finish_proves_nothing() -> None:
    """The rehearsal is not right then; with `ring` other bits are no fault."""
    assert not judged(rehearsed(), "").is_right
    events = rehearsed()
    differ(events)
    for event in events:
        event |= {"reduce": "ring"} if event["event"] == "job.described" else {}
    assert judged(events).is_right


def test_workers_that_the_trace_did_not_take_are_named() -> None:
    """A person has killed them, or the machine is too slow for its hosts."""
    events = rehearsed()
    at = next(i for i, e in enumerate(events) if e["event"] == "rehearsal.host_joined")
    events.insert(at, events[at] | {"event": "driver.worker_gone", "worker": "z/0/1", "host": "z",
                                    "pid": 1, "exit_code": -9, "reason": "frozen"})
    assert judged(events).played.endswith("workers that the trace did not take: 1 frozen")


def test_the_forecast_spreads_the_losses_over_the_time_of_the_trace() -> None:
    """Ten times as fast, losses take ten times the share. The share without a host stays, and so
    does what else takes time."""
    result = {"goodput": 0.7, "wall_s": 110.0, "steps": 70, "steps_rolled_back": 5,
              "books": {"booting_s": 10.0, "stopped_s": 0.0, "pausing_s": 10.0,
                        "restarting_s": 5.0}}
    assert forecast(result, 10.0) == pytest.approx(0.7 + 0.2 * 0.9)
    assert forecast(result, 1.0) == pytest.approx(0.7)
    assert forecast(result, 10.0, empty_s=4.0) == pytest.approx(0.7 + 0.16 * 0.9)


def test_a_traceback_is_shown_and_no_summary_over_it() -> None:
    """Of a run that failed: the lines before the table, or the last ones if it has none."""
    assert end_of("ValueError: x\nrun x   \n| table |\n", "x") == ["ValueError: x"]
    assert end_of("".join(f"{number}\n" for number in range(99)), "x")[-1] == "98"


def test_an_hour_of_useful_training_costs_more_than_an_hour_of_hosts(tmp_path: Path) -> None:
    """By the goodput; the prices are those of `report`."""
    (tmp_path / "prices.toml").write_text("[default]\nspot = 0.5\non_demand = 2.0\n")
    price = price_of(tmp_path / "prices.toml")
    outcome = replace(judged(rehearsed()), mean_hosts=4.0, forecast_goodput=0.8)
    assert dict(rows(outcome, price))["forecast of cost"] == (
        "2.50 USD for an hour of useful training on 4.0 hosts; on demand 8.00, so spot saves 69%")


def test_the_commands_that_are_printed_can_be_typed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the folder of the runs is called."""
    monkeypatch.chdir(tmp_path)
    for name in "my runs", "it's", "-x":
        wanted = Rehearsal(run_dir=tmp_path / name / "r1", command=[], options=[], source="x",
                           speed=1.0, moments=[], has_twin=False, price=None)
        print_outcome(wanted, judged(rehearsed()), "--hosts 100")
        report, plan = (shlex.split(line.partition(": ")[2])
                        for line in capsys.readouterr().out.splitlines()[-2:])
        folder = Path(report[2])
        assert folder.resolve() == wanted.run_dir and not report[2].startswith("-")
        assert report == ["elastic-trainer", "report", report[2], "--html",
                          f"{report[2]}/report.html"]
        assert plan == ["elastic-trainer", "plan", "--costs", report[2], "--hosts", "100"]


def test_a_run_that_the_launcher_refuses_ends_with_its_reason(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """And with its exit code. There is nothing to judge, and the name can be used again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    for _ in range(2):
        assert main(["replay", "--storm", "rough", "--run", "x", "--config", "no.toml", "--",
                     "python", "x.py"]) == 2
        printed = capsys.readouterr()
        assert "--config no.toml cannot be read" in printed.err
        assert "before its first step" in printed.out and "passed" not in printed.out


# --- processes ------------------------------------------------------------------------------------

def test_a_launcher_ends_with_the_rehearsal(tmp_path: Path) -> None:
    """Where Ctrl-C interrupts the rehearsal, and where it is killed."""
    with open(tmp_path / "log", "wb") as log:
        with pytest.raises(KeyboardInterrupt), started(["sleep", "600"], log) as process:
            raise KeyboardInterrupt
        assert process.poll() == -signal.SIGTERM
    code = ("import os, signal\nfrom elastic_trainer.rehearse.stage import Stage, started\n"
            "with open(os.devnull, 'wb') as log, started(['sleep', '600'], log) as process:\n"
            "    print(process.pid, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert killed.returncode == -signal.SIGKILL
    wait_for("end", lambda: not is_running(int(killed.stdout)), DEADLINE_S)


def sleeper(host: str, run_dir: Path) -> subprocess.Popen[bytes]:
    """Start a process that counts as the worker on a host of a run."""
    env = os.environ | {"ELASTIC_TRAINER_WORKER": f"{host}/0/1",
                        "ELASTIC_TRAINER_RUN_DIR": str(run_dir)}
    return subprocess.Popen(["sleep", "600"], env=env)


def test_a_host_under_notice_leaves_the_list_and_is_killed_when_it_is_lost(tmp_path: Path) -> None:
    """It alone: neither the worker of another host, nor one of the same name of another run."""
    here, there = tmp_path / "here", tmp_path / "there"
    stage = Stage(here, ["a", "b"])
    ours, other, foreign = sleeper("a", here), sleeper("b", here), sleeper("a", there)
    try:
        assert other.poll() is foreign.poll() is None
        workers = {"a/0/1": LiveWorker(host="a", pid=ours.pid),
                   "b/0/1": LiveWorker(host="b", pid=other.pid)}
        stage.act(Moment(1.0, ("c",), ("a",), ()), {"a": 3.0}, 0.0)
        assert stage.file.read_text() == "b:1\nc:1\n"
        stage.kill_lost(workers)
        assert ours.poll() is None
        stage.act(Moment(3.0, (), (), ("a",)), {"a": 3.0}, 0.0)
        stage.kill_lost({"a/0/1": LiveWorker(host="a", pid=foreign.pid)})
        stage.kill_lost(workers)
        assert ours.wait(DEADLINE_S) == -signal.SIGKILL
        assert other.poll() is foreign.poll() is None
        stage.act(Moment(4.0, ("d",), (), ("b", "c", "d")), {"b": 4.0}, 7.0)
        assert stage.file.read_text() == ""
    finally:
        for process in (ours, other, foreign):
            process.kill()
            process.wait()
    assert [(event["event"], event.get("host")) for event in read_events(here)] == [
        ("rehearsal.host_joined", "c"), ("rehearsal.host_noticed", "a"),
        ("rehearsal.host_lost", "a"), ("rehearsal.host_joined", "d"), *(
            ("rehearsal.host_lost", host) for host in "bcd"), ("rehearsal.hosts_gone", None)]


TRACE = """time_s,event,host
0,join,a
0,join,b
0,join,c
0,join,d
15,loss,b
15,join,e
30,notice,c
50,loss,c
55,loss,a
55,loss,d
55,loss,e
65,join,f
65,join,g
"""


def test_a_rehearsal_loses_nothing_through_a_loss_a_notice_and_a_zero(tmp_path: Path) -> None:
    """A script on 4 real hosts returns unattended from its checkpoint, and has the twin's bits. The
    judgement is in the run's folder, and no process is left."""
    (tmp_path / "trace.csv").write_text(TRACE)
    command = [sys.executable, "-m", "elastic_trainer", "replay", "--trace", "trace.csv", "--run",
               "storm", "--twin", "--", *JOB, "--steps", "150", "--step-s", "0.05",
               "--checkpoint-every", "10"]
    env = os.environ | {"ELASTIC_TEST_FOLDER": str(tmp_path), "ELASTIC_TRAINER_LIMITS": PATIENT}
    cluster = Cluster(tmp_path, run="storm")
    take_turn()
    try:
        with subprocess.Popen(command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL,
                              stdout=open(tmp_path / "output.log", "wb"),
                              stderr=subprocess.STDOUT, start_new_session=True) as process:
            cluster.process = process
            try:
                cluster.wait_for("life after the zero", lambda: any(
                    event["attempt"] > 1 for event in cluster.events("worker.step_committed")))
                cluster.finish()
            finally:
                process.terminate()
        output = (tmp_path / "output.log").read_text()
        assert process.returncode == 0, output + cluster.story()
        found = json.loads((cluster.run_dir / "rehearsal.json").read_text())
        assert found["right"] and "equal" in found["bits"], found
        assert found["played"] == (
            "3 hosts joined, 5 lost (4 without a notice), 1 time without any host")
        assert "rehearsal passed" in output and "report runs/storm --html" in output
        assert not any(map(is_running, cluster.live_pids().values()))
        assert not cluster.malformed()
    finally:
        end_turn()

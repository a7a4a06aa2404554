"""What follows an attempt, and who is still there after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from folds import past_of, status_of
from hypothesis import given
from hypothesis import strategies as st
from test_malformed import MALFORMED
from waiting import wait_for

from elastic_trainer.config import (
    EXIT_FINISHED,
    EXIT_LEFT,
    EXIT_NO_HOSTS,
    EXIT_UNSAVED,
    EXIT_USER_ERROR,
)
from elastic_trainer.driver.supervisor import (
    EXIT_BAD_COMMAND,
    EXIT_INTERRUPTED,
    MAX_ATTEMPTS_WITHOUT_PROGRESS,
    MAX_BACK_OFF_S,
    Next,
    decide_next,
    has_gone,
    has_progressed,
    supervise,
)
from elastic_trainer.events.log import Events, read_events
from elastic_trainer.events.segments import compress, segments
from elastic_trainer.host import remote
from elastic_trainer.host.processes import is_worker
from elastic_trainer.views.spans import Spans

EXIT_CODES = st.integers(-64, 255)
OF_THE_WORLD = EXIT_CODES.filter(lambda code: code not in
                                 (EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USER_ERROR,
                                  EXIT_UNSAVED, EXIT_BAD_COMMAND))


@pytest.mark.parametrize(("exit_code", "was_interrupted", "idle", "following"), [
    (EXIT_FINISHED, False, 0, Next("finished", EXIT_FINISHED)),
    (EXIT_FINISHED, True, 9, Next("finished", EXIT_FINISHED)),
    (1, True, 0, Next("interrupted", EXIT_INTERRUPTED)),
    (-signal.SIGTERM, True, 9, Next("interrupted", EXIT_INTERRUPTED)),
    (EXIT_INTERRUPTED, False, 0, Next("interrupted", EXIT_INTERRUPTED)),  # break in the loop
    (EXIT_USER_ERROR, False, 0, Next("user_error", EXIT_USER_ERROR)),
    (EXIT_BAD_COMMAND, False, 0, Next("user_error", EXIT_BAD_COMMAND)),
    (1, False, 0, Next("failed")),
    (-signal.SIGKILL, False, 0, Next("failed")),
    (EXIT_LEFT, False, 0, Next("failed")),
    (1, False, MAX_ATTEMPTS_WITHOUT_PROGRESS, Next("failed", 1)),
])
def test_each_end_has_its_sequel(exit_code: int, was_interrupted: bool, idle: int,
                                 following: Next) -> None:
    """Finished is finished, a stop is obeyed, the user's own error is not tried again, and the
    world's fault is."""
    assert decide_next(exit_code, was_interrupted, idle) == following


@given(OF_THE_WORLD)
def test_the_back_off_grows_and_is_bounded_when_attempts_make_no_progress(exit_code: int) -> None:
    """At once after progress, then longer each time, until the limit ends it."""
    sequel = [
        decide_next(exit_code, False, idle) for idle in range(MAX_ATTEMPTS_WITHOUT_PROGRESS + 3)
    ]
    delays = [following.delay_s for following in sequel if following.exit_code is None]
    assert len(delays) == MAX_ATTEMPTS_WITHOUT_PROGRESS
    assert delays[0] == 0
    assert delays == sorted(set(delays))
    assert delays[-1] <= MAX_BACK_OFF_S
    assert all(following.exit_code == 1 for following in sequel[len(delays):])


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_run_is_not_given_up_when_its_hosts_are_not_found(idle: int, hostless: int) -> None:
    """The discovery, or the name server, is away: that says nothing against the run, however long
    it lasts."""
    following = decide_next(EXIT_NO_HOSTS, False, idle, hostless)
    assert following.exit_code is None and 1.0 <= following.delay_s <= MAX_BACK_OFF_S


@given(EXIT_CODES, st.booleans(), st.integers(0, 10**6))
def test_a_run_ends_as_finished_only_when_it_is(exit_code: int, was_interrupted: bool,
                                                idle: int) -> None:
    """No other exit code becomes 0, and no attempt follows a stop."""
    following = decide_next(exit_code, was_interrupted, idle)
    assert (following.exit_code == 0) == (exit_code == EXIT_FINISHED)
    assert following.exit_code is not None or not was_interrupted


def logged(*facts: tuple[str, int]) -> list[dict[str, object]]:
    """Return what the driver tells of finished steps and published checkpoints."""
    nothing = {
        "time": 1.0, "event": "driver.step_reached", "attempt": 1, "steps": 0, "checkpoint": 0
    }
    return [nothing | {what: number} for what, number in facts]


@pytest.mark.parametrize(("more", "is_progress"), [
    ([], False),
    ([("steps", steps) for steps in range(41, 51)], False),
    ([("steps", steps) for steps in range(41, 52)], True),
    ([("steps", 41), ("checkpoint", 40)], False),
    ([("steps", steps) for steps in range(41, 47)] + [("checkpoint", 45)], True),
])
def test_only_what_the_run_never_had_is_progress(more: list[tuple[str, int]],
                                                 is_progress: bool) -> None:
    """A death that always comes at step 50, with a checkpoint of step 40, is not retried for
    ever."""
    before = logged(*(("steps", steps) for steps in range(1, 51)), ("checkpoint", 40))
    past = past_of(before)
    assert has_progressed((past.newest_step, past.newest_checkpoint),
                          past_of(before + logged(*more))) is is_progress


def sleeper(seconds: float, **variables: str) -> subprocess.Popen[bytes]:
    """Start a process with these variables; the kernel shows them a moment after exec has let its
    parent go on."""
    process = subprocess.Popen(["sleep", str(seconds)], env={"PATH": os.defpath, **variables})
    wait_for("environment", Path(f"/proc/{process.pid}/environ").read_bytes)
    return process


MINE = Path("/runs/mine")


@pytest.fixture
def worker(turn: None) -> Iterator[subprocess.Popen[bytes]]:
    process = sleeper(1000, ELASTIC_TRAINER_WORKER="a/0/1", ELASTIC_TRAINER_RUN_DIR="/runs/mine")
    yield process
    process.kill()
    process.wait()


def test_a_worker_is_known_by_its_environment_when_its_pid_is_used_again(
        worker: subprocess.Popen[bytes]) -> None:
    """The pid alone says nothing: its process must carry the worker's whole name, and its run's
    whole folder."""
    assert is_worker(worker.pid, "a/0/1", MINE)
    assert not any(
        is_worker(worker.pid, name, MINE) for name in ("a/0/2", "a/0/11", "a/0", "/0/1", ""))
    assert not any(
        is_worker(worker.pid, "a/0/1", Path(run))
        for run in ("/runs/other", "/runs/mine2", "/runs", "mine"))
    assert not is_worker(os.getpid(), "a/0/1", MINE)


def test_another_runs_worker_is_left_alone_when_it_has_the_same_name_and_pid(
        tmp_path: Path, signals: None, worker: subprocess.Popen[bytes],
        monkeypatch: pytest.MonkeyPatch) -> None:
    """A pid that this run's event log names may by now be a worker of another run, with the same
    hosts' names."""
    monkeypatch.setattr(remote, "ORPHANS_S", 0.1)
    diary = Events(tmp_path / "run", attempt=1)
    started(diary, "a", worker.pid, over_ssh=False)
    supervised(tmp_path, user_error(tmp_path))
    assert worker.poll() is None


def test_a_worker_is_gone_when_its_process_is(worker: subprocess.Popen[bytes]) -> None:
    """Neither a pid without a process nor a process that has ended is a worker."""
    worker.kill()
    worker.wait()
    assert not is_worker(worker.pid, "a/0/1", MINE)
    assert not is_worker(2**22 + 1, "a/0/1", MINE)


@pytest.fixture
def signals(turn: None) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def script(folder: Path, text: str) -> list[str]:
    """Write a training script that does not train."""
    (folder / "script.py").write_text(f"import os, sys\n{text}\n")
    return [sys.executable, str(folder / "script.py")]


def user_error(folder: Path) -> list[str]:
    """Write a script that ends with the user's error at once."""
    return script(folder, f"sys.exit({EXIT_USER_ERROR})")


def started(diary: Events, host: str, pid: int, *, over_ssh: bool) -> None:
    """Log that an earlier driver has started a worker."""
    diary.emit("driver.worker_started", worker=f"{host}/0/1", host=host, pid=pid,
               over_ssh=over_ssh, slot=0)


ONE_HOST = ["-np", "1", "--host-discovery-script", "echo localhost:1"]


def supervised(folder: Path, command: list[str], horovodrun: list[str] = ONE_HOST) -> int:
    """Supervise the run folder/run, whose output is in folder/output; return the exit code."""
    with open(folder / "output", "ab") as output:
        return supervise(folder / "run", horovodrun, command, {}, output)


def test_the_users_error_ends_the_run_when_its_script_fails(tmp_path: Path, signals: None) -> None:
    """One attempt, no second one, its exit code, and the event log says so."""
    assert supervised(tmp_path, user_error(tmp_path)) == EXIT_USER_ERROR
    logged = [e for e in read_events(tmp_path / "run") if not e["event"].startswith("driver.")]
    assert [(e["event"], e["attempt"]) for e in logged] == [
        ("run.started", 1), ("attempt.started", 1), ("attempt.ended", 1)]
    assert logged[-1]["verdict"] == "user_error"
    assert json.loads((tmp_path / "run" / "result.json").read_text())["finished"] is False


def test_a_run_starts_when_its_event_log_holds_malformed_events(tmp_path: Path,
                                                                signals: None) -> None:
    """One `state.checkpoint_published` without its step had ended every later start of the run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("".join(f"{line}\n"
                                                           for line in MALFORMED.values()))
    assert supervised(tmp_path, user_error(tmp_path)) == EXIT_USER_ERROR
    logged = [e["event"] for e in read_events(tmp_path / "run")]
    assert logged[:2] == ["run.started", "attempt.started"] and logged[-1] == "attempt.ended"
    assert json.loads(
        (tmp_path / "run" / "result.json").read_text())["skipped_lines"] == len(MALFORMED)


def test_a_run_resumes_when_a_segment_of_its_event_log_is_damaged(
        tmp_path: Path, signals: None, capfd: pytest.CaptureFixture[str]) -> None:
    """The segment is named on the terminal, and the run begins its next attempt."""
    folder = tmp_path / "run"
    events = Events(folder, segment_bytes=300, run="run")
    for attempt in range(1, 9):
        events.emit("attempt.started", attempt=attempt)
    compress(folder, late_s=0.0)
    os.truncate(segments(folder)[1], 12)
    assert supervise(folder, ONE_HOST, user_error(tmp_path), {}) == EXIT_USER_ERROR
    started = [e["attempt"] for e in read_events(folder) if e["event"] == "attempt.started"]
    assert started[-1] == 9
    said = capfd.readouterr().err
    assert f"{folder}/events-000001.jsonl.gz cannot be read to its end" in said
    result = json.loads((folder / "result.json").read_text())
    assert list(result["segments_left_out"]) == ["events-000001.jsonl.gz"]


@pytest.mark.parametrize("harm", ["deleted", "moved", "emptied", "made anew"])
def test_the_run_ends_and_names_its_folder_when_the_folder_is_gone(
        tmp_path: Path, signals: None, capfd: pytest.CaptureFixture[str], harm: str) -> None:
    """No attempt follows, and the workers end."""
    folder, told = tmp_path / "run", tmp_path / "pid"
    moves = {"deleted": f"shutil.rmtree({str(folder)!r})",
             "moved": f"os.rename({str(folder)!r}, {str(tmp_path / 'other')!r})",
             "emptied": f"[os.unlink(it) for it in os.scandir({str(folder)!r}) if it.is_file()]",
             "made anew": f"shutil.rmtree({str(folder)!r}); os.mkdir({str(folder)!r})"}
    command = script(tmp_path, f"""
import shutil, signal
open({str(told)!r}, "w").write(str(os.getpid()))
{moves[harm]}
signal.pause()""")
    assert supervise(folder, ONE_HOST, command, {}) == 1
    assert capfd.readouterr().err.count(f"The folder {folder} was deleted or moved while") == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)
    assert not (folder / "result.json").exists()


def test_a_file_system_that_is_away_for_a_while_is_no_deletion(tmp_path: Path) -> None:
    """A network file system that is away for a while (here: ELOOP); the folder's own number."""
    folder = tmp_path / "run"
    folder.mkdir()
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    folder.rename(tmp_path / "other")
    assert has_gone(folder, lock)
    folder.symlink_to(folder)
    assert not has_gone(folder, lock)
    folder.unlink()
    folder.mkdir()
    assert has_gone(folder, lock)
    (folder / ".lock").hardlink_to(tmp_path / "other" / ".lock")
    assert not has_gone(folder, lock)
    os.close(lock)


RAISES = """
import torch
from elastic_trainer import train
def loss(model, batch):
    raise ValueError("as planned")
model = torch.nn.Linear(2, 1)
train(model, torch.optim.SGD(model.parameters(), lr=0.1),
      torch.utils.data.TensorDataset(torch.ones(8, 2)), loss=loss, global_batch=4,
      microbatches=2)"""


@pytest.mark.parametrize("has_trained", [False, True])
def test_the_users_exception_ends_a_run_that_never_trained_when_no_worker_stands_ready(
        tmp_path: Path, signals: None, has_trained: bool) -> None:
    """At once, with the traceback; in a run that has trained before it may be the host's fault, and
    is tried again."""
    if has_trained:
        Events(tmp_path / "run", attempt=1).emit("driver.step_reached", steps=3, checkpoint=3)
    started = ('open("started", "a").write("x")\n'
               f'os.path.getsize("started") > 1 and os.kill({os.getpid()}, 15)')
    command = [
        "sh", "-c", f'cd "{tmp_path}" && exec "$0" "$@"', *script(tmp_path, started + RAISES)
    ]
    code = supervised(tmp_path, command)
    gone = [e for e in read_events(tmp_path / "run") if e["event"] == "driver.worker_gone"]
    assert (gone[0]["exit_code"], gone[0]["reason"]) == (EXIT_USER_ERROR, "boot_failed")
    assert code == (EXIT_INTERRUPTED if has_trained else EXIT_USER_ERROR)
    assert len((tmp_path / "started").read_text()) == 1 + has_trained
    said = (tmp_path / "output").read_text()
    assert "ValueError: as planned" in said and ("The driver starts it there again"
                                                 in said) == has_trained


def test_a_run_goes_on_counting_when_it_is_started_again(tmp_path: Path, signals: None) -> None:
    """Attempts have one number each in the whole run, and each a secret of its own, which no event
    log knows."""
    command = script(tmp_path, "open(f'key-{os.environ[\"ELASTIC_TRAINER_ATTEMPT\"]}', 'w')"
                               ".write(os.environ['ELASTIC_TRAINER_KEY'])\n"
                               f"sys.exit({EXIT_USER_ERROR})")
    command = ["sh", "-c", f'cd "{tmp_path}" && exec "$0" "$@"', *command]
    for _ in range(2):
        supervised(tmp_path, command)
    keys = [(tmp_path / f"key-{attempt}").read_text() for attempt in (1, 2)]
    assert len({*keys}) == 2 and all(len(bytes.fromhex(key)) == 32 for key in keys)
    diary = (tmp_path / "run" / "events.jsonl").read_text() + (tmp_path / "output").read_text()
    assert not any(key in diary for key in keys)


def test_workers_that_all_die_in_one_place_are_one_clear_error(tmp_path: Path,
                                                               signals: None) -> None:
    """One attempt, two tries in each slot, and the error names the signal and the place."""
    command = script(tmp_path, """
import ctypes
def touches_nothing():
    ctypes.string_at(0)
touches_nothing()""")
    two = ["-np", "2", "--host-discovery-script", "echo localhost:1; echo 127.0.0.2:1"]
    assert supervised(tmp_path, command, two) == EXIT_USER_ERROR
    logged = read_events(tmp_path / "run")
    gone = [e for e in logged if e["event"] == "driver.worker_gone"]
    assert len(gone) == 4 and all("touches_nothing" in e["died_in"] for e in gone)
    assert [e["verdict"] for e in logged if e["event"] == "attempt.ended"] == ["user_error"]
    said = (tmp_path / "output").read_text()
    assert "All workers died of SIGSEGV in string_at (" in said and "before the first step" in said


def test_an_attempt_is_informed_that_the_run_has_had_hosts(tmp_path: Path, signals: None) -> None:
    """From then on a discovery that fails is away, and no mistake in the command."""
    command = script(tmp_path, f"""
open({str(tmp_path / 'told')!r}, "a").write(os.environ["ELASTIC_TRAINER_HAD_HOSTS"])
if os.environ["ELASTIC_TRAINER_ATTEMPT"] == "1":
    os.kill(os.getppid(), 9)
sys.exit({EXIT_USER_ERROR})""")
    supervised(tmp_path, command)
    assert (tmp_path / "told").read_text() == "01"


def test_a_bad_command_is_not_tried_again(tmp_path: Path, signals: None) -> None:
    """horovodrun's own refusal is the user's to mend."""
    many = [*ONE_HOST, "--min-np", "many"]
    assert supervised(tmp_path, ["true"], many) == EXIT_BAD_COMMAND
    assert "--min-np" in (tmp_path / "output").read_text()
    assert len([e for e in read_events(tmp_path / "run") if e["event"] == "attempt.started"]) == 1


def test_the_run_is_interrupted_when_it_is_asked_to_stop(tmp_path: Path, signals: None) -> None:
    """A stop from outside is passed on to the workers, and no attempt follows."""
    command = script(tmp_path,
                     f"import signal\nos.kill({os.getpid()}, signal.SIGTERM)\nsignal.pause()")
    assert supervised(tmp_path, command) == EXIT_INTERRUPTED
    logged = read_events(tmp_path / "run")
    assert [e["verdict"] for e in logged if e["event"] == "attempt.ended"] == ["interrupted"]
    started = [e for e in logged if e["event"] == "driver.worker_started"]
    assert started and not any(is_worker(e["pid"], e["worker"], tmp_path / "run") for e in started)


def test_the_next_attempt_waits_for_the_last_worker_when_the_driver_is_killed(
        tmp_path: Path, signals: None) -> None:
    """A worker whose driver is gone is waited for: two worlds never train at once."""
    gone, early = tmp_path / "gone", tmp_path / "early"
    command = script(tmp_path, f"""
import time
if os.environ["ELASTIC_TRAINER_ATTEMPT"] == "1":
    os.kill(os.getppid(), 9)
    time.sleep(2)  # the time that it takes a worker to notice
    open({str(gone)!r}, "w")
else:
    os.path.exists({str(gone)!r}) or open({str(early)!r}, "w")
    sys.exit({EXIT_USER_ERROR})""")
    assert supervised(tmp_path, command) == EXIT_USER_ERROR
    ended = [e["exit_code"] for e in read_events(tmp_path / "run") if e["event"] == "attempt.ended"]
    assert ended == [-signal.SIGKILL, EXIT_USER_ERROR]
    assert gone.exists() and not early.exists()


KILLS_ITS_DRIVER = "os.kill(os.getppid(), 9)"


def test_a_supervisor_that_gives_up_logs_it(
        tmp_path: Path, signals: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last attempt without progress. So `watch` and the export of spans end."""
    monkeypatch.setattr("elastic_trainer.driver.supervisor.MAX_BACK_OFF_S", 0.01)
    assert supervised(tmp_path, script(tmp_path, KILLS_ITS_DRIVER)) == 1
    logged = read_events(tmp_path / "run")
    ended = [e["verdict"] for e in logged if e["event"] == "attempt.ended"]
    assert ended == ["failed"] * MAX_ATTEMPTS_WITHOUT_PROGRESS
    assert logged[-1]["event"] == "run.given_up"
    assert is_over_after(logged[:-1]) == ("restarting", False)
    assert is_over_after(logged) == ("failed", True)


def test_a_stop_between_two_attempts_is_logged(
        tmp_path: Path, signals: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt before had failed, and its end does not tell of the stop."""
    run_dir = tmp_path / "run"

    def stop() -> None:
        wait_for("end of the attempt", lambda: any(
            e["event"] == "attempt.ended" for e in read_events(run_dir)))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert supervised(tmp_path, script(tmp_path, KILLS_ITS_DRIVER)) == EXIT_INTERRUPTED
    thread.join()
    logged = read_events(run_dir)
    assert [e["event"] for e in logged][-2:] == ["attempt.ended", "run.stopped"]
    assert is_over_after(logged) == ("interrupted", True)


def is_over_after(events: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return the phase that `watch` shows, and whether the export of spans ends."""
    status, spans = status_of(events), Spans()
    for event in events:
        list(spans.take(event))
    assert status.is_over == spans.is_over
    return status.phase, spans.is_over


def orphan(run_dir: Path, seconds: float) -> subprocess.Popen[bytes]:
    """Start a process that is a worker of a run, by its environment."""
    return sleeper(seconds, ELASTIC_TRAINER_WORKER="far/0/1", ELASTIC_TRAINER_RUN_DIR=str(run_dir),
                   ELASTIC_TRAINER_ATTEMPT="1")


@pytest.mark.parametrize("known", [True, False], ids=["written down", "not written down"])
def test_the_next_attempt_waits_for_a_worker_that_its_driver_had_just_started(
        tmp_path: Path, signals: None, turn: None, known: bool) -> None:
    """A driver that dies before it has written down whom it started leaves one all the same."""
    run_dir = (tmp_path / "run").resolve()
    left = orphan(run_dir, 5.0)
    diary = Events(run_dir, attempt=1)
    diary.emit("attempt.started")
    if known:
        started(diary, "far", left.pid, over_ssh=False)
    command = script(
        tmp_path,
        f"os.path.exists('/proc/{left.pid}/cwd') and open({str(tmp_path / 'early')!r}, 'w')\n"
        f"sys.exit({EXIT_USER_ERROR})")
    assert supervised(tmp_path, command) == EXIT_USER_ERROR
    assert left.poll() == 0, "it was killed before it could leave by itself"
    assert not (tmp_path / "early").exists()


def test_the_next_attempt_waits_for_workers_on_other_hosts_when_the_coordinator_was_lost(
        tmp_path: Path, signals: None, turn: None, instead_of_ssh: Callable[[str], None]) -> None:
    """Nobody here knows whether they live: each host is asked, over the ssh that horovodrun was
    given."""
    instead_of_ssh(f'echo "$@" >> {tmp_path}/asked\nfor last; do :; done\nexec sh -c "$last"')
    run_dir = (tmp_path / "run").resolve()
    diary = Events(run_dir, attempt=1)
    for host in ("far", "also"):
        started(diary, host, 2**22 + 1, over_ssh=True)
    diary.emit("driver.worker_gone", worker="also/0/1", host="also")
    left = orphan(run_dir, 5.0)
    command = script(
        tmp_path,
        f"os.path.exists('/proc/{left.pid}/cwd') and open({str(tmp_path / 'early')!r}, 'w')\n"
        f"sys.exit({EXIT_USER_ERROR})")
    assert supervised(tmp_path, command, [*ONE_HOST, "-p", "2222"]) == EXIT_USER_ERROR
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert " -p 2222 -- far " in asked and asked.endswith(f"end {run_dir}")
    assert not (tmp_path / "early").exists()
    left.wait()


def test_the_next_attempt_begins_when_an_ssh_to_an_orphans_host_never_returns(
        tmp_path: Path, signals: None, turn: None, monkeypatch: pytest.MonkeyPatch,
        instead_of_ssh: Callable[[str], None]) -> None:
    """All hosts are asked at once and have one deadline together; whom we have not reached is told,
    with the reason."""
    instead_of_ssh("case \"$*\" in *mute*) sleep 1000;; *deaf*) trap '' TERM; sleep 1000;; "
                   "*gone*) exit 255;; esac")
    monkeypatch.setattr("elastic_trainer.driver.past.ELSEWHERE_S", 0.5)
    diary = Events(tmp_path / "run", attempt=1)
    for host in ("mute", "deaf", "gone", "there"):
        started(diary, host, 2**22 + 1, over_ssh=True)
    assert supervised(tmp_path, user_error(tmp_path)) == EXIT_USER_ERROR
    logged = {
        e["host"]: e["reason"]
        for e in read_events(tmp_path / "run") if e["event"] == "run.host_not_reached"
    }
    assert logged.keys() == {"mute", "deaf", "gone"}
    assert "has not returned" in logged["mute"] and "255" in logged["gone"]


def test_a_run_is_ended_on_a_host_when_its_workers_do_not_leave(tmp_path: Path, turn: None) -> None:
    """After their grace they are killed, and no other run's."""
    mine, others = orphan(tmp_path / "mine", 1000), orphan(tmp_path / "others", 1000)
    remote.end_run(str(tmp_path / "mine"), grace_s=0.1)
    assert mine.wait(60) == -signal.SIGKILL
    assert others.poll() is None
    others.kill()
    others.wait()

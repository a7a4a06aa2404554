"""The terminal view: rows of hosts, layout, keys, and the terminal after its end."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import s3_servers
from cluster import Cluster
from rich.console import Console, ConsoleDimensions

from elastic_trainer.__main__ import main
from elastic_trainer.events.history import History, goodput_of
from elastic_trainer.events.mark import PHASES
from elastic_trainer.events.now import NOW_FILE, Now, NowReader, WorkerNow
from elastic_trainer.events.summary import summarize
from elastic_trainer.views import keys
from elastic_trainer.views.host_rows import bounded, host_rows
from elastic_trainer.views.prices import Prices
from elastic_trainer.views.status import LiveWorker, Status, fold
from elastic_trainer.views.watch import TOO_SMALL, FullWatch, view, watch

DEADLINE_S = 60.0


def log(hosts: int = 4) -> list[dict[str, Any]]:
    """Return the events of a run that trains on hosts of one worker each."""
    names = [f"spot-host-{number:03d}" for number in range(hosts)]
    events: list[dict[str, Any]] = [
        {"event": "run.started", "run": "seen", "options": {}},
        {"event": "attempt.started", "attempt": 1},
        {"event": "job.described", "attempt": 1, "dataset_size": 6400, "global_batch": 64,
         "microbatches": 4, "epochs": 1, "seed": 1, "max_steps": None}]
    for number, name in enumerate(names):
        worker = {"worker": f"{name}:0", "host": name, "pid": 100 + number, "slot": 0}
        events += [{"event": "discovery.host_in", "host": name, "id": f"i-{number}", "why": "",
                    "type": "p3.2xlarge"},
                   {"event": "driver.host_added", "host": name, "slots": 1},
                   {"event": "driver.worker_started", **worker},
                   {"event": "driver.worker_ready", **worker, "boot_s": 1.0}]
    workers = [f"{name}:0" for name in names]
    events += [{"event": "driver.generation_formed", "attempt": 1, "generation": 1, "size": hosts,
                "reason": "start", "hosts": names, "workers": workers},
               {"event": "worker.generation_started", "attempt": 1, "generation": 1,
                "size": hosts, "step": 0, "source": "fresh"}]
    events += [{"event": "worker.step_committed", "attempt": 1, "generation": 1, "size": hosts,
                "step": step, "samples": 64, "digest": 1, "loss": 2.0, "step_s": 0.5}
               for step in range(3)]
    events += [{"event": "state.checkpoint_published", "attempt": 1, "step": 2}]
    return [{"time": 1000.0 + at, **event} for at, event in enumerate(events)]


def status_of(events: list[dict[str, Any]]) -> Status:
    status = Status()
    for event in events:
        status = fold(status, event)
    return status


def later(**event: Any) -> dict[str, Any]:
    return {"time": 2000.0, **event}


def states(status: Status) -> dict[str, str]:
    return {row.host: row.state for row in host_rows(status)}


def test_a_host_has_one_state_from_its_boot_to_its_end() -> None:
    """Idle when it is listed, booting, standby until it has a place, training, draining when it
    leaves the list with a worker, gone without one, and again booting when it comes back."""
    host, worker = "spot-host-000", {"worker": "spot-host-000:0", "host": "spot-host-000",
                                     "pid": 100, "slot": 0}
    seen = []
    status = Status()
    for event in [*log(1), later(event="driver.host_removed", host=host),
                  later(event="driver.worker_gone", **worker, reason="host_lost"),
                  later(event="driver.host_added", host=host, slots=1),
                  later(event="driver.worker_started", **worker),
                  later(event="rehearsal.host_noticed", host=host, notice_s=120.0)]:
        status = fold(status, event)
        if host in states(status) and states(status)[host] not in seen[-1:]:
            seen.append(states(status)[host])
    assert seen == ["idle", "booting", "standby", "training", "draining", "gone", "idle",
                    "booting", "draining"]
    assert len(host_rows(status)) == 1


def test_hosts_that_left_are_bounded_and_a_new_attempt_lists_its_own() -> None:
    """Of a thousand hosts that came and went the last five are known; nothing else is kept."""
    status = Status()
    for number in range(1000):
        name = f"h{number}"
        for event in (later(event="discovery.host_in", host=name, type="t", id="i", why=""),
                      later(event="driver.host_added", host=name, slots=1),
                      later(event="driver.host_removed", host=name),
                      later(event="discovery.host_out", host=name, id="i", why="")):
            status = fold(status, event)
    assert [row.host for row in host_rows(status)] == [f"h{it}" for it in range(995, 1000)]
    assert not status.listed and not status.types
    status = fold(status_of(log()), later(event="attempt.started", attempt=2))
    assert not status.listed and not status.members


def test_rows_beyond_the_room_are_counted_by_state() -> None:
    """Each host is in a row or in the count, and what changes comes first."""
    status = fold(status_of(log(100)), later(event="driver.host_removed", host="spot-host-050"))
    rows, others = bounded(host_rows(status), 10)
    assert rows[0].host == "spot-host-050" and rows[0].state == "draining"
    assert len(rows) == 10 and others == "90 more hosts: 90 spare"
    assert bounded(rows, 10) == (rows, "")


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_view_fits_each_terminal(tmp_path: Path, width: int) -> None:
    """With 100 hosts, from 60 to 200 columns: no line is wider, none is below the last one."""
    console = Console(file=io.StringIO(), width=width, height=30, force_terminal=True,
                      color_system=None, legacy_windows=False)
    watch = FullWatch(tmp_path, console, Prices(**{"default": {"spot": 0.9, "on_demand": 3.0}}))
    watch.status = status_of(log(100))
    console.print(view(watch, 1500.0))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 30 and {len(line) for line in lines} == {width}
    shown = "\n".join(lines)
    for fact in ("seen: training", "3/100", "samples/s", "ETA", "1 min ago",
                 "goodput", "spot-host-000", "p3.2xlarge", "0.9",
                 "more hosts:", "the checkpoint of step 2 is published", keys.HELP[:15]):
        assert fact in shown, fact
    watch.now = Now(100.0, {name: WorkerNow(
        host=worker.host, rank=0, phase="training", step=1234, drains=False, silent_s=1.0,
        does="backward", what="micro-batch 2, 32 samples from 64", does_for_s=59.0)
        for name, worker in watch.status.workers.items()}, copied_s=59.0)
    console.file = io.StringIO()
    console.print(view(watch, 1500.0))
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 30 and {len(line) for line in lines} == {width}
    assert sum("phase: 59 s ago (the bucket's copy)" in line for line in lines) == 1
    if width >= 80:
        assert sum("1234  1 s old    backward 59" in line for line in lines) > 9
    assert any(keys.HELP[:15] in line for line in lines)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_log_that_cannot_be_read_ends_the_view_with_the_reason(tmp_path: Path, is_terminal: bool
                                                                 ) -> None:
    """It is read in a thread, and the error is that of the command."""
    (tmp_path / "events.jsonl").symlink_to("events.jsonl")
    console = Console(file=io.StringIO(), force_terminal=is_terminal)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        watch(tmp_path, console)


def test_the_goodput_is_that_of_the_report() -> None:
    """Watch and report say the same of the same events."""
    history = History()
    for event in log():
        history.read(event)
    assert goodput_of(history) == pytest.approx(summarize(log())["goodput"])
    assert goodput_of(history) is not None and goodput_of(History()) is None


def test_only_yes_kills_and_each_worker_can_be_chosen() -> None:
    """Another key than `y` ends the question; workers over ssh are not offered."""
    workers = {f"w{it}": LiveWorker(host="here", pid=it) for it in range(20)}
    workers["far"] = LiveWorker(host="there", pid=99, over_ssh=True)

    def after(typed: str) -> keys.Dialog:
        dialog = keys.Dialog()
        for key in typed:
            dialog = keys.pressed(dialog, key, workers)
        return dialog

    assert after("k1").chosen == ("w0", workers["w0"]) and after("k1y").kills
    assert after("kmm2y").kills == ("w19", workers["w19"])
    assert after("kmm3").chosen is None and after("kmmm1").chosen == after("k1").chosen
    assert not any(after(f"k1{key}").kills for key in "nq1k\x1b\n ")
    assert after("q").quits and after("kq").quits and not after("k1q").quits
    assert keys.pressed(keys.Dialog(), "k", {"far": workers["far"]}).said
    assert all("99" not in line for line in after("k").lines())


@pytest.mark.parametrize(("width", "height", "workers"), [
    (80, 24, 12), (80, 15, 4), (40, 24, 4), (20, 24, 4), (40, 10, 1), (80, 12, 9), (80, 11, 9),
    (20, 8, 9), (10, 3, 1), (200, 60, 100)])
def test_a_worker_is_killed_only_after_a_question_that_is_shown_whole(
        tmp_path: Path, width: int, height: int, workers: int) -> None:
    """Each choice and the whole question are within the terminal; if there is no room, `k` says so
    and asks nothing. An answer that comes before the question is drawn is none."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True,
                      color_system=None, legacy_windows=False)
    watch = FullWatch(tmp_path, console)
    watch.status = status_of(log(workers))

    def shown() -> str:
        console.file = io.StringIO()
        console.print(watch.picture())
        lines = console.file.getvalue().splitlines()
        assert len(lines) <= height and {len(line) for line in lines} <= {width}
        return "".join(line[1:-1].replace(" ", "") for line in lines[1:-1])

    def is_asked(key: str) -> bool:
        watch.press(key)
        text = shown()
        if watch.dialog.said:
            assert watch.dialog == keys.Dialog(said=TOO_SMALL)
            assert width < 20 or TOO_SMALL[:40].replace(" ", "") in text
            return False
        assert all(line.replace(" ", "") in text for line in watch.dialog.lines())
        return True

    shown()
    is_roomy = (width, height) not in ((20, 8), (80, 11), (10, 3))
    assert is_asked("k") == is_roomy
    if not is_roomy:
        return
    watch.press("1")
    watch.press("y")
    assert watch.dialog.chosen  # it was not shown yet
    assert f"Killworker{watch.dialog.chosen[1].pid}" in shown()
    question, console.size = watch.dialog, ConsoleDimensions(12, 4)
    watch.press("y")
    assert watch.dialog.said == TOO_SMALL
    watch.dialog, console.size = question, ConsoleDimensions(width, height)
    shown()
    watch.press("y")
    assert watch.dialog.said.startswith("Process 100 was not killed")


class Terminal:
    """`elastic-trainer watch` in a terminal of its own."""

    def __init__(self, run_dir: Path):
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (40, 120))
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import fcntl, os, signal, sys, termios; os.setsid(); "
             "signal.signal(signal.SIGINT, signal.default_int_handler); "
             "fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
             "from elastic_trainer.views.watch import watch; watch(sys.argv[1])", str(run_dir)],
            stdin=self.slave, stdout=self.slave, stderr=self.slave,
            env={**os.environ, "TERM": "xterm"})
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Wait until a text is shown after all that was waited for before."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown[-3000:]
            if select.select([self.master], [], [], 1.0)[0]:
                self.shown += os.read(self.master, 65536).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    def press(self, key: str) -> None:
        os.write(self.master, key.encode())

    def end(self) -> int:
        """Wait for the end; the terminal must be as before, and its cursor visible."""
        self.wait_for("\x1b[?25h")
        code = self.process.wait(DEADLINE_S)
        assert termios.tcgetattr(self.slave) == self.before
        os.close(self.master)
        os.close(self.slave)
        return code


def test_k_kills_a_worker_of_the_run_and_nothing_else(tmp_path: Path) -> None:
    """In a real terminal: a worker's process is killed after the question; a process with the pid
    of a worker, which is none of this run, lives on; then `q` ends the view."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    mine = {**os.environ, "ELASTIC_TRAINER_WORKER": "mine:0",
            "ELASTIC_TRAINER_RUN_DIR": str(tmp_path)}
    with subprocess.Popen(sleep, env=mine) as worker, \
            subprocess.Popen(sleep, env={**mine, "ELASTIC_TRAINER_RUN_DIR": "/other"}) as other:
        try:
            events = [{"event": "run.started", "run": "seen", "options": {}},
                      {"event": "attempt.started", "attempt": 1},
                      *({"event": "driver.worker_started", "worker": f"mine:{slot}", "slot": slot,
                         "host": "localhost", "pid": it.pid}
                        for slot, it in enumerate((worker, other)))]
            write(tmp_path, [{"time": 1.0, **event} for event in events])
            terminal = Terminal(tmp_path)
            for key, shown in (("", f"worker {other.pid} boots"), ("k", f"2: worker {other.pid}"),
                               ("2", f"Kill worker {other.pid}"), ("n", "Nothing was killed"),
                               ("k", "other keys: back"), ("2", f"Kill worker {other.pid}"),
                               ("y", f"Process {other.pid} was not killed"),
                               ("k", "other keys: back"), ("1", f"Kill worker {worker.pid}"),
                               ("y", f"Worker {worker.pid} was killed")):
                terminal.press(key)
                terminal.wait_for(shown)
            assert worker.wait(DEADLINE_S) == -signal.SIGKILL and other.poll() is None
            terminal.press("q")
            assert terminal.end() == 0
        finally:
            worker.kill()
            other.kill()


@pytest.mark.parametrize(("is_ctrl_c", "code"), [(True, 0), (False, 143)])
def test_a_signal_leaves_the_terminal_as_it_was(tmp_path: Path, is_ctrl_c: bool,
                                                code: int) -> None:
    """After Ctrl-C and SIGTERM the terminal echoes again and shows its cursor."""
    write(tmp_path, log())
    terminal = Terminal(tmp_path)
    terminal.wait_for(keys.HELP)
    if is_ctrl_c:
        terminal.press("\x03")
    else:
        terminal.process.terminate()
    assert terminal.end() == code

def test_k_costs_a_real_run_nothing_but_the_worker(
        tmp_path: Path, twin_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """A worker of a run is killed with `k`: the run goes on, with the undisturbed twin's bits, and
    the view shows its hosts, their heartbeats, and its end. Its driver's file goes with it. From a
    bucket the run is proved and reported alike."""
    job = ("--steps", "60", "--step-s", "0.2")
    with Cluster(tmp_path, job=job) as cluster:
        cluster.wait_for_step(3)
        seen = NowReader(cluster.run_dir)
        now = cluster.wait_for("step of each worker", lambda: (now := seen.read()) and all(
            it.step > 2 and it.does for it in now.workers.values()) and now)
        assert {(it.rank, it.phase) for it in now.workers.values()} == {
            (rank, "training") for rank in range(4)}
        assert {it.does for it in now.workers.values()} <= {*PHASES}
        assert all(it.silent_s < 8 for it in now.workers.values())  # else it is evicted (PATIENT)
        terminal = Terminal(cluster.run_dir)
        for key, shown in (("", "training"), ("", "heartbeat"), ("", " s old"),
                           ("k", "other keys: back"), ("1", "Kill worker"), ("y", "was killed")):
            terminal.press(key)
            terminal.wait_for(shown)
        assert cluster.finish() == 0
        terminal.wait_for("finished")
        assert terminal.end() == 0
        cluster.assert_nothing_lost(twin_of(*job), victims=1)
        assert not (cluster.run_dir / NOW_FILE).exists()
        run_dir = cluster.run_dir
    try:
        with s3_servers.ministack(tmp_path / "s3") as endpoint:
            for name, value in s3_servers.environment(endpoint).items():
                monkeypatch.setenv(name, value)
            for file in ("events.jsonl", "result.json"):
                s3_servers.client(endpoint).upload_file(
                    str(run_dir / file), s3_servers.BUCKET, f"{run_dir.name}/diary/{file}")
            far = f"s3://{s3_servers.BUCKET}/{run_dir.name}"
            capsys.readouterr()
            assert main(["report", str(run_dir), far, "--json"]) == 0
            local, of_bucket = json.loads(capsys.readouterr().out)
            assert local == of_bucket and local["finished"]
            assert main(["verify", far]) == 0
    except s3_servers.Unavailable as error:
        pytest.skip(f"The run itself is as it should be. {error}")


def write(folder: Path, events: list[dict[str, Any]]) -> None:
    (folder / "events.jsonl").write_text("".join(json.dumps(it) + "\n" for it in events))

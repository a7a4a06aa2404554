"""The terminal view: rows of hosts, layout, and the terminal after its end."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
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
from folds import status_of
from rich.console import Console
from stories import write

from elastic_trainer.__main__ import main
from elastic_trainer.events.mark import PHASES
from elastic_trainer.events.now import NOW_FILE, Now, NowReader, WorkerNow
from elastic_trainer.events.run import Run
from elastic_trainer.events.summary import summarize
from elastic_trainer.views.prices import Prices
from elastic_trainer.views.status import Status, bounded, host_rows
from elastic_trainer.views.watch import Watch, view, watch

DEADLINE_S = 60.0
QUIT = "Ctrl-C: quit"


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


def later(**event: Any) -> dict[str, Any]:
    return {"time": 2000.0, **event}


def states(status: Status) -> dict[str, str]:
    return {row.host: row.state for row in host_rows(status)}


def test_a_host_has_one_state_from_its_boot_to_its_end() -> None:
    """Idle when it is listed, booting, standby until it has a place, training, draining when it
    leaves the list with a worker, gone without one, and again booting when it comes back."""
    host, worker = "spot-host-000", {"worker": "spot-host-000:0", "host": "spot-host-000",
                                     "pid": 100, "slot": 0}
    seen, events = [], list[dict[str, Any]]()
    for event in [*log(1), later(event="driver.host_removed", host=host),
                  later(event="driver.worker_gone", **worker, reason="host_lost"),
                  later(event="driver.host_added", host=host, slots=1),
                  later(event="driver.worker_started", **worker),
                  later(event="rehearsal.host_noticed", host=host, notice_s=120.0)]:
        events.append(event)
        status = status_of(events)
        if host in states(status) and states(status)[host] not in seen[-1:]:
            seen.append(states(status)[host])
    assert seen == ["idle", "booting", "standby", "training", "draining", "gone", "idle",
                    "booting", "draining"]
    assert len(host_rows(status)) == 1


def test_hosts_that_left_are_bounded_and_a_new_attempt_lists_its_own() -> None:
    """Of a thousand hosts that came and went the last five are known; nothing else is kept."""
    events = list[dict[str, Any]]()
    for number in range(1000):
        name = f"h{number}"
        events += (later(event="discovery.host_in", host=name, type="t", id="i", why=""),
                   later(event="driver.host_added", host=name, slots=1),
                   later(event="driver.host_removed", host=name),
                   later(event="discovery.host_out", host=name, id="i", why=""))
    status = status_of(events)
    assert [row.host for row in host_rows(status)] == [f"h{it}" for it in range(995, 1000)]
    assert not status.listed and not status.types
    status = status_of([*log(), later(event="attempt.started", attempt=2)])
    assert not status.listed and not status.members


def test_rows_beyond_the_room_are_counted_by_state() -> None:
    """Each host is in a row or in the count, and what changes comes first."""
    status = status_of([*log(100), later(event="driver.host_removed", host="spot-host-050")])
    rows, others = bounded(host_rows(status), 10)
    assert rows[0].host == "spot-host-050" and rows[0].state == "draining"
    assert len(rows) == 10 and others == "90 more hosts: 90 spare"
    assert bounded(rows, 10) == (rows, "")


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_view_fits_each_terminal(tmp_path: Path, width: int) -> None:
    """With 100 hosts, from 60 to 200 columns: no line is wider, none is below the last one."""
    console = Console(file=io.StringIO(), width=width, height=30, force_terminal=True,
                      color_system=None, legacy_windows=False)
    watch = Watch(tmp_path, console, Prices(**{"default": {"spot": 0.9, "on_demand": 3.0}}))
    watch.status = status_of(log(100))
    console.print(view(watch, 1500.0))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 30 and {len(line) for line in lines} == {width}
    shown = "\n".join(lines)
    for fact in ("seen: training", "3/100", "samples/s", "ETA", "1 min ago",
                 "goodput", "spot-host-000", "p3.2xlarge", "0.9",
                 "more hosts:", "the checkpoint of step 2 is published",
                 "try it: kill -9"):
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
    assert QUIT in lines[-2] or width < 80 and "try it: kill -9" in lines[-2]


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
    run = Run().read_all(log())
    assert run.goodput == pytest.approx(summarize(log())["goodput"])
    assert run.goodput is not None and Run().goodput is None


class Terminal:
    """`elastic-trainer watch` in a terminal of its own."""

    def __init__(self, run_dir: Path):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import fcntl, os, signal, sys, termios; os.setsid(); "
             "signal.signal(signal.SIGINT, signal.default_int_handler); "
             "fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
             "from elastic_trainer.views.watch import watch; watch(sys.argv[1])", str(run_dir)],
            stdin=self.slave, stdout=self.slave, stderr=self.slave,
            env={**os.environ, "TERM": "xterm"})
        self.shown = self.passed = ""

    def wait_for(self, text: str) -> None:
        """Wait until a text is shown after all that was waited for before."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown[-3000:]
            if select.select([self.master], [], [], 1.0)[0]:
                self.shown += os.read(self.master, 65536).decode(errors="replace")
        self.passed, _, self.shown = self.shown.partition(text)

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


@pytest.mark.parametrize(("is_ctrl_c", "code"), [(True, 0), (False, 143)])
def test_a_signal_leaves_the_terminal_as_it_was(tmp_path: Path, is_ctrl_c: bool, code: int) -> None:
    """After Ctrl-C and SIGTERM the terminal echoes again and shows its cursor."""
    write(tmp_path, log())
    terminal = Terminal(tmp_path)
    terminal.wait_for(QUIT)
    if is_ctrl_c:
        terminal.press("\x03")
    else:
        terminal.process.terminate()
    assert terminal.end() == code


def test_the_command_that_is_shown_costs_a_real_run_nothing_but_the_worker(
        tmp_path: Path, twin_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """A worker of a run is killed by the command: the run goes on with the undisturbed twin's bits.
    The view shows its hosts, their heartbeats, and its end, with which its driver's file goes. From
    a bucket the run is proved and reported alike."""
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
        for shown in ("training", "heartbeat", " s old", "try it: "):
            terminal.wait_for(shown)
        terminal.wait_for(QUIT)
        command = re.match(r"kill -9 (\d+)", terminal.passed)
        assert command and int(command[1]) in cluster.live_pids().values()
        os.kill(int(command[1]), signal.SIGKILL)
        terminal.wait_for("was killed")
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

"""Questions to a worker that stands still: real processes, here and behind an ssh, which is a
script that runs its last argument here."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_standby import Bench, bench  # noqa: F401 (a fixture)
from waiting import until

from elastic_trainer.driver.process import WorkerProcess
from elastic_trainer.driver.reach import Reach
from elastic_trainer.driver.roster import Start
from elastic_trainer.driver.standby_shim import through_shim
from elastic_trainer.host import stacks

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 60.0
NAMES = {"ELASTIC_TRAINER_WORKER": "h1/0/1", "ELASTIC_TRAINER_ATTEMPT": "1",
         "ELASTIC_TRAINER_RUN_DIR": "/runs/mine"}
HANGS = """
import os, sys, threading, time
from elastic_trainer.host import stacks
stacks.answer()
def waits(): time.sleep(60)
for _ in range(THREADS): threading.Thread(target=waits, daemon=True).start()
sys.stderr.write(BEFORE)
sys.stderr.flush()
def hangs():
    open(f"hangs-{os.getpid()}", "w").close()
    while not os.path.exists("go"): time.sleep(0.01)
hangs()
sys.stderr.write("\\n  ...\\nafter\\n")
"""
WHERE = pytest.mark.parametrize("is_far", [False, True])


class Workers:
    """Starts workers as the driver does, and leaves none behind."""

    def __init__(self, folder: Path):
        self.folder, self.output = folder, io.StringIO()
        self.started: list[WorkerProcess] = []

    def start(self, command: list[str], env: dict[str, str], is_far: bool) -> WorkerProcess:
        """Start one, and wait until it hangs; it is known by its own pid then."""
        start = Start("h1", 0, "h1/0/1")
        worker = WorkerProcess(start, command, env, Reach(), self.output,
                               start.host if is_far else None)
        self.started.append(worker)
        file = until(lambda: next(self.folder.glob("hangs-*"), None))
        worker.worker_pid = int(file.name.partition("-")[2])
        return worker

    def hang(self, is_far: bool, *, threads: int = 0, before: str = "") -> WorkerProcess:
        """Start one that hangs, with threads, and with text on its stderr."""
        code = HANGS.replace("THREADS", str(threads)).replace("BEFORE", repr(before))
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        return self.start([sys.executable, "-c", code], env | NAMES, is_far)

    def close(self) -> None:
        for worker in self.started:
            worker.stop(True, 0)
            worker.wait()


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: None,
            instead_of_ssh: Callable[[str], None]) -> Iterator[Workers]:
    """Workers in the test's folder; `ssh` runs a command here, in an environment as a login's."""
    instead_of_ssh(f'for last; do :; done\nexec env -i PATH={os.defpath} HOME=/ sh -c "$last"')
    monkeypatch.chdir(tmp_path)
    workers = Workers(tmp_path)
    yield workers
    workers.close()


@WHERE
def test_a_worker_that_was_a_standby_gives_its_stacks_and_its_state(
        bench: Bench, workers: Workers, is_far: bool) -> None:  # noqa: F811
    """It is in the process group of its monitor."""
    then = HANGS.replace("THREADS", "0").replace("BEFORE", "''")
    bench.ready(then)
    command = through_shim(bench.command, bench.env, not is_far)
    worker = workers.start(command, bench.env | NAMES, is_far)
    assert os.getpgid(worker.worker_pid) not in (worker.process.pid, os.getpgid(0))
    worker.ask_stacks()
    until(lambda: "in hangs" in "".join(worker.answer.lines))
    assert until(worker.state) in ("S", "R")


@WHERE
def test_no_process_but_the_workers_own_is_asked(workers: Workers, is_far: bool) -> None:
    """A worker reports its pid itself: another process's, and numbers that stand for many."""
    blocked = "import signal, time; signal.pthread_sigmask(0, {23, 28}); print(); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", blocked], stdout=subprocess.PIPE,
                             start_new_session=True, env=os.environ | NAMES | {
                                 "ELASTIC_TRAINER_ATTEMPT": "2"})
    try:
        assert other.stdout and other.stdout.readline()
        worker = workers.hang(is_far)
        own = worker.worker_pid
        for pid in (other.pid, 2**70, own):
            worker.worker_pid = pid
            worker.ask_stacks()
            if pid != own and not is_far:
                assert worker.state() == ""
        until(lambda: worker.answer.lines and worker.state())
        status = Path(f"/proc/{other.pid}/status").read_text()
        assert f"ShdPnd:\t{0:016x}\n" in status, status
    finally:
        other.kill()
        other.communicate()


@WHERE
def test_the_users_lines_around_an_answer_pass(workers: Workers, is_far: bool) -> None:
    """A progress bar without a line end stands before the state and the first header."""
    worker = workers.hang(is_far, threads=2, before="\r10%|#")
    worker.ask_stacks()
    until(lambda: "in hangs" in "".join(worker.answer.lines))
    assert worker.answer.text().startswith("Current thread") and worker.state() in ("S", "R")
    (workers.folder / "go").touch()
    worker.forwards[1].join(DEADLINE_S)
    lines = workers.output.getvalue().splitlines()
    assert lines == [f"[h1]<stderr>: {text}" for text in ("10%|#", "", "  ...", "after")]


@WHERE
def test_the_main_thread_is_written_when_there_are_more_than_100(
        workers: Workers, is_far: bool) -> None:
    """faulthandler writes 100, and the main thread would be the last. It is first, and not
    twice."""
    worker = workers.hang(is_far, threads=150)
    worker.ask_stacks()
    until(lambda: worker.answer.text().count("in waits") == stacks.MOST)
    text = worker.answer.text()
    assert text.startswith("Stack (most recent call first):") and text.count("in hangs") == 1
    assert "in hangs" in worker.answer.lines[1] + worker.answer.lines[2]


def test_the_main_thread_is_not_known_when_the_answer_is_cut_without_it() -> None:
    """The last block of 100 is another thread's."""
    answer = stacks.Answer()
    answer.expect()
    for number in range(stacks.MOST):
        for line in (f"Thread 0x{number} (most recent call first):",
                     '  File "/x/elastic_trainer/training/loop.py", line 1 in _vote', ""):
            assert not answer.take(line)
    assert not answer.take("...") and answer.take("...") == ["..."]
    assert (answer.lines, answer.phase()) == ([], "") and answer.text().count("_vote") == 100


def test_an_answer_has_bounded_memory() -> None:
    """The newest block, which is the main thread's, stays whole. Frames beyond what faulthandler
    writes are the user's."""
    answer = stacks.Answer()
    answer.expect()
    frame = f'  File "/{"x" * 10_000}", line 1 in f'
    for number in range(stacks.MOST):
        assert not answer.take(f"Thread 0x{number} (most recent call first):")
        assert not any(answer.take(frame) for _ in range(stacks.MOST)) and not answer.take("  ...")
        assert answer.take(frame) == [frame] and answer.take(" " * 60_000)
        assert not answer.take("")
    assert answer.take("Thread 0x0 (most recent call first):") == [
        "", "Thread 0x0 (most recent call first):"]
    most = stacks.MOST_CHARACTERS + stacks.LINE_CHARACTERS * (stacks.MOST + 3)
    assert len(answer.text()) < most and len(answer.lines) == stacks.MOST + 2


def test_a_blank_line_is_the_users_unless_a_thread_follows() -> None:
    """Also the last one of the output."""
    answer = stacks.Answer()
    assert answer.take("") == [""]
    answer.expect()
    for line in ("Thread 0x1 (most recent call first):", "  <no Python frame>", "",
                 "Current thread 0x2 (most recent call first):", "  Garbage-collecting",
                 '  File "x.py", line 1 in f', ""):
        assert not answer.take(line)
    assert answer.take("text") == ["", "text"] and answer.take('File "x.py"') == ['File "x.py"']
    assert not answer.take("") and answer.rest() == [""] and answer.rest() == []


def test_a_terminals_signal_is_left_alone() -> None:
    """The size of a terminal changes: the signal comes then without a question."""
    code = "import signal; from elastic_trainer.host import stacks; stacks.answer(); signal.pause"
    caught = f"{code}; print(open('/proc/self/status').read().split('SigCgt:')[1].split()[0])"
    with_terminal = ["script", "-qec", f'{sys.executable} -c "{caught}"', "/dev/null"]
    bit = 1 << (stacks.ASK_MAIN - 1)
    masks = [int(subprocess.run(command, capture_output=True, check=True, cwd=ROOT, text=True,
                                start_new_session=True).stdout, 16)
             for command in ([sys.executable, "-c", caught], with_terminal)]
    assert [bool(mask & bit) for mask in masks] == [True, False]
    assert all(mask & 1 << (signal.SIGURG - 1) for mask in masks)


# --- the place of a crash -------------------------------------------------------------------------

IN_PYTHON = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def inner(): ctypes.string_at(0)
def outer(): inner()
outer()"""
IN_C = """
import ctypes, time
libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
def waits():
    libc.pthread_create(ctypes.byref(thread), None, libc.abort, None)
    time.sleep(600)
waits()"""


def dump_of(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", code], capture_output=True,
                          text=True)
    return done.stderr.splitlines()


def test_the_place_is_the_newest_frame_of_the_thread_that_died() -> None:
    """And who called it, up to three."""
    place = stacks.place_of(["a line", "", *dump_of(IN_PYTHON)])
    assert place.startswith(
        "string_at (") and "called by inner (<string>:4), called by outer (<string>:5)" in place
    assert place.count("called by") == 2


def test_the_place_is_found_behind_an_unfinished_progress_bar() -> None:
    """The report begins where the bar has ended, within its line."""
    first, *more = dump_of(IN_PYTHON)
    behind = [f"epoch 1:  40%|####      | 4/10{first}", *more]
    assert stacks.place_of(behind) == stacks.place_of([first, *more])


def test_the_place_is_the_main_threads_when_a_thread_without_python_died() -> None:
    """As when Gloo's thread dies, and the main thread waits in `hvd.init()`."""
    assert stacks.place_of(dump_of(IN_C)).startswith("waits (<string>:")


@pytest.mark.parametrize("lines",
                         [[], ["Traceback (most recent call last):", '  File "a.py", line 1, in f'],
                          ["Fatal Python error: Aborted", ""]])
def test_the_place_of_a_crash_is_unknown_without_a_report(lines: list[str]) -> None:
    """An exception is none, and a process may die without a frame."""
    assert stacks.place_of(lines) == ""


def test_a_signal_has_its_name() -> None:
    """Also one that has none."""
    names = [stacks.name_of(number) for number in (11, 6, 63)]
    assert names == ["SIGSEGV", "SIGABRT", "signal 63"]

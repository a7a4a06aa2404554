"""The supervisor: starts attempt after attempt until the run is finished.

command line → here → driver (one attempt) → … → result.json

What always holds:
1. A new attempt starts only when no worker of the one before is left (past.py).
2. Attempts follow each other until the run is finished, the error is the user's own, or attempts
   without progress reach a limit.
3. A stop from outside (Ctrl-C, SIGTERM) is passed on to the driver, and the run can be resumed by
   the same command.
4. A run whose folder is deleted ends: no further attempt would know its past.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from elastic_trainer.config import (
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_NO_HOSTS,
    EXIT_UNSAVED,
    EXIT_USER_ERROR,
    Attempt,
    ConfigError,
)
from elastic_trainer.driver.past import COUNTED_BY, Follower, Past, end_orphans
from elastic_trainer.driver.reach import Reach
from elastic_trainer.events.log import Events
from elastic_trainer.events.log_shipper import new_run_id
from elastic_trainer.events.segments import compress
from elastic_trainer.events.summary import write_result
from elastic_trainer.events.versions import versions
from elastic_trainer.host import locks, own
from elastic_trainer.host.modes import make_folder, private
from elastic_trainer.host.priority import yield_processor
from elastic_trainer.wire.plain import plain_text

DRIVER = "elastic_trainer.driver.horovodrun"
MAX_ATTEMPTS_WITHOUT_PROGRESS = 5
MAX_BACK_OFF_S = 60.0
LOCK_FILE = ".lock"
LOCK_S = 5.0
"""A driver that was just killed holds the run until the kernel has closed its descriptors."""
COMPRESS_S = 30.0
EXIT_BAD_COMMAND = 2
LOOK_S = 1.0
"""The interval in which the supervisor checks that the run's folder exists."""


@dataclass(frozen=True)
class Next:
    """What to do after an attempt: start another after `delay_s`, or stop with `exit_code`."""

    verdict: str
    exit_code: int | None = None
    delay_s: float = 0.0


def decide_next(exit_code: int, was_interrupted: bool, attempts_without_progress: int,
                attempts_without_hosts: int = 0) -> Next:
    """Decide what follows an attempt that ended with `exit_code` (negative: a signal's number).

    `attempts_without_hosts` counts the newest attempts in which a run that has had hosts found
    none. They are no evidence against the run, so it is tried again without a limit, with a
    back-off.
    """
    if exit_code == EXIT_FINISHED:
        return Next("finished", EXIT_FINISHED)
    if was_interrupted or exit_code == EXIT_INTERRUPTED:
        return Next("interrupted", EXIT_INTERRUPTED)
    if exit_code == EXIT_UNSAVED:
        return Next("unsaved", EXIT_UNSAVED)  # its workers have tried it for save_s
    if exit_code in (EXIT_USER_ERROR, EXIT_BAD_COMMAND):
        return Next("user_error", exit_code)
    if attempts_without_progress >= MAX_ATTEMPTS_WITHOUT_PROGRESS and not attempts_without_hosts:
        return Next("failed", 1)
    doublings = min(max(attempts_without_progress, attempts_without_hosts), 10)
    return Next("failed", None, min(MAX_BACK_OFF_S, 2.0 ** doublings - 1.0))


def supervise(run_dir: Path, horovodrun_options: Sequence[str], command: Sequence[str],
              options: dict[str, Any], output: IO[Any] | None = None) -> int:
    """Run attempts of `horovodrun_options command` to the end; returns the exit code.

    Raises ConfigError when another process drives this run.
    """
    make_folder(run_dir)
    lock = _lock(run_dir)
    try:
        supervisor = Supervisor(run_dir, [*horovodrun_options, *command], output, lock,
                                Reach.from_options(horovodrun_options,
                                                   Attempt.from_environment()))
        exit_code = supervisor.run(options)
        if not supervisor.is_deleted:
            write_result(run_dir)  # also if not finished, and where rank 0 has another folder
        return exit_code
    finally:
        os.close(lock)


class Supervisor:
    """The attempts of one run. `lock` is the descriptor that holds the run."""

    def __init__(self, run_dir: Path, command: list[str], output: IO[Any] | None, lock: int,
                 reach: Reach):
        self.run_dir, self.command, self.output, self.lock = run_dir, command, output, lock
        self.reach = reach
        self.log = Follower(run_dir)
        self.events = Events(run_dir, run=run_dir.name)
        self.run_id = secrets.token_hex(8)
        self.is_stopped = self.is_deleted = False
        self.idle = self.hostless = 0
        """How many attempts in a row had no progress, or no hosts."""
        self.driver: subprocess.Popen[bytes] | None = None

    def run(self, options: dict[str, Any]) -> int:
        """Run attempts to the end; returns the exit code. `options` are for the event log."""
        past = self.log.read()
        for name, reason in self.log.left_out.items():
            tell(f"{self.run_dir / name} {reason}, so its events are left out. The run starts from "
                 f"its newest checkpoint all the same; `elastic-trainer verify` proves nothing of "
                 f"what is missing.")
        end_orphans(past, self.run_dir, self.reach, self.events)  # of a supervisor that was killed
        self.events.emit("run.started", attempt=past.attempt + 1, options=options,
                         versions=versions())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        new_run_id(self.run_dir, self.run_id)
        attempt = past.attempt
        while True:
            attempt += 1
            following = self._attempt(attempt)
            if following.exit_code is not None:
                if following.verdict == "failed":
                    self.events.emit("run.given_up", attempt=attempt)
                return following.exit_code
            deadline = time.monotonic() + following.delay_s
            while time.monotonic() < deadline and not self.is_stopped:
                time.sleep(0.1)
            if self.is_stopped:
                self.events.emit("run.stopped", attempt=attempt)
                return EXIT_INTERRUPTED

    def _stop(self, number: int, frame: Any) -> None:
        """Stop the run (a signal handler)."""
        self.is_stopped = True
        if self.driver and self.driver.poll() is None:
            self.driver.send_signal(signal.SIGTERM)

    def _attempt(self, attempt: int) -> Next:
        """Run one attempt and decide what follows."""
        before = self.log.read()
        progress = before.newest_step, before.newest_checkpoint
        self.events.emit("attempt.started", attempt=attempt, **COUNTED_BY)
        self.driver = subprocess.Popen(
            own.command(DRIVER, *self.command),
            env=self._environment(attempt, before), stdout=self.output,
            stderr=subprocess.STDOUT if self.output else None,
            start_new_session=True,  # Ctrl-C goes to this process, which passes it on once
            pass_fds=[self.lock])  # no other process can drive this run while the driver lives
        if self.is_stopped:  # since the last check
            self.driver.send_signal(signal.SIGTERM)
        with compressing(self.run_dir):
            exit_code = self._wait(self.driver)
        if self.is_deleted:
            end_orphans(before, self.run_dir, self.reach, self.events)
            return Next("failed", 1)
        past = self.log.read()
        end_orphans(past, self.run_dir, self.reach, self.events)
        is_outage = exit_code == EXIT_NO_HOSTS and past.has_had_hosts
        self.hostless = self.hostless + 1 if is_outage else 0
        if not is_outage:
            self.idle = 0 if has_progressed(progress, past) else self.idle + 1
        following = decide_next(exit_code, self.is_stopped, self.idle, self.hostless)
        self.events.emit("attempt.ended", attempt=attempt, exit_code=exit_code,
                         verdict=following.verdict)
        return following

    def _wait(self, driver: subprocess.Popen[bytes]) -> int:
        """Wait for the driver's end, and end it if the run's folder is deleted."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                return driver.wait(LOOK_S)
            if not self.is_deleted and has_gone(self.run_dir, self.lock):
                self.is_deleted = True
                tell(f"The folder {self.run_dir} was deleted or moved while the run used it. Its "
                     f"event log is lost, and its checkpoints if they were in it. The run ends. To "
                     f"train again, start the same command; restore the folder first if you have "
                     f"a copy.")
                driver.send_signal(signal.SIGTERM)

    def _environment(self, attempt: int, past: Past) -> dict[str, str]:
        """Return the driver's environment: what it and the workers need of the run's past."""
        return os.environ | Attempt(
            run_dir=self.run_dir, run_id=self.run_id, attempt=attempt,
            had_hosts=past.has_had_hosts, newest_step=past.newest_step,
            resume_step=past.newest_checkpoint, lost_attempts=past.lost_attempts,
            run_s=round(past.observed_s, 1)).to_environment()


def has_gone(run_dir: Path, lock: int) -> bool:
    """True if the folder of a run, or what was in it, is not there any more.

    The number of its lock's file is compared, and not that of the folder: FUSE may give a folder
    that nobody has open another number (libfuse, without `use_ino`).
    """
    try:
        return not os.path.samestat(os.stat(run_dir / LOCK_FILE), os.fstat(lock))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # EIO, ESTALE, EACCES of a network file system: nothing is known
        return False


def tell(sentence: str) -> None:
    """Write a sentence to stderr."""
    print(f"elastic-trainer: {plain_text(sentence)}", file=sys.stderr, flush=True)


def _lock(run_dir: Path) -> int:
    """Take the run for this supervisor and its drivers. Raises ConfigError when it is taken.

    The drivers inherit the descriptor.
    """
    lock = private(f"{run_dir}/{LOCK_FILE}", os.O_RDWR | os.O_CREAT)
    if locks.take(lock, LOCK_S):
        return lock
    os.close(lock)
    raise ConfigError(f"Another process drives the run {run_dir.name} (`fuser {run_dir}/.lock` "
                      f"names it). Stop that process, or use another name (--run).")


def has_progressed(before: tuple[int, int], now: Past) -> bool:
    """True if the run has come further than ever, by a step or by a checkpoint.

    `before` is (newest step, newest checkpoint). A step that is done again is no progress.
    """
    return now.newest_step > before[0] or now.newest_checkpoint > before[1]


@contextmanager
def compressing(run_dir: Path) -> Iterator[None]:
    """Compress sealed segments of the event log in a thread, at the lowest priority."""
    is_over = threading.Event()

    def keep_compressed() -> None:
        yield_processor()
        while not is_over.wait(COMPRESS_S):
            with suppress(OSError):  # a full disk: the next turn tries again
                compress(run_dir)

    thread = threading.Thread(target=keep_compressed, name="compress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()

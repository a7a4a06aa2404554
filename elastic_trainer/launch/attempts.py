"""Attempt after attempt until the run is finished: what `./horovodrun_elastic.sh` does when it has set up.

command line → here → driver (one attempt) → … → result.json

What always holds:
1. A new attempt starts only when no worker of the one before it is left: a zombie would train on beside it.
2. It goes on until the run is finished, the error is the user's own, or attempts without progress reach a limit.
3. A stop from outside (Ctrl-C, SIGTERM) is passed on, and the run can be resumed by the same command.
"""

from __future__ import annotations

import argparse
import fcntl
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

from elastic_trainer.config import EXIT_FINISHED, EXIT_NO_HOSTS, EXIT_USER_ERROR, ConfigError
from elastic_trainer.host.modes import make_folder, private
from elastic_trainer.launch import remote
from elastic_trainer.launch.past import COUNTED_BY, Follower, Past
from elastic_trainer.observe.courier import new_run_id
from elastic_trainer.observe.events import Events
from elastic_trainer.observe.report import write_result
from elastic_trainer.observe.segments import compress

MAX_ATTEMPTS_WITHOUT_PROGRESS = 5
MAX_BACK_OFF_S = 60.0
LOCK_S = 5.0
"""A driver that was just killed holds the run until the kernel has taken it apart."""
ORPHANS_ELSEWHERE_S = 2 * remote.ORPHANS_S
"""How long all hosts together have to end their workers of an older attempt: their own grace, and as long again for ssh.
What no ssh ends is ended there without us: a far end that hears nothing kills its worker (remote.py, rule 2)."""
COMPRESS_S = 30.0
EXIT_BAD_COMMAND = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Next:
    """What to do after an attempt: start another after `delay_s`, or stop with `exit_code`."""

    verdict: str
    exit_code: int | None = None
    delay_s: float = 0.0


def decide_next(exit_code: int, was_interrupted: bool, attempts_without_progress: int,
                attempts_without_hosts: int = 0) -> Next:
    """Decide what follows an attempt that ended with `exit_code` (negative: a signal's number).

    `attempts_without_hosts` are the newest ones in which the hosts of a run that has had some were not found: they say
    nothing against the run, so they are tried for ever, with a back-off.
    """
    if exit_code == EXIT_FINISHED:
        return Next("finished", EXIT_FINISHED)
    if was_interrupted:
        return Next("interrupted", EXIT_INTERRUPTED)
    if exit_code in (EXIT_USER_ERROR, EXIT_BAD_COMMAND):
        return Next("user_error", exit_code)
    if attempts_without_progress >= MAX_ATTEMPTS_WITHOUT_PROGRESS and not attempts_without_hosts:
        return Next("failed", 1)
    doublings = min(max(attempts_without_progress, attempts_without_hosts), 10)
    return Next("failed", None, min(MAX_BACK_OFF_S, 2.0 ** doublings - 1.0))


def supervise(run_dir: Path, horovodrun_options: Sequence[str], command: Sequence[str], options: dict[str, Any],
              output: IO[Any] | None = None) -> int:
    """Run attempts of `horovodrun_options command` until `decide_next` says stop; returns the exit code.

    Raises ConfigError when another process drives this run.
    """
    make_folder(run_dir)
    lock = _lock(run_dir)
    try:
        exit_code = _attempts(run_dir, horovodrun_options, command, options, output, lock)
        write_result(run_dir)  # also where it has not finished, and where rank 0 does not share this folder
        return exit_code
    finally:
        os.close(lock)


def _attempts(run_dir: Path, horovodrun_options: Sequence[str], command: Sequence[str], options: dict[str, Any],
              output: IO[Any] | None, lock: int) -> int:
    log = Follower(run_dir)
    before = log.read()
    attempt = before.attempt
    ssh = _ssh_options(horovodrun_options)
    events = Events(run_dir, run=run_dir.name)
    _end_orphans(before, run_dir, ssh, events)  # of an earlier supervisor that was killed
    events.emit("run.started", attempt=attempt + 1, options=options)
    stopped = False
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: Any) -> None:
        nonlocal stopped
        stopped = True
        if process and process.poll() is None:
            process.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    idle = hostless = 0
    run_id = secrets.token_hex(8)
    new_run_id(run_dir, run_id)
    while True:
        attempt += 1
        told = log.read()
        progress = told.newest_step, told.newest_checkpoint
        env = os.environ | {"ELASTIC_TRAINER_RUN_DIR": str(run_dir), "ELASTIC_TRAINER_ATTEMPT": str(attempt),
                            "ELASTIC_TRAINER_RUN_ID": run_id,
                            "ELASTIC_TRAINER_HAD_HOSTS": str(int(told.has_had_hosts)),
                            "ELASTIC_TRAINER_NEWEST_STEP": str(told.newest_step),
                            "ELASTIC_TRAINER_RESUME_STEP": str(told.newest_checkpoint),
                            "ELASTIC_TRAINER_LOST_ATTEMPTS": str(told.lost_attempts),
                            "ELASTIC_TRAINER_RUN_S": f"{told.observed_s:.1f}"}
        events.emit("attempt.started", attempt=attempt, **COUNTED_BY)
        process = subprocess.Popen([sys.executable, "-m", "elastic_trainer.launch.driver", *horovodrun_options, *command],
                                   env=env, stdout=output, stderr=subprocess.STDOUT if output else None,
                                   start_new_session=True,  # Ctrl-C is ours to pass on, once
                                   pass_fds=[lock])  # while the driver lives nobody else can drive this run
        if stopped:  # between the last look and here
            process.send_signal(signal.SIGTERM)
        with compressing(run_dir):
            exit_code = process.wait()
        told = log.read()
        _end_orphans(told, run_dir, ssh, events)
        is_outage = exit_code == EXIT_NO_HOSTS and told.has_had_hosts
        hostless = hostless + 1 if is_outage else 0
        if not is_outage:
            idle = 0 if has_progressed(progress, told) else idle + 1
        following = decide_next(exit_code, stopped, idle, hostless)
        events.emit("attempt.ended", attempt=attempt, exit_code=exit_code, verdict=following.verdict)
        if following.exit_code is not None:
            return following.exit_code
        deadline = time.monotonic() + following.delay_s
        while time.monotonic() < deadline and not stopped:
            time.sleep(0.1)
        if stopped:
            return EXIT_INTERRUPTED


def _lock(run_dir: Path) -> int:
    """Take the run for this supervisor and its drivers. Raises ConfigError when another one lives."""
    lock = private(f"{run_dir}/.lock", os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + LOCK_S
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    except OSError as error:
        os.close(lock)
        raise ConfigError(f"the run {run_dir.name} is being driven by another process (`fuser {run_dir}/.lock` names it). "
                          f"Stop that one, or use another name (--run).") from error


def has_progressed(before: tuple[int, int], now: Past) -> bool:
    """True if the run has come further than ever, by a step or by a checkpoint; a step done once more is no progress.

    `before` is (newest step, newest checkpoint).
    """
    return now.newest_step > before[0] or now.newest_checkpoint > before[1]


@contextmanager
def compressing(run_dir: Path) -> Iterator[None]:
    """Compress sealed segments of the event log meanwhile, with what the training leaves of the processor."""
    is_over = threading.Event()

    def keep_compressed() -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # Linux: a thread's own
        while not is_over.wait(COMPRESS_S):
            with suppress(OSError):  # a full disk: it is tried again
                compress(run_dir)

    thread = threading.Thread(target=keep_compressed, name="compress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _ssh_options(horovodrun_options: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the port and the key for ssh that horovodrun is given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-p", "--ssh-port")
    parser.add_argument("-i", "--ssh-identity-file")
    options, _ = parser.parse_known_args(horovodrun_options)
    return options.ssh_port, options.ssh_identity_file


def _end_orphans(told: Past, run_dir: Path, ssh: tuple[str | None, str | None], events: Events) -> None:
    """Wait until the workers that earlier attempts started are gone; kill those that stay.

    On another host its own end of an ssh does it. Where no ssh gets through, nobody of this attempt will work either.
    """
    written, newest = {(str(attempt), worker) for attempt, worker in told.started}, told.attempt
    living = list(told.living.values())
    # The newest driver may have died before it could write down whom it had just started.
    here = [(e["pid"], e["worker"]) for e in living] + [
        (pid, name) for pid, (attempt, name) in remote.workers_of(str(run_dir)).items()
        if attempt == str(newest) and (attempt, name) not in written]
    # A frozen driver holds its workers back from noticing; by now it is nobody's.
    deadline = time.monotonic() + remote.ORPHANS_S
    while (here := [one for one in here if is_worker(*one, run_dir)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid, name in here:
        if is_worker(pid, name, run_dir):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    # Before the newest attempt started, workers of older ones were ended.
    elsewhere = {e["host"] for e in living if e.get("over_ssh") and e["attempt"] == newest}
    ends = {host: subprocess.Popen(remote.ssh(host, *ssh, "end", str(run_dir)), stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, start_new_session=True) for host in sorted(elsewhere)}
    deadline = time.monotonic() + ORPHANS_ELSEWHERE_S
    for host, end in ends.items():
        if why := _why_not_ended(end, max(0.0, deadline - time.monotonic())):
            events.emit("run.host_not_reached", host=host, reason=why)


def _why_not_ended(end: subprocess.Popen[bytes], left_s: float) -> str:
    """Wait for an ssh that ends a run's workers on a host, and return why it may not have done so; "" if it has."""
    try:
        code = end.wait(left_s)
    except subprocess.TimeoutExpired:
        os.killpg(end.pid, signal.SIGKILL)  # not yet reaped, so the group's number cannot be another's
        end.wait()
        return f"its ssh has not returned in {ORPHANS_ELSEWHERE_S:.0f} s"
    return f"its ssh ended with exit code {code}" if code else ""


def is_worker(pid: int, name: str, run_dir: Path) -> bool:
    """True if the process `pid` is the worker `name` of this run, or our ssh to one that boots elsewhere (pids are used
    again, and other runs have workers of the same names; its environment says who it is).
    """
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    is_named = any(f"ELASTIC_TRAINER_{kind}={name}".encode() in environment for kind in ("WORKER", "SSH"))
    return is_named and b"ELASTIC_TRAINER_RUN_DIR=" + os.fsencode(run_dir) in environment

"""The pool of standbys on a host: boots them one after another, replaces those taken.

    python -m elastic_trainer standby --slots 4 -- python my_train.py …

on each host; a local run starts it itself, and again when it was killed (`local_standbys`)

this process → monitor (one process each) → standby
"""

from __future__ import annotations

import argparse
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from elastic_trainer.config import ConfigError, Limits
from elastic_trainer.driver.standby_monitor import Monitor
from elastic_trainer.driver.standby_shim import command_name, is_private
from elastic_trainer.events.log import Events
from elastic_trainer.events.segments import Reader
from elastic_trainer.host import own
from elastic_trainer.host.options import Parser
from elastic_trainer.host.parent import end_with_parent
from elastic_trainer.host.standbys import FOLDER_VARIABLE, has_monitor, socket_of, standby_folder
from elastic_trainer.wire.plain import plain_text
from elastic_trainer.wire.redact import redacted, redacted_command
from elastic_trainer.world.standby import DEVICE

REPLACE_AFTER_S = 3.0
"""The time after which the next standby starts to boot when one was taken: by then the world has
changed and trains again."""
MAX_BACK_OFF_S = 60.0
KILLED = "its monitor was killed"
ENDED, BAD_COMMAND = 0, 2
"""The exit codes after which the pool is not started again."""


class StandbyPool:
    """Keeps `slots` standbys of one command in a folder."""

    def __init__(self, command: list[str], folder: Path, slots: int, events: Events, boot_s: float):
        self.command, self.folder, self.slots = command, folder, slots
        self.events, self.boot_s = events, boot_s
        self.monitors: dict[socket.socket, tuple[int, str, float]] = {}
        """The connection to each monitor → its pid, its standby's state, and that state's start."""
        self.failures, self.not_before = 0, 0.0

    def run(self) -> NoReturn:
        """Keep standbys until a signal ends this process. Those not taken end with it."""
        for path in (*self.folder.glob("*.sock"), *self.folder.glob("*.new")):
            if not has_monitor(path):
                path.unlink(missing_ok=True)
        while True:
            all_wait = all(state == "waiting" for _, state, _ in self.monitors.values())
            has_room = len(self.monitors) < self.slots and all_wait
            wait_s = self.not_before - time.monotonic()
            if has_room and wait_s <= 0:
                self._start()
                has_room = False
            timeout_s = wait_s if has_room else None
            ready, _, _ = select.select(list(self.monitors), [], [], timeout_s)
            for monitor in ready:
                self._take_message(monitor)

    def _start(self) -> None:
        """Fork a monitor. (A program of its own would cost 100 ms and 10 MB. There are no threads.)
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.setsid()  # a signal to the pool's group is not for a worker
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                for other in (ours, *self.monitors):
                    other.close()  # else the other monitors would not see the pool's end
                code = Monitor(self.command, self.folder, theirs, self.boot_s).run()
            except OSError as error:
                theirs.send(f"failed {error}".encode())
            finally:
                os._exit(code)
        theirs.close()
        self.monitors[ours] = pid, "booting", time.monotonic()

    def _take_message(self, monitor: socket.socket) -> None:
        """Take a monitor's message, or its end."""
        what, _, more = monitor.recv(1 << 16).decode(errors="replace").partition(" ")
        pid, state, since = self.monitors[monitor]
        now = time.monotonic()
        if what == "waiting":
            self.monitors[monitor] = pid, "waiting", now
            self.failures = 0
            self.events.emit("standby.booted", pid=pid, boot_s=round(now - since, 3))
            return
        del self.monitors[monitor]
        monitor.close()
        self.not_before = now + REPLACE_AFTER_S
        if what == "taken":
            self.events.emit("standby.taken", pid=pid)
        else:
            self._failed(pid, state, more or KILLED, now)

    def _failed(self, pid: int, state: str, reason: str, now: float) -> None:
        name = command_name(self.command, os.getcwd())
        socket_of(self.folder, name, pid).unlink(missing_ok=True)
        self.failures += 1
        self.not_before = now + min(MAX_BACK_OFF_S, 2.0 ** min(self.failures, 9))
        self.events.emit("standby.failed", pid=pid, state=state, reason=reason)
        command = shlex.join(redacted_command(self.command))
        print(f"elastic-trainer: A standby of `{command}` failed while {state}: "
              f"{plain_text(redacted(reason))}", file=sys.stderr, flush=True)


def wait_until_training(log: Reader) -> None:
    """Wait until the run has finished a step, or a commit: a booting standby needs the cores.

    `log` is the rest of its event log.
    """
    trained = (b'"worker.step_committed"', b'"worker.commit_kept"')
    while not any(name in line for line in log.lines() for name in trained):
        time.sleep(0.5)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="elastic-trainer standby",
                                     usage="%(prog)s [--slots N] -- COMMAND …")
    parser.add_argument("--slots", type=int, default=1,
                        help="the number of standbys: this host's slots (%(default)s)")
    parser.add_argument("--folder", type=Path, help=f"the folder in which they wait "
                                                    f"({standby_folder({})}, or {FOLDER_VARIABLE})")
    parser.add_argument("--standby-device", choices=("gpu", "cpu"),
                        default=os.environ.get(DEVICE, "gpu"),
                        help="cpu: a standby holds no memory of a GPU: it waits for its place at "
                             "the script's first use of one (%(default)s)")
    parser.add_argument("--run-dir", type=Path, help="log into this run's folder")
    parser.add_argument("--once-training", action="store_true",
                        help="wait until the run has finished a step")
    parser.add_argument("--parent", type=int, metavar="PID",
                        help="end with this process, which has started this one")
    return parser


def main(argv: Sequence[str]) -> NoReturn:
    """Keep standbys until SIGTERM. Raises ConfigError."""
    argv = list(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    options, command = _parser().parse_args(argv[:at]), argv[at + 1 :]
    if options.parent and not end_with_parent(signal.SIGTERM, options.parent):
        sys.exit(0)
    if not command:
        raise ConfigError("No command is given. Give your training command after --, e.g. "
                          "elastic-trainer standby -- python my_train.py")
    if options.slots < 1:
        raise ConfigError(f"--slots is {options.slots}. Give the number of workers of this host, "
                          f"1 or more.")
    os.environ[DEVICE] = options.standby_device
    folder: Path = options.folder or standby_folder(os.environ)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise ConfigError(f"{folder} belongs to another user, or others can enter it, and standbys "
                          f"receive a run's secrets there. Run chmod 700 {folder}, or name another "
                          f"folder with {FOLDER_VARIABLE}.")

    def stop(number: int, frame: object) -> None:
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps monitors
    events = Events(options.run_dir, run=options.run_dir.name if options.run_dir else "")
    if options.once_training:
        wait_until_training(Reader.at_end(options.run_dir))
    limits = Limits.from_environment(os.environ)
    StandbyPool(command, folder, options.slots, events, limits.boot_s).run()


# --- the standbys of a local run -----------------------------------------------------------------

@contextmanager
def local_standbys(run_dir: Path, command: Sequence[str], count: int) -> Iterator[None]:
    """Keep standbys on this machine, for this run only, once it trains."""
    if not count:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="elastic-trainer-") as folder:  # 0700, and short
        os.environ[FOLDER_VARIABLE] = folder
        pool = LocalPool(
            own.command("elastic_trainer", "standby", "--slots", str(count),
                        "--run-dir", str(run_dir), "--once-training", "--parent", str(os.getpid()),
                        "--", *command), Events(run_dir, run=run_dir.name))
        pool.start()
        try:
            yield
        finally:
            del os.environ[FOLDER_VARIABLE]
            pool.end()


class LocalPool(threading.Thread):
    """Runs the pool, and starts it again, with a back-off, when it was killed.

    The kernel ends a pool with the thread that has started it (prctl(2), PR_SET_PDEATHSIG), so
    this thread waits for it.
    """

    def __init__(self, command: Sequence[str], events: Events):
        super().__init__(name="standbys", daemon=True)
        self.command, self.events, self.env = list(command), events, dict(os.environ)
        self.ends = threading.Event()
        self.changes = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Start the pool until it ends on request, or by a mistake that it has printed."""
        failures = 0
        while True:
            started = time.monotonic()
            with self.changes:
                if self.ends.is_set():
                    return
                self.process = subprocess.Popen(self.command, env=self.env, start_new_session=True,
                                                stdin=subprocess.DEVNULL)
            code = self.process.wait()
            if self.ends.is_set() or code in (ENDED, BAD_COMMAND):
                return
            has_lasted = time.monotonic() - started > MAX_BACK_OFF_S
            failures = 1 if has_lasted else failures + 1
            again_s = min(MAX_BACK_OFF_S, 2.0 ** min(failures, 9))
            self.events.emit("standby.service_ended", exit_code=code, again_s=again_s)
            self.ends.wait(again_s)

    def end(self) -> None:
        """End the pool, and wait for its end."""
        with self.changes:
            self.ends.set()
            if self.process:
                self.process.terminate()
        self.join()

"""The monitor: the parent process of one standby.

pool → here (one process per standby) → standby (worker.py) ← (place) ← shim ← driver

    booting → waiting → taken → ended

What always holds:
1. A standby is used once, by the same command in the same folder with the same user's variables and
   the same text of its modules. The monitor refuses any other shim, which then runs the command
   itself.
2. When the shim dies, the monitor kills the worker, also a frozen one. When a monitor dies, the
   kernel ends its own worker with all its processes, also behind a wrapper script, and no other.
   When the pool dies, its standbys without a place end, and no worker does.
3. The output of a standby before its place is printed when it gets one. The output of a wrapper
   script itself follows within FORWARD_S.
4. A booting standby takes the share of one core that other processes leave idle, and at least a
   fifth: it is stopped and continued in turns. (No scheduling class does that: a user cannot raise
   the priority again after SCHED_IDLE or a niceness of 19.)
5. A standby has used nothing of the run: no store, no event log, no socket, no random numbers that
   count.
6. It becomes a worker only after its shim has confirmed that it still waits. A shim without an
   answer in time runs the command itself, so there are never two workers with one name.

A standby runs the script up to `train()` and then rehearses a step; or it runs up to the first call
of `local_rank()`, which waits for the place. Before that a script reads the values of HOROVOD_* and
ELASTIC_TRAINER_* that it would read alone. A model that is moved to a GPU before its place is known
stays on that GPU.

What it does not do: limit memory. A standby takes the memory of a worker before its first step and,
on CPUs, that of the step, up to a sixteenth of the free memory (the rehearsal). On a GPU it takes
the context, the model and the step, unless --standby-device is cpu: then it waits for its place at
the script's first use of the GPU. Nor does it notice
a replaced library (site-packages) or data file: restart `elastic-trainer standby` then.

Source: prctl(2) and fcntl(2) (F_SETOWN, F_SETSIG) of man-pages 6; unix(7) for SOCK_SEQPACKET and
SCM_RIGHTS.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from elastic_trainer.config import ALLOCATOR, HASH_SEED
from elastic_trainer.driver.standby_shim import command_name
from elastic_trainer.host.parent import end_with_parent
from elastic_trainer.host.stacks import FAULTHANDLER
from elastic_trainer.host.standbys import socket_of
from elastic_trainer.world.standby import (
    NAME_BYTES,
    OF_A_GPU,
    OF_THE_PLACE,
    REASON_BYTES,
    VARIABLE,
    changed_files,
    read_environment,
    stamps,
    stays_off_gpu,
    write_environment,
)

WAKE_S = 2.0
"""The time in which a standby must answer when its place has come. After it the standby is killed,
and the shim asks the next one."""
TURN_S = 0.1
LEAST, MOST = 0.2, 0.8
"""The least and the largest share of each turn in which a booting standby runs."""
OUTPUT_BYTES = 60_000
"""The end of a standby's output that is forwarded. It fits a pipe, so writing it never blocks."""
FORWARD_S = 1.0
"""The interval in which the output of a wrapper script is forwarded."""
BEHIND_S = 0.05
"""The interval where the reader is slower than the script."""
LAST_FORWARD_S = 5.0
"""The longest pause of the reader before it has the end of the output."""
CPU_KINDS, IDLE = 8, (3, 4)
"""psutil's first 8 kinds of a core's time add up to all of it; idle, and idle while a disk
works."""
CHANGING = (*OF_THE_PLACE, "SSH_", "XDG_", "LC_", "SYSTEMD_", "TMUX")
IGNORED = frozenset(
    "PYTHONUNBUFFERED NCCL_SOCKET_IFNAME PWD OLDPWD SHLVL _ TERM COLORTERM COLUMNS LINES LS_COLORS "
    "MAIL LESSOPEN LESSCLOSE PAGER EDITOR DISPLAY DBUS_SESSION_BUS_ADDRESS INVOCATION_ID "
    "JOURNAL_STREAM NOTIFY_SOCKET LOGNAME USER SHELL HOSTNAME LANG MOTD_SHOWN PATH".split())
"""Variables that differ between two logins to a machine and change nothing in a script."""


def differing(booted_with: Mapping[str, str], now: Mapping[str, str], program: str) -> list[str]:
    """Return the user's variables whose values have changed since the standby was booted.

    PATH is one of them when it leads to another program.
    """
    changing = (*CHANGING, *OF_A_GPU) if stays_off_gpu(booted_with) else CHANGING
    names = {name for name in booted_with.keys() | now.keys()
             if not name.startswith(changing) and name not in IGNORED
             and booted_with.get(name) != now.get(name)}
    before = shutil.which(program, path=booted_with.get("PATH"))
    if before != shutil.which(program, path=now.get("PATH")):
        names.add("PATH")
    return sorted(names)


class BootFailed(RuntimeError):
    """A standby has ended, or was ended, before a shim took it."""


class Monitor:
    """The parent of one standby, in a process of its own. It reports to `pool`."""

    def __init__(self, command: list[str], folder: Path, pool: socket.socket, boot_s: float):
        self.command, self.pool, self.boot_s = command, pool, boot_s
        self.path = socket_of(folder, command_name(command, os.getcwd()), os.getpid())
        self.printed: IO[bytes] = tempfile.TemporaryFile()
        self.worker, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.env = (ALLOCATOR | HASH_SEED | FAULTHANDLER | os.environ
                    | {"PYTHONUNBUFFERED": "1"})
        self.program = stamps([shutil.which(command[0]) or command[0], *command[1:2]])
        """The program and, perhaps, its script: a wrapper script is no module."""
        self.began_ns = time.time_ns()
        room = f"{VARIABLE}={theirs.fileno()},{self.began_ns},".ljust(NAME_BYTES, ".")
        env = self.env | {VARIABLE: room.partition("=")[2]}
        if stays_off_gpu(self.env):  # torch.cuda.is_available() would read CUDA_VISIBLE_DEVICES
            env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        life, self.alive = os.pipe()  # nothing is written: its end is this process's end
        with theirs:
            self.process = subprocess.Popen(
                command, env=env, pass_fds=[theirs.fileno(), life], stdin=subprocess.DEVNULL,
                stdout=self.printed, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=lambda: _die_with_monitor(life))  # noqa: PLW1509 (no threads here)
        os.close(life)
        self.end_of_process = os.pidfd_open(self.process.pid)
        self.stdout, self.forwarded = -1, 0
        """The place's standard output, and the bytes of `printed` that were written to it."""

    def run(self) -> int:
        """Boot, wait, hand over, accompany; returns this process's exit code."""
        try:
            self._boot()
            shim = self._wait()
        except BootFailed as error:
            self._kill()
            self._report(f"failed {error}")
            return 1
        finally:
            self.path.unlink(missing_ok=True)
        if shim is None:  # the pool has ended, so no shim will come
            self._kill()
            return 0
        self._report("taken")
        self._accompany(shim)
        return 0

    def _report(self, what: str) -> None:
        with suppress(OSError):  # the pool has ended
            self.pool.send(what.encode()[:REASON_BYTES * 2])

    # --- booting and waiting --------------------------------------------------------------------

    def _boot(self) -> None:
        """Let the standby boot in turns, on the cores that are idle. Raises BootFailed."""
        deadline, share = time.monotonic() + self.boot_s / LEAST, LEAST
        while True:
            self._signal(signal.SIGSTOP)
            before = core_seconds()
            ready = self._ready(TURN_S * (1 - share), self.worker, self.pool)
            idle = min(MOST, max(LEAST, idle_cores(before, core_seconds())))
            share += 0.2 * (idle - share)
            self._signal(signal.SIGCONT)
            ready |= self._ready(TURN_S * share, self.worker, self.pool)
            if self.pool in ready:
                raise BootFailed("the pool has ended")
            if self.worker in ready:
                if self.worker.recv(64) != b"waiting":
                    raise BootFailed(self._how_it_ended())
                return
            if self.end_of_process in ready:
                raise BootFailed(self._how_it_ended())
            if time.monotonic() > deadline:
                raise BootFailed(f"it has not reached the training in {self.boot_s:.0f} s. Raise "
                                 f"the limit with ELASTIC_TRAINER_LIMITS=boot_s=…")

    def _wait(self) -> socket.socket | None:
        """Wait for a shim that may have this standby, and hand it over.

        Returns None when the pool has ended. Raises BootFailed.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            new = self.path.with_suffix(".new")
            listener.bind(str(new))
            listener.listen(8)
            new.rename(self.path)  # a shim takes a refused connection for a dead monitor
            self._report("waiting")
            while True:
                ready = self._ready(None, listener, self.pool)
                if self.end_of_process in ready:
                    raise BootFailed(self._how_it_ended())
                if self.pool in ready:
                    return None
                shim, _ = listener.accept()
                if self._hand_over(shim):
                    return shim
                shim.close()

    def _hand_over(self, shim: socket.socket) -> bool:
        """Give a shim's place to the standby; False if they do not fit.

        Raises BootFailed when the standby is dead.
        """
        shim.settimeout(WAKE_S)
        descriptors: list[int] = []
        try:
            credentials = shim.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            message, descriptors, _, _ = socket.recv_fds(shim, 64, 4)
            is_ours = struct.unpack("3i", credentials)[1] == os.getuid()
            if not is_ours or message != b"take" or len(descriptors) != 4:
                return False
            wanted = (ALLOCATOR | HASH_SEED | FAULTHANDLER
                      | read_environment(descriptors[0]))
            if names := differing(self.env, wanted, self.command[0]):
                shim.send(f"it was booted with other values of {', '.join(names)}".encode()[:1000])
                return False
            self.path.unlink(missing_ok=True)
            descriptors.append(write_environment(self.env))
            self._wake(descriptors)
            shim.send(b"taken")
            shim.settimeout(None)
            return True
        except BootFailed as error:
            with suppress(OSError):
                shim.send(str(error).encode()[:1000])
            raise
        except (OSError, ValueError) as error:
            if self.path.exists():
                return False  # the shim has ended before anything happened
            raise BootFailed(f"it could not be handed over: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _wake(self, descriptors: list[int]) -> None:
        """Send its place to the standby, and wait until it has taken it. Raises BootFailed."""
        if changed := changed_files(self.program, stamps(self.program), self.began_ns):
            raise BootFailed(f"it was booted before {', '.join(changed)} changed")
        socket.send_fds(self.worker, [b"place"], [*descriptors, self.printed.fileno()])
        if self.worker not in self._ready(WAKE_S, self.worker):
            raise BootFailed(f"it did not answer within {WAKE_S:.0f} s when its place had come")
        if (answer := self.worker.recv(REASON_BYTES)) != b"here":
            files = answer.decode(errors="replace")
            raise BootFailed(f"it was booted before {files} changed" if answer
                             else self._how_it_ended())
        self.stdout = os.dup(descriptors[2])
        size = os.fstat(self.printed.fileno()).st_size
        self.forwarded = max(0, size - OUTPUT_BYTES)
        self._forward()

    # --- with a place ---------------------------------------------------------------------------

    def _accompany(self, shim: socket.socket) -> None:
        """Stand between the shim and the worker until one of them ends."""
        is_behind = False
        while True:
            ready = self._ready(BEHIND_S if is_behind else FORWARD_S, shim)
            if self.end_of_process in ready:
                break
            is_behind = not self._forward()
            if shim not in ready:
                continue
            try:
                message, _, number = shim.recv(64).partition(b" ")
            except ConnectionResetError:
                message = b""
            if message == b"mine":
                self.worker.send(b"go")
            elif message == b"signal":
                self._signal(int(number))
            else:
                self._kill()  # the shim is dead, and so is its worker, frozen or not
                return
        status = self._kill()
        self._forward(LAST_FORWARD_S, shim)
        with suppress(OSError):
            shim.send(b"ended %d" % status)

    def _forward(self, patience_s: float = 0.0, *shim: socket.socket) -> bool:
        """Forward the output from before the place and, of a wrapper script, since then.

        Returns False if the reader has no room for the rest yet. One write has at most PIPE_BUF
        bytes, which fit any pipe that has room at all: a slow reader must not keep the monitor from
        noticing the shim's end.
        """
        file = self.printed.fileno()
        end = os.fstat(file).st_size
        with suppress(OSError):
            while self.forwarded < end:
                is_over, has_room, _ = select.select(shim, [self.stdout], [], patience_s)
                if is_over or not has_room:
                    return False
                piece = os.pread(file, select.PIPE_BUF, self.forwarded)
                self.forwarded += os.write(self.stdout, piece)
        return True

    # --- its process ----------------------------------------------------------------------------

    def _ready(self, timeout_s: float | None, *sockets: socket.socket) -> set[Any]:
        """Wait for one of the sockets, or for the end of the process; return what is ready."""
        waited_for: list[Any] = [self.end_of_process, *sockets]
        return set(select.select(waited_for, [], [], timeout_s)[0])

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)  # not reaped before `_kill`: the number is its own

    def _kill(self) -> int:
        """End the process, if it has not ended, and its children; returns its wait status."""
        self._signal(signal.SIGKILL)
        _, status = os.waitpid(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return status

    def _how_it_ended(self) -> str:
        """Describe how a standby ended, with the end of its output."""
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        how = f"it ended ({ended.si_status})" if ended else "it sent an unknown message"
        file = self.printed.fileno()
        start = max(0, os.fstat(file).st_size - REASON_BYTES)
        output = os.pread(file, REASON_BYTES, start).decode(errors="replace")
        return f"{how}: {output.strip()}"


def _die_with_monitor(life: int) -> None:
    """Let the kernel end the standby when its monitor is killed.

    Its signal does not reach the children of a wrapper script. They are signalled by the end of a
    pipe: that signal goes to the process group while one process in it holds the pipe.
    """
    end_with_parent(signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)


def core_seconds() -> Sequence[float]:
    """Return the seconds of this machine's cores since its start, by kind of use."""
    return tuple(psutil.cpu_times())[:CPU_KINDS]


def idle_cores(before: Sequence[float], now: Sequence[float]) -> float:
    """Return the average number of idle cores between two samples."""
    spent = [b - a for a, b in zip(before, now, strict=True)]
    return (os.cpu_count() or 1) * sum(spent[kind] for kind in IDLE) / (sum(spent) or 1.0)

"""Standby workers: processes that have booted the user's command up to its place in the world, and wait for it.

    python -m elastic_trainer standby --slots 4 -- python my_train.py …      (on each host; local runs do it themselves)

service → keeper (one per standby, its parent) → standby ← (place) ← shim ← driver
    booting → waiting → taken → ended

What always holds:
1. A standby is used once, by the same command in the same folder with the same variables of the user's, and with the
   same text of its modules; anything else is refused, and the shim runs the command itself.
2. The shim's death kills the worker, also a frozen one: its keeper does it from outside. A keeper's death kills its own
   worker only, whole: the kernel does it, also behind a wrapper script. The service's death ends those that nobody has
   taken, and no worker.
3. What a standby prints before its place is printed when it gets one, as if it had been started then. What it, or a
   wrapper script, has set in its environment stays, and so does where a script has sent its output (into a file of each
   run's own, or with `>>`: the next standby runs it again); what the script prints itself is printed a second later.
4. One boots at a time, and takes as much of one core as the others leave idle, but at least a fifth: it is stopped and
   let go in turns. (No scheduling class would do: tried as a user, SCHED_IDLE and a nice of 19 have no way back.)
5. A standby has touched nothing of the run: no store, no diary, no socket, no random numbers that count.
6. It goes on as a worker only when its shim has said that it waits for that: a shim that had no answer in time runs the
   command itself, and there are never two workers of one name.

How far it boots: through everything before `train()`, then a rehearsal of a step in there; or up to the first call of
`local_rank()`, which waits for the answer. What a script reads from HOROVOD_* or ELASTIC_TRAINER_* before that it reads
as if it stood alone. A model that is on a GPU before its place is known stays on the GPU that it saw.

What it does not do: limit memory. One standby takes what a worker takes before its first step and, on CPUs, what its first
step will take, up to a sixteenth of what is free (`loop.rehearse`). Notice that a library (site-packages) or a file that
the script has read was replaced: restart the service then.

Source: sched_setscheduler(2), prctl(2) and fcntl(2) (F_SETOWN, F_SETSIG) of man-pages 6; unix(7) for SOCK_SEQPACKET and
SCM_RIGHTS.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from elastic_trainer.config import ALLOCATOR, EXIT_LEFT, ConfigError, Limits
from elastic_trainer.crash import FAULTHANDLER
from elastic_trainer.edge.plain import plain_text
from elastic_trainer.events import Events
from elastic_trainer.segments import Reader
from elastic_trainer.shim import FOLDER_VARIABLE, command_name, is_private, standby_folder

VARIABLE = "ELASTIC_TRAINER_STANDBY"
NAME_BYTES = 4608
"""Room for a worker's name and its run's folder in a standby's first environment, where whoever looks at /proc finds them:
a path has at most 4096 bytes (PATH_MAX)."""
WHO = ("ELASTIC_TRAINER_WORKER", "ELASTIC_TRAINER_ATTEMPT", "ELASTIC_TRAINER_RUN_DIR")
"""What is written there. No other variable of a place's: anybody with the same user can read it, and it ends up in logs."""
REPLACE_AFTER_S = 3.0
"""A used standby's successor begins to boot so long after, when the world has changed and trains again."""
WAKE_S = 2.0
"""How long a standby has to answer when its place has come; after that it is killed, and the shim looks further."""
TURN_S = 0.1
LEAST, MOST = 0.2, 0.8
"""A booting standby runs for a share of each turn and rests in the remainder: as much of one core as the others leave
idle, between these two."""
MAX_BACK_OFF_S = 60.0
LAST_WORDS_BYTES = 2000
OUTPUT_BYTES = 60_000
"""So much of what a standby has printed is handed on: it fits a pipe, so that writing it never waits for a reader."""
FORWARD_S = 1.0
"""So often what a wrapper script has printed is handed on."""
BEHIND_S = 0.05
"""So often where the reader is slower than the script."""
LAST_FORWARD_S = 5.0
"""So long the reader may rest before it has the end of what was printed."""
PR_SET_PDEATHSIG = 1
OF_THE_PLACE = ("HOROVOD_", "ELASTIC_TRAINER_")
CHANGING = (*OF_THE_PLACE, "SSH_", "XDG_", "LC_", "SYSTEMD_", "TMUX")
NOT_MINDED = frozenset("PYTHONUNBUFFERED NCCL_SOCKET_IFNAME PWD OLDPWD SHLVL _ TERM COLORTERM COLUMNS LINES LS_COLORS MAIL "
                       "LESSOPEN LESSCLOSE PAGER EDITOR DISPLAY DBUS_SESSION_BUS_ADDRESS INVOCATION_ID JOURNAL_STREAM "
                       "NOTIFY_SOCKET LOGNAME USER SHELL HOSTNAME LANG MOTD_SHOWN PATH".split())
"""Variables that differ between two ways into a machine and change nothing in a script."""


# --- in the worker ------------------------------------------------------------------------------------------------------

def is_standby() -> bool:
    """True while this process waits, or will wait, for its place."""
    return VARIABLE in os.environ


def wait_for_place() -> dict[str, float]:
    """Stand by until a shim comes, and become the worker that it was started as: environment, output, name.

    Returns how long this process has waited, for the diary; nothing if it is no standby. Call it before the first
    thing that depends on who this worker is.
    """
    if not is_standby():
        return {}
    number_of_keeper, began_ns, _ = os.environ.pop(VARIABLE).split(",")
    keeper = socket.socket(fileno=int(number_of_keeper))
    keeper.set_inheritable(False)
    sys.stdout.flush()
    sys.stderr.flush()
    since = time.monotonic()
    loaded = stamps(own_files())
    keeper.send(b"waiting")
    _, descriptors, _, _ = socket.recv_fds(keeper, 64, 6)
    if not descriptors:
        os._exit(EXIT_LEFT)  # the keeper has gone
    place, *places, booted_with, printed = descriptors
    if changed := changed_files(loaded, stamps(loaded), int(began_ns), (os.getcwd(), *filter(None, sys.path))):
        keeper.send(", ".join(changed).encode()[:LAST_WORDS_BYTES])
        os._exit(EXIT_LEFT)
    environment = merged(read_environment(booted_with), os.environ, read_environment(place))
    os.environ.clear()
    os.environ.update(environment)
    given = os.stat(os.devnull), os.fstat(printed), os.fstat(printed)
    for number, (of_place, of_keeper) in enumerate(zip(places, given, strict=True)):
        with suppress(OSError):  # a script has closed it
            if os.path.samestat(os.fstat(number), of_keeper):  # else a script has redirected it
                os.dup2(of_place, number)
    for descriptor in descriptors:
        os.close(descriptor)
    keeper.send(b"here")
    if keeper.recv(64) != b"go":
        os._exit(EXIT_LEFT)  # the shim has not waited for us: the command itself runs in this place
    keeper.close()
    write_name(os.environ)
    return {"waited_s": round(time.monotonic() - since, 3)}


def write_environment(variables: Mapping[str, str]) -> int:
    """Write an environment into memory, to be handed over; returns its descriptor."""
    descriptor = os.memfd_create("environment")
    os.write(descriptor, json.dumps(dict(variables)).encode())
    return descriptor


def read_environment(descriptor: int) -> dict[str, str]:
    """Read an environment that was handed over: a shim's is the place."""
    return dict(json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0)))


def merged(booted_with: Mapping[str, str], now: Mapping[str, str], place: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a place, with what the script, or a wrapper of it, has changed since it was booted.

    Who the worker is says the place alone: a script may have set defaults for that.
    """
    removed = booted_with.keys() - now.keys()
    changed = {name: value for name, value in now.items() if booted_with.get(name) != value}
    who = {name: value for name, value in place.items() if name.startswith(OF_THE_PLACE)}
    return {name: value for name, value in place.items() if name not in removed} | changed | who


def own_files() -> list[str]:
    """Return the files of all modules here but the libraries': thousands, which nobody edits while a run waits."""
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    files = {getattr(module, "__dict__", {}).get("__file__") or "" for module in list(sys.modules.values())} - {""}
    return sorted(file for file in files if not file.startswith(libraries) and f"-packages{os.sep}" not in file)


def stamps(files: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return which file each of these names is (its inode), and when that was written (ns); zeros for none."""
    found = {}
    for file in files:
        try:
            facts = os.stat(file)
            found[file] = facts.st_ino, facts.st_mtime_ns
        except OSError:
            found[file] = 0, 0
    return found


def changed_files(loaded: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]], began_ns: int,
                  roots: tuple[str, ...] = ()) -> list[str]:
    """Return the files that may not be those which a standby has loaded.

    Under `roots` also those that were written since it began to boot: it may have read what stood there before.
    Elsewhere a compiler (torch's, for one) writes modules of its own meanwhile.
    """
    return [file for file, (inode, written_ns) in loaded.items()
            if now[file] != (inode, written_ns) or (written_ns > began_ns and file.startswith(roots))]


def write_name(environment: Mapping[str, str]) -> None:
    """Write which worker this is where /proc/PID/environ shows it, over the room that was left for it there.

    That memory is the environment this process was started with; nothing else of it is touched.
    """
    if not environment.get("ELASTIC_TRAINER_WORKER"):
        return  # plain horovodrun gives no names
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end, proc(5)
    entry = b"\0".join(os.fsencode(f"{name}={environment[name]}") for name in WHO if name in environment)
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        at = memory.read(end - start).find(f"{VARIABLE}=".encode())
        if at >= 0 and len(entry) <= NAME_BYTES:
            memory.seek(start + at)
            memory.write(entry.ljust(NAME_BYTES, b"\0"))


# --- the keeper ---------------------------------------------------------------------------------------------------------

def differing(booted_with: Mapping[str, str], now: Mapping[str, str], program: str) -> list[str]:
    """Return the names of variables of the user's that have other values now than when the standby was booted.

    PATH counts when the program is another one by it.
    """
    names = {name for name in booted_with.keys() | now.keys()
             if not name.startswith(CHANGING) and name not in NOT_MINDED and booted_with.get(name) != now.get(name)}
    if shutil.which(program, path=booted_with.get("PATH")) != shutil.which(program, path=now.get("PATH")):
        names.add("PATH")
    return sorted(names)


class BootFailed(RuntimeError):
    """A standby has ended, or had to be ended, before anybody took it."""


class Keeper:
    """The parent of one standby, for all of its life. Runs in a process of its own; `service` hears what becomes of it."""

    def __init__(self, command: list[str], folder: Path, service: socket.socket, boot_s: float):
        self.command, self.service, self.boot_s = command, service, boot_s
        self.path = folder / f"{command_name(command, os.getcwd())}-{os.getpid()}.sock"
        self.listener: socket.socket | None = None
        self.printed: IO[bytes] = tempfile.TemporaryFile()
        self.worker, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.env = ALLOCATOR | FAULTHANDLER | os.environ | {"PYTHONUNBUFFERED": "1"}
        self.program = stamps([shutil.which(command[0]) or command[0], *command[1:2]])
        """A wrapper script is no module: the program, and what may be its script."""
        self.began_ns = time.time_ns()
        room = f"{VARIABLE}={theirs.fileno()},{self.began_ns},".ljust(NAME_BYTES, ".").partition("=")[2]
        life, self.alive = os.pipe()  # nothing is ever written: its end is ours
        with theirs:
            self.process = subprocess.Popen(
                command, env=self.env | {VARIABLE: room}, pass_fds=[theirs.fileno(), life], stdin=subprocess.DEVNULL,
                stdout=self.printed, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=lambda: _die_with_keeper(life))  # noqa: PLW1509 (no threads here)
        os.close(life)
        self.end_of_process = os.pidfd_open(self.process.pid)
        self.stdout, self.handed_on = -1, 0
        """The place's standard output, and how much of `printed` has been written to it."""

    def run(self) -> int:
        """Boot, wait, hand over, accompany; returns this process's exit code."""
        try:
            self._boot()
            shim = self._wait()
        except BootFailed as error:
            self._kill()
            self._tell(f"failed {error}")
            return 1
        finally:
            self.path.unlink(missing_ok=True)
        if shim is None:  # the service has gone, and nobody wants us
            self._kill()
            return 0
        self._tell("taken")
        self._accompany(shim)
        return 0

    def _tell(self, what: str) -> None:
        try:
            self.service.send(what.encode()[:LAST_WORDS_BYTES * 2])
        except OSError:
            pass  # it has gone: nobody needs to know

    def _boot(self) -> None:
        """Let the standby boot, a little at a time where others need the cores. Raises BootFailed."""
        deadline, share = time.monotonic() + self.boot_s / LEAST, LEAST
        while True:
            self._signal(signal.SIGSTOP)
            before = core_seconds()
            ready = self._ready(TURN_S * (1 - share), self.worker, self.service)
            share += 0.2 * (min(MOST, max(LEAST, idle_cores(before, core_seconds()))) - share)
            self._signal(signal.SIGCONT)
            ready |= self._ready(TURN_S * share, self.worker, self.service)
            if self.service in ready:
                raise BootFailed("the service has gone")
            if self.worker in ready:
                if self.worker.recv(64) != b"waiting":
                    raise BootFailed(self._why())
                return
            if self.end_of_process in ready:
                raise BootFailed(self._why())
            if time.monotonic() > deadline:
                raise BootFailed(f"it has not come to train() in {self.boot_s:.0f} s. Give it longer: "
                                 f"ELASTIC_TRAINER_LIMITS=boot_s=…")

    def _wait(self) -> socket.socket | None:
        """Wait for a shim that may have this standby, and hand it over; None when the service has gone."""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self.listener:
            new = self.path.with_suffix(".new")
            self.listener.bind(str(new))
            self.listener.listen(8)
            new.rename(self.path)  # a shim that is refused takes the keeper for dead
            self._tell("waiting")
            while True:
                ready = self._ready(None, self.listener, self.service)
                if self.end_of_process in ready:
                    raise BootFailed(self._why())
                if self.service in ready:
                    return None
                shim, _ = self.listener.accept()
                if self._hand_over(shim):
                    return shim
                shim.close()

    def _hand_over(self, shim: socket.socket) -> bool:
        """Give a shim's place to the standby. False if they do not fit. Raises BootFailed when the standby is dead."""
        shim.settimeout(WAKE_S)
        descriptors: list[int] = []
        try:
            uid = struct.unpack("3i", shim.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            word, descriptors, _, _ = socket.recv_fds(shim, 64, 4)
            if uid != os.getuid() or word != b"take" or len(descriptors) != 4:
                return False
            names = differing(self.env, ALLOCATOR | FAULTHANDLER | read_environment(descriptors[0]), self.command[0])
            if names:
                shim.send(f"it was booted with other values of {', '.join(names)}".encode()[:1000])
                return False
            self.path.unlink(missing_ok=True)
            if changed := changed_files(self.program, stamps(self.program), self.began_ns):
                raise BootFailed(f"it was booted before {', '.join(changed)} changed")
            descriptors.append(write_environment(self.env))
            socket.send_fds(self.worker, [b"place"], [*descriptors, self.printed.fileno()])
            if self.worker not in self._ready(WAKE_S, self.worker):
                raise BootFailed(f"it did not answer in {WAKE_S:.0f} s when its place had come")
            if (word := self.worker.recv(LAST_WORDS_BYTES)) != b"here":
                raise BootFailed(f"it was booted before {word.decode(errors='replace')} changed" if word else self._why())
            self.stdout = os.dup(descriptors[2])
            self.handed_on = max(0, os.fstat(self.printed.fileno()).st_size - OUTPUT_BYTES)
            self._forward()
            shim.send(b"taken")
            shim.settimeout(None)
            return True
        except BootFailed as error:
            with suppress(OSError):
                shim.send(str(error).encode()[:1000])
            raise
        except (OSError, ValueError) as error:
            if self.path.exists():
                return False  # whoever asked has gone before anything happened
            raise BootFailed(f"it could not be handed over: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _accompany(self, shim: socket.socket) -> None:
        """Be between the shim and the worker until one of them ends."""
        is_behind = False
        while self.end_of_process not in (ready := self._ready(BEHIND_S if is_behind else FORWARD_S, shim)):
            is_behind = not self._forward()
            if shim not in ready:
                continue
            try:
                word, _, number = shim.recv(64).partition(b" ")
            except ConnectionResetError:
                word = b""
            if word == b"mine":
                self.worker.send(b"go")
            elif word == b"signal":
                self._signal(int(number))
            else:
                self._kill()  # the shim is dead, and so is its worker, frozen or not
                return
        status = self._kill()
        self._forward(LAST_FORWARD_S, shim)
        try:
            shim.send(b"ended %d" % status)
        except OSError:
            pass

    def _forward(self, patience_s: float = 0.0, *shim: socket.socket) -> bool:
        """Hand on what was printed before the place came, and by a wrapper script, or its `tee`, since; False if there is
        more, for which the reader has no room yet.

        A slow reader must not keep us from seeing the shim's end: so little fits a pipe that has room at all.
        """
        file = self.printed.fileno()
        end = os.fstat(file).st_size
        with suppress(OSError):
            while self.handed_on < end:
                is_over, has_room, _ = select.select(shim, [self.stdout], [], patience_s)
                if is_over or not has_room:
                    return False
                self.handed_on += os.write(self.stdout, os.pread(file, select.PIPE_BUF, self.handed_on))
        return True

    # --- its process --------------------------------------------------------------------------------------------------

    def _ready(self, timeout_s: float | None, *sockets: socket.socket) -> set[Any]:
        """Wait for one of the sockets, or for the end of the process, and return what is ready."""
        waited_for: list[Any] = [self.end_of_process, *sockets]
        return set(select.select(waited_for, [], [], timeout_s)[0])

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)  # not reaped before `_kill`, so the number cannot be another's
        except ProcessLookupError:
            pass

    def _kill(self) -> int:
        """End the process, if it has not ended, and what it left behind; returns its wait status."""
        self._signal(signal.SIGKILL)
        _, status = os.waitpid(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return status

    def _why(self) -> str:
        """Say how a standby ended, with its last words."""
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        how = f"it ended ({ended.si_status})" if ended else "it said something that is no word of ours"
        return f"{how}: {self._printed(LAST_WORDS_BYTES).decode(errors='replace').strip()}"

    def _printed(self, most: int) -> bytes:
        """Return the end of what the standby has printed so far."""
        file = self.printed.fileno()
        size = os.fstat(file).st_size
        return os.pread(file, most, max(0, size - most))


def _die_with_keeper(life: int) -> None:
    """Let the kernel end the standby when its keeper is killed: nobody else would. It may do so in the same moment.

    The first is for this process, whatever it executes. It does not reach the children of a wrapper script: they are
    told by the end of a pipe, whose signal goes to the group, as long as one process in it holds the pipe.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)


def core_seconds() -> list[int]:
    """Return what the cores of this machine have spent their time on since it started, in ticks (proc(5), `cpu`)."""
    with open("/proc/stat") as file:
        return [int(ticks) for ticks in file.readline().split()[1:9]]


def idle_cores(before: Sequence[int], now: Sequence[int]) -> float:
    """Return how many cores were idle, on average, between two looks."""
    spent = [b - a for a, b in zip(before, now, strict=True)]
    return (os.cpu_count() or 1) * (spent[3] + spent[4]) / max(1, sum(spent))  # idle, and idle while a disk works


# --- the service --------------------------------------------------------------------------------------------------------

class Service:
    """Keep `slots` standbys of one command in a folder: boot them one after another, replace those that are taken."""

    def __init__(self, command: list[str], folder: Path, slots: int, events: Events, boot_s: float):
        self.command, self.folder, self.slots, self.events, self.boot_s = command, folder, slots, events, boot_s
        self.keepers: dict[socket.socket, tuple[int, str, float]] = {}
        """The connection to each keeper → its pid, the state of its standby, since when."""
        self.failures, self.not_before = 0, 0.0

    def run(self) -> NoReturn:
        """Keep them until a signal ends this process; then those that nobody has taken end with it."""
        for path in (*self.folder.glob("*.sock"), *self.folder.glob("*.new")):
            if not Path(f"/proc/{path.stem.rpartition('-')[2]}").exists():
                path.unlink(missing_ok=True)  # of a keeper that was killed
        while True:
            is_room = len(self.keepers) < self.slots and all(state == "waiting" for _, state, _ in self.keepers.values())
            wait_s = self.not_before - time.monotonic()
            if is_room and wait_s <= 0:
                self._start()
                is_room = False
            ready, _, _ = select.select(list(self.keepers), [], [], wait_s if is_room else None)
            for keeper in ready:
                self._hear(keeper)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()  # a keeper of its own would cost a hundred milliseconds and 10 MB; there are no threads here
        if not pid:
            code = 1
            try:
                os.setsid()  # what is sent to the service's group is not for a worker
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                for other in (ours, *self.keepers):
                    other.close()  # else they would not see the service's end
                code = Keeper(self.command, self.folder, theirs, self.boot_s).run()
            except OSError as error:
                theirs.send(f"failed {error}".encode())
            finally:
                os._exit(code)
        theirs.close()
        self.keepers[ours] = pid, "booting", time.monotonic()

    def _hear(self, keeper: socket.socket) -> None:
        """Take a keeper's word, or its end."""
        word, _, more = keeper.recv(1 << 16).decode(errors="replace").partition(" ")
        pid, state, since = self.keepers[keeper]
        now = time.monotonic()
        if word == "waiting":
            self.keepers[keeper] = pid, "waiting", now
            self.failures = 0
            self.events.emit("standby.booted", pid=pid, boot_s=round(now - since, 3))
            return
        del self.keepers[keeper]
        keeper.close()
        self.not_before = now + REPLACE_AFTER_S
        if word == "taken":
            self.events.emit("standby.taken", pid=pid)
            return
        (self.folder / f"{command_name(self.command, os.getcwd())}-{pid}.sock").unlink(missing_ok=True)
        self.failures += 1
        self.not_before = now + min(MAX_BACK_OFF_S, 2.0 ** min(self.failures, 9))
        self.events.emit("standby.failed", pid=pid, state=state, reason=more or "its keeper was killed")
        print(f"elastic-trainer: a standby of `{shlex.join(self.command)}` has failed while {state}: "
              f"{plain_text(more) or 'its keeper was killed'}", file=sys.stderr, flush=True)


def wait_until_training(log: Reader) -> None:
    """Wait until a step is finished in this run, by the rest of its event log: booting workers need the cores."""
    while not any(b'"worker.step_committed"' in line for line in log.lines()):
        time.sleep(0.5)


def main(argv: Sequence[str]) -> NoReturn:
    """Keep standbys until SIGTERM. Raises ConfigError."""
    argv = list(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="elastic-trainer standby", usage="%(prog)s [--slots N] -- COMMAND …")
    parser.add_argument("--slots", type=int, default=1, help="how many stand by: this host's slots (%(default)s)")
    parser.add_argument("--folder", type=Path, help=f"where they wait ({standby_folder({})}, or {FOLDER_VARIABLE})")
    parser.add_argument("--run-dir", type=Path, help="tell this run's diary")
    parser.add_argument("--once-training", action="store_true", help="wait until the run has finished a step")
    parser.add_argument("--parent", type=int, metavar="PID", help="end with this process, which has started this one")
    options, command = parser.parse_args(argv[:at]), argv[at + 1 :]
    if options.parent:
        _end_with(options.parent)
    if not command or options.slots < 1:
        raise ConfigError("there is nothing to stand by for. Give a command after --, and --slots 1 or more.")
    folder: Path = options.folder or standby_folder(os.environ)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise ConfigError(f"{folder} is another user's, or others can enter it, and standbys get a run's secrets there. "
                          f"Run: chmod 700 {folder}, or name another folder by {FOLDER_VARIABLE}.")

    def stop(number: int, frame: object) -> None:
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are reaped by the kernel; their words say all there is
    events = Events(options.run_dir, run=options.run_dir.name if options.run_dir else "")
    if options.once_training:
        wait_until_training(Reader.at_end(options.run_dir))
    limits = Limits.from_environment(os.environ)
    Service(command, folder, options.slots, events, limits.boot_s).run()


@contextmanager
def local_standbys(run_dir: Path, command: Sequence[str], count: int) -> Iterator[None]:
    """Keep standbys on this machine, for this run only, once it trains."""
    if not count:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="elastic-trainer-") as folder:  # 0700, and short
        os.environ[FOLDER_VARIABLE] = folder
        service = LocalService(
            [sys.executable, "-m", "elastic_trainer", "standby", "--slots", str(count), "--run-dir", str(run_dir),
             "--once-training", "--parent", str(os.getpid()), "--", *command], Events(run_dir, run=run_dir.name))
        service.start()
        try:
            yield
        finally:
            del os.environ[FOLDER_VARIABLE]
            service.end()


class LocalService(threading.Thread):
    """Run the service of a local run, and start it again, with a back-off, when it was killed.

    The kernel ends a service with the thread that has started it (prctl(2), PR_SET_PDEATHSIG), so this one waits for it.
    """

    def __init__(self, command: Sequence[str], events: Events):
        super().__init__(name="standbys", daemon=True)
        self.command, self.events, self.env = list(command), events, dict(os.environ)
        self.ends = threading.Event()
        self.changes = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Start the service again and again, until it ends as it was told to, or by a mistake that it has told."""
        failures = 0
        while True:
            started = time.monotonic()
            with self.changes:
                if self.ends.is_set():
                    return
                self.process = subprocess.Popen(self.command, env=self.env, start_new_session=True,
                                                stdin=subprocess.DEVNULL)
            code = self.process.wait()
            if self.ends.is_set() or code in (0, 2):
                return
            failures = 1 if time.monotonic() - started > MAX_BACK_OFF_S else failures + 1
            again_s = min(MAX_BACK_OFF_S, 2.0 ** min(failures, 9))
            self.events.emit("standby.service_ended", exit_code=code, again_s=again_s)
            self.ends.wait(again_s)

    def end(self) -> None:
        """End the service, and wait for its end."""
        with self.changes:
            self.ends.set()
            if self.process:
                self.process.terminate()
        self.join()


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)  # it ended before we had asked the kernel

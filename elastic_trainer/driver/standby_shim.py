"""In front of a worker's command: take a booted standby for it, or run the command itself.

    python -S -I elastic_trainer/driver/standby_shim.py python my_train.py …

driver (or ssh, or plain horovodrun) → here → a monitor with its standby (monitor.py) → worker

What always holds:
1. When this process dies, the monitor kills the worker, also a frozen one, because the connection
   ends. When the worker ends, this process ends with its exit code or by its signal. The worker
   does not start before this process has sent "mine".
2. The environment, with its secrets, and the output go through a Unix socket in a folder that only
   this user can enter.
3. When there is no standby, this process becomes the command itself.

It imports a few modules of the standard library and nothing of ours: it must start in 60 ms, and
with -I no package of ours is found. So FOLDER_VARIABLE and `standby_folder` are copies of those in
host/standbys.py; a test compares them.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import socket
import stat
import sys
from pathlib import Path

FOLDER_VARIABLE = "ELASTIC_TRAINER_STANDBY_DIR"
ANSWER_S = 3.0
"""The time in which a standby must answer. After it the next one is asked, or the command runs."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
             signal.SIGUSR2)
IF_A_FOLDER_IS_THERE = (
    f'd="${{{FOLDER_VARIABLE}:-/tmp/elastic-trainer-$(id -u)}}"; python="$1"; shim="$2"; shift 2; '
    'if [ -d "$d" ] && [ -x "$python" ] && [ -r "$shim" ]; then exec "$python" -S -I "$shim" '
    '"$@"; fi; exec "$@"'
)


def standby_folder(env: dict[str, str] | os._Environ[str]) -> Path:
    """Return where the monitors of this user wait on this machine."""
    return Path(env.get(FOLDER_VARIABLE) or f"/tmp/elastic-trainer-{os.getuid()}")


def command_name(command: list[str], cwd: str) -> str:
    """Return the name of a command's standbys. Another command, or another folder, has its own."""
    return hashlib.sha256(json.dumps([command, cwd]).encode()).hexdigest()[:16]


def through_shim(command: list[str], env: dict[str, str], is_local: bool) -> list[str]:
    """Return the command line that takes a standby, or the command where there can be none."""
    shim = [sys.executable, str(Path(__file__).resolve())]
    if not is_local:
        return ["/bin/sh", "-c", IF_A_FOLDER_IS_THERE, "sh", *shim, *command]
    return [shim[0], "-S", "-I", shim[1], *command] if standby_folder(env).is_dir() else command


def is_private(folder: Path) -> bool:
    """True if only this user can enter the folder: standbys receive this run's secrets there."""
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def report(what: str) -> None:
    """Print a line for a person into the worker's own output."""
    print(f"elastic-trainer: {what}", file=sys.stderr, flush=True)


def take(command: list[str]) -> socket.socket | None:
    """Hand our place to a standby of this command.

    Returns the connection to its monitor; None: there is no standby.
    """
    folder = standby_folder(os.environ)
    try:
        if not is_private(folder):
            report(f"{folder} belongs to another user, or others can enter it, so no standby is "
                   f"taken from it. Run chmod 700 {folder}")
            return None
        waiting = sorted(folder.glob(f"{command_name(command, os.getcwd())}-*.sock"))
    except OSError:
        return None
    for path in waiting:
        monitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        monitor.settimeout(ANSWER_S)
        answer = ask(monitor, path)
        if answer == b"taken":
            monitor.settimeout(None)
            return monitor
        monitor.close()
        if answer:
            reason = answer.decode(errors="replace")
            report(f"The standby {path.name} was not taken ({reason}). The next one is asked.")
    return None


def ask(monitor: socket.socket, path: Path) -> bytes:
    """Give a monitor our place; returns b"taken", or why not (b"": another shim was faster)."""
    place = os.memfd_create("place")  # in memory only: it holds the worker's key
    try:
        os.write(place, json.dumps(dict(os.environ)).encode())
        monitor.connect(str(path))
        credentials = monitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        uid = int.from_bytes(credentials[4:8], sys.byteorder)
        if uid != os.getuid():
            raise PermissionError(f"it belongs to the user {uid}")
        socket.send_fds(monitor, [b"take"], [place, 0, 1, 2])
        answer = monitor.recv(4096)
        if answer == b"taken":
            monitor.send(b"mine")
        return answer
    except (FileNotFoundError, ConnectionResetError, BlockingIOError):
        return b""  # another shim was faster, or many were
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)  # its monitor was killed
        return b""
    except OSError as error:
        return str(error).encode()
    finally:
        os.close(place)


def accompany(monitor: socket.socket) -> int:
    """Pass signals to the worker until it ends; returns its wait status. Raises ConnectionError."""
    def forward(number: int, frame: object) -> None:
        try:
            monitor.send(b"signal %d" % number)
        except OSError:
            pass  # the worker has ended, and its monitor's message follows

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    message, _, status = monitor.recv(64).partition(b" ")
    if message != b"ended":
        raise ConnectionError("The monitor of this worker was killed, and with it the worker.")
    return int(status)


def end_like(status: int) -> None:
    """End this process as another one has ended, by its wait status."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core, if any, is the worker's
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def main() -> None:
    """Run the command given on the command line, in a standby or in this process."""
    command = sys.argv[1:]
    # The kernel keeps these signals until there is a worker to forward them to.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    if not command:
        print("No command is given. Give one, e.g. python -S -I "
              "elastic_trainer/driver/standby_shim.py python my_train.py", file=sys.stderr)
        sys.exit(2)
    monitor = take(command)
    if monitor is None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            report(f"{command[0]} cannot be run: {error}.")
            os._exit(127)
    try:
        status = accompany(monitor)
    except OSError as error:
        report(str(error))
        status = signal.SIGKILL
    end_like(status)


if __name__ == "__main__":
    main()

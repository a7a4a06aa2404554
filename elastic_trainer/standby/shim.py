"""In front of a worker's command: take a booted standby for it, or run the command as it is.

    python -S -I elastic_trainer/standby/shim.py python my_train.py …

driver (or ssh, or plain horovodrun) → here → a keeper with its standby (standby.py) → worker

What always holds:
1. This process's death is the worker's death, also when the worker is frozen: the keeper kills it when our connection
   ends. The worker's end is ours, with its exit code or by its signal. Until we have said "mine" it does not begin.
2. The environment, with its secrets, and the output go through a Unix socket in a folder that only this user can enter.
3. When no standby can be had, this process becomes the command itself: as without standbys, only slower.

What it does not do: import anything but a few modules of Python (it has to start in some tens of milliseconds).
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
"""Where keepers wait; the same for shim, keepers and agent of one machine."""
ANSWER_S = 3.0
"""How long a standby has to answer; after that the next one is asked, or the command is run."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
IF_A_FOLDER_IS_THERE = (
    f'd="${{{FOLDER_VARIABLE}:-/tmp/elastic-trainer-$(id -u)}}"; python="$1"; shim="$2"; shift 2; '
    'if [ -d "$d" ] && [ -x "$python" ] && [ -r "$shim" ]; then exec "$python" -S -I "$shim" "$@"; fi; exec "$@"')


def standby_folder(env: dict[str, str] | os._Environ[str]) -> Path:
    """Return where the keepers of this user wait on this machine (a short path: a Unix socket's has 107 bytes)."""
    return Path(env.get(FOLDER_VARIABLE) or f"/tmp/elastic-trainer-{os.getuid()}")


def command_name(command: list[str], cwd: str) -> str:
    """Return the name of a command's standbys: only one of the very same words in the same folder is taken."""
    return hashlib.sha256(json.dumps([command, cwd]).encode()).hexdigest()[:16]


def through_shim(command: list[str], env: dict[str, str], is_local: bool) -> list[str]:
    """Return the command line that takes a standby where there are any; the command itself where there are none."""
    shim = [sys.executable, str(Path(__file__).resolve())]
    if not is_local:
        return ["/bin/sh", "-c", IF_A_FOLDER_IS_THERE, "sh", *shim, *command]
    return [shim[0], "-S", "-I", shim[1], *command] if standby_folder(env).is_dir() else command


def is_private(folder: Path) -> bool:
    """True if only we can enter the folder: what waits in it gets this run's secrets."""
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def say(what: str) -> None:
    """Tell a person, in the worker's own output."""
    print(f"elastic-trainer: {what}", file=sys.stderr, flush=True)


def take(command: list[str]) -> socket.socket | None:
    """Hand our place to a standby of this command; returns the connection to its keeper, None if there is none."""
    folder = standby_folder(os.environ)
    try:
        if not is_private(folder):
            say(f"{folder} is another user's, or others can enter it, so no standby is taken from it. Run: chmod 700 "
                f"{folder}")
            return None
        waiting = sorted(folder.glob(f"{command_name(command, os.getcwd())}-*.sock"))
    except OSError:
        return None
    for path in waiting:
        keeper = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keeper.settimeout(ANSWER_S)
        place = os.memfd_create("place")  # in memory only: it holds the worker's key
        try:
            os.write(place, json.dumps(dict(os.environ)).encode())
            keeper.connect(str(path))
            uid = int.from_bytes(keeper.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[4:8], sys.byteorder)
            if uid != os.getuid():
                raise PermissionError(f"it is the user {uid}'s")
            socket.send_fds(keeper, [b"take"], [place, 0, 1, 2])
            answer = keeper.recv(4096)
            if answer == b"taken":
                keeper.send(b"mine")
        except (FileNotFoundError, ConnectionResetError, BlockingIOError):
            answer = b""  # another shim was faster, or many were
        except ConnectionRefusedError:
            answer = b""
            path.unlink(missing_ok=True)  # its keeper was killed
        except OSError as error:
            answer = str(error).encode()
        finally:
            os.close(place)
        if answer == b"taken":
            keeper.settimeout(None)
            return keeper
        keeper.close()
        if answer:
            say(f"the standby {path.name} was not taken ({answer.decode(errors='replace')}); looking further.")
    return None


def accompany(keeper: socket.socket) -> int:
    """Pass signals to the worker until it has ended; returns its wait status. Raises ConnectionError."""
    def forward(number: int, frame: object) -> None:
        try:
            keeper.send(b"signal %d" % number)
        except OSError:
            pass  # it has ended, and we are about to read that

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    word, _, status = keeper.recv(64).partition(b" ")
    if word != b"ended":
        raise ConnectionError("the keeper of this worker was killed, and with it the worker")
    return int(status)


def end_like(status: int) -> None:
    """End this process as a wait status says that another one has ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core, if any, is the worker's
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def main() -> None:
    """Run the command given on the command line, ahead or anew."""
    command = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # kept until there is somebody to pass them on to, or ourselves
    if not command:
        print("Give a command, e.g. python -S -I elastic_trainer/standby/shim.py python my_train.py", file=sys.stderr)
        sys.exit(2)
    keeper = take(command)
    if keeper is None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            say(f"{command[0]} cannot be run: {error}")
            os._exit(127)
    try:
        status = accompany(keeper)
    except OSError as error:
        say(str(error))
        status = signal.SIGKILL
    end_like(status)


if __name__ == "__main__":
    main()

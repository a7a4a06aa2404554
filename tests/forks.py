"""Workers that boot in 0.1 s of a core, and not in 2: forks of a process that has imported torch.

Cluster → driver → the product's shim (driver/standby_shim.py) → here, in the place of a standby's
monitor → a worker, in a process of its own

A whole run of the tests starts a thousand workers. Their imports were half of its work. A newcomer
waits as long as a boot takes (`allow`), without work.

What always holds:
1. A worker is forked before its script's first line. It has a session, an environment, a folder and
   an output of its own, and runs the script as `python script.py` does.
2. A variable that Python or a library reads when it is started or imported has the same value here.
   If not, the command is run as it is.
3. Addresses, and with them the order of a set of objects, differ from worker to worker, as they do
   in processes that boot.
4. A worker runs what its script has left for the end: threads, and functions of atexit. It then
   ends at once. The objects of torch are not taken down, which is a fourth of its work.

No bench uses it, unless a test runs the bench. No test uses it that starts a run in another way
than by `Cluster`.
"""

from __future__ import annotations

import ast
import atexit
import gc
import importlib.machinery
import importlib.util
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

from elastic_trainer.config import ALLOCATOR, HASH_SEED
from elastic_trainer.driver import standby_shim
from elastic_trainer.host.parent import end_with_parent
from elastic_trainer.host.stacks import FAULTHANDLER
from elastic_trainer.world.standby import NAME_BYTES, VARIABLE, read_environment, write_name

AT_START = ("CUDA_", "GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_",
            "PYTHON", "PYTORCH_", "TORCH")
"""How the variables begin that are read when a process starts, or imports what is below."""
EACH = ("import horovod.torch, numpy, rich.progress",
        "from pydantic import TypeAdapter, dataclasses",
        "import elastic_trainer.data.tar, elastic_trainer.training.trainer, "
        "elastic_trainer.setup.target")
COSTLY = ("elastic_trainer.adapters", "lightning", "peft", "torchmetrics", "transformers")
"""Packages whose imports take another second of a core, or several."""
BOOT_S = 3.0
"""What a newcomer waits. A boot takes 1.5 s on a quiet machine of two cores, and 5 beside the
tests."""
ANSWER_S = 5.0
"""The time in which a shim must go on. The others wait meanwhile."""
OF_A_DRIVER = ALLOCATOR | HASH_SEED | FAULTHANDLER
"""The variables that a driver gives its workers, unless the user sets them."""

_moved: list[list[bytearray]] = []


# --- in the process of the tests ------------------------------------------------------------------

def forked(command: Sequence[str | Path], folder: Path) -> dict[str, str]:
    """Return the variables with which the shim, in this folder, has a server fork a command's
    process. {}: this is no test, or the command is no script, or needs the compiler that
    quick_boot.py leaves out; the process boots."""
    words = [*map(str, command)]
    script = script_of(words)
    if not script or "--compile" in words or "PYTEST_CURRENT_TEST" not in os.environ:
        return {}
    standbys = folder / "forks"
    standbys.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = standby_shim.command_name(words, str(folder.resolve()))
    with suppress(FileExistsError):
        (standbys / f"{name}-0.sock").symlink_to(_server(imports_of(script)))
    return {standby_shim.FOLDER_VARIABLE: str(standbys)}


def allow(folder: Path, count: int) -> None:
    """Let the next processes of this folder begin at once, so many. Those after them begin when
    they would have booted: that a newcomer comes after some steps is what tests of a death need."""
    if (folder / "forks").is_dir():
        (folder / "forks" / "at_once").write_text(str(count))


def script_of(command: Sequence[str]) -> Path | None:
    """Return the file of `python script.py …` or `python -m module …`."""
    match command:
        case [sys.executable, "-m", module, *_]:
            spec = importlib.util.find_spec(module)
            return Path(spec.origin) if spec and spec.origin else None
        case [sys.executable, script, *_] if script.endswith(".py"):
            return Path(script)
    return None


@cache
def imports_of(script: Path) -> tuple[str, ...]:
    """Return what the server imports that forks a script's processes."""
    text = script.read_text()
    cut = "import quick_boot" in text
    own = [ast.unparse(line) for line in ast.parse(text).body
           if isinstance(line, ast.Import) and line.names[0].name.startswith(COSTLY)
           or isinstance(line, ast.ImportFrom) and (line.module or "").startswith(COSTLY)]
    return "import quick_boot" if cut else "import torch._dynamo", *EACH, *own


@cache
def _server(imports: tuple[str, ...]) -> Path:
    """Start a server of this process, and wait until it has imported all; returns its address."""
    folder = tempfile.TemporaryDirectory(prefix="forks-")
    address = Path(folder.name, "socket")
    code = (f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import forks; "
            f"forks.Server({str(address)!r}).serve({imports!r})")
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=OF_A_DRIVER | os.environ | {"PYTHONUNBUFFERED": "1", VARIABLE: "-" * NAME_BYTES})
    assert process.stdout and process.stdout.readline() == b"ready\n"
    atexit.register(folder.cleanup)
    atexit.register(process.communicate)  # it ends with its standard input
    return address


# --- in the server --------------------------------------------------------------------------------

@dataclass(frozen=True)
class Place:
    """What a worker is given by its shim."""

    command: list[str]
    """Behind `python`."""
    folder: str
    environment: dict[str, str]
    streams: list[int]
    """Standard input, output and error."""
    wait_s: float


class Server:
    """Forks a worker for each shim that asks, until standard input ends."""

    def __init__(self, address: str):
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(address)
        self.listener.listen(64)
        self.events = selectors.PollSelector()
        self.events.register(sys.stdin, selectors.EVENT_READ, sys.exit)
        self.events.register(self.listener, selectors.EVENT_READ, self.take)
        self.place: Place | None = None
        """In a fork: its place."""

    def serve(self, imports: Sequence[str]) -> None:
        """Import all that the scripts import, and answer. Returns in no process."""
        for line in imports:
            exec(line, {})
        gc.collect()
        gc.freeze()
        print("ready", flush=True)
        while self.place is None:
            key, _ = self.events.select()[0]  # what it does may end another one
            key.data()
        become(self.place)

    def take(self) -> None:
        """Fork a worker for a shim, unless its environment has what only a start can change."""
        shim, _ = self.listener.accept()
        shim.settimeout(ANSWER_S)
        descriptors: list[int] = []
        with suppress(OSError):  # it has ended
            message, descriptors, _, _ = socket.recv_fds(shim, 64, 4)
            if message == b"take" and (place := place_of(shim, *descriptors)):
                shim.send(b"taken")
                if shim.recv(64) == b"mine":
                    self.fork(shim, place)
        if self.place is None:
            for descriptor in descriptors:
                os.close(descriptor)

    def fork(self, shim: socket.socket, place: Place) -> None:
        """Fork the worker of a shim."""
        worker = os.fork()
        if worker == 0:
            self.place = place
            # Their numbers are closed, and become others': no object may close them once more.
            for key in self.events.get_map().values():
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.detach()
            shim.detach()
            return
        end = os.pidfd_open(worker)  # ready when the process has ended
        self.events.register(shim, selectors.EVENT_READ, partial(self.hear, shim, worker))
        self.events.register(end, selectors.EVENT_READ, partial(self.end, shim, worker, end))

    def hear(self, shim: socket.socket, pid: int) -> None:
        """Pass on a signal. A shim that has ended takes its worker with it."""
        with suppress(ConnectionResetError):
            message, _, number = shim.recv(64).partition(b" ")
            if message == b"signal":
                os.kill(pid, int(number))
                return
        self.events.unregister(shim)
        kill(pid)

    def end(self, shim: socket.socket, pid: int, end: int) -> None:
        """Report a worker's end. What it has started ends with it."""
        kill(pid)
        self.events.unregister(end)
        os.close(end)
        _, status = os.waitpid(pid, 0)
        with suppress(OSError):
            shim.send(b"ended %d" % status)
        with suppress(KeyError):
            self.events.unregister(shim)
        shim.close()


def place_of(shim: socket.socket, environment: int, *streams: int) -> Place | None:
    """Return the place of a shim. None: a variable differs that is read at a start."""
    credentials = shim.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    process = Path("/proc", str(struct.unpack("3i", credentials)[0]))
    # python -S -I standby_shim.py python …
    command = (process / "cmdline").read_text().split("\0")[5:-1]
    folder, values = os.readlink(process / "cwd"), read_environment(environment)
    if at_start(values) != at_start(os.environ):
        return None
    at_once = Path(folder, "forks", "at_once")
    count = int(at_once.read_text())
    at_once.write_text(str(max(count - 1, 0)))
    return Place(command, folder, values, [*streams], 0.0 if count else BOOT_S)


def at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read when a process starts. One changes nothing here."""
    return {name: value for name, value in environment.items()
            if name.startswith(AT_START) and name != "PYTHONUNBUFFERED"}


def kill(pid: int) -> None:
    """Kill a worker that was not waited for, and what it has started."""
    for kills in os.killpg, os.kill:  # before setsid it has no group
        with suppress(ProcessLookupError):
            kills(pid, signal.SIGKILL)


def become(place: Place) -> NoReturn:
    """Run a command, in a fork, as Python does in a process of its own; then end."""
    end_with_parent(signal.SIGKILL)
    os.setsid()
    os.chdir(place.folder)
    for number, stream in enumerate(place.streams):
        os.dup2(stream, number)
    os.closerange(3, 4096)
    os.environ.clear()
    os.environ.update(place.environment)
    write_name(place.environment)
    time.sleep(place.wait_s)
    shift_addresses()
    sys.modules["numpy"].random.seed()  # Python's own begins anew by itself
    script, *arguments = place.command
    sys.orig_argv[:] = [sys.executable, script, *arguments]
    sys.path.remove(str(Path(__file__).parent))
    if script == "-m":
        module, *arguments = arguments
        sys.argv[:], sys.path[0] = ["-m", *arguments], place.folder
        end(partial(runpy._run_module_as_main, module))  # type: ignore[attr-defined]
    sys.argv[:], sys.path[0] = [script, *arguments], str(Path(script).parent)
    end(partial(run_script, script))


def run_script(script: str) -> None:
    """Run a file as the main module."""
    main = vars(sys.modules["__main__"])
    for name in [*main]:
        if not name.startswith("__"):
            del main[name]
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    main |= {"__file__": script, "__cached__": None, "__loader__": loader}
    exec(compile(Path(script).read_bytes(), script, "exec"), main)


def end(runs: Callable[[], object]) -> NoReturn:
    """Run this and what it has left for the end, and end with its exit code."""
    code: object = 0
    try:
        runs()
    except SystemExit as left:
        code = left.code
    except BaseException as error:
        code, trace = 1, error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # as Python begins: without a frame of ours
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 255)


def shift_addresses() -> None:
    """Take a random number of blocks of each size that Python has pools for."""
    _moved.append([bytearray(size) for size in range(16, 513, 16)
                   for _ in range(random.randrange(64))])

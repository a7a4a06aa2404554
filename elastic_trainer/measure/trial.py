"""One measured run of a script in one process, which may die of memory without harm to the machine.

tune → here → the script, with options over its own (state/configuration.py) → its event log, /proc,
cgroups → here → step time, memory

What always holds:
1. The kernel takes this process before any other: oom_score_adj is 1000.
2. The process is killed when it, and those that it has started, hold more than the limit together.
   Between two looks RLIMIT_DATA makes a large allocation fail (without a GPU: drivers of GPUs
   reserve more than they use).
3. The run has a folder of its own. It writes nothing into the script's store.
4. A file of /proc that cannot be read counts as nothing, because a process may end while it is
   read, and a machine may have no cgroup with a limit.

Source: proc(5); Documentation/admin-guide/cgroup-v2.rst of Linux (memory.max, memory.current).
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastic_trainer.config import ALLOCATOR, EXIT_INTERRUPTED
from elastic_trainer.events.log import read_events
from elastic_trainer.host.modes import private
from elastic_trainer.state.configuration import VARIABLE, Configuration

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
SHARE = 0.9
"""Of the available memory: the rest is for the file cache and for other programs."""


def limit_bytes() -> int:
    """Return how much memory a measured process may use: 90 % of what this machine has left."""
    left = [_number(PROC / "meminfo", r"MemAvailable:\s+(\d+) kB") * 1024]
    most = _number(CGROUP / "memory.max", r"^(\d+)$")
    if most:
        left.append(max(0, most - _number(CGROUP / "memory.current", r"^(\d+)$")))
    return int(SHARE * min(left))


def family(pid: int) -> Iterator[int]:
    """Yield a process and all that it has started and that are still there."""
    yield pid
    for task in sorted((PROC / str(pid) / "task").glob("*")):
        for child in _text(task / "children").split():
            yield from family(int(child))


def held_bytes(pids: list[int]) -> dict[int, tuple[int, int]]:
    """Return what each process holds now, and the most that it has held (VmRSS and VmHWM). Memory
    that several share counts for each."""
    found = {}
    for pid in pids:
        status = _text(PROC / str(pid) / "status")
        now, most = (re.search(rf"{name}:\s+(\d+) kB", status) for name in ("VmRSS", "VmHWM"))
        if now and most:
            found[pid] = 1024 * int(now[1]), 1024 * int(most[1])
    return found


def gibibytes(number: int) -> str:
    """Write a number of bytes for a person."""
    return f"{number / 2**30:.2f} GiB"


def _number(file: Path, pattern: str) -> int:
    found = re.search(pattern, _text(file), re.MULTILINE)
    return int(found[1]) if found else 0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


POLL_S = 0.02
FIRST_STEPS = 2
"""The steps that do not count: the first ones allocate."""
OUTPUT, LAST_LINES = "output.log", 15
NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|MemoryError|"
                       r"std::bad_alloc|Cannot allocate memory|OutOfMemoryError", re.IGNORECASE)
"""What torch, Python, C++ and CUDA say when an allocation fails."""
UNUSED_BYTES = 2**29
"""What RLIMIT_DATA allows beyond the limit: stacks and heaps that a process reserves, and does not
use (0.24 GiB of a process with torch alone)."""
GPU = Path("/dev/nvidia0")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a measured run has shown."""

    microbatches: int
    """0: the script has not trained."""
    global_batch: int
    ending: str
    """"whole", "memory", or the last line of its output."""
    step_s: float = 0.0
    """The median."""
    host_bytes: int = 0
    device_bytes: int = 0
    """The most that torch held on the GPU."""
    last_lines: str = ""
    """Of its output."""

    @property
    def is_whole(self) -> bool:
        return self.ending == "whole"

    @property
    def samples(self) -> int:
        """Of a micro-batch of a full batch."""
        return -(-self.global_batch // self.microbatches)


def measure(command: Sequence[str], overrides: Mapping[str, Any], folder: Path,
            limit: int) -> Trial:
    """Run a script alone, with options over its own and at most `limit` bytes of memory, and read
    what it has logged.

    Costs: the run. Raises KeyboardInterrupt, after it has ended the process.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("HOROVOD_", "ELASTIC_TRAINER_")) or name.endswith("_LIMITS")}
    env |= {name: os.environ.get(name, value) for name, value in ALLOCATOR.items()}
    options = Configuration({}, "elastic-trainer tune", overrides={**overrides, "store": ""})
    env |= {VARIABLE: options.to_text(), "ELASTIC_TRAINER_RUN_DIR": str(folder.resolve())}
    with open(folder / OUTPUT, "wb", opener=private) as output:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        confine(process.pid, limit)
        try:
            peak, is_over = watch(process, limit)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return read(folder, process.returncode, peak, is_over)


def confine(pid: int, limit: int) -> None:
    """Limit the memory of a process that has just started, and of all that it will start."""
    with suppress(OSError):  # it may have ended
        (PROC / str(pid) / "oom_score_adj").write_text("1000")
        if not GPU.exists():
            most = limit + UNUSED_BYTES
            resource.prlimit(pid, resource.RLIMIT_DATA, (most, most))


def watch(process: subprocess.Popen[bytes], limit: int) -> tuple[int, bool]:
    """Wait for the end of a process; return the most memory that it and its children held together,
    and whether it was killed for holding more than the limit."""
    most: dict[int, int] = {}
    while process.poll() is None:
        held = held_bytes(list(family(process.pid)))
        most |= {pid: peak for pid, (_, peak) in held.items()}
        if sum(now for now, _ in held.values()) > limit:
            return sum(most.values()), True
        time.sleep(POLL_S)
    return sum(most.values()), False


def read(folder: Path, exit_code: int, peak: int, is_over: bool) -> Trial:
    """Return what the event log and the output of an ended run show."""
    events = read_events(folder)
    facts = next((e for e in events if e["event"] == "job.overridden"), {})
    ends = [e["time"] for e in events if e["event"] == "worker.step_committed"]
    seconds = [end - before for before, end in pairwise(ends[FIRST_STEPS - 1 :])]
    held = [e["device_bytes"] for e in events if e["event"] == "worker.memory_measured"]
    lines = (folder / OUTPUT).read_text(errors="replace").splitlines()
    last_lines = "\n".join(lines[-LAST_LINES:])
    if is_over or exit_code == -signal.SIGKILL or exit_code and NO_MEMORY.search(last_lines):
        ending = "memory"
    elif exit_code == EXIT_INTERRUPTED:
        ending = "the script has left its loop"
    elif exit_code:
        ending = next((line for line in reversed(lines) if line.strip()), f"exit code {exit_code}")
    else:
        ending = "whole" if seconds else "too few steps"
    return Trial(
        ending=ending, microbatches=int(facts.get("microbatches", 0)),
        global_batch=int(facts.get("global_batch", 0)),
        step_s=statistics.median(seconds) if seconds else 0.0, host_bytes=peak,
        device_bytes=max(held, default=0), last_lines=last_lines)

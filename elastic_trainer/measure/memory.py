"""What a process and those that it started hold in memory, and what this machine has left.

/proc, cgroups → here → trial (the limit of a child)

What always holds: a file that cannot be read counts as nothing, because a process may end while it
is read, and a machine may have no cgroup with a limit.

Source: proc(5); Documentation/admin-guide/cgroup-v2.rst of Linux (memory.max, memory.current).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

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

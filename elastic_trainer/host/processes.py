"""The workers on this machine: processes with a worker's name in their environment.

the kernel (proc(5)) → here → agent, supervisor

The environment is read by hand: a standby writes its name over a room in that memory and leaves
zeros after it (world/standby.py), and psutil stops reading at two zeros in a row.
host/remote.py has its own code for that: on its hosts no package may be on Python's path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from elastic_trainer.host.remote import AGENT

NAME = "ELASTIC_TRAINER_WORKER"
GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""The errors of reading about a process that ends, or that is another user's."""


@dataclass(frozen=True)
class Seen:
    """A process that has a worker's name in its environment."""

    worker: str
    parent: int
    short_name: str
    """The process's own short name (proc(5), comm)."""


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started. Raises OSError."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        entries = os.fsdecode(file.read()).split("\0")
    return dict(entry.partition("=")[::2] for entry in entries if entry)


def workers_of_user(user: int, agent: str = "") -> dict[int, Seen]:
    """Return a user's processes that have a worker's name, by pid: workers, shims, children.

    With `agent`, its address and port, only those of the workers that it has started.

    A process counts if all its user ids are this user's: a setuid program that another user has
    started has the other one as its real id. Raises OSError when no descriptor is free.
    """
    found = {}
    for pid in psutil.pids():
        try:
            # First, because it takes 3 µs and psutil 60, and most processes are other users'.
            if os.stat(f"/proc/{pid}").st_uid != user:
                continue
            process = psutil.Process(pid)
            if set(process.uids()) != {user}:
                continue
            environment = environment_of(pid)
            if NAME in environment and agent in ("", environment.get(AGENT)):
                found[pid] = Seen(environment[NAME], process.ppid(), process.name())
        except (*GONE, psutil.Error):
            continue
    return found


def outermost(processes: Mapping[int, Seen]) -> dict[str, int]:
    """Return for each worker's name the process that no other one of this name has started."""
    return {seen.worker: pid for pid, seen in processes.items()
            if seen.parent not in processes or processes[seen.parent].worker != seen.worker}


def is_worker(pid: int, name: str, run_dir: str | os.PathLike[str]) -> bool:
    """True if a process is the worker `name` of a run, or our ssh to one that boots elsewhere.

    Pids are used again, and other runs have workers of the same names.
    """
    try:
        environment = environment_of(pid)
    except OSError:
        return False
    is_named = name in (environment.get(NAME), environment.get("ELASTIC_TRAINER_SSH"))
    return is_named and environment.get("ELASTIC_TRAINER_RUN_DIR") == os.fspath(run_dir)


SHORT_NAME = re.compile("(standby|waiting|step|reviving|finished)( [0-9]+)?")
"""The short names that workers give themselves."""
MOST_CHARACTERS = 15
"""Of a process's short name (proc(5), comm)."""


def short_name(phase: str, step: int) -> str:
    """Return the short name of a worker in a phase. A long number is left out."""
    kind = "step" if phase == "training" else phase
    return text if len(text := f"{kind} {step}") <= MOST_CHARACTERS else kind


def show(phase: str, step: int) -> None:
    """Set this process's short name, which `top`, `pgrep` and the agent show."""
    try:
        with open("/proc/self/comm", "w") as file:
            file.write(short_name(phase, step))
    except OSError:
        pass  # no descriptor is free: the next heartbeat tries again

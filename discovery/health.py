"""The health of one host: whether it drains, whether it is sick, and its workers.

metadata service, disk, memory, GPUs, processes → here → agent.py (answers the poller)

`gpus` in the answer is how many GPUs nvidia-smi finds: 0 where there is no nvidia-smi, None before
the first examination. The poller knows how many the machine's type has (hosts.py).

What always holds:
1. A draining host drains for good: a notice is never withdrawn. A stop of the agent's service ends
   with the next agent, whose answers have another `life`.
2. An unknown fact is no fault: a machine without a metadata service is ready, and `why` reports it.
   A host without free descriptors keeps its last state, reports that in `why`, and is examined
   again every EXAMINE_S.
3. A disk or GPU that hangs delays no notice: `examine` runs in its own thread, and a machine on
   which it hangs is sick.
4. Only one user's processes count as workers: those of this process's user, or of the user given to
   an agent that runs as root. Any process can have a worker's name in its environment, and root can
   read all of them. An agent that starts workers counts its own ones only, because agents of
   several runs may share a machine. The size of the report is limited.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from elastic_trainer.discovery.place_protocol import Machine, PlaceUnavailable, utc
from elastic_trainer.host import processes, standbys
from elastic_trainer.wire.gate import NO_DESCRIPTOR

EXAMINE_S = 2.0
HUNG_S = 20.0
"""The longest examination of a machine that is well; nvidia-smi alone may take half of it."""
NVIDIA_SMI_S = 10.0
HURRY_S = 30.0
"""The end of a notice's time that is left to workers: enough for the rest of a step and a
rendezvous. Of a short notice it is the second half."""
WAITS_S = 5.0
"""A worker that waits for longer waits for other hosts. One that leaves in a rendezvous waits for
less than a second."""
DISK_FREE = 0.02
MEMORY_FREE = 0.02
MOST_WORKERS, MOST_NAME = 256, 120
"""The most workers in an answer, and characters of a name: an answer stays below 64 KiB."""


def illness(folder: Path, disk_free: float = DISK_FREE, memory_free: float = MEMORY_FREE) -> str:
    """Return the fault of this machine's disk or memory; "" if there is none."""
    try:
        disk = shutil.disk_usage(folder)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return f"disk: {error}"
    if disk.free < disk_free * disk.total:
        return f"disk full: {disk.free >> 20} MiB left under {folder}"
    memory = psutil.virtual_memory()
    if memory.available < memory_free * memory.total:
        return f"no memory: {memory.available >> 20} MiB left"
    return ""


def gpu_count(timeout_s: float = NVIDIA_SMI_S) -> int | None:
    """Return how many GPUs answer; None where there is no nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return None
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True,
                                timeout=timeout_s)
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return 0
    except subprocess.TimeoutExpired:
        return 0


def workers(user: int | None = None, agent: str = "") -> list[dict[str, Any]]:
    """Return a user's workers, by default of this process's user: name, pid, and state ("step 7").
    With `agent`, its address and port, only those that it has started.

    A worker's children have its name, and so has the shim before it, which shows no state. Signals
    go to the outermost process of a worker. Its state is the short name of the outermost process
    with one of SHORT_NAME. Raises OSError when no descriptor is free.
    """
    found = processes.workers_of_user(os.geteuid() if user is None else user, agent)
    named = processes.outermost({pid: seen for pid, seen in found.items()
                                    if processes.SHORT_NAME.fullmatch(seen.short_name)})
    return [{"pid": pid, "worker": name,
             "doing": found[named[name]].short_name if name in named else "booting"}
            for name, pid in processes.outermost(found).items()]


class Agent:
    """One host's health. `user` owns the workers; None: this process's own user."""

    def __init__(self, metadata: Machine | None, folder: Path, user: int | None = None, *,
                 devices: Path = Path("/dev"), hung_s: float = HUNG_S,
                 replaced_after_end: bool = False,
                 find_workers: Callable[[int | None], list[dict[str, Any]]] = workers,
                 count_gpus: Callable[[], int | None] = gpu_count,
                 find_illness: Callable[[Path], str] = illness):
        self.metadata, self.folder, self.user, self.hung_s = metadata, folder, user, hung_s
        self.replaced_after_end = replaced_after_end
        """The place starts another host only when this one has ended."""
        self._find_workers, self._count_gpus = find_workers, count_gpus
        self._find_illness = find_illness
        self._lock = threading.Lock()
        self._drains: dict[str, Any] | None = None
        self._rebalance = self._has_called = False
        self._waits_since: dict[int, float] = {}
        """The workers that wait on this draining host, by pid: since when."""
        self._sick = self._unknown = self._unexamined = ""
        self._gpus = len(list(devices.glob("nvidia[0-9]*")))
        self._answering_gpus: int | None = None
        self._examining_since: float | None = None
        self._hurries_at = 0.0
        self._life = secrets.token_hex(8)
        self.refused = 0

    def count_only_own(self, address: str) -> None:
        """Count only the workers that the agent at this address and port has started."""
        self._find_workers = partial(workers, agent=address)

    def drain(self, why: str, deadline: float | None, for_good: bool = True) -> None:
        """Start to drain: for good, or while this process lives. A later notice can only shorten
        the time of one that is as final."""
        with self._lock:
            known = self._drains
            if known is None or for_good and not known["for_good"]:
                self._drains = {"why": why, "deadline": deadline, "for_good": for_good}
            elif deadline is not None and deadline < (known["deadline"] or math.inf):
                self._drains = known | {"deadline": deadline}
            else:
                return
            left_s = (deadline or 0.0) - time.time()
            self._hurries_at = (deadline or 0.0) - min(HURRY_S, max(0.0, left_s / 2))

    def last_call(self) -> None:
        """Send SIGTERM, once, to the workers that are still here when the time is nearly over.

        They then leave without waiting for other workers. If no other host can come before this
        one has ended, workers that wait get it at once.
        """
        with self._lock:
            drains, now = self._drains, time.time()
            is_late = bool(drains and drains["deadline"] is not None and now >= self._hurries_at)
        if drains is None or self._has_called or not (is_late or self.replaced_after_end):
            return
        try:
            found = self.workers()
        except OSError:
            return  # no descriptor is free: the next turn tries again
        self._has_called = is_late
        for pid in [worker["pid"] for worker in found] if is_late else self._waiting(found, now):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)

    def _waiting(self, found: list[dict[str, Any]], now: float) -> list[int]:
        """Return the workers that have begun to wait for other hosts; each one once."""
        pids = [worker["pid"] for worker in found if worker["doing"].startswith("waiting")]
        self._waits_since = {pid: self._waits_since.get(pid, now) for pid in pids}
        late = [pid for pid, since in self._waits_since.items() if now - since > WAITS_S]
        self._waits_since |= dict.fromkeys(late, math.inf)
        return late

    def workers(self) -> list[dict[str, Any]]:
        """Return the workers on this machine. Raises OSError when no descriptor is free."""
        return self._find_workers(self.user)

    def has_workers(self) -> bool:
        """True if this machine has workers, or if that is unknown now."""
        try:
            return bool(self.workers())
        except OSError:
            return True

    def deadline(self) -> float:
        """Return when a draining host ends; 0.0 if it does not drain, or the time is unknown."""
        with self._lock:
            return float(self._drains["deadline"] or 0.0) if self._drains else 0.0

    def refuse(self) -> None:
        """Count a refused client."""
        with self._lock:
            self.refused += 1

    def read_notices(self) -> None:
        """Ask the metadata service once."""
        if self.metadata is None:
            return
        try:
            if notice := self.metadata.notice():
                at = "" if notice.deadline is None else f" at {utc(notice.deadline)}"
                self.drain(f"{notice.action}{at}", notice.deadline, notice.for_good)
            self._rebalance, self._unknown = self.metadata.rebalance(), ""
        except PlaceUnavailable as error:
            self._unknown = str(error)

    def examine(self) -> None:
        """Examine the machine once. May hang, as a broken disk or GPU does."""
        self._examining_since = time.monotonic()
        try:
            gpus = self._count_gpus()
            self._gpus, self._answering_gpus = max(self._gpus, gpus or 0), gpus or 0
            is_lost = gpus is not None and gpus < self._gpus
            self._sick = self._find_illness(self.folder) or (
                f"GPU lost: {gpus} of {self._gpus} answer" if is_lost else "")
            self._unexamined = ""
        except OSError as error:  # no descriptor is free, which is no fault
            self._unexamined = f"not examined: {error}"
        finally:
            self._examining_since = None

    def health(self) -> dict[str, Any]:
        """Return the answer to the poller."""
        with self._lock:
            drains, since = self._drains, self._examining_since
        hung_s = 0.0 if since is None else time.monotonic() - since
        sick = self._sick if hung_s < self.hung_s else (
            f"GPU lost, or disk: they have not answered for {hung_s:.0f} s")
        reason = drains["why"] if drains else sick or self._unexamined or self._unknown
        return {"state": "draining" if drains else "sick" if sick else "ready", "why": reason,
                "deadline": drains["deadline"] if drains else None,
                "for_good": bool(drains and drains["for_good"]), "life": self._life,
                "rebalance": self._rebalance, "gpus": self._answering_gpus,
                "workers": [worker | {"worker": worker["worker"][:MOST_NAME]}
                            for worker in self.workers()[:MOST_WORKERS]],
                "standby": standbys.waiting_in(standbys.standby_folder(os.environ, self.user),
                                                self.user),
                "time": time.time(), "refused": self.refused}

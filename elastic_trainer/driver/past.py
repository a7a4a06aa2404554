"""What earlier attempts have left: how far the run has come, and workers that may still live.

event log → here → supervisor (number of the next attempt, progress); it ends the workers that stay

    runs/NAME/.past.json

What always holds:
1. `Past` is a pure fold: `read` takes one event. The file is only a short cut. Where it is absent,
   older, damaged or of another log, it is made anew from the whole log.
2. It rests on events of driver and supervisor alone. The run's progress is what the driver has
   heard of most members of the world (driver.step_reached): a single worker can claim neither
   progress nor a checkpoint. An attempt without such a driver (an older version's, plain
   horovodrun's) has no `counted_by` in its attempt.started: there the workers' own lines count.
3. A malformed event (schema.py) is left out and counted.
4. Its memory is that of the attempts and of the workers that have not gone: it does not grow with
   the steps.
5. No attempt starts while a worker of an earlier one lives: it would train on beside the next
   attempt, as a second lineage.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from elastic_trainer.driver.reach import Reach
from elastic_trainer.events.log import Events
from elastic_trainer.events.schema import UNREADABLE
from elastic_trainer.events.segments import Position, Reader, first_line
from elastic_trainer.host import remote
from elastic_trainer.host.modes import replace_whole
from elastic_trainer.host.processes import is_worker

PAST_FILE = ".past.json"
FORMAT = 2
OF_DRIVER_AND_SUPERVISOR = ("driver.", "attempt.", "run.started", "run.host_not_reached")
KEPT = ("finished", "interrupted", "unsaved")
"""The verdicts of attempts that have not lost all their workers."""
COUNTED_BY = {"counted_by": "driver"}
"""The mark in an attempt.started: this attempt's driver logs the run's progress."""


@dataclass
class Past:
    """The facts of a run's events so far."""

    attempt: int = 0
    """The newest attempt; 0: there was none."""
    newest_checkpoint: int = 0
    """The newest step that was published as a checkpoint."""
    newest_step: int = 0
    """The most steps that the run has ever finished. A start from a checkpoint may drop some."""
    has_had_hosts: bool = False
    """The discovery has named a host in this run, so it works."""
    first_time: float | None = None
    last_time: float = 0.0
    trained: list[int] = field(default_factory=list)
    """Attempts that have finished a step."""
    kept: list[int] = field(default_factory=list)
    """Attempts that ended with a verdict of KEPT."""
    living: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Workers that have started and not gone: attempt and name → facts."""
    started: list[list[Any]] = field(default_factory=list)
    """Attempt and name of each worker that the newest attempt has started."""
    is_counted: bool = False
    """The newest attempt's driver logs the run's progress."""
    malformed: int = 0
    """Lines of the log that were left out."""

    @property
    def lost_attempts(self) -> int:
        """How many attempts trained and ended with all workers gone, or with a killed driver."""
        return len(set(self.trained) - set(self.kept))

    @property
    def observed_s(self) -> float:
        return self.last_time - (self.last_time if self.first_time is None else self.first_time)

    def read(self, event: dict[str, Any]) -> None:
        """Take one more event."""
        name = event["event"]
        is_theirs = name.startswith(OF_DRIVER_AND_SUPERVISOR)
        if self.is_counted and not is_theirs:
            return
        attempt, time = int(event.get("attempt") or 0), float(event["time"])
        self.first_time = time if self.first_time is None else self.first_time
        self.last_time = time
        if attempt > self.attempt:
            self.attempt = attempt
            self.started.clear()
        if name == "attempt.started":
            self.is_counted = event.get("counted_by") == "driver"
        elif name == "driver.step_reached":
            self._reach(attempt, event["steps"], event["checkpoint"])
        elif name == "worker.step_committed":
            self._reach(attempt, event["step"] + 1, 0)
        elif name == "state.checkpoint_published":
            self._reach(attempt, 0, event["step"])
        elif name == "attempt.ended" and event["verdict"] in KEPT:
            self.kept.append(attempt)
        elif name == "driver.host_added":
            self.has_had_hosts = True
        elif name in ("driver.worker_started", "driver.worker_ready", "driver.worker_gone"):
            self._read_worker(name.rpartition("_")[2], attempt, event)

    def _reach(self, attempt: int, steps: int, checkpoint: int) -> None:
        if steps and (not self.trained or self.trained[-1] != attempt):
            self.trained.append(attempt)
        self.newest_step = max(self.newest_step, steps)
        self.newest_checkpoint = max(self.newest_checkpoint, checkpoint)

    def _read_worker(self, what: str, attempt: int, event: dict[str, Any]) -> None:
        worker = str(event.get("worker", ""))
        key = f"{attempt} {worker}"
        if what == "started":
            facts = ("pid", "host", "over_ssh", "address")
            self.living[key] = {"attempt": attempt, "worker": worker,
                                **{name: event[name] for name in facts if name in event}}
            if attempt == self.attempt:
                self.started.append([attempt, worker])
        elif what == "ready" and key in self.living and "pid" in event:
            self.living[key]["pid"] = event["pid"]  # that behind a shim
        elif what == "gone":
            self.living.pop(key, None)


class Follower:
    """Follows a run's event log: each call reads what is new, and saves what it knows."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.past, position = _load(run_dir) or (Past(), None)
        self._reader = Reader(run_dir, position)

    @property
    def left_out(self) -> dict[str, str]:
        """The segments that are missing or cannot be read to their end, with the reason."""
        return self._reader.left_out

    def read(self) -> Past:
        """Return the fold of the log so far. Disk: its new lines, and one small file."""
        if self._reader.is_lost():
            self.past, self._reader = Past(), Reader(self.run_dir)
        before = self._reader.malformed
        for event in self._reader.events():
            self.past.read(event)
        self.past.malformed += self._reader.malformed - before
        _save(self.run_dir, self.past, self._reader.position)
        return self.past


def _load(run_dir: Path) -> tuple[Past, Position] | None:
    """Return what was saved, and up to where; None where it cannot be used."""
    try:
        saved = json.loads((run_dir / PAST_FILE).read_text())
        position = Position(*saved["position"])
        is_ours = saved["format"] == FORMAT and saved["first_line"] == first_line(run_dir)
        if not is_ours or Reader(run_dir, position).is_lost():
            return None
        return Past(**saved["past"]), position
    except (OSError, RecursionError, *UNREADABLE):
        return None


def _save(run_dir: Path, past: Past, position: Position) -> None:
    """Replace the file, if that can be done now: it can always be made again."""
    facts = {"format": FORMAT, "position": list(position), "first_line": first_line(run_dir),
             "past": asdict(past)}
    with suppress(OSError):
        replace_whole(run_dir / PAST_FILE, json.dumps(facts))


ELSEWHERE_S = 2 * remote.ORPHANS_S
"""The time in which all hosts must end their workers of an older attempt: their own grace, and the
same again for the way. Where none leads there, the far end ends its worker itself (remote.py, 2).
"""
AGAIN_S = 1.0
"""The interval in which an agent that is being restarted is tried again, for half of ELSEWHERE_S:
after that time the far end has ended its worker."""


def end_orphans(past: Past, run_dir: Path, reach: Reach, events: Events) -> None:
    """Wait until the workers of earlier attempts have ended; kill those that stay."""
    newest, living = past.attempt, list(past.living.values())
    logged = {(str(attempt), worker) for attempt, worker in past.started}
    # The newest driver may have died before it had logged the workers that it had just started.
    unlogged = [(pid, name) for pid, (attempt, name) in remote.workers_of(str(run_dir)).items()
                if attempt == str(newest) and (attempt, name) not in logged]
    workers = [(event["pid"], event["worker"]) for event in living] + unlogged
    # They notice by themselves that the driver is gone, unless a frozen driver still holds their
    # connections.
    _, stay = remote.end_living(
        lambda: [one for one in workers if is_worker(*one, run_dir)], remote.ORPHANS_S)
    for pid, name in stay:
        events.emit("run.host_not_reached", host=socket.gethostname(), reason=(
            f"process {pid} of worker {name} lives {remote.KILLED_S:.0f} s after its SIGKILL"))
    # Workers of older attempts were ended before the newest one started.
    _end_elsewhere({event["host"]: event.get("address", event["host"]) for event in living
                    if event.get("over_ssh") and event["attempt"] == newest}, run_dir, reach,
                   events)


def _end_elsewhere(hosts: dict[str, str], run_dir: Path, reach: Reach, events: Events) -> None:
    """End workers on other hosts (with their addresses), all at the same time. A host that is not
    reached is logged: the workers of the next attempt do not reach it either."""
    def end_on(host: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(reach.command(host, hosts[host], "end", str(run_dir)),
                                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                start_new_session=True)

    ends = {host: end_on(host) for host in sorted(hosts)}
    deadline = time.monotonic() + ELSEWHERE_S
    for host, end in ends.items():
        while why := _why_not_ended(end, max(0.0, deadline - time.monotonic()), reach):
            left_s = deadline - time.monotonic()
            # There is no agent, but its machine lives, and so may the worker.
            if left_s < remote.ORPHANS_S or not reach.is_agent_missing(hosts[host]):
                events.emit("run.host_not_reached", host=host, reason=why)
                break
            time.sleep(AGAIN_S)
            end = end_on(host)


def _why_not_ended(end: subprocess.Popen[bytes], left_s: float, reach: Reach) -> str:
    """Wait for an ssh that ends a run's workers; return why it may not have done so, or ""."""
    its = "the tunnel to its agent" if reach.by_agent else "its ssh"
    try:
        code = end.wait(left_s)
    except subprocess.TimeoutExpired:
        os.killpg(end.pid, signal.SIGKILL)  # not reaped yet, so no other group has the number
        end.wait()
        return f"{its} has not returned in {ELSEWHERE_S:.0f} s"
    return f"{its} ended with exit code {code}" if code else ""

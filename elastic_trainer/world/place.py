"""What the world needs of the process that assigns ranks, the driver.

driver → here → generations (`hvd.init()`)

There are three drivers: ours (our_driver.py), that of plain horovodrun (plain_driver.py), and none
(`Driver` itself). The world does not know which it has: what differs is a member of `Driver`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_trainer.wire.heartbeat import At, RankAssignment
from elastic_trainer.world.arithmetic import Arithmetic

MAX_ERROR_CHARACTERS = 50_000


class Dismissed(Exception):
    """The world does not want this worker: leave with exit code 75."""


class RunOver(Exception):
    """The attempt is over. Another process has the cause: see `verdict` and `detail`."""

    def __init__(self, verdict: str, detail: str):
        super().__init__(f"{verdict}: {detail}")
        self.verdict, self.detail = verdict, detail


class Unsaved(RuntimeError):
    """The run has done all its steps, and its last checkpoint could not be written. Raised on all
    workers."""


@dataclass(frozen=True, kw_only=True)
class DriverHooks:
    """What a driver asks of its worker."""

    on_broken: Callable[[], None] = lambda: None
    """Closes the sockets to a lost member of our generation. The heartbeats' thread calls it."""
    write_alone: Callable[[], None] = lambda: None
    """Called repeatedly while this worker waits for a place and should write the state, which only
    memory holds."""
    is_saving: Callable[[], bool] = lambda: False
    """True while a checkpoint is on its way to the store: a driver that stops waits for it."""
    published: Callable[[], int] = lambda: -1
    """The newest step that this worker knows to be published."""
    needs: Callable[[], int] = lambda: 0
    """How many workers a world must have for this worker's memory; 0: any number."""
    at: Callable[[], At | None] = lambda: None
    """What the loop does now; None: it is in no step."""


@dataclass(frozen=True, kw_only=True)
class Wants:
    """What its driver wants of a worker now."""

    change: bool = False
    """The world should change at a step boundary, or this worker should leave."""
    stop: bool = False
    """The attempt should stop after the next step, with a checkpoint."""
    drains: bool = False
    """The worker's host, or the list of hosts, wants this worker to leave."""
    is_urgent: bool = False
    """This worker has seconds to leave (SIGTERM), not the minutes of a notice."""
    host_leaves: bool = False
    """The host of a member of this generation has left the list."""


class Driver:
    """What a world needs of the process that starts workers and gives them places.

    This one is that of a worker without a launcher: a world of one. The two others override what
    they know.
    """

    interface = ""
    """The network interface for Gloo; "": Horovod chooses, or horovodrun has."""
    count = 0
    """The number of this worker's newest message, from which a successor continues."""
    is_mended = False
    """Our driver (driver/driver.py): before workers meet it compares how they compute, and logs it;
    it ends an attempt after too many generations without a finished step; a worker may leave
    because its machine fails, and may restart in place and return to its generation."""
    drains_on_sigterm = False
    """SIGTERM lets a worker leave at a step boundary. Without a launcher it ends the process as it
    ends any other."""

    # --- places ---
    def start(self, hooks: DriverHooks, holds_state: bool, step: int,
              arithmetic: Arithmetic | None, *, meets_at_once: bool) -> None:
        """Report that this worker stands ready."""

    def next_place(self, holds_state: bool, step: int) -> RankAssignment:
        """Wait for a place in a generation after ours. Raises Dismissed, RunOver."""
        return RankAssignment(generation=1, rank=0, size=1)

    # --- news ---
    def wants(self) -> Wants:
        """Return what the driver wants now."""
        return Wants()

    def is_broken(self) -> bool:
        """True when a member of this generation is gone."""
        return False

    def is_writer(self, rank: int, waited_s: float) -> bool:
        """True when this worker should write the state, because the attempt is over: the ranks
        before it have had a second each."""
        return waited_s >= rank

    # --- reports ---
    def drain(self) -> None:
        """Ask to leave at the next step boundary. Takes no lock: a signal handler may call it."""

    def note(self, phase: str, step: int) -> None:
        """Put into the next message what this worker does, and that it holds the state."""

    def report(self, **facts: Any) -> None:
        """Report what the driver must know before this worker goes on (fields of Heartbeat):
        `error`, the user's own exception, which ends the run on all workers; `left` or `unsaved`,
        why the run stops here and can be resumed; `machine` or `differs`, why this worker leaves
        as a dead one; the last `step`; the `phase` finished."""

    def go_back(self) -> None:
        """Report that all workers drop the state and restore an older checkpoint."""

    def revive_soon(self) -> None:
        """Report that this process is about to restart in place. Any thread may call it."""

"""A worker's place in the world, and what the world needs of the process that gives places.

driver → here → generations (`hvd.init()`)

There are three drivers: ours (our_driver.py), that of plain horovodrun (plain_driver.py), and none
(alone.py). The world does not know which it has: what differs is a method of `Driver`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from elastic_trainer.wire.heartbeat import At, MachineFault
from elastic_trainer.world.arithmetic import Arithmetic

MAX_ERROR_CHARACTERS = 50_000


@dataclass(frozen=True, kw_only=True)
class Place:
    """A seat in one generation."""

    generation: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    rendezvous: tuple[str, int] | None
    """Where Gloo's peers find one another in this generation: address, port."""
    attempt: int | None = None
    """The number of the attempt, if rank 0 counts attempts and no launcher does."""
    at_once: bool = False
    """One answer of the rendezvous store has the addresses of all members
    (08-meet-at-once.patch)."""


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
    at: Callable[[], At | None] = lambda: None
    """What the loop does now; None: it is in no step."""


class Driver(Protocol):
    """What a world needs of the process that starts workers and gives them places."""

    # --- places ---
    def start(self, hooks: DriverHooks, holds_state: bool, step: int,
              arithmetic: Arithmetic | None, *, meets_at_once: bool) -> None:
        """Report that this worker stands ready."""

    def next_place(self, holds_state: bool, step: int) -> Place:
        """Wait for a place in a generation after ours. Raises Dismissed, RunOver."""

    # --- news ---
    def wants_change(self) -> bool:
        """True when the world should change at a step boundary, or this worker should leave."""

    def wants_stop(self) -> bool:
        """True when the attempt should stop at the next step, with a checkpoint."""

    def drains(self) -> bool:
        """True when its host, or the list of hosts, wants this worker to leave."""

    def must_hurry(self) -> bool:
        """True when this worker has seconds to leave (SIGTERM), not the minutes of a notice."""

    def is_host_leaving(self) -> bool:
        """True when the host of a member of this generation has left the list."""

    def is_writer(self, rank: int, waited_s: float) -> bool:
        """True when this worker should write the state, because the attempt is over."""

    def is_broken(self) -> bool:
        """True when a member of this generation is gone."""

    def is_finished(self) -> bool:
        """True when a member has seen the last vote pass."""

    # --- reports ---
    def drain(self) -> None:
        """Ask to leave at the next step boundary. Takes no lock: a signal handler may call it."""

    def note(self, phase: str, step: int) -> None:
        """Report what this worker does, and that it holds the state."""

    def go_back(self) -> None:
        """Report that all workers drop the state and restore an older checkpoint."""

    def fail(self, error: str) -> None:
        """Report the user's own exception, which ends the run on all workers."""

    def leave(self, why: str, *, is_saved: bool = True) -> None:
        """Report that the run stops here, and can be resumed: by the user's code, or because its
        last checkpoint cannot be written (`is_saved` is False)."""

    def fail_machine(self, fault: MachineFault) -> None:
        """Report that this machine has failed, and that this worker leaves."""

    def differ(self) -> None:
        """Report that this worker holds other bits than most of its world, and leaves now."""

    def report_last_step(self, step: int) -> None:
        """Report the last step before this worker leaves an attempt that is over."""

    def finish(self, step: int) -> None:
        """Report that the last vote has passed."""

    # --- what differs between drivers ---
    def interface(self) -> str:
        """Return the network interface for Gloo; "": Horovod chooses, or horovodrun has."""

    def drains_on_sigterm(self) -> bool:
        """True if SIGTERM should let a worker leave at a step boundary."""

    def counts_idle_generations(self) -> bool:
        """True if the driver ends an attempt after too many generations without a finished step."""

    def compares_arithmetic(self) -> bool:
        """True if the driver compares how workers compute, and logs it, before they meet."""

    def takes_machine_faults(self) -> bool:
        """True if a worker whose machine fails may leave, and the driver starts another one."""

    def revives_workers(self) -> bool:
        """True if a worker may restart in place, and return to its generation."""

    def revive_soon(self) -> None:
        """Report that this process is about to restart in place. Any thread may call it."""

    @property
    def count(self) -> int:
        """The number of this worker's newest message, from which a successor continues."""

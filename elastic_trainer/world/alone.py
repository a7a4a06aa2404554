"""No driver: a world of one, with the same bits as any other."""

from __future__ import annotations

from elastic_trainer.wire.heartbeat import MachineFault
from elastic_trainer.world.arithmetic import Arithmetic
from elastic_trainer.world.place import DriverHooks, Place


class Alone:
    """The driver of a worker that no launcher started."""

    count = 0

    def start(self, hooks: DriverHooks, holds_state: bool, step: int,
              arithmetic: Arithmetic | None, *, meets_at_once: bool) -> None:
        """Do nothing: there is no driver."""

    def next_place(self, holds_state: bool, step: int) -> Place:
        """Return the only place."""
        return Place(generation=1, rank=0, size=1, local_rank=0, local_size=1, rendezvous=None)

    def wants_change(self) -> bool:
        """Never."""
        return False

    wants_stop = drains = must_hurry = is_host_leaving = is_broken = is_finished = wants_change
    drains_on_sigterm = counts_idle_generations = compares_arithmetic = wants_change
    takes_machine_faults = revives_workers = wants_change

    def is_writer(self, rank: int, waited_s: float) -> bool:
        """Always: there is no other worker."""
        return True

    def interface(self) -> str:
        """None: there are no peers."""
        return ""

    def drain(self) -> None:
        """Do nothing: without a launcher, SIGTERM ends the process as it ends any other."""

    def note(self, phase: str, step: int) -> None:
        """Do nothing: there is no driver."""

    def go_back(self) -> None:
        """Do nothing: a world of one has nothing to compare."""

    def fail(self, error: str) -> None:
        """Do nothing: there is no driver."""

    def leave(self, why: str, *, is_saved: bool = True) -> None:
        """Do nothing: there is no driver."""

    def fail_machine(self, fault: MachineFault) -> None:
        """Do nothing: there is no driver."""

    def differ(self) -> None:
        """Do nothing: there is no driver."""

    def report_last_step(self, step: int) -> None:
        """Do nothing: there is no driver."""

    def finish(self, step: int) -> None:
        """Do nothing: there is no driver."""

    def revive_soon(self) -> None:
        """Do nothing: there is no driver."""

"""The accounts of a host's seconds, and the seconds of a run by them.

host_accounts (which books the run's seconds) → here

What always holds: a second of the run is on one account for each part that a host may have in it.
So a host of that part costs nothing for a step: it takes the difference since its last change.
"""

from __future__ import annotations

from enum import Enum


class Account(str, Enum):
    """What a host does in a second of its life."""

    USEFUL = "useful step"
    """Steps that are in the result."""
    REDONE = "redone step"
    """A step in flight that is done again, and steps that a start from a checkpoint dropped."""
    NOTICING = "noticing"
    """From a loss until a member knows of it."""
    FORMING = "forming"
    """Deciding on the next world, and forming it."""
    TRANSFER = "transfer"
    """Newcomers receive the state."""
    CHECKPOINT = "checkpoint pause"
    """The snapshot at the end of a step. The upload runs beside the training."""
    IDLE = "idle"
    """Between steps (evaluations, the user's own code), and a worker without a micro-batch."""
    STANDBY = "standby"
    """A booted worker waits while the others train."""
    BOOTING = "booting"
    RESTARTING = "restarting"
    """From the last sign of an attempt to the first world of the next one."""
    WAITING = "waiting for capacity"
    """The list has fewer slots than the run needs (--min-workers)."""
    STOPPED = "stopped"
    """A person had stopped the run."""

    __hash__ = str.__hash__
    """Equal texts have equal hashes, and no call in Python: each step asks four times."""


class Part(Enum):
    """The part of a host in the run."""

    MEMBER = "member"
    SPARE = "spare"
    """A member without a micro-batch."""
    READY = "ready"
    BOOTING = "booting"
    """It is listed, and no worker of it is ready."""


NO_SECONDS = dict.fromkeys(Account, 0.0)
STEPPING = (Account.USEFUL, Account.REDONE, Account.CHECKPOINT, Account.IDLE)
FORMING = (Account.NOTICING, Account.FORMING, Account.TRANSFER)
Lane = list[tuple[Account, float, float]]
"""Account, start and end, in their order."""
SHORT_S = 1.0
"""What is shorter than this between two steps is on its account, but no period of a lane."""


def account_of(part: Part, run: Account, has_capacity: bool) -> Account:
    """Return the account of a host's second, of its part and of what the run does."""
    if run is Account.STOPPED:
        return run
    if not has_capacity and part is not Part.BOOTING and run not in STEPPING:
        return Account.WAITING
    if part is Part.BOOTING:
        return Account.RESTARTING if run is Account.RESTARTING else Account.BOOTING
    if part is Part.READY:
        return Account.STANDBY if run in (*STEPPING, *FORMING) else run
    return Account.IDLE if part is Part.SPARE and run in STEPPING else run


class Ledger:
    """The run's seconds so far by part and account, and what a host of each part did and when."""

    def __init__(self) -> None:
        self.seconds = {part: NO_SECONDS.copy() for part in Part}
        self.lanes: dict[Part, Lane] = {part: [] for part in Part}
        self.taken = NO_SECONDS.copy()
        """What all hosts together have taken."""

    def add(self, run: Account, seconds: float, has_capacity: bool) -> None:
        """Book seconds in which the run does one thing."""
        for part in Part:
            self.seconds[part][account_of(part, run, has_capacity)] += seconds

    def show(self, run: Account, has_capacity: bool, start: float, end: float) -> None:
        """Draw the time from `start` to `end` into the lanes."""
        for part, lane in self.lanes.items():
            account = account_of(part, run, has_capacity)
            if lane and lane[-1][0] is account and lane[-1][2] == start:
                lane[-1] = account, lane[-1][1], end
            else:
                lane.append((account, start, end))

    def redo(self, since: float) -> None:
        """Draw the steps since then as dropped ones."""
        lane, later = self.lanes[Part.MEMBER], Lane()
        while lane and lane[-1][2] > since:
            account, start, end = lane.pop()
            if start < since:
                lane.append((account, start, since))
            later.append((Account.REDONE if account is Account.USEFUL else account,
                          max(start, since), end))
        lane += reversed(later)

    def copy(self, *, is_drawn: bool) -> Ledger:
        """Return a copy; without `is_drawn` its lanes are empty."""
        found = Ledger()
        found.seconds = {part: dict(seconds) for part, seconds in self.seconds.items()}
        found.taken = dict(self.taken)
        if is_drawn:
            found.lanes = {part: lane[:] for part, lane in self.lanes.items()}
        return found

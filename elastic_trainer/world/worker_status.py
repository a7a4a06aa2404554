"""Each worker's status when a generation begins, and what follows from all statuses.

each member's WorkerStatus → one allgather → here → restore, roll forward, transfer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elastic_trainer.world.arithmetic import Arithmetic
from elastic_trainer.world.pauses import Survivor


class WorkerStatus(NamedTuple):
    """What a worker has done when a generation begins."""

    committed: int
    """In ticks (LiveState.ticks): steps, or phases of steps; so is `begun`."""
    begun: int
    has_state: bool
    last_vote: tuple[int, ...]
    """The totals of the last vote that passed on this worker: samples, digest, clock, requests
    to finish."""
    paused_ms: int
    """The time since it trained last."""
    arithmetic: Arithmetic | None = None
    """How it computes, without the facts."""
    pause: Survivor = Survivor(0, 0, 0)
    owes: bool = False
    """True if the user's code has not ended after its last finished step."""
    host: int = 0
    """A number of its host: that of another host is another one."""
    frozen: int = 0
    """Whether it may have frozen content (state/frozen.py)."""
    zone: int = 0
    """A number of its host's zone; 0: unknown."""
    is_behind: bool = False
    """True if it has not all parameters of the last step that it has finished."""

    def encode(self) -> list[int]:
        """Return it as integers."""
        own = self.arithmetic or Arithmetic(0, 0, 0)
        return [self.committed, self.begun, self.has_state, *self.last_vote, self.paused_ms,
                own.program, own.inputs, own.result, *self.pause, self.owes, self.host,
                self.frozen, self.zone, self.is_behind]

    @staticmethod
    def decode(numbers: Sequence[int]) -> WorkerStatus:
        """Read the integers of `encode`."""
        committed, begun, has_state, samples, digest, clock_ms, finishes, paused_ms, *more = numbers
        program, inputs, result, *pause, owes, host, frozen, zone, is_behind = more
        return WorkerStatus(committed, begun, bool(has_state),
                        (samples, digest, clock_ms, finishes), paused_ms,
                        Arithmetic(program, inputs, result), Survivor(*pause), bool(owes), host,
                        frozen, zone, bool(is_behind))


def has_state(statuses: Sequence[WorkerStatus]) -> bool:
    """True if a member has the run's values."""
    return any(one.has_state for one in statuses)


def givers(statuses: Sequence[WorkerStatus]) -> list[int]:
    """Return the ranks of the members that have the run's values."""
    return [rank for rank, one in enumerate(statuses) if one.has_state]


def newest(statuses: Sequence[WorkerStatus]) -> tuple[int, tuple[int, ...]]:
    """Return the ticks and the last vote of the member that has finished most."""
    return max((s.committed, s.last_vote) for s in statuses if s.has_state)


def is_owed(statuses: Sequence[WorkerStatus]) -> bool:
    """True if the user's code of a member has not ended after the last step that is finished."""
    step, _ = newest(statuses)
    return any(s.has_state and (s.owes or s.committed < step) for s in statuses)


def are_behind(statuses: Sequence[WorkerStatus]) -> bool:
    """True if a member has to receive parameters of the last step that is finished, if they are
    sharded."""
    step, _ = newest(statuses)
    return any(s.has_state and (s.is_behind or s.committed < step) for s in statuses)


def was_begun(statuses: Sequence[WorkerStatus]) -> bool:
    """True if a member had begun a step that no member has finished."""
    step, _ = newest(statuses)
    return any(s.has_state and s.begun > step for s in statuses)

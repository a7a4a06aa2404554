"""What the loop yields to the user's code: a step begins, here is a micro-batch, a step is
finished.

micro-batches, warm_up, loop → here → trainer (the iterator), train()

What always holds: `Microbatch.backward` raises what is the user's error. What the loop has to
handle (a member is gone, `.grad` was written to) is kept, and raised inside the loop at the next
stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.common.exceptions import HorovodInternalError

from elastic_trainer.data.batches import add_note
from elastic_trainer.evaluate.sums import Found
from elastic_trainer.reduce.flat import COUNT, Tally, pair_of, require_count
from elastic_trainer.reduce.gradient_sums import GradientsWritten
from elastic_trainer.world.collectives import PeersLost

OF_THE_LOOP = (HorovodInternalError, PeersLost, GradientsWritten)
"""Exceptions that the loop handles: they are no error of the user's code."""


@dataclass(frozen=True)
class Begun:
    """A step begins, for the first time or again; or this worker joins in one of its phases."""

    step: int
    phase: int = 0
    is_trial: bool = False
    """True before this worker has joined: its first batches are only tried (the warm-up)."""


@dataclass(frozen=True)
class PhaseFinished:
    """A phase of a step is finished, on every worker, and the step has another one."""

    step: int
    phase: int


@dataclass(frozen=True)
class Finished:
    """A step is finished, on every worker: the code after it runs once."""

    step: int


class Portion:
    """One batch of an evaluation, for this worker to compute."""

    def __init__(self, number: int, following: Sequence[int] = ()):
        self.number, self.following = number, following
        self.found: Found | None = None
        """What the user's function has found in it."""
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.error = error


@dataclass(frozen=True)
class Evaluated:
    """An evaluation is finished, on every worker that waits for it."""

    means: dict[str, Any]


class Microbatch:
    """One micro-batch in the hands of the user's code: its batch, and where its loss goes."""

    def __init__(self, name: str, batch: Any, backward: Callable[[Any, Any], None], tally: Tally,
                 advice: str = ""):
        self.name, self.batch, self._backward, self._tally = name, batch, backward, tally
        self.advice = advice
        """A remedy for a person if the user's code fails on this micro-batch."""
        self.is_trial = False
        """True for the first micro-batch of the warm-up: it decides which names are logged."""
        self.is_done = False
        self.error: BaseException | None = None
        """What the user's code, or the backward pass, has raised."""

    def backward(self, loss: Any, count: Any = None) -> None:
        """Run the backward pass of this micro-batch. Raises what is the user's error.

        `loss` is the mean over the samples; with `count` it is the sum over what was counted.
        """
        if self.is_done:
            raise RuntimeError(
                f"backward() was called twice in {self.name}. Add the losses, and call it once for "
                f"each batch: step.backward(first + second).")
        self.is_done = True
        try:
            if count is not None:
                require_count(count)
            self._backward(loss, count)
            if count is not None:
                self._add(COUNT, count, 1)
        except OF_THE_LOOP as error:
            self.error = error
        except BaseException as error:
            self.error = error
            raise

    def log(self, name: str, value: Any) -> None:
        """Add a sum and its number of items to what the step logs."""
        if name == COUNT:
            raise ValueError(
                f"step.log cannot log {COUNT!r}, which backward(loss, count=…) uses. Use another "
                "name.")
        self._add(name, *pair_of(name, value))

    def _add(self, name: str, total: Any, weight: Any) -> None:
        names = self._tally.names
        if not self.is_trial and name not in names:
            known = f"only {', '.join(names)}" if names else "nothing"
            what = f"{name} was logged" if name != COUNT else "backward() got a count"
            raise RuntimeError(
                f"{what} in {self.name}, but the first batch logged {known}. That batch decides "
                f"what is sent. Log the same names for each batch, in all phases, with (0, 0) "
                f"where there is nothing to log.")
        self._tally.add(name, total, weight)

    def fail(self, error: BaseException) -> None:
        """Keep what the user's code has raised, for the loop to raise at the next stage."""
        self.is_done = True
        self.error = self.error or error
        if self.advice:
            add_note(error, self.advice)

    def settle(self) -> None:
        """Raise what was kept, or RuntimeError if the user's code has left the micro-batch out."""
        if self.error is not None:
            raise self.error
        if not self.is_done:
            raise RuntimeError(
                f"step.backward() was not called in {self.name}, so its samples would be lost. "
                f"Call step.backward(loss) once for each batch, in the place of loss.backward(). "
                f"To leave a batch out, use a loss of zero: step.backward(0.0 * loss).")


Stage = Begun | PhaseFinished | Finished | Microbatch | Portion | Evaluated

"""The user's code after a step: whether it has run, and whether it asks to stop; the run's clock.

apply (a step, or a phase, is finished) → here → the user's code, once: after the step, and before
the batches of the next one → checkpoint, change of the world, next step;
step.stop(reason), keep_best(patience=…) → here → the vote (loop.py) → all workers

What always holds:
1. A step, or a phase, that this worker has applied is handed over exactly once. Then the next step
   begins. A worker that joins receives the state as it is when the inner loop of that next step is
   entered. So it has what the user's code does before that loop (model.train(), for example).
2. While the user's code runs, what it changes is half changed. Then nothing is copied.
3. The clock runs from a worker's first step on: in micro-batches, vote and apply, in the user's
   code, and while the world changes. It does not run between two attempts. A ballot carries it
   (rank 0's), so a worker that joins has the time of the last vote.
4. If the user's code clips a gradient after the step, it is an error: the step is applied already.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from elastic_trainer.evaluate.best import Best
from elastic_trainer.evaluate.evaluation import Evaluations
from elastic_trainer.reduce.gradient_sums import AppliedGradient
from elastic_trainer.state.values.layout import unpack
from elastic_trainer.training.stages import Begun, Finished, PhaseFinished, Stage
from elastic_trainer.training.work import Work

CHANGES_S = 5.0
"""The longest time that a restart in place waits for the end of a change of the state."""


class StopRequest:
    """Why this worker asks to finish the run, if it does."""

    def __init__(self, best: Best | None = None) -> None:
        self._asked: str | None = None
        self._best = best

    def __repr__(self) -> str:
        return f"StopRequest({self.reason!r})"

    @property
    def reason(self) -> str | None:
        """What the user's code has asked for, or that patience is exhausted."""
        return self._asked if self._asked is not None or not self._best else self._best.why_over()

    def ask(self, reason: str) -> None:
        self._asked = reason

    def forget(self) -> None:
        """Forget what was asked: the run goes back, and the step that it came from is undone."""
        self._asked = None


class AfterStep:
    """How far the user's code after the steps has run, on this worker."""

    def __init__(self, work: Work, steps_due: Callable[[], int], evaluations: Evaluations):
        self.work, self._steps_due = work, steps_due
        self.state, self.gradients = work.state, work.flat.gradients
        self.applied = AppliedGradient()
        self.evaluations = evaluations
        self.ticks = -1
        """How many phases were finished when the user's code last ran after one; -1: this worker
        has not joined."""
        self._has_handed_over = False
        self.is_running = False
        """True while the user's code runs after a step."""
        self._zero_at: float | None = None
        """The time at which the run would have begun if it had trained without a break; None: the
        clock does not run yet."""

    def __repr__(self) -> str:
        return f"<AfterStep tick {self.ticks} of {self.state.ticks}>"

    def enter(self) -> None:
        """Begin a generation. A newcomer does not run the code of steps that others have done."""
        if self._zero_at is None:
            self._zero_at = time.monotonic() - self.state.last_vote[2] / 1000
        self.ticks = self.state.ticks

    def go_back(self) -> None:
        """Begin where the state was restored: with the steps and the clock of a checkpoint."""
        self.ticks, self._zero_at = self.state.ticks, None

    def leave(self) -> int | None:
        """Leave the live state to this process's successor, and return the descriptor of its
        memory; None if it is half changed. Of an optimizer that is sharded no other worker has all:
        then another thread than the main one waits for the end of the change."""
        must_wait = (self.state.shards and self.state.has_state
                     and threading.current_thread() is not threading.main_thread())
        latest = time.monotonic() + (CHANGES_S if must_wait else 0.0)
        while True:
            memory = None if self.is_running else self.work.leave(self.ticks)
            if memory is not None or time.monotonic() >= latest:
                return memory
            time.sleep(0.005)

    def take_up(self, memory: int | None) -> bool:
        """Go on with the live state that this process left; returns whether there was one."""
        handed_over = self.work.take_up(memory)
        self.ticks = self.ticks if handed_over is None else handed_over
        return handed_over is not None

    def hand_over(self) -> Iterator[Stage]:
        """Yield the step, or the phase, that was applied, unless the user's code has run after it;
        then the step that begins, if there is one. If a generation broke in an evaluation of that
        code, it goes on there. Raises RuntimeError if that code clips the gradient."""
        state, ticks = self.state, self.state.ticks
        if -1 < self.ticks < ticks:
            is_whole = state.phase == 0
            if not self.is_running:
                self._has_handed_over = self.is_running = True
                self.evaluations.begin(state.committed - 1)
                self.applied.note(self.gradients.by_size)
                yield (Finished(state.committed - 1) if is_whole
                       else PhaseFinished(state.committed, state.phase - 1))
            yield from self.evaluations.serve()
            self.applied.check()
            if is_whole and not self.is_over():
                yield Begun(state.committed)
            self.is_running, self.ticks = False, ticks

    def owes(self) -> bool:
        """Return whether the user's code has not ended after the last finished step."""
        return -1 < self.ticks < self.state.ticks

    def show_last(self) -> Iterator[Finished]:
        """Yield the last step of a run that was finished before this worker has joined it. The
        user's loop has begun a step that there is not, and its code after a step runs once more.
        What that changes in the state is put back: the last checkpoint has it already.

        Costs: one copy of the state.
        """
        if self._has_handed_over:
            return
        packed = self.state.packed()
        kept = replace(packed, tensors=[tensor.clone() for tensor in packed.tensors])
        yield Finished(self.state.committed - 1)
        self.state.load(unpack(kept))

    def is_over(self) -> bool:
        return self.state.committed >= self._steps_due()

    def is_at_begin(self) -> bool:
        """Return whether the state is that of a step's begin: the user's code has run after all
        finished steps."""
        return self.state.phase == 0 and self.ticks in (-1, self.state.ticks)

    def clock_ms(self) -> int:
        """Return for how many milliseconds the run has trained, over all attempts."""
        return round(1000 * (time.monotonic() - self._zero_at)) if self._zero_at is not None else 0

"""One step of the run, in the hands of the user's loop.

stages of a worker → here → the user's `for batch in step` → step.backward, step.log → the worker

What always holds: what a step knows only when it is finished raises before that. A step that is
over raises whatever is asked.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NoReturn

import torch

from elastic_trainer.evaluate.sums import as_json
from elastic_trainer.schedule.intervals import ends_interval
from elastic_trainer.training.loop import Loop
from elastic_trainer.training.stages import Begun, Finished, Microbatch, PhaseFinished, Stage
from elastic_trainer.training.worker import Worker


class Step:
    """One step of the run, as `for step in trainer` yields it."""

    def __init__(self, worker: Worker, draw: Callable[[], Stage | None],
                 fail: Callable[[RuntimeError], NoReturn], stage: Stage):
        self._worker, self._draw, self._fail = worker, draw, fail
        self._phases = worker.job.phases
        self._entered: list[str] = []
        """The phases whose loops were entered."""
        self._stage = "begun"  # begun, running, finished, over
        self._done = 0
        """How many phases are done, on every worker."""
        self._microbatch: Microbatch | None = None
        self._number, self._is_trial = 0, False
        self._take(stage, 0)

    def __repr__(self) -> str:
        return f"Step({self._number}, {self._stage})"

    @property
    def number(self) -> int:
        """The number of this step, counted from 0.

        A process does not know it before its first inner loop, because it has not joined the run:
        reading it there raises RuntimeError. In the first batches, which are only tried (the
        warm-up), it is 0. Inside the inner loop it may change: to the number of the step that the
        other workers do, and to an older one if the run goes back.
        """
        if self._is_trial and self._stage == "begun":
            raise RuntimeError(
                "the number of this step is not known yet: this worker has not joined the run. "
                "Read step.number and step.epoch inside of `for batch in step`, or after it.")
        return self._number

    @property
    def epoch(self) -> int:
        """The pass over the dataset that this step belongs to, counted from 0."""
        return self._worker.job.schedule.epoch(self.number)

    @property
    def loss(self) -> float:
        """The mean loss over the samples of all workers; of the last phase, if there are several.
        Known after the inner loop."""
        return self._finished("loss").state.loss

    @property
    def losses(self) -> dict[str, float]:
        """The loss of each phase, by name. Known after the last inner loop."""
        known = self._finished("losses").state.findings.losses
        return {name: known.get(name, math.nan) for name in self._phases}

    @property
    def metrics(self) -> dict[str, float]:
        """What the step has logged, by name: the sum over all micro-batches and phases by the
        number of items. Known after the inner loop, and the same number in every world."""
        loop = self._finished("metrics")
        return Unseen() if self._is_trial else dict(loop.end.metrics)

    # --- the batches ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield the batch of each micro-batch of this worker, until the step is finished on every
        worker."""
        if len(self._phases) > 1:
            raise RuntimeError(
                f"the trainer has the optimizers {', '.join(self._phases)}, and each has a loop of "
                f"its own. Use `for batch in step.phase({self._phases[0]!r})`.")
        return self.phase(self._phases[0])

    def phase(self, name: str) -> Iterator[Any]:
        """Yield the batch of each micro-batch of this worker, until the optimizer of this name has
        made its step on every worker. All phases of a step have the same samples.

        A worker that joins in the middle of a step has no batches in the phases that are done. The
        warm-up tries the first phase only: the code between two phases must not run for a step that
        is only tried.
        """
        self._require_not_over()
        if name not in self._phases:
            raise ValueError(f"there is no phase {name!r}. Use one of {list(self._phases)}.")
        if name in self._entered:
            raise RuntimeError(
                f"step {self._number} is iterated a second time: its batches come once. Use one "
                f"loop over them, without a break.")
        if name != (expected := self._phases[len(self._entered)]):
            raise RuntimeError(
                f"the phase {name!r} of step {self._number} comes before {expected!r}. Run them in "
                f"the order in which the optimizers were given: {', '.join(self._phases)}.")
        if self._stage == "running" and self._done < len(self._entered):
            raise RuntimeError(
                f"the phase {name!r} of step {self._number} begins, but the one before it was left "
                f"early. Run each loop to its end, without a break.")
        self._entered.append(name)
        if self._stage == "begun":
            self._stage = "running"
        return self._batches(len(self._entered) - 1)

    def _batches(self, phase: int) -> Generator[Any, None, None]:
        while self._stage == "running" and self._done <= phase:
            stage = self._draw()
            if isinstance(stage, Microbatch):
                self._microbatch = stage
                with self._worker.job.precision.batch():
                    yield stage.batch
            else:
                self._microbatch = None
                self._take(stage, phase)
                self._worker.carried.leave(sys._getframe().f_back)

    def _take(self, stage: Stage | None, phase: int) -> None:
        """Note what the worker has moved on to, while the loop is in a phase."""
        match stage:
            case Begun():
                self._number, self._done, self._is_trial = stage.step, stage.phase, stage.is_trial
                if self._done < phase:
                    self._fail(RuntimeError(
                        f"the run goes back to step {stage.step}, and the loop is in the phase "
                        f"{self._phases[phase]!r}. Start the same command again."))
            case PhaseFinished():
                self._number, self._done, self._is_trial = stage.step, stage.phase + 1, False
            case Finished():
                # It may be the end of a step that an earlier process of this worker has begun.
                self._number, self._done, self._is_trial = stage.step, len(self._phases), False
                self._stage = "finished"
            case None:  # the run was finished before this worker joined it
                if (loop := self._worker.loop) is None:
                    raise RuntimeError(
                        "the loop over the trainer was left before the first batch of this step "
                        "was asked for. Use `for step in trainer`, or keep the iterator: "
                        "steps = iter(trainer).")
                self._number = loop.state.committed - 1
                self._done, self._stage = len(self._phases), "finished"

    # --- what the user's code does with a batch ---------------------------------------------------

    def backward(self, loss: torch.Tensor, count: float | None = None) -> None:
        """Run the backward pass of the batch in hand, once.

        `loss` is the mean over its samples, a tensor of one value. With `count`, it is the sum over
        what was counted (tokens, pixels): the gradient is then that of the mean over all that the
        micro-batches of the step have counted.
        """
        microbatch = self._in_hand("backward()")
        self._worker.job.precision.end_forward()
        microbatch.backward(loss, count)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss as the scaler scales it, for a backward pass of your own beside that of
        step.backward: `step.scale(loss_of_real).backward()`. Without a scaler it is the loss."""
        self._in_hand("scale()")
        scaler = self._worker.job.scaler
        return scaler.scale(loss) if scaler else loss

    def log(self, **sums: tuple[Any, Any]) -> None:
        """Add sums of the batch in hand to what the step logs: `step.log(acc=(hits, n))`.

        Each name has a sum and a number of items. `step.metrics` then has their quotient over all
        micro-batches. Log the same names for each batch, in all phases. A tensor is read at once,
        so on a GPU this waits for the device.
        """
        microbatch = self._in_hand("log()")
        for name, value in sums.items():
            microbatch.log(name, value)

    @property
    def is_finished(self) -> bool:
        """True after the (last) inner loop."""
        return self._stage == "finished"

    @property
    def is_tried(self) -> bool:
        """True while the batch in hand is only tried (the warm-up)."""
        return self._is_trial and self._microbatch is not None

    @property
    def advice(self) -> str:
        """A remedy for a person if the user's code has failed on the batch in hand."""
        return self._microbatch.advice if self._microbatch else ""

    def give_up(self, error: BaseException) -> None:
        if self._microbatch:
            self._microbatch.fail(error)

    def _in_hand(self, what: str) -> Microbatch:
        self._require_not_over()
        if self._microbatch is None:
            raise RuntimeError(f"{what} was called in step {self._number} without a batch. Call it "
                               f"inside of `for batch in step`.")
        return self._microbatch

    # --- what the user's code asks or wants after the inner loop ---------------------------------

    def every(self, interval: str) -> bool:
        """Return whether this step ends an interval: "1 epoch", "500 steps", "30 s", "10 min", "2
        h".

        The same on every worker: rank 0's clock, which comes with the vote, decides of times. It
        counts the time of all attempts from their first step on, with your code after the inner
        loop, and not the time between two attempts.
        """
        loop = self._finished("every()")
        return ends_interval(interval, self._number, self._worker.job.schedule.steps_per_epoch,
                             loop.state.clocks_ms)

    def stop(self, reason: str) -> None:
        """Finish the run early, on every worker: after this step if called in its inner loop, else
        after the next one. One worker is enough: the vote carries it to all.

        The run then counts as finished: the same command does no more steps. A call for a batch
        that is only tried (the warm-up) has no effect.
        """
        self._require_not_over()
        if not (self._is_trial and self._microbatch):
            self._worker.finish(reason)

    # --- the end ----------------------------------------------------------------------------------

    def end(self) -> RuntimeError | None:
        """End this step: the loop asks for the next one. Return the misuse if an inner loop did not
        run to its end."""
        stage, self._stage = self._stage, "over"
        if stage == "finished":
            return None
        is_left = self._done < len(self._entered)
        of = f"the phase {self._phases[self._done]!r} of " if len(self._phases) > 1 else ""
        return RuntimeError(
            f"the inner loop of {of}step {self._number} was "
            f"{'left early' if is_left else 'not run'}, so samples would be lost. Run `for batch "
            f"in step` to its end: it ends when the step is finished on every worker.")

    def _finished(self, what: str) -> Loop:
        self._require_not_over()
        if self._stage != "finished":
            raise RuntimeError(
                f"{what} of step {self._number} is known when the step is finished. Use it after "
                f"`for batch in step`.")
        assert self._worker.loop
        return self._worker.loop

    def _require_not_over(self) -> None:
        if self._stage == "over":
            raise RuntimeError(
                f"step {self._number} is over. Use a step inside of the body of `for step in "
                f"trainer`; trainer.result has the loss and the weights after the loop.")


def applied(step: Step) -> tuple[float, torch.Tensor | None]:
    """Return the first learning rate of a finished step, and the norm of its gradient before it was
    clipped (None without `clip_norm`): for the adapters of frameworks that log both."""
    loop = step._finished("the learning rate")
    return loop.state.rates.used, loop.end.grad_norm


def sums_of(step: Step) -> dict[str, tuple[float, float]]:
    """Return the sums and weights that a finished step has logged, also those that step.metrics
    does not have; nothing of a step that an earlier process has finished."""
    loop = step._finished("sums")
    return {} if step._is_trial else dict(loop.state.findings.sums)


def note_rates(step: Step) -> None:
    """Take over the rates that a scheduler has set after a finished step: for adapters whose
    schedulers follow an evaluation. Every worker calls it alike."""
    step._finished("the learning rate").state.rates.note()


def log_after(step: Step, metrics: Mapping[str, Any]) -> None:
    """Log what hooks after a finished step have found, under the names that loggers have
    ("train/loss_epoch"). Every worker calls it alike."""
    loop = step._finished("a logged number")
    if metrics and loop.after_step.is_running:
        facts: dict[str, Any] = {"step": step.number, "metrics": as_json(dict(metrics))}
        loop.events.reach("step.logged", **facts)
        if loop.world.rank == 0:
            loop.events.emit("worker.logged", **facts)


def end_run(step: Step, reason: str) -> None:
    """End the run with a finished step, not with the next one. Every worker calls it alike."""
    loop = step._finished("end_run()")
    if loop.after_step.is_running:
        samples, digest, clock_ms, finishes = loop.state.last_vote
        loop.state.last_vote = (samples, digest, clock_ms, max(finishes, 1))
        step._worker.finish(reason)


class Unseen(dict[str, float]):
    """The metrics of a step that an earlier process has finished: each is NaN."""

    def __missing__(self, name: str) -> float:
        return math.nan

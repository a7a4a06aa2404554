"""The micro-batches of a step that this worker runs: forward and backward into the flat buffers.

A gradient's way, in the order of the files:
1. loss: the user's code computes the loss of one batch at a time (here).
2. flat: autograd adds the micro-batch's gradient into flat buffers (reduce/gradient_sums.py).
3. reduce: the sums of all workers are added (reduce/exact.py, reduce/ring.py); with
   shard="gradients" by their holders (reduce/leaving.py, reduce/scattered.py).
4. vote: every worker holds the reduced gradient, or none uses it (world/vote.py, loop.py).
5. apply: weights, optimizer, buffers and position change together (commit_step.py).

What always holds:
1. Each micro-batch starts with the buffers, modes and extra state with which the step began, and
   with its own random seed.
2. An exception of the user's code is kept for the vote: all workers stop at the same point. One
   that concerns this worker alone (a fault of its machine, too little memory for what it takes
   over) is raised at once.
3. If the user's code writes to `.grad`, this worker runs its micro-batches again, each with
   gradients of its own. What has left this worker before has the same bits.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch

from elastic_trainer.data.loader import keys_after
from elastic_trainer.data.seeds import seed_of
from elastic_trainer.reduce.buffers import BufferValues
from elastic_trainer.reduce.flat import SetsDiffer
from elastic_trainer.reduce.gradient_sums import CLIP, GradientsWritten
from elastic_trainer.reduce.reducer import TracedWorld
from elastic_trainer.state.values.supported import BUFFERS_STAY, some
from elastic_trainer.training.differing import NOT_RUN, LeftInModules
from elastic_trainer.training.failures import PeerFailed, require_scalar
from elastic_trainer.training.stages import OF_THE_LOOP, Microbatch
from elastic_trainer.training.work import Work
from elastic_trainer.world.collectives import PeersLost, World


class Microbatches:
    """This worker's part of each step."""

    def __init__(self, work: Work, leaves_alone: Callable[[BaseException], bool],
                 is_broken: Callable[[], bool]):
        self.work, self.job, self.state, self.flat = work, work.job, work.state, work.flat
        self.reducer, self.scaling = work.reducer, work.scaling
        self._other_reducer = "" if work.reduce == "exact" else ', or use reduce="exact"'
        self._leaves_alone, self._is_broken = leaves_alone, is_broken
        self.trace, self._handed_ns = work.events.trace, 0
        self.error: BaseException | None = None
        """What the user's code has raised in this step."""
        self.losses: dict[int, tuple[torch.Tensor, numpy.ndarray]] = {}
        """Of this step's micro-batches that this worker has run: the loss, and its samples."""
        self.left = LeftInModules(self.state)
        self.values = BufferValues(self.state.model_buffers, work.job.buffers, work.job.schedule)
        self.is_reduced = False
        """The sums of the step are those of all workers."""
        self._is_as_begun = False
        """No micro-batch has run since the step began."""
        self._first = 0
        """The step's first micro-batch that has samples."""
        self.number = -1
        """The micro-batch in hand; -1 where all workers do the same."""
        self.mine = range(0)
        """This worker's micro-batches in its world."""

    def run(self, step: int, world: World,
            error: BaseException | None) -> Generator[Microbatch, None, tuple[int, int]]:
        """Run my micro-batches of a step into the flat buffers; returns the number and digest of my
        samples.

        `error` is one that this worker already has: then it takes part in the step without
        computing.
        """
        self.trace.begin_step(step, self.state.phase)
        self.work.begin()
        try:
            return (yield from self._run(step, world, error))
        except GradientsWritten:
            # Nothing wrong has left this worker: its micro-batches are run again, each by itself.
            self.flat.gradients.isolates = True
            return (yield from self._run(step, world, error, again=True))

    def _run(self, step: int, world: World, error: BaseException | None, *,
             again: bool = False) -> Generator[Microbatch, None, tuple[int, int]]:
        schedule, run = self.job.schedule, dict[int, numpy.ndarray]()
        mine = self.mine = self.reducer.begin(world, again=again)
        self.error, self.losses, self._first = error, {}, schedule.first_microbatch(step)
        self.flat.tally.clear()
        self.left.clear(again=again)
        self._is_as_begun = not again
        self.values.begin(step)
        for microbatch, indices in zip(mine, schedule.samples_of(step, mine), strict=True):
            self._require_peers()
            is_last = microbatch == mine[-1]
            done = self.reducer.microbatch(microbatch, is_last=is_last)
            if len(indices) and self.error is None:
                overlaps = world if is_last or self.flat.is_front else None
                yield from self._one(step, microbatch, indices, overlaps)
                run[microbatch] = indices
            done()
        if self.flat.microbatches_run:
            self.flat.add_counts(self.reducer.mine(), self.left.mark)
        if self.error is None:
            with self.user_code():
                self.work.check()
        return sum(map(len, run.values())), schedule.digest(step, run)

    def _one(self, step: int, microbatch: int, indices: numpy.ndarray,
             overlaps: World | None) -> Generator[Microbatch, None, None]:
        """Hand one micro-batch to the user's code. Its backward pass starts the network if it
        `overlaps` with a world."""
        self.trace.mark.enter("load", f"micro-batch {microbatch}", indices)
        with self.user_code(microbatch), self.trace.span("load", microbatch=microbatch):
            batch = self._open(step, microbatch, indices)
        if self.error is not None:
            return
        phase = f" (phase {self.job.phases[self.state.phase]})" if self.state.phases > 1 else ""
        in_hand = Microbatch(f"micro-batch {microbatch} of step {step}{phase}", batch,
                             partial(self._backward, step, microbatch, indices, overlaps),
                             self.flat.tally)
        self._handed_ns = self.trace.now()
        self.trace.mark.enter("forward", f"micro-batch {microbatch}", indices)
        self.number = microbatch  # the one in hand, if the user's loop is left here
        yield in_hand
        with self.user_code(microbatch):
            in_hand.settle()
            self._close(step, microbatch)

    def _open(self, step: int, microbatch: int, indices: numpy.ndarray) -> Any:
        job, phase = self.job, self.state.phase
        self._reopen()
        key = step, phase, microbatch
        ahead = keys_after(key, job.schedule, self.mine, self.state.phases)
        batch = job.readers.training.batch(seed_of(job.schedule, step, microbatch, phase), key,
                                           ahead, self._require_peers, indices)
        self.flat.gradients.open()
        self.scaling.open()
        return batch

    def _reopen(self) -> None:
        """Put back what the forward pass of the micro-batch before has changed, if there was
        one. Extra state is put back in any case: to set what was got may change it."""
        is_first, self._is_as_begun = self._is_as_begun, False
        has_extra = bool(self.state.extra_state.modules)
        if is_first and not has_extra:
            return
        if has_extra:
            self.flat.gradients.check_parameters()
        self.state.reopen()
        if has_extra:
            self.flat.gradients.begin()  # set_extra_state may have written to parameters

    def _require_peers(self) -> None:
        if self._is_broken():
            raise PeersLost("a member is gone: this step cannot pass the vote")

    def _backward(self, step: int, microbatch: int, indices: numpy.ndarray, overlaps: World | None,
                  loss: Any, count: Any) -> None:
        self.trace.add("forward", self._handed_ns, microbatch=microbatch)
        job, flat = self.job, self.flat
        weight = job.schedule.microbatch_weight(step, microbatch)
        loss = require_scalar(loss, job.words)
        value = loss.detach()
        self.losses[microbatch] = (value, indices)
        flat.gradients.check_untouched()
        self._follow_requires_grad()
        self.scaling.check()
        is_sum = count is not None  # it is divided when all micro-batches have counted
        flat.gradients.weigh_rest(1.0 if is_sum else weight)
        buffers = self.state.model_buffers
        if moved := buffers.moved(after := buffers.now()):
            raise RuntimeError(
                f"forward has changed the buffers {some(moved.values())} in step {step}. "
                f"{BUFFERS_STAY}")
        flat.add_statistics(weight, value, buffers.before, after, is_sum=is_sum)
        self.values.keep(after)
        if overlaps:
            self.reducer.overlap(TracedWorld(overlaps, self.trace))
        self.trace.mark.enter("backward", f"micro-batch {microbatch}", indices)
        with self.trace.span("backward", microbatch=microbatch):
            try:
                self.scaling.backward(loss if is_sum else loss * weight)
            except RuntimeError:
                flat.gradients.check_parameters()  # torch does not name what was changed
                raise
        flat.gradients.note_left()
        self.values.note()

    def _close(self, step: int, microbatch: int) -> None:
        try:
            self.flat.close_microbatch()
        except GradientsWritten as error:
            if not self.reducer.has_sent():
                raise
            raise RuntimeError(
                f"a hook, or code after the backward pass, has changed .grad in step {step}, "
                f"after a part of it was sent. Let a hook do so from the first batch on"
                f"{self._other_reducer}. {CLIP}") from error
        self.values.check(self.state.model_buffers.adopt())
        self.left.keep(f"micro-batch {microbatch} of step {step}", microbatch == self._first)

    def _follow_requires_grad(self) -> None:
        """Train those parameters that require a gradient now: the user's code may have changed
        which."""
        flat, trained = self.flat, self.flat.gradients.trained_now()
        if trained == flat.trained:
            return
        if flat.microbatches_run:
            names = [name for name, now, was in zip(flat.names, trained, flat.trained, strict=True)
                     if now != was]
            raise RuntimeError(
                f"requires_grad of {some(names)} differs between two micro-batches of step "
                f"{self.state.committed}, so the gradient would depend on the number of workers. "
                f"{self._remedy_for_changes()}")
        self.reducer.lay_out(trained)

    def send(self, world: World) -> None:
        """Start to send what is not on its way, without waiting for it."""
        self.reducer.send(TracedWorld(world, self.trace))

    def reduce(self, world: World) -> None:
        """Wait for the sum of all gradients. If workers train different parameters, all have the
        user's error."""
        flat, self.is_reduced = self.flat, False
        try:
            self.reducer.finish(TracedWorld(world, self.trace))
            self.flat.copy_facts()
            self.is_reduced = True
        except SetsDiffer:
            trained = [name for name, is_trained in zip(flat.names, flat.trained, strict=True)
                       if is_trained]
            mine = [trained, flat.tally.names] if flat.microbatches_run else None
            found = [names for names in map(json.loads, world.gather_texts(json.dumps(mine)))
                     if names]
            self.error = self.error or RuntimeError(_difference(
                self.state.committed, self._remedy_for_changes(), *zip(*found, strict=True)))

    def share(self, from_first: Callable[[str], str], world: World) -> None:
        """Give all workers what the step's first micro-batch has left in modules, and all
        micro-batches in buffers. Network, if there is any: one exchange each."""
        mark = self.flat.mark() if world.size > 1 else self.left.mark
        try:
            self.left.share(mark if self.is_reduced else NOT_RUN, from_first)
        except RuntimeError as error:
            self.error = self.error or error
        self.values.share(world, self.reducer.owned)

    def _remedy_for_changes(self) -> str:
        words = self.job.words
        return f"Change it {words.after}, or {words.inside} as a function of the step's number."

    def raise_if_failed(self, failed_rank: int, world: World) -> None:
        """Raise an exception of the user's code on all workers, if a vote has reported one.

        `failed_rank` is the first worker whose code has raised; -1: none.
        """
        if failed_rank < 0:
            return
        error = self.error
        text = "".join(traceback.format_exception(error)) if error else ""
        text = world.share_text(text, failed_rank)
        self.state.restore()
        if error:
            raise error
        raise PeerFailed(f"rank {failed_rank} failed in step {self.state.committed}:\n{text}")

    @contextmanager
    def user_code(self, microbatch: int = -1) -> Iterator[None]:
        """Keep what the user's code raises for the vote (rule 2). No generator may yield in
        here."""
        self.number = microbatch
        try:
            yield
            self.number = -1
        except (*OF_THE_LOOP, KeyboardInterrupt):
            self.number = -1
            raise
        except BaseException as error:  # sys.exit() too
            if self._leaves_alone(error):
                raise
            self.error = error


def _difference(step: int, remedy: str, trained: Sequence[Sequence[str]],
                logged: Sequence[Sequence[str]]) -> str:
    """Return what differs between the workers: the parameters that each trains, or the names that
    each logs."""
    everything = {name for names in trained for name in names}
    if differ := {name for name in everything if any(name not in names for names in trained)}:
        return (f"requires_grad of {some(sorted(differ))} differs between workers in step {step}. "
                f"{remedy}")
    return (f"the workers log different names: {', '.join(sorted(set(map(str, logged))))}. Log the "
            f"same names on each worker, from the first batch on.")

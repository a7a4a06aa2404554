"""The loop of one worker: `steps` reads as the promise does.

job → warm-up → world (generation after generation) → here: micro-batches → reduce → vote → apply →
the user's code → checkpoint

What always holds:
1. Where training is follows from the number of finished steps alone (schedule.py).
2. Nothing that outlives a step changes before every worker holds the step's gradient. Then
   everything changes together.
3. Behind each finished step the user's code runs, once, up to the inner loop of the next step. Then
   come checkpoints and changes of the world. So whatever is copied is copied at the beginning of a
   step, after the same code on every worker.

What it does not do: run the user's code. It yields moves (moves.py), and trainer.py hands them to
the user's loop.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from elastic_trainer.config import Launch
from elastic_trainer.evaluate.evaluation import Evaluations
from elastic_trainer.events import summary as report
from elastic_trainer.events.log import Events
from elastic_trainer.reduce.flat import Flat
from elastic_trainer.reduce.sending import Sending
from elastic_trainer.schedule.schedule import owner_of
from elastic_trainer.state.checkpoint import Plan
from elastic_trainer.state.names import named_parameters
from elastic_trainer.training import modes_differ
from elastic_trainer.training.account import Account, is_finished
from elastic_trainer.training.after_step import Behind
from elastic_trainer.training.apply import StepEnd, weights_sha256
from elastic_trainer.training.checkpointing import Checkpointing, open_checkpoints
from elastic_trainer.training.failures import fault_of_machine
from elastic_trainer.training.going_back import GoingBack
from elastic_trainer.training.job import Job, Result, describe
from elastic_trainer.training.job_state import Keeping, reducer_of, state_of
from elastic_trainer.training.microbatches import Microbatches
from elastic_trainer.training.moves import Begun, Move
from elastic_trainer.training.scaling import Scaling
from elastic_trainer.training.stop_request import Wish
from elastic_trainer.training.successor import Successor
from elastic_trainer.training.timing import Pace
from elastic_trainer.training.warm_up import WarmUp
from elastic_trainer.world.collectives import PeersLost
from elastic_trainer.world.generations import Generations, Hooks, WorldChanged
from elastic_trainer.world.place import Driver, RunOver
from elastic_trainer.world.replicas import Part, Replica, checksum
from elastic_trainer.world.vote import Ballot, CheckpointBallot, Outcome


class Loop:
    """One worker's training: the loop and what it works on."""

    def __init__(self, job: Job, launch: Launch, driver: Driver, events: Events, reduce: str,
                 sending: Sending, plan: Plan | None = None, wish: Wish | None = None):
        self.job, self.launch, self.driver, self.events = job, launch, driver, events
        self.reduce, self.wish = reduce, wish or Wish(job.best)
        self.state = state_of(job, reduce, sending)
        self._settings = self.state.settings
        """Those that the job was built with. A checkpoint brings others."""
        self.replica = Replica(self.state)
        self.flat = Flat(named_parameters(job.model), self.state.buffers, job.device,
                         len(self.state.modes), job.buffers)
        self.reducer = reducer_of(reduce, self.flat, job, sending, self.state, events)
        plan = replace(plan or Plan(), compared_after=self.replica.slices if launch.horovod else 0)
        self.checkpointing = Checkpointing(open_checkpoints(launch, plan, events, describe(job)),
                                           self.state, driver, launch, events)
        self.going_back = GoingBack(self.state, self.replica, self.checkpointing, launch, events,
                                    self.wish)
        self.generations = Generations(launch, driver, events, self.hooks())
        self.world = self.generations.world
        self.account = Account(job, self.state, launch, events, reduce, plan.every)
        self.behind = Behind(self.state, self.flat.gradients, self.account.steps_due,
                             Evaluations(lambda: self.world, driver.is_broken, events, launch))
        self.successor = Successor(self.state, self.flat, self.reducer, self.behind)
        scaling = Scaling(job.scaler, self.flat.gradients)
        self.microbatches = Microbatches(job, self.state, self.flat, self.reducer, scaling,
                                         self.fault_of_machine, driver.is_broken, events.trace)
        self.end = StepEnd(job, self.state, self.flat, events)
        self.warm_up = WarmUp(job, self.state, self.flat, self.reducer, self.replica, scaling)
        self._keeping = Keeping(self.state)
        self.has_joined = False
        """True from this worker's first step on."""
        self._microbatch_s = 0.0  # how long a micro-batch takes on this worker, by the warm-up

    def hooks(self) -> Hooks:
        """Return what the life of generations asks of this loop."""
        checkpointing, microbatches = self.checkpointing, self.job.schedule.microbatches
        return Hooks(
            all_parts=self.replica.all_parts,
            part_from_outliers=lambda held, among: self.going_back.part(self.world, held, among),
            expected_step_s=lambda size: self._microbatch_s * -(-microbatches // size),
            write_alone=self._write_while_waiting, published=checkpointing.newest_step,
            is_moving=checkpointing.is_moving, is_saving=checkpointing.is_saving,
            owes=lambda: self.behind.owes(), attend=lambda: self.behind.evaluations.attend())

    def moves(self, has_begun: bool = True) -> Generator[Move, None, Result]:
        """Warm up, stand ready, and train in generation after generation. A run that is known to be
        finished needs no warm-up: the user's loop has not begun a step."""
        if has_begun and not is_finished(self.launch.run_dir, self.job.schedule.steps):
            yield from self._warm_up()
        if self.successor.take_up(self.launch.revived_from):
            self.events.emit("worker.revived", step=self.state.committed)
        if self.driver.drains_on_sigterm:
            signal.signal(signal.SIGTERM, lambda *_: self.driver.drain())
        try:
            yield from self.generations.run(
                self.state, self.steps, restore=self._restore, roll_forward=self.end.apply,
                hand_over=self.behind.hand_over, live_state=self.successor.leave)
        except RunOver as over:
            self._end_with(over)
        state = self.state
        self.driver.report(phase="finished", step=state.committed)
        result = Result(steps=state.committed, samples=state.samples, loss=state.loss,
                        model=self.job.model, weights_sha256=weights_sha256(state),
                        rank=self.world.rank, average=self.job.average, best=self.job.best)
        if has_begun:
            yield from self.behind.show_last()
        return result

    def _warm_up(self) -> Generator[Move, None, None]:
        warm = yield from self.warm_up.run(is_exact=self.reduce == "exact")
        self.generations.arithmetic, self._microbatch_s = warm.arithmetic, warm.microbatch_s
        self.account.prove(warm.arithmetic.proof, self._settings)
        if checkpoints := self.checkpointing.checkpoints:
            checkpoints.publisher.facts["arithmetic"] = warm.arithmetic.to_dict()

    def _end_with(self, over: RunOver) -> None:
        """End as the driver has ended the attempt. Returns if the run is finished, else raises."""
        if over.verdict in ("failed", "interrupted"):
            if self.behind.is_at_begin():
                self.checkpointing.write_last(self.world.rank)
            self.driver.report(step=self.state.committed)
        # Finished: another worker saw the last vote pass, and this one has applied the last step.
        if over.verdict != "finished" or self.state.committed < self.account.steps_due():
            raise over

    # --- the loop ---------------------------------------------------------------------------------

    def steps(self) -> Iterator[Move]:
        """Do all steps that are left; entered again in every generation."""
        # It has more than 40 lines, because a step is to be read in one piece.
        state, world, checkpointing = self.state, self.world, self.checkpointing
        pace, is_entered = self._enter(), True
        while not self.behind.is_over():
            step = state.committed
            if is_entered:
                yield Begun(step, state.phase)
            if is_entered or state.phase == 0:
                started = time.monotonic()
            is_entered = False
            # The user's code, once for each micro-batch.
            samples, digest = yield from self.microbatches.run(step, world, checkpointing.fenced)
            computed = time.monotonic()
            self.events.reach("step.computed", step=step)
            held = self._reduce(step)  # network: the gradients, once
            self.events.reach("step.prepared", step=step)
            if not self.events.flush():
                raise PeersLost("the driver has not taken the line of the step before")
            checkpointing.tick(world.rank)
            control = self._vote(step, self._ballot(samples, digest, held))  # network: one message
            self.events.reach("step.voted", step=step)
            voted = time.monotonic()
            self.microbatches.raise_if_failed(control.failed_rank, world)
            if control.modes_differ:
                modes_differ.refuse(state, world)
            if control.differs:  # this leaves the loop, unless the user allows mixed machines
                self.generations.settle_difference(step, held, range(world.size))
            self.end.judge_loss(step, self.microbatches, world)
            self.end.apply(*control.totals)  # all that outlives the step, together
            self.events.reach("step.applied", step=step)
            if state.phase == 0:
                self._note_step(step, time.monotonic() - started, voted - computed, pace)
            yield from self.behind.hand_over()  # the user's code, up to the next inner loop
            self._keeping.step()
            self.events.reach("step.handed_over", step=step)
            with state.modes.to_copy(is_last=self.behind.is_over()):
                checkpointing.obey(control, world)  # one copy; the store works behind the training
                checkpointing.publish_best(self.job.best, world, self._vote_on_checkpoint)
                self.events.reach("step.ended", step=step)
                if state.phase == 0:
                    self._obey(control)  # may leave the loop: the world changes between steps only
        self._finish()

    def _enter(self) -> Pace:
        """Begin a generation."""
        state, world = self.state, self.world
        self.account.enter(world)
        # The former rank 0 may have died before its line was sent. Between two phases it was sent.
        if state.committed and state.phase == 0:
            self._log_committed(state.committed - 1, 0.0, repeated=True)
        self.checkpointing.enter()
        self.behind.enter()
        self.has_joined = True
        with state.modes.to_copy(is_last=self.behind.is_over()):
            self.checkpointing.publish_best(self.job.best, world, self._vote_on_checkpoint)
        return Pace(self.events)

    def _reduce(self, step: int) -> list[Part]:
        """Sum the gradients of all workers, and return the checksums of my slice of the state."""
        self.reducer.send(self.world)
        held = self.replica.parts(step)  # while the gradients are on their way
        self.microbatches.reduce(self.world)
        self.microbatches.share(partial(self._from_first_microbatch, step), self.world)
        self.state.prepare()
        return held

    def _from_first_microbatch(self, step: int, text: str) -> str:
        """Send the text of the worker that has run the step's first micro-batch to all workers."""
        numbers = self.job.schedule
        owner = owner_of(numbers.first_microbatch(step), self.world.size, numbers.microbatches)
        return self.world.share_text(text, owner)

    def _ballot(self, samples: int, digest: int, held: list[Part]) -> Ballot:
        """Return this worker's ballot. A checkpoint begins at the end of a step only."""
        checkpoint, is_last = (self.checkpointing.ballot(self.world.rank),
                               self.state.phase + 1 == self.state.phases)
        return Ballot(
            samples=samples, digest=digest, checksum=checksum(held),
            modes=self.state.modes.checksum() ^ self.state.attributes.checksum(),
            clock_ms=self.behind.clock_ms(), finishes=self.wish.reason is not None,
            checkpoint=checkpoint if is_last else replace(checkpoint, is_wanted=False))

    def _vote(self, step: int, ballot: Ballot) -> Outcome:
        has_failed = self.microbatches.error is not None
        return self.generations.vote(step, replace(ballot, has_failed=has_failed))

    def _note_step(self, step: int, step_s: float, waited_s: float, pace: Pace) -> None:
        self.generations.note_step(step, step_s)
        self._log_committed(step, step_s, **self.checkpointing.timing.taken())
        self.checkpointing.note_step(step_s)
        if self.world.rank == 0:
            pace.step(step, step_s, waited_s)

    def _log_committed(self, step: int, step_s: float, **more: Any) -> None:
        self.driver.note("training", self.state.committed)
        self.account.step_committed(step, step_s, self.end, self.world.rank, **more)

    def _obey(self, control: Outcome) -> None:
        """End the generation, or the attempt, if the vote has decided so."""
        if control.stop or control.all_drain:  # nothing of the run may be lost with its workers
            self.checkpointing.publish_now(self.world, self._vote_on_checkpoint,
                                           instead=2 * control.uploaded < self.world.size)
        if control.stop:
            raise RunOver("interrupted", f"stopped after step {self.state.committed}")
        if control.change:
            self._keeping.require()  # whoever joins receives the state
            raise WorldChanged

    # --- around the loop --------------------------------------------------------------------------

    def fault_of_machine(self, error: BaseException) -> str:
        """Return what of this machine has failed, if others can go on; else ""."""
        return fault_of_machine(error, self.driver, self.world.size)

    def _write_while_waiting(self) -> None:
        if self.behind.is_at_begin():
            self.checkpointing.write_while_waiting()

    def _restore(self) -> str:
        """Begin with the values of the newest checkpoint, or those that rank 0 was built with."""
        self.account.begin(self.world.rank, self.flat.gradients.sparse)
        step = self.checkpointing.restore(self.world)  # the store
        self.account.require_length(step)
        self.state.has_state, self.state.received = step is not None or self.world.rank == 0, -1
        self.going_back.restored_step = step or 0
        self.behind.go_back()
        if step:
            self.account.resumed(step, self._settings, self.world.rank)
        if step is not None and self.checkpointing.checkpoints and self.world.rank == 0:
            self.account.compare_with_writer(step, self.generations.arithmetic,
                                             self.checkpointing.checkpoints.restored)
        return "fresh" if step is None else "checkpoint"

    def _vote_on_checkpoint(self, ballot: CheckpointBallot) -> Outcome:
        """Vote on the last checkpoint, after the last step. All workers raise what ends the run."""
        self.microbatches.error = self.checkpointing.fenced
        control = self._vote(self.state.committed, Ballot(checkpoint=ballot))
        self.microbatches.raise_if_failed(control.failed_rank, self.world)
        return control

    def _finish(self) -> None:
        """Make the result durable, then agree that the run is over: exit code 0 comes after this
        vote (F11)."""
        state, world = self.state, self.world
        # Also the slices that no vote has compared since the last steps.
        held = self.replica.all_parts() if world.size > 1 else []
        if self.generations.vote(state.committed, Ballot(checksum=checksum(held))).differs:
            self.generations.settle_difference(state.committed, held, range(world.size))
        with state.modes.to_copy(is_last=True):
            self.checkpointing.publish_last(world, self._vote_on_checkpoint)
        self.account.finish(world, self.wish.reason)
        if world.rank == 0:
            self.events.emit("run.finished", steps=state.committed, samples=state.samples,
                             loss=state.loss, weights_sha256=weights_sha256(state),
                             planned_steps=self.job.schedule.steps)
            self.events.flush()
            if self.launch.run_dir:
                report.write_result(self.launch.run_dir)
        self.generations.vote(state.committed, Ballot())

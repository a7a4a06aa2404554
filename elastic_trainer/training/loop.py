"""The loop of one worker: `steps` reads as the promise does.

job → warm-up → world (generation after generation) → here: micro-batches → reduce → vote → apply →
the user's code → checkpoint

What always holds: after each finished step the user's code runs, once, up to the inner loop of the
next step. Then come checkpoints and changes of the world. So whatever is copied is copied at the
beginning of a step, after the same code on every worker.

What it does not do: run the user's code. It yields stages (stages.py), and trainer.py hands them to
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
from elastic_trainer.reduce.ring import Sending
from elastic_trainer.state.checkpoints.checkpoint import Plan
from elastic_trainer.state.live_state import own_tensors
from elastic_trainer.training.account import Account, is_finished
from elastic_trainer.training.after_step import AfterStep, StopRequest
from elastic_trainer.training.checkpointing import Checkpointing, open_checkpoints
from elastic_trainer.training.commit_step import StepEnd, weights_sha256
from elastic_trainer.training.differing import GoingBack, refuse_differing_modules
from elastic_trainer.training.failures import (
    fault_of_machine,
    is_out_of_memory,
    raise_if_failed,
)
from elastic_trainer.training.job.job import Job, Result, describe
from elastic_trainer.training.microbatches import Microbatches
from elastic_trainer.training.shard_watch import log_memory
from elastic_trainer.training.sharded import place_shards
from elastic_trainer.training.sharded_average import gathered_average, keep_whole
from elastic_trainer.training.stages import Begun, Stage
from elastic_trainer.training.timing import Pace
from elastic_trainer.training.warm_up import WarmUp
from elastic_trainer.training.work import Work
from elastic_trainer.world.collectives import PeersLost
from elastic_trainer.world.generations import Generations, Hooks, WorldChanged
from elastic_trainer.world.place import MAX_ERROR_CHARACTERS, Driver, RunOver
from elastic_trainer.world.replicas import Part, checksum
from elastic_trainer.world.vote import Ballot, CheckpointBallot, Outcome


class Loop:
    """One worker's training: the loop and what it works on."""

    def __init__(self, job: Job, launch: Launch, driver: Driver, events: Events, reduce: str,
                 sending: Sending, plan: Plan | None = None,
                 stop_request: StopRequest | None = None):
        self.job, self.launch, self.driver, self.events = job, launch, driver, events
        self.stop_request = stop_request or StopRequest(job.best)
        self.work = proved(Work(job, reduce, sending, events), launch)
        self.state, self.replica = self.work.state, self.work.replica
        # a step: micro-batches → reduce → apply
        self.microbatches = Microbatches(self.work, self.leaves_alone, driver.is_broken)
        self.end = StepEnd(self.work)
        self.warm_up = WarmUp(self.work)
        # what survives
        plan = replace(plan or Plan(), compared_after=self.replica.slices if launch.horovod else 0)
        self.checkpointing = Checkpointing(open_checkpoints(launch, plan, events, describe(job)),
                                           self.state, driver, launch, events)
        self.going_back = GoingBack(self.work, self.checkpointing, launch, self.stop_request.forget)
        # who is here
        self.generations = Generations(launch, driver, events, hooks_of(self))
        self.world = self.generations.world
        self.account = Account(self.work, launch, plan.every)
        self.after_step = AfterStep(self.work, self.account.steps_due, evaluations_of(self))
        self.has_joined = False
        """True from this worker's first step on."""
        self._microbatch_s = 0.0  # how long a micro-batch takes on this worker, by the warm-up

    def stages(self, has_begun: bool = True) -> Generator[Stage, None, Result]:
        """Warm up, stand ready, and train in generation after generation. A run that is known to be
        finished needs no warm-up: the user's loop has not begun a step."""
        if has_begun and not is_finished(self.launch.run_dir, self.job.schedule.steps):
            yield from self._warm_up()
        if self.after_step.take_up(self.launch.revived_from):
            self.events.emit("worker.revived", step=self.state.committed)
        if self.driver.drains_on_sigterm:
            signal.signal(signal.SIGTERM, lambda *_: self.driver.drain())
        try:
            yield from self.generations.run(
                self.state, self.steps, restore=self._restore, roll_forward=self.end.apply,
                hand_over=self.after_step.hand_over, live_state=self.after_step.leave)
        except RunOver as over:
            self._end_with(over)
        state = self.state
        self.driver.report(phase="finished", step=state.committed)
        result = Result(steps=state.committed, samples=state.samples, loss=state.loss,
                        model=self.job.model, weights_sha256=weights_sha256(state),
                        rank=self.world.rank, average=self.job.average, best=self.job.best)
        if has_begun:
            yield from self.after_step.show_last()
        return result

    def _warm_up(self) -> Generator[Stage, None, None]:
        warm = yield from self.warm_up.run(is_exact=self.work.reduce == "exact")
        self.generations.arithmetic, self._microbatch_s = warm.arithmetic, warm.microbatch_s
        self.account.prove(warm.arithmetic.proof, self.work.built_settings)
        if checkpoints := self.checkpointing.checkpoints:
            checkpoints.publisher.facts["arithmetic"] = warm.arithmetic.to_dict()

    def _end_with(self, over: RunOver) -> None:
        """End as the driver has ended the attempt. Returns if the run is finished, else raises."""
        if over.verdict in ("failed", "interrupted"):
            if self.after_step.is_at_begin():
                self.checkpointing.write_last(self.world.rank)
            self.driver.report(step=self.state.committed)
        # Finished: another worker saw the last vote pass, and this one has applied the last step.
        is_over = over.verdict == "finished" and self.state.committed >= self.account.steps_due()
        if not is_over or lacks_parts(self):
            raise over

    # --- the loop ---------------------------------------------------------------------------------

    def steps(self) -> Iterator[Stage]:
        """Do all steps that are left; entered again in every generation."""
        # It has more than 40 lines, because a step is to be read in one piece.
        state, world, checkpointing = self.state, self.world, self.checkpointing
        pace, is_entered = self._enter(), True
        while not self.after_step.is_over():
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
                refuse_differing_modules(state, world)
            self._settle(control, step, held)  # this may leave the loop
            self.end.judge_loss(step, self.microbatches.losses, world)
            self.end.apply(*control.totals)  # all that outlives the step, together
            self.events.reach("step.applied", step=step)
            self.end.complete(world)  # network: the new parameters, if the gradients are sharded
            if state.phase == 0:
                self._note_step(step, time.monotonic() - started, voted - computed, pace)
            yield from self.after_step.hand_over()  # the user's code, up to the next inner loop
            self.work.note_step()
            self.events.reach("step.handed_over", step=step)
            with state.modes.to_copy(is_last=self.after_step.is_over()):
                checkpointing.obey(control, world)  # one copy; the store works beside the training
                checkpointing.publish_best(self.job.best, world, self._vote_on_checkpoint)
                self.events.reach("step.ended", step=step)
                if state.phase == 0:
                    self._obey(control)  # may leave the loop: the world changes between steps only
        self._finish()

    def _enter(self) -> Pace:
        state, world = self.state, self.world
        self.account.enter(world)
        # The former rank 0 may have died before its line was sent. Between two phases it was sent.
        if state.committed and state.phase == 0:
            self._log_committed(state.committed - 1, 0.0, repeated=True)
        self.checkpointing.enter()
        self.after_step.enter()
        self.has_joined = True
        with state.modes.to_copy(is_last=self.after_step.is_over()):
            self.checkpointing.publish_best(self.job.best, world, self._vote_on_checkpoint)
        return Pace(self.events)

    def _reduce(self, step: int) -> list[Part]:
        """Sum the gradients of all workers, and return the checksums of my slice of the state."""
        self.microbatches.send(self.world)
        # Computed while the gradients are on their way.
        held = self.replica.start(step, is_alone=self.world.size == 1)
        self.microbatches.reduce(self.world)
        self.microbatches.share(partial(self._from_first_microbatch, step), self.world)
        parts = held()
        self.end.prepare(self.world, self.microbatches)  # network, if the optimizer is sharded
        self.state.prepare()
        return parts

    def _from_first_microbatch(self, step: int, text: str) -> str:
        """Send the text of the worker that has run the step's first micro-batch to all workers."""
        owner = self.work.reducer.owner(self.job.schedule.first_microbatch(step), self.world.size)
        return self.world.share_text(text, owner)

    def _ballot(self, samples: int, digest: int, held: list[Part]) -> Ballot:
        checkpoint, is_last = (self.checkpointing.ballot(self.world.rank),
                               self.state.phase + 1 == self.state.phases)
        return Ballot(
            samples=samples, digest=digest, checksum=checksum(held),
            shards=self.replica.shards_sum(self.state.committed),
            modes=self.state.modes.checksum() ^ self.state.attributes.checksum(),
            clock_ms=self.after_step.clock_ms(), finishes=self.stop_request.reason is not None,
            checkpoint=checkpoint if is_last else replace(checkpoint, is_wanted=False))

    def _vote(self, step: int, ballot: Ballot) -> Outcome:
        has_failed = self.microbatches.error is not None
        return self.generations.vote(step, replace(ballot, has_failed=has_failed))

    def _settle(self, control: Outcome, step: int, held: list[Part]) -> None:
        """Leave the loop if workers hold other bits, unless the user allows mixed machines."""
        if control.differs:
            self.generations.settle_difference(step, held, range(self.world.size))
        if control.shards_differ and not self.generations.mixture.is_mixed:
            self.going_back.part_shards(self.world)

    def _note_step(self, step: int, step_s: float, waited_s: float, pace: Pace) -> None:
        self.work.fit.done = max(self.work.fit.done, len(self.microbatches.mine))
        self.generations.note_step(step, step_s)
        self._log_committed(step, step_s, **self.checkpointing.timing.taken())
        self.checkpointing.note_step(step_s)
        log_memory(self.world, self.work, self.launch, self.events)
        if self.world.rank == 0:
            pace.step(step, step_s, waited_s)

    def _log_committed(self, step: int, step_s: float, **more: Any) -> None:
        self.driver.note("training", self.state.committed)
        self.account.step_committed(step, step_s, self.world.rank, self.end.metrics,
                                    self.end.is_skipped(self.state.loss), **more)

    def _obey(self, control: Outcome) -> None:
        if control.stop or control.all_drain:  # nothing of the run may be lost with its workers
            self.checkpointing.publish_now(self.world, self._vote_on_checkpoint,
                                           instead=2 * control.uploaded < self.world.size)
        if control.stop:
            raise RunOver("interrupted", f"stopped after step {self.state.committed}")
        if control.change:
            self.work.require_kept()  # whoever joins receives the state
            raise WorldChanged

    # --- around the loop --------------------------------------------------------------------------

    def fault_of_machine(self, error: BaseException) -> str:
        """Return what of this machine has failed, if others can go on; else ""."""
        return fault_of_machine(error, self.driver, self.world.size)

    def leaves_alone(self, error: BaseException) -> bool:
        """Return whether an error concerns this worker alone, and the others go on."""
        return bool(self.fault_of_machine(error)) or lacks_memory(self, error)

    def _write_while_waiting(self) -> None:
        if self.after_step.is_at_begin():
            self.checkpointing.write_while_waiting()

    def _restore(self) -> str:
        """Begin with the values of the newest checkpoint, or those that rank 0 was built with."""
        self.account.begin(self.world.rank, self.work.flat.gradients.sparse)
        step = self.checkpointing.restore(self.world)  # the store
        self.account.require_possible(step)
        self.state.received = -1
        self.going_back.restored_step = step or 0
        self.after_step.go_back()
        if step and self.state.has_state:  # else this worker receives it from one with the base
            self.account.resumed(step, self.work.built_settings, self.world.rank)
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
        control = self.generations.vote(state.committed, Ballot(
            checksum=checksum(held), shards=self.replica.shards_sum(None)))
        self._settle(control, state.committed, held)
        with state.modes.to_copy(is_last=True):
            self.work.require_kept()  # a value of the last step: no step after it finds it
            self.checkpointing.publish_last(world, self._vote_on_checkpoint)
        self.account.finish(world, self.stop_request.reason)
        keep_whole(world, self.work)  # network, if there is an average in parts
        if world.rank == 0:
            self.events.emit("run.finished", steps=state.committed, samples=state.samples,
                             loss=state.loss, weights_sha256=weights_sha256(state),
                             planned_steps=self.job.schedule.steps)
            self.events.flush()
            if self.launch.run_dir:
                report.write_result(self.launch.run_dir)
        self.generations.vote(state.committed, Ballot())


def proved(work: Work, launch: Launch) -> Work:
    """Take what the script has built as frozen content, where other workers may have it."""
    frozen, asked = work.state.frozen, work.job.carry_frozen
    if not launch.horovod:
        frozen.carries = "always"
    elif launch.driver or asked != "never":
        frozen.carries = asked
    # Under plain horovodrun a process goes back to a checkpoint, with what it has changed.
    if frozen.carries != "always":
        frozen.prove(own_tensors(work.state))
    return work


def hooks_of(loop: Loop) -> Hooks:
    """Return what the life of generations asks of this loop."""
    checkpointing, microbatches = loop.checkpointing, loop.job.schedule.microbatches
    return Hooks(all_parts=loop.replica.all_parts, part_from_outliers=lambda held,
                 among: loop.going_back.part(loop.world, held, among),
                 expected_step_s=lambda size: loop._microbatch_s * -(-microbatches // size),
                 write_alone=loop._write_while_waiting, published=checkpointing.newest_step,
                 is_moving=checkpointing.is_moving, is_saving=checkpointing.is_saving,
                 needs=lambda: loop.work.fit.needs,
                 raise_if_device_failed=partial(raise_if_failed, loop.job.device),
                 owes=lambda: loop.after_step.owes(),
                 attend=lambda: loop.after_step.evaluations.attend(),
                 catch_up=lambda lacks: loop.end.catch_up(loop.world, lacks),
                 place_shards=lambda: place_shards(
                     loop.world, loop.state, loop.launch, loop.events))


def lacks_parts(loop: Loop) -> bool:
    """Return whether a worker that has applied the last step lacks what others have sent since."""
    shards, average = loop.state.shards, loop.job.average
    return shards is not None and (
        shards.behind is not None or (average is not None and average.lacks_parts))


def evaluations_of(loop: Loop) -> Evaluations:
    return Evaluations(lambda: loop.world, loop.driver.is_broken, loop.events, loop.launch,
                       lambda: gathered_average(loop.world, loop.work))


def lacks_memory(loop: Loop, error: BaseException) -> bool:
    """Return whether there was no memory for micro-batches that this worker has taken over, and it
    can restart."""
    state, mine = loop.state, len(loop.microbatches.mine)
    is_in_them = state.is_in_flight and not state.is_applying
    return (is_out_of_memory(error) and is_in_them and loop.generations.is_guarded
            and 0 < loop.work.fit.done < mine)


def restart_for_memory(loop: Loop, error: BaseException, text: str) -> None:
    """Restart this process, with its state, if it has no memory for what it has taken over. Returns
    if that is not the case."""
    if not lacks_memory(loop, error):
        return
    fit, mine, size = loop.work.fit, len(loop.microbatches.mine), loop.world.size
    meaning = fit.lack(mine, size)
    loop.events.emit("worker.out_of_memory", step=loop.state.committed, size=size,
                     microbatches=mine, fitted=fit.done, needs=fit.needs, meaning=meaning,
                     error=text[-MAX_ERROR_CHARACTERS:])
    loop.generations.start_anew(str(error)[:500], "memory")

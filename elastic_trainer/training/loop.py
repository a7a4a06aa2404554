"""The loop of one worker: `steps` reads as the promise does.

job → warm-up → world (generation after generation) → here: shards → reduce → vote → apply → the
user's code → checkpoint

What always holds:
1. Where training is follows from the number of finished steps alone (schedule.py).
2. Nothing that outlives a step changes before every worker holds the step's gradient; then
   everything changes together.
3. Behind each finished step the user's code runs, once. Then come checkpoints and changes of the
   world. So whatever is copied is copied at the beginning of a step, after the same code on every
   worker.

What it does not do: run the user's code. It yields moves (moves.py), and trainer.py hands them to
the user's loop.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.observe import report
from elastic_trainer.observe.events import Events
from elastic_trainer.schedule import owner_of
from elastic_trainer.state.checkpoint import Plan
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.names import named_parameters
from elastic_trainer.training.account import Account, is_finished
from elastic_trainer.training.apply import StepEnd, weights_sha256
from elastic_trainer.training.checkpointing import Checkpointing, open_checkpoints
from elastic_trainer.training.exact import ExactReducer
from elastic_trainer.training.failures import PeerFailed, fault_of_machine
from elastic_trainer.training.flat import Flat
from elastic_trainer.training.job import Job, Result, cut_of, describe
from elastic_trainer.training.moves import Begun, Finished, Move, PhaseFinished
from elastic_trainer.training.reduce import Reducer
from elastic_trainer.training.ring import RingReducer
from elastic_trainer.training.settings import (
    settings_of,
)
from elastic_trainer.training.shards import Shards
from elastic_trainer.training.timing import Pace
from elastic_trainer.training.warm_up import WarmUp
from elastic_trainer.world import revive
from elastic_trainer.world.collectives import PeersLost
from elastic_trainer.world.generations import Generations, Hooks, StateWithdrawn, WorldChanged
from elastic_trainer.world.odd import find_odd
from elastic_trainer.world.place import Driver, RunOver
from elastic_trainer.world.replicas import Part, Replica, ReplicasDisagree, checksum
from elastic_trainer.world.vote import Ballot, CheckpointBallot, Outcome


class Loop:
    """One worker's training: the loop and what it works on."""

    def __init__(self,
                 job: Job,
                 launch: Launch,
                 driver: Driver,
                 events: Events,
                 reduce: str,
                 compress: bool,
                 plan: Plan | None = None):
        self.job, self.launch, self.driver, self.events, self.reduce = job, launch, driver, events, reduce
        self.state = LiveState(
            job.model,
            job.optimizer,
            scaler=job.scaler,
            scheduler=job.scheduler,
            identity={
                "dataset_size": job.schedule.dataset_size,
                "global_batch": job.schedule.global_batch, "shards": job.schedule.shards,
                "seed": job.schedule.seed, "reduce": reduce
            } | cut_of(job.schedule))
        self.state.extras, self.state.phases = job.extras, len(job.phases)
        if compress and reduce == "exact":
            raise ConfigError(
                "compress is True, but reduce is 'exact', which sends what it sums as it is. Use "
                "reduce=\"ring\" (--reduce ring), or leave compress out.")
        self.settings = settings_of(job.optimizer,
                                    job.scheduler,
                                    job.scaler,
                                    clip_norm=job.clip_norm,
                                    compress=compress,
                                    on_nan=job.on_nan)
        self.state.settings = self.settings
        if job.scaler:
            # Makes its scale now, also where no shard is mine.
            job.scaler.scale(torch.zeros((), device=job.device))
        try:
            # Nothing is copied: what cannot be kept is said now, and not by each checkpoint.
            self.state.packed()
        except TypeError as error:
            raise ConfigError(
                f"{error}. Change what the state_dict of extras and of the schedule, "
                f"get_extra_state of the "
                f"modules, or the optimizer's groups, hold.") from error
        if lacking := self.state.extra_state.lacking:
            raise ConfigError(
                f"the modules of {lacking} have get_extra_state, but no set_extra_state. Give "
                f"them both."
            )
        self.replica = Replica(self.state)
        self.flat = Flat(named_parameters(job.model), self.state.buffers, job.device)
        shards = job.schedule.shards
        self.reducer: Reducer = (ExactReducer(self.flat, shards) if reduce == "exact"
                                 else RingReducer(self.flat, shards, compress=compress))
        plan = replace(plan or Plan(), compared_after=self.replica.slices if launch.horovod else 0)
        self.checkpointing = Checkpointing(open_checkpoints(launch, plan, events, describe(job)),
                                           self.state, driver, launch, events)
        self.generations = Generations(launch, driver, events, self.hooks())
        self.world = self.generations.world
        self._shard_s = 0.0
        """How long a shard takes here, as the warm-up has found."""
        self._restored_step = -1
        """The step with which this attempt began, as far as this worker was there: then all held
        the same bits."""
        self.shards = Shards(job, self.state, self.flat, self.reducer, self.fault_of_machine,
                             driver.is_broken)
        self.end = StepEnd(job, self.state, self.flat, events)
        self.warm_up = WarmUp(job, self.state, self.flat, self.reducer, self.replica)
        self.account = Account(job, self.state, launch, events, reduce)
        self._handed_over = -1
        """How many ticks were finished when the user's code last ran behind one; -1: not in this
        process."""
        self.has_joined = False
        """True from this worker's first step on."""
        self.finish_reason: str | None = None
        """Why the user's code on this worker asks to finish the run."""
        self._clock_at = 0.0
        """When the last phase was handed over."""
        self._runs_behind = False
        """True while the user's code runs behind a step: what it changes is then half changed."""

    def hooks(self) -> Hooks:
        """Return what the life of generations asks of this loop."""
        checkpointing = self.checkpointing
        return Hooks(
            all_parts=self.replica.all_parts, part_from_odd=self._part_from_odd,
            expected_step_s=self._expected_step_s, is_saving=checkpointing.is_saving,
            write_alone=self._write_while_waiting, is_moving=checkpointing.is_moving,
            published=checkpointing.newest_step)

    def _expected_step_s(self, size: int) -> float:
        return self._shard_s * -(-self.job.schedule.shards // size)

    def moves(self) -> Generator[Move, None, Result]:
        """Warm up, stand ready, and train in generation after generation. A run that is finished
        needs no warm-up."""
        job, state = self.job, self.state
        if not is_finished(self.launch.run_dir, job.schedule.steps):
            warm = yield from self.warm_up.run(is_exact=self.reduce == "exact")
            self.generations.arithmetic, self._shard_s = warm.arithmetic, warm.shard_s
            if self.checkpointing.checkpoints:
                self.checkpointing.checkpoints.publisher.facts[
                    "arithmetic"] = warm.arithmetic.to_dict()
        self._take_own_legacy()
        if self.driver.drains_on_sigterm():
            signal.signal(signal.SIGTERM, lambda *_: self.driver.drain())
        try:
            yield from self.generations.run(state,
                                            self.steps,
                                            restore=self._restore,
                                            roll_forward=self.end.apply,
                                            hand_over=self._hand_over,
                                            live_state=self._write_live_state)
        except RunOver as over:
            if over.verdict in ("failed", "interrupted"):
                if self._is_at_begin():
                    self.checkpointing.write_last(self.world.rank)
                self.driver.report_last_step(state.committed)
            if over.verdict != "finished" or state.committed < self.account.steps_due():
                # Finished: a peer has seen the last vote pass, and this worker had applied the last
                # step.
                raise
        self.driver.finish(state.committed)
        return Result(steps=state.committed,
                      samples=state.samples,
                      loss=state.loss,
                      model=job.model,
                      weights_sha256=weights_sha256(state),
                      rank=self.world.rank)

    # --- the loop ---------------------------------------------------------------------------------

    def steps(self) -> Iterator[Move]:
        """Do all steps that are left; entered again in every generation."""
        state, world = self.state, self.world
        self.account.enter(world)
        # The rank 0 before us may have died before it could write this.
        if state.committed and world.rank == 0:
            self._log_committed(state.committed - 1, 0.0, repeated=True)
        self.checkpointing.enter()
        pace = Pace(self.events)
        self.has_joined = True
        self._clock_at = self._clock_at or time.monotonic()
        # A newcomer has not run the code behind the steps that others did.
        self._handed_over = state.ticks
        is_entered = True
        while (step := state.committed) < self.account.steps_due():
            if is_entered or state.phase == 0:
                yield Begun(step, state.phase)
                started = time.monotonic()
            is_entered = False
            # The user's code.
            samples, digest = yield from self.shards.run(step, world, self.checkpointing.fenced)
            computed = time.monotonic()
            self.events.reach("step.computed", step=step)
            # Network: the gradients, once.
            self.reducer.send(world)
            # While they are on their way.
            held = self.replica.parts(step)
            self.shards.reduce(world)
            state.extra_state.share(partial(self._from_first_shard, step))
            state.prepare()
            self.events.reach("step.prepared", step=step)
            if not self.events.flush():
                raise PeersLost("the driver has not taken the line of the step before")
            self.checkpointing.tick(world.rank)
            control = self._vote(step,
                                 Ballot(
                                     samples=samples,
                                     digest=digest,
                                     checksum=checksum(held),
                                     clock_ms=self._clock_ms(),
                                     finishes=self.finish_reason is not None,
                                     checkpoint=self._checkpoint_ballot()))  # network: one message
            self.events.reach("step.voted", step=step)
            voted = time.monotonic()
            self._raise_if_failed(control.failed_rank)
            # Leaves the loop, mostly.
            if control.differs:
                self.generations.settle_difference(step, held, range(world.size))
            self.end.judge_loss(step, self.shards, world)
            self.end.apply(*control.totals)
            self.events.reach("step.applied", step=step)
            if state.phase == 0:
                step_s = time.monotonic() - started
                self.generations.note_step(step, step_s)
                self._log_committed(step, step_s)
                self.checkpointing.note_step(step_s)
                if world.rank == 0:
                    pace.step(step, step_s, voted - computed)
            # The user's code behind the step.
            yield from self._hand_over()
            # The store is behind us, but for one copy.
            self.checkpointing.obey(control, world)
            if state.phase:
                # The world changes at a step's end only.
                continue
            if control.stop or control.all_drain:
                # Nothing may be lost.
                self.checkpointing.publish_now(world, self._vote_on_checkpoint,
                                               instead=2 * control.uploaded < world.size)
            if control.stop:
                raise RunOver("interrupted", f"stopped after step {state.committed}")
            if control.change:
                # Somebody joins or leaves.
                raise WorldChanged
        self._finish()

    def _checkpoint_ballot(self) -> CheckpointBallot:
        """Return what this worker's vote says of checkpoints. One begins at the end of a step
        only."""
        ballot, is_last = self.checkpointing.ballot(
            self.world.rank), self.state.phase + 1 == self.state.phases
        return ballot if is_last else replace(ballot, is_wanted=False)

    def _clock_ms(self) -> int:
        """Return how long the run has trained."""
        return self.state.last_vote[2] + round(1000 * (time.monotonic() - self._clock_at))

    def _hand_over(self) -> Iterator[PhaseFinished | Finished]:
        """Yield the step, or the phase, that was applied, if the user's code has not yet run behind
        it."""
        state, ticks = self.state, self.state.ticks
        if -1 < self._handed_over < ticks:
            self._runs_behind, self._clock_at = True, time.monotonic()
            yield PhaseFinished(state.committed, state.phase -
                                1) if state.phase else Finished(state.committed - 1)
            self._runs_behind, self._handed_over = False, ticks

    def _is_at_begin(self) -> bool:
        """Return whether the state is that of a step's begin: the user's code has run behind all
        finished steps."""
        return self.state.phase == 0 and self._handed_over in (-1, self.state.ticks)

    def _vote(self, step: int, ballot: Ballot) -> Outcome:
        return self.generations.vote(step, replace(ballot, has_failed=self.shards.error
                                                   is not None))

    def _part_from_odd(self, held: list[Part], among: Sequence[int]) -> None:
        """End this generation: somebody's replica differs. Who is odd leaves; the others do the
        step again."""
        step = self.state.committed
        same_step = max(step - self.replica.slices, self._restored_step, 0)
        find_odd(self.world, self.launch, self.events, held, among, step=step, since_step=same_step)
        self._go_back(step, same_step)

    def _go_back(self, step: int, same_step: int) -> None:
        """Let nobody restore what was published after a step, all together, and drop the state."""
        left = self.checkpointing.withdraw(self.world, same_step)
        if left < 0 or (left == 0 and not self.launch.driver):
            raise ReplicasDisagree(
                f"the {self.world.size} workers hold different bits in step {step}, no majority "
                f"of them holds the same, "
                f"and no checkpoint of step {same_step} or before is left: each later one may "
                f"hold the wrong bits. The "
                f"hosts stand in the event worker.replica_differs: test their memory. Then start "
                f"the run anew under "
                f"another name (--run), with 3 or more workers: they find out whose bits are wrong."
            )
        raise StateWithdrawn(f"no majority holds the same bits in step {step}: back to step {left}")

    def _from_first_shard(self, step: int, text: str) -> str:
        """Give everybody the text of the worker that has run the step's first shard."""
        owner = owner_of(self.job.schedule.first_shard(step), self.world.size,
                         self.job.schedule.shards)
        return self.world.share_text(text, owner)

    def fault_of_machine(self, error: BaseException) -> str:
        """Return what of this machine has failed, if an exception says so and others can go on;
        else ""."""
        return fault_of_machine(error, self.driver, self.world.size)

    def _raise_if_failed(self, failed_rank: int) -> None:
        if failed_rank < 0:
            return
        error = self.shards.error
        text = "".join(traceback.format_exception(error)) if error else ""
        text = self.world.share_text(text, failed_rank)
        self.state.restore()
        if self.shards.error:
            raise self.shards.error
        raise PeerFailed(f"rank {failed_rank} failed in step {self.state.committed}:\n{text}")

    # --- around the loop --------------------------------------------------------------------------

    def _take_own_legacy(self) -> None:
        """Go on with the live state that this process left for itself when `hvd.init()` failed
        under it."""
        memory = self.launch.revived_from
        values = revive.read_live_state(memory) if memory is not None else None
        if values is None:
            return
        self.state.load(values["state"])
        self.state.begun, self.state.prepared = values["begun"], values["prepared"]
        self.state.take_up(values["buffers_before"])
        if values["gradients"]:
            self.reducer.lay_out(values["facts"]["trained"])
        self.state.extra_state.take_up(values["extra_state"])
        self._handed_over = values["facts"].get("handed_over", self.state.ticks)
        for name, tensor in values["gradients"].items():
            self.flat.sums[getattr(torch, name)].copy_(tensor)
        self.events.emit("worker.revived", step=self.state.committed)

    def _write_live_state(self) -> Any:
        if self._runs_behind:
            return None
        gradients = ({str(d).removeprefix("torch."): t for d, t in self.flat.sums.items()}
                     if self.state.is_prepared else {})
        return revive.write_live_state(self.state, gradients, {
            "trained": self.flat.trained, "handed_over": self._handed_over})

    def _write_while_waiting(self) -> None:
        if self._is_at_begin():
            self.checkpointing.write_while_waiting()

    def _restore(self) -> str:
        """Give the workers values although nobody has any: the newest checkpoint's, or those rank 0
        was built with."""
        self.account.begin(self.world.rank)
        step = self.checkpointing.restore(self.world)                           # the store
        if step is not None and step > self.job.schedule.steps:
            raise ConfigError(
                f"the run has a checkpoint of step {step}, but it is to have "
                f"{self.job.schedule.steps}. "
                f"Give as many steps as before (max_steps, epochs) or more, or another name "
                f"(--run)."
            )
        self.state.has_state = step is not None or self.world.rank == 0
        self._restored_step = step or 0
        self._handed_over = self.state.ticks
        if step:
            self.account.resumed(step, self.settings, self.world.rank)
        if step is not None and self.checkpointing.checkpoints and self.world.rank == 0:
            self.account.compare_with_writer(step, self.generations.arithmetic,
                                             self.checkpointing.checkpoints.restored)
        return "fresh" if step is None else "checkpoint"

    def _log_committed(self, step: int, step_s: float, **more: Any) -> None:
        self.driver.note("training", self.state.committed)
        if self.world.rank == 0:
            skipped = {"skipped": True} if self.end.is_skipped(self.state.loss) else {}
            self.account.step_committed(step, step_s, self.end.metrics, **skipped, **more)

    def _vote_on_checkpoint(self, ballot: CheckpointBallot) -> Outcome:
        """Vote on the last checkpoint, after the last step. Raises what ends the run, on all
        workers."""
        self.shards.error = self.checkpointing.fenced
        control = self._vote(self.state.committed, Ballot(checkpoint=ballot))
        self._raise_if_failed(control.failed_rank)
        return control

    def _finish(self) -> None:
        """Make the result durable, then agree that the run is over: exit code 0 comes after this
        vote (F11)."""
        state, world = self.state, self.world
        # Also what no vote has seen since the last steps.
        held = self.replica.all_parts() if world.size > 1 else []
        if self.generations.vote(state.committed, Ballot(checksum=checksum(held))).differs:
            self.generations.settle_difference(state.committed, held, range(world.size))
        self.checkpointing.publish_now(world, self._vote_on_checkpoint)
        if state.is_finished_early and state.committed < self.job.schedule.steps:
            self.account.finished_early(self.world, self.finish_reason)
        if self.world.rank == 0:
            self.events.emit("run.finished",
                             steps=state.committed,
                             samples=state.samples,
                             loss=state.loss,
                             weights_sha256=weights_sha256(state),
                             planned_steps=self.job.schedule.steps)
            self.events.flush()
            if self.launch.run_dir:
                report.write_result(self.launch.run_dir)
        self.generations.vote(state.committed, Ballot())

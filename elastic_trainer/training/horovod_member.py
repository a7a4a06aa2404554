"""One worker in Horovod's own style: its membership, between hvd.init() and the end of the run.

hvd.init() → here: place → the script builds model and state → hvd.elastic.run → here: reconcile
→ the script's function, with state.commit() → here: vote, copy, checkpoint → end

How the parts of Horovod's loop map onto a generation:

    hvd.init()              a place from our driver, and Horovod's own init
    state.sync()            reconcile; newcomers receive the last commit
    the function            trains; its collectives are Horovod's
    an error                sockets closed, the next place; survivors go back to the last commit
    state.on_reset()        the script's callbacks, on each survivor, before newcomers receive it
    the function again

What always holds:
1. A commit is final when the vote in it has passed on one worker. All workers have voted then, so
   each can copy it, also one whose own vote broke off.
2. A survivor keeps its own copy and receives nothing. A newcomer receives all of one survivor's.
3. Exit code 0 comes after the last vote (F11).
4. No collective of the script's comes before the first reconcile of its worker: `horovod_names`
   refuses it.

What it does not do: reduce gradients, count samples, or compare the replicas' bits.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.observe import report
from elastic_trainer.observe.events import Events
from elastic_trainer.standby import worker as standby
from elastic_trainer.state.checkpoint import Plan
from elastic_trainer.state.checkpoints import Checkpoints
from elastic_trainer.training.apply import weights_sha256
from elastic_trainer.training.checkpointing import Checkpointing, open_checkpoints
from elastic_trainer.training.horovod_commit import CommitState, Named
from elastic_trainer.training.horovod_watch import Watch
from elastic_trainer.training.worker import opened
from elastic_trainer.world.alone import Alone
from elastic_trainer.world.collectives import PeersLost, World
from elastic_trainer.world.drivers import driver_of
from elastic_trainer.world.generations import Generations, Hooks, WorldChanged
from elastic_trainer.world.place import Driver, RunOver
from elastic_trainer.world.transfer import Transfer
from elastic_trainer.world.vote import Ballot, CheckpointBallot, Outcome

OF_THE_WORLD = (HorovodInternalError, HostsUpdatedInterrupt, PeersLost)
"""What ends a generation, and not the run."""


class Stage(Enum):
    """What the script is to do next."""

    BUILD = "build the model and the state"
    RESET = "run the callbacks of on_reset"
    TRAIN = "run the function"


class Member:
    """This process's membership."""

    def __init__(self) -> None:
        self.state, self.world = CommitState(), World()
        self.launch, self.events = Launch(), Events(None)
        self.driver: Driver = Alone()
        self.checkpointing = self._checkpointing(None)
        self.generations: Generations | None = None
        self._moves: Generator[Stage, None, None] | None = None
        self._trains = self._goes_back = self._has_trained = False
        self._committed_at = 0.0
        self._watch: Watch
        self.on_joining: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<Member {self.world.rank}/{self.world.size}, {self.state.committed} commits>"

    @property
    def is_placed(self) -> bool:
        """True once this worker has had a place: hvd.init() was called."""
        return self._moves is not None

    # --- hvd.init() -----------------------------------------------------------------------------

    def init(self, comm: Any = None, process_sets: Any = None) -> None:
        """Take a place in the world, in the place of hvd.init(). A standby waits in here.

        Survivors wait for this worker from here until the decorated function begins.
        """
        if self.is_placed:
            return
        if comm or process_sets:
            raise ConfigError("hvd.init() has comm or process_sets, which no elastic world can "
                              "keep when its workers change. Call hvd.init() without arguments.")
        # The first optimizer would import it, for 3.5 s, while the survivors wait.
        import torch._dynamo  # noqa: F401
        waited = standby.wait_for_place()
        self.launch, self.events = opened(Launch.from_environment())
        if waited:
            self.events.emit("worker.stood_by", **waited)
        self.driver = driver_of(self.launch)
        self.checkpointing = self._checkpointing(None)
        signal.signal(signal.SIGTERM, lambda *_: self.driver.drain())
        self._watch = Watch(self.launch, self.driver, self.events)
        self.generations = Generations(self.launch, self.driver, self.events, self._hooks())
        self.world = self.generations.world
        self._moves = self.generations.run(
            self.state, self._body, restore=self._restore, roll_forward=self._roll_forward,
            hand_over=self._hand_over, live_state=lambda: None, entered=self._entered)
        try:
            self._go_on(None)
        except BaseException as error:
            self._watch.fail(error, self.state.committed, self.world.size)
            raise

    def _hooks(self) -> Hooks:
        return Hooks(
            is_saving=lambda: self.checkpointing.is_saving(), user_reduces=True,
            is_moving=lambda: self.checkpointing.is_moving(),
            published=lambda: self.checkpointing.newest_step(),
            write_alone=lambda: self.checkpointing.write_while_waiting())

    def _checkpointing(self, checkpoints: Checkpoints | None) -> Checkpointing:
        return Checkpointing(checkpoints, self.state, self.driver, self.launch, self.events)

    def build(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
              named: Mapping[str, Named], plan: Plan) -> None:
        """Take what the script has built, before the training. Raises ConfigError."""
        self.state.build(model, optimizer, named)
        checkpoints = open_checkpoints(self.launch, plan, self.events, {"style": "horovod"})
        self.checkpointing = self._checkpointing(checkpoints)

    # --- what Generations.run asks --------------------------------------------------------------

    def _entered(self) -> Iterator[Stage]:
        if not self.state.is_built:
            yield Stage.BUILD

    def _hand_over(self) -> Iterator[Stage]:
        """Bring a survivor to the last commit, and let it run its callbacks."""
        if self._goes_back:
            self.state.go_back()
        self.state.repartition()
        self._goes_back = True  # what the callbacks change belongs to the next commit
        if self._has_trained:
            yield Stage.RESET
            self.state.keep()  # a newcomer receives what the callbacks have set, too

    def _restore(self) -> str:
        step = self.checkpointing.restore(self.world)
        self.state.has_state = step is not None or self.world.rank == 0
        self.state.last_vote = (0, 0, 0, 0)  # a run that was finished may have got more epochs
        return "fresh" if step is None else "checkpoint"

    def _roll_forward(self, *totals: int) -> None:
        """Copy a commit whose vote has passed on another worker."""
        self.state.commit(*totals)
        self.state.keep()
        self._goes_back = False

    def _body(self) -> Iterator[Stage]:
        """Begin to train in a generation."""
        state = self.state
        state.repartition()
        if state.last.step != state.committed:
            state.keep()
        state.begun = state.committed + 1
        self.checkpointing.enter()
        self._committed_at = time.monotonic()
        if self.launch.reduce_asked and self.world.rank == 0 and not self._has_trained:
            self.events.emit("job.option_ignored", option="--reduce",
                             value=self.launch.reduce_asked,
                             because="in Horovod's own style Horovod reduces the gradients")
        self._trains, self._goes_back, self._has_trained = True, True, True
        yield Stage.TRAIN

    def _go_on(self, why: BaseException | None) -> Stage | None:
        """Go on to the next stage; `why` ends the generation first."""
        assert self._moves
        self._trains = False
        if isinstance(why, HostsUpdatedInterrupt):
            self._goes_back, why = False, WorldChanged()
            self.state.forget()  # nothing is in flight behind a commit
        return next(self._moves) if why is None else self._moves.throw(why)

    # --- hvd.elastic.run ------------------------------------------------------------------------

    def train(self, state: Any, function: Callable[[], Any]) -> Any:
        """Run the script's decorated function in generation after generation, until it returns."""
        try:
            return self._train(state, function)
        except BaseException as error:
            self._watch.fail(error, self.state.committed, self.world.size)
            raise

    def _train(self, state: Any, function: Callable[[], Any]) -> Any:
        why: BaseException | None = None
        result = None
        self.on_joining()
        while True:
            try:
                while self._go_on(why) is Stage.RESET:
                    why = None
                    state.on_reset()
                why = None
                if not self.state.is_finished_early:
                    result = function()
                    self.commit(finishes=True)
                self._finish()
                return result
            except OF_THE_WORLD as error:
                why = error
            except RunOver as over:
                if over.verdict in ("failed", "interrupted"):
                    self.checkpointing.write_last(self.world.rank)
                    self.driver.report_last_step(self.state.committed)
                if over.verdict != "finished" or not self.state.is_finished_early:
                    raise
                self._end()
                return result

    # --- state.commit() -------------------------------------------------------------------------

    def commit(self, *, is_wanted: bool = True, finishes: bool = False) -> None:
        """Vote on a commit, copy it, and do the checkpoint work, all workers together.

        Without `is_wanted` there is a commit only if the world is to change, so that nothing is
        lost by it. Raises HostsUpdatedInterrupt if it is to. Costs: one allreduce of 18 integers,
        and one copy of the state.
        """
        state, checkpointing, world = self.state, self.checkpointing, self.world
        assert self.generations
        self.require_training("state.commit()" if is_wanted else "state.check_host_updates()")
        if checkpointing.fenced:
            raise checkpointing.fenced
        if not self.events.flush():
            raise PeersLost("the driver has not taken the lines of the commit before")
        checkpointing.tick(world.rank)
        ballot = checkpointing.ballot(world.rank) if is_wanted else CheckpointBallot()
        state.prepared = state.committed + 1
        control = self.generations.vote(
            state.committed, Ballot(finishes=finishes, checkpoint=ballot))
        if not (is_wanted or control.change):
            state.prepared = state.committed
            return
        self._keep(control)
        if is_wanted:
            checkpointing.obey(control, world)
        if control.stop or control.all_drain:
            checkpointing.publish_now(world, self._vote_on_checkpoint)
        if control.stop:
            raise RunOver("interrupted", f"stopped after commit {state.committed}")
        if control.change and not finishes:
            raise HostsUpdatedInterrupt(False)

    def _keep(self, control: Outcome) -> None:
        state, now = self.state, time.monotonic()
        step, step_s = state.committed, now - self._committed_at
        state.commit(*control.totals)
        state.keep()
        assert self.generations
        self.generations.note_step(step, step_s)
        self.checkpointing.note_step(step_s)
        self.driver.note("training", state.committed)
        if self.world.rank == 0:
            self.events.emit("worker.commit_kept", step=step, commit_s=round(step_s, 5))
        self._committed_at = time.monotonic()

    def _vote_on_checkpoint(self, ballot: CheckpointBallot) -> Outcome:
        assert self.generations
        return self.generations.vote(self.state.committed, Ballot(checkpoint=ballot))

    def sync(self) -> None:
        """Give all workers the values of rank 0, and commit them. All workers call it."""
        self.require_training("state.sync()")
        self.commit()
        transfer = Transfer(self.world, self.events, list, lambda *_: None)
        transfer.move(self.state, [0])
        self.state.keep()

    def require_training(self, call: str) -> None:
        """Raise RuntimeError outside of the decorated function."""
        if not self._trains:
            raise RuntimeError(f"{call} was called outside of the function that hvd.elastic.run "
                               f"decorates, so the other workers do not take part in it. Call it "
                               f"there.")

    # --- the end --------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Publish the last commit, and agree that the run is over."""
        state, events = self.state, self.events
        self.checkpointing.publish_now(self.world, self._vote_on_checkpoint)
        if self.world.rank == 0:
            events.emit("run.finished", steps=state.committed, samples=0,
                        weights_sha256=weights_sha256(state))
            events.flush()
            if self.launch.run_dir:
                report.write_result(self.launch.run_dir)
        self._vote_on_checkpoint(CheckpointBallot())
        self._end()

    def _end(self) -> None:
        assert self.generations
        self._trains = False
        self.generations.keep_session()
        self._watch.end()
        self.driver.finish(self.state.committed)
        self.events.flush()

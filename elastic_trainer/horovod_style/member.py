"""One worker in Horovod's own style: its membership, between hvd.init() and the end of the run.

hvd.init() → here: place → the script builds model and state → hvd.elastic.run → here: reconcile
→ the script's function, with state.commit() → votes → end

How the parts of Horovod's loop map onto a generation:

    hvd.init()              a place from our driver, and Horovod's own init
    state.sync()            reconcile; newcomers receive the last commit
    the function            trains; its collectives are Horovod's
    an error                sockets closed, the next place; survivors agree on the last commit
    state.restore()         survivors go back to it
    state.on_reset()        the script's callbacks, before newcomers receive the state
    state.sync(), and the function again

What always holds:
1. A survivor keeps its own copy and receives nothing. A newcomer receives all of one survivor's.
2. The script's collectives run in its function alone. A newcomer does not take part in others.
3. The script's code runs outside of the frames of a generation: `Stage` names what it is to do.
4. The callbacks run where the world is another one than that of the values: after a change, after a
   restore from a checkpoint, and if the world has changed while the script built its model.

What it does not do: reduce gradients, count samples, or compare the replicas' bits.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.events.log import Events
from elastic_trainer.horovod_style.commit import CommitState, Named
from elastic_trainer.horovod_style.votes import Script, Votes
from elastic_trainer.horovod_style.watch import Watch, mistake_of
from elastic_trainer.state.checkpoints.checkpoint import Plan
from elastic_trainer.state.checkpoints.run_checkpoints import Checkpoints
from elastic_trainer.training.checkpointing import Checkpointing, open_checkpoints
from elastic_trainer.training.listeners import opened
from elastic_trainer.world import standby as standby
from elastic_trainer.world.collectives import PeersLost, World
from elastic_trainer.world.drivers import driver_of
from elastic_trainer.world.generations import Generations, Hooks, WorldChanged
from elastic_trainer.world.place import Driver, RunOver
from elastic_trainer.world.transfer import Transfer

OF_THE_WORLD = (HorovodInternalError, HostsUpdatedInterrupt, PeersLost)
"""What ends a generation, and not the run."""


class Stage(Enum):
    """What the script is to do next."""

    BUILD = "build the model and the state"
    RESTORE = "go back to the last commit: state.restore()"
    SAVE = "copy a commit whose vote has passed on another worker: state.save()"
    RESET = "run the callbacks: state.on_reset()"
    TRAIN = "run the function"


class Member:
    """This process's membership."""

    def __init__(self) -> None:
        self.state, self.world = CommitState(), World()
        self.launch, self.events = Launch(), Events(None)
        self.driver = Driver()
        self.checkpointing = self._checkpointing(None)
        self.generations: Generations | None = None
        self.script: Script | None = None
        self.functions: list[str] = []
        """The names of the functions that hvd.elastic.run decorates."""
        self.is_entering = False
        """True while this membership itself calls Horovod: its init and its collectives."""
        self._stages: Generator[Stage, None, None] | None = None
        self._votes: Votes | None = None
        self._trains = self._is_synced = self.is_over = False
        self._goes_back = self._needs_reset = False
        self._watch: Watch

    def __repr__(self) -> str:
        return f"<Member {self.world.rank}/{self.world.size}, {self.state.committed} commits>"

    @property
    def is_placed(self) -> bool:
        """True once this worker has had a place: hvd.init() was called."""
        return self._stages is not None

    @property
    def may_reduce(self) -> bool:
        """True where a collective is one that all workers take part in."""
        return self._trains or self.is_entering or self.is_over

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
        self.driver = driver_of(self.launch, self.events)
        self.checkpointing = self._checkpointing(None)
        signal.signal(signal.SIGTERM, lambda *_: self.driver.drain())
        self._watch = Watch(self.launch, self.driver, self.events)
        self.generations = Generations(self.launch, self.driver, self.events, self._hooks())
        self.world = self.generations.world
        self._stages = self.generations.run(
            self.state, self._body, restore=self._restore, roll_forward=self._roll_forward,
            hand_over=self._hand_over, live_state=lambda: None, entered=self._entered)
        try:
            self._go_on(None)
        except BaseException as error:
            self._watch.fail(error, self.state.committed, self.world.size)
            raise

    def _hooks(self) -> Hooks:
        return Hooks(is_saving=lambda: self.checkpointing.is_saving(), user_reduces=True,
                     is_moving=lambda: self.checkpointing.is_moving(),
                     published=lambda: self.checkpointing.newest_step(),
                     write_alone=lambda: self.checkpointing.write_while_waiting())

    def _checkpointing(self, checkpoints: Checkpoints | None) -> Checkpointing:
        return Checkpointing(checkpoints, self.state, self.driver, self.launch, self.events)

    def build(self, script: Script, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
              named: Mapping[str, Named], plan: Plan) -> None:
        """Take what the script has built, before the training. Raises ConfigError."""
        assert self.generations
        self.state.build(model, optimizer, named)
        checkpoints = open_checkpoints(self.launch, plan, self.events, {"style": "horovod"})
        self.checkpointing = self._checkpointing(checkpoints)
        self.script = script
        self._votes = Votes(self.state, self.generations, self.checkpointing, script)
        if self.launch.reduce_asked and self.world.rank == 0:
            self.events.emit("job.option_ignored", option="--reduce",
                             value=self.launch.reduce_asked,
                             because="in Horovod's own style Horovod reduces the gradients")

    # --- what Generations.run asks --------------------------------------------------------------

    def _entered(self) -> Iterator[Stage]:
        # hvd.DistributedOptimizer reads it. In a world of one it reduces nothing without it, also
        # when the world grows (horovod/torch/optimizer.py, 0.28.1).
        os.environ["HOROVOD_ELASTIC"] = "1"
        if not self.state.is_built:
            yield Stage.BUILD
        else:
            self._needs_reset = True

    def _hand_over(self) -> Iterator[Stage]:
        """Bring a survivor to the last commit, and let it run its callbacks."""
        if self.state.last.step >= 0 and not self.state.is_kept:
            yield Stage.SAVE
            self._keep()
        if self._goes_back:
            yield Stage.RESTORE
        self.state.repartition()
        self._goes_back = True  # what the callbacks change belongs to the next commit
        yield from self._reset()  # a newcomer receives what the callbacks have set, too

    def _reset(self) -> Iterator[Stage]:
        if self._needs_reset:
            yield Stage.RESET
            self._needs_reset = False
            self.state.keep()

    def _restore(self) -> str:
        step = self.checkpointing.restore(self.world)
        self.state.has_state = step is not None or self.world.rank == 0
        self.state.last_vote = (0, 0, 0, 0)  # a run that was finished may have got more epochs
        self._needs_reset = self._needs_reset or step is not None
        return "fresh" if step is None else "checkpoint"

    def _roll_forward(self, *totals: int) -> None:
        self.state.commit(*totals)
        self._goes_back = False

    def _body(self) -> Iterator[Stage]:
        assert self._votes
        state = self.state
        if state.last.step < 0:
            state.drop_gradients()
        state.repartition()
        yield from self._reset()  # a newcomer's, whose world has changed since its hvd.init()
        self._keep()
        state.begun = state.committed + 1
        self._votes.enter()
        self._trains, self._goes_back = True, True
        yield Stage.TRAIN

    def _keep(self) -> None:
        if not self.state.is_kept:
            self.state.keep()

    def _go_on(self, why: BaseException | None) -> Stage:
        assert self._stages
        self._trains, self.is_entering = False, True
        if isinstance(why, HostsUpdatedInterrupt):
            self._goes_back, why = False, WorldChanged()
            self.state.forget()  # nothing is in flight after a commit
        try:
            return next(self._stages) if why is None else self._stages.throw(why)
        finally:
            self.is_entering = False

    # --- hvd.elastic.run ------------------------------------------------------------------------

    def train(self, script: Script, function: Callable[[], Any]) -> Any:
        """Run the script's decorated function in generation after generation, until it returns."""
        try:
            return self._train(script, function)
        except BaseException as error:
            self._watch.fail(error, self.state.committed, self.world.size)
            raise

    def _train(self, script: Script, function: Callable[[], Any]) -> Any:
        assert self._votes
        why: BaseException | None = None
        result = None
        while True:
            try:
                self._enter(script, why)
                if not self.state.is_finished_early:
                    result = function()
                    self._votes.commit(finishes=True)
                self._votes.finish(self.launch.run_dir)
                self._end()
                return result
            except OF_THE_WORLD as error:
                if mistake := mistake_of(error):
                    raise ConfigError(mistake) from error
                why = error
            except RunOver as over:
                if over.verdict in ("failed", "interrupted"):
                    self.checkpointing.write_last(self.world.rank)
                    self.driver.report(step=self.state.committed)
                if over.verdict != "finished" or not self.state.is_finished_early:
                    raise
                self._end()
                return result

    def _enter(self, script: Script, why: BaseException | None) -> None:
        hooks = {Stage.RESTORE: script.restore, Stage.SAVE: script.save,
                 Stage.RESET: script.on_reset}
        stage = self._go_on(why)
        while stage is not Stage.TRAIN:
            hooks[stage]()
            stage = self._go_on(None)
        self._is_synced = True  # the reconcile has done it
        script.sync()
        self._is_synced = False

    def _end(self) -> None:
        assert self.generations
        self._trains, self.is_over = False, True
        self.generations.keep_session()
        self._watch.end()
        self.driver.report(phase="finished", step=self.state.committed)
        self.events.flush()

    # --- the methods of the script's state ------------------------------------------------------

    def commit(self, *, is_wanted: bool = True) -> None:
        """Commit, all workers together, or only if the world is to change."""
        self.require_training("state.commit()" if is_wanted else "state.check_host_updates()")
        assert self._votes
        self._votes.commit(is_wanted=is_wanted)

    def save(self) -> None:
        """Copy the commit whose vote has just passed. Raises RuntimeError if there is none."""
        if self.state.is_kept or not self.state.is_built:
            raise RuntimeError("state.save() commits on one worker alone. Call state.commit() on "
                               "all workers.")
        self.state.keep()

    def sync(self) -> None:
        """Give all workers the values of rank 0, and commit them. All workers call it."""
        if self._is_synced:
            self._is_synced = False
            return
        self.commit()
        if self.world.size > 1:
            Transfer(self.world, self.events, list, lambda *_: None).move(self.state, [0])
        self.state.drop_gradients()
        self.state.repartition()
        self.state.keep()

    def require_training(self, call: str) -> None:
        if not self._trains:
            raise RuntimeError(f"{call} was called outside of the function that hvd.elastic.run "
                               f"decorates, so the other workers do not take part in it. Call it "
                               f"there.")

"""The votes of a script in Horovod's own style: commits, changes of the world, and the end.

state.commit(), state.check_host_updates() → here → vote → the copy, a checkpoint, an interrupt

What always holds:
1. A commit is final when the vote in it has passed on one worker. All workers have voted then, so
   each can copy it, also one whose own vote broke off.
2. Workers that call different things in one vote all raise: their states would differ from then on.
3. Exit code 0 comes after the last vote (F11).
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.runner.elastic.worker import HostUpdateResult

from elastic_trainer.events import summary as report
from elastic_trainer.horovod_style.commit import CommitState
from elastic_trainer.training.checkpointing import Checkpointing
from elastic_trainer.training.commit_step import weights_sha256
from elastic_trainer.world.collectives import PeersLost
from elastic_trainer.world.generations import Generations
from elastic_trainer.world.place import RunOver
from elastic_trainer.world.vote import Ballot, CheckpointBallot, Outcome


class Script(Protocol):
    """The script's ElasticState, whose methods a subclass may override."""

    def save(self) -> None: ...
    def restore(self) -> None: ...
    def sync(self) -> None: ...
    def on_reset(self) -> None: ...
    def on_hosts_updated(self, timestamp: float, update_res: int) -> None: ...


class Votes:
    """The votes of one worker, from the model on."""

    def __init__(self, state: CommitState, generations: Generations, checkpointing: Checkpointing,
                 script: Script):
        self._state, self._generations, self._script = state, generations, script
        self._checkpointing, self._events = checkpointing, generations.events
        self._world, self._driver = generations.world, generations.driver
        self._committed_at = 0.0

    def enter(self) -> None:
        self._checkpointing.enter()
        self._committed_at = time.monotonic()

    def commit(self, *, is_wanted: bool = True, finishes: bool = False) -> None:
        """Vote on a commit, copy it, and do the checkpoint work, all workers together.

        Without `is_wanted` there is a commit only if the world is to change, so that nothing is
        lost by it. Raises HostsUpdatedInterrupt if it is to. Costs: one allreduce of 23 integers,
        and one copy of the state.
        """
        state, checkpointing, world = self._state, self._checkpointing, self._world
        if not finishes:
            state.check_no_gradient("state.commit()" if is_wanted else "check_host_updates()")
        control = self._vote(is_wanted, finishes)
        if is_wanted or control.change or control.checkpoint:
            self._keep(control)
        else:
            state.prepared = state.committed
        checkpointing.obey(control, world)
        if control.stop or control.all_drain:
            checkpointing.publish_now(world, self._vote_on_checkpoint)
        if control.stop:
            raise RunOver("interrupted", f"stopped after commit {state.committed}")
        if control.change and not finishes:
            self._script.on_hosts_updated(time.time(), HostUpdateResult.mixed)
            raise HostsUpdatedInterrupt(False)

    def _vote(self, is_wanted: bool, finishes: bool) -> Outcome:
        state, checkpointing, rank = self._state, self._checkpointing, self._world.rank
        if checkpointing.fenced:
            raise checkpointing.fenced
        if not self._events.flush():
            raise PeersLost("the driver has not taken the lines of the commit before")
        checkpointing.tick(rank)
        ballot = checkpointing.ballot(rank)
        if not is_wanted and not self._driver.wants().change:
            ballot = replace(ballot, is_wanted=False)  # the last commit is in a checkpoint, or due
        state.prepared = state.committed + 1
        control = self._generations.vote(state.committed, Ballot(
            digest=is_wanted, finishes=finishes, checkpoint=ballot))
        check_alike(control.digest, control.finishes, self._world.size)
        return control

    def _keep(self, control: Outcome) -> None:
        state, now = self._state, time.monotonic()
        step, step_s = state.committed, now - self._committed_at
        state.commit(*control.totals)
        self._script.save()
        if not state.is_kept:
            state.keep()  # a subclass has not called save() of its base
        self._generations.note_step(step, step_s)
        self._checkpointing.note_step(step_s)
        self._driver.note("training", state.committed)
        if self._world.rank == 0:
            self._events.emit("worker.commit_kept", step=step, commit_s=round(step_s, 5))
        self._committed_at = time.monotonic()

    def _vote_on_checkpoint(self, ballot: CheckpointBallot) -> Outcome:
        return self._generations.vote(self._state.committed, Ballot(checkpoint=ballot))

    def finish(self, run_dir: Path | None) -> None:
        """Publish the last commit, and agree that the run is over."""
        state, events = self._state, self._events
        self._checkpointing.publish_last(self._world, self._vote_on_checkpoint)
        if self._world.rank == 0:
            events.emit("run.finished", steps=state.committed, samples=0,
                        weights_sha256=weights_sha256(state))
            events.flush()
            if run_dir:
                report.write_result(run_dir)
        self._vote_on_checkpoint(CheckpointBallot())


def check_alike(wanted: int, finishes: int, size: int) -> None:
    """Raise RuntimeError, on all workers alike, if the workers have not called the same thing."""
    if finishes not in (0, size):
        raise RuntimeError(
            f"the function that hvd.elastic.run decorates has returned on {finishes} of {size} "
            f"workers, and the others have committed. Give all workers as many commits.")
    if wanted not in (0, size):
        raise RuntimeError(
            f"{wanted} of {size} workers have called state.commit(), and the others "
            f"state.check_host_updates(). Call the same on all workers.")

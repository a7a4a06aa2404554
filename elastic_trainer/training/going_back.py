"""Replicas that hold different bits: the odd worker leaves, or all go back to a checkpoint.

vote (a checksum differs), transfer → here → the next generation

What always holds:
1. All members of the world call `part` alike, and it raises on all of them.
2. No checkpoint that may hold wrong bits is restored: those after the last step in which all
   replicas are known to be equal are withdrawn.
3. If a part of the state was lost in a transfer, the run ends with an error on all workers. The
   state of a worker that has not received it is the newest checkpoint then.
4. A wish to finish the run is forgotten with the steps that are undone. The user's code runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.training.checkpointing import Checkpointing
from elastic_trainer.training.stop_request import Wish
from elastic_trainer.world.collectives import World
from elastic_trainer.world.generations import StateWithdrawn
from elastic_trainer.world.outliers import Lost, Search, find_outliers
from elastic_trainer.world.replicas import (
    Part,
    Replica,
    ReplicasDisagree,
    StateLost,
    received_of,
)


class GoingBack:
    """What this worker does when the replicas of its world differ."""

    def __init__(self, state: LiveState, replica: Replica, checkpointing: Checkpointing,
                 launch: Launch, events: Events, wish: Wish):
        self.state, self.replica, self.checkpointing = state, replica, checkpointing
        self.launch, self.events, self.wish = launch, events, wish
        self._odd_receivers = 0
        self.restored_step = -1
        """The step with which this attempt began, if this worker was there: then all replicas were
        equal."""

    def part(self, world: World, held: list[Part], among: Sequence[int]) -> None:
        """End this generation: the odd worker leaves, and the others do the step again."""
        step = self.state.committed
        # Each vote compares one slice of the state, so after `slices` votes all of it was compared.
        equal_step = max(step - self.replica.slices, self.restored_step, 0)
        mine = Search(received_of(self.state.received, self.state.ticks), self._odd_receivers)
        try:
            lost = find_outliers(world, self.launch, self.events, held, among, mine, step=step,
                            since_step=equal_step, phases=self.state.phases)
        finally:
            self._odd_receivers = mine.outlying_receivers
        if lost:
            self._end(world, lost, step, max(equal_step, lost.received_step))
        self._withdraw(world, step, equal_step)

    def _end(self, world: World, lost: Lost, step: int, equal_step: int) -> NoReturn:
        """End the run because a part of the state was lost, with a checkpoint of a holder's state.

        The checkpoints since the transfer have shares of receivers, so they are withdrawn.
        """
        holder = lost.holders[0]
        self.checkpointing.withdraw(world, equal_step)
        kept = ""
        if world.rank == holder:
            self.state.restore()
            kept = str(self.checkpointing.write_alone())  # the store
        kept_step = int(world.share_text(kept, holder))  # network: all wait for the checkpoint
        if world.rank == holder:
            self.events.emit("worker.state_lost", step=step, since_step=equal_step,
                             holders=list(lost.holders), receivers=list(lost.receivers),
                             received_step=lost.received_step, tensors=lost.tensors,
                             checkpoint_step=kept_step)
            self.events.flush()
        raise StateLost(
            f"rank {_listed(lost.receivers)} received the state, first after step "
            f"{lost.received_step}, and in step {step} holds other bits than rank "
            f"{_listed(lost.holders)}, which has not received it: {', '.join(lost.tensors)}. So "
            f"the training depends on a value that is not in the state: in the optimizer's module, "
            f"in a closure, or in an object that the loop changes. Keep it in the optimizer's "
            f"state, in a buffer of the model, or in an object of state=. "
            + (f"The state of rank {holder} is the checkpoint of step {kept_step}."
               if kept_step == step else f"The newest checkpoint is that of step {kept_step}."))

    def _withdraw(self, world: World, step: int, equal_step: int) -> None:
        """Withdraw what was published after a step, all workers together, and drop the state."""
        left = self.checkpointing.withdraw(world, equal_step)
        if left < 0 or (left == 0 and not self.launch.driver):
            raise ReplicasDisagree(
                f"the {world.size} workers hold different bits in step {step}, no majority of them "
                f"holds the same, and no checkpoint of step {equal_step} or before is left: each "
                f"later one may hold the wrong bits. The event worker.replica_differs names the "
                f"hosts: test their memory. Then start the run anew under another name (--run), "
                f"with 3 or more workers: they find out which bits are wrong.")
        self.wish.forget()
        raise StateWithdrawn(f"no majority holds the same bits in step {step}: back to step {left}")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))

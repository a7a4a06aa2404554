"""Replicas that hold different bits: the odd worker leaves, or all go back to a checkpoint.

vote (a checksum differs), transfer → here → the next generation

What always holds:
1. All members of the world call `part` alike, and it raises on all of them.
2. No checkpoint that may hold wrong bits is restored: those after the last step in which all
   replicas are known to be equal are withdrawn.
3. A wish to finish the run is forgotten with the steps that are undone. The user's code runs again.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_trainer.config import Launch
from elastic_trainer.observe.events import Events
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.training.checkpointing import Checkpointing
from elastic_trainer.training.wish import Wish
from elastic_trainer.world.collectives import World
from elastic_trainer.world.generations import StateWithdrawn
from elastic_trainer.world.odd import find_odd
from elastic_trainer.world.replicas import Part, Replica, ReplicasDisagree


class GoingBack:
    """What this worker does when the replicas of its world differ."""

    def __init__(self, state: LiveState, replica: Replica, checkpointing: Checkpointing,
                 launch: Launch, events: Events, wish: Wish):
        self.state, self.replica, self.checkpointing = state, replica, checkpointing
        self.launch, self.events, self.wish = launch, events, wish
        self.restored_step = -1
        """The step with which this attempt began, if this worker was there: then all replicas were
        equal."""

    def part(self, world: World, held: list[Part], among: Sequence[int]) -> None:
        """End this generation: the odd worker leaves, and the others do the step again."""
        step = self.state.committed
        # Each vote compares one slice of the state, so after `slices` votes all of it was compared.
        equal_step = max(step - self.replica.slices, self.restored_step, 0)
        find_odd(world, self.launch, self.events, held, among, step=step, since_step=equal_step)
        self._withdraw(world, step, equal_step)

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

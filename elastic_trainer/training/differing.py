"""Workers, or micro-batches, that are not alike: modules that differ are the user's error; replicas
that hold different bits lose a worker, or go back to a checkpoint.

vote (the checksums of modules differ) → here → an error on all workers that names the modules;
modules after each micro-batch → LeftInModules → what the step ends with, on all workers; vote (a
checksum of the state differs), transfer → GoingBack → the next generation

What always holds:
1. What a step's first micro-batch has left in plain attributes is what each other micro-batch has
   left, on every worker. A micro-batch begins with the attributes that the worker's last one has
   left, so a counter is found.
2. All workers hold these values before the vote. So a worker that rolls the step forward has them.
3. A size that follows from the batch is found in the warm-up: the same batch leaves it again, and
   another batch leaves another one. It is not followed, and no error: many models keep the length
   or the shape of their last batch, or of their longest one. What a loss makes of it is seen when
   a batch is computed again after another one (warm_up.py).
4. All members of the world call `GoingBack.part` alike, and it raises on all of them.
5. No checkpoint that may hold wrong bits is restored: those after the last step in which all
   replicas are known to be equal are withdrawn.
6. If a part of the state was lost in a transfer, the run ends with an error on all workers. The
   state of a worker that has not received it is the newest checkpoint then.
7. A stop request is forgotten with the steps that are undone. The user's code runs again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.values.layout import from_text, to_text
from elastic_trainer.state.values.plain_values import is_same, is_size
from elastic_trainer.state.values.supported import some
from elastic_trainer.training.checkpointing import Checkpointing
from elastic_trainer.training.work import Work
from elastic_trainer.world.collectives import World
from elastic_trainer.world.generations import StateWithdrawn
from elastic_trainer.world.outliers import Lost, Search, find_outliers
from elastic_trainer.world.replicas import (
    Part,
    ReplicasDisagree,
    StateLost,
    received_of,
)


def refuse_differing_modules(state: LiveState, world: World) -> NoReturn:
    """Raise RuntimeError on all workers: they have begun the step in flight with different modes or
    attributes.

    All workers call it. Network: one exchange of names and values.
    """
    attributes = state.attributes.changed_before() | state.attributes.others.texts()
    mine = json.dumps([state.modes.evaluating_before(), attributes], default=repr)
    modes, held = zip(*map(json.loads, world.gather_texts(mine)), strict=True)
    state.restore()
    if all(one == held[0] for one in held):
        raise RuntimeError(sentence(state.committed, modes))
    raise RuntimeError(on_attributes(state.committed, held))


def sentence(step: int, evaluating: Sequence[Sequence[str]]) -> str:
    """Return what differs, and the remedy. `evaluating` has the modules in eval mode, by rank."""
    names = sorted({name for theirs in evaluating for name in theirs})
    differ = [name for name in names if not all(name in theirs for theirs in evaluating)]
    first = [rank for rank, theirs in enumerate(evaluating) if differ and differ[0] in theirs]
    shown = [name or "the model" for name in differ]
    return (
        f"the mode (train or eval) of {some(shown)} differs between the workers in step {step}: "
        f"{shown[0] if shown else 'a module'} is in eval mode on rank "
        f"{', '.join(map(str, first[:8]))} alone. So the weights would depend on which worker runs "
        "which micro-batch. Call model.train() and model.eval() on every worker alike, and not "
        "under `if trainer.is_first`; or put the mode back before the code after the inner loop "
        "ends.")


def on_attributes(step: int, changed: Sequence[Mapping[str, Any]]) -> str:
    """Return what differs, and the remedy. `changed` has the values of changed attributes, by rank;
    another one is as it was built."""
    differ = [path for path in sorted({path for theirs in changed for path in theirs})
              if not all(path in theirs and theirs[path] == changed[0].get(path)
                         for theirs in changed)]
    held = [f"{json.dumps(theirs[differ[0]])[:40]} on rank {rank}" if differ[0] in theirs else
            f"as it was built on rank {rank}" for rank, theirs in enumerate(changed[:8])]
    return (
        f"the attributes {some(differ)} of the model's modules differ between the workers in step "
        f"{step}: {differ[0]} is {', '.join(held)}. So the weights would depend on which worker "
        f"runs which micro-batch. Change attributes on every worker alike, and not under "
        f"`if trainer.is_first`, or put them back before the code after the inner loop ends.")


NOT_RUN, SAME, MOVED = range(3)
"""What the step's first micro-batch has left in modules; it may not have ended."""
REMEDY = (
    "Workers compute different batches, so they would hold different values, and a worker that "
    "joins would have none. Change attributes after the inner loop (with train(): in after_step), "
    "on every worker alike; in the code of a batch use a local variable. What forward counts or "
    "averages belongs into a buffer with a rule (the option buffers), and a number to look at into "
    "step.log.")


class LeftInModules:
    """What the micro-batches of a step have left in modules, on this worker: plain attributes,
    which are the same after each of them; and of the first one modes and extra state."""

    def __init__(self, state: LiveState):
        self._attributes, self._modes, self._extra = (
            state.attributes, state.modes, state.extra_state)
        self._left: dict[str, Any] | None = None
        """The attributes that the micro-batches of this step have left; None: none has ended."""
        self.mark = NOT_RUN
        """What the step's first micro-batch has done, if this worker has run it."""

    def clear(self, *, again: bool) -> None:
        """Begin the micro-batches of a step. Its attributes are those of its begin, unless they are
        run again."""
        if again:
            self._attributes.reset()
        self._left, self.mark = None, NOT_RUN

    def keep(self, microbatch: str, is_first: bool) -> None:
        """Note what a micro-batch has left. Raises RuntimeError if its attributes are not those
        that the others have left, CannotKeep for extra state that cannot be sent."""
        moved = self._attributes.moved()
        if self._left is None:
            self._left = moved
        elif moved or self._left:
            require_same(self._left, moved, f"in {microbatch}", RuntimeError)
        if is_first:
            self._modes.keep()
            self._extra.keep()
            is_same = not (moved or self._modes.after or self._extra.modules)
            self.mark = SAME if is_same else MOVED

    def share(self, mark: int, from_first: Callable[[str], str]) -> None:
        """Give all workers what the step's first micro-batch has left, by its mark. `from_first`
        sends the text of the worker that ran it. Raises RuntimeError if micro-batches of this
        worker have left other attributes.

        Network, if it has left something: one allgather of these values.
        """
        moved = dict[str, Any]()
        if mark == MOVED:
            mine = [self._modes.after, self._left, self._extra.after]
            self._modes.after, moved, self._extra.after = from_text(
                from_first(to_text(mine) if self.mark == MOVED else ""))
        self._attributes.after = moved
        if self._left is not None and mark != NOT_RUN:
            require_same(moved, self._left, "on this worker and on another one", RuntimeError)


def require_same(one: Mapping[str, Any], other: Mapping[str, Any], where: str,
                 kind: type[RuntimeError] | type[ConfigError]) -> None:
    """Raise the user's error if two micro-batches have left different attributes."""
    if not (bad := _differing(one, other)):
        return
    values = " and ".join(_shown(side[bad[0]]) if bad[0] in side else "its former value"
                          for side in (one, other))
    raise kind(
        f"the code of a batch (forward, or the inner loop) has changed the attributes {some(bad)} "
        f"of the model, and two micro-batches have left different values {where}: {values} of "
        f"{bad[0]}. {REMEDY}")


def sizes_of_batches(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the attributes of which two different micro-batches have left different sizes."""
    return [path for path in _differing(one, other)
            if path in one and path in other and is_size(one[path]) and is_size(other[path])]


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [path for path in sorted(one.keys() | other.keys())
            if not (path in one and path in other and is_same(one[path], other[path]))]


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 40 else f"{text[:40]}…"


class GoingBack:
    """What this worker does when the replicas of its world differ."""

    def __init__(self, work: Work, checkpointing: Checkpointing, launch: Launch,
                 forget_stop: Callable[[], None]):
        self.state, self.replica, self.events = work.state, work.replica, work.events
        self.checkpointing, self.launch, self._forget_stop = checkpointing, launch, forget_stop
        self._outlying_receivers = 0
        self.restored_step = -1
        """The step with which this attempt began, if this worker was there: then all replicas were
        equal."""

    def part(self, world: World, held: list[Part], among: Sequence[int]) -> None:
        """End this generation: the worker that differs leaves, and the others do the step again."""
        step = self.state.committed
        equal_step = self._equal_step()
        mine = Search(received_of(self.state.received, self.state.ticks), self._outlying_receivers)
        try:
            lost = find_outliers(world, self.launch, self.events, held, among, mine, step=step,
                            since_step=equal_step, phases=self.state.phases)
        finally:
            self._outlying_receivers = mine.outlying_receivers
        if lost:
            self._end(world, lost, step, max(equal_step, lost.received_step))
        self._withdraw(world, step, equal_step)

    def part_shards(self, world: World) -> None:
        """End this generation: two holders of a part of the optimizer's state differ, and no
        majority tells which one is right."""
        step = self.state.committed
        if world.rank == 0:
            self.events.emit("worker.shards_differ", step=step)
        self._withdraw(world, step, self._equal_step())

    def _equal_step(self) -> int:
        """Return a step at which all workers are known to have held the same bits."""
        # Each vote compares one slice of the state, so after `slices` votes all of it was compared.
        return max(self.state.committed - self.replica.slices, self.restored_step, 0)

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
        self._forget_stop()
        raise StateWithdrawn(f"no majority holds the same bits in step {step}: back to step {left}")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))

"""The update of a step whose optimizer's state is sharded over the workers (option `shard`).

reduced gradient (all workers) → here: each owner computes the new parameters of its blocks, and
puts everything back; one allgather → all workers hold all new parameters → vote → here: the holders
step their part of the optimizer, all others take over the new parameters

What always holds:
1. Before the vote nothing has changed. When it passes, each worker holds all that it needs to
   finish the step by itself: the gradient, its own part of the optimizer's state, and the new
   parameters of all blocks.
2. The optimizer sees whole parameters. So each gets the bits of an optimizer that is not sharded,
   if it treats each parameter by itself (job/shardable.py tries that).
3. The global norm, the scaler and its look for infinite gradients see the whole gradient.
4. Each holder of a block compares what it has computed with what the owner has sent. If they
   differ, no majority can tell which is right: all go back to a checkpoint.

Costs: one allgather of the parameters a step; the owner computes its blocks twice.

Source: the partition of the optimizer's state is that of ZeRO, stage 1 (arXiv 1910.02054, 5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.state.holders import lost_blocks
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.training.shard_watch import log_exposed
from elastic_trainer.training.work import Update, Work
from elastic_trainer.world.collectives import World
from elastic_trainer.world.generations import StateWithdrawn
from elastic_trainer.world.shard_moves import held_by_rank, move_shards

Moved = dict[int, list[torch.Tensor]]
"""The parameters that a step moves, by their blocks."""
GATHER_BYTES = 32 << 20
"""The most bytes of new parameters that come in one collective, but for a single block."""


class ShardedUpdate:
    """The update of one worker's steps."""

    def __init__(self, work: Work, ready: Callable[[torch.optim.Optimizer], None]):
        self.work, self.state, self.flat = work, work.state, work.flat
        self.masters, self.shards = work.job.masters, work.shards
        self._ready = ready
        """Makes what is in `.grad` the gradient that the optimizer is to see."""
        self.error: Exception | None = None

    def prepare(self, world: World, optimizer: torch.optim.Optimizer,
                multiplier: float | None, scaler: torch.amp.GradScaler | None) -> None:
        """Let all workers have the new parameters of this step. All call it, before the vote.
        Network. An error of the optimizer is kept for the vote (`error`)."""
        self.work.update = update = Update()
        self.flat.divide()
        self.flat.hand_out()
        self._ready(optimizer)
        if scaler and _has_overflow(scaler, optimizer):
            return
        update.new = self.work.reducer.spare().gradients
        moved = self._moved(optimizer)
        for blocks in batches(moved):
            mine = [p for block in blocks if block in self.shards.owned for p in moved[block]]
            with self.state.rates.tried(optimizer, multiplier):
                computed = self._computed(optimizer, mine)
            self.work.events.reach("shards.computed", step=self.state.committed)
            views, owners = self._new_values(), {
                block: self.shards.holders[block][0] for block in blocks}
            for _, p, value in received(world, owners, moved, computed):
                views[id(p)].copy_(value)

    def _moved(self, optimizer: torch.optim.Optimizer) -> Moved:
        """Return the parameters that have a gradient for the optimizer of this phase, by block."""
        its = {id(p) for group in optimizer.param_groups for p in group["params"]
               if self.masters.of(p).grad is not None}
        every = {block: [p for _, p in self.shards.of(block) if id(p) in its]
                 for block in range(len(self.shards.blocks))}
        return {block: parameters for block, parameters in every.items() if parameters}

    def _computed(self, optimizer: torch.optim.Optimizer,
                  parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the bytes of the new values of parameters, one after the other."""
        if not parameters:
            return bytes_of([], self.flat.device)
        try:
            with _tried(self.state, optimizer, parameters), self._alone(parameters):
                with self.masters.moving(self.state, optimizer):
                    optimizer.step()
                return bytes_of(parameters, self.flat.device)
        except Exception as error:  # the others wait for these bytes; the vote informs them
            self.error = error
            return bytes_of(parameters, self.flat.device)

    def _new_values(self) -> dict[int, torch.Tensor]:
        """Return where the new values of parameters are, by their ids; {}: there are none."""
        update = self.work.update
        return dict(zip(map(id, self.flat.gradients.parameters), update.new, strict=True)
                    ) if update and update.new else {}

    def apply(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """Step what this worker holds, and take over the new values of all other parameters."""
        moved, new = self._moved(optimizer), self._new_values()
        held = [p for block in moved if block in self.shards.held for p in moved[block]]
        with self._alone(held):
            step()
        for block, parameters in moved.items() if new else ():  # else the scaler has skipped it
            for p in parameters:
                if block not in self.shards.held:
                    p.copy_(new[id(p)])
                elif not are_same(p, new[id(p)].to(p.dtype)):
                    self.shards.differs = True
        self.work.update = None

    @contextmanager
    def _alone(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the optimizer see the gradients of these parameters alone."""
        seen = [*map(self.masters.of, self.shards.parameters)]
        kept, own = [(p, p.grad) for p in seen], {id(self.masters.of(p)) for p in parameters}
        for p in seen:
            if id(p) not in own and p.grad is not None:
                p.grad = None
        try:
            yield
        finally:
            for p, gradient in kept:
                if p.grad is not gradient:
                    p.grad = gradient

    def forget(self, optimizer: torch.optim.Optimizer,
               scaler: torch.amp.GradScaler | None) -> None:
        """Forget what was prepared of a step that broke: it is not applied."""
        self.error = self.work.update = None
        if scaler:  # else it would take the next gradient for one that it has unscaled
            scaler._per_optimizer_states.pop(id(optimizer), None)


def place_shards(world: World, state: LiveState, launch: Launch, events: Events) -> None:
    """Let each member of a new generation hold its part of the optimizer's state. All members call
    it when each has the rest. Network. Raises StateWithdrawn on all if a part is lost."""
    if (shards := state.shards) is None:
        return
    held = all_held(world, state, events)
    shards.place(world.rank, world.sites, held)
    move_shards(world, state, held, events)
    log_exposed(world, shards, state.committed, launch, events)


def all_held(world: World, state: LiveState, events: Events) -> list[set[int]]:
    """Return the blocks that each rank holds. Network. Raises StateWithdrawn on all if a block has
    no holder."""
    assert state.shards
    blocks = len(state.shards.blocks)
    held = held_by_rank(world, state)
    if lost := lost_blocks(blocks, held):
        if world.rank == 0:
            events.emit("worker.shards_lost", step=state.committed, blocks=len(lost), of=blocks)
        raise StateWithdrawn(
            f"all holders of {len(lost)} of {blocks} parts of the optimizer's state are gone: back "
            f"to the newest checkpoint")
    return held


def received(world: World, owners: Mapping[int, int], moved: Moved,
             mine: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield the blocks that have these owners, each parameter of them, and the value that its owner
    has sent. `mine` has the bytes of my blocks. Network: one allgather."""
    whole, at = world.allgather(mine, "shards.parameters"), 0
    for block in sorted(owners, key=lambda block: (owners[block], block)):
        for p in moved[block]:
            size = p.numel() * p.element_size()
            piece = whole[at : at + size]
            if piece.storage_offset() % p.element_size():
                piece = piece.clone()
            yield block, p, piece.view(p.dtype).view(p.shape)
            at += size


@contextmanager
def _tried(state: LiveState, optimizer: torch.optim.Optimizer,
           parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put parameters, and what the optimizer keeps of them, back afterwards, bit for bit."""
    kept: Any = optimizer.state
    values = [p.detach().clone() for p in parameters]
    entries = [dict(kept[p]) if p in kept else None for p in parameters]
    copies = [{key: value.clone() for key, value in (entry or {}).items()
               if isinstance(value, torch.Tensor)} for entry in entries]
    state.copying.hold_writes()  # a device may still copy them for a checkpoint
    assert state.shards
    state.is_applying, state.shards.tries = True, state.shards.tries + 1
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value, entry, copy in zip(parameters, values, entries, copies, strict=True):
                p.copy_(value)
                if entry is None:
                    kept.pop(p, None)
                    continue
                for key, content in copy.items():
                    entry[key].copy_(content)
                kept[p].clear()
                kept[p].update(entry)
        state.is_applying = False


def batches(moved: Moved) -> Iterator[list[int]]:
    """Cut the blocks into batches, the same on all workers."""
    batch, size = list[int](), 0
    for block, parameters in moved.items():
        more = sum(p.numel() * p.element_size() for p in parameters)
        if batch and size + more > GATHER_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(block)
        size += more
    if batch:
        yield batch


def _has_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """True if the scaler will skip the step."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(float(one) for one in found.values())


def are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | one.isnan() & other.isnan()).all())


def bytes_of(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the bytes of some tensors on a device, one after the other."""
    return torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *(
        tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors)])

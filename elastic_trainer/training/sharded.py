"""The update of a step whose optimizer's state is sharded over the workers (option `shard`).

reduced gradient (all workers) → here: each owner computes the new parameters of its blocks, and
puts everything back; one allgather → all workers hold all new parameters → vote → here: the holders
step their part of the optimizer, all others take over the new parameters

What always holds:
1. Before the vote nothing has changed. When it passes, each worker holds all that it needs to
   finish the step by itself: the gradient, its own part of the optimizer's state, and the new
   parameters of all blocks.
2. The optimizer sees whole parameters. So each gets the bits of an optimizer that is not sharded,
   if it treats each parameter by itself (`refusal` proves that).
3. The global norm, the scaler and its look for infinite gradients see the whole gradient.
4. Each holder of a block compares what it has computed with what the owner has sent. If they
   differ, no majority can tell which is right: all go back to a checkpoint.

Costs: one allgather of the parameters a step; the owner computes its blocks twice.

Source: the partition of the optimizer's state is that of ZeRO, stage 1 (arXiv 1910.02054, 5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from elastic_trainer.events.log import Events
from elastic_trainer.reduce.flat import Sums
from elastic_trainer.state.holders import lost_blocks
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.shards import Shards
from elastic_trainer.training.work import Work
from elastic_trainer.world.collectives import World
from elastic_trainer.world.generations import StateWithdrawn
from elastic_trainer.world.shard_moves import held_by_rank, move_shards

GATHER_BYTES = 32 << 20
"""The most bytes of new parameters that come in one collective, but for a single block."""


class ShardedUpdate:
    """The update of one worker's steps."""

    def __init__(self, work: Work, ready: Callable[[torch.optim.Optimizer], None]):
        self.work, self.state, self.flat = work, work.state, work.flat
        self._ready = ready
        """Makes what is in `.grad` the gradient that the optimizer is to see."""
        self.is_prepared = False
        """True if the gradient of the step in flight is ready, and the new parameters are here."""
        self._next: Sums | None = None
        self.error: Exception | None = None

    @property
    def shards(self) -> Shards:
        assert self.state.shards
        return self.state.shards

    def prepare(self, world: World, optimizer: torch.optim.Optimizer,
                multiplier: float | None, scaler: torch.amp.GradScaler | None) -> None:
        """Let all workers have the new parameters of this step. All call it, before the vote.
        Network. An error of the optimizer is kept for the vote (`error`)."""
        self.is_prepared = True
        self.flat.divide()
        self.flat.hand_out()
        self._ready(optimizer)
        if scaler and _has_overflow(scaler, optimizer):
            return
        self._next = self.work.reducer.spare()
        base = self.state.rates.base_of(optimizer)
        for blocks in self._batches(optimizer):
            mine = [p for block in blocks if block in self.shards.owned
                    for _, p in self._moved(block, optimizer)]
            with _trying_rates(optimizer, base, multiplier):
                computed = self._computed(optimizer, mine)
            self.work.events.reach("shards.computed", step=self.state.committed)
            self._receive(world, blocks, optimizer, computed)

    def _batches(self, optimizer: torch.optim.Optimizer) -> Iterator[list[int]]:
        """Cut the blocks that the optimizer moves in this step, the same on all workers."""
        batch, size = list[int](), 0
        for block in range(len(self.shards.blocks)):
            more = sum(p.numel() * p.element_size() for _, p in self._moved(block, optimizer))
            if batch and size + more > GATHER_BYTES:
                yield batch
                batch, size = [], 0
            if more:
                batch.append(block)
                size += more
        if batch:
            yield batch

    def _moved(self, block: int, optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
        """Return the parameters of a block that have a gradient for the optimizer of this phase."""
        its = self._of_phase(optimizer)
        return [(name, p) for name, p in self.shards.of(block)
                if p.grad is not None and id(p) in its]

    def _of_phase(self, optimizer: torch.optim.Optimizer) -> set[int]:
        return {id(p) for group in optimizer.param_groups for p in group["params"]}

    def _computed(self, optimizer: torch.optim.Optimizer,
                  parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the bytes of the new values of parameters, one after the other."""
        if not parameters:
            return torch.empty(0, dtype=torch.uint8, device=self.flat.device)
        try:
            with _tried(self.state, optimizer, parameters), self._alone(parameters):
                optimizer.step()
                return torch.cat([_bytes_of(p) for p in parameters])
        except Exception as error:
            self.error = error
            return torch.cat([_bytes_of(p) for p in parameters])

    def _receive(self, world: World, blocks: Sequence[int], optimizer: torch.optim.Optimizer,
                 mine: torch.Tensor) -> None:
        whole, at = world.allgather(mine, "shards.parameters"), 0
        views = dict(zip(map(id, self.flat.gradients.parameters), self._room.gradients,
                         strict=True))
        for rank in range(world.size):
            for block in blocks:
                for _, p in (self._moved(block, optimizer)
                             if self.shards.holders[block][0] == rank else ()):
                    size = p.numel() * p.element_size()
                    piece = whole[at : at + size]
                    if piece.storage_offset() % p.element_size():
                        piece = piece.clone()
                    views[id(p)].copy_(piece.view(p.dtype).view(p.shape))
                    at += size

    @property
    def _room(self) -> Sums:
        assert self._next is not None
        return self._next

    def apply(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """Step what this worker holds, and take over the new values of all other parameters."""
        self.is_prepared = False
        moved = [(name, p) for block in range(len(self.shards.blocks))
                 for name, p in self._moved(block, optimizer)]
        held = [p for name, p in moved if self.shards.holds(name)]
        with self._alone(held):
            step()
        if self._next is None:
            return  # the scaler has skipped the step
        views = dict(zip(map(id, self.flat.gradients.parameters), self._next.gradients,
                         strict=True))
        for name, p in moved:
            new = views[id(p)]
            if not self.shards.holds(name):
                p.copy_(new)
            elif not _are_same(p, new.to(p.dtype)) and not self.shards.mismatch:
                self.shards.mismatch = name
        self._next = None

    @contextmanager
    def _alone(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the optimizer see the gradients of these parameters alone."""
        kept, own = [(p, p.grad) for p in self.shards.parameters], set(map(id, parameters))
        for p in self.shards.parameters:
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
        self.error, self.is_prepared, self._next = None, False, None
        if scaler:  # else it would take the next gradient for one that it has unscaled
            scaler._per_optimizer_states.pop(id(optimizer), None)


def place_shards(world: World, state: LiveState, events: Events) -> None:
    """Let each member of a new generation hold its part of the optimizer's state. All members call
    it when each has the rest. Network. Raises StateWithdrawn on all if a part is lost."""
    if (shards := state.shards) is None:
        return
    held = held_by_rank(world, shards)
    if lost := lost_blocks(len(shards.blocks), held):
        if world.rank == 0:
            events.emit("worker.shards_lost", step=state.committed, blocks=len(lost),
                        of=len(shards.blocks))
        raise StateWithdrawn(
            f"all holders of {len(lost)} of {len(shards.blocks)} parts of the optimizer's state "
            f"are gone: back to the newest checkpoint")
    shards.place(world.rank, world.hosts, held)
    move_shards(world, state, held, events)


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
    state.is_applying = True
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


@contextmanager
def _trying_rates(optimizer: torch.optim.Optimizer, base: Sequence[Any] | None,
                  multiplier: float | None) -> Iterator[None]:
    """Give the groups the rates of the step in flight, and put back those that they had."""
    groups = optimizer.param_groups
    were = [group["lr"].clone() if isinstance(group["lr"], torch.Tensor) else group["lr"]
            for group in groups]

    def put(rates: Sequence[Any]) -> None:
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate

    if base is not None:
        put([one * (1.0 if multiplier is None else multiplier) for one in base])
    try:
        yield
    finally:
        put(were)


def _has_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """True if the scaler will skip the step."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(float(one) for one in found.values())


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | one.isnan() & other.isnan()).all())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)

"""The update of a step whose gradients are sharded over the workers (shard="gradients").

reduced gradient of the parts that this worker holds (reduce/scattered.py) → here: unscaled and
clipped by what all workers know → vote → here: the holders step their part of the optimizer → the
new parameters travel from the owners to all workers, in place

What always holds:
1. After the vote each block has two holders or more that can finish the step by themselves. They do
   so before the new parameters travel. No worker has a second copy of all parameters.
2. A step is finished when its holders have applied it. A worker that lacks parameters of others'
   blocks is `behind`. It trains, evaluates, gives its state away and runs the user's code only
   after it has them. If the generation breaks meanwhile, the next one begins with that: any holder
   of a block can send it, because its parameters are those of the step. They are, because a
   worker goes on to code that may change them only when it knows that all workers have them.
3. The global norm is torch's, from the norms of the parameters in their order. Each norm comes from
   the owner of the parameter. An infinite gradient that one worker finds is found by all.
4. Each holder of a block compares what it has computed with what the owner has sent.

Source: the partition of the gradients is that of ZeRO, stage 2 (arXiv 1910.02054, 5.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from elastic_trainer.data.seeds import seed_everything, seed_of
from elastic_trainer.state.holders import senders
from elastic_trainer.state.shards import Behind
from elastic_trainer.state.values.supported import some
from elastic_trainer.training.job.optimizers import parameters_of
from elastic_trainer.training.sharded import (
    Moved,
    all_held,
    are_same,
    batches,
    bytes_of,
    received,
)
from elastic_trainer.training.work import Update, Work
from elastic_trainer.world.collectives import World
from elastic_trainer.world.shard_moves import await_all


class ShardedGradients:
    """The update of one worker's steps."""

    error: Exception | None = None

    def __init__(self, work: Work, norm: Callable[[torch.Tensor], None]):
        self.work, self.state, self.flat = work, work.state, work.flat
        self.job, self.masters, self.shards = work.job, work.job.masters, work.shards
        self._norm = norm
        """Takes the norm of a step's gradient before it is clipped."""
        self._moved: Moved = {}
        """The parameters that the step in flight moves, by block."""
        self._has_applied = False
        """This process has applied the step that is not at its end."""

    # --- before the vote --------------------------------------------------------------------------

    def prepare(self, world: World, optimizer: torch.optim.Optimizer,
                multiplier: float | None, scaler: torch.amp.GradScaler | None) -> None:
        """Make what this worker holds of the gradient that which the optimizer is to see. All call
        it. Network, if the gradient is clipped or was scaled: one allreduce of a number for each
        parameter."""
        self.work.update, self.error = Update(), None
        job, used = self.job, self.flat.used()
        try:  # to walk through a large model takes milliseconds
            numbers = self._clipped(optimizer) if (
                job.clip_norm is not None or job.clip_value is not None) else []
        except RuntimeError as error:  # on all workers alike; the vote ends the run
            self.error = error
            return
        self.flat.divide()
        receivers = self.flat.gradients.receivers
        for number, gradient in self.flat.reduced.items():
            receiver = receivers[number]
            receiver.grad = gradient.to(receiver.dtype) if used[number] else None
        if scaler:
            try:
                with self.masters.in_groups(self.state, optimizer):
                    scaler.unscale_(optimizer)
            except Exception as error:  # the others wait for the norms; the vote informs them
                self.error = error
        clipped = [receivers[number] for number in numbers]
        if scaler or job.clip_norm is not None:
            norms, found = self._known_to_all(world, numbers, optimizer, scaler)
            if scaler:
                scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {
                    job.device: torch.full((), found, device=job.device)}
            if job.clip_norm is not None:
                total = torch.linalg.vector_norm(torch.stack(norms)) if norms else (
                    torch.tensor(0.0))
                torch.nn.utils.clip_grads_with_norm_(clipped, job.clip_norm, total)
                self._norm(total)
        if job.clip_value is not None:
            torch.nn.utils.clip_grad_value_(clipped, job.clip_value)

    def _known_to_all(self, world: World, numbers: Sequence[int],
                      optimizer: torch.optim.Optimizer,
                      scaler: torch.amp.GradScaler | None) -> tuple[list[torch.Tensor], float]:
        """Return the norms of the gradients of some parameters, and whether one gradient of the
        optimizer is infinite."""
        mine = {number: receiver.grad for number in numbers
                if (receiver := self.flat.gradients.receivers[number]).grad is not None
                and self._block(number) in self.shards.owned}
        table = torch.zeros(len(numbers) + 1, dtype=torch.float64)
        if mine and self.job.clip_norm is not None:
            places = {number: place for place, number in enumerate(numbers)}
            for kind in {gradient.dtype for gradient in mine.values()}:
                its = {number: one for number, one in mine.items() if one.dtype == kind}
                found = torch.stack(torch._foreach_norm([*its.values()])).double()
                table[[places[number] for number in its]] = found.cpu()
        if scaler:
            states: Any = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            table[-1] = sum(float(one) for one in states.values())
        if world.size > 1:
            table = world.wait(world.allreduce_start(table, "shards.norms"))
        device, kinds = self.job.device, [
            self.flat.gradients.receivers[number].dtype for number in numbers]
        return ([norm.to(device, kind) for norm, kind in zip(table[:-1], kinds, strict=True)],
                float(table[-1] > 0))

    def _clipped(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Return the parameters whose gradients are clipped together, by type, as torch has
        them."""
        used, gradients = self.flat.used(), self.flat.gradients
        places = {id(p): number for number, p in enumerate(gradients.everyone)}
        its = (self.job.model.parameters() if self.state.phases == 1
               else parameters_of(optimizer))
        numbers = [number for number in dict.fromkeys(places[id(p)] for p in its) if used[number]]
        if self.job.clip_norm is not None and (lost := [
                name for number in numbers
                if (name := gradients.names[number]) not in self.shards.block_of]):
            raise RuntimeError(
                f"{some(lost)} got gradients, are in no optimizer, and count for clip_norm. With "
                f'shard="gradients" no worker holds them. Call requires_grad_(False) on them, or '
                f'use shard="optimizer".')
        groups = _group_tensors_by_device_and_dtype(
            [[gradients.receivers[number] for number in numbers]],
            with_indices=True)
        return [numbers[at] for _, (_, found) in groups.items() for at in found]

    def _block(self, number: int) -> int:
        return self.shards.block_of[self.flat.gradients.names[number]]

    def forget(self, optimizer: torch.optim.Optimizer,
               scaler: torch.amp.GradScaler | None) -> None:
        """Forget what was prepared of a step that broke: it is not applied."""
        self.work.update = None
        for receiver in self.flat.gradients.receivers:
            receiver.grad = None
        if scaler:  # else it would take the next gradient for one that it has unscaled
            scaler._per_optimizer_states.pop(id(optimizer), None)

    # --- after it ---------------------------------------------------------------------------------

    def apply(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """Step what this worker holds. The gradient is gone then."""
        used, gradients = self.flat.used(), self.flat.gradients
        is_skipped = any(self.work.infinite().values())
        step()
        its = set(map(id, parameters_of(optimizer)))
        places = {name: number for number, name in enumerate(gradients.names)}
        self._moved = {} if is_skipped else {
            block: parameters for block in range(len(self.shards.blocks))
            if (parameters := [p for name, p in self.shards.of(block)
                               if id(p) in its and used[places[name]]])}
        for receiver in gradients.receivers:
            receiver.grad = None
        gradients.hand_out(used)
        self.flat.reduced, self.work.update = {}, None

    def postpone(self, behind: Behind) -> None:
        """Note what is to be done when the new parameters have come: `complete` does it."""
        self.shards.behind, self._has_applied = behind, True

    def complete(self, world: World) -> None:
        """Let all workers have the new parameters of the step that was applied. Network."""
        if self.shards.behind:
            owners = {block: self.shards.holders[block][0] for block in self._moved}
            self.work.events.reach("shards.computed", step=self.shards.behind.step)
            self._share(world, owners, self._moved)
            self._end()

    def catch_up(self, world: World, lacks: bool) -> None:
        """End the last finished step. All members of a new generation call it, newcomers too.
        `lacks`: one of them lacks parameters. Network, if so. Raises StateWithdrawn."""
        if not self.state.has_state:
            self.shards.held, self.shards.behind = set(), None
        if lacks:
            self._share_all(world)
        if self.shards.behind:
            self._end()

    def _share_all(self, world: World) -> None:
        owners = senders(self.shards.sizes, all_held(world, self.state, self.work.events))
        self._share(world, owners, {
            block: [p for _, p in self.shards.of(block)] for block in owners})

    @torch.no_grad()
    def _share(self, world: World, owners: Mapping[int, int], moved: Moved) -> None:
        """Send my blocks, and take over those that this worker does not hold. All workers have
        done so when it returns."""
        state, held = self.state, self.shards.held
        if world.size == 1:
            return
        state.copying.hold_writes()  # a device may still copy them for a checkpoint
        state.is_applying, self.shards.tries = state.has_state, self.shards.tries + 1
        try:
            for blocks in batches(moved):
                own = [p for block in blocks if owners[block] == world.rank for p in moved[block]]
                mine = bytes_of(own, self.flat.device)
                for block, p, value in received(
                        world, {block: owners[block] for block in blocks}, moved, mine):
                    if block not in held:
                        if state.has_state:
                            p.copy_(value)
                    elif not are_same(p, value):
                        self.shards.differs = True
            if self.shards.behind:
                self.shards.behind = self.shards.behind._replace(has_parameters=True)
        finally:
            state.is_applying = False  # what came in part comes again
        await_all(world, "shards.done")

    def _end(self) -> None:
        """Do what comes after the update of the parameters."""
        behind, state, job = self.shards.behind, self.state, self.job
        assert behind
        # A restart in place would do it a second time, or leave it out.
        state.is_applying, self.shards.tries = True, self.shards.tries + 1
        if not self._has_applied:  # but a process before this one; else the generators go on
            seed_everything(seed_of(job.schedule, behind.step, job.schedule.microbatches,
                                    (state.ticks - 1) % state.phases))
        if state.phase == 0:
            after_update(self.work, behind)
        self.shards.behind, self._moved, self._has_applied = None, {}, False
        state.is_applying = False


def after_update(work: Work, behind: Behind) -> None:
    """End a step whose new parameters are there: the average takes them, and code of the user's
    follows."""
    if work.job.average and behind.averages:
        work.job.average.update(behind.step)
    work.events.trace.mark.enter("after")
    work.job.after_step(behind.step)

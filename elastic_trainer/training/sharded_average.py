"""The averaged weights, where each worker has a part of them (`ema` or `swa`, with `shard`).

trainer.averaged() on all workers → evaluation.py (a round) → here: the owners send their parts →
the model has the averaged weights; the last step of a run → here → Average.whole

What always holds:
1. No worker has the whole average while steps are done. It is there, in the types of the
   parameters, while it is shown, and after the last step, in the memory of the host.
2. The parts are asked of those that hold them, because in a new generation this comes before the
   parts move to their new holders.
"""

from __future__ import annotations

import torch

from elastic_trainer.state.holders import senders
from elastic_trainer.training.sharded import Moved, all_held, batches, bytes_of, received
from elastic_trainer.training.work import Work
from elastic_trainer.world.collectives import World


def gathered_average(world: World, work: Work,
                     place: str | torch.device | None = None) -> dict[str, torch.Tensor]:
    """Return the average of each parameter, in the parameter's type, on its device or another
    `place`. All workers call it. Network: the bytes of the parameters. Raises StateWithdrawn, on
    all, if a part is lost."""
    shards, average, device = work.shards, work.job.average, work.job.device
    assert average
    owners = senders(shards.sizes, all_held(world, work.state, work.events))
    found = {name: mine.to(place or mine.device, average.parameters[name].dtype, copy=True)
             for name, mine in average.weights.items()
             if world.size == 1 or name not in shards.block_of}
    if world.size == 1:
        return found
    moved: Moved = {block: [p for _, p in shards.of(block)] for block in owners}
    names = {id(p): name for name, p in average.parameters.items()}
    for blocks in batches(moved):
        own = [average.weights[names[id(p)]].to(p.dtype)
               for block in blocks if owners[block] == world.rank for p in moved[block]]
        for _, p, value in received(world, {block: owners[block] for block in blocks}, moved,
                                    bytes_of(own, device)):
            room = torch.empty_like(p, device=place or p.device, requires_grad=False)
            found[names[id(p)]] = room.copy_(value)
    return found


def keep_whole(world: World, work: Work) -> None:
    """Let each worker have the average of a run whose last step is done. All workers call it."""
    if (average := work.job.average) and average.is_sharded and average.updates:
        average.whole = gathered_average(world, work, "cpu")

"""What a run with a sharded optimizer logs of its risks: a host or zone that holds all copies of a
part, and a world that would be too small for the memory of its workers.

world, holders, live state, free memory → here → shard_remarks.py (sentences) → event log

What always holds: one event for each change of what is exposed, by rank 0; and one of memory in the
life of a process, by rank 0, or by a worker whose memory is too small for --min-np.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.reduce.gradient_sums import SUM_BYTES
from elastic_trainer.state.holders import exposed
from elastic_trainer.state.shards import Shards
from elastic_trainer.training.shard_remarks import (
    Measured,
    exposed_sentence,
    is_too_small,
    memory_sentence,
)
from elastic_trainer.training.warm_up import free_bytes
from elastic_trainer.training.work import Work
from elastic_trainer.world.collectives import World


def log_exposed(world: World, shards: Shards, step: int, launch: Launch, events: Events) -> None:
    """Log what one host or zone holds alone. All members call it, with the holders of their
    generation. Network, if there is any: the names of hosts and zones."""
    found = exposed(shards.holders, world.sites)
    if found:
        texts = world.gather_texts(json.dumps([launch.host, launch.zone or "unknown"]))
        names = sorted({json.loads(text)[found.is_zone] for text, site
                        in zip(texts, world.sites, strict=True)
                        if site[found.is_zone] in found.places})
        if world.rank == 0 and found != shards.exposed:
            of, kind = len(shards.blocks), "zones" if found.is_zone else "hosts"
            more: dict[str, Any] = {kind: names}
            events.emit("worker.shards_exposed", step=step, blocks=found.blocks, of=of,
                        meaning=exposed_sentence(found, names, world.sites, of, shards.copies - 1),
                        **more)
    shards.exposed = found


def log_memory(world: World, work: Work, launch: Launch, events: Events) -> None:
    """Log which worlds are too small, once: after a step, when the optimizer has its state."""
    shards = work.state.shards
    if shards is None or shards.is_foreseen or not shards.held:
        return
    entries = shards.entries(shards.held)
    held = sum(tensor.nbytes for entry in [*entries.optimizer.values(), entries.averages]
               for tensor in entry.values() if isinstance(tensor, torch.Tensor))
    elements = sum(shards.sizes[block] for block in shards.held)
    leaves = work.flat.is_front
    found = Measured(
        sums=SUM_BYTES * sum(shards.sizes) if leaves else 0,
        parameters=sum(p.nbytes for p in work.job.model.parameters()),
        gradients=SUM_BYTES * elements if leaves else sum(
            tensor.nbytes for tensor in work.flat.sums.values()),
        optimizer=held * sum(shards.sizes) // elements, held=held, copies=shards.copies,
        largest=held * max(shards.sizes) // elements, free=_free(work.job.device, world))
    shards.is_foreseen = True
    is_low = is_too_small(found, launch.min_workers)
    if world.rank == 0 or is_low:
        events.emit("worker.memory_foreseen", size=world.size, parameters_bytes=found.parameters,
                    gradients_bytes=found.gradients, optimizer_bytes=found.optimizer,
                    held_bytes=found.held, free_bytes=found.free,
                    min_workers_for_memory=found.min_workers, min_workers=launch.min_workers,
                    optimizer_bytes_with_min_workers=found.sharded_with(
                        max(1, launch.min_workers)),
                    meaning=memory_sentence(found, world.size, launch.min_workers),
                    **{"level": "warning"} if is_low else {})


def _free(device: torch.device, world: World) -> int:
    """Return the free memory of this worker: of its GPU with what its allocator keeps, or its part
    of what its host or container has left."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return free_bytes() // world.hosts.count(world.hosts[world.rank])

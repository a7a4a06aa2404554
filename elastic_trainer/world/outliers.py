"""Find the workers whose bits differ, after a vote or a transfer has shown that some do.

vote or transfer (a checksum differs) → here → the outlier leaves, the others repeat the step

What it does not do: decide what happens if no majority holds the same bits, or if a part of the
state was lost in a transfer. The training decides.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.world.collectives import PeersLost
from elastic_trainer.world.replicas import (
    NUMBER,
    Part,
    ReplicaDiffers,
    ReplicasDisagree,
    judge,
)
from elastic_trainer.world.vote import Peers

NAMED_TENSORS = 5
"""An event names this many of the tensors that differ."""


@dataclass(frozen=True)
class Lost:
    """A part of the state was lost in a transfer."""

    holders: tuple[int, ...]
    """The ranks whose state is right."""
    receivers: tuple[int, ...]
    """The ranks that have received it, and differ."""
    received_step: int
    """The first step at which one of them has received it."""
    tensors: tuple[str, ...]


@dataclass
class Search:
    """A worker's part in the searches of its life."""

    received: int = -1
    """The ticks at which it has received its state; -1: it has not, or not lately."""
    outlying_receivers: int = 0
    """How many receivers have left, as far as this worker has seen it."""


def find_outliers(world: Peers, launch: Launch, events: Events, held: Sequence[Part],
             among: Sequence[int], mine: Search, *, step: int, since_step: int,
             phases: int = 1) -> Lost | None:
    """Find the workers whose bits differ, of the ranks `among`. All workers call it.

    `since_step` is a step at which all bits were the same. Raises ReplicaDiffers on a worker that
    differs from more than half of them, and PeersLost on the others. Returns None if there is no
    such majority, and what is lost if only receivers speak against a worker. Network: two
    allgathers.

    Raises ReplicasDisagree on all if only numbers in the optimizer's attributes differ: that is no
    machine's fault.
    """
    me = {"host": launch.host, "worker": launch.worker or launch.host, "held": list(held),
          "received": mine.received, "outlying_receivers": mine.outlying_receivers}
    everyone = [json.loads(text) for text in world.gather_texts(json.dumps(me))]
    received = [int(everyone[rank]["received"]) for rank in among]
    found = judge([everyone[rank]["held"] for rank in among], received,
                  max(int(one["outlying_receivers"]) for one in everyone))
    if found.tensors and all(name.endswith(NUMBER) for name in found.tensors):
        texts = ", ".join(name.removesuffix(NUMBER) for name in found.tensors[:NAMED_TENSORS])
        raise ReplicasDisagree(
            f"{texts} had another value on some workers in step {step}, and nothing else was "
            f"different. The attributes of an optimizer are part of the state, which is the same "
            f"on all workers. Keep a value of one worker (a time, a log of rank 0) outside of the "
            f"optimizer.")
    outliers = [among[place] for place in found.outliers]
    names = found.tensors[:NAMED_TENSORS]
    if found.holders:
        late = [place for place, when in enumerate(received) if when > min(received)]
        return Lost(tuple(among[place] for place in found.holders),
                    tuple(among[place] for place in late),
                    min(received[place] for place in late) // phases, names)
    if world.rank == among[(found.majority or (0,))[0]]:
        for rank in outliers:
            events.emit("worker.replica_differs", step=step, since_step=since_step,
                        host=everyone[rank]["host"], outlier=everyone[rank]["worker"],
                        outlier_rank=rank, majority=len(found.majority), tensors=names,
                        tensors_count=len(found.tensors))
    if not found.majority:
        return None
    mine.outlying_receivers += sum(received[place] > min(received) for place in found.outliers)
    if world.rank in outliers:
        raise ReplicaDiffers(
            f"this worker holds other bits than {len(found.majority)} of {len(among)} workers in "
            f"step {step}: {', '.join(names)}")
    raise PeersLost(f"rank {', '.join(map(str, outliers))} holds other bits and leaves")

"""Find the workers whose bits differ, after a vote or a transfer has shown that some do.

vote or transfer (a checksum differs) → here → the odd worker leaves, the others repeat the step

What it does not do: decide what happens if no majority holds the same bits. The training decides.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from elastic_trainer.config import Launch
from elastic_trainer.observe.events import Events
from elastic_trainer.world.collectives import PeersLost
from elastic_trainer.world.replicas import Difference, Part, ReplicaDiffers, judge

NAMED_TENSORS = 5
"""An event names this many of the tensors that differ."""


class Peers(Protocol):
    """What the search needs of the world."""

    rank: int

    def gather_texts(self, text: str) -> list[str]: ...


def find_odd(world: Peers, launch: Launch, events: Events, held: Sequence[Part],
             among: Sequence[int], *, step: int, since_step: int) -> Difference:
    """Find the workers whose bits differ, of the ranks `among`. All workers call it.

    `since_step` is a step at which all bits were the same. Raises ReplicaDiffers on a worker that
    differs from more than half of them, and PeersLost on the others. Returns the difference if
    there is no such majority. Network: two allgathers.
    """
    me = {"host": launch.host, "worker": launch.worker or launch.host, "held": list(held)}
    everyone = [json.loads(text) for text in world.gather_texts(json.dumps(me))]
    found = judge([everyone[rank]["held"] for rank in among])
    odd = [among[place] for place in found.odd]
    names = found.tensors[:NAMED_TENSORS]
    if world.rank == among[(found.majority or (0,))[0]]:
        for rank in odd:
            events.emit("worker.replica_differs", step=step, since_step=since_step,
                        host=everyone[rank]["host"], odd_worker=everyone[rank]["worker"],
                        odd_rank=rank, majority=len(found.majority), tensors=names,
                        tensors_count=len(found.tensors))
    if not found.majority:
        return found
    if world.rank in odd:
        raise ReplicaDiffers(
            f"this worker holds other bits than {len(found.majority)} of {len(among)} workers in "
            f"step {step}: {', '.join(names)}")
    raise PeersLost(f"rank {', '.join(map(str, odd))} holds other bits and leaves")

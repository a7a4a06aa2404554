"""What a run with a sharded optimizer would lose with one host or zone, and which world is too
small for its memory: pure functions.

what depends on one host or zone (state/holders.py); measured bytes, --min-np → here → the sentences
of worker.shards_exposed and worker.memory_foreseen (training/shard_watch.py logs them)

What always holds:
1. Each sentence has the values on which it rests, and the remedy.
2. What a worker holds already is not in its free memory. The activations of a step are: the free
   memory is what is left after the first step, when the allocator has kept theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_trainer.state.holders import Exposed, Site

GIB = 2**30


def exposed_sentence(found: Exposed, names: Sequence[str], sites: Sequence[Site], blocks: int,
                     buddies: int) -> str:
    """Return what a loss costs, and what helps."""
    one = "the zone" if found.is_zone else "the host"
    fact = (f"{found.blocks} of {blocks} parts of the optimizer's state have all their copies on "
            f"one host, or in one zone ({', '.join(names)[:500]}): the loss of {one} takes the run "
            f"back to the newest checkpoint.")
    if found.is_zone:
        return f"{fact} Add hosts in other zones, until no zone has more than half of them."
    if len({site.host for site in sites}) == 1:
        return f"{fact} All workers are on one host ({len(sites)}). Add a host."
    return f"{fact} Set buddies={buddies + 1}."


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one worker holds, and the memory that it has left, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    """Of all parameters, once."""
    largest: int
    """The largest block of it: a worker may hold one more than its part."""
    held: int
    """What this worker holds of it now."""
    free: int
    """Of its device, or of its host or container; this worker's part, if several share it."""
    copies: int
    """How many workers hold each block."""
    sums: int = 0
    """Of all gradients, if they are sharded, too: a worker needs its part of them in each step."""

    @property
    def sharded(self) -> int:
        """What all workers share."""
        return self.optimizer + self.sums

    @property
    def largest_sharded(self) -> int:
        return self.largest * self.sharded // max(1, self.optimizer)

    def sharded_with(self, size: int) -> int:
        """Return what a worker holds of it in a world of some size, at most."""
        part = -(-self.sharded * self.copies // size) + self.largest_sharded
        return self.sharded if size <= self.copies else min(self.sharded, part)

    @property
    def min_workers(self) -> int:
        """The size of the smallest world whose workers have memory for what they hold; 0: none."""
        has = self.held + self.free
        if self.sharded <= has:
            return 1
        room = has - self.largest_sharded
        return -(-self.sharded * self.copies // room) if room > 0 else 0


def memory_sentence(found: Measured, size: int, min_workers: int) -> str:
    """Return the numbers, and what helps if --min-np is too small."""
    least, needs = max(1, min_workers), found.min_workers
    what = "the optimizer's state" + " and of gradients" * bool(found.sums)
    fact = (f"With {size} workers this one has {_gib(found.free)} free, and holds "
            f"{_gib(found.parameters)} of parameters, {_gib(found.gradients)} of gradients and "
            f"{_gib(found.held)} of the optimizer's state. With {least} (--min-np) it would hold "
            f"{_gib(found.sharded_with(least))} of {what}.")
    if not is_too_small(found, min_workers):
        return fact
    return (f"{fact} Fewer than {needs} workers run out of memory. Set --min-np {needs}, or use "
            f"hosts with more memory." if needs else
            f"{fact} No number of workers has memory for it. Use hosts with more memory.")


def is_too_small(found: Measured, min_workers: int) -> bool:
    """True if the run may go on with so few workers that they run out of memory."""
    return not 0 < found.min_workers <= max(1, min_workers)


def _gib(number: int) -> str:
    return f"{number / GIB:.2f} GiB"

"""Who holds what the optimizer keeps, where it is sharded: pure functions of who held it before.

sizes of the parameters → blocks; who holds each block, and the hosts of all ranks → here → holders
of each block, the first of which owns it → moves (shard_moves.py)

A block is a run of neighbouring parameters. Its owner computes new values for all workers, and
writes the block's part of a checkpoint. Each other holder is a buddy: it computes the same values.

What always holds:
1. All ranks of a generation compute the same holders, from the same arguments.
2. A block has as many holders as asked for, or all ranks if there are fewer. They are on different
   hosts where there are as many hosts.
3. No rank holds more than its part of all copies, and one block. A holder stays one while that
   holds. So after a change of the world only what must move does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

MOST_BLOCKS = 512
"""About the most blocks of a model: each has a part of a checkpoint of its own."""

LEVEL = 0.05
"""A difference of this part of what each holds is not worth a move."""

Holders = list[tuple[int, ...]]
"""The ranks that hold each block; the first one owns it."""


class Move(NamedTuple):
    """A block that a rank has to receive from another one."""

    block: int
    source: int
    target: int


def blocks_of(sizes: Sequence[int]) -> list[range]:
    """Cut parameters of these numbers of elements into blocks; return the numbers of each."""
    least, blocks, start, elements = max(1, sum(sizes) // MOST_BLOCKS), list[range](), 0, 0
    for number, size in enumerate(sizes):
        elements += size
        if elements >= least or number + 1 == len(sizes):
            blocks.append(range(start, number + 1))
            start, elements = number + 1, 0
    return blocks


def holders_of(sizes: Sequence[int], hosts: Sequence[int], held: Sequence[Collection[int]],
               copies: int) -> Holders:
    """Return the holders of each block.

    `sizes` are the elements of each block, `hosts` has the number of each rank's host, and `held`
    the blocks that each rank holds now.
    """
    copies = min(copies, len(hosts))
    most = sum(sizes) * copies / len(hosts)
    loads = [0] * len(hosts)
    found: list[list[int]] = [[] for _ in sizes]
    large_first = sorted(range(len(sizes)), key=lambda block: (-sizes[block], block))

    def is_apart(block: int, rank: int) -> bool:
        return _is_apart(hosts, found[block], rank)

    def give(block: int, rank: int) -> None:
        found[block].append(rank)
        loads[rank] += sizes[block]

    for block in large_first:
        for rank in (rank for rank, its in enumerate(held) if block in its):
            if (len(found[block]) < copies and loads[rank] + sizes[block] <= most
                    and is_apart(block, rank)):
                give(block, rank)
    for block in large_first:
        while len(found[block]) < copies:
            others = [rank for rank in range(len(hosts)) if rank not in found[block]]
            give(block, min(others, key=lambda rank: (not is_apart(block, rank), loads[rank],
                                                      block not in held[rank], rank)))
    while (step := _levelling(sizes, hosts, found, held, loads)):
        block, source, target = step
        found[block][found[block].index(source)] = target
        loads[source], loads[target] = loads[source] - sizes[block], loads[target] + sizes[block]
    return _owned(sizes, found, len(hosts))


def _levelling(sizes: Sequence[int], hosts: Sequence[int], found: Sequence[Sequence[int]],
               held: Sequence[Collection[int]], loads: Sequence[int]) -> Move | None:
    """Return a block that the rank with most should give to another one; None: all have about as
    much. Each such step makes the largest load, or their number, smaller."""
    source = max(range(len(loads)), key=lambda rank: (loads[rank], rank))
    best: tuple[Any, Move] | None = None
    for block, its in enumerate(found):
        if source not in its:
            continue
        others = [rank for rank in its if rank != source]
        for target in range(len(loads)):
            gain = loads[source] - loads[target] - sizes[block]
            if target in its or gain <= LEVEL * sum(sizes) / len(loads) or not _is_apart(
                    hosts, others, target):
                continue
            key = (block not in held[source], block in held[target], min(gain, sizes[block]))
            if best is None or key > best[0]:
                best = key, Move(block, source, target)
    return best and best[1]


def _is_apart(hosts: Sequence[int], ranks: Collection[int], rank: int) -> bool:
    """True if a rank is on another host than these, or they are on all hosts."""
    taken = {hosts[other] for other in ranks}
    return hosts[rank] not in taken or len(taken) == len(set(hosts))


def _owned(sizes: Sequence[int], found: Sequence[Sequence[int]], ranks: int) -> Holders:
    """Choose the owners so that all ranks own as much."""
    owned, holders = [0] * ranks, Holders()
    for block, its in enumerate(found):
        owner = min(its, key=lambda rank: (owned[rank], rank))
        owned[owner] += sizes[block]
        holders.append((owner, *sorted(set(its) - {owner})))
    return holders


def lost_blocks(blocks: int, held: Sequence[Collection[int]]) -> list[int]:
    """Return the blocks that no rank holds."""
    kept = {block for its in held for block in its}
    return [block for block in range(blocks) if block not in kept]


def moves_between(sizes: Sequence[int], held: Sequence[Collection[int]],
                  holders: Holders) -> list[Move]:
    """Return who sends which block to whom. The senders send about as much."""
    sent, moves = [0] * len(held), list[Move]()
    for block, ranks in enumerate(holders):
        for target in ranks:
            if block in held[target]:
                continue
            source = min((rank for rank, its in enumerate(held) if block in its),
                         key=lambda rank: (sent[rank], rank))
            sent[source] += sizes[block]
            moves.append(Move(block, source, target))
    return moves

"""Who holds what the optimizer keeps, where it is sharded: pure functions of who held it before.

sizes of the parameters → blocks; who holds each block, and the sites of all ranks → here → holders
of each block, the first of which owns it → moves (shard_moves.py)

A block is a run of neighbouring parameters. Its owner computes new values for all workers, and
writes the block's part of a checkpoint. Each other holder is a buddy: it computes the same values.

What always holds:
1. All ranks of a generation compute the same holders, from the same arguments.
2. A block has as many holders as asked for, or all ranks if there are fewer. They are on different
   hosts where there are as many hosts, also if a rank holds more than its part then.
3. No rank holds more than its part of all copies, and one block. A holder stays one while that
   holds. So after a change of the world only what must move does.
4. The holders of a block are in different zones where there are as many zones, as far as rule 3
   lets them. The load wins, because a rank that holds too much can run out of memory, and a zone is
   lost more seldom: with three hosts in one zone and one in another, half of all blocks with one
   buddy are in both zones. Hosts of unknown zone count as hosts of one zone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

MOST_BLOCKS = 512
"""About the most blocks of a model: each has a part of a checkpoint of its own."""

LEVEL = 0.05
"""A difference of this part of what each holds is not worth a move."""

APART, SHARED, CROWDED = range(3)
"""A holder's zone has no other holder of the block, or all zones have one; some; all others."""

Holders = list[tuple[int, ...]]
"""The ranks that hold each block; the first one owns it."""


class Site(NamedTuple):
    """Where a rank is: numbers of its host and of the zone of that host."""

    host: int
    zone: int = 0
    """0: unknown."""


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


def holders_of(sizes: Sequence[int], sites: Sequence[Site], held: Sequence[Collection[int]],
               copies: int) -> Holders:
    """Return the holders of each block.

    `sizes` are the elements of each block, `sites` has the site of each rank, and `held` the blocks
    that each rank holds now.
    """
    placing = _Placing(sizes, sites, held, min(copies, len(sites)))
    placing.keep()
    placing.fill()
    placing.level()
    if placing.part_zones():
        placing.level()
    return _owned(sizes, placing.found, len(sites))


class _Placing:
    """The holders that are found so far, and what each rank and each zone has of them."""

    def __init__(self, sizes: Sequence[int], sites: Sequence[Site],
                 held: Sequence[Collection[int]], copies: int):
        self.sizes, self.sites, self.held, self.copies = sizes, sites, held, copies
        self.hosts, self.zones = (len({site[kind] for site in sites}) for kind in (0, 1))
        self.part = sum(sizes) * copies / len(sites)
        """The elements that each rank would hold if all held as much."""
        self.found: list[list[int]] = [[] for _ in sizes]
        self.loads = [0] * len(sites)
        self.large_first = sorted(range(len(sizes)), key=lambda block: (-sizes[block], block))

    def keep(self) -> None:
        """Let those that hold a block stay its holders, up to their part; in different zones, if
        they are more than needed."""
        for most in (0, APART), (0, CROWDED):
            for block in self.large_first:
                for rank in (rank for rank, its in enumerate(self.held) if block in its):
                    if (len(self.found[block]) < self.copies and rank not in self.found[block]
                            and self.loads[rank] + self.sizes[block] <= self.part
                            and self.nearness(self.found[block], rank) <= most):
                        self.found[block].append(rank)
                        self.loads[rank] += self.sizes[block]

    def fill(self) -> None:
        """Find the holders that are missing. The zone with the most room comes first: else it would
        have to take all copies of the last blocks."""
        for block in self.large_first:
            its = self.found[block]
            while len(its) < self.copies:
                room = dict.fromkeys((site.zone for site in self.sites), 0.0)
                for load, site in zip(self.loads, self.sites, strict=True):
                    room[site.zone] += self.part - load
                keys = {rank: self._key(block, rank, room[self.sites[rank].zone])
                        for rank in range(len(self.sites)) if rank not in its}
                its.append(min(keys, key=keys.__getitem__))
                self.loads[its[-1]] += self.sizes[block]

    def _key(self, block: int, rank: int, room: float) -> tuple[float, ...]:
        host, zone = self.nearness(self.found[block], rank)
        return (host, self.loads[rank] >= self.part, zone, -room, self.loads[rank],
                block not in self.held[rank], rank)

    def part_zones(self) -> bool:
        """Move holders to other zones that have room, or let two blocks change places; return True
        if any has moved."""
        return self.zones > 1 and any([self._is_parted(block) for block in self.large_first])

    def _is_parted(self, block: int) -> bool:
        """Move a holder of a block to a better zone, if one can move; return True if it has."""
        for source in sorted(self.found[block], key=self.loads.__getitem__, reverse=True):
            if way := self._way(block, source):
                target, other = way
                self._move(block, source, target)
                if other is not None:
                    self._move(other, target, source)
                return True
        return False

    def _way(self, block: int, source: int) -> tuple[int, int | None] | None:
        """Return which rank in a better zone can take a block, and which block it has to give."""
        others = [rank for rank in self.found[block] if rank != source]
        host, zone = self.nearness(others, source)
        apart = [rank for rank in range(len(self.sites)) if rank not in self.found[block]
                 and self.nearness(others, rank) < (host, zone)] if zone else []
        apart.sort(key=lambda rank: (block not in self.held[rank], self.loads[rank], rank))
        for target in apart:
            if self.loads[target] < self.part:
                return target, None
        for target in apart:
            for other, its in enumerate(self.found):
                more = self.sizes[block] - self.sizes[other]
                if target not in its or source in its or not (
                        self.loads[target] + more <= self.part + self.sizes[block]
                        and self.loads[source] - more <= self.part + self.sizes[other]):
                    continue
                rest = [rank for rank in its if rank != target]
                if self.nearness(rest, source) <= max(self.nearness(rest, target),
                                                      (host, zone - 1)):
                    return target, other
        return None

    def level(self) -> None:
        """Move blocks until all ranks hold about as much. Each step makes the sum of the squares of
        the loads smaller."""
        while move := self._levelling():
            self._move(*move)

    def _levelling(self) -> Move | None:
        """Return a block that the rank with most can give to another one; None: no rank can."""
        ranks = sorted(range(len(self.loads)), key=lambda rank: (self.loads[rank], rank))
        for source in reversed(ranks):
            best: tuple[Any, Move] | None = None
            for block, its in enumerate(self.found):
                if source not in its:
                    continue
                size, others = self.sizes[block], [rank for rank in its if rank != source]
                for target in range(len(ranks)):
                    gain = self.loads[source] - self.loads[target] - size
                    if target in its or gain <= LEVEL * sum(self.sizes) / len(ranks):
                        continue
                    near, was = self.nearness(others, target), self.nearness(others, source)
                    if near > was and (near[0] > was[0]
                                       or self.loads[source] <= self.part + size):
                        continue
                    key = (block not in self.held[source], block in self.held[target],
                           min(gain, size))
                    if best is None or key > best[0]:
                        best = key, Move(block, source, target)
            if best:
                return best[1]
        return None

    def _move(self, block: int, source: int, target: int) -> None:
        self.found[block][self.found[block].index(source)] = target
        self.loads[source] -= self.sizes[block]
        self.loads[target] += self.sizes[block]

    def nearness(self, ranks: Collection[int], rank: int) -> tuple[int, int]:
        """Return whether a rank is on the host of one of these, though others are free, and how
        near its zone is to theirs."""
        hosts, zones = ({self.sites[other][kind] for other in ranks} for kind in (0, 1))
        host, zone = self.sites[rank]
        is_taken = zone in zones and len(zones) < self.zones
        return (int(host in hosts and len(hosts) < self.hosts),
                is_taken * (CROWDED if len(zones) == 1 else SHARED))


def _owned(sizes: Sequence[int], found: Sequence[Sequence[int]], ranks: int) -> Holders:
    """Choose the owners so that all ranks own as much."""
    owned, holders = [0] * ranks, Holders()
    for block, its in enumerate(found):
        owner = min(its, key=lambda rank: (owned[rank], rank))
        owned[owner] += sizes[block]
        holders.append((owner, *sorted(set(its) - {owner})))
    return holders


class Exposed(NamedTuple):
    """What a single loss would take back to a checkpoint."""

    blocks: int
    """The number of blocks whose holders are all on one host, or all in one zone."""
    is_zone: bool
    places: tuple[int, ...]
    """The hosts, or zones, that are the only ones of a block."""


def exposed(holders: Holders, sites: Sequence[Site]) -> Exposed | None:
    """Return what depends on one host, else on one of several zones; None: nothing does."""
    for kind in (0, 1):
        places = [{sites[rank][kind] for rank in ranks} for ranks in holders]
        alone = [its.pop() for its in places if len(its) == 1]
        if alone and (kind == 0 or len({site.zone for site in sites}) > 1):
            return Exposed(len(alone), kind == 1, tuple(sorted(set(alone))))
    return None


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
            if block not in held[target]:
                moves.append(Move(block, _sender(block, sizes, held, sent), target))
    return moves


def senders(sizes: Sequence[int], held: Sequence[Collection[int]]) -> dict[int, int]:
    """Return who sends each block to all, of those that hold it. They send about as much."""
    sent = [0] * len(held)
    return {block: _sender(block, sizes, held, sent) for block in range(len(sizes))}


def _sender(block: int, sizes: Sequence[int], held: Sequence[Collection[int]],
            sent: list[int]) -> int:
    """Return the holder of a block that has sent least, and add the block to what it has `sent`."""
    source = min((rank for rank, its in enumerate(held) if block in its),
                 key=lambda rank: (sent[rank], rank))
    sent[source] += sizes[block]
    return source

"""The way of one bucket to the sum over all workers, in the order of the fixed tree.

sums of my subtrees (a bucket of each) → my host's workers → the other hosts → back to all workers

A bucket is cut into one slice for each worker. The worker of that rank finishes the tree for it.

    in the host         each worker of a host carries some slices, and adds the host's subtrees
    between hosts       the carrier of a slice sends the host's subtrees to the slice's worker
    back                an allgather gives all slices to all

What always holds:
1. The route follows from the ranks, their hosts and the number of micro-batches alone. So each
   worker knows what arrives, and all take part in the same collectives.
2. A host sends its own subtrees once, whatever the number of its workers, and as many as
   `tree.joined` makes of them: one, if its micro-batches are a node of the tree. What comes back
   passes each host once, because the allgather is a ring in the order of the ranks.
3. Where each host has one worker, or all are on one host, a stage is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from elastic_trainer.reduce.reducer import Collectives
from elastic_trainer.reduce.tree import joined, joined_sums, node_sum
from elastic_trainer.schedule.schedule import (
    aligned_subtrees,
    dealt_microbatches,
    owned_microbatches,
)


@dataclass(frozen=True)
class Route:
    """Who sends what to whom, as one worker has to know it."""

    rank: int
    hosts: tuple[int, ...]
    """The number of each rank's host."""
    microbatches: int
    trees: tuple[tuple[range, ...], ...]
    """The subtrees of each rank."""

    @cached_property
    def groups(self) -> list[list[int]]:
        """Return the ranks of each host, in the order of their first ranks."""
        found: dict[int, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, []).append(rank)
        return list(found.values())

    @cached_property
    def mine(self) -> list[int]:
        """Return the ranks of my host."""
        return next(group for group in self.groups if self.rank in group)

    @cached_property
    def carried(self) -> dict[int, list[int]]:
        """Return the slices that each rank of my host carries: its own, and its share of those of
        other hosts."""
        found = {rank: [rank] for rank in self.mine}
        for slice_ in range(len(self.hosts)):
            if slice_ not in self.mine:
                found[self._carrier(self.mine, slice_)].append(slice_)
        return {rank: sorted(slices) for rank, slices in found.items()}

    @staticmethod
    def _carrier(group: Sequence[int], slice_: int) -> int:
        return group[slice_ % len(group)]

    def held(self, group: Sequence[int]) -> list[range]:
        """Return the subtrees of a host."""
        return joined((tree for rank in group for tree in self.trees[rank]), self.microbatches)

    @cached_property
    def senders(self) -> dict[int, list[range]]:
        """Return the ranks of other hosts that send to me, and which subtrees they send."""
        return dict(sorted((self._carrier(group, self.rank), self.held(group))
                           for group in self.groups if group != self.mine))


@lru_cache(maxsize=8)
def route_of(rank: int, hosts: tuple[int, ...], microbatches: int) -> Route:
    """Return the route where each rank has neighbours, and sends their subtrees."""
    return Route(rank, hosts, microbatches, tuple(
        tuple(aligned_subtrees(owned_microbatches(one, len(hosts), microbatches), microbatches))
        for one in range(len(hosts))))


@lru_cache(maxsize=64)
def dealt_route(rank: int, hosts: tuple[int, ...], microbatches: int,
                number: int | None = None) -> Route:
    """Return the route of one round of dealt micro-batches, of which each rank sends its own; None:
    of all rounds."""
    every = slice(None) if number is None else slice(number, number + 1)
    return Route(rank, hosts, microbatches, tuple(
        tuple(range(one, one + 1)
              for one in dealt_microbatches(rank, len(hosts), microbatches)[every])
        for rank in range(len(hosts))))


Asked = tuple[Any, Callable[[Any], Any]]
"""A collective on its way, and what takes its result."""
Course = Generator[Asked, Any, None]
Pieces = dict[range, torch.Tensor]


def course(world: Collectives, route: Route, name: str, mine: Sequence[torch.Tensor],
           result: torch.Tensor) -> Course:
    """Sum a bucket over all workers into `result`, which may be the memory of one of `mine`.

    `mine` has the bucket of each of my subtrees, and some elements after it, so that it can be cut
    into equal slices. Both are changed. Yields each collective, and is sent its result.
    """
    length = -(-result.numel() // world.size)
    pieces = yield from Stage(world, route, name, length, result[:0]).my_slice(mine)
    total = node_sum(pieces, range(route.microbatches), route.microbatches)
    whole = yield world.allgather_start(total, f"{name}.result"), world.wait
    result.copy_(whole[: result.numel()])


@dataclass(frozen=True)
class Wanted:
    """Which elements of a bucket each rank wants of the sum, and what takes mine: its elements, in
    their order."""

    ranges: Sequence[Sequence[tuple[int, int]]]
    take: Callable[[torch.Tensor], None]

    def of_slice(self, rank: int, length: int) -> list[list[tuple[int, int]]]:
        """Return what each rank wants of the slice of one rank, counted from its start."""
        low = rank * length
        return [[(max(start, low) - low, min(stop, low + length) - low) for start, stop in its
                 if start < low + length and low < stop] for its in self.ranges]


def scattered(stage: Stage, mine: Sequence[torch.Tensor], pending: Pieces,
              wanted: Wanted | None) -> Course:
    """Add one round of a bucket's micro-batches to what is `pending` of my slice of the sum. After
    the last round each rank gets what is `wanted`; None: it is not the last one.

    `mine` has the bucket of my micro-batch of this round, if I have one, cut into equal slices. It
    is changed.
    """
    world, microbatches = stage.world, stage.route.microbatches
    pieces = pending | (yield from stage.my_slice(mine))
    sums = joined_sums(pieces, microbatches)
    pending.clear()
    if wanted is None:
        # What was received is a memory of many pieces, of which one is left.
        pending.update({node: piece.clone() for node, piece in sums.items()})
        return
    total = sums[range(microbatches)]
    parts = wanted.of_slice(world.rank, stage.length)
    outgoing = torch.cat([stage.empty, *(total[low:high] for its in parts for low, high in its)])
    splits = [sum(high - low for low, high in its) for its in parts]
    received, _ = yield world.exchange_start(outgoing, splits, f"{stage.name}.held"), (
        world.exchanged)
    wanted.take(received)


@dataclass(frozen=True)
class Stage:
    """The exchanges of one bucket, whose slices have this length."""

    world: Collectives
    route: Route
    name: str
    length: int
    empty: torch.Tensor

    def my_slice(self, mine: Sequence[torch.Tensor]) -> Generator[Asked, Any, Pieces]:
        """Return the subtrees of all workers, of my slice. `mine` has the bucket of each of my
        subtrees."""
        route, pieces = self.route, dict(zip(self.route.trees[self.route.rank], mine, strict=True))
        if len(route.groups) < self.world.size:  # a host has several workers: all take part
            pieces = yield from self.in_host(pieces)
        if len(route.groups) > 1:
            pieces = yield from self.between_hosts(pieces)
        return pieces

    def in_host(self, mine: Pieces) -> Generator[Asked, Any, Pieces]:
        """Return my host's subtrees, each with the slices that I carry, one after the other."""
        route, splits, parts = self.route, {}, [self.empty]
        carried = route.carried[route.rank]
        others = [rank for rank in route.mine if rank != route.rank]
        for rank in others:
            slices = route.carried[rank]
            parts += [self._slice(piece, at) for piece in mine.values() for at in slices]
            splits[rank] = len(mine) * len(slices) * self.length
        received = yield from self._exchanged("host", torch.cat(parts), splits)
        if not others:
            return mine
        pieces = {tree: torch.cat([self._slice(piece, at) for at in carried])
                  for tree, piece in mine.items()}
        trees = {rank: list(route.trees[rank]) for rank in others}
        pieces |= self._taken(received, trees, len(carried))
        return joined_sums(pieces, route.microbatches)

    def between_hosts(self, held: Pieces) -> Generator[Asked, Any, Pieces]:
        """Return the subtrees of all hosts, of my slice. `held` has the slices that I carry."""
        route = self.route
        carried, own = route.carried[route.rank], route.carried[route.rank].index(route.rank)
        away = [place for place, to in enumerate(carried) if to not in route.mine]
        senders = dict(route.senders)
        if len(held) == 1 and away:
            (piece,) = held.values()
            # The slices lie one after the other, so they are not copied. Mine goes with them if it
            # is between two others.
            if 0 < own < len(carried) - 1:
                away, senders[route.rank] = list(range(len(carried))), list(held)
            outgoing = piece[away[0] * self.length : (away[-1] + 1) * self.length]
        else:
            outgoing = torch.cat([self.empty, *(self._slice(piece, place) for place in away
                                                for piece in held.values())])
        splits = {carried[place]: len(held) * self.length for place in away}
        received = yield from self._exchanged("slices", outgoing, splits)
        mine = {node: self._slice(piece, own) for node, piece in held.items()}
        return mine | self._taken(received, senders, 1)

    def _exchanged(self, name: str, outgoing: torch.Tensor,
                   splits: dict[int, int]) -> Generator[Asked, Any, torch.Tensor]:
        counts = [splits.get(rank, 0) for rank in range(self.world.size)]
        handle = self.world.exchange_start(outgoing, counts, f"{self.name}.{name}")
        received: torch.Tensor = (yield handle, self.world.exchanged)[0]
        return received

    def _taken(self, received: torch.Tensor, trees: dict[int, list[range]], slices: int) -> Pieces:
        """Return the pieces of what was received: by rank, those of its subtrees."""
        nodes = [node for rank in sorted(trees) for node in trees[rank]]
        each = slices * self.length
        return {node: received[place * each : (place + 1) * each]
                for place, node in enumerate(nodes)}

    def _slice(self, piece: torch.Tensor, at: int) -> torch.Tensor:
        return piece[at * self.length : (at + 1) * self.length]


class Flight:
    """A bucket on its course."""

    def __init__(self, world: Collectives, course: Course):
        self._world, self._course = world, course
        self._handle, self._take = next(course)

    def has_arrived(self) -> bool:
        """Do what follows from the collectives that are done; return whether the sum is there."""
        while self._handle is not None and self._world.is_done(self._handle):
            self.wait()
        return self._handle is None

    def finish(self) -> None:
        """Wait until the sum is there. Network."""
        while not self.has_arrived():
            self.wait()

    def wait(self) -> None:
        """Wait for the collective that is on its way, and start the next one. Network."""
        try:
            self._handle, self._take = self._course.send(self._take(self._handle))
        except StopIteration:
            self._handle = None

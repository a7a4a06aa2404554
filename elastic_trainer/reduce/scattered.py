"""The reducer of sharded gradients (shard="gradients"): each sum goes to its holders alone.

gradients, one by one (leaving.py) → here: the bucket of a micro-batch → exchange.py: the sum of a
round → … → the sum of the last round → the workers that hold what the optimizer keeps of it

What always holds:
1. The sums are those of `exact`: the same fixed tree over the micro-batches, so the same bits.
2. Micro-batches are dealt one by one. So all workers run neighbours in a round, and what is
   pending of a bucket's sum is the stack of a binary counter: at most log2(micro-batches) + 1 parts
   of 1/N. A worker has no flat buffer of all gradients.
3. The buckets of a round are sent in one order on all workers, and finished in it. A worker waits
   for its oldest bucket if IN_FLIGHT are on their way, also in a backward pass: each other worker
   starts that bucket before it waits for a later one.
4. All parameters of the optimizers have a place in the buckets, trained or not. So all workers cut
   the same buckets.
5. Nothing is sent twice: micro-batches are not run again.

Costs: each micro-batch's gradient passes the network, as in stage 2 of ZeRO: with several a worker
that is several times what `exact` sends. A parameter that is trained and gets no gradient holds the
buckets after it back until the pass is over.

Source: the partition of the gradients is that of ZeRO, stage 2 (arXiv 1910.02054, 5.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from elastic_trainer.reduce.exact import IN_FLIGHT, default_bucket_bytes
from elastic_trainer.reduce.exchange import (
    Flight,
    Pieces,
    Stage,
    Wanted,
    course,
    dealt_route,
    scattered,
)
from elastic_trainer.reduce.flat import Flat, Sums, stride_of, sum_dtype
from elastic_trainer.reduce.reducer import Collectives, Reducer
from elastic_trainer.reduce.tree import joined_sums, node_sum
from elastic_trainer.schedule.schedule import dealt_microbatches
from elastic_trainer.state.shards import Shards

NAMES = 8
"""Rounds whose buckets have different names: two of one name may not be on their way at once."""


class Place(NamedTuple):
    """Where the gradient of a parameter lies in its bucket, in elements."""

    number: int
    """Of the parameter."""
    start: int
    stop: int


class Bucket(NamedTuple):
    dtype: torch.dtype
    places: list[Place]

    @property
    def length(self) -> int:
        return self.places[-1].stop


class ScatteredReducer(Reducer):
    """Sums each bucket in the order of the fixed tree, and keeps what this worker holds of it."""

    def __init__(self, flat: Flat, microbatches: int, shards: Shards,
                 bucket_bytes: int | None = None):
        super().__init__(flat, microbatches)
        self._shards = shards
        self._block = {number: shards.block_of[name] for number, name in enumerate(flat.names)
                       if name in shards.block_of}
        self.buckets = [*self._cut(bucket_bytes or default_bucket_bytes(flat))]
        self._place_of = {place.number: (bucket, place) for bucket, one in enumerate(self.buckets)
                          for place in one.places}
        self._world: Collectives | None = None
        self._mine = range(0)
        self._leaves: list[Sums] = []
        """The front of each micro-batch that this worker has run."""
        self._open: dict[int, torch.Tensor] = {}
        """The buckets that the micro-batch in hand fills."""
        self._missing: list[int] = []
        """How many gradients of each bucket it has not made."""
        self._pending: list[Pieces] = []
        self._flights: list[Flight] = []
        self._round = self._started = 0
        self._error: Exception | None = None
        """What a collective has raised during a backward pass."""

    def _cut(self, most: int) -> Iterator[Bucket]:
        """Yield the buckets: the last parameters first, because autograd completes them first."""
        everyone, open_ = self.flat.gradients.everyone, dict[torch.dtype, list[Place]]()
        for number in reversed(range(len(everyone))):
            size, dtype = everyone[number].numel(), sum_dtype(everyone[number].dtype)
            if number not in self._block or not size:
                continue
            places = open_.setdefault(dtype, [])
            if places and (places[-1].stop + size) * dtype.itemsize > most:
                yield Bucket(dtype, open_.pop(dtype))
                places = open_.setdefault(dtype, [])
            start = places[-1].stop if places else 0
            places.append(Place(number, start, start + size))
        yield from (Bucket(dtype, places) for dtype, places in open_.items())

    def owned(self, rank: int, size: int) -> range:
        return dealt_microbatches(rank, size, self.microbatches)

    def _begin(self, world: Collectives, mine: range, again: bool) -> None:
        assert not again, "the gradients have left"
        self._world, self._mine, self._error = world, mine, None
        self._leaves, self._flights, self._pending = [], [], [{} for _ in self.buckets]
        self._round = self._started = 0
        self._open, self.flat.reduced = {}, {}
        for receiver in self.flat.gradients.receivers:
            receiver.grad = None  # of a step that broke
        if self.flat.leaving:  # the warm-up has others take them
            self.flat.leaving.leave_to(self._take)
        self._begin_front()

    def _begin_front(self) -> None:
        self.flat.add_into(self.flat.new_sums())

    def _laid_out(self) -> None:
        """Nothing of the buckets depends on what is trained (rule 4)."""

    def mine(self) -> Sums:
        return self._leaves[-1] if self._leaves else self.flat.sums

    # --- a micro-batch, and the round that it belongs to ------------------------------------------

    def microbatch(self, microbatch: int, is_last: bool) -> Callable[[], None]:
        def done() -> None:
            self._end_round()
            self._leaves.append(self.flat.sums)
            if not is_last:
                self._begin_front()

        return done

    def overlap(self, world: Collectives) -> None:
        trained, self._world = self.flat.gradients.trained_now(), world
        self._missing = [sum(trained[place.number] for place in bucket.places)
                         for bucket in self.buckets]

    def _take(self, number: int, gradient: torch.Tensor) -> None:
        """Add a gradient to its bucket, and send the buckets that are full. A backward pass calls
        this: what a collective raises is kept for `send`."""
        if self._world is None or self._error or number not in self._place_of:
            return
        at, place = self._place_of[number]
        assert at >= self._started, f"the bucket of {self.flat.names[number]} has left"
        self._view(self._memory(at), place).add_(gradient)
        self._missing[at] -= 1
        try:
            while self._started < len(self.buckets) and not self._missing[self._started]:
                self._start()
        except Exception as error:
            self._error, self._open = error, {}

    def _memory(self, at: int) -> torch.Tensor:
        """Return the memory of a bucket of the micro-batch in hand."""
        if at not in self._open:
            world, bucket = self._known_world(), self.buckets[at]
            self._open[at] = torch.zeros(-(-bucket.length // world.size) * world.size,
                                         dtype=bucket.dtype, device=self.flat.device)
        return self._open[at]

    def _view(self, memory: torch.Tensor, place: Place) -> torch.Tensor:
        parameter = self.flat.gradients.everyone[place.number]
        return memory[place.start : place.stop].as_strided(
            parameter.shape, stride_of(parameter), memory.storage_offset() + place.start)

    def _known_world(self) -> Collectives:
        assert self._world
        return self._world

    def _end_round(self) -> None:
        """Send the buckets that the backward pass has not filled."""
        while self._error is None and self._started < len(self.buckets):
            self._start()
        self._round, self._started, self._open = self._round + 1, 0, {}

    def _start(self) -> None:
        """Send the next bucket of this round."""
        world, at = self._known_world(), self._started
        self._started += 1
        own = self._mine[self._round : self._round + 1]
        memory = [self._memory(at)] if own else []
        self._open.pop(at, None)
        is_last = self._round == -(-self.microbatches // world.size) - 1
        if world.size == 1:
            self._add_alone(at, own, memory[0], is_last)
            return
        while len(self._flights) >= IN_FLIGHT:
            self._finish_oldest()
        route = dealt_route(world.rank, world.hosts, self.microbatches, self._round)
        bucket = self.buckets[at]
        stage = Stage(world, route, f"scattered.{self._round % NAMES}.{at}",
                      -(-bucket.length // world.size),
                      torch.empty(0, dtype=bucket.dtype, device=self.flat.device))
        self._flights.append(Flight(world, scattered(
            stage, memory, self._pending[at],
            Wanted(self._ranges(bucket), partial(self._keep, at)) if is_last else None)))
        while self._flights and self._flights[0].has_arrived():
            del self._flights[0]

    def _add_alone(self, at: int, own: range, memory: torch.Tensor, is_last: bool) -> None:
        sums = joined_sums(self._pending[at] | {own: memory}, self.microbatches)
        self._pending[at] = {} if is_last else sums
        if is_last:
            self._keep(at, sums[range(self.microbatches)])

    def _ranges(self, bucket: Bucket) -> list[list[tuple[int, int]]]:
        """Return which elements of a bucket each rank holds."""
        world, holders = self._known_world(), self._shards.holders
        found: list[list[tuple[int, int]]] = [[] for _ in range(world.size)]
        for number, start, stop in bucket.places:
            for rank in holders[self._block[number]]:
                its = found[rank]
                if its and its[-1][1] == start:
                    its[-1] = its[-1][0], stop
                else:
                    its.append((start, stop))
        return found

    def _keep(self, at: int, elements: torch.Tensor) -> None:
        """Keep what this worker holds of a reduced bucket: the slices come in their order."""
        offset, everyone = 0, self.flat.gradients.everyone
        for number, start, stop in self.buckets[at].places:
            if self._block[number] not in self._shards.mine:
                continue
            self.flat.reduced[number] = elements.as_strided(
                everyone[number].shape, stride_of(everyone[number]),
                elements.storage_offset() + offset)
            offset += stop - start

    def _finish_oldest(self) -> None:
        self._flights[0].finish()
        del self._flights[0]

    # --- after the last micro-batch ---------------------------------------------------------------

    def has_sent(self) -> bool:
        return True

    def send(self, world: Collectives) -> None:
        self._world = world
        if self._error:
            raise self._error
        if world.size > 1:
            self._send_message(world, self.flat.microbatches_run)

    def finish(self, world: Collectives) -> None:
        self._world = world
        while self._round < -(-self.microbatches // world.size):
            self._end_round()  # of rounds in which this worker has no micro-batch
        while self._flights:
            self._finish_oldest()
        if world.size > 1:
            trained = self._agreed(world)
            if trained is None:
                return  # no worker has run a micro-batch: the vote says why
            if not self._run:
                self._follow(trained)
        self._finish_front(world)

    def _finish_front(self, world: Collectives) -> None:
        """Sum the front of all micro-batches, for all workers."""
        leaves, kind = self._leaves, torch.float32
        if world.size == 1:
            sums = {range(number, number + 1): leaf[kind] for number, leaf
                    in zip(self._mine, leaves, strict=True)}
            total = node_sum(sums, range(self.microbatches), self.microbatches)
            result = next(leaf for leaf in leaves if leaf[kind] is total)
        else:
            length = self.flat.layout.lengths[kind]
            padded = -(-length // world.size) * world.size
            result = leaves[0] if leaves else self.flat.new_sums()
            Flight(world, course(
                world, dealt_route(world.rank, world.hosts, self.microbatches), "scattered.front",
                [leaf[kind][:padded] for leaf in leaves], result[kind][:length])).finish()
        self._leaves = []
        self.flat.add_into(result)

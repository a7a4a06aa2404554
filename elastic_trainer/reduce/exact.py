"""The reducer `exact`: the same bits for every world size and every history.

flat buffers of my micro-batches → here: sums of my subtrees → exchange.py, a bucket at a time →
reduced flat buffers

What always holds:
1. Sums are taken in the order of a fixed binary tree over the micro-batches (tree.py).
   Floating-point addition is commutative, so the tree fixes every bit. Where the flat buffers are
   cut does not matter.
2. A bucket of all my subtrees leaves as soon as the last micro-batch's backward pass has filled it,
   and its sum comes back into the memory of my first subtree.
3. Memory: one flat buffer for each sum that the tree keeps open on this worker, at most
   log2(micro-batches of this worker) + 1, and IN_FLIGHT buckets on their way.
4. A worker that has run no micro-batch takes part in all collectives. It waits until it knows what
   the others train, and sends zeros.
5. Nothing is sent before the last micro-batch's backward pass. A bucket that was sent is not sent
   again: if the micro-batches are run again (Gradients.isolates), they have the same bits. A
   gradient that changes after its bucket was sent is an error.

Why not fixed point: it needs an exponent that is agreed before the first micro-batch is done, so a
second pass, or the exponent of the last step. The tree sends as many bytes as a ring for one
subtree per worker, and keeps the precision of 32-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from elastic_trainer.reduce.buckets import GPU_BUCKET_BYTES, Filling, cut_evenly
from elastic_trainer.reduce.exchange import Flight, course, route_of
from elastic_trainer.reduce.flat import Flat, Sums
from elastic_trainer.reduce.reducer import Collectives, Reducer
from elastic_trainer.reduce.tree import parent
from elastic_trainer.schedule.schedule import aligned_subtrees

BUCKET_BYTES = 16 << 20
"""On a CPU: a bucket costs two negotiations of all workers (about 1 ms)."""
IN_FLIGHT = 3
"""The most buckets that are on their way at once. Each takes up to three times its memory."""


def default_bucket_bytes(flat: Flat) -> int:
    return GPU_BUCKET_BYTES if flat.device.type == "cuda" else BUCKET_BYTES


class Node(NamedTuple):
    """A sum of micro-batches of this worker."""

    tree: range
    sums: Sums


class ExactReducer(Reducer):
    """Sums in the order of a fixed tree: the same bits for every world size and every history."""

    def __init__(self, flat: Flat, microbatches: int, bucket_bytes: int | None = None):
        super().__init__(flat, microbatches)
        self._bucket_bytes = bucket_bytes or default_bucket_bytes(flat)
        self._spare: list[Sums] = []
        self._stack: list[Node] = []
        self._leaf_open, self._is_settled = True, False
        self._siblings: list[tuple[Sums, Sums]] = []
        """After the last micro-batch: sums that are still to be added, for each bucket by
        itself."""
        self._started = 0
        """The number of buckets that were sent."""
        self._early = 0
        """How many of the buckets hold gradients alone: a backward pass can complete them."""
        self._flights: list[Flight] = []
        self._result: Sums | None = None
        self._error: Exception | None = None
        """What a collective has raised during a backward pass."""
        self._plan()

    def _plan(self) -> None:
        self.buckets = cut_evenly(self.flat.layout, self._bucket_bytes)
        self._filling = Filling(self.flat.gradients, self.buckets)
        self._early = sum(bucket.dtype != torch.float32
                          or bucket.start >= self.flat.layout.head_stop for bucket in self.buckets)

    def _begin(self, world: Collectives, mine: range, again: bool) -> None:
        self._filling.rest()
        if again and self._started:
            # The network may still read this memory, and what has come back stays.
            self._spare, self._stack, self._siblings, self._leaf_open = [], [], [], False
        else:
            self._free()
            self._flights, self._started, self._result, self._error = [], 0, None, None
        self._trees, self._is_settled = aligned_subtrees(mine, self.microbatches), False
        self._is_alone = world.size == 1
        self._open()

    def _free(self) -> None:
        """Keep the memory of all sums for the next ones."""
        self._spare += [node.sums for node in self._stack] + [right for _, right in self._siblings]
        self._stack, self._siblings = [], []

    def _laid_out(self) -> None:
        self._filling.remove()
        self._plan()
        self._spare, self._leaf_open, self._siblings = [self.flat.sums], False, []
        # These are sums of micro-batches without samples.
        self._stack = [Node(tree, self.flat.new_sums()) for tree, _ in self._stack]
        self._open()

    # --- the sums of my subtrees ------------------------------------------------------------------

    def mine(self) -> Sums:
        return self._stack[-1].sums

    def _open(self) -> None:
        """Bind a zeroed set of buffers for the next leaf (or pair of leaves)."""
        if self._leaf_open:
            sums = self.flat.sums
        else:
            sums = self._spare.pop() if self._spare else self.flat.new_sums()
        for tensor in sums.values():
            tensor.zero_()
        self.flat.add_into(sums)
        self._leaf_open = True

    def microbatch(self, microbatch: int, is_last: bool) -> Callable[[], None]:
        self._newest = microbatch

        def done() -> None:
            if is_last:
                self._settle()
            elif microbatch % 2 or not self._holds(microbatch, microbatch + 2):
                self._siblings = self._close()
                self._add_siblings()
                self._open()
            # Else its sibling adds into the same buffer: autograd's addition is that of the tree.

        return done

    def _settle(self) -> None:
        """Close the last leaf, whose gradients may still be on their way. What is above it in the
        tree is added for each bucket by itself."""
        if not self._is_settled:
            self._is_settled, self._siblings = True, self._close()
        if self._is_alone:
            self._add_siblings()

    def _close(self) -> list[tuple[Sums, Sums]]:
        """Put the open leaf on the stack, and join siblings on top of it, as a binary counter
        carries; return the sums to add."""
        low, high = self._newest, self._newest + 1
        low -= low % 2 == 1 and self._holds(low - 1, high)
        self._stack.append(Node(range(low, high), self.flat.sums))
        self._leaf_open, siblings = False, []
        while len(self._stack) > 1:
            left, right = self._stack[-2:]
            tree = parent(left.tree, right.tree, self.microbatches)
            if tree is None:
                break
            siblings.append((left.sums, right.sums))
            self._stack[-2:] = [Node(tree, left.sums)]
        return siblings

    def _holds(self, low: int, high: int) -> bool:
        """True if [low, high) lies within one subtree that this worker owns."""
        return any(tree.start <= low and high <= tree.stop for tree in self._trees)

    def _add_siblings(self) -> None:
        for left, right in self._siblings:
            for dtype, tensor in left.items():
                tensor.add_(right[dtype])
        self._spare += [right for _, right in self._siblings]
        self._siblings = []

    # --- their way to all workers -----------------------------------------------------------------

    def overlap(self, world: Collectives) -> None:
        gradients = self.flat.gradients
        if not (self._is_alone or gradients.isolates or any(gradients.narrow)):
            self._settle()
            self._send_message(world, self.flat.microbatches_run + 1)
            self._filling.watch(partial(self._send_full, world))

    def _send_full(self, world: Collectives) -> None:
        """Send the buckets that are full, in order. The last ones wait for what is no gradient.

        A backward pass calls this, in the user's hands: `send` raises what a collective raises.
        """
        try:
            while (self._error is None and self._started < self._early
                   and len(self._flights) < IN_FLIGHT and self._filling.is_full(self._started)):
                self._start(world)
            self._advance()
        except Exception as error:
            self._error = error
            self._filling.rest()

    def has_sent(self) -> bool:
        return not all(self._filling.is_full(number) for number in range(self._started))

    def spare(self) -> Sums:
        if not self._spare:
            self._spare.append(self.flat.new_sums())
        return self._spare[-1]

    def send(self, world: Collectives) -> None:
        self._filling.rest()
        if self._error:
            raise self._error
        if not self._is_alone:
            self._send_message(world, self.flat.microbatches_run)
            if self._run:
                self._start_some(world)

    def _start_some(self, world: Collectives) -> None:
        assert [node.tree for node in self._stack] == self._trees
        while self._started < len(self.buckets) and len(self._flights) < IN_FLIGHT:
            self._start(world)

    def _start(self, world: Collectives) -> None:
        """Finish the next bucket of my subtrees, and send it."""
        (dtype, start, stop, members), number = self.buckets[self._started], self._started
        self.flat.gradients.take(members)
        for left, right in self._siblings:
            left[dtype][start:stop].add_(right[dtype][start:stop])
        if self._result is None:
            self._result = self._stack[0].sums if self._stack else self.flat.sums
        padded = start + -(-(stop - start) // world.size) * world.size
        route = route_of(world.rank, world.hosts, self.microbatches)
        self._started += 1
        self._flights.append(Flight(world, course(
            world, route, f"exact.{number}", [node.sums[dtype][start:padded]
                                              for node in self._stack],
            self._result[dtype][start:stop])))

    def _advance(self) -> None:
        self._flights = [one for one in self._flights if not one.has_arrived()]

    def finish(self, world: Collectives) -> None:
        if self._is_alone:
            self._result = self._stack[0].sums
        else:
            trained = self._agreed(world)
            if trained is None:
                return  # no worker has run a micro-batch: the vote says why
            if not self._run:
                self._follow(trained)
            while self._started < len(self.buckets) or self._flights:
                self._start_some(world)
                self._flights[0].wait()
                self._advance()
        result = self._result
        assert result is not None
        self._free()
        self._spare = [sums for sums in self._spare if sums is not result]
        self.flat.add_into(result)
        self._leaf_open = True

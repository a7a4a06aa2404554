"""The reducer `exact`: the same bits for every world size and every history.

flat buffers of my micro-batches → here (alltoall, allgather) → reduced flat buffers

What always holds:
1. Sums are taken in the order of a fixed binary tree over the micro-batches. Floating-point
   addition is commutative, so the tree fixes every bit.
2. Each worker adds the aligned subtrees that it owns. An alltoall sends each worker its slice of
   all subtree sums, each worker finishes the tree for its slice, and an allgather returns the
   result.
3. A worker that has run no micro-batch takes part in all collectives.

Why not fixed point: it needs an exponent that is agreed before the first micro-batch is done, so a
second pass, or the exponent of the last step. The tree sends as many bytes as a ring for one
subtree per worker, and keeps the precision of 32-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from elastic_trainer.reduce.flat import Flat, SetsDiffer, Sums
from elastic_trainer.reduce.reducer import Collectives, Reducer
from elastic_trainer.schedule.schedule import aligned_subtrees, owned_microbatches


class ExactReducer(Reducer):
    """Sums in the order of a fixed tree: the same bits for every world size and every history.

    A slice is sent when all its micro-batches are added, so nothing overlaps.
    """

    def __init__(self, flat: Flat, microbatches: int):
        super().__init__(flat, microbatches)
        self._spare: list[Sums] = []
        self._stack: list[tuple[int, int, Sums]] = []
        self._leaf_open = False
        self._sent: dict[torch.dtype, Any] = {}

    def _begin(self, world: Collectives, mine: range) -> None:
        self._spare += [sums for _, _, sums in self._stack]
        self._stack = []
        self._trees = aligned_subtrees(mine, self.microbatches)
        self._open()

    def _laid_out(self) -> None:
        self._spare, self._leaf_open = [], False
        # These are sums of micro-batches without samples.
        self._stack = [(low, high, self.flat.new_sums()) for low, high, _ in self._stack]
        self._open()

    def mine(self) -> Sums:
        return self._stack[-1][2]

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

        def done() -> None:
            low, high = microbatch, microbatch + 1
            if microbatch % 2 == 0 and not is_last and self._holds(low, low + 2):
                # Its sibling adds into the same buffer: autograd's addition is that of the tree.
                return
            if microbatch % 2 == 1 and self._holds(low - 1, high):
                low -= 1
            self._stack.append((low, high, self.flat.sums))
            self._leaf_open = False
            self._merge()
            if not is_last:
                self._open()

        return done

    def _holds(self, low: int, high: int) -> bool:
        """True if [low, high) lies within one subtree that this worker owns."""
        return any(tree.start <= low and high <= tree.stop for tree in self._trees)

    def _merge(self) -> None:
        """Add siblings on top of the stack, as a binary counter carries."""
        while len(self._stack) >= 2:
            (low, middle, left), (start, high, right) = self._stack[-2:]
            span = self._span(low, middle)
            is_sibling = middle == start and low % (2 * span) == 0 and high == min(
                low + 2 * span, self.microbatches)
            if not is_sibling or not self._holds(low, high):
                return
            for dtype, tensor in left.items():
                tensor.add_(right[dtype])
            self._stack[-2:] = [(low, high, left)]
            self._spare.append(right)

    @staticmethod
    def _span(low: int, high: int) -> int:
        """Return the width of the smallest node of the tree that starts at low and covers
        [low, high)."""
        span = 1
        while low + span < high:
            span *= 2
        return span

    def send(self, world: Collectives) -> None:
        # If no micro-batch of the batch is mine, I send nothing and take part.
        if self._leaf_open and not self._stack:
            self._spare.append(self.flat.sums)
            self._leaf_open = False
        stacked = [(low, high) for low, high, _ in self._stack]
        assert stacked == [(tree.start, tree.stop) for tree in self._trees]
        types = self.flat.layout.lengths if world.size > 1 else ()
        self._sent = {dtype: self._send(world, dtype) for dtype in types}

    def finish(self, world: Collectives) -> None:
        if world.size == 1:
            result = self._stack[0][2]
            self.flat.agreed(result[torch.float32])
        else:
            wholes = self._wholes(world)
            if not len(wholes[torch.float32]):
                return  # no worker has run a micro-batch: the vote says why
            self._follow(self.flat.agreed(wholes[torch.float32]))
            result = self._spare.pop() if self._spare else self.flat.new_sums()
            for dtype, length in self.flat.layout.lengths.items():
                result[dtype][:length].copy_(wholes[dtype][:length])
        self._stack = []
        self.flat.add_into(result)
        self._leaf_open = True

    def _wholes(self, world: Collectives) -> dict[torch.dtype, torch.Tensor]:
        found = {dtype: self._exchanged(world, dtype, handle)
                 for dtype, handle in self._sent.items()}
        self._sent = {}
        self._spare += [sums for _, _, sums in self._stack]
        self._stack = []
        wholes = {dtype: whole for dtype, whole in found.items() if whole is not None}
        if len(wholes) < len(found):
            raise SetsDiffer
        return wholes

    def _follow(self, trained: list[bool]) -> None:
        """Have buffers for what the others train, if this worker has run no micro-batch."""
        if trained != self.flat.trained:
            self.flat.gradients.adopt(trained)
            self.flat.lay_out(trained)
            self._spare = []

    def _send(self, world: Collectives, dtype: torch.dtype) -> Any:
        slice_ = -(-self.flat.layout.lengths[dtype] // world.size)
        mine = [sums[dtype][:slice_ * world.size]
                for _, _, sums in self._stack] if self.flat.microbatches_run else []
        if len(mine) == 1:
            outgoing = mine[0]
        elif mine:  # one copy: slices must follow one another for each receiver
            outgoing = torch.stack(mine).view(
                len(mine), world.size, slice_).transpose(0, 1).reshape(-1)
        else:
            outgoing = torch.empty(0, dtype=dtype, device=self.flat.device)
        return world.exchange_start(outgoing, [len(mine) * slice_] * world.size,
                                    f"exact.slices.{_suffix(dtype)}")

    def _exchanged(self, world: Collectives, dtype: torch.dtype,
                   handle: Any) -> torch.Tensor | None:
        """Return the sum over all micro-batches; None on all workers if their buffers do not have
        the same length.

        A worker that has run no micro-batch takes the length from what it receives.
        """
        incoming, counts = world.exchanged(handle)  # network
        pieces: dict[tuple[int, int], torch.Tensor] = {}
        at = 0
        for rank, count in enumerate(counts):
            owned = owned_microbatches(rank, world.size, self.microbatches)
            trees = aligned_subtrees(owned, self.microbatches) if count else []
            for tree in trees:
                pieces[tree.start, tree.stop] = incoming[at : at + count // len(trees)]
                at += count // len(trees)
        are_equal = len({piece.numel() for piece in pieces.values()}) <= 1
        total = tree_sum(pieces, self.microbatches) if pieces and are_equal else incoming[:0]
        whole = world.allgather(total, f"exact.result.{_suffix(dtype)}")  # network
        # If the lengths of two workers differ, each worker has seen both.
        return whole if are_equal else None


def _suffix(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tree_sum(pieces: dict[tuple[int, int], torch.Tensor], microbatches: int) -> torch.Tensor:
    """Add the sums of subtrees, given by their ranges of micro-batches, up to the root of the fixed
    tree. Changes them."""
    span = 1
    while span < microbatches:
        span *= 2
    total = _node_sum(pieces, microbatches, 0, span)
    assert total is not None
    return total


def _node_sum(pieces: dict[tuple[int, int], torch.Tensor], microbatches: int, low: int,
              span: int) -> torch.Tensor | None:
    """Return the sum of a node of the tree; None if no worker has run its micro-batches.

    This is no inner function: one that calls itself is a reference cycle, which kept each step's
    pieces (a gradient) until the next garbage collection.
    """
    found = pieces.get((low, min(low + span, microbatches)))
    if found is not None:
        return found
    if span == 1:
        return None  # adding nothing gives the same bits as adding the zeros of that microbatch
    half = span // 2
    left = _node_sum(pieces, microbatches, low, half)
    right = _node_sum(pieces, microbatches, low + half, half) if low + half < microbatches else None
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)

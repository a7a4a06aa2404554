"""Gradients of all shards become one: in flat buffers, in place, with the same bits for every world or as fast as can be.

forward/backward of my shards → here → vote → apply

Two reducers behind one interface (`begin`, `shard`, `finish`):
- `exact`: sums in the order of a fixed binary tree over the shards. Each worker adds the aligned subtrees that it
  owns; an alltoall sends everyone its slice of everybody's subtree sums; each finishes the tree for its slice; an
  allgather returns the result. Floating-point addition is commutative, so a tree fixes every bit.
- `ring`: float allreduce, started bucket by bucket during the last shard's backward pass.

What always holds:
1. `.grad` of every trained parameter is a view of a flat buffer (autograd adds into it in place), so nothing is
   copied before the network. Parameters of 16 bits are summed in 32 and copied.
2. Behind the gradients in the same buffer lie the loss and what the forward passes changed in the model's buffers
   (BatchNorm): the weighted mean over shards of (after - before). They follow the same rule as the gradients.
3. Weights of shards are shard / batch, so the result is the gradient of the mean over the global batch.

Why not fixed point: it would need an exponent agreed before the first shard is done, so a second pass
or the last step's; the tree costs the same bytes as a ring for one subtree per worker and keeps float32's own
precision.

What it does not do: sparse gradients (they are added densely); float64 buffers keep float32's precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from elastic_trainer.schedule import aligned_subtrees, owned_shards

BUCKET_BYTES = 1 << 20
"""How much of the gradient `ring` sends at once. Small enough to start early, large enough for the network."""
PAD = 4096
"""Room behind each flat buffer, so that it can be cut into equal slices for any world of up to this size."""


class Collectives(Protocol):
    """What a reducer needs of the world."""

    rank: int
    size: int

    def allreduce_start(self, tensor: torch.Tensor, name: str) -> Any: ...
    def wait(self, handle: Any) -> torch.Tensor: ...
    def alltoall(self, tensor: torch.Tensor, splits: list[int], name: str) -> torch.Tensor: ...
    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor: ...


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Flat:
    """The flat buffers: one per sum type, `.grad` of the parameters in front, statistics behind (float32 only)."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], buffers: dict[str, torch.Tensor], device: torch.device):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.buffer_names = list(buffers)
        self.places: list[tuple[torch.dtype, int, int]] = []
        lengths = {torch.float32: 0}
        for parameter in self.parameters:
            dtype = _sum_dtype(parameter.dtype)
            start = lengths.get(dtype, 0)
            self.places.append((dtype, start, start + parameter.numel()))
            lengths[dtype] = start + parameter.numel()
        self.statistics_start = lengths[torch.float32]
        lengths[torch.float32] += 1 + sum(b.numel() for b in buffers.values())
        self.lengths = lengths
        self.device = device
        self.sums = self.new_sums()
        self.adds_once = True
        """Each backward pass adds to a parameter's gradient once at most (see `count_additions`)."""

    def new_sums(self) -> dict[torch.dtype, torch.Tensor]:
        """Return a zeroed set of flat buffers, with room behind for equal slices."""
        return {d: torch.zeros(n + PAD, dtype=d, device=self.device) for d, n in self.lengths.items()}

    def bind(self, sums: dict[torch.dtype, torch.Tensor]) -> None:
        """Make autograd add into these buffers from now on."""
        self.sums = sums
        for parameter, (dtype, start, stop) in zip(self.parameters, self.places, strict=True):
            if parameter.dtype == dtype:
                parameter.grad = sums[dtype][start:stop].view(parameter.shape)
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def collect(self) -> None:
        """Add the gradients of 16-bit parameters, which cannot be views, to the sums."""
        for parameter, (dtype, start, stop) in zip(self.parameters, self.places, strict=True):
            if parameter.dtype != dtype:
                assert parameter.grad is not None
                self.sums[dtype][start:stop].view(parameter.shape).add_(parameter.grad)
                parameter.grad.zero_()

    def hand_out(self) -> None:
        """Put the sums into the gradients of 16-bit parameters; the others see them already."""
        for parameter, (dtype, start, stop) in zip(self.parameters, self.places, strict=True):
            if parameter.dtype != dtype:
                assert parameter.grad is not None
                parameter.grad.copy_(self.sums[dtype][start:stop].view(parameter.shape))

    @contextmanager
    def count_additions(self) -> Iterator[None]:
        """Find out from a backward pass whether it adds to a gradient several times.

        Reentrant checkpointing (torch.utils.checkpoint, use_reentrant=True) does for a parameter that several parts use.
        Then a buffer that two shards share has not the tree's order, and a gradient is not whole when it first changes.
        """
        counts = [0] * len(self.parameters)

        def count(number: int) -> None:
            counts[number] += 1

        hooks = [parameter.register_post_accumulate_grad_hook(lambda _, number=number: count(number))
                 for number, parameter in enumerate(self.parameters)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.adds_once = max(counts, default=0) <= 1

    @property
    def statistics(self) -> torch.Tensor:
        """The loss (1) and the changes of the buffers (their elements, in order), as a view."""
        return self.sums[torch.float32][self.statistics_start : self.lengths[torch.float32]]

    def add_statistics(self, weight: float, loss: torch.Tensor, before: dict[str, torch.Tensor],
                       after: dict[str, torch.Tensor]) -> None:
        """Add one shard's loss and changes of the buffers, weighted."""
        statistics = self.statistics
        statistics[0] += loss.detach().to(statistics.device, torch.float32) * weight
        at = 1
        for name in self.buffer_names:
            count = after[name].numel()
            # where nothing changed the change is 0, also for an infinite value (a mask kept as a buffer)
            change = (torch.where(after[name] == before[name], 0, after[name] - before[name])
                      if after[name].dtype != torch.bool else after[name])
            # multiplied first: add_(alpha=) may round once instead of twice, and then a sum in one buffer has
            # other bits than the sum of two
            statistics[at : at + count].add_(change.reshape(-1).to(torch.float32) * weight)
            at += count

    def apply_statistics(self, before: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> float:
        """Set the buffers to (before + mean change) and return the mean loss."""
        statistics, at = self.statistics, 1
        for name in self.buffer_names:
            buffer = buffers[name]
            change = statistics[at : at + buffer.numel()].view(buffer.shape)
            if buffer.is_floating_point():
                buffer.copy_(torch.where(change == 0, before[name], before[name] + change.to(buffer.dtype)))
            elif buffer.dtype == torch.bool:
                buffer.copy_(change > 0.5)
            else:
                buffer.copy_(before[name] + change.round().to(buffer.dtype))
            at += buffer.numel()
        return float(statistics[0])  # on a GPU this line waits for the device


class ExactReducer:
    """Sums in the order of a fixed tree: the same bits for every world size and every history."""

    name = "exact"

    def __init__(self, flat: Flat, shards: int):
        self.flat, self.shards = flat, shards
        self._spare: list[dict[torch.dtype, torch.Tensor]] = []
        self._stack: list[tuple[int, int, dict[torch.dtype, torch.Tensor]]] = []
        self._leaf_open = False

    def begin(self, world: Collectives) -> range:
        """Start a step; returns the shards that this worker runs, in order."""
        self._spare += [sums for _, _, sums in self._stack]
        self._stack = []
        mine = owned_shards(world.rank, world.size, self.shards)
        self._trees = aligned_subtrees(mine, self.shards)
        self._open()
        return mine

    def _open(self) -> None:
        """Bind a zeroed set of buffers for the next leaf (or pair of leaves)."""
        if self._leaf_open:
            sums = self.flat.sums
        else:
            sums = self._spare.pop() if self._spare else self.flat.new_sums()
        for tensor in sums.values():
            tensor.zero_()
        self.flat.bind(sums)
        self._leaf_open = True

    def shard(self, shard: int, is_last: bool) -> Callable[[], None]:
        """Announce the next shard; call the result after its backward pass."""

        def done() -> None:
            self.flat.collect()
            low, high = shard, shard + 1
            if self.flat.adds_once:
                if shard % 2 == 0 and not is_last and self._holds(low, low + 2):
                    return  # its sibling adds into the same buffer: autograd's own addition is the tree's
                if shard % 2 == 1 and self._holds(low - 1, high):
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
            is_sibling = middle == start and low % (2 * span) == 0 and high == min(low + 2 * span, self.shards)
            if not is_sibling or not self._holds(low, high):
                return
            for dtype, tensor in left.items():
                tensor.add_(right[dtype])
            self._stack[-2:] = [(low, high, left)]
            self._spare.append(right)

    @staticmethod
    def _span(low: int, high: int) -> int:
        """The width of the smallest node of the tree that starts at low and covers [low, high)."""
        span = 1
        while low + span < high:
            span *= 2
        return span

    def finish(self, world: Collectives) -> None:
        """Exchange and finish the tree; afterwards the reduced gradient is in `flat.sums` on every worker."""
        if self._leaf_open and not self._stack:  # no shard of the batch is mine: nothing to give, but I take part
            self._spare.append(self.flat.sums)
            self._leaf_open = False
        assert [(low, high) for low, high, _ in self._stack] == [(t.start, t.stop) for t in self._trees]
        if world.size == 1:
            result = self._stack[0][2]
        else:
            result = self._spare.pop() if self._spare else self.flat.new_sums()
            for dtype, length in self.flat.lengths.items():
                if length:
                    self._exchange(world, dtype, length, result[dtype])
            self._spare += [sums for _, _, sums in self._stack]
        self._stack = []
        self.flat.bind(result)
        self._leaf_open = True
        self.flat.hand_out()

    def _exchange(self, world: Collectives, dtype: torch.dtype, length: int, result: torch.Tensor) -> None:
        slice_ = -(-length // world.size)
        mine = [sums[dtype][: slice_ * world.size] for _, _, sums in self._stack]
        if len(mine) == 1:
            outgoing = mine[0]
        elif mine:  # one copy: slices must lie behind one another for each receiver
            outgoing = torch.stack(mine).view(len(mine), world.size, slice_).transpose(0, 1).reshape(-1)
        else:
            outgoing = torch.empty(0, dtype=dtype, device=result.device)
        suffix = str(dtype).removeprefix("torch.")
        incoming = world.alltoall(outgoing, [len(mine) * slice_] * world.size, f"exact.slices.{suffix}")  # network
        pieces: dict[tuple[int, int], torch.Tensor] = {}
        at = 0
        for rank in range(world.size):
            for tree in aligned_subtrees(owned_shards(rank, world.size, self.shards), self.shards):
                pieces[tree.start, tree.stop] = incoming[at : at + slice_]
                at += slice_
        whole = world.allgather(tree_sum(pieces, self.shards), f"exact.result.{suffix}")  # network
        result[: slice_ * world.size].copy_(whole)


def tree_sum(pieces: dict[tuple[int, int], torch.Tensor], shards: int) -> torch.Tensor:
    """Add the sums of subtrees, given by their ranges of shards, up to the root of the fixed tree. Changes them."""
    span = 1
    while span < shards:
        span *= 2
    return _node_sum(pieces, shards, 0, span)


def _node_sum(pieces: dict[tuple[int, int], torch.Tensor], shards: int, low: int, span: int) -> torch.Tensor:
    """Not a function within the other: that is a cycle, and kept each step's pieces (a gradient) until the next gc."""
    found = pieces.get((low, min(low + span, shards)))
    if found is not None:
        return found
    half = span // 2
    left = _node_sum(pieces, shards, low, half)
    return left.add_(_node_sum(pieces, shards, low + half, half)) if low + half < shards else left


class RingReducer:
    """Float allreduce in place, overlapped with the last shard's backward pass. The bits depend on the world size."""

    name = "ring"

    def __init__(self, flat: Flat, shards: int, *, compress: bool = False):
        self.flat, self.shards, self.compress = flat, shards, compress
        flat.bind(flat.sums)
        self.buckets = self._cut()
        self._bucket_of = {p: b for b, members in enumerate(self.buckets) for p in members[3]}
        self._missing = [0] * len(self.buckets)
        self._started: dict[int, Any] = {}
        self._world: Collectives | None = None
        for number, parameter in enumerate(flat.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._ready(number))

    def _cut(self) -> list[tuple[torch.dtype, int, int, list[int]]]:
        """Cut the buffers into buckets (type, start, stop, parameters), the statistics and last parameters first."""
        whole = self.flat.lengths[torch.float32]
        buckets: list[tuple[torch.dtype, int, int, list[int]]] = [(torch.float32, self.flat.statistics_start, whole, [])]
        for number in reversed(range(len(self.flat.parameters))):
            dtype, start, stop = self.flat.places[number]
            last_dtype, low, high, members = buckets[-1]
            if last_dtype == dtype and stop == low and (high - start) * 4 <= BUCKET_BYTES:
                buckets[-1] = (dtype, start, high, [*members, number])
            else:
                buckets.append((dtype, start, stop, [number]))
        return buckets

    def begin(self, world: Collectives) -> range:
        """Start a step; returns the shards that this worker runs, in order."""
        for tensor in self.flat.sums.values():
            tensor.zero_()
        self.flat.bind(self.flat.sums)
        self._world, self._started = None, {}
        return owned_shards(world.rank, world.size, self.shards)

    def shard(self, shard: int, is_last: bool) -> Callable[[], None]:
        """Announce the next shard; call the result after its backward pass."""
        if is_last:
            self._missing = [len(members) for _, _, _, members in self.buckets]
        return self.flat.collect

    def overlap(self, world: Collectives) -> None:
        """Let the backward pass that comes next start the network as its buckets fill."""
        has_16_bit = any(p.dtype != place[0] for p, place in zip(self.flat.parameters, self.flat.places, strict=True))
        self._world = world if self.flat.adds_once and not has_16_bit else None

    def _ready(self, number: int) -> None:
        if self._world is None or self._world.size == 1:
            return
        bucket = self._bucket_of[number]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            # The order in which buckets fill is the same on all workers as long as the graphs are; Horovod's
            # negotiation copes with any order.
            self._start(bucket, self._world)

    def _start(self, bucket: int, world: Collectives) -> None:
        dtype, start, stop, _ = self.buckets[bucket]
        piece = self.flat.sums[dtype][start:stop]
        has_statistics = bucket == 0  # they keep their 32 bits
        outgoing = piece.to(torch.float16) if self.compress and not has_statistics else piece
        self._started[bucket] = (world.allreduce_start(outgoing, f"ring.{bucket}"), outgoing, piece)

    def finish(self, world: Collectives) -> None:
        """Wait for the sums; afterwards the reduced gradient is in `flat.sums` on every worker."""
        self._world = None
        if world.size > 1:
            for bucket in range(len(self.buckets)):
                if bucket not in self._started:  # unused parameters, or no shard of mine, or nothing but statistics
                    self._start(bucket, world)
            for handle, outgoing, piece in self._started.values():
                world.wait(handle)
                if outgoing is not piece:
                    piece.copy_(outgoing)
        self._started = {}
        self.flat.hand_out()


Reducer = ExactReducer | RingReducer

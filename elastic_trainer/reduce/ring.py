"""The reducer `ring`: a float allreduce, overlapped with the last micro-batch's backward pass.

flat buffers of my micro-batches → here (an allreduce for each bucket) → reduced flat buffers

What always holds:
1. The buffers are cut into buckets. A bucket is sent when autograd has completed its gradients, in
   the last micro-batch of this worker.
2. The first bucket holds what is known before the backward pass. It has the same length on all
   workers, and shows whether the other buckets have.
3. The bits depend on the world size. They are the same on all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from elastic_trainer.reduce.flat import ALIGNED, Flat, Sums
from elastic_trainer.reduce.reducer import Collectives
from elastic_trainer.reduce.sending import BUCKET_BYTES, Narrow, Sending
from elastic_trainer.schedule.schedule import owned_microbatches


class Bucket(NamedTuple):
    """A piece of the flat buffers that one allreduce sums."""

    dtype: torch.dtype
    start: int
    stop: int
    members: list[int]
    """The parameters whose gradients it holds, by their place among those that are trained."""


class RingReducer:
    """Float allreduce in place; gradients in 16 bits go another way (sending.py).

    `note` gets the facts of what was sent in 16 bits.
    """

    def __init__(self, flat: Flat, microbatches: int, sending: Sending | None = None,
                 note: Callable[..., None] = lambda **_: None):
        self.flat, self.microbatches = flat, microbatches
        self._bucket_bytes = (sending and sending.bucket_bytes) or BUCKET_BYTES
        self._narrow = Narrow(sending, note) if sending and sending.dtype else None
        self._started: dict[int, Any] = {}
        self._world: Collectives | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._plan()

    def _plan(self) -> None:
        """Cut the buffers as they are now, and ask autograd for a call at each complete
        gradient."""
        self.flat.bind(self.flat.sums)
        self.buckets = self._cut()
        self._bucket_of = {number: place for place, bucket in enumerate(self.buckets)
                           for number in bucket.members}
        self._missing = [0] * len(self.buckets)
        for hook in self._hooks:
            hook.remove()
        parameters: list[Any] = self.flat.gradients.parameters  # torch gives the method no types
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                lambda _, number=number: self._ready(number))
            for number, parameter in enumerate(parameters)
        ]

    def _cut(self) -> list[Bucket]:
        """Cut the buffers into buckets: what is known before the backward pass, then the gradients,
        those of the last parameters first.

        The counts of the parameters used are complete last. They go with the last gradients: a
        bucket of their own takes a cycle of Horovod (0.8 ms, measured).
        """
        layout = self.flat.layout
        buckets = [Bucket(torch.float32, 0, layout.early_stop, [])]
        for number, (dtype, start, stop) in reversed([*enumerate(layout.places)]):
            last = buckets[-1]
            is_next = last.dtype == dtype and stop == last.start
            if is_next and (last.stop - start) * 4 <= self._bucket_bytes:
                buckets[-1] = Bucket(dtype, start, last.stop, [*last.members, number])
            else:
                buckets.append(Bucket(dtype, start, stop, [number]))
        last = buckets[-1]
        ends_at_counts = last.dtype == torch.float32 and last.start - layout.head_stop < ALIGNED
        if last.members and ends_at_counts and not self._narrow:
            return [*buckets[:-1], last._replace(start=layout.early_stop)]
        return [*buckets, Bucket(torch.float32, layout.early_stop, layout.head_stop, [])]

    def _count_missing(self) -> list[int]:
        """Return how many gradients each bucket waits for. The last one waits for the counts
        too."""
        return [len(bucket.members) + (place == len(self.buckets) - 1)
                for place, bucket in enumerate(self.buckets)]

    def begin(self, world: Collectives) -> range:
        """Start a step; returns the micro-batches that this worker runs, in order."""
        for tensor in self.flat.sums.values():
            tensor.zero_()
        self.flat.bind(self.flat.sums)
        self.flat.microbatches_run = 0
        self._world, self._started = None, {}
        if self._narrow:
            self._narrow.begin(world.rank)
        return owned_microbatches(world.rank, world.size, self.microbatches)

    def lay_out(self, trained: Sequence[bool],
                buffers: dict[str, torch.Tensor] | None = None) -> None:
        """Train another set of parameters from this micro-batch on. No micro-batch of the step was
        run yet."""
        assert self.flat.microbatches_run == 0
        self.flat.lay_out(trained, buffers)
        self._plan()
        self._missing = self._count_missing()

    def has_sent(self) -> bool:
        """True if other workers hold a part of this step already."""
        return bool(self._started)

    def mine(self) -> Sums:
        """Return the sums of this worker's part of the step."""
        return self.flat.sums

    def microbatch(self, microbatch: int, is_last: bool) -> Callable[[], None]:
        """Announce the next micro-batch; call the result after its backward pass."""
        if is_last:
            self._missing = self._count_missing()
        return lambda: None

    def overlap(self, world: Collectives) -> None:
        """Let the backward pass that comes next send the buckets as they fill."""
        gradients = self.flat.gradients
        self._world = None if gradients.isolates or any(gradients.narrow) else world

    def _ready(self, number: int) -> None:
        """Count a gradient that is complete, and send its bucket if it was the last one there."""
        if self._world is None or self._world.size == 1:
            return
        bucket = self._bucket_of[number]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            if 0 not in self._started:
                # It is known since the loss was. Together with this bucket it takes no cycle of
                # Horovod for itself.
                self._start(0, self._world)
            # Buckets fill in the same order on all workers if the graphs are the same. Horovod's
            # negotiation works with any order.
            self._start(bucket, self._world)

    def _start(self, bucket: int, world: Collectives) -> None:
        dtype, start, stop, members = self.buckets[bucket]
        piece = self.flat.sums[dtype][start:stop]
        name = f"ring.{bucket}"
        # Buckets without gradients keep their 32 bits.
        self._started[bucket] = (self._narrow.start(piece, world, name) if self._narrow and members
                                 else (world.allreduce_start(piece, name), None))

    def send(self, world: Collectives) -> None:
        """Start the buckets that are not on their way: those of unused parameters, and the
        counts."""
        self._world = None
        if world.size == 1:
            return
        is_idle = not self.flat.microbatches_run and not self._started
        for bucket in range(1 if is_idle else len(self.buckets)):
            if bucket not in self._started:
                self._start(bucket, world)

    def finish(self, world: Collectives) -> None:
        """Wait for the sums; afterwards the reduced gradient is in `flat.sums` on every worker.

        Raises SetsDiffer, on all workers alike, if their micro-batches trained different
        parameters.
        """
        if world.size == 1:
            self.flat.agreed(self.flat.sums[torch.float32])
            return
        # The first bucket has the same length on all workers (rule 2).
        early = world.wait(self._started.pop(0)[0])
        trained = self.flat.agreed(early)
        if not early[0]:
            return  # no worker has run a micro-batch: the vote says why
        if not self._started:
            self._follow(trained, early)
            for bucket in range(1, len(self.buckets)):
                self._start(bucket, world)
        if self._narrow:
            # By number: on a worker in its first step they may have filled in another order.
            self._narrow.finish(world, [
                one for _, one in sorted(self._started.items()) if one[1] is not None])
        for handle, piece in self._started.values():
            if piece is None:
                world.wait(handle)
        self._started = {}

    def _follow(self, trained: list[bool], early: torch.Tensor) -> None:
        """Have buffers for what the others train: this worker has run no micro-batch, and sends
        zeros."""
        if trained != self.flat.trained:
            self.flat.gradients.adopt(trained)
            self.lay_out(trained)
            self.flat.sums[torch.float32][: self.flat.layout.early_stop].copy_(early)

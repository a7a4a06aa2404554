"""The reducer `ring`: a float allreduce, overlapped with the last micro-batch's backward pass.

flat buffers of my micro-batches → here (an allreduce for each bucket) → reduced flat buffers;
options compress, predivide, bucket_bytes → Sending

A gradient in 16 bits goes in two halves: an alltoall sends each worker its slice of everybody's
gradient, and each worker adds its slice in 32 bits; an allgather returns the sums, in 16 bits.

What always holds:
1. The buffers are cut into buckets. A bucket is sent when autograd has completed its gradients, in
   the last micro-batch of this worker.
2. The first bucket holds what is known before the backward pass. It has the same length on all
   workers, and shows whether the other buckets have.
3. The bits depend on the world size. They are the same on all workers.
4. In 16 bits an element is rounded twice in all, whatever the world's size, and a worker sends as
   many bytes as in a ring allreduce of 16 bits (where each hop rounds). Only gradients are cast.
   Losses, counts, tallies and the statistics of buffers go in 32 bits, in buckets of their own.

Why not Horovod's allreduce for 16 bits: it has no bfloat16 (0.28.1, torch/mpi_ops.py), and float16
overflows at 65,504.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from elastic_trainer.config import ConfigError
from elastic_trainer.reduce.flat import ALIGNED, Flat
from elastic_trainer.reduce.reducer import Collectives, Reducer

BUCKET_BYTES = 1 << 20
"""How much of the gradient is sent at once: small enough to start early, large enough for the
network."""
LEAST_BUCKET_BYTES = 1 << 10
COMPRESSED = {"bf16": torch.bfloat16, "fp16": torch.float16}
MEASURED_EVERY = 100
"""Steps of a process between two measurements of what the cast loses. One takes three passes over
the gradient. A step whose gradient overflows is not counted."""


@dataclass(frozen=True, kw_only=True)
class Sending:
    """How `ring` sends gradients. Raises ConfigError."""

    compress: str | None = None
    """None: in 32 bits."""
    predivide: float = 1.0
    bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        if not (self.predivide > 0 and math.isfinite(self.predivide)):
            raise ConfigError(f"predivide is {self.predivide}. Use a positive number, e.g. 8.0.")
        if self.predivide != 1 and self.compress is None:
            raise ConfigError(
                f"predivide is {self.predivide}, but gradients are sent in 32 bits, where it "
                f"changes nothing: the weights of the micro-batches add up to 1 already. Use "
                f"compress=\"fp16\", or leave predivide out.")
        size = self.bucket_bytes
        if size is not None and (type(size) is not int or size < LEAST_BUCKET_BYTES):
            raise ConfigError(f"bucket_bytes is {size!r}. Use a whole number from "
                              f"{LEAST_BUCKET_BYTES}, e.g. {BUCKET_BYTES}.")

    @property
    def dtype(self) -> torch.dtype | None:
        """The type in which gradients are sent; None: their own."""
        return COMPRESSED[self.compress] if self.compress else None

    @property
    def settings(self) -> dict[str, Any]:
        """What a resumed run compares."""
        return {"compress": self.compress or False, "predivide": self.predivide,
                "bucket_bytes": self.bucket_bytes or BUCKET_BYTES}

    def require(self, reduce: str, has_scaler: bool) -> None:
        """Raise ConfigError for what this reducer cannot do."""
        given = {"compress": self.compress, "bucket_bytes": self.bucket_bytes}
        if reduce == "exact" and (name := next((n for n in given if given[n] is not None), None)):
            because = ("which sends its sums uncompressed" if name == "compress" else
                       "which has no buckets: a slice is sent when all its micro-batches are added")
            raise ConfigError(
                f"{name} is {given[name]!r}, but reduce is \"exact\", {because}. Use "
                f"reduce=\"ring\" (--reduce ring), or leave {name} out.")
        if self.compress == "fp16" and not has_scaler:
            raise ConfigError(
                "compress is 'fp16' without a scaler, so a gradient over 65,504 would become "
                "infinite, and the weights with it. Use compress=\"bf16\", which has the range of "
                "32 bits, or precision=\"fp16\", or a scaler.")


def sending_of(compress: bool | str, predivide: float, bucket_bytes: int | None) -> Sending:
    """Return what the options ask for; `compress=True` is "bf16". Raises ConfigError."""
    name = {False: None, True: "bf16"}[compress] if isinstance(compress, bool) else compress
    if name is not None and name not in COMPRESSED:
        raise ConfigError(f"compress is {compress!r}. Use one of {tuple(COMPRESSED)}, or True for "
                          f"\"bf16\".")
    return Sending(compress=name, predivide=predivide, bucket_bytes=bucket_bytes)


Started = tuple[Any, torch.Tensor]
"""A bucket on its way: the handle of its exchange, and where its sum goes."""


class Narrow:
    """The gradients of this worker's steps, sent in 16 bits.

    `note` gets the facts of a measured step, on rank 0.
    """

    def __init__(self, sending: Sending, note: Callable[..., None] = lambda **_: None):
        assert sending.dtype
        self._dtype, self._predivide, self._note = sending.dtype, sending.predivide, note
        self._name, self._steps = sending.compress, 0
        self._norms: list[tuple[float, float]] | None = None
        """Of each bucket, if this step is measured: the norms of what the cast loses, and of the
        gradient."""

    def begin(self, rank: int) -> None:
        """Begin a step. Its first one, and each MEASURED_EVERY-th, is measured on rank 0."""
        is_measured = rank == 0 and self._steps % MEASURED_EVERY == 0
        self._norms, self._steps = [] if is_measured else None, self._steps + 1

    def start(self, piece: torch.Tensor, world: Collectives, name: str) -> Started:
        slice_ = -(-piece.numel() // world.size)
        outgoing = torch.zeros(slice_ * world.size, dtype=self._dtype, device=piece.device)
        cast = outgoing[: piece.numel()]
        cast.copy_(piece if self._predivide == 1 else piece / self._predivide)
        if self._norms is not None:
            lost = piece - cast.to(piece.dtype) * self._predivide
            self._norms.append((float(lost.norm()), float(piece.norm())))
        handle = world.exchange_start(outgoing.view(torch.int16), [slice_] * world.size, name)
        return handle, piece

    def finish(self, world: Collectives, started: list[Started]) -> None:
        """Wait for the sums of all buckets, and put them where their gradients were."""
        mine = []
        for handle, piece in started:
            received = world.exchanged(handle)[0].view(self._dtype).view(world.size, -1)
            mine.append(received.to(piece.dtype).sum(0).to(self._dtype))  # in 32 bits, by rank
        if not mine:
            return
        whole = world.allgather(torch.cat(mine).view(torch.int16), "ring.narrow")  # network
        whole, at = whole.view(self._dtype).view(world.size, -1), 0
        for one, (_, piece) in zip(mine, started, strict=True):
            piece.copy_(whole[:, at : at + len(one)].reshape(-1)[: piece.numel()])
            at += len(one)
            if self._predivide != 1:
                piece.mul_(self._predivide)
        if self._norms:
            self._tell(world, sum(piece.nbytes for _, piece in started))

    def _tell(self, world: Collectives, full_bytes: int) -> None:
        """Report what was sent: in a ring each element passes a worker 2 (n - 1) / n times."""
        norms = self._norms or [(0.0, 0.0)]
        lost, norm = (math.hypot(*found) for found in zip(*norms, strict=True))
        if not (norm and math.isfinite(lost)):  # the scaler skips this step, so the next one is
            self._steps = 0  # measured
            return
        sent = 2 * (world.size - 1) / world.size
        self._note(compress=self._name, sent_bytes=round(sent * full_bytes / 2),
                   uncompressed_bytes=round(sent * full_bytes),
                   relative_error=float(f"{lost / norm:.3g}"))


class Bucket(NamedTuple):
    """A piece of the flat buffers that one allreduce sums."""

    dtype: torch.dtype
    start: int
    stop: int
    members: list[int]
    """The parameters whose gradients it holds, by their place among those that are trained."""


class RingReducer(Reducer):
    """Float allreduce in place; gradients in 16 bits go another way (Narrow). `note` gets the facts
    of these."""

    def __init__(self, flat: Flat, microbatches: int, sending: Sending | None = None,
                 note: Callable[..., None] = lambda **_: None):
        super().__init__(flat, microbatches)
        self._bucket_bytes = (sending and sending.bucket_bytes) or BUCKET_BYTES
        self._narrow = Narrow(sending, note) if sending and sending.dtype else None
        self._started: dict[int, Any] = {}
        self._world: Collectives | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._plan()

    def _plan(self) -> None:
        """Cut the buffers as they are now, and ask autograd for a call at each complete
        gradient."""
        self.flat.add_into(self.flat.sums)
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

    def _begin(self, world: Collectives, mine: range) -> None:
        for tensor in self.flat.sums.values():
            tensor.zero_()
        self.flat.add_into(self.flat.sums)
        self._world, self._started = None, {}
        if self._narrow:
            self._narrow.begin(world.rank)

    def _laid_out(self) -> None:
        self._plan()
        self._missing = self._count_missing()

    def has_sent(self) -> bool:
        return bool(self._started)

    def microbatch(self, microbatch: int, is_last: bool) -> Callable[[], None]:
        if is_last:
            self._missing = self._count_missing()
        return lambda: None

    def overlap(self, world: Collectives) -> None:
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

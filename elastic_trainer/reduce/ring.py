"""The reducer `ring`: a float allreduce, overlapped with the last micro-batch's backward pass.

flat buffers of my micro-batches → here (an allreduce for each bucket) → reduced flat buffers;
options compress, predivide, bucket_bytes → Sending

A gradient in 16 bits goes in two halves: an alltoall sends each worker its slice of everybody's
gradient, and each worker adds its slice in 32 bits; an allgather returns the sums, in 16 bits.

What always holds:
1. The buffers are cut into buckets. A bucket is sent when autograd has completed its gradients, in
   the last micro-batch of this worker.
2. Whether the buckets of all workers have the same lengths is known from a message of its own
   (agreement.py).
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
from functools import partial
from typing import Any

import torch

from elastic_trainer.config import ConfigError
from elastic_trainer.reduce.buckets import GPU_BUCKET_BYTES, Bucket, Filling
from elastic_trainer.reduce.flat import ALIGNED, Flat
from elastic_trainer.reduce.reducer import Collectives, Reducer

BUCKET_BYTES = 1 << 20
"""How much of the gradient is sent at once, on a CPU: small enough to start early, large enough for
the network."""
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
        if reduce == "exact" and self.compress is not None:
            raise ConfigError(
                f"compress is {self.compress!r}, but reduce is \"exact\", which sends its sums "
                f"uncompressed. Use reduce=\"ring\" (--reduce ring), or leave compress out.")
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


class RingReducer(Reducer):
    """Float allreduce in place; gradients in 16 bits go another way (Narrow). `note` gets the facts
    of these."""

    def __init__(self, flat: Flat, microbatches: int, sending: Sending | None = None,
                 note: Callable[..., None] = lambda **_: None):
        super().__init__(flat, microbatches)
        self._bucket_bytes = (sending and sending.bucket_bytes) or (
            GPU_BUCKET_BYTES if flat.device.type == "cuda" else BUCKET_BYTES)
        self._narrow = Narrow(sending, note) if sending and sending.dtype else None
        self._started: list[Any] = []
        """The buckets that were sent, in their order."""
        self._plan()

    def _plan(self) -> None:
        """Cut the buffers as they are now."""
        self.flat.add_into(self.flat.sums)
        self.buckets = self._cut()
        self._filling = Filling(self.flat.gradients, self.buckets)

    def _cut(self) -> list[Bucket]:
        """Cut the buffers into buckets: the gradients, those of the last parameters first, and what
        stands in front of them.

        The front is complete last. It goes with the last gradients: a bucket of its own takes a
        cycle of Horovod (0.8 ms, measured).
        """
        layout, buckets = self.flat.layout, list[Bucket]()
        for number, (dtype, start, stop) in reversed([*enumerate(layout.places)]):
            last = buckets[-1] if buckets else None
            if last and last.dtype == dtype and stop == last.start and (
                    last.stop - start) * 4 <= self._bucket_bytes:
                buckets[-1] = Bucket(dtype, start, last.stop, [*last.members, number])
            else:
                buckets.append(Bucket(dtype, start, stop, [number]))
        last = buckets[-1] if buckets else None
        if last and not self._narrow and (
                last.dtype == torch.float32 and last.start - layout.head_stop < ALIGNED):
            return [*buckets[:-1], last._replace(start=0)]
        return [*buckets, Bucket(torch.float32, 0, layout.head_stop, [])]

    def _begin(self, world: Collectives, mine: range, again: bool) -> None:
        self._filling.rest()
        for tensor in self.flat.sums.values():
            tensor.zero_()
        self.flat.add_into(self.flat.sums)
        self._started = []
        if self._narrow:
            self._narrow.begin(world.rank)

    def _laid_out(self) -> None:
        self._filling.remove()
        self._plan()

    def has_sent(self) -> bool:
        return bool(self._started)

    def overlap(self, world: Collectives) -> None:
        gradients = self.flat.gradients
        if not (world.size == 1 or gradients.isolates or any(gradients.narrow)):
            self._send_message(world, self.flat.microbatches_run + 1)
            self._filling.watch(partial(self._send_full, world))

    def _send_full(self, world: Collectives) -> None:
        """Send the buckets that are full, in order. The last one waits for the counts."""
        while len(self._started) < len(self.buckets) - 1 and (
                self._filling.is_full(len(self._started))):
            self._start(world)

    def _start(self, world: Collectives) -> None:
        dtype, start, stop, members = self.buckets[len(self._started)]
        self.flat.gradients.take(members)
        piece = self.flat.sums[dtype][start:stop]
        name = f"ring.{len(self._started)}"
        # Buckets without gradients keep their 32 bits.
        self._started.append(self._narrow.start(piece, world, name) if self._narrow and members
                             else (world.allreduce_start(piece, name), None))

    def send(self, world: Collectives) -> None:
        """Start the buckets that are not on their way: those of unused parameters, and the
        counts."""
        self._filling.rest()
        if world.size > 1:
            self._send_message(world, self.flat.microbatches_run)
            if self._run:
                self._start_all(world)

    def _start_all(self, world: Collectives) -> None:
        while len(self._started) < len(self.buckets):
            self._start(world)

    def finish(self, world: Collectives) -> None:
        if world.size == 1:
            return
        trained = self._agreed(world)
        if trained is None:
            return  # no worker has run a micro-batch: the vote says why
        if not self._run:
            self._follow(trained)
            self._start_all(world)
        if self._narrow:
            self._narrow.finish(world, [one for one in self._started if one[1] is not None])
        for handle, piece in self._started:
            if piece is None:
                world.wait(handle)
        self._started = []

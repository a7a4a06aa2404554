"""Gradients of all micro-batches become one: what a reducer is, and what it needs of the world.

    loss      training/microbatches.py: one batch at a time in the user's hands, step.backward(loss)
    flat      gradient_sums.py, flat.py: autograd adds into flat buffers, with counts in front;
              buffers.py: the loss, and what a step does to the model's buffers
    reduce    exact.py (the same bits for every world size), ring.py (a float allreduce)
    vote      training/loop.py: all workers hold the sums, or none applies them
    apply     training/commit_step.py: weights, optimizer, buffers and cursor, together

What always holds:
1. Weights of micro-batches are micro-batch / batch, so the result is the gradient of the mean over
   the global batch.
2. Nothing that outlives the step changes in here.

What it does not do: sparse gradients (they are added densely).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from elastic_trainer.events.trace import Trace
from elastic_trainer.reduce.agreement import agreed, message_of
from elastic_trainer.reduce.flat import Flat, Sums
from elastic_trainer.schedule.schedule import owned_microbatches

T = TypeVar("T")


class Collectives(Protocol):
    """What a reducer needs of the world."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def hosts(self) -> tuple[int, ...]:
        """The number of each rank's host."""

    def allreduce_start(self, tensor: torch.Tensor, name: str) -> Any: ...
    def wait(self, handle: Any) -> torch.Tensor: ...
    def exchange_start(self, tensor: torch.Tensor, splits: list[int], name: str) -> Any: ...
    def exchanged(self, handle: Any) -> tuple[torch.Tensor, list[int]]: ...
    def allgather_start(self, tensor: torch.Tensor, name: str) -> Any: ...
    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor: ...
    def is_done(self, handle: Any) -> bool: ...


class Reducer(ABC):
    """Sums the flat buffers of all workers. The methods are called in this order."""

    def __init__(self, flat: Flat, microbatches: int):
        self.flat, self.microbatches = flat, microbatches
        self._message: Any = None
        self._run = 0
        """The number of micro-batches in the message to all workers."""

    def begin(self, world: Collectives, *, again: bool = False) -> range:
        """Start a step; returns the micro-batches that this worker runs, in order. `again`: it runs
        the micro-batches of the step in flight again, and what was sent of it holds."""
        self.flat.begin()
        mine = self.owned(world.rank, world.size)
        if not again:
            self.flat.gradients.begin()
            self._message = None
        self._begin(world, mine, again)
        return mine

    def owned(self, rank: int, size: int) -> range:
        """Return the micro-batches of a rank."""
        return owned_microbatches(rank, size, self.microbatches)

    def owner(self, microbatch: int, size: int) -> int:
        """Return the rank that runs a micro-batch."""
        return next(rank for rank in range(size) if microbatch in self.owned(rank, size))

    @abstractmethod
    def _begin(self, world: Collectives, mine: range, again: bool) -> None: ...

    def microbatch(self, microbatch: int, is_last: bool) -> Callable[[], None]:
        """Announce the next micro-batch; call the result after its backward pass."""
        return lambda: None

    def lay_out(self, trained: Sequence[bool],
                buffers: dict[str, torch.Tensor] | None = None) -> None:
        """Train another set of parameters from this micro-batch on. No micro-batch of the step was
        run yet."""
        assert self.flat.microbatches_run == 0
        self.flat.lay_out(trained, buffers)
        self._laid_out()

    @abstractmethod
    def _laid_out(self) -> None: ...

    def overlap(self, world: Collectives) -> None:
        """Let the last micro-batch's backward pass, which comes next, start the network if it
        can."""
        return None

    def has_sent(self) -> bool:
        """True if other workers hold a part of this step that this worker could not send again."""
        return False

    def _send_message(self, world: Collectives, run: int) -> None:
        """Tell all workers what this one trains in this number of micro-batches, once a step."""
        if self._message is None:
            self._run, self._message = run, world.allreduce_start(
                message_of(self.flat, run), "reduce.message")

    def _agreed(self, world: Collectives) -> list[bool] | None:
        """Return which parameters all micro-batches train; None if none was run. Network.

        Raises SetsDiffer, on all workers alike.
        """
        message, self._message = self._message, None
        return agreed(world.wait(message).tolist(), world.size)

    def _follow(self, trained: list[bool]) -> None:
        """Have buffers for what the others train, if this worker has run no micro-batch."""
        if trained != self.flat.trained:
            self.flat.gradients.adopt(trained)
            self.lay_out(trained)

    def mine(self) -> Sums:
        """Return sums that go into this worker's part of the step, after its last micro-batch."""
        return self.flat.sums

    def spare(self) -> Sums:
        """Return flat buffers that nobody needs between `finish` and the next `begin`."""
        return self.flat.new_sums()

    @abstractmethod
    def send(self, world: Collectives) -> None:
        """Start what is not on its way, without waiting for it."""

    @abstractmethod
    def finish(self, world: Collectives) -> None:
        """Wait for the sums; afterwards the reduced gradient is in `flat.sums` on every worker.

        Raises SetsDiffer, on all workers alike, if their micro-batches trained different
        parameters.
        """


class Sent(NamedTuple):
    """A collective on its way, and what the timeline has to know of it."""

    handle: Any
    name: str
    size_bytes: int
    began: int


class TracedWorld:
    """The collectives of a world, on the timeline: one span for each bucket. No tensor and no order
    is changed."""

    def __init__(self, world: Collectives, trace: Trace):
        self.world, self.trace = world, trace

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    @property
    def hosts(self) -> tuple[int, ...]:
        return self.world.hosts

    def is_done(self, handle: Any) -> bool:
        return self.world.is_done(handle.handle)

    def allreduce_start(self, tensor: torch.Tensor, name: str) -> Any:
        began = self.trace.now()
        return Sent(self.world.allreduce_start(tensor, name), name, tensor.nbytes, began)

    def wait(self, handle: Any) -> torch.Tensor:
        return self._waited(handle, lambda: self.world.wait(handle.handle))

    def exchange_start(self, tensor: torch.Tensor, splits: list[int], name: str) -> Any:
        began = self.trace.now()
        return Sent(self.world.exchange_start(tensor, splits, name), name, tensor.nbytes, began)

    def exchanged(self, handle: Any) -> tuple[torch.Tensor, list[int]]:
        return self._waited(handle, lambda: self.world.exchanged(handle.handle))

    def allgather_start(self, tensor: torch.Tensor, name: str) -> Any:
        began = self.trace.now()
        return Sent(self.world.allgather_start(tensor, name), name, tensor.nbytes, began)

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return self._waited(Sent(None, name, tensor.nbytes, self.trace.now()),
                            lambda: self.world.allgather(tensor, name))

    def _waited(self, sent: Sent, wait: Callable[[], T]) -> T:
        self.trace.mark.bucket = sent.name
        with self.trace.span(f"wait {sent.name}"):
            result = wait()
        self.trace.add_transfer(sent.name, sent.began, bytes=sent.size_bytes)
        return result

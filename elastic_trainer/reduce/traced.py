"""A reducer whose collectives are in the mark and on the timeline: one span for each bucket.

loop → here → exact or ring → here (its collectives) → the world

What always holds: it changes no tensor, and asks the world for the same collectives in the same
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from elastic_trainer.events.trace import Trace
from elastic_trainer.reduce.flat import Sums
from elastic_trainer.reduce.reducer import Collectives, Reducer


class Sent(NamedTuple):
    """A collective on its way, and what the timeline has to know of it."""

    handle: Any
    name: str
    size_bytes: int
    began: int


class TracedWorld:
    """The collectives of a world, on the timeline."""

    def __init__(self, world: Collectives, trace: Trace):
        self.world, self.trace = world, trace

    @property
    def rank(self) -> int:
        """This worker's number, which changes with the generation."""
        return self.world.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.world.size

    def allreduce_start(self, tensor: torch.Tensor, name: str) -> Any:
        """Start to sum a tensor over all workers in place."""
        began = self.trace.now()
        return Sent(self.world.allreduce_start(tensor, name), name, tensor.nbytes, began)

    def wait(self, handle: Any) -> torch.Tensor:
        """Wait for a collective."""
        self.trace.mark.bucket = handle.name
        with self.trace.span(f"wait {handle.name}"):
            result = self.world.wait(handle.handle)
        self._end(handle)
        return result

    def exchange_start(self, tensor: torch.Tensor, splits: list[int], name: str) -> Any:
        """Start to send each worker its part of a flat tensor."""
        began = self.trace.now()
        return Sent(self.world.exchange_start(tensor, splits, name), name, tensor.nbytes, began)

    def exchanged(self, handle: Any) -> tuple[torch.Tensor, list[int]]:
        """Wait for an exchange."""
        self.trace.mark.bucket = handle.name
        with self.trace.span(f"wait {handle.name}"):
            result = self.world.exchanged(handle.handle)
        self._end(handle)
        return result

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the tensors of all workers, joined by rank."""
        self.trace.mark.bucket = name
        began = self.trace.now()
        with self.trace.span(f"wait {name}"):
            result = self.world.allgather(tensor, name)
        self._end(Sent(None, name, tensor.nbytes, began))
        return result

    def _end(self, sent: Sent) -> None:
        self.trace.add_transfer(sent.name, sent.began, bytes=sent.size_bytes)


class TracedReducer:
    """A reducer, on the timeline."""

    def __init__(self, reducer: Reducer, trace: Trace):
        self.reducer, self.trace = reducer, trace

    def _traced(self, world: Collectives) -> Any:
        return TracedWorld(world, self.trace)

    def begin(self, world: Collectives) -> range:
        """Start a step."""
        return self.reducer.begin(world)

    def microbatch(self, microbatch: int, is_last: bool) -> Callable[[], None]:
        """Announce the next micro-batch."""
        return self.reducer.microbatch(microbatch, is_last)

    def lay_out(self, trained: Sequence[bool],
                buffers: dict[str, torch.Tensor] | None = None) -> None:
        """Train another set of parameters."""
        self.reducer.lay_out(trained, buffers)

    def overlap(self, world: Collectives) -> None:
        """Let the next backward pass start the network."""
        self.reducer.overlap(self._traced(world))

    def has_sent(self) -> bool:
        """True if other workers hold a part of this step already."""
        return self.reducer.has_sent()

    def mine(self) -> Sums:
        """Return the sums of this worker's part of the step."""
        return self.reducer.mine()

    def send(self, world: Collectives) -> None:
        """Start what is not on its way."""
        self.reducer.send(self._traced(world))

    def finish(self, world: Collectives) -> None:
        """Wait for the sums."""
        self.reducer.finish(self._traced(world))

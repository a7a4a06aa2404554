"""Gradients of all micro-batches become one: what a reducer is, and what it needs of the world.

forward/backward of my micro-batches → here → vote → apply

- gradients.py: `.grad` of the parameters, and what the user's code writes to it.
- flat.py: the flat buffers, and where everything lies in them.
- statistics.py: the loss and the changes of the model's buffers, in front of the gradients.
- tally.py: what the micro-batches have counted and logged, in front of the gradients, too.
- exact.py: the reducer whose sums have the same bits for every world size.
- ring.py: the reducer that uses a float allreduce.

What always holds:
1. The gradients of a step are summed in place, in the buffers that autograd adds them to.
2. What lies in front of the gradients follows the same rules as the gradients.
3. Weights of micro-batches are micro-batch / batch, so the result is the gradient of the mean over
   the global batch.
4. Nothing that outlives the step changes in here.

What it does not do: sparse gradients (they are added densely).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from elastic_trainer.reduce.flat import Sums


class Collectives(Protocol):
    """What a reducer needs of the world."""

    rank: int
    size: int

    def allreduce_start(self, tensor: torch.Tensor, name: str) -> Any: ...
    def wait(self, handle: Any) -> torch.Tensor: ...
    def exchange_start(self, tensor: torch.Tensor, splits: list[int], name: str) -> Any: ...
    def exchanged(self, handle: Any) -> tuple[torch.Tensor, list[int]]: ...
    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor: ...


class Reducer(Protocol):
    """Sums the flat buffers of all workers. The methods are called in this order."""

    def begin(self, world: Collectives) -> range:
        """Start a step; returns the micro-batches that this worker runs, in order."""

    def microbatch(self, microbatch: int, is_last: bool) -> Callable[[], None]:
        """Announce the next micro-batch; call the result after its backward pass."""

    def lay_out(self, trained: Sequence[bool],
                buffers: dict[str, torch.Tensor] | None = None) -> None:
        """Train another set of parameters from this micro-batch on. No micro-batch of the step was
        run yet."""

    def overlap(self, world: Collectives) -> None:
        """Let the last micro-batch's backward pass, which comes next, start the network if it
        can."""

    def has_sent(self) -> bool:
        """True if other workers hold a part of this step already."""

    def mine(self) -> Sums:
        """Return sums that go into this worker's part of the step, after its last micro-batch."""

    def send(self, world: Collectives) -> None:
        """Start what is not on its way, without waiting for it."""

    def finish(self, world: Collectives) -> None:
        """Wait for the sums; afterwards the reduced gradient is in `flat.sums` on every worker.

        Raises SetsDiffer, on all workers alike, if their micro-batches trained different
        parameters.
        """

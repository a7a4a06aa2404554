"""The world: this worker's rank among the workers of its generation, and their collectives.

generations (rank, size) → here → reduce, checkpoint, transfer

What always holds:
1. A collective ends with its result, with HorovodInternalError or with PeersLost.
2. A world of one exchanges nothing.

What it does not do: start Horovod (session.py), or choose the members (driver/membership.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import horovod.torch as hvd
import torch
from horovod.torch.mpi_ops import synchronize  # horovod_names.py puts `wait` in its place

from elastic_trainer.events.mark import Mark
from elastic_trainer.state.holders import Site
from elastic_trainer.world.vote import Ballot, Outcome, outcome_of

POLL_S = 0.0005
PATIENT_POLL_S = 0.02
WAITED_SHARE = 0.02
"""A worker that waits for a collective polls again after 2 % of the time that it has waited, at
least POLL_S and at most PATIENT_POLL_S. A poll takes 14 µs (measured): at a poll each 0.5 ms, each
waiting worker takes 2 % of a core, and 48 workers take a whole core."""
BROKEN_S = 1.0
"""A collective of a broken generation ends within this time, or never."""


class PeersLost(Exception):
    """A collective failed or cannot end: a worker of this generation is gone."""


class TooLate(Exception):
    """The other workers have not come to a collective in time."""


class World:
    """The workers of one generation, as one of them sees them."""

    def __init__(self, is_broken: Callable[[], bool] = lambda: False, mark: Mark | None = None):
        self._is_broken, self._mark = is_broken, mark or Mark()
        self.rank, self.size = 0, 1
        self.sites: tuple[Site, ...] = (Site(0),)
        """Host and zone of each rank."""
        self.latest: float | None = None
        """When a collective must have ended (time.monotonic); None: it may take any time."""

    @property
    def hosts(self) -> tuple[int, ...]:
        """The number of each rank's host: ranks of one host have one number."""
        return tuple(site.host for site in self.sites)

    def seat(self, rank: int, size: int) -> None:
        """Take a place in the next generation."""
        self.rank, self.size, self.sites = rank, size, tuple(map(Site, range(size)))

    def wait(self, handle: int) -> torch.Tensor:
        """Wait for a collective, asleep most of the time. Raises HorovodInternalError, PeersLost,
        and TooLate.

        Horovod's own wait spins a core, takes the GIL at each turn, and never returns after the
        enqueue race (mpi_ops_v2.cc:1121-1128).
        """
        if not hvd.poll(handle):
            self._mark.wait()
            try:
                self._poll(handle)
            finally:
                self._mark.waited()
        result: torch.Tensor = synchronize(handle)
        return result

    def _poll(self, handle: int) -> None:
        broken_since, began = None, time.monotonic()
        while not hvd.poll(handle):
            time.sleep(poll_s(time.monotonic() - began))
            if self.latest is not None and time.monotonic() > self.latest:
                raise TooLate
            if self._is_broken():
                broken_since = broken_since or time.monotonic()
                if time.monotonic() - broken_since > BROKEN_S:
                    raise PeersLost("a collective did not end after its sockets were shut")

    def allreduce_start(self, tensor: torch.Tensor, name: str) -> int:
        """Start to sum a tensor over all workers in place."""
        return int(hvd.allreduce_async_(tensor, op=hvd.Sum, name=name))

    def broadcast_start(self, tensor: torch.Tensor, root: int, name: str) -> int:
        """Start to copy the tensor of rank `root` to all workers, in place."""
        return int(hvd.broadcast_async_(tensor, root, name=name))

    def alltoall(self, tensor: torch.Tensor, splits: list[int], name: str) -> torch.Tensor:
        """Send each worker its part of a flat tensor; return the parts received, by rank."""
        return self.exchanged(self.exchange_start(tensor, splits, name))[0]

    def exchange_start(self, tensor: torch.Tensor, splits: list[int], name: str) -> int:
        """Start to send each worker its part of a flat tensor."""
        lengths = torch.tensor(splits, dtype=torch.int32)
        return int(hvd.alltoall_async(tensor, splits=lengths, name=name))

    def exchanged(self, handle: int) -> tuple[torch.Tensor, list[int]]:
        """Wait for an exchange; return the parts received, by rank, and their lengths."""
        received, counts = self.wait(handle)
        return received, counts.tolist()

    def allgather_start(self, tensor: torch.Tensor, name: str) -> int:
        """Start to join the tensors of all workers by rank, along the first dimension."""
        return int(hvd.allgather_async(tensor, name=name))

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the tensors of all workers, joined by rank along the first dimension."""
        return self.wait(self.allgather_start(tensor, name))

    def is_done(self, handle: int) -> bool:
        """Return whether a collective has ended, with its result or an error."""
        return bool(hvd.poll(handle))

    def share_text(self, text: str, root: int) -> str:
        """Return the text of rank `root`, on all workers."""
        if self.size == 1:
            return text
        mine = text.encode() if self.rank == root else b""
        return bytes(self.allgather(_as_tensor(mine), "text").numpy().tobytes()).decode()

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all workers by rank, on all workers."""
        if self.size == 1:
            return [text]
        mine = _as_tensor(text.encode())
        sizes = self.allgather(torch.tensor([mine.numel()]), "text.sizes").tolist()
        everyone = bytes(self.allgather(mine, "text").numpy().tobytes())
        ends = [sum(sizes[: rank + 1]) for rank in range(self.size)]
        return [everyone[end - size : end].decode() for end, size in zip(ends, sizes, strict=True)]

    def vote(self, step: int, ballot: Ballot) -> Outcome:
        """Agree that all workers hold the reduced gradient of `step`, and exchange their ballots.

        The vote ends on a member only if the gradients of all members were reduced.
        Network: one allreduce of 23 integers.
        """
        return outcome_of(self, step, ballot)


def poll_s(waited_s: float) -> float:
    """Return the seconds until the next poll of a collective."""
    return min(PATIENT_POLL_S, max(POLL_S, WAITED_SHARE * waited_s))


def _as_tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

"""The vote: each worker's ballot at the end of a step, and the outcome that all workers know.

one Ballot a worker → 23 integers → their sums over all workers → the same Outcome everywhere

What always holds:
1. If a vote passes on one member, all members hold the reduced gradient. So each can apply the step
   itself.
2. Only this module encodes a ballot (`Ballot.encode`) and decodes it (`Outcome.decode`).
3. All workers decode the same sums, so all have the same outcome. The vote is one allreduce. Only
   the rank of a worker whose code has raised takes a second collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastic_trainer.world.place import Wants
from elastic_trainer.world.replicas import are_same, summands


class Peers(Protocol):
    """What the agreements of a world need of it (collectives.World): the vote, the comparisons of
    its members, and the transfer."""

    rank: int
    size: int

    def allreduce_start(self, tensor: torch.Tensor, name: str) -> Any: ...
    def wait(self, handle: Any) -> torch.Tensor: ...
    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor: ...
    def alltoall(self, tensor: torch.Tensor, splits: list[int], name: str) -> torch.Tensor: ...
    def gather_texts(self, text: str) -> list[str]: ...


@dataclass(frozen=True, kw_only=True)
class CheckpointBallot:
    """The part of a ballot about checkpoints."""

    is_uploaded: bool = False
    """Its share of the checkpoint in flight is in the store."""
    has_failed: bool = False
    """Its share has failed."""
    is_wanted: bool = False
    """There should be a checkpoint after this step. Only rank 0 may ask for it."""
    newest_step: int = -1
    """The newest step that it knows to be published; -1: none. Only the value of rank 0 counts."""


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """What one worker sends in a vote."""

    samples: int = 0
    """The number of samples of the step that it has computed."""
    digest: int = 0
    """The sum of their digests (schedule.samples_digest)."""
    has_failed: bool = False
    """The user's code has raised here."""
    clock_ms: int = 0
    """The time for which the run has trained. Only the value of rank 0 counts, so that all workers
    have the same time."""
    finishes: bool = False
    """The user's code has asked to finish the run after this step."""
    checksum: int = 0
    """The checksum of a slice of its state (replicas.py)."""
    shards: int = 0
    """What this worker adds to a sum that is 0 if all holders of each part of a sharded optimizer's
    state hold the same bits (replicas.py)."""
    modes: int = 0
    """The checksum of the modes (train or eval) with which the step began."""
    checkpoint: CheckpointBallot = CheckpointBallot()
    wants: Wants = Wants()
    change_waits: bool = False
    """A change of the world waits for the checkpoint in flight."""

    def encode(self, rank: int) -> list[int]:
        """Return the integers that are summed over all workers."""
        mine, wants = self.checkpoint, self.wants
        changes_now = wants.change and not self.change_waits
        known = mine.newest_step + 1 if rank == 0 else 0
        return [1, self.samples, self.digest, changes_now, wants.stop, self.has_failed,
                mine.is_uploaded, mine.has_failed, mine.is_wanted, known,
                wants.drains, wants.change, self.clock_ms if rank == 0 else 0,
                self.finishes, self.shards, *summands(self.checksum), *summands(self.modes)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What all workers know after a vote."""

    voters: int
    samples: int
    digest: int
    change: bool
    """The generation ends after this step: a worker joins or leaves."""
    stop: bool
    """All workers want the attempt to stop after this step, with a checkpoint. If only some do,
    they may have lost the driver: then the world changes, and the driver decides."""
    has_failure: bool
    """The user's code has raised on a worker: no worker applies the step."""
    uploaded: int
    """The number of workers whose share of the checkpoint in flight is in the store."""
    upload_failed: bool
    checkpoint: bool
    """Rank 0 wants a checkpoint after this step."""
    published: int
    """The newest step that rank 0 knows to be published; -1: it knows of none."""
    all_drain: bool
    """All workers should leave: this step is the last that any of them holds."""
    change_waits: bool
    """A worker wants the world to change, after this step or soon."""
    differs: bool
    """The workers do not all hold the same bits in the slice of the state that was compared: no
    worker applies the step."""
    shards_differ: bool = False
    """Two holders of a part of a sharded optimizer's state hold different bits: no worker applies
    the step."""
    modes_differ: bool = False
    """The workers did not all begin the step with the same modes: no worker applies the step."""
    clock_ms: int = 0
    """The time for which the run has trained, by rank 0."""
    finishes: int = 0
    """The number of workers that ask to finish the run after this step. One is enough."""
    failed_rank: int = -1
    """The lowest rank whose user code has raised; -1: none has."""

    @property
    def totals(self) -> tuple[int, int, int, int]:
        """What a worker that has the gradient needs to finish the step by itself."""
        return self.samples, self.digest, self.clock_ms, self.finishes

    @staticmethod
    def decode(sums: Sequence[int], size: int, failed_rank: int = -1) -> Outcome:
        """Read the sums of all ballots of a world of `size` workers."""
        (voters, samples, digest, change, stop, failed, uploaded, upload_failed, checkpoint,
         known, drains, change_soon, clock_ms, finishes, shards, *checksums) = sums
        return Outcome(
            voters=voters, samples=samples, digest=digest, change=change + stop > 0,
            stop=stop == size, has_failure=failed > 0, uploaded=uploaded,
            upload_failed=upload_failed > 0, checkpoint=checkpoint > 0, published=known - 1,
            all_drain=drains == size, change_waits=change_soon > 0,
            clock_ms=clock_ms, finishes=finishes,
            shards_differ=shards != 0, differs=not are_same(checksums[:4], size),
            modes_differ=not are_same(checksums[4:], size), failed_rank=failed_rank)


def outcome_of(world: Peers, step: int, ballot: Ballot) -> Outcome:
    """Vote; all workers call it. Network: one allreduce of 23 integers."""
    sums = ballot.encode(world.rank)
    if world.size > 1:
        sent = torch.tensor(sums, dtype=torch.int64)
        world.wait(world.allreduce_start(sent, "vote"))
        sums = sent.tolist()
    outcome = Outcome.decode(sums, world.size)
    if outcome.voters != world.size:  # also under python -O
        raise AssertionError(f"{outcome.voters} of {world.size} voted in step {step}")
    if not outcome.has_failure:
        return outcome
    mine = torch.tensor([world.rank if ballot.has_failed else world.size], dtype=torch.int64)
    ranks = world.allgather(mine, "failed") if world.size > 1 else mine  # rare
    return Outcome.decode(sums, world.size, int(ranks.min()))

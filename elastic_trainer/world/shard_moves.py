"""The moves of a sharded optimizer's state when the world has changed: from holder to new holder.

what each rank holds (one allgather) → state/holders.py (who is to hold it) → here: each move, in
rounds → what this worker is to hold; the rest is dropped

What always holds:
1. Each block moves once to each new holder, and no block moves that is where it should be.
2. Nobody drops a block before all have what they are to hold. So if a generation breaks in here,
   each block has the holders that it had before, or more.
3. Each round carries ROUND_BYTES or one block, and each blob has a CRC-32.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence

import torch

from elastic_trainer.events.log import Events
from elastic_trainer.state.holders import Move, moves_between
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.shards import Entries, Shards
from elastic_trainer.state.values.layout import byte_view, decode, pack
from elastic_trainer.world.collectives import PeersLost, World

ROUND_BYTES = 64 << 20
KEPT_BYTES = 16
"""What is kept of an element, at most about: Adam's two moments, a master, an average. The rounds
are made before it is known."""
PIECE_BYTES = 256 << 20
"""The most bytes that one worker sends to another in one collective."""


def held_by_rank(world: World, state: LiveState) -> list[set[int]]:
    """Return the blocks that each rank holds: none without the run's values, whatever a restore
    that broke was to bring. Network: one allgather."""
    shards = state.shards
    assert shards
    mine = torch.zeros(len(shards.blocks), dtype=torch.uint8)
    mine[list(shards.held) if state.has_state else []] = 1
    everyone = world.allgather(mine, "shards.held") if world.size > 1 else mine
    return [set(row.nonzero().view(-1).tolist()) for row in everyone.view(world.size, -1)]


def move_shards(world: World, state: LiveState, held: Sequence[set[int]], events: Events) -> None:
    """Let each rank receive what it is to hold in this generation, and drop the rest. All members
    call it, with what each rank holds. Raises PeersLost."""
    shards, began = state.shards, time.monotonic()
    assert shards
    moves, received = moves_between(shards.sizes, held, shards.holders), 0
    for batch in rounds(moves, shards.sizes):
        events.reach("shards.moving", step=state.committed)
        for block, blob in _exchanged(world, shards, batch):
            received += blob.numel()
            entries = _read(blob)
            state.optimizer_values.take(entries.optimizer)
            shards.take_averages(block, entries.averages)
            shards.held.add(block)
    if moves:
        await_all(world, "shards.moved")
        events.emit("worker.shards_moved", step=state.committed, bytes=received,
                    moves=len(moves), received=sum(one.target == world.rank for one in moves),
                    duration_s=round(time.monotonic() - began, 4))
    shards.keep(shards.mine)


def await_all(world: World, name: str) -> None:
    """Return when all workers have called this. Network."""
    world.wait(world.allreduce_start(torch.ones(1, dtype=torch.int64), name))


def rounds(moves: Sequence[Move], sizes: Sequence[int]) -> Iterator[list[Move]]:
    """Cut moves into rounds of about ROUND_BYTES, the same on all ranks."""
    batch, elements = list[Move](), 0
    for move in moves:
        if batch and (elements + sizes[move.block]) * KEPT_BYTES > ROUND_BYTES:
            yield batch
            batch, elements = [], 0
        batch.append(move)
        elements += sizes[move.block]
    if batch:
        yield batch


def _exchanged(world: World, shards: Shards,
               batch: Sequence[Move]) -> list[tuple[int, torch.Tensor]]:
    """Send and receive the blocks of one round; return those received."""
    outgoing = {target: [_blob(shards, move.block) for move in batch
                         if (move.source, move.target) == (world.rank, target)]
                for target in range(world.size)}
    sizes = torch.tensor([[sum(map(len, outgoing[target])) for target in outgoing]])
    lengths = world.allgather(sizes, "shards.sizes")
    sent = {target: torch.cat(blobs) if blobs else torch.empty(0, dtype=torch.uint8)
            for target, blobs in outgoing.items()}
    arrived: list[list[torch.Tensor]] = [[] for _ in range(world.size)]
    for start in range(0, int(lengths.max()), PIECE_BYTES):
        pieces = [sent[target][start : start + PIECE_BYTES] for target in range(world.size)]
        received, counts = world.exchanged(world.exchange_start(
            torch.cat(pieces), [piece.numel() for piece in pieces], "shards.blocks"))
        for rank, piece in enumerate(torch.split(received, counts)):
            arrived[rank].append(piece)
    found = list[tuple[int, torch.Tensor]]()
    for source in range(world.size):
        mine = [move.block for move in batch if (move.source, move.target) == (source, world.rank)]
        found += zip(mine, _cut(torch.cat(arrived[source]) if mine else sent[0][:0]), strict=True)
    return found


def _blob(shards: Shards, block: int) -> torch.Tensor:
    """Return the entries of a block as bytes: their length, a CRC-32, header and payload."""
    packed = pack(shards.entries([block])._asdict())
    payload = [byte_view(tensor) for tensor in packed.tensors]
    header = len(packed.header).to_bytes(8, "little") + packed.header
    whole = torch.cat([torch.frombuffer(bytearray(header), dtype=torch.uint8), *payload])
    seal = b"".join(number.to_bytes(8, "little") for number in (
        whole.numel(), zlib.crc32(whole.numpy().data)))
    return torch.cat([torch.frombuffer(bytearray(seal), dtype=torch.uint8), whole])


def _cut(received: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield each blob, without its seal. Raises PeersLost if one is damaged."""
    at = 0
    while at < received.numel():
        length, crc = (int.from_bytes(received[at + place : at + place + 8].numpy().tobytes(),
                                      "little") for place in (0, 8))
        blob = received[at + 16 : at + 16 + length]
        if blob.numel() != length or zlib.crc32(blob.numpy().data) != crc:
            raise PeersLost("a part of the optimizer's state arrived damaged")
        yield blob
        at += 16 + length


def _read(blob: torch.Tensor) -> Entries:
    header = int.from_bytes(blob[:8].numpy().tobytes(), "little")
    return Entries(**decode(blob[8 : 8 + header].numpy().tobytes(), blob[8 + header :]))

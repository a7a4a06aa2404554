"""The transfer: newcomers receive the state, and each giver sends its share of the bytes.

reconcile (which members have the state) → here → all members have it

What always holds:
1. Only a worker without the state receives it. It receives the whole state into scratch memory,
   checks it, and then takes it over. If a worker dies meanwhile, the survivors keep their state and
   the newcomers have none, as before.
2. Each piece has a CRC-32, which its giver computes.
3. Before the first byte the givers compare their tensors, and checksums of all that they hold.
4. What all takers have built themselves is not sent (state/frozen.py).
5. Each byte leaves the giver's device once, in pieces of TRANSFER_BYTES at most. All pieces use the
   same memory of the host, which is pinned where the state is on a GPU.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import torch

from elastic_trainer.events.log import Events
from elastic_trainer.state.device_copies import (
    await_devices,
    copy_range,
    devices_of,
    new_memory,
)
from elastic_trainer.state.live_state import LiveState, own_tensors
from elastic_trainer.state.shards import Entries
from elastic_trainer.state.values.layout import (
    LayoutError,
    Packed,
    differing,
    fill_range,
    tensors_digest,
    unpack,
)
from elastic_trainer.world.collectives import PeersLost
from elastic_trainer.world.replicas import Part, checksum
from elastic_trainer.world.vote import Peers

TRANSFER_BYTES = 16 << 20
"""The bytes of state that each newcomer receives in one collective. Their memory is reused."""


class Transfer:
    """The transfer of the state from the members that have it (givers) to the others (takers)."""

    def __init__(self, world: Peers, events: Events, all_parts: Callable[[], list[Part]],
                 differ: Callable[[int, list[Part], Sequence[int]], None],
                 gives_alone: bool = False):
        self._world, self._events, self._gives_alone = world, events, gives_alone
        self._all_parts = all_parts
        self._differ = differ
        """All members call it if the givers hold different bits. It may end the generation."""

    def move(self, state: LiveState, givers: list[int], *, is_late: bool = True) -> None:
        """Give all members the state. All members call it. `is_late`: the givers have trained
        before, so what they hold beside the state is not received.

        Network: the state's bytes once for each newcomer. Raises RuntimeError, on all members, if
        the state does not fit what a worker has built.
        """
        started, world = time.monotonic(), self._world
        takers = [rank for rank in range(world.size) if rank not in givers]
        givers = givers[:1] if self._gives_alone else givers
        is_giver, is_taker = world.rank in givers, world.rank in takers
        absent = self._agree_on_frozen(state, takers) if state.frozen.is_shared else {}
        # What is sharded goes from holder to holder (shard_moves.py).
        entries = Entries({}, {}) if state.shards else None
        packed = state.packed(absent=absent, entries=entries) if is_giver else None
        header_bytes, payload_bytes = self._agree(packed, givers, state.committed)
        self._events.reach("world.transfer_started", step=state.committed, is_giver=is_giver)
        # Numbers in the headers may differ, so all of the header is one giver's.
        sent_header = _as_payload(packed.header) if packed and world.rank == givers[0] else None
        header = torch.empty(header_bytes if is_taker else 0, dtype=torch.uint8)
        for low, piece in self._deal(sent_header, header_bytes, givers[:1], takers, "header"):
            header[low : low + piece.numel()] = piece
        room = _room_for(state, header, payload_bytes) if is_taker else Packed(b"", [])
        for low, piece in self._deal(packed, payload_bytes, givers, takers, "payload"):
            fill_range(room, low, piece)
        if is_taker:
            if state.shards:
                state.shards.held, state.shards.behind = set(), None  # they were withdrawn
            state.load(unpack(room))
            state.received = state.ticks if is_late and state.ticks else -1
            self._events.emit("worker.state_received", step=state.committed, bytes=payload_bytes,
                              duration_s=round(time.monotonic() - started, 4))
        self._events.reach("world.transfer_ended", step=state.committed, is_giver=is_giver)

    def _agree_on_frozen(self, state: LiveState, takers: list[int]) -> dict[str, str]:
        """Return what all takers have already, so that it is not sent. Network: names, digests."""
        world, tensors = self._world, own_tensors(state)
        holders = [rank for rank in range(world.size) if rank not in takers]
        mine = (state.frozen.report(tensors) if world.rank in takers else
                state.frozen.report(tensors, holders.index(world.rank), len(holders)))
        return state.frozen.agree(world.gather_texts(mine), takers)

    def _agree(self, packed: Packed | None, givers: list[int], step: int) -> tuple[int, int]:
        """Compare what the givers hold; return the bytes of header and payload."""
        mine = [0, 0, 0]
        if packed:
            mine = [len(packed.header), packed.payload_bytes, zlib.crc32(packed.header)]
        # With one giver there is nothing to compare.
        held = self._all_parts() if packed and len(givers) > 1 else []
        all_sizes = torch.tensor([[*mine, checksum(held)]])
        everyone = self._world.allgather(all_sizes, "state.sizes").tolist()
        theirs = [everyone[giver] for giver in givers]
        if any(sizes[:3] != theirs[0][:3] for sizes in theirs):
            self._compare_tensors(packed, givers)
        if any(sizes[3] != theirs[0][3] for sizes in theirs):
            self._differ(step, held, givers)  # else a wrong bit of one would soon be that of two
        return int(theirs[0][0]), int(theirs[0][1])

    def _compare_tensors(self, packed: Packed | None, givers: list[int]) -> None:
        """Raise RuntimeError on all members if the givers have different tensors."""
        digests = self._world.gather_texts(tensors_digest(packed.header) if packed else "")
        if wrong := differing({giver: digests[giver] for giver in givers}):
            raise RuntimeError(f"no worker can join: {wrong}.")

    def _deal(self, sent: Packed | None, total: int, givers: list[int], takers: list[int],
              name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Give each taker `total` bytes: each giver sends its share of each piece, with a CRC-32.

        Yields to a taker (the byte where it belongs, piece), and nothing to a giver; to be
        exhausted by both.
        """
        world = self._world
        outgoing = _Outgoing(sent, min(total, TRANSFER_BYTES), givers, takers) if sent else None
        for start in range(0, total, TRANSFER_BYTES):
            shares = _shares(start, min(start + TRANSFER_BYTES, total), givers)
            copies, splits = torch.empty(0, dtype=torch.uint8), [0] * world.size
            if outgoing:
                low, high = shares[world.rank]
                copies = outgoing.sealed(low, high)
                splits = [high - low + 4 if rank in takers else 0 for rank in range(world.size)]
            incoming = world.alltoall(copies, splits, f"state.{name}")
            if world.rank in takers:
                yield from _opened(incoming, shares)


def _shares(start: int, stop: int, givers: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return the bytes of [start, stop) that each giver sends."""
    cuts = [start + (stop - start) * i // len(givers) for i in range(len(givers) + 1)]
    return {giver: (cuts[i], cuts[i + 1]) for i, giver in enumerate(givers)}


class _Outgoing:
    """What a giver sends, piece by piece, from the same memory: one copy for each taker."""

    def __init__(self, packed: Packed, most: int, givers: Sequence[int], takers: Sequence[int]):
        self._packed, self._count = packed, len(takers)
        self._devices = devices_of(packed.tensors)
        room = self._count * (-(-most // len(givers)) + 4)
        [self._memory] = new_memory(room, max(room, 1), bool(self._devices)).pieces

    def sealed(self, low: int, high: int) -> torch.Tensor:
        """Return the bytes [low, high) with their CRC-32 after them, once for each taker."""
        length = high - low
        copies = self._memory[: self._count * (length + 4)].view(self._count, length + 4)
        copy_range(self._packed, low, high, copies[0, :length])
        await_devices(self._devices)
        copies[0, length:] = torch.frombuffer(_crc(copies[0, :length]), dtype=torch.uint8)
        copies[1:] = copies[0]
        return copies.view(-1)


def _opened(incoming: torch.Tensor,
            shares: dict[int, tuple[int, int]]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield what the givers have sent: (first byte, piece). Raises PeersLost if it is damaged."""
    at = 0
    for giver, (low, high) in shares.items():
        piece, at = incoming[at : at + high - low], at + high - low + 4
        if _crc(piece) != incoming[at - 4 : at].numpy().tobytes():
            raise PeersLost(f"the state's bytes from rank {giver} arrived damaged")
        yield low, piece


def _as_payload(header: bytes) -> Packed:
    return Packed(b"", [torch.frombuffer(bytearray(header), dtype=torch.uint8)])


def _room_for(state: LiveState, header: torch.Tensor, payload_bytes: int) -> Packed:
    try:
        return state.room(header.numpy().tobytes(), payload_bytes)
    except LayoutError as error:
        raise RuntimeError(
            f"the state of this run does not fit what this worker has built: {error}. All workers "
            f"must build the same model and optimizer.") from error


def _crc(piece: torch.Tensor) -> bytearray:
    return bytearray(zlib.crc32(piece.numpy().data).to_bytes(4, "little"))

"""One worker's share of a checkpoint: one copy of it, and its upload beside the training.

live_state → SnapshotMemory (the only pause) → Upload (threads) → store; the vote → collect
(run_checkpoints.py)

On a GPU the copy runs beside the next forward and backward passes, and the next `apply` comes after
it (device_copies.py). The pause is then the time to start the copies.

What always holds:
1. One share is in flight at most, in the memory of one share. `is_busy` is True while a thread can
   still read that memory, also for a share that was dropped. It is not written again before.
2. New memory costs more than the copy: with 1 GB, 4 workers and 2 cores the first pause was 1.7 s
   and the later ones 0.08 s. So a thread makes the memory beside the training (`prepare`). For a
   GPU it is pinned, once, in pieces.
3. A part that the newest published checkpoint has too is not sent again: the record names the old
   one.
4. A share that fails, stalls or hangs never ends the training. `Share.error` holds the reason, the
   vote informs the other workers, and a stall is emitted once.
5. With few cores an uploader rests after each part for as long as the part took. The training then
   loses the same time in all, and less in each step. It rests only while it is ahead of its plan,
   and no longer when a worker waits for the share (`hurry`).
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch

from elastic_trainer.host.priority import yield_processor
from elastic_trainer.state.checkpoints.checkpoint import (
    CONNECTIONS,
    STALLED_S,
    UPLOAD_S,
    Cut,
    Emit,
    Part,
    Share,
    cuts_of,
    name_of,
)
from elastic_trainer.state.device_copies import (
    HostMemory,
    Pin,
    Streams,
    Targets,
    devices_of,
    new_memory,
    pin,
)
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.stores.store import Store
from elastic_trainer.state.values.layout import Packed


class SnapshotMemory:
    """The memory of this worker's share."""

    def __init__(self, part_bytes: int, pin: Pin = pin):
        self.part_bytes, self._pin = part_bytes, pin
        self.room = HostMemory()
        self.coming: Future[HostMemory] | None = None
        """Room for the next share, made beside the training."""
        self._is_awaited = threading.Event()
        self._streams = Streams()
        self._targets: list[Targets] = []
        self._layout: Any = None
        """Of the tensors for which these are."""

    def prepare(self, state: LiveState, rank: int, size: int) -> None:
        """Make room for this rank's next share beside the training, in a world of this size.

        To be called after a step: the optimizer has its state then. If it fails, `copy` makes the
        room itself, or raises what is wrong.
        """
        if self.coming and not self.coming.done():
            return
        try:
            packed = state.packed(absent=state.frozen.expected())
            cuts = cuts_of(packed, self.part_bytes, *owners_of(state, size))
            need = self.most_bytes(cuts, rank, size)
            if any(cut.owner is not None for cut in cuts):
                # Parts end where an owner's tensors do, and leave gaps. `_fits` allows the double.
                need += need // 8 + min(self.part_bytes, need * 3 // 4)
            if not _fits(self.room, need):
                maker = ThreadPoolExecutor(1, "room")
                self._is_awaited.clear()
                self.coming = maker.submit(self._made_beside, need, devices_of(packed.tensors))
                maker.shutdown(wait=False)
        except Exception:  # no thread, or a value that cannot be kept
            self.coming = None

    def most_bytes(self, cuts: Sequence[Cut], rank: int, size: int) -> int:
        """Return the number of bytes that a worker's share has at most, if its parts fill the
        pieces."""
        own = sum(cut.stop - cut.start for cut in cuts if cut.owner == rank)
        dealt = [cut.stop - cut.start for cut in cuts if cut.owner is None]
        return own + min(sum(dealt), -(-len(dealt) // size) * self.part_bytes)

    def copy(self, packed: Packed, share: Share, rank: int, size: int,
             owner_at: Callable[[str], int | None] = lambda place: None) -> None:
        """Copy my share of the state after a step. Raises MemoryError, RuntimeError.

        `owner_at` returns the rank that has the bytes of a tensor; None: all ranks have.

        A device may still copy parameters and optimizer when this returns (`share.copying`).
        """
        cuts = cuts_of(packed, self.part_bytes, owner_at)
        share.header, share.total_bytes, share.count = (
            packed.header, packed.payload_bytes, len(cuts))
        mine = [(index, cut) for index, cut in enumerate(cuts)
                if (index % size if cut.owner is None else cut.owner) == rank]
        mine.sort(key=lambda pair: pair[1].start - pair[1].stop)  # short ones share a piece
        devices = devices_of(packed.tensors)
        places, need = placed([cut for _, cut in mine], self.part_bytes)
        self._make_room(max(need, self.most_bytes(cuts, rank, size)), bool(devices))
        for (index, cut), (piece, at) in zip(mine, places, strict=True):
            share.pieces[index] = self.room.pieces[piece][at : at + cut.stop - cut.start]
            share.starts[index] = cut.start
        share.parts = len(share.pieces)

        first, last = self._targets_of(packed, share)
        if not devices:
            first.start(packed.tensors)
            last.start(packed.tensors)
            return
        (before := self._streams.copy(packed.tensors, first)).hold_writes()
        share.copying = self._streams.copy(packed.tensors, last)
        share.copying.targets += before.targets

    def _targets_of(self, packed: Packed, share: Share) -> list[Targets]:
        """Return where tensors belong: those that are copied first, and the others.

        A forward pass may change buffers, and the user's code what it has registered: these are
        copied first, and what the devices are given next comes after that.
        """
        tensors = packed.tensors
        layout = [share.starts, packed.places, *([*map(fact, tensors)] for fact in LAYOUT)]
        if not self._targets or layout != self._layout:
            stay = changed_in_apply(packed.places)
            others = set(range(len(tensors))) - stay
            starts = {share.starts[index]: piece for index, piece in share.pieces.items()}
            self._targets = [Targets(packed, starts, numbers, self._small_memory)
                             for numbers in (others, stay)]
            self._layout = layout
        return self._targets

    def _small_memory(self, size: int) -> torch.Tensor:
        return new_memory(size, size, not self.room.not_pinned, self._pin).pieces[0]

    def _make_room(self, need: int, is_pinned: bool) -> None:
        coming, self.coming = self.coming, None
        if _fits(self.room, need):
            return
        self.room, self._targets = HostMemory(), []  # never the old and the new one at once
        if coming:
            self._is_awaited.set()
            with suppress(Exception):  # what went wrong there goes wrong here
                self.room = coming.result()
        if not _fits(self.room, need):
            self.room = HostMemory()
            self.room = new_memory(need, self.part_bytes, is_pinned, self._pin)

    def _made_beside(self, size: int, devices: list[torch.device]) -> HostMemory:
        yield_processor()
        for device in devices:
            # else this thread would make a context on the first one
            torch.get_device_module(device).set_device(device)
        made = new_memory(size, self.part_bytes, bool(devices), self._pin, self._is_awaited.wait)
        for piece in made.pieces if made.not_pinned or not devices else ():
            piece.zero_()  # the kernel gives memory at its first use; pinned memory is there
        return made


def owners_of(state: LiveState, size: int) -> list[Callable[[str], int | None]]:
    """Return what `cuts_of` is to know of the owners of parts: nothing, if one worker has all."""
    return [state.shards.owner_at] if state.shards and size > 1 else []


def placed(cuts: Sequence[Cut], piece_bytes: int) -> tuple[list[tuple[int, int]], int]:
    """Return where each part lies, in memory of pieces of a length, and the bytes of all pieces."""
    places, piece, end = list[tuple[int, int]](), 0, 0
    for cut in cuts:
        at, size = -(-end // ALIGNED) * ALIGNED, cut.stop - cut.start
        if at + size > piece_bytes:
            piece, at = piece + 1, 0
        places.append((piece, at))
        end = at + size
    return places, piece * piece_bytes + end


def _fits(room: HostMemory, need: int) -> bool:
    """Return whether room is enough, and is not that of a checkpoint that a worker made alone."""
    return need <= room.bytes <= 2 * need


ALIGNED = 64
"""Parts that share a piece of memory begin at a multiple of this number of bytes."""
LAYOUT = (attrgetter("dtype"), attrgetter("shape"), attrgetter("device"),
          torch.Tensor.is_contiguous)
"""What of a tensor decides where its bytes belong, and how they are copied."""


def changed_in_apply(places: Sequence[str]) -> set[int]:
    """Return the numbers of the tensors that nothing but `apply` changes: of parameters and of the
    optimizer's state."""
    return {number for number, place in enumerate(places)
            if place.startswith(("/parameters/", "/optimizer/state/"))}


SLOWEST = 1 << 20
"""A share is stalled when none of its parts was uploaded for STALLED_S, and for the time that the
parts on their way take at this number of bytes a second: a slow network is no stall."""
CORES = len(os.sched_getaffinity(0))
UPLOADS = min(CONNECTIONS, max(1, CORES // 2))
"""How many parts one worker sends at once. More would take cores from the training."""
LONGEST_REST_S = 10.0
"""Far below UPLOAD_S."""
OTHERS_COPY_S = 1.0
"""An upload begins at the next vote, or this time after the copy. The other workers of the host may
still copy their shares, and all wait for the last one: where uploads began at once, the pause was
2.0 bare copies (4 workers on 2 cores)."""


class Upload:
    """Sends one share at a time to the store."""

    def __init__(self, store: Store, emit: Emit, part_bytes: int):
        self.store, self.emit, self.part_bytes = store, emit, part_bytes
        self.share: Share | None = None
        """The share in flight; it stays until all workers have collected or dropped it."""
        self.threads: list[threading.Thread] = []
        self.rest_s: Callable[[float, float, float], float] = rest_s

    # --- questions; any thread may ask ----------------------------------------------------------

    def is_busy(self) -> bool:
        """Return whether a thread can still read the memory of a share."""
        return any(thread.is_alive() for thread in self.threads)

    def is_moving(self) -> bool:
        """Return whether parts are on their way, and are not stalled."""
        share = self.share
        is_going = share is not None and not share.error and not share.is_up()
        return share is not None and is_going and not self._is_stalled(share, time.monotonic())

    def _is_stalled(self, share: Share, now: float) -> bool:
        in_flight = self.part_bytes * min(share.left(), UPLOADS)
        return now - share.moved > STALLED_S + in_flight / SLOWEST

    # --- the loop's thread ----------------------------------------------------------------------

    def begin(self, share: Share, base: dict[int, Part]) -> None:
        """Send a share beside the training. Parts that `base` has too are not sent."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in share.pieces:
            waiting.put(index)
        self.threads = [
            threading.Thread(target=self.send, args=(share, waiting, base),
                             name="checkpoint", daemon=True)
            for _ in range(min(UPLOADS, share.parts))]
        for thread in self.threads:
            thread.start()

    def tick(self) -> None:
        """Let the share go, and give it up if it hangs. To be called before each vote."""
        self.emit_stall()
        if (share := self.share) is None:
            return
        share.may_go.set()
        if not share.is_up() and not share.error and time.monotonic() - share.moved > UPLOAD_S:
            share.error = f"none of its parts was uploaded for {UPLOAD_S:.0f} s"

    def emit_stall(self) -> None:
        """Emit, once, that the share does not get to the store."""
        now, share = time.monotonic(), self.share
        if share is None or share.error or share.is_stall_emitted or share.is_up():
            return
        if self._is_stalled(share, now):
            share.is_stall_emitted = True
            self.emit("state.upload_stalled", step=share.step,
                      still_s=round(now - share.moved, 1),
                      what=f"{share.left()} of its {share.parts} parts")

    def hurry(self) -> None:
        """Let the uploaders rest no more: a worker waits for the share, or will soon be gone."""
        if self.share:
            self.share.is_urgent.set()

    def release(self) -> Share:
        """Hand over the share, which all workers have uploaded, and let its memory go."""
        assert self.share
        share, self.share = self.share, None
        share.is_urgent.set()  # an uploader that rests has nothing to wait for any more
        share.pieces.clear()  # the memory may be replaced before the record stands
        return share

    def drop(self) -> Share | None:
        """Forget the share in flight. What is in the store of it is unreferenced (publish.py)."""
        share, self.share = self.share, None
        if share:
            share.is_dropped = True
            share.may_go.set()
            share.is_urgent.set()
        return share

    # --- beside the training --------------------------------------------------------------------

    def send(self, share: Share, waiting: queue.SimpleQueue[int], base: dict[int, Part]) -> None:
        """Send the parts of a share that wait, one by one."""
        yield_processor()
        share.may_go.wait(OTHERS_COPY_S)
        try:
            share.copying.wait()
            while not (share.is_dropped or share.error):
                index = waiting.get_nowait()
                began = time.monotonic()
                is_sent = self._send_part(share, index, base)
                if is_sent and not waiting.empty():
                    self._rest(share, part_s=share.moved - began)
        except queue.Empty:
            pass
        except Exception as error:  # the training goes on, and the vote informs the other workers
            share.error = f"{type(error).__name__}: {error}"

    def _send_part(self, share: Share, index: int, base: dict[int, Part]) -> bool:
        """Send a part; returns False if the store has it already."""
        piece = share.pieces[index].numpy().data
        digest = hashlib.sha256(piece).hexdigest()
        part = base.get(index)
        start = share.starts[index]
        is_known = part is not None and (part.sha256, part.bytes, part.start) == (
            digest, len(piece), start)
        if part is None or not is_known:
            name = name_of(share.lineage, share.step, index, digest)
            part = Part(index, name, len(piece), digest, start)
            self.store.put(name, piece)  # network or disk
        share.moved = time.monotonic()
        share.done.append(part)
        return not is_known

    def _rest(self, share: Share, part_s: float) -> None:
        planned_s = share.planned_s * len(share.done) / share.parts
        ahead_s = planned_s - (share.moved - share.started)
        share.is_urgent.wait(self.rest_s(part_s, ahead_s, _load()))
        share.moved = time.monotonic()


def rest_s(part_s: float, ahead_s: float, load: float, cores: int = CORES) -> float:
    """Return how long an uploader rests after a part that took `part_s`.

    As long as the part took; not longer than `ahead_s`, by which it is ahead of its plan; and not
    at all where each thread that wants to run (`load`) has a core.
    """
    return max(0.0, min(part_s, ahead_s, LONGEST_REST_S)) if load > cores else 0.0


def _load() -> float:
    """Return the number of threads that want to run, averaged over a minute; 0 if unknown."""
    with suppress(OSError):
        return os.getloadavg()[0]
    return 0.0

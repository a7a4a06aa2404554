"""Checkpoints: a copy of the live state at the end of a step, uploaded by all workers behind the training, published last.

ElasticState → snapshot (one copy of my share into reused memory) → parts → record in the commit log → restore

A step's end, on every worker alike:
    begin → (parts go up behind the training) → progress, in the vote → collect, when everybody is done → publish (rank 0)

What always holds:
1. A checkpoint exists when its record stands in the commit log, and that is put after all of its parts are durable.
2. Parts are cut from the payload every `part_bytes`, whatever the world's size; worker r of n owns parts r, r+n, … of
   it. The header is rank 0's, so a checkpoint is let go where a worker has packed other tensors.
3. A part's name holds its lineage, its step and the SHA-256 of its bytes, so a name never gets other bytes. A part that
   the last checkpoint has too is not uploaded again; the record names the old one.
4. Within a lineage steps grow, and lineages grow. So whoever has published (lineage L, step s) may delete what is
   named at or before (L, s) and in none of the records it keeps: no later record can need it. That holds for a zombie
   too, however old what it knows (tests/test_commit_log.py).
5. At most one upload is in flight, in memory of one share. A failed one is said, retried with bounds, and never ends the
   training; only being fenced does.
6. `restore` verifies every part, and goes back to an older checkpoint only from one that is damaged, never from one
   that could not be reached. It never starts afresh where a damaged record may have named one.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

from elastic_trainer.state.cadence import Cadence, retained
from elastic_trainer.state.commit_log import (
    FOLDER,
    READ_TRIES,
    WHY_CHARACTERS,
    CommitLog,
    Damaged,
    Fenced,
    Record,
)
from elastic_trainer.state.elastic_state import ElasticState
from elastic_trainer.state.layout import (
    MACHINE_BYTES,
    LayoutError,
    Packed,
    copy_range,
    differing,
    fill_range,
    tensors_digest,
    unpack,
)
from elastic_trainer.state.store import (
    PUT_BYTES,
    Store,
    StoreRefused,
    StoreUnavailable,
    is_name,
    prove_put_if_absent,
)

Answer = TypeVar("Answer")

PART_BYTES = 16 << 20
UPLOAD_S = 900.0
"""A share of which nothing more came up for so long has failed: a folder's file system may hang without an error."""
STALLED_S, SLOWEST = 5.0, 1 << 20
"""A share of which nothing more came up for so long, and for what the parts on their way take at so many bytes a second, is
told, once (a slow line does not stand still); so is a record that is not written for so long."""
RESTORE_S = 3600.0
"""How long the start of an attempt waits for a store that does not answer."""
CONNECTIONS = 4
"""How many parts one worker reads at once."""
CORES = len(os.sched_getaffinity(0))
UPLOADS = min(CONNECTIONS, max(1, CORES // 2))
"""How many parts one worker sends at once: with few cores more of them only take those from the training."""
PLANNED, LONGEST_REST_S = 0.75, 10.0
"""An upload that rests is to be up in so much of the time between two checkpoints. A rest's end, far below UPLOAD_S."""
OTHERS_COPY_S = 1.0
"""An upload begins at the next vote, or so long after the copy: the other workers of this host may still copy theirs, and
all wait for the last of them (a pause of 2.0 bare copies where uploads began at once, 4 workers on 2 cores)."""
PARTS = "parts"
PART_NAME = re.compile(
    rf"{PARTS}/([0-9]{{12,18}})-([0-9]{{12,18}})/[0-9]{{6,12}}-[0-9a-f]{{64}}\.bin")
"""What a part is called: lineage, step, number, SHA-256."""
OLD_NAME = re.compile(rf"{PARTS}/([0-9]{{12,18}})-([0-9]{{12,18}})/[^/]+")
"""What garbage collection may delete. A listing may hold anything else: an S3 console's marker of a
folder is an object `parts/…/`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """When checkpoints are made and which stay."""

    every: Cadence = Cadence()
    keep_last: int = 3
    keep_every: int = 0
    """In steps: the first checkpoint at or after each multiple stays for good; 0: none."""
    part_bytes: int = PART_BYTES
    compared_after: int = 0
    """After so many steps all values of all workers have been compared: one older checkpoint stays too. 0: none."""

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.keep_every < 0 or not 1 <= self.part_bytes <= PUT_BYTES:
            raise ValueError(f"keep_last is {self.keep_last}, keep_every {self.keep_every}, part_bytes {self.part_bytes}. "
                             f"Use keep_last ≥ 1, keep_every ≥ 0 and 1 ≤ part_bytes ≤ {PUT_BYTES}.")


class Peers(Protocol):
    """What a restore needs of the world."""

    rank: int
    size: int

    def share_text(self, text: str, root: int) -> str: ...
    def gather_texts(self, text: str) -> list[str]: ...
    def broadcast_start(self, tensor: torch.Tensor, root: int, name: str) -> Any: ...
    def wait(self, handle: Any) -> Any: ...


@dataclass(frozen=True)
class Part:
    """One piece of a checkpoint's payload."""

    index: int
    name: str
    bytes: int
    sha256: str


@dataclass
class Share:
    """My parts of one snapshot, on their way up."""

    step: int
    header: bytes
    total: int
    count: int
    """The parts of all workers together."""
    pieces: dict[int, torch.Tensor]
    """Part number → its bytes, in the memory that is reused."""
    started: float
    done: list[Part]
    moved: float = 0.0
    """When a part of it was done last, or begun after a rest."""
    is_stall_told: bool = False
    error: str = ""
    is_dropped: bool = False
    pause_s: float = 0.0
    may_go: threading.Event = field(default_factory=threading.Event)
    is_urgent: threading.Event = field(default_factory=threading.Event)
    """Somebody waits for it, so its uploaders do not rest."""
    planned_s: float = 0.0
    """In how many seconds it is to be up: an uploader rests only while it is ahead of that."""

    def is_up(self) -> bool:
        """Return whether all of its parts are in the store."""
        return len(self.done) == len(self.pieces)


class Checkpoints:
    """The checkpoints of one run in one store, as one worker sees them."""

    def __init__(self, store: Store, emit: Callable[..., None], plan: Plan | None = None,
                 facts: dict[str, Any] | None = None):
        self.store, self.emit, self.plan, self.facts = store, emit, plan or Plan(), facts or {}
        """`facts` go into each record, for people: the job's numbers, versions."""
        self.restored: dict[str, Any] = {}
        """The body of the record that was restored."""
        self.log = CommitLog(store)
        self.share: Share | None = None
        self.newest_step = -1
        """The newest step that this worker knows to be published."""
        self.published_at: float | None = None
        """When that was heard of, or when this worker first minded: its boot and its wait for a place do not count."""
        self.fenced: Fenced | None = None
        """Another attempt has taken over: this one must stop."""
        self.failures = 0
        """Checkpoints that failed since the last that did not."""
        self._begun_at: float | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._room: Future[torch.Tensor] | None = None
        """Memory for the next share, made behind the training."""
        self._uploaders: list[threading.Thread] = []
        self._publisher: threading.Thread | None = None
        self._publishing = (-1, 0.0)
        """The step of the publisher's checkpoint, and when its record went on its way."""
        self._stall_told = -1
        """The newest step of whose record it was said that it is long on its way."""
        self._last_parts: dict[int, Part] = {}
        """The parts of the last checkpoint that all workers have collected or restored; and its step."""
        self._last_step = -1
        self._names: dict[int, frozenset[str]] = {}
        self.are_mixed = False
        """The last checkpoint came to nothing because some worker's tensors differ from rank 0's."""

    def enter_world(self) -> None:
        """Let go of what another world has left: a share of it may be gone with its worker, and newcomers know nothing."""
        self.drop("the world has changed")
        self.are_mixed = False

    # --- at a step's end, on every worker alike -----------------------------------------------------------------------

    def make_room(self, state: ElasticState, size: int) -> None:
        """Make the memory for my next share behind the training: new pages take many times as long as the copy to them.

        (1 GB, 4 workers, 2 cores: the first pause was 1.7 s, the later ones 0.08.) After a step: an optimizer has its
        state then.
        """
        try:
            need = self._share_bytes(state.packed().payload_bytes, size)
            if not _is_room(self._memory, need):
                maker = ThreadPoolExecutor(1, "room")
                device = torch.cuda.current_device() if torch.cuda.is_available() else None
                self._room = maker.submit(_made_room, need, device)
                maker.shutdown(wait=False)
        except Exception:  # no thread, a value that cannot be kept: `begin` makes the memory itself, or says what is wrong
            self._room = None

    def _share_bytes(self, total: int, size: int) -> int:
        """Return how many bytes a worker's share has at most."""
        count = -(-total // self.plan.part_bytes)
        return min(total, -(-count // size) * self.plan.part_bytes)

    def begin(self, state: ElasticState, rank: int, size: int) -> None:
        """Copy my share of the state (the only pause) and send it up behind the training."""
        now = time.monotonic()
        share = Share(step=state.committed, header=b"", total=0, count=0, pieces={}, started=now, done=[], moved=now)
        self.share, before, self._begun_at = share, self._begun_at, now
        if before and self._last_step == self.newest_step:  # else there is none yet, or the last one came to nothing
            share.planned_s = PLANNED * (now - before)  # the next one is due in as long a time as this one was
        try:
            if any(thread.is_alive() for thread in self._uploaders):
                raise StoreUnavailable("the upload before it still holds the memory")
            self._begin(share, state, rank, size)
        except Exception as error:  # no memory, no thread, a value that cannot be kept: the training goes on
            share.error = f"{type(error).__name__}: {error}"

    def _begin(self, share: Share, state: ElasticState, rank: int, size: int) -> None:
        packed = state.packed()
        cuts = range(0, packed.payload_bytes, self.plan.part_bytes)
        mine = [(index, start, min(start + self.plan.part_bytes, packed.payload_bytes))
                for index, start in enumerate(cuts) if index % size == rank]
        share.header, share.total, share.count = packed.header, packed.payload_bytes, len(cuts)
        need = self._share_bytes(packed.payload_bytes, size)
        made, self._room = self._room, None
        if not _is_room(self._memory, need):
            self._memory = torch.empty(0, dtype=torch.uint8)  # never both at once
            is_made = made is not None and made.done() and made.exception() is None and _is_room(made.result(), need)
            self._memory = made.result() if made and is_made else _new_memory(need)
        at = 0
        for index, start, stop in mine:
            share.pieces[index] = self._memory[at : at + stop - start]
            copy_range(packed, start, stop, share.pieces[index])
            at += stop - start
        for device in {tensor.device for tensor in packed.tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # pinned memory is copied to asynchronously, and by each device for itself
        share.moved = time.monotonic()
        share.pause_s = share.moved - share.started
        base = self._reusable()
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in share.pieces:
            waiting.put(index)
        self._uploaders = [threading.Thread(target=self._upload, args=(share, waiting, state.lineage, base),
                                            name="checkpoint", daemon=True)
                           for _ in range(min(UPLOADS, len(share.pieces)))]
        for thread in self._uploaders:
            thread.start()

    def tick(self) -> None:
        """Let my share go up, emit stalls, and give up what hangs. To be called before each vote."""
        self._tell_stalls()
        self._mind_publisher()
        if (share := self.share) is None:
            return
        share.may_go.set()
        if not share.is_up() and time.monotonic() - share.moved > UPLOAD_S and not share.error:
            share.error = f"it was not up, and has not moved for {UPLOAD_S:.0f} s"

    def progress(self) -> tuple[bool, bool]:
        """Return (my share is up, my share has failed), for the vote."""
        share = self.share
        return share is not None and share.is_up() and not share.error, share is not None and bool(share.error)

    def _tell_stalls(self) -> None:
        """Say, once, that my share or the record that I publish does not get to the store."""
        now, share, (step, since) = time.monotonic(), self.share, self._publishing
        if share and not share.error and not share.is_stall_told and (left := len(share.pieces) - len(share.done)):
            if self._is_stalled(share, now):
                share.is_stall_told = True
                self.emit("state.upload_stalled", step=share.step, still_s=round(now - share.moved, 1),
                          what=f"{left} of its {len(share.pieces)} parts")
        is_late = self.is_publishing() and self.newest_step < step and now - since > STALLED_S
        if is_late and self._stall_told < step:
            self._stall_told = step
            self.emit("state.upload_stalled", step=step, still_s=round(now - since, 1), what="its record")

    def _is_stalled(self, share: Share, now: float) -> bool:
        """True if nothing of a share has moved for longer than a slow network takes for what is in flight."""
        in_flight = self.plan.part_bytes * min(len(share.pieces) - len(share.done), UPLOADS)
        return now - share.moved > STALLED_S + in_flight / SLOWEST

    def is_moving(self) -> bool:
        """True while parts of mine, or a record, are on their way and do not stall. Any thread may ask."""
        now, share, (_, since) = time.monotonic(), self.share, self._publishing
        is_uploading = share is not None and not share.error and len(share.done) < len(share.pieces)
        if share and is_uploading and not self._is_stalled(share, now):
            return True
        return self.is_publishing() and now - since <= STALLED_S

    def _mind_publisher(self) -> None:
        """Give up a publisher that hangs."""
        step, since = self._publishing
        if self.is_publishing() and time.monotonic() - since > UPLOAD_S:
            self._publisher, self.log = None, CommitLog(self.store)  # the next one takes over from it
            if self.newest_step < step:  # else only the rubbish hangs
                self.failures, self._last_parts = self.failures + 1, {}
                self.emit("state.checkpoint_failed", step=step, error=f"its record was not there after {UPLOAD_S:.0f} s")

    def newest(self) -> int:
        """Return the newest step that this worker knows to be published; -1 if none. Any thread may ask."""
        return self.newest_step

    def know(self, published: int) -> None:
        """Take over what rank 0 knows to be published."""
        if published > self.newest_step or self.published_at is None:
            self.newest_step, self.published_at = max(published, self.newest_step), time.monotonic()

    def _reusable(self) -> dict[int, Part]:
        """Return the parts that the next checkpoint may name again: none unless the last one collected is the newest one
        published, as rank 0 says it. Its parts stay until a later one is.
        """
        return self._last_parts if self._last_step == self.newest_step else {}

    def parts_up(self) -> str:
        """Return the list of my parts, and a digest of which tensors they are cut from, as JSON, for `collect`."""
        assert self.share
        return json.dumps({"tensors": tensors_digest(self.share.header),
                           "parts": [asdict(part) for part in self.share.done]})

    def collect(self, texts: Iterable[str], lineage: int, *, publish: bool) -> None:
        """Take everybody's parts of the checkpoint in flight, by rank; with `publish` (rank 0) publish it behind the
        training. Where they are cut from other tensors than rank 0's, whose header it would have, all let it go.
        """
        assert self.share
        told = [json.loads(text) for text in texts]
        self.share.error = differing(dict(enumerate(its["tensors"] for its in told)))
        self.are_mixed = bool(self.share.error)
        if self.are_mixed:
            self.drop()
            return
        share, self.share = self.share, None
        parts = sorted((Part(**entry) for its in told for entry in its["parts"]), key=lambda part: part.index)
        assert [part.index for part in parts] == list(range(share.count)), "a part is missing"
        self._last_parts, self._last_step = {part.index: part for part in parts}, share.step
        share.is_urgent.set()  # an uploader that rests has nothing to wait for any more
        share.pieces = {}  # their memory may be given up before the record stands
        if not publish:
            self.failures = 0
        else:
            self._publishing = share.step, time.monotonic()
            self._publisher = threading.Thread(target=self._publish, args=(share, parts, lineage), name="publisher",
                                               daemon=True)
            self._publisher.start()

    def compare_tensors(self, state: ElasticState, peers: Peers) -> None:
        """Find out whether the workers that have packed other tensors for the last checkpoint still do.

        All workers call this together. Bytes that no record will name are not sent again and again.
        """
        if self.are_mixed:
            wrong = differing(dict(enumerate(peers.gather_texts(tensors_digest(state.packed().header)))))
            self.are_mixed = bool(wrong)
            if wrong:
                self.failures += 1
                self.emit("state.checkpoint_failed", step=state.committed, error=wrong)

    def drop(self, why: str = "") -> None:
        """Forget the checkpoint in flight: what is up of it is rubbish, which a later one collects."""
        if self.share:
            reason = self.share.error or why
            self.share.is_dropped, self.failures = True, self.failures + 1
            self.share.may_go.set()
            self.share.is_urgent.set()
            if self.share.error or not why:
                self.emit("state.checkpoint_failed", step=self.share.step, error=reason or "another worker's share failed")
            self.share = None
        self._begun_at = None

    def is_publishing(self) -> bool:
        """True while the record of a checkpoint is on its way (rank 0)."""
        return self._publisher is not None and self._publisher.is_alive()

    def hurry(self) -> None:
        """Let the uploaders of my share rest no more: somebody waits for it, or will soon be gone."""
        if self.share:
            self.share.is_urgent.set()

    def wait(self) -> None:
        """Wait until my share is up or has failed, and what I publish is published or has failed, or until it hangs."""
        began = time.monotonic()
        if self.share:
            self.share.may_go.set()
            self.share.is_urgent.set()
        for thread in [*self._uploaders, self._publisher]:
            while thread and thread.is_alive():
                left_s = max(began, self.share.moved if self.share else began) + UPLOAD_S - time.monotonic()
                if left_s <= 0:
                    break
                thread.join(min(1.0, left_s))
                self._tell_stalls()

    def write_alone(self, state: ElasticState) -> None:
        """Make a checkpoint without any peers, and wait for it. Used when this worker is the last that can."""
        self.drop("written alone instead")
        self.wait()
        self.begin(state, 0, 1)
        self.wait()
        self.tick()
        if self.progress()[0]:
            self.collect([self.parts_up()], state.lineage, publish=True)
            self.wait()
        else:
            self.drop()

    def go_on_alone(self, state: ElasticState) -> None:
        """Make a checkpoint without any peers, step by step: called again and again it never waits, and has an end."""
        if self.share and len(self.share.pieces) < self.share.count:
            self.drop("written alone instead")
        self.tick()
        is_up, has_failed = self.progress()
        if has_failed:
            self.drop()
        elif is_up:
            self.collect([self.parts_up()], state.lineage, publish=True)
        elif not self.share and self.newest_step < state.committed and not self.is_publishing() and not (
                any(thread.is_alive() for thread in self._uploaders)):
            self.begin(state, 0, 1)
        self.hurry()

    # --- behind the training ------------------------------------------------------------------------------------------

    def _upload(self, share: Share, waiting: queue.SimpleQueue[int], lineage: int, base: dict[int, Part]) -> None:
        _yield_to_training()
        share.may_go.wait(OTHERS_COPY_S)
        count = len(share.pieces)
        try:
            while not (share.is_dropped or share.error):
                index = waiting.get_nowait()
                piece = share.pieces[index].numpy().data
                began = time.monotonic()
                digest = hashlib.sha256(piece).hexdigest()
                old = base.get(index)
                if old and (old.sha256, old.bytes) == (digest, len(piece)):
                    share.moved = time.monotonic()
                    share.done.append(old)
                    continue
                name = f"{PARTS}/{lineage:012d}-{share.step:012d}/{index:06d}-{digest}.bin"
                self.store.put(name, piece)  # network or disk
                share.moved = now = time.monotonic()
                share.done.append(Part(index, name, len(piece), digest))
                if not waiting.empty():
                    ahead_s = share.planned_s * len(share.done) / count - (now - share.started)
                    share.is_urgent.wait(rest_s(now - began, ahead_s, _load()))
                    share.moved = time.monotonic()
        except queue.Empty:
            pass
        except Exception as error:  # whatever it was, the training goes on, and the vote tells the others
            share.error = f"{type(error).__name__}: {error}"

    def _publish(self, share: Share, parts: list[Part], lineage: int) -> None:
        _yield_to_training()
        log = self.log  # while we hang another publisher may begin, with a log of its own
        try:
            if log.last is None or log.last.lineage != lineage:
                log.take_over(lineage)  # network: three requests, by each new publisher
            if log.last and log.last.step < share.step:  # else it is published, and its parts may be another's
                self._see_parts(share.step, lineage, parts)
            record = log.append(lambda last: self._next_record(last, share, parts))
            self.newest_step, self.published_at, self.failures = max(self.newest_step, record.step), time.monotonic(), 0
            self._names = {sequence: names for sequence, names in self._names.items() if sequence in record.kept}
            if record.kind == "checkpoint" and record.step == share.step:  # else a publisher before us had it
                self.emit("state.checkpoint_published", step=share.step, bytes=share.total, record=record.sequence,
                          lineage=lineage, parts=len(parts), pause_s=round(share.pause_s, 5),
                          uploaded_bytes=sum(part.bytes for part in parts if _age(part.name) == (lineage, share.step)),
                          duration_s=round(time.monotonic() - share.started, 4))
            try:
                collect_rubbish(self.store, record, self._names_of)
                log.compact(record)
            except (StoreUnavailable, FileNotFoundError) as error:  # the checkpoint stands
                self.emit("state.rubbish_kept", step=share.step, error=str(error))
        except Fenced as fenced:
            if fenced.found.lineage == lineage:
                self.newest_step = max(self.newest_step, fenced.found.step)
                if fenced.found.step < share.step:  # by one that had lost its way to the driver, and us
                    self.failures, self._last_parts = self.failures + 1, {}
                self.emit("state.publisher_replaced", step=share.step, record=fenced.found.sequence)
            else:
                self.emit("state.fenced", step=share.step, error=str(fenced))
                self.fenced = fenced
        except Exception as error:  # the training goes on; how old the last good one is is watched
            self.failures += 1
            self._last_parts = {}  # what of it stands is not known, so nothing of it is named again
            self.emit("state.checkpoint_failed", step=share.step, error=f"{type(error).__name__}: {error}")

    def _see_parts(self, step: int, lineage: int, parts: list[Part]) -> None:
        """See for myself that the others' parts are where mine are: their folder may be a disk of their own."""
        folder = f"{PARTS}/{lineage:012d}-{step:012d}"
        new = {part.name for part in parts if part.name.startswith(folder + "/")}
        lacking = sorted(new - set(self.store.list(folder)) if new else new)
        if lacking:
            raise StoreUnavailable(f"{self.store.where} lacks {len(lacking)} parts that other workers have written. Give "
                                   f"all hosts the same store: S3, or a folder on a disk that they share")

    def _next_record(self, last: Record, share: Share, parts: list[Part]) -> Record | None:
        if last.step >= share.step:
            return None  # a publisher before us has published this step or a later one
        # A kept checkpoint with a later step was passed over by the restore: it is of a branch that was left.
        names = {sequence: self._names_if_known(sequence) for sequence, step in last.kept.items() if step < share.step}
        before = {sequence: last.kept[sequence] for sequence, found in names.items() if found is not None}
        reused = {part.name for part in parts if _age(part.name) != (last.lineage, share.step)}
        if not reused <= frozenset().union(*(names[sequence] or () for sequence in before)):
            raise StoreUnavailable("a part of an older checkpoint that this one names is not kept any more")
        steps = retained([*before.values(), share.step], self.plan.keep_last, self.plan.keep_every,
                         self.plan.compared_after)
        kept = {sequence: step for sequence, step in before.items() if step in steps}
        sequence = last.sequence + 1
        entries = [asdict(part) | {"start": part.index * self.plan.part_bytes} for part in parts]
        body = {"header": share.header.decode(), "header_sha256": hashlib.sha256(share.header).hexdigest(),
                "bytes": share.total, "part_bytes": self.plan.part_bytes, "parts": entries,
                "time": time.time(), **self.facts}  # for people; nothing compares them
        return replace(last, kind="checkpoint", step=share.step, kept=kept | {sequence: share.step}, body=body)

    def _names_if_known(self, sequence: int) -> frozenset[str] | None:
        """Return the same; no names for a record that is not given to us now: it stays, and holds up no later one."""
        try:
            return self._names_of(sequence)
        except StoreUnavailable:
            return frozenset()

    def _names_of(self, sequence: int) -> frozenset[str] | None:
        """Return the names of a checkpoint's parts; None when its record is damaged. Only what was read back is kept:
        at a number where our put failed a late one of ours may stand.
        """
        if sequence not in self._names:
            names = names_of(self.log, sequence)
            if names is None:
                return None
            self._names[sequence] = names
        return self._names[sequence]

    # --- a run goes on ------------------------------------------------------------------------------------------------

    def restore(self, state: ElasticState, peers: Peers, *, insist: bool = False) -> int | None:
        """Take the log over and load the newest whole checkpoint, all workers together; returns its step.

        None: there is none. Each worker reads and verifies its share of the parts and hands it on to the others. `insist`
        says that the store has been usable in this run, so that a refusal may pass as well as no answer.
        Raises LayoutError when there are checkpoints but none can be used: that is never a reason to start afresh.
        Raises StoreUnavailable, StoreRefused.
        """
        started, told = time.monotonic(), ""
        if peers.rank == 0:
            try:
                takeover = self._begun_lineage(insist)
                told = json.dumps({"lineage": takeover.lineage, "kept": sorted(takeover.kept, reverse=True)})
            except Damaged as error:
                told = json.dumps({"damaged": str(error)})
            for damage in self.log.passed_over:
                self.emit("state.checkpoint_refused", error=damage)
            if strange := self.log.strange:
                self.emit("state.checkpoint_refused",
                          error=f"{', '.join(strange[:3])} in {self.store.where}: nobody can have "
                                f"written so late a record ({len(strange)} in all)")
        facts = json.loads(peers.share_text(told, 0))
        if "damaged" in facts:
            raise LayoutError(facts["damaged"])
        refusals, reasons = list[int](), list[str]()
        for sequence in facts["kept"]:
            try:
                record, parts, room = self._room_for(sequence, state, peers)
                reading = time.monotonic()
                read_s, verify_s = self._read_together(parts, room, peers)
            except LayoutError as error:
                refusals.append(sequence)
                reasons.append(f"record {sequence}: {error}")
                if peers.rank == 0:
                    self.emit("state.checkpoint_refused", record=sequence, error=str(error))
                continue
            if refusals:  # else the next one would keep a damaged one in place of a whole one
                if peers.rank == 0:
                    self.log.append(lambda last: _without(last, refusals))
                peers.share_text("", 0)  # if that has failed nobody has values, and all restore once more
            loading = time.monotonic()
            state.load(unpack(room))
            state.lineage, self.newest_step = facts["lineage"], record.step
            self.restored = record.body
            self._last_parts, self._last_step = {part.index: part for part in parts}, record.step
            if peers.rank == 0:
                self.emit("state.checkpoint_restored", step=record.step, record=sequence, bytes=room.payload_bytes,
                          list_s=round(reading - started, 4), read_s=round(read_s, 4), verify_s=round(verify_s, 4),
                          transfer_s=round(loading - reading - read_s - verify_s, 4),
                          load_s=round(time.monotonic() - loading, 4))
            return record.step
        if refusals:
            raise LayoutError(f"none of the {len(refusals)} checkpoints in {self.store.where} can be restored "
                              f"({'; '.join(reasons)}). Restore the job as it was, or give the run another name (--run).")
        state.lineage = facts["lineage"]
        return None

    def withdraw(self, lineage: int, newest: int) -> int:
        """Let no attempt restore a checkpoint of a later step than `newest`, when what they hold may be wrong.

        Returns the step of the newest one that is left, 0 if there has been none at all, and -1, with nothing withdrawn,
        if none would be left. Asked of one worker; the others wait. Raises Fenced, StoreUnavailable.
        """
        self.drop("what it holds may be wrong")
        self.wait()
        return self._asked_again(lambda: self._withdraw(lineage, newest))

    def _withdraw(self, lineage: int, newest: int) -> int:
        log = self.log
        kept = log.take_over(lineage).kept  # behind what others, or late puts of ours, have left there unknown to us
        left = max((step for step in kept.values() if step <= newest), default=-1)
        if not kept:
            return 0
        if left >= 0:
            withdrawn = [sequence for sequence, step in kept.items() if step > newest]
            log.append(lambda last: _without(last, withdrawn))
            self._last_parts, self.newest_step = {}, left
            self.emit("state.checkpoints_withdrawn", steps=[kept[sequence] for sequence in withdrawn], left_step=left)
        return left

    def _begun_lineage(self, insist: bool) -> Record:
        """Prove the store and take the log over, again and again while it does not answer. Peers wait for it."""
        def begin() -> Record:
            prove_put_if_absent(self.store)
            return self.log.begin_lineage()

        return self._asked_again(begin, refusal_is_final=not insist)

    def _asked_again(self, ask: Callable[[], Answer], *, refusal_is_final: bool = False) -> Answer:
        """Ask the store again and again while it does not answer, for RESTORE_S. Raises StoreUnavailable."""
        deadline, pause_s = time.monotonic() + RESTORE_S, 1.0
        while True:
            try:
                return ask()
            except StoreUnavailable as error:
                if isinstance(error, StoreRefused) and refusal_is_final:
                    raise
                self.emit("state.store_unavailable", error=str(error))
                if time.monotonic() > deadline:
                    raise
                time.sleep(pause_s)
                pause_s = min(30.0, 2.0 * pause_s)

    def find_published(self, lineage: int) -> int:
        """Return the step of the newest record, if it is of this lineage and can be read; else -1."""
        try:
            tail = self.log.tail()  # the store
        except (Damaged, FileNotFoundError, StoreUnavailable):
            return -1
        return tail.step if tail.lineage == lineage else -1

    def _room_for(self, sequence: int, state: ElasticState, peers: Peers) -> tuple[Record, list[Part], Packed]:
        """Return a record, its parts and room for its values. Raises LayoutError on all workers if one cannot use it."""
        text, wrong = "", ""
        if peers.rank == 0:
            try:
                text = self.log.read(sequence).to_bytes().decode()
            except (Damaged, FileNotFoundError) as error:
                wrong = str(error)
        text = peers.share_text(text, 0)
        try:
            if text:
                record = Record.from_bytes(text.encode())
                parts, header = parts_of(record), header_of(record)
                room = state.room(header, sum(part.bytes for part in parts))
                if (step := unpack(room)["step"]) != record.step:
                    raise LayoutError(f"it says that it is of step {record.step}, but its header is "
                                      f"of step {step}")
        except (LayoutError, Damaged) as error:
            wrong = str(error)  # one worker's model may be another one
        _agree(wrong, peers)
        return record, parts, room

    def _read_together(self, parts: list[Part], room: Packed, peers: Peers) -> tuple[float, float]:
        """Fill the room: each worker reads every n-th part and hands it on.

        Needs memory for a few parts. Returns the seconds it waited for parts to be read and to be verified (its readers do
        both side by side: shared out by what each took them). Raises LayoutError on all workers if one has read a damaged
        part, StoreUnavailable on all if what was handed on is not the same everywhere.
        """
        part_bytes = parts[0].bytes if parts else 0  # all but the last are as long
        mine = deque(parts[peers.rank :: peers.size])
        spare, handed = ([torch.empty(part_bytes, dtype=torch.uint8) for _ in range(min(CONNECTIONS, count))]
                         for count in (len(mine), len(parts)))
        ahead: deque[tuple[torch.Tensor, Future[tuple[float, float]]]] = deque()
        waited, took, damage, checksum = 0.0, [0.0, 0.0], "", 0
        with ThreadPoolExecutor(CONNECTIONS, "reader") as readers:
            try:
                for first in range(0, len(parts), CONNECTIONS):
                    while spare and mine:
                        part, buffer = mine.popleft(), spare.pop()
                        ahead.append((buffer, readers.submit(read_part, self.store, part, buffer[: part.bytes])))
                    pieces, handles, group = [], [], parts[first : first + CONNECTIONS]
                    for part, buffer in zip(group, handed, strict=False):
                        root = part.index % peers.size
                        if root == peers.rank:
                            buffer, reading = ahead.popleft()
                            asked = time.monotonic()
                            error = reading.exception()  # network or disk
                            waited += time.monotonic() - asked
                            if isinstance(error, LayoutError):
                                damage = str(error)
                            elif error:
                                raise error
                            else:
                                took = [sum(pair) for pair in zip(took, reading.result(), strict=True)]
                            spare.append(buffer)
                        pieces.append(buffer[: part.bytes])
                        # In place: an allgather, with its fresh result and the copy out of it, took 3 times as long (1 GB,
                        # 4 workers, 2 cores: 1.5 to 2.5 s against 4.3 to 5.6 s).
                        if peers.size > 1:
                            handles.append(peers.broadcast_start(pieces[-1], root, f"restore.{part.index - first}"))
                    for handle in handles:
                        peers.wait(handle)
                    for part, piece in zip(group, pieces, strict=True):
                        fill_range(room, part.index * part_bytes, piece)
                        checksum = _checksum(piece, checksum) if peers.size > 1 else 0
            finally:
                for _, reading in ahead:
                    reading.cancel()
        _agree(damage, peers)
        if len(set(peers.gather_texts(str(checksum)))) > 1:
            raise StoreUnavailable("what the workers have read of a checkpoint arrived damaged at one of them")
        verify_s = waited * took[1] / (sum(took) or 1.0)
        return waited - verify_s, verify_s


def rest_s(part_s: float, ahead_s: float, load: float, cores: int = CORES) -> float:
    """Return how long an uploader rests after a part: as long as that took, but not until it is behind its plan, and not at
    all where there are cores for all that wants to run.

    What an upload takes from a training that uses all cores stays the same. It takes longer, so a step feels less of it.
    """
    return max(0.0, min(part_s, ahead_s, LONGEST_REST_S)) if load > cores else 0.0


def _load() -> float:
    """Return how many threads want to run, of late and on this machine; 0 where it does not say."""
    with suppress(OSError):
        return os.getloadavg()[0]
    return 0.0


def _new_memory(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _made_room(size: int, device: int | None) -> torch.Tensor:
    _yield_to_training()
    if device is not None:
        torch.cuda.set_device(device)  # else this thread would make a context on the first one
    return _new_memory(size).zero_()


def _is_room(memory: torch.Tensor, need: int) -> bool:
    """True if memory is enough, and not that of a checkpoint that this worker has made alone."""
    return need <= memory.numel() <= 2 * need


def _checksum(piece: torch.Tensor, before: int) -> int:
    """Return a checksum of bytes (uint8, at an aligned address) and of those before: the CRC-32 of the sums of each 4096.

    A CRC-32 of all bytes takes 0.4 s of a core for 1 GB: a tenth of a restore by 4 workers on 2 cores. This takes 0.07.
    """
    whole = piece.numel() // 4096
    sums = piece[: whole * 4096].view(torch.int64).view(whole, 512).sum(1)
    return zlib.crc32(piece[whole * 4096 :].numpy().data, zlib.crc32(sums.numpy().data, before))


def _agree(wrong: str, peers: Peers) -> None:
    """Raise LayoutError on all workers, with the same text, if one of them has something to say."""
    said = next((text for text in peers.gather_texts(wrong) if text), "")
    if said:
        raise LayoutError(said)


def _without(last: Record, refused: list[int]) -> Record | None:
    kept = {sequence: step for sequence, step in last.kept.items() if sequence not in refused}
    return replace(last, kind="takeover", kept=kept, body={}) if kept != last.kept else None


def read_part(store: Store, part: Part, out: torch.Tensor) -> tuple[float, float]:
    """Read a part into `out` (uint8, of its length) and verify it; returns the seconds that the one and the other took.

    Raises LayoutError when it is damaged or gone, StoreUnavailable.
    """
    started, verify_s = time.monotonic(), 0.0
    for _ in range(READ_TRIES):
        try:
            has_its_length = store.get_into(part.name, out.numpy().data)
        except FileNotFoundError as error:
            if not store.list(FOLDER, limit=1):  # a record names the part, so this is not where that record stands
                raise StoreUnavailable(f"{store.where} has no log as this host sees it. Give all hosts the same store: S3, "
                                       f"or a folder on a disk that they share, mounted on each") from error
            raise LayoutError(f"{part.name} is gone") from error
        verifying = time.monotonic()
        is_whole = has_its_length and hashlib.sha256(out.numpy().data).hexdigest() == part.sha256
        verify_s += time.monotonic() - verifying
        if is_whole:
            return time.monotonic() - started - verify_s, verify_s
    raise LayoutError(f"{part.name} has other bytes than were written")


def parts_of(record: Record) -> list[Part]:
    """Return the parts that a record names, checked. Raises Damaged.

    The number that there must be is calculated: a record of 300 bytes may speak of 10^12 parts.
    """
    body = record.body
    entries, total, part_bytes = (body.get(key) for key in ("parts", "bytes", "part_bytes"))
    try:
        if not (type(total) is int and type(part_bytes) is int
                and total >= 0 and 1 <= part_bytes <= PUT_BYTES):
            raise ValueError(f"{total!r} bytes in parts of {part_bytes!r}")
        if not isinstance(entries, list) or len(entries) != -(-total // part_bytes):
            raise ValueError("their number")
        parts = [Part(index, str(e["name"]), min(part_bytes, total - index * part_bytes),
                      str(e["sha256"])) for index, e in enumerate(entries)]
        for part, e in zip(parts, entries, strict=True):
            is_its = (e["index"], e["bytes"]) == (part.index, part.bytes)
            if not is_its or not PART_NAME.fullmatch(part.name):
                raise ValueError(f"part {part.index}")
    except (ValueError, KeyError, TypeError) as error:
        why = f"record {record.sequence} names parts that do not fit together: {error}"
        raise Damaged(why[:WHY_CHARACTERS]) from error
    return parts


def header_of(record: Record) -> bytes:
    """Return the header that a record holds, checked. Raises Damaged."""
    header = record.body.get("header")
    if not isinstance(header, str) or not header.isascii():
        raise Damaged(f"record {record.sequence} holds no header")
    if hashlib.sha256(header.encode()).hexdigest() != record.body.get("header_sha256"):
        raise Damaged(f"the header of record {record.sequence} was changed")
    return header.encode()


def empty_payload(record: Record) -> tuple[list[Part], torch.Tensor, dict[int, torch.Tensor]]:
    """Return a record's parts, room for its payload, and each part's place in it by number. Raises Damaged."""
    parts, part_bytes = parts_of(record), int(record.body["part_bytes"])
    if (total := sum(part.bytes for part in parts)) > MACHINE_BYTES:
        raise Damaged(f"record {record.sequence} speaks of {total} bytes, and this machine has "
                      f"{MACHINE_BYTES}")
    payload = torch.empty(total, dtype=torch.uint8)
    return parts, payload, {part.index: payload[part.index * part_bytes :][: part.bytes] for part in parts}


def names_of(log: CommitLog, sequence: int) -> frozenset[str] | None:
    """Return the names of a checkpoint's parts; None when its record is damaged or gone."""
    try:
        return frozenset(part.name for part in parts_of(log.read(sequence)))
    except (Damaged, FileNotFoundError):
        return None


def collect_rubbish(store: Store, newest: Record, names: Callable[[int], frozenset[str] | None]) -> list[str]:
    """Delete the parts that no kept checkpoint names and no later one can; returns their names.

    `newest` is the last record that the caller has published, or the tail of the log.
    """
    known = [names(sequence) for sequence in newest.kept]
    if any(found is None for found in known):
        return []  # a kept record is damaged: the next checkpoint keeps it no longer
    kept: frozenset[str] = frozenset().union(*(found for found in known if found))
    limit = (newest.lineage, newest.step)
    rubbish = [name for name in store.list(PARTS) if name not in kept and _age(name) <= limit]
    if rubbish:
        store.delete(rubbish)
    return rubbish


def _age(name: str) -> tuple[int, int]:
    """Return (lineage, step) of a part; what is no name of ours counts as the youngest."""
    found = OLD_NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found and is_name(name) else (10**18, 0)


def _yield_to_training() -> None:
    """Give this thread what the training leaves of the processor.

    Linux: niceness is a thread's own. Where the kernel groups threads by sessions (sched(7), "autogroup") it holds among
    this worker's threads, not against the other workers'.
    """
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)

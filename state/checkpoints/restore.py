"""The restore: a new attempt takes the log over and loads the newest whole checkpoint.

commit log → record → parts (each worker reads its share, and hands it on) → live_state

What always holds:
1. All workers restore the same checkpoint, or raise the same error. Each part is read from the
   store once and verified by the worker that reads it.
2. The restore passes over a checkpoint only if it is damaged, never because the store did not
   answer. All workers pass over the same one, and it is dropped from the log.
3. It never starts afresh if a checkpoint exists that cannot be used, or if a damaged record may
   have named one: it raises LayoutError on all workers.
4. Nothing of the state changes before all bytes are verified, on all workers.
5. It needs memory for the state, and for a few parts at a time.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
)

from elastic_trainer.state.checkpoints.checkpoint import (
    CONNECTIONS,
    Emit,
    Part,
    Peers,
    header_of,
    parts_of,
)
from elastic_trainer.state.checkpoints.commit_log import (
    FOLDER,
    READ_TRIES,
    CommitLog,
    Damaged,
    Record,
)
from elastic_trainer.state.frozen import REMEDY, OtherBase, differs
from elastic_trainer.state.live_state import LiveState, absent_from, lacking_of
from elastic_trainer.state.stores.store import (
    Store,
    StoreRefused,
    StoreUnavailable,
    prove_put_if_absent,
)
from elastic_trainer.state.values.layout import LayoutError, Packed, fill_range, outline, unpack
from elastic_trainer.state.values.names import with_plain_names

Answer = TypeVar("Answer")

RESTORE_S = 3600.0
"""How long a worker asks a store that does not answer, at the start of an attempt."""
LONGEST_PAUSE_S = 30.0
"""Between two of these questions; the first pause is 1 s, and it doubles."""
STRANGE_NAMES = 3
"""An event shows this number of the names of impossible records."""


@dataclass(frozen=True)
class Restored:
    """What a restore has found."""

    lineage: int
    """The number of this attempt's takeover."""
    record: Record | None = None
    """The record of the checkpoint that was loaded; None: there is none."""
    parts: tuple[Part, ...] = ()


class Restore:
    """One restore, which all workers do together."""

    def __init__(self, store: Store, log: CommitLog, emit: Emit, peers: Peers):
        self.store, self.log, self.emit, self.peers = store, log, emit, peers
        self.started = time.monotonic()
        self.refusals: list[int] = []
        """The records of the checkpoints that were passed over."""
        self.reasons: list[str] = []

    def run(self, state: LiveState, *, insist: bool) -> Restored:
        """Load the newest whole checkpoint into the state.

        `insist`: the store was usable in this run before, so a refusal may pass as silence does.
        Raises LayoutError when there are checkpoints and none can be used; StoreUnavailable;
        StoreRefused.
        """
        lineage, kept = self._take_over(insist)
        for sequence in kept:
            try:
                found = self._load(sequence, state, lineage)
            except OtherBase:
                raise  # an older checkpoint would lose steps
            except LayoutError as error:
                self.refusals.append(sequence)
                self.reasons.append(f"record {sequence}: {error}")
                if self.peers.rank == 0:
                    self.emit("state.checkpoint_refused", record=sequence, error=str(error))
                continue
            return found
        if self.refusals:
            raise LayoutError(
                f"none of the {len(self.refusals)} checkpoints in {self.store.where} can be "
                f"restored ({'; '.join(self.reasons)}). Restore the job as it was, or give the run "
                f"another name (--run).")
        return Restored(lineage)

    def _take_over(self, insist: bool) -> tuple[int, list[int]]:
        """Begin a lineage, by rank 0; returns it and the kept checkpoints, newest first."""
        found = ""
        if self.peers.rank == 0:
            try:
                takeover = self._begun_lineage(insist)
                kept = sorted(takeover.kept, reverse=True)
                found = json.dumps({"lineage": takeover.lineage, "kept": kept})
            except Damaged as error:
                found = json.dumps({"damaged": str(error)})
            self._emit_damage()
        facts = json.loads(self.peers.share_text(found, 0))
        if "damaged" in facts:
            raise LayoutError(facts["damaged"])
        return int(facts["lineage"]), list(facts["kept"])

    def _begun_lineage(self, insist: bool) -> Record:
        """Prove the store and take the log over. The other workers wait."""
        def begin() -> Record:
            prove_put_if_absent(self.store)
            return self.log.begin_lineage()

        return asked_again(begin, self.emit, is_refusal_final=not insist)

    def _emit_damage(self) -> None:
        for damage in self.log.passed_over:
            self.emit("state.checkpoint_refused", error=damage)
        if strange := self.log.strange:
            names = ", ".join(strange[:STRANGE_NAMES])
            self.emit("state.checkpoint_refused",
                      error=f"{names} in {self.store.where}: no worker can have written a record "
                            f"with so high a number ({len(strange)} in all)")

    def _load(self, sequence: int, state: LiveState, lineage: int) -> Restored:
        """Load a checkpoint. Raises LayoutError on all workers; then nothing has changed."""
        record, parts, room, has_base = self._room_for(sequence, state)
        reading = time.monotonic()
        read_s, verify_s = read_together(self.store, parts, room, self.peers)
        if self.refusals:  # else the next record would keep a damaged one in place of a whole one
            if self.peers.rank == 0:
                self.log.append(lambda last: without(last, self.refusals))
            self.peers.share_text("", 0)  # if that has failed no worker has values; all try again
        loading = time.monotonic()
        if has_base:
            state.load(unpack(room))
            state.lineage = lineage
        if self.peers.rank == 0:
            transfer_s = loading - reading - read_s - verify_s
            self.emit("state.checkpoint_restored", step=record.step, record=sequence,
                      bytes=room.payload_bytes, list_s=round(reading - self.started, 4),
                      read_s=round(read_s, 4), verify_s=round(verify_s, 4),
                      transfer_s=round(transfer_s, 4),
                      load_s=round(time.monotonic() - loading, 4))
        return Restored(lineage, record, tuple(parts))

    def _room_for(self, sequence: int,
                  state: LiveState) -> tuple[Record, list[Part], Packed, bool]:
        """Return a record, its parts, room for its values, and whether this worker has the frozen
        content that it leaves out.

        Raises LayoutError on all workers if one of them cannot use it, OtherBase.
        """
        text, wrong = "", ""
        if self.peers.rank == 0:
            try:
                text = self.log.read(sequence).to_bytes().decode()
            except (Damaged, FileNotFoundError) as error:
                wrong = str(error)
        text = self.peers.share_text(text, 0)
        try:
            if text:
                record = Record.from_bytes(text.encode())
                parts, header = parts_of(record), header_of(record)
                room = state.room(header, sum(part.bytes for part in parts))
                described = replace(outline(header), classes=state.classes)  # room has no bytes yet
                values = unpack(described)
                if (step := values["step"]) != record.step:
                    raise LayoutError(f"its record is of step {record.step}, and its header is of "
                                      f"step {step}")
        except (LayoutError, Damaged) as error:
            wrong = str(error)  # the model of one worker may be another one
        _agree(wrong, self.peers)
        return record, parts, room, has_base(values, record.step, state, self.peers)


def asked_again(ask: Callable[[], Answer], emit: Emit, *, is_refusal_final: bool = False) -> Answer:
    """Ask the store again while it does not answer, for RESTORE_S. Raises StoreUnavailable."""
    def may_answer(error: BaseException) -> bool:
        is_final = is_refusal_final and isinstance(error, StoreRefused)
        return isinstance(error, StoreUnavailable) and not is_final

    def emit_error(tried: RetryCallState) -> None:
        emit("state.store_unavailable", error=str(tried.outcome and tried.outcome.exception()))

    return Retrying(retry=retry_if_exception(may_answer), stop=stop_after_delay(RESTORE_S),
                    wait=wait_exponential(max=LONGEST_PAUSE_S), after=emit_error,
                    reraise=True)(ask)


class ReadAhead:
    """Reads and verifies this worker's parts in threads, a few of them ahead."""

    def __init__(self, store: Store, parts: list[Part], part_bytes: int,
                 readers: ThreadPoolExecutor):
        self.store, self.readers, self.parts = store, readers, deque(parts)
        self.waited_s = 0.0
        """How long the worker has waited for a part."""
        self.read_s = self.verify_s = 0.0
        """How long the readers took, all together."""
        self.damage = ""
        """What is wrong with a part that was read."""
        self._spare = _buffers(part_bytes, len(parts))
        self._ahead: deque[tuple[torch.Tensor, Future[tuple[float, float]]]] = deque()

    def fill(self) -> None:
        """Begin to read as many parts as there is memory for. What was taken is overwritten."""
        while self._spare and self.parts:
            part, buffer = self.parts.popleft(), self._spare.pop()
            reading = self.readers.submit(read_part, self.store, part, buffer[: part.bytes])
            self._ahead.append((buffer, reading))

    def take(self) -> torch.Tensor:
        """Wait for the next part; returns it, valid until `fill`. Raises StoreUnavailable."""
        buffer, reading = self._ahead.popleft()
        asked = time.monotonic()
        error = reading.exception()  # network or disk
        self.waited_s += time.monotonic() - asked
        if isinstance(error, LayoutError):
            self.damage = str(error)
        elif error:
            raise error
        else:
            read_s, verify_s = reading.result()
            self.read_s, self.verify_s = self.read_s + read_s, self.verify_s + verify_s
        self._spare.append(buffer)
        return buffer

    def shares_s(self) -> tuple[float, float]:
        """Return how much of the wait was for reading, and how much for verifying.

        The readers do both side by side, so the wait is split by what each took them.
        """
        verify_s = self.waited_s * self.verify_s / (self.read_s + self.verify_s or 1.0)
        return self.waited_s - verify_s, verify_s


def read_together(store: Store, parts: list[Part], room: Packed,
                  peers: Peers) -> tuple[float, float]:
    """Fill the room: each worker reads every n-th part and hands it on.

    Returns the seconds that this worker has waited for reading, and for verifying. Raises
    LayoutError on all workers if one has read a damaged part; StoreUnavailable on all workers if
    what was handed on is not the same everywhere.
    """
    part_bytes = max((part.bytes for part in parts), default=0)
    handed, checksum = _buffers(part_bytes, len(parts)), 0
    mine = parts[peers.rank :: peers.size]
    with ThreadPoolExecutor(CONNECTIONS, "reader") as readers:
        ahead = ReadAhead(store, mine, part_bytes, readers)
        for first in range(0, len(parts), CONNECTIONS):
            ahead.fill()
            group = parts[first : first + CONNECTIONS]
            for part, piece in zip(group, _handed_on(group, ahead, handed, peers), strict=True):
                fill_range(room, part.start, piece)
                checksum = _checksum(piece, checksum) if peers.size > 1 else 0
    _agree(ahead.damage, peers)
    if len(set(peers.gather_texts(str(checksum)))) > 1:
        raise StoreUnavailable("what the workers have read of a checkpoint arrived damaged at one "
                               "of them")
    return ahead.shares_s()


def _handed_on(group: list[Part], ahead: ReadAhead, handed: list[torch.Tensor],
               peers: Peers) -> list[torch.Tensor]:
    """Return the bytes of a few parts, on all workers: those read here, and those of the others.

    Broadcasts in place: an allgather, with its new result and the copy out of it, took 3 times as
    long (1 GB, 4 workers, 2 cores: 4.3 to 5.6 s instead of 1.5 to 2.5 s).
    """
    pieces, handles = [], []
    for place, (part, buffer) in enumerate(zip(group, handed, strict=False)):
        root = part.index % peers.size
        piece = (ahead.take() if root == peers.rank else buffer)[: part.bytes]
        pieces.append(piece)
        if peers.size > 1:
            handles.append(peers.broadcast_start(piece, root, f"restore.{place}"))
    for handle in handles:
        peers.wait(handle)
    return pieces


def _buffers(part_bytes: int, parts: int) -> list[torch.Tensor]:
    return [torch.empty(part_bytes, dtype=torch.uint8) for _ in range(min(CONNECTIONS, parts))]


def _checksum(piece: torch.Tensor, before: int) -> int:
    """Return a checksum of bytes (uint8, at an aligned address) and of those before.

    It is the CRC-32 of the sums of each 4096 bytes. A CRC-32 of all bytes takes 0.4 s of a core for
    1 GB, a tenth of a restore by 4 workers on 2 cores. This takes 0.07 s.
    """
    whole = piece.numel() // 4096
    sums = piece[: whole * 4096].view(torch.int64).view(whole, 512).sum(1)
    return zlib.crc32(piece[whole * 4096 :].numpy().data, zlib.crc32(sums.numpy().data, before))


def has_base(values: dict[str, Any], step: int, state: LiveState, peers: Peers) -> bool:
    """Return whether this worker has the frozen content that values leave out: its bytes of now.

    A worker without it receives the state from one that has it. Raises OtherBase on all workers if
    none has.
    """
    if not (values.get("frozen") and (absent := absent_from(values := with_plain_names(values)))):
        return True
    lacking = lacking_of(state, values)
    why = differs(lacking, absent) if lacking else ""
    found = peers.gather_texts(why)
    if all(found):
        raise OtherBase(f"the checkpoint of step {step} cannot be restored: {found[0]}. {REMEDY}")
    return not lacking


def _agree(wrong: str, peers: Peers) -> None:
    """Raise LayoutError on all workers, with the same text, if one of them gives a text."""
    given = next((text for text in peers.gather_texts(wrong) if text), "")
    if given:
        raise LayoutError(given)


class OtherBytes(LayoutError):
    """A part's bytes are not those that were written. Perhaps only as they were read."""


def read_part(store: Store, part: Part, out: torch.Tensor) -> tuple[float, float]:
    """Read a part into `out` (uint8, of its length) and verify it.

    Returns the seconds that reading and verifying took. Raises LayoutError when the part is damaged
    or gone, StoreUnavailable.
    """
    read_s = verify_s = 0.0
    for attempt in Retrying(retry=retry_if_exception_type(OtherBytes), reraise=True,
                            stop=stop_after_attempt(READ_TRIES)):
        with attempt:
            started = time.monotonic()
            has_its_length = _get_part(store, part, out)
            verifying = time.monotonic()
            read_s += verifying - started
            digest = hashlib.sha256(out.numpy().data).hexdigest() if has_its_length else ""
            verify_s += time.monotonic() - verifying
            if digest != part.sha256:
                raise OtherBytes(f"{part.name} has other bytes than were written")
    return read_s, verify_s


def _get_part(store: Store, part: Part, out: torch.Tensor) -> bool:
    """Read a part; False if it has another length. Raises LayoutError when it is gone."""
    try:
        return store.get_into(part.name, out.numpy().data)
    except FileNotFoundError as error:
        if not store.list(FOLDER, limit=1):  # a record names the part: here its log is not seen
            raise StoreUnavailable(
                f"{store.where} has no log as this host sees it. Give all hosts the same store: "
                f"S3, or a folder on a disk that they share, mounted on each") from error
        raise LayoutError(f"{part.name} is gone") from error


def withdraw(log: CommitLog, lineage: int, newest: int) -> tuple[int, list[int]]:
    """Let no attempt restore a checkpoint of a later step than `newest`.

    Returns the step of the newest one that is left, and the steps that were withdrawn. 0: there was
    no checkpoint. -1: none would be left, and none was withdrawn. Raises Fenced, StoreUnavailable.
    """
    kept = log.take_over(lineage).kept  # after records that this worker does not know
    if not kept:
        return 0, []
    left = max((step for step in kept.values() if step <= newest), default=-1)
    if left < 0:
        return -1, []
    withdrawn = [sequence for sequence, step in kept.items() if step > newest]
    log.append(lambda last: without(last, withdrawn))
    return left, [kept[sequence] for sequence in withdrawn]


def without(last: Record, refused: list[int]) -> Record | None:
    """Return the record that drops some checkpoints; None if `last` keeps none of them."""
    kept = {sequence: step for sequence, step in last.kept.items() if sequence not in refused}
    return replace(last, kind="takeover", kept=kept, body={}) if kept != last.kept else None

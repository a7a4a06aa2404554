"""The commit log: one small JSON record per sequence number, put only if absent.

an attempt begins → begin_lineage → … → append (a checkpoint exists) → … → another writer takes
over: fenced

    log/<10^12 - sequence number>.json      the newest record is the first name of a listing

What always holds (it needs put-if-absent, and a listing that shows what is stored; no clocks, no
locks):
1. A writer appends only at its own last number + 1. A writer that finds the record of another
   writer there is fenced: it stops, and never reads itself up to date. So no writer publishes over
   a successor, not even one that was paused in the middle of a put.
2. A new attempt begins a new lineage by a takeover. The number of the lineage is that of this
   record, so lineages are ordered. A new publisher of the same attempt takes over within the
   lineage, and only if the newest record is of that lineage.
3. The nonce of a record settles a put whose answer was lost. A put that was given up may still
   arrive later. Its record then has the number that its writer tries next. The writer recognizes
   its own record there, and continues after it.
4. The newest record is never deleted, so numbers only grow. `compact` deletes older records that
   the newest does not keep. So the number that a paused writer tries next may be free again.
   Therefore a put counts only if a listing after it shows no later record. In such a gap there
   always is one, and the writer is fenced.
5. A worker that has published record n may delete records before n that n does not keep, however
   old its knowledge is: each record keeps only what the one before it kept, and itself. The last
   RECENT records stay, for the case that the newest is damaged. A writer must have been paused for
   RECENT checkpoints before rule 4 is needed.
6. Nothing in a record is used before its digest, its types and its ranges were checked. What fails
   a check is Damaged, whatever its bytes are. An object that does not begin as a record does is
   read only up to FIRST_BYTES.

Tested with simulated stores in thousands of interleavings (tests/test_commit_log.py). The test also
finds the fault in each of nine broken copies of this protocol.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_trainer.state.stores.store import PUT_BYTES, Store, StoreRefused, StoreUnavailable

FOLDER = "log"
LAST = 10**12
FURTHEST = LAST // 2
"""No writer reaches a later number: at one record a second it takes 15,000 years. After a forged
record near LAST, the next records would have names that no listing recognizes, and checkpoints
would be lost without any event."""
FIRST_BYTES = 1 << 20
"""The part of an object that is read before it is known to begin as a record."""
KINDS = ("takeover", "checkpoint")
TRIES = 20
READ_TRIES = 3
"""How often a record, or a part, is read when its bytes are wrong: those stored may be right."""
FEW = 10
"""How many names are listed first to find the newest record. Others may be sorted before it."""
FORMAT = 1
RECENT = 50
"""This number of records before the newest stays. Older ones are deleted, that many at once."""
DELETED_AT_ONCE = 5000
"""The most records of one deletion: the publisher of the next checkpoint waits for it."""
WHY_CHARACTERS = 200
"""The longest description of a damage: the text of an error may hold all of the record."""
BEGIN = b'{"record": "'
ENVELOPE = re.compile(re.escape(BEGIN[:-1]) + rb'(".*"), "sha256": "([0-9a-f]{64})"\}', re.DOTALL)
"""What `to_bytes` writes, around the text of the record. JSON can hold millions of lists."""


class Fenced(Exception):
    """Another writer publishes in this log now."""

    def __init__(self, where: str, found: Record):
        self.found = found
        super().__init__(
            f"{where} is written by another attempt (record {found.sequence}, {found.kind}). This "
            f"one stops; what it has trained since its last checkpoint is not in the store.")


class Damaged(ValueError):
    """A record whose bytes are not what its writer wrote."""


@dataclass(frozen=True)
class Record:
    """One entry of the log."""

    sequence: int
    kind: str
    """"takeover" or "checkpoint"."""
    lineage: int
    """The number of the takeover with which the attempt began."""
    step: int
    """The step of the lineage's newest checkpoint, this one included; -1: it has none yet."""
    kept: dict[int, int] = field(default_factory=dict)
    """Checkpoints that must stay restorable: the numbers of their records and their steps."""
    body: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint is made of (publish.py writes it, checkpoint.py reads it)."""
    writer: str = ""
    nonce: str = ""

    def to_bytes(self) -> bytes:
        """Return the record as it stands in the store: JSON, with a digest of itself."""
        facts = {"format": FORMAT, **{k: getattr(self, k) for k in self.__dataclass_fields__}}
        text = json.dumps(facts, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return json.dumps({"record": text, "sha256": digest}).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Record:
        """Read a record. Raises Damaged."""
        try:
            if not (found := ENVELOPE.fullmatch(data)):
                raise Damaged("it does not look like a record")
            text = json.loads(found[1])
            if hashlib.sha256(text.encode()).hexdigest() != found[2].decode():
                raise Damaged("its digest is another")
            return Record(**_checked_facts(json.loads(text)))
        except Damaged:
            raise
        except (ValueError, RecursionError) as error:
            raise Damaged(repr(error)[:WHY_CHARACTERS]) from error


def _checked_facts(facts: Any) -> dict[str, Any]:
    """Return the fields of a record from its JSON. Raises Damaged if no writer writes them."""
    if not isinstance(facts, dict) or facts.keys() != {"format", *Record.__dataclass_fields__}:
        raise Damaged("it has not the fields of a record")
    if facts.pop("format") != FORMAT:
        raise Damaged(f"its format is not {FORMAT}")
    kept, sequence = facts["kept"], facts["sequence"]
    is_sound = (facts["kind"] in KINDS and _is_whole(sequence, 1, FURTHEST)
                and _is_whole(facts["lineage"], 1, sequence) and _is_whole(facts["step"], -1, LAST)
                and isinstance(facts["body"], dict) and isinstance(kept, dict)
                and isinstance(facts["writer"], str) and isinstance(facts["nonce"], str))
    if not is_sound or not all(re.fullmatch("[1-9][0-9]{0,11}", number) and int(number) <= sequence
                               and _is_whole(step, 0, LAST) for number, step in kept.items()):
        raise Damaged("its values are none that a writer writes")
    return facts | {"kept": {int(number): step for number, step in kept.items()}}


def _is_whole(value: Any, least: int, most: int) -> bool:
    """True for a whole number (JSON's true is none) in a range."""
    return type(value) is int and least <= value <= most


NOTHING = Record(sequence=0, kind="", lineage=0, step=-1)
"""What comes before the first record."""


class CommitLog:
    """One writer's view of the log.

    `last` is the record after which this writer appends; None: it must take over first.
    """

    def __init__(self, store: Store):
        self.store = store
        self.writer = secrets.token_hex(8)
        self.last: Record | None = None
        self._tail: Record | None = None
        """The newest record that `tail` has read. It is not read again while it is the newest."""
        self.passed_over: list[str] = []
        """The damage that the last search for a whole record has found, newest first."""
        self.strange: list[str] = []
        """Names of records that no writer can have written, as that search has found them."""

    def read(self, sequence: int) -> Record:
        """Return one record. Raises FileNotFoundError, Damaged, StoreUnavailable."""
        why = ""
        for _ in range(READ_TRIES):
            try:
                found = Record.from_bytes(self._bytes_of(_name(sequence)))
            except Damaged as error:
                why = str(error)
                continue
            if found.sequence == sequence:
                return found
            why = f"its number is {found.sequence} there"
        raise Damaged(f"record {sequence} of {self.store.where} is damaged: {why}")

    def newest(self) -> int:
        """Return the newest record's number, or 0. Network: one listing of a few names.

        Other names are ignored (`.DS_Store`, the S3 console's marker of a folder).
        """
        for limit in (FEW, None):
            names = self.store.list(FOLDER, limit=limit)
            records = _numbers(names)
            if records:
                return records[0]
            if len(names) < FEW:
                break
        return 0

    def _bytes_of(self, name: str) -> bytes:
        """Return an object that may be a record. If it is none, only its beginning is read.

        Raises as `Store.get` does.
        """
        first = self.store.get(name, FIRST_BYTES)
        is_all = len(first) < FIRST_BYTES
        return first if is_all or not first.startswith(BEGIN) else self.store.get(name, PUT_BYTES)

    def tail(self) -> Record:
        """Return the newest record. Raises Damaged."""
        newest = self.newest()
        if newest and (self._tail is None or self._tail.sequence != newest):
            self._tail = self.read(newest)
        return self._tail if newest and self._tail else NOTHING

    def begin_lineage(self) -> Record:
        """Take the log over for a new attempt; returns the takeover's record.

        Raises Damaged, and writes nothing, when the damaged records may have named the only
        checkpoints: a takeover without them would be whole, and the next attempt would start
        afresh.
        """
        for _ in range(TRIES):
            newest = self.newest()
            before = self.newest_whole(newest)
            if self.passed_over and not before.kept:
                raise Damaged(
                    f"{self.store.where} has {newest} records, and no whole one names a checkpoint "
                    f"({'; '.join(self.passed_over)}). Put the record back as it was, or give the "
                    f"run another name (--run)")
            mine = Record(sequence=newest + 1, kind="takeover", lineage=newest + 1, step=-1,
                          kept=before.kept, writer=self.writer, nonce=secrets.token_hex(8))
            if self._put(mine):
                return mine
        raise self._overtaken()

    def take_over(self, lineage: int) -> Record:
        """Become the publisher of a lineage. Raises Fenced when it is no longer the newest one."""
        for _ in range(TRIES):
            try:
                before = self.tail()
            except (Damaged, FileNotFoundError) as error:  # whose it is cannot be known
                raise StoreUnavailable(str(error)) from error
            if before.lineage > lineage:
                raise Fenced(self.store.where, before)
            if before.lineage < lineage:  # lineages only grow
                raise StoreUnavailable(
                    f"{self.store.where} does not know this attempt's own records")
            mine = Record(sequence=before.sequence + 1, kind="takeover", lineage=lineage,
                          step=before.step, kept=before.kept, writer=self.writer,
                          nonce=secrets.token_hex(8))
            if self._put(mine):
                return mine
        raise self._overtaken()

    def _overtaken(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.store.where}: others took the log over {TRIES} times in a row")

    def append(self, make: Callable[[Record], Record | None]) -> Record:
        """Publish `make(last)` after the last record; returns the record that is then last.

        `make` gives kind, step, kept and body, or None when nothing is to be published. It is
        called again when an earlier put of this writer turns out to have arrived. Raises Fenced,
        and StoreUnavailable: then it is unknown whether the record is stored, and the next call
        settles it.
        """
        assert self.last is not None, "take over first"
        while True:
            wanted = make(self.last)
            if wanted is None:
                return self.last
            mine = Record(sequence=self.last.sequence + 1, kind=wanted.kind, step=wanted.step,
                          lineage=self.last.lineage, kept=wanted.kept, body=wanted.body,
                          writer=self.writer, nonce=secrets.token_hex(8))
            if self._put(mine):
                return mine
            newest = self.newest()
            # If there is a later record, ours is in a gap of compaction, or has a successor.
            found = self._settled(max(newest, mine.sequence))
            if found.writer != self.writer:
                self.last = None
                raise Fenced(self.store.where, found)
            self.last = found

    def _put(self, mine: Record) -> bool:
        """Put a record. If it is stored, and no later one is, it becomes `last`.

        Network: one put, one listing of a few names, and one get if the put was refused. Raises
        Damaged, StoreUnavailable.
        """
        if mine.sequence > FURTHEST:
            raise Damaged(
                f"{self.store.where} has a record {mine.sequence - 1}, which no worker can have "
                f"written, and no number is left after it. Delete {_name(mine.sequence - 1)}")
        data = mine.to_bytes()
        if len(data) > PUT_BYTES:  # no worker could read it
            raise StoreRefused(f"record {mine.sequence} has {len(data)} bytes, and one may have "
                               f"{PUT_BYTES}. Use larger parts, or a model of fewer tensors")
        is_mine = self.store.put_if_absent(_name(mine.sequence), data) or (
            self._settled(mine.sequence).nonce == mine.nonce)
        is_newest = is_mine and self.newest() <= mine.sequence
        if is_newest:
            self.last = mine
        return is_newest

    def _settled(self, sequence: int) -> Record:
        try:
            return self.read(sequence)
        except (FileNotFoundError, Damaged) as error:
            raise StoreUnavailable(
                f"record {sequence} of {self.store.where} exists and cannot be read") from error

    def newest_whole(self, newest: int | None = None) -> Record:
        """Return the newest whole record, at or before a number; NOTHING when there is none."""
        for _ in range(TRIES):
            with suppress(FileNotFoundError):  # deleted since the listing, so there are later ones
                return self._newest_whole(newest)
        raise StoreUnavailable(f"{self.store.where} loses records as fast as it lists them")

    def _newest_whole(self, newest: int | None) -> Record:
        names = self.store.list(FOLDER)
        self.passed_over = []
        self.strange = [name for name in names if _number(name) > FURTHEST]
        for sequence in _numbers(names):
            if newest is None or sequence <= newest:
                try:
                    return _keeping_itself(self.read(sequence))
                except Damaged as error:
                    self.passed_over.append(str(error))
        return NOTHING

    def compact(self, newest: Record) -> list[int]:
        """Delete old records that `newest` does not keep; returns their numbers.

        The caller knows that `newest` is stored.
        Network: one listing, and a deletion once for RECENT records. Raises StoreUnavailable.
        """
        old = [number for number in _numbers(self.store.list(FOLDER))
               if number < newest.sequence - RECENT and number not in newest.kept]
        doomed = sorted(old)[:DELETED_AT_ONCE] if len(old) > RECENT else []
        if doomed:
            self.store.delete([_name(sequence) for sequence in doomed])
        return doomed


def _keeping_itself(record: Record) -> Record:
    """Return a record that keeps its own checkpoint, as all of ours do.

    A restore that finds no kept checkpoint starts afresh.
    """
    if record.kind != "checkpoint" or record.sequence in record.kept:
        return record
    return replace(record, kept=record.kept | {record.sequence: record.step})


def _numbers(names: list[str]) -> list[int]:
    """Return the numbers of the records among the names of a sorted listing, the newest first."""
    return [number for number in map(_number, names) if 1 <= number <= FURTHEST]


def _number(name: str) -> int:
    """Return the number of the record that has a name; 0 if none has it."""
    found = re.fullmatch(rf"{FOLDER}/([0-9]{{13}})\.json", name)
    return LAST - int(found[1]) if found else 0


def _name(sequence: int) -> str:
    return f"{FOLDER}/{LAST - sequence:013d}.json"

"""Which checkpoint counts: one small JSON record per sequence number, put only if absent.

attempt's start → take_over → … → append (a checkpoint exists) → … → somebody else's take_over: fenced

    log/<10^12 - sequence number>.json      the newest record is the first name of a listing

What always holds (needs put-if-absent, and a listing that shows what stands; no clocks, no locks):
1. A writer appends only at its own last number + 1. Whoever finds a stranger's record there is fenced: it stops, and
   never reads itself up to date. So nobody publishes over a successor, not even when it wakes in the middle of a put.
2. A new attempt begins a new lineage by a takeover; the lineage's number is that record's, so lineages are ordered. A
   new publisher of the same attempt takes over within the lineage, and only if the newest record is of it.
3. An answer that was lost is settled by the record's nonce. A put that was given up may still land later: it then
   stands at the number that its writer tries next, which knows its own hand and goes on behind it.
4. The newest record is never deleted, so numbers only grow. Older ones that the newest does not keep are deleted
   (`compact`). So the number that a zombie tries next may be free again. Therefore a put counts only if a listing
   after it shows no later record: in such a gap there always is one, and the writer is fenced.
5. Whoever has published record n may delete records before n that n does not keep, however old what it knows: each
   record keeps only what the one before it kept, and itself. The RECENT last ones stay, for the case that the newest is
   damaged; a zombie must have slept for as many checkpoints before rule 4 is needed at all.
6. Nothing in a record is used before its digest, its types and its ranges were checked. What fails
   a check is Damaged, whatever bytes stand there. An object that does not begin as a record does is
   read only up to FIRST_BYTES.

Tested with simulated stores in thousands of interleavings (tests/test_commit_log.py), and with nine broken copies of
this protocol that the test catches.
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

from elastic_trainer.state.store import PUT_BYTES, Store, StoreRefused, StoreUnavailable

FOLDER = "log"
LAST = 10**12
FURTHEST = LAST // 2
"""No writer reaches a later number: one record a second needs 15,000 years. Behind a forged record
near LAST the next ones would have names that no listing takes for records, so checkpoints would be
lost in silence."""
FIRST_BYTES = 1 << 20
"""So much of a record is read before it is known that it begins as one."""
KINDS = ("takeover", "checkpoint")
TRIES = 20
READ_TRIES = 3
"""How often a record is read when its bytes are wrong: they may be right in the store."""
FEW = 10
"""How many names are looked at first for the newest record: foreign ones may stand before it."""
FORMAT = 1
RECENT = 50
"""So many records before the newest are never deleted; older ones are, by as many at once."""
DELETED_AT_ONCE = 5000
"""At most: the publisher of the next checkpoint waits for the deletion."""
WHY_CHARACTERS = 200
"""So much is said of what is wrong with a record: an error's text may hold all of the record."""
BEGIN = b'{"record": "'
ENVELOPE = re.compile(re.escape(BEGIN[:-1]) + rb'(".*"), "sha256": "([0-9a-f]{64})"\}', re.DOTALL)
"""What `to_bytes` writes, around the record's text. General JSON could hold millions of empty lists."""


class Fenced(Exception):
    """Somebody else publishes in this log now."""

    def __init__(self, where: str, found: Record):
        self.found = found
        super().__init__(f"{where} is written by another attempt (record {found.sequence}, {found.kind}). This one stops; "
                         f"what it has trained since its last checkpoint is not in the store.")


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
        return json.dumps({"record": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()

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
    """Return the fields of a record from its JSON. Raises Damaged unless a writer writes such ones."""
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
"""What stands before the first record."""


class CommitLog:
    """One writer's view of the log. `last` is the newest record that is its own to follow; None: it must take over."""

    def __init__(self, store: Store):
        self.store = store
        self.writer = secrets.token_hex(8)
        self.last: Record | None = None
        self._tail: Record | None = None
        """The newest record that `tail` has read: it is not read again while it is the newest."""
        self.passed_over: list[str] = []
        """What the last look for a whole record has found damaged, newest first."""
        self.strange: list[str] = []
        """Names that it has found, of records that nobody can have written."""

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
            why = f"it says that it is {found.sequence}"
        raise Damaged(f"record {sequence} of {self.store.where} is damaged: {why}")

    def newest(self) -> int:
        """Return the newest record's number; 0 when there is none. Network: one listing of a few names.

        What is no record's name is passed over (`.DS_Store`, the marker that S3's console makes for a folder).
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
        """Return an object that may be a record, no more than its begin if that is none.

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
        """Take the log over for a new attempt, whoever wrote it before; returns the takeover.

        Raises Damaged, and writes nothing, when what was passed over may have named the only checkpoints: a takeover
        without them would be whole, and the attempt after it would start afresh.
        """
        for _ in range(TRIES):
            newest = self.newest()
            before = self.newest_whole(newest)
            if self.passed_over and not before.kept:
                raise Damaged(f"{self.store.where} has {newest} records, and no whole one names a checkpoint "
                              f"({'; '.join(self.passed_over)}). Put the record back as it was, or give the run another "
                              f"name (--run)")
            mine = Record(sequence=newest + 1, kind="takeover", lineage=newest + 1, step=-1, kept=before.kept,
                          writer=self.writer, nonce=secrets.token_hex(8))
            if self._put(mine):
                return mine
        raise StoreUnavailable(f"{self.store.where}: others took the log over {TRIES} times in a row")

    def take_over(self, lineage: int) -> Record:
        """Become the publisher of a lineage that is alive. Raises Fenced when it is not the newest any more."""
        for _ in range(TRIES):
            try:
                before = self.tail()
            except (Damaged, FileNotFoundError) as error:  # whose it is cannot be known
                raise StoreUnavailable(str(error)) from error
            if before.lineage > lineage:
                raise Fenced(self.store.where, before)
            if before.lineage < lineage:  # lineages only grow
                raise StoreUnavailable(f"{self.store.where} does not know this attempt's own records")
            mine = Record(sequence=before.sequence + 1, kind="takeover", lineage=lineage, step=before.step,
                          kept=before.kept, writer=self.writer, nonce=secrets.token_hex(8))
            if self._put(mine):
                return mine
        raise StoreUnavailable(f"{self.store.where}: others took the log over {TRIES} times in a row")

    def append(self, make: Callable[[Record], Record | None]) -> Record:
        """Publish `make(last)` behind the last record; returns the record that stands there then.

        `make` gives kind, step, kept and body, or None when there is nothing left to say after `last`. It is asked again
        when an earlier put of this writer turns out to have landed. Raises Fenced, StoreUnavailable (then it is not
        known whether the record stands; the next call settles it).
        """
        assert self.last is not None, "take over first"
        while True:
            wanted = make(self.last)
            if wanted is None:
                return self.last
            mine = Record(sequence=self.last.sequence + 1, kind=wanted.kind, lineage=self.last.lineage, step=wanted.step,
                          kept=wanted.kept, body=wanted.body, writer=self.writer, nonce=secrets.token_hex(8))
            if self._put(mine):
                return mine
            newest = self.newest()
            # Where a later record stands ours is in a gap that compaction has left, or somebody has followed it already.
            found = self._settled(max(newest, mine.sequence))
            if found.writer != self.writer:
                self.last = None
                raise Fenced(self.store.where, found)
            self.last = found

    def _put(self, mine: Record) -> bool:
        """Put a record, and follow it if it stands and none stands behind it.

        Network: one put, one listing of a few names, and one get when the put's answer was no. Raises
        Damaged, StoreUnavailable.
        """
        if mine.sequence > FURTHEST:
            raise Damaged(f"{self.store.where} has a record {mine.sequence - 1}, which nobody can have "
                          f"written, and no number is left behind it. Delete {_name(mine.sequence - 1)}")
        data = mine.to_bytes()
        if len(data) > PUT_BYTES:  # nobody could read it
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
            raise StoreUnavailable(f"record {sequence} of {self.store.where} stands there and cannot be read") from error

    def newest_whole(self, newest: int | None = None) -> Record:
        """Return the newest record whose bytes are whole, at or before a number; NOTHING when there is none."""
        for _ in range(TRIES):
            with suppress(FileNotFoundError):  # a publisher has deleted it since the listing, so there are later ones
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
        """Delete old records that a record which the caller knows to stand does not need; returns their numbers.

        Network: one listing, and a deletion once for RECENT records. Raises StoreUnavailable.
        """
        old = [n for n in _numbers(self.store.list(FOLDER)) if n < newest.sequence - RECENT and n not in newest.kept]
        doomed = sorted(old)[:DELETED_AT_ONCE] if len(old) > RECENT else []
        if doomed:
            self.store.delete([_name(sequence) for sequence in doomed])
        return doomed


def _keeping_itself(record: Record) -> Record:
    """Return a record that keeps its own checkpoint, as ours do: who finds none would start afresh."""
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

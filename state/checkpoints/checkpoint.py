"""What a checkpoint is made of: parts with names, and a record that names them.

    plan      cadence.py: when one is due, which stay
    copy      upload.py: one copy of this worker's share, the only pause of the training
    upload    upload.py: the parts of each worker, in threads beside the training
    record    publish.py: rank 0 puts one record into commit_log.py; then the checkpoint exists
    restore   restore.py: the newest whole checkpoint, read by all workers together

run_checkpoints.py holds these together; store.py and s3.py keep the objects. What always holds:
1. A checkpoint exists when its record is in the commit log. The record is put there after all of
   the checkpoint's parts are durable.
2. Parts are cut from the payload every `part_bytes`, for every size of the world. Worker r of n
   owns parts r, r+n, …, so all workers together hold each part once. Of an optimizer that is
   sharded, each owner has the parts with its bytes (`cuts_of`).
3. The name of a part holds its lineage, its step and the SHA-256 of its bytes. So no other bytes
   ever get the same name.
4. Nothing in a record is used before it was checked: number, lengths and names of the parts. Such
   a name never leads out of the folder of parts.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch

from elastic_trainer.state.checkpoints.cadence import Cadence
from elastic_trainer.state.checkpoints.commit_log import WHY_CHARACTERS, CommitLog, Damaged, Record
from elastic_trainer.state.device_copies import Copying
from elastic_trainer.state.holders import Site
from elastic_trainer.state.stores.store import PUT_BYTES, is_name
from elastic_trainer.state.values.layout import MACHINE_BYTES, Packed

PART_BYTES = 16 << 20
CONNECTIONS = 4
"""How many parts one worker reads at once, and sends at once at most."""
UPLOAD_S = 900.0
"""A share, or a record, has failed when nothing of it was stored for this time: the file system of
a folder can hang without an error."""
STALLED_S = 5.0
"""When a person is told that nothing moves."""
PARTS = "parts"
PART_NAME = re.compile(
    rf"{PARTS}/([0-9]{{12,18}})-([0-9]{{12,18}})/[0-9]{{6,12}}-[0-9a-f]{{64}}\.bin")
"""The name of a part: lineage, step, number, SHA-256."""
OLD_NAME = re.compile(rf"{PARTS}/([0-9]{{12,18}})-([0-9]{{12,18}})/[^/]+")
"""What garbage collection may delete. A listing can hold other names: the S3 console makes an
object `parts/…/` for each folder."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """When checkpoints are made and which stay."""

    every: Cadence = Cadence()
    keep_last: int = 3
    keep_every: int = 0
    """In steps: the first checkpoint at or after each multiple stays for good; 0: none."""
    part_bytes: int = PART_BYTES
    compared_after: int = 0
    """After this number of steps the workers have compared all values of the state. One checkpoint
    of before stays too. 0: none."""
    from_one: bool = False
    """Rank 0 uploads all parts. Where replicas may differ, a mixture is the state of none of
    them."""

    def __post_init__(self) -> None:
        is_sound = self.keep_last >= 1 and self.keep_every >= 0
        if not is_sound or not 1 <= self.part_bytes <= PUT_BYTES:
            raise ValueError(
                f"keep_last is {self.keep_last}, keep_every {self.keep_every}, part_bytes "
                f"{self.part_bytes}. Use keep_last ≥ 1, keep_every ≥ 0 and "
                f"1 ≤ part_bytes ≤ {PUT_BYTES}.")


class Peers(Protocol):
    """What checkpoints need of the world."""

    rank: int
    size: int
    sites: tuple[Site, ...]
    """Host and zone of each rank."""

    def share_text(self, text: str, root: int) -> str: ...
    def gather_texts(self, text: str) -> list[str]: ...
    def broadcast_start(self, tensor: torch.Tensor, root: int, name: str) -> Any: ...
    def wait(self, handle: Any) -> Any: ...


class Emit(Protocol):
    """Emits an event with its facts."""

    def __call__(self, event: str, **facts: Any) -> None: ...


@dataclass(frozen=True)
class Part:
    """One piece of a checkpoint's payload."""

    index: int
    name: str
    bytes: int
    sha256: str
    start: int = 0
    """Its first byte in the payload."""


@dataclass
class Share:
    """One worker's parts of a checkpoint: copied, and on their way to the store."""

    step: int
    started: float
    """When the copy began (time.monotonic)."""
    moved: float
    """When one of its parts was uploaded last, or begun after a rest."""
    lineage: int = 0
    header: bytes = b""
    total_bytes: int = 0
    """The payload of all workers together."""
    count: int = 0
    """The parts of all workers together."""
    pieces: dict[int, torch.Tensor] = field(default_factory=dict)
    """Part number → its bytes, in the memory that is used again."""
    starts: dict[int, int] = field(default_factory=dict)
    """Part number → its first byte in the payload."""
    copying: Copying = field(default_factory=Copying)
    """What a device may still copy into `pieces`."""
    pause_s: float = 0.0
    """How long the training waited for the copy."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the record says of the state that was copied."""
    planned_s: float = 0.0
    """In how many seconds it is to be up. An uploader rests only while it is ahead of that."""
    parts: int = 0
    """How many parts it has."""
    done: list[Part] = field(default_factory=list)
    """Those that are in the store."""
    error: str = ""
    is_dropped: bool = False
    is_stall_emitted: bool = False
    may_go: threading.Event = field(default_factory=threading.Event)
    is_urgent: threading.Event = field(default_factory=threading.Event)
    """A worker waits for it, so its uploaders do not rest."""
    all_parts: list[Part] = field(default_factory=list)
    """Those of all workers, when all of them are in the store and only the record is not."""

    def left(self) -> int:
        """Return the number of parts that are not in the store yet."""
        return self.parts - len(self.done)

    def is_up(self) -> bool:
        """Return whether all of its parts are in the store."""
        return not self.left()


class Cut(NamedTuple):
    """Where a part begins and ends in the payload, and the rank that has it; None: any has."""

    start: int
    stop: int
    owner: int | None


def cuts_of(packed: Packed, part_bytes: int,
            owner_at: Callable[[str], int | None] = lambda place: None) -> list[Cut]:
    """Cut a payload into parts. `owner_at` returns the rank that has a tensor's bytes, by its
    place; a part has the bytes of one rank alone."""
    cuts, start = list[Cut](), 0
    owners = [owner_at(place) for place in packed.places] or [None] * len(packed.tensors)
    for owner, run in groupby(zip(owners, packed.starts[1:], strict=False),
                              key=lambda pair: pair[0]):
        stop = list(run)[-1][1]
        cuts += [Cut(low, min(low + part_bytes, stop), owner)
                 for low in range(start, stop, part_bytes)]
        start = stop
    return cuts


def folder_of(lineage: int, step: int) -> str:
    """Return the folder of the parts that are first written for a step of a lineage."""
    return f"{PARTS}/{lineage:012d}-{step:012d}"


def name_of(lineage: int, step: int, index: int, sha256: str) -> str:
    """Return the name of a part."""
    return f"{folder_of(lineage, step)}/{index:06d}-{sha256}.bin"


def age_of(name: str) -> tuple[int, int]:
    """Return (lineage, step) of a part. A name that is not of this project is the youngest."""
    found = OLD_NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found and is_name(name) else (10**18, 0)


def parts_of(record: Record) -> list[Part]:
    """Return the parts that a record names, checked. Raises Damaged.

    Each part has an entry: a record of 300 bytes could speak of 10^12 parts.
    """
    body = record.body
    entries, total, part_bytes = (body.get(key) for key in ("parts", "bytes", "part_bytes"))
    try:
        if not (type(total) is int and type(part_bytes) is int
                and total >= 0 and 1 <= part_bytes <= PUT_BYTES):
            raise ValueError(f"{total!r} bytes in parts of {part_bytes!r}")
        if not isinstance(entries, list):
            raise ValueError("no list")
        parts, start = list[Part](), 0
        for index, e in enumerate(entries):
            part = Part(index, str(e["name"]), e["bytes"], str(e["sha256"]), start)
            is_its = (e["index"], e.get("start", start)) == (index, start)
            if not (is_its and type(part.bytes) is int and 1 <= part.bytes <= part_bytes
                    and PART_NAME.fullmatch(part.name)):
                raise ValueError(f"part {index}")
            parts.append(part)
            start += part.bytes
        if start != total:
            raise ValueError(f"they have {start} of {total} bytes")
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
    """Return a record's parts, room for its payload, and the place of each part in it by number.

    Raises Damaged.
    """
    parts = parts_of(record)
    if (total := sum(part.bytes for part in parts)) > MACHINE_BYTES:
        raise Damaged(f"record {record.sequence} speaks of {total} bytes, and this machine has "
                      f"{MACHINE_BYTES}")
    payload = torch.empty(total, dtype=torch.uint8)
    places = {part.index: payload[part.start :][: part.bytes] for part in parts}
    return parts, payload, places


@dataclass(frozen=True)
class Kept:
    """What retention knows of a checkpoint."""

    names: frozenset[str] = frozenset()
    """The names of its parts."""
    is_best: bool = False
    """Its evaluation was the best when it was made."""
    is_read: bool = True
    """False if the record cannot be read now."""


def kept_of(log: CommitLog, sequence: int) -> Kept | None:
    """Return what retention needs of a checkpoint; None when its record is damaged or gone."""
    try:
        record = log.read(sequence)
        return Kept(frozenset(part.name for part in parts_of(record)), is_best(record))
    except (Damaged, FileNotFoundError):
        return None


def is_best(record: Record) -> bool:
    """Return whether a record says that its own step has the best evaluation."""
    best = record.body.get("best")
    return isinstance(best, dict) and best.get("step") == record.step

"""The files of a run's event log: the newest is `events.jsonl`, older ones are compressed.

events (one line a write) → here → the readers: watch, report, verify, the supervisor

    events-000001.jsonl.gz  events-000002.jsonl.gz  events-000003.jsonl  events.jsonl

What always holds:
1. A segment that is large enough is sealed: the next process that writes renames it to the next
   number, under a lock. Before each write a writer checks whether the file that it has open is
   still `events.jsonl` (1.5 µs, two system calls). So if a process writes a line after it has
   learnt of another process's line, its line comes after that line.
2. A sealed segment gets only the lines of writers that checked just before it was sealed, or whose
   NFS client still uses its old answer (up to 60 s, nfs(5), acdirmax). A reader of later segments
   looks back for them, and a segment is not compressed before its last line is LATE_S old.
3. A reader's position is (segment, offset); the offset is that of the text, also in a compressed
   segment. All readers list and read the log by `Reader`, with one line in memory, of which
   LONGEST_LINE_BYTES are read at once.
4. `Reader.events` leaves malformed events out (schema.py) and counts them. It counts events that
   event_table does not have, too, and yields them.
5. A sealed segment that is missing, empty or damaged ends no reader. Its text up to the damage is
   read, the rest is left out, and `Reader.left_out` names it with the reason.

What it does not do: delete anything. The log of 10^6 steps has 270 MB; compressed, 30 MB.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, cast

from elastic_trainer.events.event_table import KINDS
from elastic_trainer.events.schema import MAX_LINE_BYTES, parse
from elastic_trainer.host import locks
from elastic_trainer.host.modes import private

EVENTS_FILE = "events.jsonl"
LOCK_FILE = ".events.lock"
SEGMENT_BYTES = 16 << 20
"""The size at which a segment is sealed: some 60,000 steps. An upload has at most this size."""
COMPRESSION = 3
"""gzip's level: 16 MiB take 0.2 s of one core, and become a tenth."""
LATE_S = 120.0
LONGEST_LINE_BYTES = 2 * MAX_LINE_BYTES
"""A longer line comes in pieces of this size, each of which is malformed."""


DAMAGE = (OSError, EOFError, zlib.error)
"""What reading a damaged segment raises."""


class Position(NamedTuple):
    """The place in the log up to which a reader has read."""

    segment: int = 1
    offset: int = 0
    """In bytes of its text."""
    before: Mapping[str, int] = MappingProxyType({})
    """By file name: how far each sealed segment that is not compressed was read. Late lines may
    follow."""


def segments(run_dir: Path) -> dict[int, Path]:
    """Return the sealed segments by number; of one that is there twice the compressed file."""
    found: dict[int, Path] = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in sorted(os.listdir(run_dir)):  # .jsonl before .jsonl.gz
            if match := re.fullmatch(r"events-(\d{6,})\.jsonl(\.gz)?", name):
                found[int(match[1])] = run_dir / name
    return dict(sorted(found.items()))


def names_of(first: int, later: int) -> str:
    """Return the names of the segments from the first on, before a later one."""
    names = [f"events-{number:06d}.jsonl" for number in {first: 0, later - 1: 0}]
    return " to ".join(names)


def has_events(run_dir: Path) -> bool:
    return (run_dir / EVENTS_FILE).exists() or bool(segments(run_dir))


def seal(run_dir: Path, segment_bytes: int) -> None:
    """Give the newest segment its number if it is large enough. Raises OSError.

    It does nothing if another process does so now. `private` gives the lock the folder's group.
    """
    newest = run_dir / EVENTS_FILE
    lock = private(f"{run_dir}/{LOCK_FILE}", os.O_RDWR | os.O_CREAT)
    try:
        if locks.take(lock, 0.0):
            # First of all: an NFS client that opens the folder asks what has changed there
            # (close-to-open). By its old answer the newest segment would still be the one that
            # another host has just sealed.
            number = max(segments(run_dir), default=0) + 1
            if newest.stat().st_size >= segment_bytes:
                newest.rename(run_dir / f"events-{number:06d}.jsonl")
                os.close(private(str(newest), os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    finally:
        os.close(lock)


def compress(run_dir: Path, late_s: float = LATE_S) -> list[Path]:
    """Compress the sealed segments whose last line is old enough; return the new files.

    Raises OSError.
    """
    made = []
    for path in segments(run_dir).values():
        target = path.with_name(path.name + ".gz")
        if not path.is_file():
            continue  # damage, which the readers name
        if path.suffix == ".gz":
            path.with_suffix("").unlink(missing_ok=True)  # its writer was killed after the rename
            continue
        if time.time() - path.stat().st_mtime < late_s:
            continue
        temporary = path.with_name(f".{target.name}")
        with open(path, "rb") as text, open(temporary, "wb", opener=private) as out:
            with gzip.GzipFile(filename="", mode="wb", compresslevel=COMPRESSION, fileobj=out,
                               mtime=0) as packed:
                shutil.copyfileobj(text, packed, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
        temporary.rename(target)
        path.unlink()
        made.append(target)
    return made


class Reader:
    """Reads a run's event log in order: each call continues where the last one has ended."""

    def __init__(self, run_dir: Path, position: Position | None = None):
        self.run_dir = run_dir
        self.malformed = 0
        """Lines that were left out: torn lines, and malformed events."""
        self.unknown = 0
        """Events that event_table does not have. They are not left out."""
        self.left_out: dict[str, str] = {}
        """Sealed segments that cannot be read, or not to their end, each with the reason: the
        predicate of a sentence."""
        self._segment, self._offset, before = position or Position()
        self._before = dict(before)

    @property
    def position(self) -> Position:
        return Position(self._segment, self._offset, dict(self._before))

    @classmethod
    def at_end(cls, run_dir: Path) -> Reader:
        """Return a reader of what is written from now on."""
        while True:
            sealed, size = segments(run_dir), 0
            with suppress(FileNotFoundError):
                size = (run_dir / EVENTS_FILE).stat().st_size
            if segments(run_dir) == sealed:  # else the size may be that of a segment before
                return cls(run_dir, Position(max(sealed, default=0) + 1, size))

    @classmethod
    def since(cls, run_dir: Path, moment: float) -> Reader:
        """Return a reader from the first event on that has this time, or a later one (seconds since
        the epoch). It looks in the newest segment only."""
        look = cls(run_dir, Position(cls.at_end(run_dir).position.segment))
        position = look.position
        for line in look.lines():
            if (event := parse(line)) and event["time"] >= moment:
                break
            position = look.position
        return cls(run_dir, position)

    def is_lost(self) -> bool:
        """True if the log ends before this reader's position: it is another log."""
        sealed = segments(self.run_dir)
        newest = self.run_dir / EVENTS_FILE
        if self._segment > max(sealed, default=0):
            size = newest.stat().st_size if newest.exists() else 0
            return self._segment > max(sealed, default=0) + 1 or size < self._offset
        return self._segment not in sealed

    def events(self, *, to_the_end: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the events since the last call; malformed events are left out and counted."""
        for line in self.lines(to_the_end=to_the_end):
            event = parse(line)
            if event is None and line.strip():
                self.malformed += 1
                glued = line.rfind(b'{"time"')  # its writer was killed within the line
                event = parse(line[glued:]) if glued > 0 else None
            if event is not None:
                self.unknown += event["event"] not in KINDS
                yield event

    def lines(self, *, to_the_end: bool = False) -> Iterator[bytes]:
        """Yield the whole lines since the last call.

        With `to_the_end` also the bytes after the last end of a line.
        """
        yield from self._late_lines()
        while (opened := self._open()) is not None:
            file, sealed = opened
            with file:
                for line in self._pieces(file, sealed):
                    is_open = not line.endswith(b"\n") and len(line) < LONGEST_LINE_BYTES
                    if is_open and not (sealed or to_the_end):
                        break
                    self._offset += len(line)
                    yield line
            if not sealed:
                return
            if not self._offset:
                self.left_out.setdefault(sealed, "is empty")
            if not _is_compressed(file):
                self._before[sealed] = self._offset
            self._segment, self._offset = self._segment + 1, 0

    def _pieces(self, file: BinaryIO, sealed: str) -> Iterator[bytes]:
        """Yield the lines of a file, of a line that is too long its pieces; of a damaged segment,
        whose name is `sealed`, those before the damage."""
        try:
            yield from iter(partial(file.readline, LONGEST_LINE_BYTES), b"")
        except DAMAGE as error:
            if not sealed:
                raise
            self.left_out.setdefault(sealed, f"cannot be read to its end ({_reason(error)})")

    def _late_lines(self) -> Iterator[bytes]:
        """Yield the lines that earlier segments have got since they were read."""
        for name, offset in list(self._before.items()):
            path = self.run_dir / name
            try:
                if path.stat().st_size <= offset:
                    continue
            except FileNotFoundError:
                del self._before[name]  # it is compressed: no more lines come
                path = self.run_dir / f"{name}.gz"
            try:
                file = _opened(path, offset)
            except DAMAGE:
                continue  # it was read before
            with file:
                for line in self._pieces(file, path.name):
                    if name in self._before:
                        self._before[name] += len(line)
                    yield line

    def _open(self) -> tuple[BinaryIO, str] | None:
        """Return the next segment that can be opened, open at its offset, and its name if it is
        sealed, else "". None if there is no such segment."""
        while True:
            sealed = segments(self.run_dir)
            path = sealed.get(self._segment)
            later = min((number for number in sealed if number > self._segment), default=0)
            if not path and later:
                if segments(self.run_dir) == sealed:  # a list is no snapshot of a folder
                    self.left_out.setdefault(names_of(self._segment, later), "is missing")
                    self._segment, self._offset = later, 0
                continue
            try:
                file = _opened(path or self.run_dir / EVENTS_FILE, self._offset)
            except DAMAGE as error:
                is_absent = isinstance(error, FileNotFoundError)
                if is_absent and segments(self.run_dir) != sealed:
                    continue  # it was sealed, or compressed, in between
                if path:
                    self.left_out.setdefault(path.name, f"cannot be read ({_reason(error)})")
                    self._segment, self._offset = self._segment + 1, 0
                    continue
                if is_absent:
                    return None
                raise
            if not path and self._segment in segments(self.run_dir):
                file.close()  # it was sealed in between, so this may be the next one
                continue
            return file, path.name if path else ""


def _opened(path: Path, offset: int) -> BinaryIO:
    """Open a segment at an offset of its text. Raises DAMAGE.

    BufferedReader cuts the lines of a compressed one in C: GzipFile.readline took a tenth of a
    whole `verify`.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block
        raise OSError("it is no file")
    file: BinaryIO = (io.BufferedReader(cast(io.RawIOBase, gzip.open(path, "rb")))
                      if path.suffix == ".gz" else open(path, "rb"))  # noqa: SIM115 (returned)
    try:
        file.seek(offset)
    except BaseException:
        file.close()
        raise
    return file


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)


def _is_compressed(file: BinaryIO) -> bool:
    return isinstance(file, io.BufferedReader) and isinstance(file.raw, gzip.GzipFile)


def first_line(run_dir: Path) -> str:
    """Return the log's first line, which identifies the log; "" if it is empty."""
    return next(Reader(run_dir).lines(), b"").decode(errors="replace")

"""What the driver last knew of each worker: the reader of now.json.

driver/progress → now.json (→ bucket → Mirror) → here → status → watch, the page

What always holds:
1. A file that is malformed, too large or no regular file is read as no file. It has no text that
   was not checked, and a reader's screen escapes it (plain).
2. A file whose driver does not write it any more is no file. Its time is of the driver's clock, so
   a reader with another clock waits until it changes: FRESH_S at most.
3. The age of a heartbeat, or of a phase, is the one at the file's time, by the driver's clock
   alone. The reader of a copy from a bucket also gets the age of the copy: a worker is not silent
   because the copy is old.
"""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_trainer.events.event_kind import (
    FLAG,
    LIST,
    NAME,
    TIME,
    WHOLE,
    WHOLE_OR_MINUS_ONE,
    checked,
    flaw_in,
    may_read,
    reads,
)
from elastic_trainer.events.schema import parse_object

NOW_FILE = "now.json"
FRESH_S = 15.0
"""A driver writes its file every 5 s, or more often."""
FRESH_COPY_S = 60.0
"""A copy comes 15 s after the one before (elastic-events.timer), and the time of the upload. The
mirror lists the bucket each 5 s. Two uploads in a row may fail."""
MOST_BYTES = 8 << 20
"""Of 10,000 workers with long names."""
_FILE = checked(reads(time=TIME, workers=LIST))
_WORKER = checked((*reads(worker=NAME, host=NAME, rank=WHOLE_OR_MINUS_ONE, phase=NAME, step=WHOLE),
                   *may_read(drains=FLAG, heard=TIME, does=NAME, what=NAME, since=TIME)))


@dataclass(frozen=True, kw_only=True)
class WorkerNow:
    """One worker, as its newest heartbeat and its process showed it."""

    host: str
    rank: int
    """-1: it is in no world."""
    phase: str
    step: int
    """How many steps it has finished."""
    drains: bool
    silent_s: float | None
    """The age of its newest heartbeat; None: there was none yet."""
    does: str = ""
    """The phase of its loop (mark.PHASES); "": it is in no step."""
    what: str = ""
    """The micro-batch and its samples, the batch, or the bucket; "": none."""
    does_for_s: float = 0.0
    """How long the phase has lasted."""


@dataclass(frozen=True)
class Now:
    """All workers, at a time of the driver's clock."""

    time: float
    workers: Mapping[str, WorkerNow]
    copied_s: float | None = None
    """The age of a copy from a bucket; None: it is the driver's own file."""


def now_in(text: bytes) -> Now | None:
    """Return the content of a file; None if it is malformed. Fields that it does not know are left
    out."""
    content = parse_object(text)
    if content is None or flaw_in(_FILE, content):
        return None
    workers = content["workers"]
    if any(type(it) is not dict or flaw_in(_WORKER, it) for it in workers):
        return None
    return Now(content["time"], {it["worker"]: _worker(it, content["time"]) for it in workers})


def _worker(fields: Mapping[str, Any], moment: float) -> WorkerNow:
    heard, since = fields.get("heard"), fields.get("since")
    return WorkerNow(
        host=fields["host"], rank=fields["rank"], phase=fields["phase"], step=fields["step"],
        drains=bool(fields.get("drains")),
        silent_s=None if heard is None else max(0.0, moment - heard),
        does=fields.get("does") or "", what=fields.get("what") or "",
        does_for_s=0.0 if since is None else max(0.0, moment - since))


class NowReader:
    """Reads the file of a run again and again. `is_copy`: the folder is that of a mirror."""

    def __init__(self, run_dir: Path, monotonic: Callable[[], float] = time.monotonic,
                 clock: Callable[[], float] = time.time, *, is_copy: bool = False):
        self._file, self._monotonic, self._clock = run_dir / NOW_FILE, monotonic, clock
        self._is_copy, self._fresh_s = is_copy, FRESH_COPY_S if is_copy else FRESH_S
        self._version: tuple[int, ...] = ()
        self._now: Now | None = None
        self._changed_at = -math.inf
        """When its time was another one than before, by the monotonic clock."""

    def read(self) -> Now | None:
        """Return what the driver knows now; None without a driver that writes it. Disk."""
        text = self._text()
        if text:
            before, self._now = self._now, now_in(text)
            if self._now and before and self._now.time != before.time:
                self._changed_at = self._monotonic()
            elif self._now and not before:
                self._changed_at = self._monotonic() - abs(self._clock() - self._now.time)
        elif text is None:
            self._now, self._version = None, ()
        since_s = self._monotonic() - self._changed_at
        if self._now is None or since_s >= self._fresh_s:
            return None
        return replace(self._now, copied_s=self._age_s(since_s)) if self._is_copy else self._now

    def _age_s(self, since_s: float) -> float:
        """Return the age of a copy by this machine's clock, as other ages are. If that clock cannot
        be right, return the time since the copy came."""
        assert self._now
        age_s = self._clock() - self._now.time
        return age_s if 0 <= age_s < self._fresh_s else since_s

    def _text(self) -> bytes | None:
        """Return the file's content; nothing if it is as before; None if it cannot be used."""
        try:
            descriptor = os.open(self._file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
                return None
            version = (found.st_ino, found.st_mtime_ns, found.st_size)
            if version == self._version:
                return b""
            with open(descriptor, "rb", closefd=False) as file:
                text = file.read(MOST_BYTES + 1)
            self._version = version
            return text if len(text) <= MOST_BYTES else None
        except OSError:
            return None
        finally:
            os.close(descriptor)

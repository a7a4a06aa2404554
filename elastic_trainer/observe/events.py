"""The run's diary: every fact as one JSON object a line in `runs/<name>/events.jsonl`.

worker (by courier, where its host does not share the folder), driver, supervisor → here → watch, report, verify

What always holds:
1. A line is one `write` to a file opened for append, so lines of several processes never mix and a killed
   process loses nothing that it has said.
2. An event is `package.subject_participle`, a literal where it is emitted, so that grep finds it.
3. Emitting never fails the training: a full disk is said on stderr, once until it takes lines again. A line that was not
   written whole is spoilt alone: the next one begins on a line of its own.
4. A line has at most MAX_LINE_BYTES (schema.py): of a longer one long values are shortened, and it says so.
5. The file is the newest segment of the log (segments.py): each write looks whether it still is, and seals one that is
   large enough.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_trainer.host.modes import make_folder, private
from elastic_trainer.observe.courier import Courier
from elastic_trainer.observe.schema import MAX_LINE_BYTES, parse
from elastic_trainer.observe.segments import EVENTS_FILE, SEGMENT_BYTES, Reader, seal

__all__ = ["EVENTS_FILE", "Events", "last_attempt", "newest_attempt", "read_events"]

SHORT_CHARACTERS = (10_000, 1000, 100)
"""A value of a line that is too long keeps so many characters; fewer where the line still is."""
SHORT_ITEMS = 100


class Events:
    """An append-only log of facts; facts bound once (`run`, `attempt`, `host`, …) go on every line."""

    def __init__(self, run_dir: Path | None, *, courier: Courier | None = None, segment_bytes: int = SEGMENT_BYTES,
                 **bound: Any):
        self.bound, self.courier, self.run_dir, self.segment_bytes = bound, courier, run_dir, segment_bytes
        self._lock = threading.Lock()
        self.listeners: list[Callable[[str, dict[str, Any]], None]] = []
        self._fd: int | None = None
        self._complained = self._is_torn = False
        if run_dir is not None:
            make_folder(run_dir)
            self._fd = _opened(run_dir)

    def emit(self, event: str, **facts: Any) -> None:
        """Write one fact; listeners hear it after it is written."""
        told = {"time": round(time.time(), 4), "event": event, **self.bound, **facts}
        if self.courier or self._fd is not None:
            line = json.dumps(told, default=str)
            self.write(line if len(line) <= MAX_LINE_BYTES else shortened(told))
        for listener in self.listeners:
            listener(event, told)

    def write(self, line: str) -> None:
        """Write a line that is there already: one's own, or one that a worker elsewhere has sent."""
        if self.courier:
            return self.courier.take(line)
        if self._fd is None:
            return
        with self._lock:  # a thread that goes on in the next segment closes the file
            self._write(line)

    def _write(self, line: str) -> None:
        data = ("\n" * self._is_torn + line + "\n").encode()
        try:
            count, error = os.write(self._newest_segment(), data), "a part of a line was written"
        except OSError as failure:
            count, error = 0, str(failure)
        if count < len(data):
            self._is_torn |= count > 0
            if not self._complained:
                _complain(error)
            self._complained = True
        else:
            self._complained = self._is_torn = False

    def _newest_segment(self) -> int:
        """Return the newest segment, open. Network where the folder is on one: its attributes are asked for."""
        assert self.run_dir is not None and self._fd is not None
        mine = os.fstat(self._fd)
        if mine.st_size >= self.segment_bytes:
            with suppress(OSError):  # a file system without locks: the segment grows
                seal(self.run_dir, self.segment_bytes)
        try:
            is_newest = os.path.samestat(os.stat(self.run_dir / EVENTS_FILE), mine)
        except FileNotFoundError:
            is_newest = False
        if not is_newest:
            before, self._fd = self._fd, _opened(self.run_dir)
            os.close(before)
        return self._fd

    def flush(self) -> bool:
        """Wait until all that was emitted stands in the diary; False if it does not in time."""
        return self.courier is None or self.courier.flush()

    def reach(self, point: str, **facts: Any) -> None:
        """Pass a point of the protocol that is no fact for the diary: only listeners hear it."""
        for listener in self.listeners:
            listener(point, {**self.bound, **facts})


def shortened(told: Mapping[str, Any]) -> str:
    """Return an event's line with its long values cut: the end of a text and the first items of a list stay."""
    line = ""
    for most in SHORT_CHARACTERS:
        line = json.dumps({name: _short(value, most) for name, value in told.items()} | {"shortened": True}, default=str)
        if len(line) <= MAX_LINE_BYTES:
            break
    return line


def _short(value: Any, most: int) -> Any:
    text = json.dumps(value, default=str)
    if len(text) <= most:
        return value
    if isinstance(value, str):
        return value[-most:]
    few = value[:SHORT_ITEMS] if isinstance(value, (list, tuple)) else text
    return few if len(json.dumps(few, default=str)) <= most else text[:most]


def _complain(error: str) -> None:
    """Say on stderr that a line was not written. A process's stdout is a protocol (discovery), or the user's."""
    import structlog  # here: it costs a third of a second that every worker would pay at its start

    log = structlog.wrap_logger(structlog.PrintLogger(sys.stderr), wrapper_class=structlog.BoundLogger,
                                processors=[structlog.processors.JSONRenderer()])  # not as the user configures his own
    with suppress(OSError):  # the disk that is full may be stderr's, too
        log.error(event="events.write_failed", error=error)


def _opened(run_dir: Path) -> int:
    return private(f"{run_dir}/{EVENTS_FILE}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def last_attempt(events: Iterable[dict[str, Any]]) -> int:
    """Return the number of the run's newest attempt; 0 if there was none."""
    return max((int(e.get("attempt") or 0) for e in events), default=0)


def newest_attempt(run_dir: Path) -> int:
    """Return the same by the log itself. Disk: reads all of it, and the JSON of few lines (0.5 s for a million steps)."""
    number, newest = re.compile(rb'"attempt": (\d{1,10})[,}]'), 0  # in a text the quotes would be escaped
    for line in Reader(run_dir).lines(to_the_end=True):
        found = number.search(line)
        if found and int(found[1]) > newest and (event := parse(line)):
            newest = max(newest, event.get("attempt") or 0)
    return newest


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Read the whole diary; a line that is not JSON (torn by a full disk) is left out."""
    return list(Reader(run_dir).events(to_the_end=True))

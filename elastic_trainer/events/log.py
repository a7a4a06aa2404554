"""The event log of a run: every fact as one JSON object a line in `runs/<name>/events.jsonl`.

driver, supervisor, worker (by log_shipper, if its host does not share the folder) → here →
readers

What always holds:
1. A line is one `write` to a file opened for append, so lines of several processes never mix, and
   a killed process loses nothing that it has emitted.
2. An event is `package.subject_participle`, a literal where it is emitted, and is declared in
   event_table.py. An event that is not declared is written, too: silence would lose a fact, and an
   exception would end a run. Readers count it, and the tests fail.
3. Emitting never fails the training. A full disk is reported on stderr, once until lines can be
   written again. Only the line that was not written whole is lost: the next one begins on a line
   of its own.
4. A line has at most MAX_LINE_BYTES (schema.py): the long values of a longer line are shortened,
   and it has the field `shortened`.
5. The file is the newest segment of the log (segments.py): each write checks whether it still is,
   and seals a segment that is large enough.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_trainer.events.event_kind import Level
from elastic_trainer.events.event_table import KINDS
from elastic_trainer.events.log_shipper import LogShipper
from elastic_trainer.events.schema import MAX_LINE_BYTES, parse
from elastic_trainer.events.segments import EVENTS_FILE, SEGMENT_BYTES, Reader, seal, segments
from elastic_trainer.events.trace import Trace
from elastic_trainer.host.modes import make_folder, private
from elastic_trainer.wire.redact import may_have_secrets, redacted_value

__all__ = ["EVENTS_FILE", "Events", "newest_attempt", "read_events"]

SHORT_CHARACTERS = (10_000, 1000, 100)
"""The characters that are kept of a value if its line is too long; fewer if it still is."""
SHORT_ITEMS = 100
DELETED = ("the event log in {} was deleted while this process wrote to it. Its events are lost, "
           "so nothing of the run is proved")
_LEVELS = {name: {"level": kind.level.value} for name, kind in KINDS.items()
           if kind.level in (Level.WARNING, Level.ERROR)}
"""The level, which the line of a warning or an error has."""


class Events:
    """An append-only log of facts; facts bound once (`run`, `attempt`, …) go on every line."""

    def __init__(self, run_dir: Path | None, *, shipper: LogShipper | None = None,
                 segment_bytes: int = SEGMENT_BYTES, **bound: Any):
        self.bound, self.shipper = bound, shipper
        self.run_dir, self.segment_bytes = run_dir, segment_bytes
        self.trace = Trace()
        """The timeline of the same worker. It writes nothing unless the user wants it."""
        self._lock = threading.Lock()
        self.listeners: list[Callable[[str, dict[str, Any]], None]] = []
        self._fd: int | None = None
        self._has_complained = self._is_torn = False
        if run_dir is not None:
            make_folder(run_dir)
            self._fd = _opened(run_dir)

    def emit(self, event: str, **facts: Any) -> None:
        """Write one fact, without secrets (wire/redact.py), then call the listeners with it."""
        line_facts = {"time": round(time.time(), 4), "event": event, **_LEVELS.get(event, {}),
                      **self.bound, **facts}
        line = json.dumps(line_facts, default=str)
        if may_have_secrets(line):
            # The fields' own names are the table's: `key` is the name of a setting there.
            line_facts = {name: redacted_value(it) for name, it in json.loads(line).items()}
            line = json.dumps(line_facts)
        if self.shipper or self._fd is not None:
            self.write(line if len(line) <= MAX_LINE_BYTES else shortened(line_facts))
        for listener in self.listeners:
            listener(event, line_facts)

    def write(self, line: str) -> None:
        """Write a line that is complete: an own line, or one from a worker on another host."""
        if self.shipper:
            return self.shipper.take(line)
        if self._fd is None:
            return
        with self._lock:  # the thread that opens the next segment closes this one
            self._write(line)

    def _write(self, line: str) -> None:
        data = ("\n" * self._is_torn + line + "\n").encode()
        try:
            count = os.write(self._open_newest_segment(), data)
            error = "a part of a line was written"
        except OSError as failure:
            count, error = 0, str(failure)
            if isinstance(failure, FileNotFoundError):
                error = f"{error}: {DELETED.format(self.run_dir)}"
        if count < len(data):
            self._is_torn |= count > 0
            if not self._has_complained:
                _complain(error)
            self._has_complained = True
        else:
            self._has_complained = self._is_torn = False

    def _open_newest_segment(self) -> int:
        """Seal a large segment; return the newest one, open. Network, if the folder is remote."""
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
            if not mine.st_nlink and not segments(self.run_dir):
                _complain(DELETED.format(self.run_dir))
        return self._fd

    def flush(self) -> bool:
        """Wait until all emitted events are in the event log; False if they are not in time."""
        return self.shipper is None or self.shipper.flush()

    def reach(self, point: str, **facts: Any) -> None:
        """Call the listeners at a point of the protocol that is no event and is not logged."""
        self.trace.mark.reach(point)
        for listener in self.listeners:
            listener(point, {**self.bound, **facts})


def shortened(facts: Mapping[str, Any]) -> str:
    """Return an event's line with its long values cut: a text keeps its end, a list its start."""
    line = ""
    for most in SHORT_CHARACTERS:
        short = {name: _short(value, most) for name, value in facts.items()}
        line = json.dumps(short | {"shortened": True}, default=str)
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
    """Report on stderr that a line was not written: stdout is a protocol, or the user's."""
    import structlog  # here: importing it takes 0.3 s, which every worker would pay at its start

    log = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr), wrapper_class=structlog.BoundLogger,
        processors=[structlog.processors.JSONRenderer()])  # not as the user configures their own
    with suppress(OSError):  # stderr may be on the disk that is full
        log.error(event="events.write_failed", error=error)


def _opened(run_dir: Path) -> int:
    return private(f"{run_dir}/{EVENTS_FILE}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def newest_attempt(run_dir: Path) -> int:
    """Return the number of the run's newest attempt; 0 if there was none.

    Disk: the whole event log, 0.5 s for a million steps. It parses only lines with a larger number.
    """
    number = re.compile(rb'"attempt": (\d{1,10})[,}]')  # within a text the quotes are escaped
    newest = 0
    for line in Reader(run_dir).lines(to_the_end=True):
        found = number.search(line)
        if found and int(found[1]) > newest and (event := parse(line)):
            newest = max(newest, event.get("attempt") or 0)
    return newest


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Return all events of a log; malformed lines (torn by a full disk, …) are left out."""
    return list(Reader(run_dir).events(to_the_end=True))

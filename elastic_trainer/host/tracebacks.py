"""Errors with the lines of the user's code alone: in this process, and in the output of workers.

ConfigError → `shorten` → Python's excepthook, or the user's
workers' stderr → driver/process → `Tracebacks` → the driver's output

Our own frames, and the error of ours that a ConfigError was made from, say nothing about the
script.

What always holds of the output of workers:
1. A traceback that another worker has had in the same lines is one line: the exception, and which
   worker's output has the rest. A worker's own errors are never compared with each other.
2. Frames of ours are left out, unless the error arose in one of them.
3. No other line waits or changes. The lines of an unfinished traceback come when the stream ends.

Source: Python's traceback module. faulthandler's frames have no comma after the line's number, and
are no traceback here.
"""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import TracebackType

OURS = str(Path(__file__).resolve().parent.parent) + "/"
"""The folder of our package."""
EXAMPLES = f"{OURS}examples/"
"""They are written as a user writes."""
_shortened: set[type[BaseException]] = set()


def is_ours(file: str) -> bool:
    """True for a file of this package, and for code that it has generated."""
    return file.startswith(OURS) and not file.startswith(EXAMPLES) or file.startswith("<")


def frames_of_user(error: BaseException) -> TracebackType | None:
    """Return an error's traceback without our frames."""
    kept, found = list[TracebackType](), error.__traceback__
    while found:
        if not is_ours(found.tb_frame.f_code.co_filename):
            kept.append(found)
        found = found.tb_next
    following = None
    for one in reversed(kept):
        following = TracebackType(following, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return following


def shorten(kind: type[BaseException]) -> None:
    """Let this process show uncaught errors of a kind so. It can be called again and again."""
    if kind in _shortened:
        return
    _shortened.add(kind)
    show = sys.excepthook

    def show_users(of: type[BaseException], error: BaseException,
                   found: TracebackType | None) -> None:
        if isinstance(error, kind):
            found = frames_of_user(error)
            error.__cause__, error.__suppress_context__ = None, True
            error.__traceback__ = found
        show(of, error, found)

    sys.excepthook = show_users


HEAD = "Traceback (most recent call last):"
FRAME = re.compile(r'  File "(.*)", line \d+(, in .*)?$')
BEGIN = re.compile(r'  File ".*", line \d+, in ')
CHAINS = ("The above exception was the direct cause of the following exception:",
          "During handling of the above exception, another exception occurred:")
MOST_LINES = 2000
"""Of a traceback. A longer one is printed as it comes."""
MOST_KEPT = 1000
"""Of the tracebacks of an attempt that are compared."""


class Tracebacks:
    """The tracebacks of an attempt's workers."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, ...], tuple[str, str, str]] = {}
        """Frames and exception's class → the worker that had it first, its host, and the line of
        the exception."""
        self._lock = threading.Lock()

    def shown(self, worker: str, host: str, block: list[str]) -> list[str]:
        """Return what to print of a worker's traceback."""
        block = of_user(block)
        kind = re.split(r"[:\s]", block[-1], maxsplit=1)[0]
        key = (*(line for line in block if FRAME.match(line)), kind)
        with self._lock:
            first, where, said = self._first.get(key, (worker, host, block[-1]))
            if len(self._first) < MOST_KEPT:
                self._first[key] = first, where, said
        if first == worker:
            return block
        reference = f"in the same lines as on {where}, whose output has them"
        is_same = worker and block[-1] == said
        return [f"{kind} {reference}" if is_same else f"{block[-1]} ({reference})"]

    def shortened(self, text: str) -> str:
        """Return a text without the tracebacks that were printed."""
        stream = Stream(self, "", "")
        lines = [shown for line in text.rstrip().split("\n") for shown in stream.take(line)]
        return "\n".join([*lines, *stream.rest()])


class Stream:
    """One worker's stderr. `take` gets each line."""

    def __init__(self, tracebacks: Tracebacks, worker: str, host: str):
        self.tracebacks, self.worker, self.host = tracebacks, worker, host
        self._block: list[str] = []
        self._was_short = False
        """The line before stood for a traceback, whose chain to the next one is left out, too."""

    def take(self, line: str) -> list[str]:
        """Return the lines to print when a line has come."""
        if not self._block:
            if line.startswith(HEAD) or BEGIN.match(line):
                self._block.append(line)
                return []
            self._was_short &= not line or line in CHAINS
            return [] if self._was_short else [line]
        self._block.append(line)
        if len(self._block) > MOST_LINES:
            return self.rest()
        if line.startswith((" ", HEAD)) or not line or line in CHAINS:
            return []
        block, self._block = self._block, []
        shown = self.tracebacks.shown(self.worker, self.host, block)
        self._was_short = len(shown) == 1 < len(block)
        return shown

    def rest(self) -> list[str]:
        """Return the lines that wait."""
        block, self._block = self._block, []
        return block


def of_user(block: list[str]) -> list[str]:
    """Return a traceback without our frames, unless the error arose in one."""
    frames: list[list[str]] = [[]]
    for line in block:
        if FRAME.match(line) or not line.startswith(" "):
            frames.append([])
        frames[-1].append(line)
    ours = [bool(part and (found := FRAME.match(part[0])) and is_ours(found[1])) for part in frames]
    named = [number for number, part in enumerate(frames) if part and FRAME.match(part[0])]
    if not named or ours[named[-1]]:
        return block
    return [line for part, is_left_out in zip(frames, ours, strict=True) if not is_left_out
            for line in part]

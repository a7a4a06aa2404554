"""Cut a worker's output into lines, in bounded memory, also if it writes no line ends.

worker's stdout, stderr → here → driver (prefixes each line with its host) → the supervisor's output

What always holds:
1. At most MAX_LINE_BYTES of a line without an end are kept. A longer line is passed on in pieces of
   that size.
2. Text after a carriage return replaces the text before it, as on a terminal: progress bars (tqdm)
   end an update so. The newest update is passed on every UPDATE_S, and the last one when its line
   or the output ends.
3. Text that waits for its line end (a prompt, dots) is passed on after UPDATE_S, and its rest is a
   line of its own.
4. A mark, which begins a message of our own at the end of a line, is never cut, and no update
   replaces it.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator

CHUNK_BYTES = 1 << 15
MAX_LINE_BYTES = 1 << 16
UPDATE_S = 5.0
"""Between two updates of one stream: 64 workers with a progress bar each make 13 lines a second."""
MARKED_BYTES = 64
"""The longest message of our own, with its mark."""


class Lines:
    """One stream's text since its last line end. `now` is any clock that counts seconds."""

    def __init__(self, mark: bytes, update_s: float):
        self.mark, self.update_s = mark, update_s
        self._rest = b""
        self._is_begun = False
        """A part of this line has been passed on."""
        self._due: float | None = None

    @property
    def kept_bytes(self) -> int:
        """The bytes that are kept of a line without an end."""
        return len(self._rest)

    def wait_s(self, now: float) -> float | None:
        """Return after how many seconds `show` is to be called; None while nothing waits."""
        return None if self._due is None else max(0.0, self._due - now)

    def take(self, data: bytes, now: float) -> list[bytes]:
        """Add data; returns the lines to pass on, without their ends."""
        whole = self._rest + data
        *ended, rest = whole.split(b"\n")
        is_simple = not (self._is_begun or b"\r" in whole
                         or self.mark in whole) and len(whole) <= MAX_LINE_BYTES
        lines = list(ended) if is_simple else [line for text in ended for line in self._end(text)]
        self._rest = rest = newest_update(rest)
        if len(rest) > MAX_LINE_BYTES:
            *pieces, self._rest = _pieces(rest, self.mark)
            lines += pieces
            self._is_begun = True
        if not self._rest.strip():
            self._due = None
        elif self._due is None or ended:
            self._due = now + self.update_s
        return lines

    def show(self) -> list[bytes]:
        """Return the text that waits for its line end, and start a new line."""
        end = _end_of_whole(self._rest, self.mark)
        shown, self._rest, self._due = self._rest[:end].strip(b"\r"), self._rest[end:], None
        self._is_begun |= bool(shown.strip())
        return [shown] if shown.strip() else []

    def close(self) -> list[bytes]:
        """Return the last line of the output."""
        text, self._rest, self._due = self._rest, b"", None
        return self._end(text) if text.strip() else []

    def _end(self, text: bytes) -> list[bytes]:
        """Return the part of an ended line that is not passed on yet."""
        before, mark, message = text.partition(self.mark)
        line = newest_update(before).strip(b"\r") + mark + message
        is_shown, self._is_begun = self._is_begun and not line.strip(), False
        return [] if is_shown else _pieces(line, self.mark)


def lines_of(descriptor: int, mark: bytes) -> Iterator[bytes]:
    """Yield the lines of a pipe until its last writer closes it. Blocks."""
    lines, poll = Lines(mark, UPDATE_S), select.poll()
    poll.register(descriptor, select.POLLIN)
    while True:
        wait_s = lines.wait_s(time.monotonic())
        if wait_s is not None and (wait_s <= 0 or not poll.poll(1000 * wait_s)):
            yield from lines.show()
        elif data := os.read(descriptor, CHUNK_BYTES):
            yield from lines.take(data, time.monotonic())
        else:
            break
    yield from lines.close()


def newest_update(text: bytes) -> bytes:
    """Return the last update that is not blank, with the carriage returns around it."""
    before, separator, newest = text.rpartition(b"\r")
    if not separator:
        return text
    if newest.strip():
        return separator + newest
    last = next((update for update in reversed(before.split(b"\r")) if update.strip()), b"")
    return last + separator + newest


def _pieces(line: bytes, mark: bytes) -> list[bytes]:
    """Cut a line where it is too long."""
    pieces = []
    while len(line) > MAX_LINE_BYTES:
        end = _end_of_whole(line[:MAX_LINE_BYTES], mark) or MAX_LINE_BYTES
        pieces.append(line[:end])
        line = line[end:]
    return [*pieces, line]


def _end_of_whole(text: bytes, mark: bytes) -> int:
    """Return the length of the text without a half character or a half mark at its end."""
    end = len(text)
    start = next((at for at in range(end - 1,
                                     max(0, end - 4) - 1, -1) if text[at] & 0xC0 != 0x80), end)
    if start < end and text[start] >= 0xC0 and end - start < _length(text[start]):
        end = start
    marked = text.rfind(mark[:1], max(0, end - MARKED_BYTES), end)
    return marked if marked >= 0 and (text[marked:].startswith(mark)
                                      or mark.startswith(text[marked:])) else end


def _length(first: int) -> int:
    """Return the number of bytes of a UTF-8 character, by its first byte."""
    return 4 if first >= 0xF0 else 3 if first >= 0xE0 else 2

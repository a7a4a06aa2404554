"""The file of a Perfetto trace: tracks, slices that nest, marks and counters, as protobuf.

tracks → here → `elastic-trainer report --trace FILE`

What always holds:
1. Slices of one track nest: one begins within another only if it ends there, too. `laned` puts a
   slice that would overlap on a further track.
2. Names are written once, and each packet has their numbers (interned data).

What it does not do: use the wheel `perfetto`. Its classes take as long for a packet as this module
(3.2 and 3.3 µs, measured), and it would be one more package to install for one option of `report`.
The tests read the file with the classes of that wheel.

Source: perfetto/protos/perfetto/trace (trace_packet.proto, track_event/*.proto); the numbers of
protobuf fields never change.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO, NamedTuple

SLACK_NS = 500
"""Times of timelines are floats of microseconds since 1970, which are exact to 250 ns."""
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4
_CLEARED, _NEEDS_NAMES = 1, 2
_EXPLICIT_ORDER = 3
Facts = Mapping[str, object]
_NO_FACTS: Facts = {}


class Slice(NamedTuple):
    """A name for the time between two moments, in nanoseconds since 1970."""

    start: int
    end: int
    name: str
    facts: Facts = _NO_FACTS


def laned(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Distribute slices over as few tracks as it takes for those of one track to nest."""
    lanes: list[tuple[list[Slice], list[int]]] = []
    for one in sorted(slices, key=lambda slice: (slice.start, -slice.end)):
        for placed, open_ends in lanes:
            start, depth = max(one.start, placed[-1].start), len(open_ends)
            while depth and open_ends[depth - 1] <= one.start + SLACK_NS:
                depth -= 1
                start = max(start, open_ends[depth])
            if not depth or one.end <= open_ends[depth - 1] + SLACK_NS:
                del open_ends[depth:]
                break
        else:
            placed, open_ends, start = [], [], one.start
            lanes.append((placed, open_ends))
        end = max(start, min([one.end, *open_ends[-1:]]))
        placed.append(one._replace(start=start, end=end))
        open_ends.append(end)
    return [placed for placed, _ in lanes]


def edges(slices: Iterable[Slice]) -> Iterator[tuple[int, Slice | None]]:
    """Yield the beginnings of nested slices with the slice, and their ends with None, in order."""
    open_ends: list[int] = []
    for one in slices:
        while open_ends and open_ends[-1] <= one.start:
            yield open_ends.pop(), None
        yield one.start, one
        open_ends.append(one.end)
    while open_ends:
        yield open_ends.pop(), None


class TraceFile:
    """Writes a trace into a file, packet by packet."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._tracks = 0
        self._names: dict[tuple[int, str], int] = {}
        self._new_names = b""
        self._heads: dict[tuple[int, int, str], bytes] = {}
        self._put(_number(10, 1) + _number(13, _CLEARED))

    def track(self, name: str, parent: int = 0, *, unit: str | None = None) -> int:
        """Add a track and return its number. Tracks are shown in the order in which they are added.

        With a `unit` it is a counter's.
        """
        self._tracks += 1
        counter = b"" if unit is None else _block(8, _text(6, unit) if unit else b"")
        self._put(_block(60, _number(1, self._tracks) + _text(2, name)
                         + (_number(5, parent) if parent else b"") + counter
                         + _number(11, _EXPLICIT_ORDER) + _number(12, self._tracks)))
        return self._tracks

    def slices(self, track: int, slices: Iterable[Slice]) -> None:
        """Add slices that nest, in the order of their beginnings."""
        for at, one in edges(slices):
            if one is None:
                self._event(at, track, END)
            else:
                self._event(at, track, BEGIN, one.name, self._facts(one.facts))

    def mark(self, track: int, at: int, name: str, facts: Facts) -> None:
        """Add a moment."""
        self._event(at, track, INSTANT, name, self._facts(facts))

    def count(self, track: int, at: int, value: float) -> None:
        """Add the value of a counter from a moment on."""
        self._event(at, track, COUNTER, "", _float(44, value))

    def _event(self, at: int, track: int, kind: int, name: str = "", rest: bytes = b"") -> None:
        head = self._heads.get((track, kind, name))
        if head is None:
            named = _number(10, self._interned(2, name)) if name else b""
            head = self._heads[track, kind, name] = _number(9, kind) + _number(11, track) + named
        self._put(_number(8, at) + _SEQUENCE + _block(11, head + rest))

    def _facts(self, facts: Facts) -> bytes:
        return b"".join(_block(4, _number(1, self._interned(3, name)) + _value(value))
                        for name, value in facts.items() if value is not None)

    def _interned(self, field: int, name: str) -> int:
        """Return the number of a name; a new name goes with the next packet."""
        number = self._names.get((field, name))
        if number is None:
            number = self._names[field, name] = len(self._names) + 1
            self._new_names += _block(field, _number(1, number) + _text(2, name))
        return number

    def _put(self, packet: bytes) -> None:
        if self._new_names:
            packet += _block(12, self._new_names)
            self._new_names = b""
        self._file.write(_block(1, packet))


# --- protobuf -----------------------------------------------------------------------------------

def _varint(number: int) -> bytes:
    if number < 0x80:
        return _SMALL[number]
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


_SMALL = [bytes([number]) for number in range(0x80)]


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value & 0xFFFFFFFFFFFFFFFF)  # a negative one: 2's compl.


def _block(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _block(field, text.encode("utf-8", "replace"))


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _value(value: object) -> bytes:
    """Return the value of a fact: a field of DebugAnnotation."""
    if isinstance(value, bool):
        return _number(2, value)
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return _number(4, value)
    if isinstance(value, float):
        return _float(5, value)
    return _text(6, str(value))


_SEQUENCE = _number(10, 1) + _number(13, _NEEDS_NAMES)

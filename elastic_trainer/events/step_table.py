"""Numbers of each step, packed: the memory of report and verify for a run of any length.

A million rows of six numbers take 49 MB here, and 0.5 GB as objects in a dict.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from struct import Struct
from struct import error as StructError

ROWS = 4096
Row = tuple[float, ...]


class _Block:
    def __init__(self, row_bytes: int):
        self.count, self.has = 0, bytearray(ROWS)
        self.rows = bytearray(ROWS * row_bytes)


class StepTable:
    """A mapping from a step to a row of numbers.

    `codes` are the types of the columns, as in the module struct.
    """

    def __init__(self, codes: str):
        self._row, self._blocks = Struct(f"={codes}"), dict[int, _Block]()
        self._odd: dict[int, Row] = {}
        """Rows with a number that is too large for its column."""
        self._count = 0

    def __len__(self) -> int:
        return self._count + len(self._odd)

    def __contains__(self, step: int) -> bool:
        block = self._blocks.get(step // ROWS)
        return (block is not None and bool(block.has[step % ROWS])) or step in self._odd

    def add(self, step: int, row: Row) -> bool:
        """Set the row of a step that has none. Return whether it had none."""
        number, at = divmod(step, ROWS)
        block = self._blocks.get(number)
        if (block is not None and block.has[at]) or step in self._odd:
            return False
        if block is None:
            block = self._blocks[number] = _Block(self._row.size)
        try:
            self._row.pack_into(block.rows, at * self._row.size, *row)
        except (OverflowError, StructError):
            self._odd[step] = row
            return True
        block.has[at] = 1
        block.count += 1
        self._count += 1
        return True

    def get(self, step: int) -> Row | None:
        """Return a step's row; None if it has none."""
        block = self._blocks.get(step // ROWS)
        at = step % ROWS
        if block is not None and block.has[at]:
            return self._row.unpack_from(block.rows, at * self._row.size)
        return self._odd.get(step)

    def pop(self, step: int) -> Row | None:
        """Remove a step's row and return it."""
        row, number = self.get(step), step // ROWS
        block = self._blocks.get(number)
        if step in self._odd:
            del self._odd[step]
        elif block is not None and block.has[step % ROWS]:
            block.has[step % ROWS] = 0
            block.count -= 1
            self._count -= 1
        if block is not None and not block.count:
            del self._blocks[number]
        return row

    def steps(self, start: int | None = None) -> Iterator[int]:
        """Yield the steps that have rows, from `start` on, in order.

        The table must not change meanwhile.
        """
        odd = sorted(self._odd)
        for number in sorted({*self._blocks, *(step // ROWS for step in odd)}):
            if start is not None and (number + 1) * ROWS <= start:
                continue
            block, low = self._blocks.get(number), number * ROWS
            from_here = max(0, (start or 0) - low)
            mine = list(compress(range(low + from_here, low + ROWS), block.has[from_here:])
                        if block else ())
            if odd:
                mine = sorted([*mine, *(step for step in odd if step // ROWS == number)])
            yield from (step for step in mine if start is None or step >= start)

    def items(self) -> Iterator[tuple[int, Row]]:
        """Yield the steps and their rows, in order. The table must not change meanwhile."""
        if self._odd:
            yield from ((step, row) for step in self.steps() if (row := self.get(step)))
            return
        for number, block in sorted(self._blocks.items()):
            steps = compress(range(number * ROWS, (number + 1) * ROWS), block.has)
            yield from zip(steps, compress(self._row.iter_unpack(block.rows), block.has),
                           strict=True)

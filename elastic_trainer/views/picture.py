"""The picture of a run in text: samples a second over time, and the changes of the fleet below.

timeline → here → `elastic-trainer report`

It is a pure function of the events. Its unit is a character.
"""

from __future__ import annotations

from elastic_trainer.views.svg import Axis, axis_of
from elastic_trainer.views.timeline import Mark, Timeline

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS = " ..--==##"
ROWS = 4
SIGNS = {Mark.LOST: "x", Mark.SMALLER: "-", Mark.LARGER: "+", Mark.JOINED: "=", Mark.RESTART: "!"}


def blocks_for(encoding: str) -> str:
    """Return the blocks that an output can show."""
    try:
        BLOCKS.encode(encoding)
    except (UnicodeError, LookupError):
        return ASCII_BLOCKS
    return BLOCKS


def draw(timeline: Timeline, columns: int = 72, blocks: str = BLOCKS) -> list[str]:
    """Return the lines of the picture; none for a run without two steps.

    The height of a column is the rate in its time: samples of finished steps, by seconds. The time
    axis is that of svg.py.
    """
    if timeline.span is None:
        return []
    axis = axis_of(timeline.span, (), timeline.stops)
    width_s = axis.length_s / columns
    rates = timeline.rates([axis.moment(column * width_s) for column in range(columns + 1)],
                           width_s)
    top = max(rates) or 1.0
    levels = [round(8 * ROWS * rate / top) for rate in rates]
    chart = ["".join(blocks[min(8, max(0, level - 8 * row))] for level in levels)
             for row in reversed(range(ROWS))]
    most = f"{top:.0f}" if top >= 10 else f"{top:.2g}"
    scale = f"{most} {timeline.unit}/s at most, {axis.length_s:.0f} s"
    marks, used = _marks(timeline, axis, columns)
    legend = (" · " if blocks is BLOCKS else ", ").join(
        f"{sign} {mark.value}" for mark, sign in SIGNS.items() if mark in used)
    return [scale, *chart, *([marks, legend] if used else [])]


def _marks(timeline: Timeline, axis: Axis, columns: int) -> tuple[str, set[Mark]]:
    """Return the line of marks, and those that it has. A lost worker or a new attempt hides a
    smaller world; a joined worker that it would hide has the next column."""
    signs, used = [" "] * (columns + 1), set[Mark]()
    for change in timeline.changes:
        if not (axis.start <= change.time <= axis.end and change.mark in SIGNS):
            continue
        column = min(columns - 1, int(columns * axis.elapsed(change.time) / axis.length_s))
        if signs[column] in "x!" and change.mark in (Mark.LARGER, Mark.JOINED):
            column += 1
        if signs[column] in " +-=":
            signs[column] = SIGNS[change.mark]
            used.add(change.mark)
    return "".join(signs).rstrip(), used

"""The picture of a run in text: samples a second over time, and the changes of the fleet below.

timeline → here → `elastic-trainer report`

It is a pure function of the events. Its unit is a character.
"""

from __future__ import annotations

from elastic_trainer.observe.timeline import Mark, Timeline

BLOCKS = " ▁▂▃▄▅▆▇█"
ROWS = 4
SIGNS = {Mark.LOST: "x", Mark.SMALLER: "-", Mark.LARGER: "+", Mark.RESTART: "!"}
LEGEND = " · ".join(f"{sign} {mark.value}" for mark, sign in SIGNS.items())


def draw(timeline: Timeline, columns: int = 72) -> list[str]:
    """Return the lines of the picture; none for a run without two steps.

    The height of a column is the rate in its time: samples of finished steps, by seconds.
    """
    if timeline.span is None:
        return []
    start, end = timeline.span
    width_s = max(end - start, 1e-6) / columns
    rates = timeline.rates([start + column * width_s for column in range(columns + 1)])
    top = max(rates) or 1.0
    levels = [round(8 * ROWS * rate / top) for rate in rates]
    chart = ["".join(BLOCKS[min(8, max(0, level - 8 * row))] for level in levels)
             for row in reversed(range(ROWS))]
    scale = f"{top:.0f} samples/s at most, {end - start:.0f} s"
    return [scale, *chart, _marks(timeline, start, end, columns), LEGEND]


def _marks(timeline: Timeline, start: float, end: float, columns: int) -> str:
    """Return the line of marks. A lost worker or a new attempt hides a change of size."""
    marks = [" "] * columns
    for change in timeline.changes:
        if start <= change.time <= end and change.mark in SIGNS:
            column = int(columns * (change.time - start) / max(end - start, 1e-6))
            column = min(columns - 1, column)
            if marks[column] in " +-":
                marks[column] = SIGNS[change.mark]
    return "".join(marks).rstrip()

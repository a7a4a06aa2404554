"""The picture of a run: samples a second over time, the fleet, its changes, and divided pauses.

    elastic-trainer report runs/NAME --svg run.svg

run, periods → here → page, a file

What always holds:
1. The time axis reaches to the last event, or to the end of a run that is over: a standstill is
   seen while it lasts. Time in which a person had stopped the run is cut out of the axis.
2. No text covers another. A mark whose label has no room keeps its tooltip.
3. The number of shapes is bounded by the width of the picture, whatever the number of faults.
   Bands that would cover each other are one band, up to MERGED_PX. It has their number and sums.
4. A part of a pause that is narrower than LEAST_PX has no shape. The tooltip of its band has its
   seconds, and a remark below the legend says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.events.accounts import Pause, Period
from elastic_trainer.events.event_kind import PAUSE_PARTS, Phase
from elastic_trainer.events.run import Change, Mark, Run
from elastic_trainer.events.sentences import count
from elastic_trainer.views.drawing import (
    LEFT,
    LETTER_PX,
    PALE,
    RIGHT,
    Axis,
    Chart,
    Key,
    duration,
    ticks,
)
from elastic_trainer.wire.plain import plain

TOP, BOTTOM = 100, 268
"""Of the plot of samples a second."""
FLEET_TOP, FLEET_BOTTOM = 286, 336
MARKS = TOP - 10
LABELS = MARKS - 10
"""The heights of the marks and of their labels."""
COLUMNS = 264
"""The most columns of the plot: one in 3 px."""
STEPS_A_COLUMN = 2
"""A column of a short run has the samples of about 2 steps: else noise hides the rate."""
FEWEST_COLUMNS = 66
NEAR_PX = 8
"""Marks of one kind that are nearer to each other are one mark."""
LEAST_PX, MERGED_PX = 1.5, 6.0
SHAPES = {
    Mark.LOST: ("lost", "M-4,-4 L4,4 M-4,4 L4,-4"),
    Mark.LARGER: ("larger", "M-5,0 L5,0 M0,-5 L0,5"),
    Mark.JOINED: ("joined", "M-7,0 A7,7 0 1 0 7,0 A7,7 0 1 0 -7,0"),
    Mark.SMALLER: ("smaller", "M-5,0 L5,0"),
    Mark.RESTART: ("restart", "M0,-5 L5,0 L0,5 L-5,0 Z"),
    Mark.LEAVES: ("leaves", "M0,5 L-5,-4 L5,-4 Z"),
    Mark.CHECKPOINT: ("checkpoint", "M0,-4 L0,4"),
}
"""Class and outline of each mark: a cross, a plus, a circle (around a cross that is near), a minus,
a diamond, a triangle, a stroke."""


def axis_of(span: tuple[float, float], periods: Sequence[Period],
            stopped: Sequence[tuple[float, float]] | None = None, left: float = LEFT) -> Axis:
    """Return the axis from the first booked second, or from the start of the span, to its end.
    `stopped`: the time that is cut out, if the periods do not have it."""
    start, end = span
    start = min([start, *(begin for phase, begin, _ in periods if phase is not Phase.STOPPED)])
    if stopped is None:
        stopped = [(begin, until) for phase, begin, until in periods if phase is Phase.STOPPED]
    return Axis(start, end, tuple((begin, until) for begin, until in stopped
                                  if start < begin < until <= end), left)


def draw(run: Run, periods: Sequence[Period]) -> Chart:
    """Return the picture of a run with two steps or more."""
    assert run.span
    axis = axis_of(run.span, periods, run.stops)
    chart = Chart(f"{run.steps.unit.capitalize()} a second, and what happened",
                  bottom=FLEET_BOTTOM + 28, top=LABELS - 16)
    with chart.group("bands"):
        parts_drawn = _draw_bands(chart, axis, periods, run.recoveries)
    _draw_rates(chart, axis, run)
    _draw_fleet(chart, axis, run.sizes)
    for start, end in axis.stops:
        chart.line("stopped-at", axis.x(start), TOP, axis.x(start), FLEET_BOTTOM,
                   f"stopped for {duration(end - start)}")
    groups = grouped(axis, run.changes)
    with chart.group("marks"):
        _draw_marks(chart, axis, groups)
    with chart.group("checkpoints"):
        _draw_checkpoints(chart, axis, [it.time for it in run.checkpoints])
    marks = {group[0].mark for group in groups} | ({Mark.CHECKPOINT} if run.checkpoints else set())
    phases = {phase.value for phase, _, _ in periods}
    chart.legends.append(("", [
        *(Key(mark.value, f"mark {SHAPES[mark][0]}", SHAPES[mark][1])
          for mark in Mark if mark in marks),
        *(Key(phase, f"band {phase}") for phase in PALE if phase in phases)]))
    if parts_drawn:
        chart.legends.append(("parts of a pause:", parts_legend()))
    if parts_drawn < sum(seconds > 0 for it in run.recoveries for seconds in it.parts):
        least_s = LEAST_PX * axis.length_s / (RIGHT - LEFT)
        chart.remarks.append(f"parts of a pause under {duration(least_s)} are too narrow to be "
                             f"drawn: the tooltip of the pause has them")
    return chart


def parts_legend() -> list[Key]:
    return [Key(part, f"fill {part}") for part in PAUSE_PARTS]


def file_of(run: Run, periods: Sequence[Period], result: Mapping[str, Any]) -> str:
    """Return the picture as an SVG file, with the figures of the run in one line."""
    lost = sum(result["workers_lost"].values())
    return draw(run, periods).file(f"run {plain(result['run'])}", " · ".join([
        f"goodput {result['goodput']:.1%}", count(result["steps"], "step"),
        f"{count(lost, 'worker')} lost", count(len(result["pauses"]), "pause"),
        count(result["attempts"], "attempt"), duration(result["wall_s"])]))


# --- bands ----------------------------------------------------------------------------------------


@dataclass
class Band:
    """One or several periods of a phase, in px of the picture."""

    phase: str
    left: float
    right: float
    seconds: float
    number: int = 1
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PAUSE_PARTS, 0.0))

    def in_words(self) -> str:
        """Return the tooltip."""
        times = f"{self.number} times {self.phase}, in all" if self.number > 1 else (
            f"{self.phase} for")
        parts = ", ".join(f"{part} {duration(seconds)}" for part, seconds in self.parts.items()
                          if seconds)
        return f"{times} {duration(self.seconds)}" + (f": {parts}" if parts else "")


def bands(periods: Iterable[Period], recoveries: Sequence[Pause], x: Callable[[float], float]
          ) -> list[Band]:
    """Return the bands of periods, in their order."""
    found, last, at = list[Band](), dict[str, Band](), 0
    for phase, start, end in periods:
        if phase.value not in PALE:
            continue
        left, right, before = x(start), x(end), last.get(phase.value)
        if before and left < before.right and before.right - before.left < MERGED_PX:
            band = before
            band.right, band.number = max(band.right, right), band.number + 1
            band.seconds += end - start
        else:
            left = max(left, before.right) if before else left
            band = last[phase.value] = Band(phase.value, left, max(right, left + LEAST_PX),
                                            end - start)
            found.append(band)
        while phase is Phase.PAUSING and at < len(recoveries) and recoveries[at].time <= end:
            for part, seconds in zip(PAUSE_PARTS, recoveries[at].parts, strict=True):
                band.parts[part] += seconds
            at += 1
    return found


def slices(recoveries: Iterable[Pause], x: Callable[[float], float]
           ) -> Iterator[tuple[str, float, float, float]]:
    """Yield the parts that are wide enough: name, left and right in px, seconds."""
    free_from = 0.0
    for recovery in recoveries:
        end = recovery.time - recovery.duration_s
        if x(recovery.time) - x(end) < LEAST_PX:
            continue
        for part, seconds in zip(PAUSE_PARTS, recovery.parts, strict=True):
            start, end = end, min(end + seconds, recovery.time)
            left, right = x(start), x(end)
            if right - left >= LEAST_PX and left >= free_from:
                yield part, left, right, seconds
                free_from = right


def _draw_bands(chart: Chart, axis: Axis, periods: Sequence[Period],
                recoveries: Sequence[Pause]) -> int:
    """Shade pauses, restarts and boots; return the number of parts of pauses that are drawn."""
    shown = [it for it in periods if it[2] > axis.start and it[1] < axis.end]
    for band in bands(shown, recoveries, axis.x):
        chart.rect(f"band {band.phase}", band.left, TOP, min(band.right, RIGHT), BOTTOM,
                   band.in_words())
    drawn = 0
    for part, left, right, seconds in slices(recoveries, axis.x):
        chart.rect(f"fill {part}", left, TOP, right, BOTTOM, f"{part} for {duration(seconds)}")
        drawn += 1
        if right - left > LETTER_PX * len(part) + 6:
            chart.text((left + right) / 2, TOP + 14, part, "inside middle")
    return drawn


# --- curves and marks -----------------------------------------------------------------------------


def _draw_rates(chart: Chart, axis: Axis, run: Run) -> None:
    columns = min(COLUMNS, max(FEWEST_COLUMNS, len(run.steps) // STEPS_A_COLUMN))
    width_s = axis.length_s / columns
    edges_s = [column * width_s for column in range(columns + 1)]
    rates = run.steps.rates([axis.moment(edge_s) for edge_s in edges_s], width_s)
    top = max(rates) or 1.0
    scale = (BOTTOM - TOP) / (1.05 * top)
    for value in ticks(0.0, top, about=5):
        chart.level(BOTTOM - value * scale, f"{value:g}")
    x = [axis.place(edge_s) for edge_s in edges_s]
    steps = [f"L{left:.1f},{y:.1f} L{right:.1f},{y:.1f}" for left, right, y in zip(
        x, x[1:], (BOTTOM - rate * scale for rate in rates), strict=False)]
    chart.path("rate", " ".join([f"M{LEFT},{BOTTOM}", *steps, f"L{RIGHT},{BOTTOM} Z"]))
    chart.axis_name((TOP + BOTTOM) / 2, f"{run.steps.unit} a second")


def _draw_fleet(chart: Chart, axis: Axis, sizes: Iterable[tuple[float, int]]) -> None:
    """Draw the size of the world, and the time below it."""
    sizes = [(time, size) for time, size in sizes if time <= axis.end]
    most = max([1, *(size for _, size in sizes)])
    scale = (FLEET_BOTTOM - FLEET_TOP) / most
    for value in (0, most):
        chart.level(FLEET_BOTTOM - value * scale, str(value))
    before, points = 0, [f"M{LEFT},{FLEET_BOTTOM}"]
    for time, size in sizes:
        if size != before:
            points.append(f"H{axis.x(time):.1f} V{FLEET_BOTTOM - size * scale:.1f}")
            before = size
    chart.path("fleet", " ".join([*points, f"H{RIGHT}"]))
    chart.axis_name((FLEET_TOP + FLEET_BOTTOM) / 2, "workers")
    for x, label in axis.ticks():
        chart.line("grid", x, FLEET_BOTTOM, x, FLEET_BOTTOM + 5)
        chart.text(x, FLEET_BOTTOM + 20, label, "dim middle")


def _draw_marks(chart: Chart, axis: Axis, groups: Iterable[Sequence[Change]]) -> None:
    free_from = -math.inf
    for group in groups:
        first, x, label = group[0], axis.x(group[0].time), how(group)
        name, outline = SHAPES[first.mark]
        chart.mark(f"mark {name}", outline, x, MARKS, (
            f"{label or first.mark.value}, {duration(axis.elapsed(first.time))} after the start"))
        if first.mark in (Mark.LOST, Mark.RESTART):
            chart.line(f"{name} stem", x, MARKS + 6, x, FLEET_BOTTOM)
        half = LETTER_PX * len(label) / 2
        center = min(max(x, LEFT + half), RIGHT - half)
        if half and center - half > free_from:
            chart.text(center, LABELS, label, "middle")
            free_from = center + half + LETTER_PX


def _draw_checkpoints(chart: Chart, axis: Axis, times: Iterable[float]) -> None:
    """Draw a stroke for each checkpoint, below the world; checkpoints in one place share it."""
    name, outline = SHAPES[Mark.CHECKPOINT]
    places = Counter(round(axis.x(time)) for time in times if axis.start <= time <= axis.end)
    for x, number in sorted(places.items()):
        chart.mark(f"mark {name}", outline, x, FLEET_BOTTOM, count(number, "checkpoint"))


def grouped(axis: Axis, changes: Iterable[Change]) -> list[list[Change]]:
    """Return the changes by mark: one mark has a change, and equal ones NEAR_PX or less after it.

    A smaller world has no mark of its own near the lost worker that made it smaller.
    """
    groups: list[list[Change]] = []
    newest: dict[Mark, list[Change]] = {}

    def near(change: Change, *marks: Mark) -> list[list[Change]]:
        """Return the newest groups of these marks that are near a change."""
        return [newest[mark] for mark in marks if newest.get(mark)
                and axis.x(change.time) - axis.x(newest[mark][0].time) <= NEAR_PX]

    for change in (it for it in changes if axis.start <= it.time <= axis.end):
        mark = change.mark
        if (mark is Mark.SMALLER and near(change, Mark.LOST, Mark.LEAVES)
                or mark is Mark.LEAVES and near(change, Mark.LOST)):
            continue
        if mark is Mark.LOST:
            for hidden in near(change, Mark.SMALLER, Mark.LEAVES):
                hidden.clear()
        if same := near(change, mark):
            same[0].append(change)
        else:
            newest[mark] = [change]
            groups.append(newest[mark])
    return [group for group in groups if group]


def how(group: Sequence[Change]) -> str:
    """Return how the workers of a group were lost: "killed", "2 killed", "2 killed, 1 frozen"."""
    losses = Counter(change.how for change in group if change.how)
    if len(group) == 1:
        return next(iter(losses), "")
    return ", ".join(f"{number} {name}" for name, number in losses.items())

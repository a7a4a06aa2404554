"""The picture of a run as an SVG file: samples a second over time, the fleet, pauses and goodput.

    elastic-trainer report runs/NAME --svg run.svg

timeline, history → here → a file

What always holds:
1. The file needs nothing else: no script, no font, no address. Text is text.
2. It is readable in light and dark (`prefers-color-scheme`), and each kind of mark has its own
   shape, and each part of a pause its own pattern, so that no reader needs the colours.
3. The time axis reaches to the last event, or to the end of a run that is over: a standstill is
   seen while it lasts. Time in which a person had stopped the run is cut out of the axis.
4. No text covers another. A mark whose label has no room keeps its tooltip.

Why no library: a picture is a path, some lines and texts. matplotlib needs 30 MB of packages and
draws text as paths by default. svgwrite is no longer maintained. ElementTree escapes texts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from elastic_trainer.events.books import Period
from elastic_trainer.events.event_kind import PAUSE_PARTS, Phase
from elastic_trainer.events.sentences import count
from elastic_trainer.views.bands import LEAST_PX, SHOWN, bands, pattern_elements, slices
from elastic_trainer.views.bands import STYLE as BAND_STYLE
from elastic_trainer.views.story import Recovery
from elastic_trainer.views.timeline import Change, Mark, Timeline
from elastic_trainer.wire.plain import plain

WIDTH = 880
LEFT, RIGHT = 72, 864
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
LETTER_PX = 6.6
"""The mean width of a letter."""
LEGEND_LETTER_PX = 7.0
"""The same, in words without narrow letters."""
STYLE = """
svg { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; }
.paper { fill: #ffffff; } text { fill: #1f2328; } .title { font-size: 16px; font-weight: 600; }
.dim { fill: #59636e; } .grid { stroke: #d1d9e0; stroke-width: 1; } .end { text-anchor: end; }
.middle { text-anchor: middle; } .name { font-size: 11px; font-weight: 600; }
.rate { fill: #0969da; fill-opacity: .2; stroke: #0969da; }
.fleet { fill: none; stroke: #59636e; stroke-width: 1.5; } .pausing { fill: #d4a72c; }
.restarting { fill: #cf222e; } .booting { fill: #8c959f; } .band { fill-opacity: .3; }
.mark { fill: none; stroke-width: 2; } .lost { stroke: #cf222e; }
.larger, .joined { stroke: #1a7f37; }
.smaller { stroke: #9a6700; } .restart { stroke: #8250df; } .stem { stroke-dasharray: 2 3; }
.stopped { stroke: #59636e; stroke-dasharray: 6 4; } .leaves { stroke: #9a6700; }
.checkpoint { stroke: #59636e; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #0d1117; } text { fill: #f0f6fc; } .dim { fill: #9198a1; }
  .grid { stroke: #3d444d; } .rate { fill: #4493f8; stroke: #4493f8; }
  .fleet { stroke: #9198a1; } .lost { stroke: #f85149; } .larger, .joined { stroke: #3fb950; }
  .smaller { stroke: #d29922; } .restart { stroke: #ab7df8; } .restarting { fill: #f85149; }
  .stopped { stroke: #9198a1; } .leaves { stroke: #d29922; } .checkpoint { stroke: #9198a1; }
}
"""
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


@dataclass(frozen=True)
class Axis:
    """The time axis: seconds of the run in which no person had stopped it."""

    start: float
    end: float
    stops: tuple[tuple[float, float], ...]
    """Start and end of the time that is cut out."""

    def elapsed(self, time: float) -> float:
        """Return the seconds on the axis at a time."""
        time = min(max(time, self.start), self.end)
        cut = 0.0
        for start, end in self.stops:
            cut += max(0.0, min(time, end) - start)
        return time - self.start - cut

    @cached_property
    def length_s(self) -> float:
        return max(self.elapsed(self.end), 1e-6)

    def x(self, time: float) -> float:
        """Return the horizontal place of a time, in px."""
        return LEFT + (RIGHT - LEFT) * self.elapsed(time) / self.length_s

    def moment(self, elapsed_s: float) -> float:
        """Return the time at `elapsed_s` seconds of the axis."""
        time = self.start + elapsed_s
        for start, end in self.stops:
            if time > start:
                time += end - start
        return time


def axis_of(span: tuple[float, float], periods: Sequence[Period],
            stopped: Sequence[tuple[float, float]] | None = None) -> Axis:
    """Return the axis from the first booked second, or from the start of the span, to its end.
    `stopped`: the time that is cut out, if the periods do not have it."""
    start, end = span
    start = min([start, *(begin for phase, begin, _ in periods if phase is not Phase.STOPPED)])
    if stopped is None:
        stopped = [(begin, until) for phase, begin, until in periods if phase is Phase.STOPPED]
    return Axis(start, end, tuple((begin, until) for begin, until in stopped
                                  if start < begin < until <= end))


def draw(timeline: Timeline, periods: Sequence[Period], result: Mapping[str, Any]) -> str:
    """Return the SVG of a run with two steps or more."""
    assert timeline.span
    axis = axis_of(timeline.span, periods, timeline.stops)
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", role="img", width=str(WIDTH))
    title = f"run {plain(result['run'])}"
    SubElement(root, "title").text = title
    SubElement(root, "desc").text = subtitle(result)
    SubElement(root, "style").text = STYLE + BAND_STYLE
    SubElement(root, "defs").extend(pattern_elements())
    SubElement(root, "rect", {"class": "paper", "width": "100%", "height": "100%"})
    _text(root, LEFT, 28, title, "title")
    _text(root, LEFT, 50, subtitle(result), "dim")
    parts_drawn = _draw_bands(root, axis, periods, timeline.recoveries)
    _draw_rates(root, axis, timeline)
    _draw_fleet(root, axis, timeline)
    _draw_time(root, axis)
    _draw_stops(root, axis)
    groups = grouped(axis, timeline.changes)
    _draw_marks(root, axis, groups)
    _draw_checkpoints(root, axis, timeline.checkpoints)
    marks = {group[0].mark for group in groups}
    bottom = _draw_legend(root, marks | ({Mark.CHECKPOINT} if timeline.checkpoints else set()),
                          {phase for phase, _, _ in periods}, PAUSE_PARTS if parts_drawn else ())
    if parts_drawn < sum(seconds > 0 for it in timeline.recoveries for seconds in it.parts):
        bottom += 22
        _text(root, LEFT, bottom, too_narrow(axis), "dim")
    root.set("height", str(bottom + 16))
    root.set("viewBox", f"0 0 {WIDTH} {bottom + 16}")
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def subtitle(result: Mapping[str, Any]) -> str:
    """Return the figures of a run in one line."""
    lost = sum(result["workers_lost"].values())
    return " · ".join([
        f"goodput {result['goodput']:.1%}", count(result["steps"], "step"),
        f"{count(lost, 'worker')} lost", count(len(result["pauses"]), "pause"),
        count(result["attempts"], "attempt"), duration(result["wall_s"])])


def duration(seconds: float) -> str:
    """Return a duration in the largest unit of which it has more than 4."""
    unit, unit_s = unit_of(seconds)
    return f"{seconds / unit_s:.3g} {unit}"


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit for a duration, and its seconds. An axis of more than 4 units has whole ones.
    """
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    return next((unit, unit_s) for unit, unit_s in units if seconds > 4 * unit_s or unit_s == 1)


def ticks(most: float, about: int) -> list[float]:
    """Return about `about` numbers from 0 to `most`, 1, 2 or 5 times a power of 10 apart."""
    rough = max(most, 1e-9) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [number * step for number in range(int(most / step + 1e-9) + 1)]


def time_ticks(length_s: float) -> Iterator[tuple[float, str]]:
    """Yield seconds and labels along the time axis, all in one unit."""
    unit, unit_s = unit_of(length_s)
    for value in ticks(length_s / unit_s, about=8):
        yield value * unit_s, f"{value:g} {unit}"


def too_narrow(axis: Axis) -> str:
    """Return which parts of pauses have no shape."""
    least_s = LEAST_PX * axis.length_s / (RIGHT - LEFT)
    return (f"parts of a pause under {duration(least_s)} are too narrow to be drawn: the tooltip "
            f"of the pause has them")


def _draw_bands(root: Element, axis: Axis, periods: Sequence[Period],
                recoveries: Sequence[Recovery]) -> int:
    """Shade pauses, restarts and boots; return the number of parts of pauses that are drawn."""
    group = SubElement(root, "g", {"class": "bands"})
    shown = [it for it in periods if it[2] > axis.start and it[1] < axis.end]
    for band in bands(shown, recoveries, axis.x):
        rect = _band(group, band.left, min(band.right, RIGHT), f"band {band.phase.value}")
        SubElement(rect, "title").text = band.in_words(duration)
    drawn = 0
    for part, left, right, seconds in slices(recoveries, axis.x):
        rect = _band(group, left, right, f"slice {part}")
        SubElement(rect, "title").text = f"{part} for {duration(seconds)}"
        drawn += 1
        if right - left > LETTER_PX * len(part) + 6:
            _text(group, (left + right) / 2, TOP + 14, part, "middle name")
    return drawn


def _band(parent: Element, left: float, right: float, kind: str) -> Element:
    return SubElement(parent, "rect", {
        "class": kind, "x": f"{left:.1f}", "y": str(TOP), "width": f"{right - left:.1f}",
        "height": str(BOTTOM - TOP)})


def _draw_rates(root: Element, axis: Axis, timeline: Timeline) -> None:
    columns = min(COLUMNS, max(FEWEST_COLUMNS, timeline.steps // STEPS_A_COLUMN))
    edges_s = [axis.length_s * column / columns for column in range(columns + 1)]
    rates = timeline.rates([axis.moment(edge_s) for edge_s in edges_s], axis.length_s / columns)
    top = max(rates) or 1.0
    scale = (BOTTOM - TOP) / (1.05 * top)
    for value in ticks(top, about=5):
        _grid_line(root, BOTTOM - value * scale, f"{value:g}")
    places = [LEFT + (RIGHT - LEFT) * column / columns for column in range(columns + 1)]
    steps = [f"L{left:.1f},{y:.1f} L{right:.1f},{y:.1f}" for left, right, y in zip(
        places, places[1:], (BOTTOM - rate * scale for rate in rates), strict=False)]
    SubElement(root, "path", {"class": "rate", "d": " ".join(
        [f"M{LEFT},{BOTTOM}", *steps, f"L{RIGHT},{BOTTOM} Z"])})
    _axis_name(root, (TOP + BOTTOM) / 2, f"{timeline.unit} a second")


def _draw_fleet(root: Element, axis: Axis, timeline: Timeline) -> None:
    sizes = [(time, size) for time, size in timeline.sizes if time <= axis.end]
    most = max([1, *(size for _, size in sizes)])
    scale = (FLEET_BOTTOM - FLEET_TOP) / most
    for value in (0, most):
        _grid_line(root, FLEET_BOTTOM - value * scale, str(value))
    before, points = 0, [f"M{LEFT},{FLEET_BOTTOM}"]
    for time, size in sizes:
        if size != before:
            points.append(f"H{axis.x(time):.1f} V{FLEET_BOTTOM - size * scale:.1f}")
            before = size
    SubElement(root, "path", {"class": "fleet", "d": " ".join([*points, f"H{RIGHT}"])})
    _axis_name(root, (FLEET_TOP + FLEET_BOTTOM) / 2, "workers")


def _draw_time(root: Element, axis: Axis) -> None:
    for seconds, label in time_ticks(axis.length_s):
        x = LEFT + (RIGHT - LEFT) * seconds / axis.length_s
        _line(root, x, FLEET_BOTTOM, x, FLEET_BOTTOM + 5, "grid")
        _text(root, x, FLEET_BOTTOM + 20, label, "dim middle")


def _draw_stops(root: Element, axis: Axis) -> None:
    for start, end in axis.stops:
        line = _line(root, axis.x(start), TOP, axis.x(start), FLEET_BOTTOM, "stopped")
        SubElement(line, "title").text = f"stopped for {duration(end - start)}"


def _draw_marks(root: Element, axis: Axis, groups: Sequence[Sequence[Change]]) -> None:
    marks = SubElement(root, "g", {"class": "marks"})
    free_from = -math.inf
    for group in groups:
        first, x = group[0], axis.x(group[0].time)
        mark = _mark(marks, x, MARKS, first.mark)
        SubElement(mark, "title").text = (
            f"{label(group) or first.mark.value}, "
            f"{duration(axis.elapsed(first.time))} after the start")
        if first.mark in (Mark.LOST, Mark.RESTART):
            _line(marks, x, MARKS + 6, x, FLEET_BOTTOM, f"{SHAPES[first.mark][0]} stem")
        half = LETTER_PX * len(label(group)) / 2
        center = min(max(x, LEFT + half), RIGHT - half)
        if half and center - half > free_from:
            _text(marks, center, LABELS, label(group), "middle")
            free_from = center + half + LETTER_PX


def grouped(axis: Axis, changes: Sequence[Change]) -> list[list[Change]]:
    """Return the changes by mark: one mark has a change, and equal ones NEAR_PX or less behind it.

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


def label(group: Sequence[Change]) -> str:
    """Return how the workers of a group were lost: "killed", "2 killed", "2 killed, 1 frozen"."""
    losses = Counter(change.how for change in group if change.how)
    if len(group) == 1:
        return next(iter(losses), "")
    return ", ".join(f"{number} {how}" for how, number in losses.items())


def _draw_checkpoints(root: Element, axis: Axis, times: Sequence[float]) -> None:
    """Draw a stroke for each checkpoint, below the world; checkpoints in one place share it."""
    strokes = SubElement(root, "g", {"class": "checkpoints"})
    places = Counter(round(axis.x(time)) for time in times if axis.start <= time <= axis.end)
    for x, number in sorted(places.items()):
        stroke = _mark(strokes, x, FLEET_BOTTOM, Mark.CHECKPOINT)
        SubElement(stroke, "title").text = count(number, "checkpoint")


def _draw_legend(root: Element, marks: set[Mark], phases: set[Phase], parts: Sequence[str]) -> int:
    """Explain marks, bands and the parts of pauses, in as many lines as they need; return the
    bottom."""
    legend, x, y = SubElement(root, "g", {"class": "legend"}), float(LEFT), FLEET_BOTTOM + 44
    names: list[tuple[str, str, Mark | None]] = [
        ("mark", mark.value, mark) for mark in Mark if mark in marks]
    names += [("band", phase.value, None) for phase in SHOWN if phase in phases]
    names += [("slice", part, None) for part in parts]
    for kind, name, mark in names:
        width = 32 + LEGEND_LETTER_PX * len(name)
        is_first_part = kind == "slice" and name == parts[0]
        if x + width - 15 > RIGHT or is_first_part:
            x, y = float(LEFT), y + 22
        if is_first_part:
            _text(legend, x, y, "parts of a pause:", "dim")
            x += LEGEND_LETTER_PX * 17
        if mark:
            _mark(legend, x + 6, y - 4, mark)
        else:
            SubElement(legend, "rect", {"class": f"{kind} {name}", "x": f"{x:.1f}",
                                        "y": str(y - 11), "width": "12", "height": "13"})
        _text(legend, x + 17, y, name)
        x += width
    return y


def _mark(parent: Element, x: float, y: float, mark: Mark) -> Element:
    name, outline = SHAPES[mark]
    return SubElement(parent, "path", {
        "class": f"mark {name}", "d": outline, "transform": f"translate({x:.1f},{y:.1f})"})


def _grid_line(root: Element, y: float, label: str) -> None:
    _line(root, LEFT, y, RIGHT, y, "grid")
    _text(root, LEFT - 8, y + 4, label, "dim end")


def _axis_name(root: Element, y: float, name: str) -> None:
    """Write the name of a vertical axis, from bottom to top."""
    text = SubElement(root, "text", {"class": "dim middle",
                                     "transform": f"translate(24,{y:.1f}) rotate(-90)"})
    text.text = name


def _line(parent: Element, x1: float, y1: float, x2: float, y2: float, kind: str) -> Element:
    return SubElement(parent, "line", {
        "class": kind, "x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"})


def _text(parent: Element, x: float, y: float, text: str, kind: str = "") -> None:
    element = SubElement(parent, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}",
                                          **({"class": kind} if kind else {})})
    element.text = text

"""Draw shapes, axes, patterns and legends as SVG. charts.py and run_picture.py say which.

charts, run_picture → here → page, or a file of its own

What always holds:
1. A picture needs nothing else: no script, no font, no address. Text is text, and is escaped.
2. It is readable in light and dark (`prefers-color-scheme`), and without colours: each kind of mark
   has its own shape, each fill its own pattern (FILLS, PALE), and each shape may have a tooltip.

Why no library. Tried with the picture of a run, 10^5 steps and 1,000 faults, on 2 busy cores:

|                    | here    | Altair, SVG | Altair, page | matplotlib | Bokeh   |
|--------------------|---------|-------------|--------------|------------|---------|
| seconds, import    | 0.1     | 2.2         | 3            | 2.0        | 1.5     |
| KB                 | 200     | 370         | 1,070        | 330        | 1,410   |
| MB installed       | 0       | 100         | 100          | 80         | 32      |
| tooltips           | yes     | no          | by script    | patched in | by script |
| patterns           | yes     | no          | no           | yes        | yes     |
| dark, without a second picture | yes | no  | no           | no         | no      |
| a legend that wraps at 400 px  | yes | no  | no           | no         | no      |
| lines of its own   | 190     | 110         | 110          | 93         | 136     |

A page with a script of others breaks the page's Content-Security-Policy. What takes the lines, the
axis with stops cut out and the marks that give way to each other, no library has. A library whose
SVG takes its colours from CSS variables would change this decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from elastic_trainer.wire.plain import plain

WIDTH = 880
LEFT, RIGHT = 72, 864
LETTER_PX, LEGEND_LETTER_PX = 6.6, 7.0
"""The mean width of a letter, and of one in words without narrow letters."""
LINE = 22
"""The height of a line of a legend."""
FILLS = {
    "training": "", "redoing": "M2,3 H4", "regrouping": "M0,0 L6,6", "booting": "M3,0 V6",
    "restarting": "M0,3 H6", "waiting": "M1,3 H5 M3,1 V5", "stopped": "", "noticing": "M0,3 H6",
    "deciding": "M3,0 V6", "forming": "M0,0 L6,6", "transfer": "M0,6 L6,0"}
"""What fills groups of accounts and parts of pauses: the lines of a tile of 6 px. The stylesheet
has a colour for each. The two without lines are the lightest and the only plain one of their chart.
"""
PALE = {"pausing": "M0,0 L8,8", "restarting": "M0,4 H8", "booting": "M4,0 V8"}
"""The same of the phases behind a curve: tiles of 8 px."""


class Key(NamedTuple):
    """An entry of a legend."""

    text: str
    kind: str
    """The class of its shape."""
    outline: str = ""
    """Of a mark; else the shape is a rectangle."""
    title: str = ""


@dataclass
class Chart:
    """A picture, to which shapes are added. All numbers are px."""

    title: str
    bottom: float
    top: float = 0.0
    legends: list[tuple[str, Sequence[Key]]] = field(default_factory=list)
    """Each with its heading."""
    remarks: list[str] = field(default_factory=list)
    """Lines below the legends."""
    _shapes: list[str] = field(default_factory=list)

    def rect(self, kind: str, left: float, top: float, right: float, bottom: float,
             title: str = "") -> None:
        self._add(f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
                  f'height="{bottom - top:.1f}"', title)

    def line(self, kind: str, x1: float, y1: float, x2: float, y2: float, title: str = "") -> None:
        self._add(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"',
                  title)

    def path(self, kind: str, outline: str, title: str = "") -> None:
        self._add(f'<path class="{kind}" d="{outline}"', title)

    def mark(self, kind: str, outline: str, x: float, y: float, title: str = "") -> None:
        """Add an outline around (0, 0) at a place."""
        self._add(f'<path class="{kind}" d="{outline}" transform="translate({x:.1f},{y:.1f})"',
                  title)

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self._shapes.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{_safe(text)}</text>')

    def level(self, y: float, label: str) -> None:
        """Add a line of the grid over the whole width, with its label."""
        self.line("grid", LEFT, y, RIGHT, y)
        self.text(LEFT - 8, y + 4, label, "dim end")

    def axis_name(self, y: float, name: str) -> None:
        """Write the name of a vertical axis, from bottom to top."""
        self._shapes.append(f'<text class="dim middle" transform="translate(24,{y:.1f}) '
                            f'rotate(-90)">{_safe(name)}</text>')

    @contextmanager
    def group(self, kind: str) -> Iterator[None]:
        self._shapes.append(f'<g class="{kind}">')
        yield
        self._shapes.append("</g>")

    @property
    def svg(self) -> Markup:
        """The picture alone, for a page. The page has the style, the patterns and the legends."""
        return Markup(  # all texts of the shapes are escaped
            f'<svg class="chart" role="img" aria-label="{_safe(self.title)}" viewBox="0 '
            f'{self.top:g} {WIDTH} {self.bottom - self.top:g}"><title>{_safe(self.title)}</title>'
            f'{"".join(self._shapes)}</svg>')

    def file(self, heading: str, line: str) -> str:
        """Return the picture as a file of its own, with a heading and a line below it."""
        self.text(LEFT, 28, heading, "title")
        self.text(LEFT, 50, line, "dim")
        return template().get_template("picture.svg").render(
            heading=heading, line=line, height=self._draw_legends(), shapes=Markup(
                "\n".join(self._shapes)))

    def _draw_legends(self) -> float:
        """Draw legends and remarks below the picture, in as many lines as they need; return the
        height of the whole."""
        y = self.bottom + 14
        with self.group("legend"):
            for heading, keys in self.legends:
                x = float(LEFT)
                if heading:
                    self.text(x, y, heading, "dim")
                    x += LEGEND_LETTER_PX * len(heading)
                for key in keys:
                    width = 32 + LEGEND_LETTER_PX * len(key.text)
                    if x + width - 15 > RIGHT:
                        x, y = float(LEFT), y + LINE
                    if key.outline:
                        self.mark(key.kind, key.outline, x + 6, y - 4)
                    else:
                        self.rect(key.kind, x, y - 11, x + 12, y + 2)
                    self.text(x + 17, y, key.text)
                    x += width
                y += LINE
            for remark in self.remarks:
                self.text(LEFT, y, remark, "dim")
                y += LINE
        return y - LINE + 16

    def _add(self, shape: str, title: str) -> None:
        tag = shape[1:5]
        self._shapes.append(f"{shape}><title>{_safe(title)}</title></{tag}>" if title
                            else f"{shape}/>")


def _safe(text: str) -> Markup:
    return escape(plain(text))


@cache
def template() -> Environment:
    """Return the templates of this folder. Each text of theirs is escaped, and has no control
    characters."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=FileSystemLoader(Path(__file__).parent),
        finalize=lambda it: it if hasattr(it, "__html__") else plain(it))
    environment.globals.update(fills=FILLS, pale=PALE, width=WIDTH)
    return environment


@dataclass(frozen=True)
class Axis:
    """The time axis: seconds of the run in which no person had stopped it."""

    start: float
    end: float
    stops: tuple[tuple[float, float], ...] = ()
    """Start and end of the time that is cut out."""
    left: float = LEFT

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
        return self.place(self.elapsed(time))

    def place(self, elapsed_s: float) -> float:
        """Return the horizontal place of a number of seconds on the axis, in px."""
        return self.left + (RIGHT - self.left) * elapsed_s / self.length_s

    def moment(self, elapsed_s: float) -> float:
        """Return the time at `elapsed_s` seconds of the axis."""
        time = self.start + elapsed_s
        for start, end in self.stops:
            if time > start:
                time += end - start
        return time

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield places in px and labels along the axis, all in one unit."""
        unit, unit_s = unit_of(self.length_s)
        for value in ticks(0.0, self.length_s / unit_s, about=8):
            yield self.place(value * unit_s), f"{value:g} {unit}"


def duration(seconds: float) -> str:
    """Return a duration in the largest unit of which it has more than 4."""
    unit, unit_s = unit_of(seconds)
    return f"{seconds / unit_s:.3g} {unit}"


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit for a duration, and its seconds. An axis of more than 4 units has whole ones.
    """
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    return next((unit, unit_s) for unit, unit_s in units if seconds > 4 * unit_s or unit_s == 1)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return about `about` numbers from `low` to `high`, 1, 2 or 5 times a power of 10 apart; of
    numbers that differ in their last bits only the two themselves."""
    rough = high / about - low / about  # high - low may be infinite
    if rough <= max(1e-12 * max(abs(low), abs(high)), 1e-300):
        return [*dict.fromkeys((low, high))]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((it * power for it in (1, 2, 5) if it * power >= rough), 10 * power)
    # A quotient that should be whole may be a little off.
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]

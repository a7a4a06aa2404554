"""The charts of a page about a run, beside the picture of svg.py: loss, hosts, recoveries.

history, story → here → page

What always holds:
1. A chart has a bounded number of shapes, whatever the length of the run.
2. No reader needs the colours: a group of accounts has its own pattern, and each shape a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from xml.etree.ElementTree import Element, SubElement

from elastic_trainer.events.accounts import Accounts
from elastic_trainer.events.event_kind import PAUSE_PARTS
from elastic_trainer.events.ledger import Account, Lane
from elastic_trainer.events.step_table import StepTable
from elastic_trainer.views.bands import pattern_elements
from elastic_trainer.views.story import Recovery
from elastic_trainer.views.svg import LEFT, RIGHT, WIDTH, Axis, duration, ticks, time_ticks
from elastic_trainer.wire.plain import plain

COLUMNS = 396
"""Of a chart: one in 2 px."""
MOST_HOSTS = 60
ROW = 18
GROUPS = {
    "training": (Account.USEFUL, Account.CHECKPOINT, Account.IDLE),
    "redoing": (Account.REDONE,),
    "regrouping": (Account.NOTICING, Account.FORMING, Account.TRANSFER),
    "booting": (Account.BOOTING,),
    "restarting": (Account.RESTARTING,),
    "waiting": (Account.WAITING, Account.STANDBY),
    "stopped": (Account.STOPPED,),
}
"""The groups of accounts that a lane shows. The stylesheet gives each a colour and a pattern."""
GROUP_OF = {account: group for group, accounts in GROUPS.items() for account in accounts}
PATTERNS = {
    "redoing": "M0,6 L6,0", "regrouping": "M0,0 L6,6", "booting": "M3,0 V6",
    "restarting": "M0,3 H6", "waiting": "M2,3 H4", "stopped": "",
}


def patterns() -> Element:
    """Return the patterns of groups and of parts, which all charts of a page share."""
    root = Element("svg", {"width": "0", "height": "0", "class": "patterns", "aria-hidden": "true"})
    defs = SubElement(root, "defs")
    for name, path in PATTERNS.items():
        pattern = SubElement(defs, "pattern", {
            "id": f"fill-{name}", "width": "6", "height": "6", "patternUnits": "userSpaceOnUse"})
        SubElement(pattern, "rect", {"width": "6", "height": "6", "class": f"tone {name}"})
        SubElement(pattern, "path", {"d": path or "M0,0", "class": "hatch"})
    defs.extend(pattern_elements())
    return root


def loss_chart(kept: StepTable) -> Element | None:
    """Draw the loss over the steps: between the lowest and the highest of a column, and the mean;
    None without two finite losses."""
    columns = _columns(kept)
    if len(columns) < 2:
        return None
    low, high = min(it[1] for it in columns), max(it[2] for it in columns)
    first, last = columns[0][0], columns[-1][0]
    height, top, bottom = 220, 12, 186
    half = (high / 2 - low / 2) or 1.0  # high - low may be infinite

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * (step - first) / max(last - first, 1)

    def y(loss: float) -> float:
        return bottom - (bottom - top) * ((loss / 2 - low / 2) / half)

    root = _chart("The loss over the steps", height)
    for value in _levels(low, high):
        _grid(root, y(value), f"{value:.4g}")
    for step in ticks(last - first, about=8):
        _label(root, x(first + step), bottom + 20, f"{first + step:g}", "dim middle")
    upper = [f"{x(step):.1f},{y(most):.1f}" for step, _, most, _ in columns]
    lower = [f"{x(step):.1f},{y(least):.1f}" for step, least, _, _ in reversed(columns)]
    SubElement(root, "polygon", {"class": "envelope", "points": " ".join([*upper, *lower])})
    SubElement(root, "polyline", {"class": "loss", "points": " ".join(
        f"{x(step):.1f},{y(mean):.1f}" for step, _, _, mean in columns)})
    return root


def _columns(kept: StepTable) -> list[tuple[float, float, float, float]]:
    """Return the steps of each column: their middle, and their lowest, highest and mean loss."""
    size = max(1, math.ceil(len(kept) / COLUMNS))
    found, rows = [], kept.items()
    while part := list(islice(rows, size)):
        losses = [row[1] for _, row in part if math.isfinite(row[1])]
        if losses:
            low, high = min(losses), max(losses)
            mean = sum(loss / len(losses) for loss in losses)  # it may round to one beside them
            found.append(((part[0][0] + part[-1][0]) / 2, low, high, min(max(mean, low), high)))
    return found


def _levels(low: float, high: float) -> list[float]:
    """Return about four numbers from `low` to `high`: round ones, or of numbers that differ in
    their last bits only the two themselves."""
    rough = high / 4 - low / 4
    if rough <= max(1e-12 * max(abs(low), abs(high)), 1e-300):
        return [*dict.fromkeys((low, high))]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((it * power for it in (1, 2, 5) if it * power >= rough), 10 * power)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def lanes(accounts: Accounts, axis: Axis) -> tuple[Element, int]:
    """Draw a lane for each host, in the order of their first seconds; return it and the number of
    hosts for which there was no room."""
    hosts = sorted((host for host, life in accounts.lives.items() if life.periods),
                   key=lambda host: (accounts.lives[host].periods[0][1], host))
    shown, left = hosts[:MOST_HOSTS], max(150, LEFT)
    root = _chart("What each host did", ROW * len(shown) + 34)
    for row, host in enumerate(shown):
        y = 4 + ROW * row
        _label(root, left - 8, y + 12, _short(plain(host)), "dim end")
        for group, begin, end in _pixels(accounts.lane(host), axis, left):
            rect = SubElement(root, "rect", {
                "class": f"lane {group}", "x": f"{begin:.1f}", "y": str(y),
                "width": f"{max(0.8, end - begin):.1f}", "height": str(ROW - 4)})
            SubElement(rect, "title").text = f"{plain(host)}: {group}"
    bottom = 4 + ROW * len(shown)
    for seconds, text in time_ticks(axis.length_s):
        _label(root, left + (RIGHT - left) * seconds / axis.length_s, bottom + 16, text,
               "dim middle")
    return root, len(hosts) - len(shown)


def _pixels(lane: Lane, axis: Axis, left: float) -> Iterator[tuple[str, float, float]]:
    """Yield the groups of a lane by place: of several in one column the one that has most of it."""
    width = (RIGHT - left) / COLUMNS
    cells: list[dict[str, float]] = [{} for _ in range(COLUMNS)]
    for account, start, end in lane:
        low, high = (COLUMNS * axis.elapsed(time) / axis.length_s for time in (start, end))
        for cell in range(int(low), min(COLUMNS, int(high) + 1)):
            part = min(high, cell + 1) - max(low, cell)
            group = GROUP_OF[account]
            cells[cell][group] = cells[cell].get(group, 0.0) + part
    before, since = "", 0
    for cell in range(COLUMNS + 1):
        most = max(cells[cell], key=lambda group: cells[cell][group], default="") if (
            cell < COLUMNS) else ""
        if most != before:
            if before:
                yield before, left + since * width, left + cell * width
            before, since = most, cell


def recoveries(longest: Sequence[Recovery], start: float) -> Element:
    """Draw the longest recoveries as bars of their parts."""
    most = max(it.duration_s for it in longest) or 1.0
    left = 210
    root = _chart("The longest recoveries", ROW * len(longest) + 8)
    for row, recovery in enumerate(longest):
        x, y = float(left), 4 + ROW * row
        _label(root, left - 8, y + 12, f"after {duration(recovery.time - start)}, step "
               f"{recovery.step}", "dim end")
        for part, seconds in zip(PAUSE_PARTS, recovery.parts, strict=False):
            width = (RIGHT - 70 - left) * seconds / most
            if width < 0.2:
                continue
            rect = SubElement(root, "rect", {
                "class": f"part {part}", "x": f"{x:.1f}", "y": str(y), "width": f"{width:.1f}",
                "height": str(ROW - 4)})
            SubElement(rect, "title").text = f"{part} {seconds:.3f} s"
            if width > 7 * len(part):
                _label(root, x + width / 2, y + 12, part, "inside middle")
            x += width
        _label(root, x + 6, y + 12, f"{recovery.duration_s:.2f} s", "dim")
    return root


def _short(text: str) -> str:
    return text if len(text) <= 20 else f"{text[:8]}…{text[-11:]}"


def _chart(title: str, height: int) -> Element:
    root = Element("svg", {"class": "chart", "role": "img", "viewBox": f"0 0 {WIDTH} {height}",
                           "aria-label": title})
    SubElement(root, "title").text = title
    return root


def _grid(root: Element, y: float, label: str) -> None:
    SubElement(root, "line", {"class": "grid", "x1": str(LEFT), "x2": str(RIGHT), "y1": f"{y:.1f}",
                              "y2": f"{y:.1f}"})
    _label(root, LEFT - 8, y + 4, label, "dim end")


def _label(root: Element, x: float, y: float, text: str, kind: str) -> None:
    SubElement(root, "text", {"class": kind, "x": f"{x:.1f}", "y": f"{y:.1f}"}).text = text


def legend(groups: Iterable[str]) -> Element:
    """Return the legend of the lanes."""
    root = Element("p", {"class": "legend"})
    for group in groups:
        accounts = ", ".join(account.value for account in GROUPS[group])
        _key(root, f"lane {group}", group if group == accounts else f"{group} ({accounts})",
             accounts)
    return root


def parts_legend() -> Element:
    """Return the legend of the recoveries."""
    root = Element("p", {"class": "legend"})
    for part in PAUSE_PARTS:
        _key(root, f"part {part}", part, part)
    return root


def _key(root: Element, kind: str, text: str, title: str) -> None:
    key = SubElement(root, "span", {"title": title})
    swatch = SubElement(key, "svg", {"width": "14", "height": "14", "aria-hidden": "true"})
    SubElement(swatch, "rect", {"class": kind, "width": "14", "height": "14"})
    swatch.tail = f" {text}"

"""The charts of a page beside the picture of a run: the loss, the hosts, the recoveries.

run → here → page

What always holds: a chart has a bounded number of shapes, whatever the length of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.events.accounts import Pause, Period
from elastic_trainer.events.event_kind import PAUSE_PARTS
from elastic_trainer.events.host_accounts import HostAccounts
from elastic_trainer.events.ledger import Account, Lane
from elastic_trainer.views.drawing import LEFT, RIGHT, Axis, Chart, Key, duration, ticks
from elastic_trainer.views.run_picture import axis_of, parts_legend
from elastic_trainer.wire.plain import plain

COLUMNS = 396
"""Of a chart: one in 2 px."""
MOST_HOSTS = 60
ROW = 18
HOSTS_LEFT, RECOVERIES_LEFT = 150, 210
"""Where the labels of the rows end."""
GROUPS = {
    "training": (Account.USEFUL, Account.CHECKPOINT, Account.IDLE),
    "redoing": (Account.REDONE,),
    "regrouping": (Account.NOTICING, Account.FORMING, Account.TRANSFER),
    "booting": (Account.BOOTING,),
    "restarting": (Account.RESTARTING,),
    "waiting": (Account.WAITING, Account.STANDBY),
    "stopped": (Account.STOPPED,),
}
"""The groups of accounts that a lane shows."""
GROUP_OF = {account: group for group, accounts in GROUPS.items() for account in accounts}


def loss(steps: NDArray[np.int64], losses: NDArray[np.float64]) -> Chart | None:
    """Draw the loss over the steps: between the lowest and the highest of a column, and the mean;
    None without two finite losses."""
    is_finite = np.isfinite(losses)
    if not is_finite.all():
        steps, losses = steps[is_finite], losses[is_finite]
    if len(losses) < 2:
        return None
    starts = np.arange(0, len(losses), -(-len(losses) // COLUMNS))
    counts = np.diff(starts, append=len(losses))
    low, high = np.minimum.reduceat(losses, starts), np.maximum.reduceat(losses, starts)
    # Each loss is divided first: a sum may be infinite. A mean may round to a number beside all.
    mean = np.clip(np.add.reduceat(losses / np.repeat(counts, counts), starts), low, high)
    middle = (steps[starts] + steps[starts + counts - 1]) / 2
    least, most, top, bottom = low.min(), high.max(), 12, 186
    x = LEFT + (RIGHT - LEFT) * (middle - middle[0]) / max(middle[-1] - middle[0], 1)
    half = (most / 2 - least / 2) or 1.0  # most - least may be infinite

    def points(places: NDArray[np.float64], values: NDArray[np.float64]) -> str:
        y = bottom - (bottom - top) * ((values / 2 - least / 2) / half)
        return " L".join(f"{at:.1f},{height:.1f}" for at, height in zip(places, y, strict=True))

    chart = Chart("The loss over the steps", bottom=214)
    for value in ticks(float(least), float(most), about=4):
        chart.level(bottom - (bottom - top) * ((value / 2 - least / 2) / half), f"{value:.4g}")
    first, last = float(middle[0]), float(middle[-1])
    for step in ticks(first, last, about=8):
        chart.text(LEFT + (RIGHT - LEFT) * (step - first) / max(last - first, 1), bottom + 20,
                   f"{step:g}", "dim middle")
    chart.path("envelope", f"M{points(x, high)} L{points(x[::-1], low[::-1])} Z")
    chart.path("loss", f"M{points(x, mean)}")
    return chart


def hosts(accounts: HostAccounts, periods: Sequence[Period]) -> Chart:
    """Draw a lane for each host, in the order of their first seconds."""
    axis = axis_of((periods[0][1], periods[-1][2]), periods, left=HOSTS_LEFT)
    names = sorted((host for host, life in accounts.lives.items() if life.periods),
                   key=lambda host: (accounts.lives[host].periods[0][1], host))
    shown = names[:MOST_HOSTS]
    bottom = 4 + ROW * len(shown)
    chart = Chart("What each host did", bottom=bottom + 30)
    for row, host in enumerate(shown):
        y, name = 4 + ROW * row, plain(host)
        _name(chart, y, HOSTS_LEFT, name if len(name) <= 20 else f"{name[:8]}…{name[-11:]}")
        for group, begin, end in _pixels(accounts.lane(host), axis):
            chart.rect(f"fill {group}", begin, y, max(end, begin + 0.8), y + ROW - 4,
                       f"{name}: {group}")
    for x, label in axis.ticks():
        chart.text(x, bottom + 16, label, "dim middle")
    chart.legends.append(("", [_key(group, ", ".join(it.value for it in them))
                               for group, them in GROUPS.items()]))
    if len(names) > len(shown):
        chart.remarks.append(f"{len(names) - len(shown)} later hosts are not shown.")
    return chart


def _key(group: str, accounts: str) -> Key:
    return Key(group if group == accounts else f"{group} ({accounts})", f"fill {group}",
               title=accounts)


def _pixels(lane: Lane, axis: Axis) -> Iterator[tuple[str, float, float]]:
    """Yield the groups of a lane by place: of several in one column the one that has most of it."""
    width = (RIGHT - axis.left) / COLUMNS
    cells: list[dict[str, float]] = [{} for _ in range(COLUMNS)]
    for account, start, end in lane:
        low, high = (COLUMNS * axis.elapsed(time) / axis.length_s for time in (start, end))
        for cell in range(int(low), min(COLUMNS, int(high) + 1)):
            part = min(high, cell + 1) - max(low, cell)
            group = GROUP_OF[account]
            cells[cell][group] = cells[cell].get(group, 0.0) + part
    before, since = "", 0
    for number, spent in enumerate([*cells, {}]):
        most = max(spent.items(), key=itemgetter(1), default=("",))[0]
        if most != before:
            if before:
                yield before, axis.left + since * width, axis.left + number * width
            before, since = most, number


def recoveries(longest: Sequence[Pause], start: float) -> Chart:
    """Draw the longest recoveries as bars of their parts."""
    most = max(it.duration_s for it in longest) or 1.0
    chart = Chart("The longest recoveries", bottom=ROW * len(longest) + 8)
    for row, recovery in enumerate(longest):
        x, y = float(RECOVERIES_LEFT), 4 + ROW * row
        _name(chart, y, x, f"after {duration(recovery.time - start)}, step {recovery.step}")
        for part, seconds in zip(PAUSE_PARTS, recovery.parts, strict=False):
            width = (RIGHT - 70 - RECOVERIES_LEFT) * seconds / most
            if width < 0.2:
                continue
            chart.rect(f"fill {part}", x, y, x + width, y + ROW - 4, f"{part} {seconds:.3f} s")
            if width > 7 * len(part):
                chart.text(x + width / 2, y + 12, part, "inside middle")
            x += width
        chart.text(x + 6, y + 12, f"{recovery.duration_s:.2f} s", "dim")
    chart.legends.append(("", parts_legend()))
    return chart


def _name(chart: Chart, y: float, left: float, name: str) -> None:
    chart.text(left - 8, y + 12, name, "dim end")

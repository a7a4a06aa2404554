"""The report of a run as one HTML file that needs nothing else, and the sections of a live page.

    elastic-trainer report runs/NAME --html report.html
    elastic-trainer report runs/A runs/B --html both.html

run, accounts, result → here (charts, tables) → page.html → a file; live, web

What always holds:
1. The file has no address, no script and no font of others. Its charts are SVG, its text is text.
2. Every text of the log is escaped, and has no control characters (drawing.template).
3. It is readable in light and dark, on paper, from 400 px of width, and without colours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from heapq import nlargest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from elastic_trainer.events.accounts import Accounts
from elastic_trainer.events.event_kind import PAUSE_PARTS
from elastic_trainer.events.now import Now
from elastic_trainer.events.run import Run
from elastic_trainer.events.sentences import count
from elastic_trainer.events.summary import host_names, read_run
from elastic_trainer.events.told import Telling
from elastic_trainer.views import charts, run_picture
from elastic_trainer.views.drawing import Chart, duration, template
from elastic_trainer.views.status import Status, age, bounded, caption, cells, columns, host_rows
from elastic_trainer.views.tables import Table, side_by_side

if TYPE_CHECKING:
    from elastic_trainer.views.prices import Pricing  # with pydantic: 0.2 s

LONGEST_RECOVERIES, NEWEST_CHECKPOINTS = 12, 10
MOST_ROWS = 200
"""Of the table of hosts."""
SILENT_S = 60.0
"""A run without an event for so long has that on its page: its figures stand still."""
JOB = ("dataset_size", "global_batch", "microbatches", "epochs", "max_steps", "steps", "seed",
       "reduce", "order", "drop_last")
"""The facts of a job that the configuration has."""


class Dim(str):
    """A text that stands back."""

    is_dim = True


@dataclass(frozen=True)
class Shown:
    """One run, as a page shows it."""

    run: Run
    accounts: Accounts
    """Closed."""
    result: Mapping[str, Any]
    """result.json's content. If there are prices, `costs`, or in a live view `costs_unknown`: why
    they are not known."""

    @property
    def hosts(self) -> int:
        return len(host_names(self.accounts))


def read(run_dir: Path) -> Shown:
    """Read a run's event log once."""
    run, result = read_run(run_dir)
    return Shown(run, run.closed(), result)


def page(runs: Sequence[Shown]) -> str:
    """Return the page of a run, or of several: first their figures side by side, then each."""
    names = [f"run {run.result['run']}" for run in runs]
    compared = section("Side by side", side_by_side([run.result for run in runs])) if (
        len(runs) > 1) else ""
    return _render("report", " and ".join(names), compared, [
        (name, [show(run) for show in SECTIONS]) for name, run in zip(names, runs, strict=True)])


def followed(title: str, names: Sequence[str], *, server: str, script: str, is_one_of_several: bool
             ) -> str:
    """Return a page whose sections, of these names, a script fetches."""
    return _render("followed", title, names, server, Markup(script), is_one_of_several)


def section(title: str, *parts: str | Table | Chart) -> str:
    """Return a section of a page: texts, tables and charts."""
    return _render("section", title, parts)


def _render(macro: str, *values: Any) -> str:
    made: str = getattr(template().get_template("page.html").module, macro)(*values)
    return made


def figures(run: Shown) -> str:
    result = run.result
    lost, costs = sum(result["workers_lost"].values()), result.get("costs")
    stall_s, clock = result["stall_per_failure_s"], result.get("clock_set_back")
    facts = [
        ("goodput", f"{result['goodput']:.1%}", "of the time since the first step"),
        ("steps", f"{result['steps']:,}",
         "finished" if result["finished"] else "not finished yet"),
        ("loss", "-" if result["loss"] is None else f"{result['loss']:.4g}", "of the last step"),
        ("workers lost", f"{lost}", count(result["attempts"], "attempt")),
        ("standstill", "-" if stall_s is None else f"{stall_s:.2f} s", "for each failure"),
        ("wall time", duration(result["wall_s"]), count(run.hosts, "host")),
    ]
    if costs:
        facts.append(("cost", f"{costs['cost']:.4g} {costs['currency']}",
                      f"{costs['saved']:.4g} saved"))
    elif unknown := result.get("costs_unknown"):
        facts.append(("cost", "-", unknown))
    if clock:
        facts.append(("clock was set back", f"{clock['by_s']:,.0f} s",
                      f"at {clock['event']}: wall time and goodput are wrong"))
    for name, reason in result.get("segments_left_out", {}).items():
        facts.append(("left out", "-", f"{name} {reason}"))
    return _render("figures", facts)


def picture(run: Shown) -> str:
    """Return the samples a second, the world, and the changes of the fleet."""
    title = f"{run.run.steps.unit.capitalize()} a second, and what happened"
    if run.run.span is None:
        return section(title, "There are no two steps yet.")
    more = [Dim("Recoveries, below, has all parts of the longest pauses.")]
    return section(title, run_picture.draw(run.run, run.accounts.periods.all()),
                   *(more if run.run.recoveries else []))


def loss(run: Shown) -> str:
    return section("Loss", charts.loss(*run.run.steps.kept_losses())
                   or "There are no two losses to draw.")


def hosts(run: Shown) -> str:
    accounts, periods = run.accounts.hosts, run.accounts.periods.all()
    return section("Hosts", charts.hosts(accounts, periods) if accounts.lives and periods
                   else "The log has no hosts.")


def fleet(status: Status, now: Now | None, prices: Pricing | None, moment: float,
          last_event_at: float) -> str:
    """Return the hosts that are there, and the last that have left, at a time of this clock."""
    rows, others = bounded(host_rows(status, now), MOST_ROWS)
    parts: list[str | Table] = []
    if SILENT_S < moment - last_event_at < math.inf and not status.is_over:
        parts.append(Dim(f"The last event was {age(moment - last_event_at)} ago. All figures end "
                         f"there."))
    if not rows:
        return section("The fleet", *parts, "No host is there.")
    heads = columns(status, now, prices)
    parts.append(Table(heads, [*cells(rows, heads, prices, moment)], kind="one-line"))
    return section("The fleet", *parts, *map(Dim, filter(None, (others, caption(now)))))


def accounts(run: Shown) -> str:
    seconds, costs = run.result["host_seconds"], run.result.get("costs")
    whole = sum(seconds.values())
    rows = [(account, spent, f"{spent / (whole or 1.0):.2%}",
             costs["by_account"].get(account, 0.0) if costs else 0.0)
            for account, spent in sorted(seconds.items(), key=lambda item: -item[1])]
    rows.append(("all hosts", whole, "100 %", costs["cost"] if costs else 0.0))
    return section("Where the time of the hosts went", Table(
        ["account", "seconds", "share", *([costs["currency"]] if costs else [])],
        [[account, f"{spent:,.1f} s", share, *([f"{cost:.4g}"] if costs else [])]
         for account, spent, share, cost in rows]))


def recoveries(run: Shown) -> str:
    """Return the longest pauses after a change of the world, and the mean of their parts."""
    pauses = run.run.recoveries
    if not (longest := nlargest(LONGEST_RECOVERIES, pauses)):
        return section("Recoveries", "The world has not changed.")
    means = ", ".join(f"{part} {fmean(seconds):.3f} s" for part, seconds in
                      zip(PAUSE_PARTS, zip(*(it.parts for it in pauses), strict=True), strict=True))
    more = f" The {len(longest)} longest are shown." if len(pauses) > len(longest) else ""
    return section("Recoveries",
                   charts.recoveries(longest, run.accounts.periods.all()[0][1]),
                   f"Recoveries: {len(pauses)}. The mean of their parts: {means}.{more}")


def checkpoints(run: Shown) -> str:
    published = run.run.checkpoints
    if not published:
        return section("Checkpoints", "No checkpoint was published.")
    more = f" The newest {NEWEST_CHECKPOINTS}:" if len(published) > NEWEST_CHECKPOINTS else ""
    rows = [[_clock(it.time), f"{it.step}", f"{it.bytes / 1e6:,.1f}",
             f"{it.uploaded_bytes / 1e6:,.1f}", f"{it.pause_s:.3f} s", f"{it.duration_s:.2f} s"]
            for it in reversed(published[-NEWEST_CHECKPOINTS:])]
    return section(
        "Checkpoints",
        f"{len(published)} published, "
        f"{sum(it.uploaded_bytes for it in published) / 1e6:,.1f} MB uploaded, "
        f"{sum(it.pause_s for it in published):.2f} s of pauses.{more}",
        Table(["time (UTC)", "step", "MB", "uploaded MB", "pause", "upload"], rows))


def events(run: Shown) -> str:
    kept = run.run.told
    told = [*kept.first, *kept.newest]
    if kept.left_out:
        told.insert(len(kept.first), Telling(kept.first[-1].time, "info", (
            f"… {kept.left_out:,} events are left out here; the event log has them …")))
    levels = ", ".join(f"{number} {level}" for level, number in kept.levels.items())
    return section("Events", Dim(levels), _events(told, "events"))


def newest_events(run: Shown) -> str:
    """Return the events in words, the newest first."""
    return section("Events, the newest first", _events(
        [*reversed(run.run.told.newest), *reversed(run.run.told.first)], "events tall"))


def _events(told: Sequence[Telling], kind: str) -> Table:
    return Table([], [[_clock(it.time), "" if it.level == "info" else it.level, it.text]
                      for it in told], kind=kind, levels=[it.level for it in told])


def configuration(run: Shown) -> str:
    known, weights = run.run, run.result["weights_sha256"]
    facts = {**known.options, **known.versions,
             **{name: known.job[name] for name in JOB if known.job.get(name) is not None},
             **({"weights (SHA-256)": weights} if weights else {})}
    return section("Configuration", Table(
        ["option", "value"], [[str(name), _value(value)] for name, value in facts.items()]))


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {it}" for key, it in value.items())
    return str(value)


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


SECTIONS = (figures, picture, loss, hosts, accounts, recoveries, checkpoints, events, configuration)
"""Of a report, in their order."""

"""The report of a run as one HTML file that needs nothing else.

    elastic-trainer report runs/NAME --html report.html
    elastic-trainer report runs/A runs/B --html both.html

history, timeline, story, result → sections (here, charts, svg) → a file

What always holds:
1. The file has no address, no script and no font of others. Its charts are SVG, its text is text.
2. Every text of the log is escaped (ElementTree), and has no control characters (plain).
3. It is readable in light and dark, on paper, from 400 px of width, and without colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring

from elastic_trainer.events.event_kind import PAUSE_PARTS
from elastic_trainer.events.history import History
from elastic_trainer.events.now import Now
from elastic_trainer.events.sentences import count
from elastic_trainer.events.summary import read_log
from elastic_trainer.views import charts, comparison, svg
from elastic_trainer.views.host_rows import age, bounded, caption, cells, columns, host_rows
from elastic_trainer.views.page_style import STYLE
from elastic_trainer.views.prices import Pricing
from elastic_trainer.views.status import Status
from elastic_trainer.views.story import NEWEST_CHECKPOINTS, Story, Telling
from elastic_trainer.views.timeline import Timeline
from elastic_trainer.wire.plain import plain

MOST_ROWS = 200
"""Of the table of hosts."""
SILENT_S = 60.0
"""A run without an event for so long has that on its page: its figures stand still."""
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Run:
    """One run, as a page shows it."""

    history: History
    timeline: Timeline
    story: Story
    result: Mapping[str, Any]
    """result.json's content. If there are prices, `costs`, or in a live view `costs_unknown`: why
    they are not known."""

    @property
    def hosts(self) -> int:
        """The number of hosts so far."""
        lives = self.history.accounts.lives
        return len(lives) + sum(name not in lives for name in self.history.fleet.hosts)


def read(run_dir: Path) -> Run:
    """Read a run's event log once."""
    timeline, story = Timeline(), Story()
    history, result = read_log(run_dir, lambda events: timeline.through(story.through(events)))
    return Run(history, timeline, story, result)


def page(runs: Sequence[Run]) -> str:
    """Return the page of a run, or of several: first their figures side by side, then each."""
    names = " and ".join(f"run {plain(run.result['run'])}" for run in runs)
    root, body = empty(names)
    if len(runs) > 1:
        SubElement(body, "h1").text = names
        body.append(side_by_side(runs))
    for run in runs:
        article = SubElement(body, "article")
        SubElement(article, "h1").text = f"run {plain(run.result['run'])}"
        for section in sections(run):  # extend() would hide an error of the generator
            article.append(section)
    return html_of(root)


def empty(title: str) -> tuple[Element, Element]:
    """Return a page with its style, and its body."""
    root = Element("html", {"lang": "en"})
    head = SubElement(root, "head")
    SubElement(head, "meta", {"charset": "utf-8"})
    SubElement(head, "meta", {"name": "viewport", "content": "width=device-width"})
    SubElement(head, "title").text = title
    SubElement(head, "style").text = STYLE
    body = SubElement(root, "body")
    body.append(charts.patterns())
    return root, body


def html_of(page: Element) -> str:
    """Return a page as the text of a file."""
    return "<!doctype html>\n" + tostring(page, encoding="unicode", method="html") + "\n"


def sections(run: Run) -> Iterable[Element]:
    """Yield the sections of one run."""
    yield figures(run)
    yield picture(run)
    yield loss(run)
    yield hosts(run)
    yield books(run)
    yield recoveries(run)
    yield checkpoints(run)
    yield events(run)
    yield configuration(run)


def side_by_side(runs: Sequence[Run]) -> Element:
    """Return the summaries of several runs as one table."""
    results = [run.result for run in runs]
    section = _section("Side by side")
    table(section, ["", *(f"run {result['run']}" for result in results)],
           ([label, *texts] for label, texts in comparison.rows(results)))
    return section


def figures(run: Run) -> Element:
    """Return the headline figures."""
    result = run.result
    lost, costs = sum(result["workers_lost"].values()), result.get("costs")
    facts = [
        ("goodput", f"{result['goodput']:.1%}", "of the time since the first step"),
        ("steps", f"{result['steps']:,}",
         "finished" if result["finished"] else "not finished yet"),
        ("loss", "-" if result["loss"] is None else f"{result['loss']:.4g}", "of the last step"),
        ("workers lost", f"{lost}", count(result["attempts"], "attempt")),
        ("standstill", "-" if result["stall_per_failure_s"] is None
         else f"{result['stall_per_failure_s']:.2f} s", "for each failure"),
        ("wall time", svg.duration(result["wall_s"]), count(run.hosts, "host")),
    ]
    if costs:
        facts.append(("cost", f"{costs['cost']:.4g} {plain(costs['currency'])}",
                      f"{costs['saved']:.4g} saved"))
    elif unknown := result.get("costs_unknown"):
        facts.append(("cost", "-", plain(unknown)))
    if clock := result.get("clock_set_back"):
        facts.append(("clock was set back", f"{clock['by_s']:,.0f} s",
                      f"at {plain(clock['event'])}: wall time and goodput are wrong"))
    for name, reason in result.get("segments_left_out", {}).items():
        facts.append(("left out", "-", plain(f"{name} {reason}")))
    section = Element("section", {"class": "figures"})
    for label, value, remark in facts:
        card = SubElement(section, "div", {"class": "figure"})
        SubElement(card, "span").text = label
        SubElement(card, "strong").text = value
        SubElement(card, "span").text = remark
    return section


def picture(run: Run) -> Element:
    """Return the samples a second, the world, and the changes of the fleet."""
    section = _section(f"{run.timeline.unit.capitalize()} a second, and what happened")
    if run.timeline.span is None:
        SubElement(section, "p").text = "There are no two steps yet."
        return section
    drawn = fromstring(svg.draw(run.timeline, run.history.books.periods, run.result))
    for element in drawn.iter():  # HTML knows the names of SVG without their namespace
        element.tag = element.tag.removeprefix(SVG)
    for defs in drawn.findall("defs"):  # charts.patterns() has them once for the page
        drawn.remove(defs)
    for name in ("width", "height"):
        drawn.attrib.pop(name, None)
    drawn.set("class", "chart")
    _figure(section).append(drawn)
    if run.timeline.recoveries:
        SubElement(section, "p", {"class": "dim"}).text = (
            "Recoveries, below, has all parts of the longest pauses.")
    return section


def loss(run: Run) -> Element:
    section, chart = _section("Loss"), charts.loss_chart(run.history.kept)
    if chart is None:
        SubElement(section, "p").text = "There are no two losses to draw."
        return section
    _figure(section).append(chart)
    return section


def hosts(run: Run) -> Element:
    """Return a lane for each host."""
    section, periods = _section("Hosts"), run.history.books.periods
    if not run.history.accounts.lives or not periods:
        SubElement(section, "p").text = "The log has no hosts."
        return section
    axis = svg.axis_of((periods[0][1], periods[-1][2]), periods)
    drawn, more = charts.lanes(run.history.accounts, axis)
    _figure(section).append(drawn)
    section.append(charts.legend(charts.GROUPS))
    if more:
        SubElement(section, "p", {"class": "dim"}).text = f"{more} later hosts are not shown."
    return section


def fleet(status: Status, now: Now | None, prices: Pricing | None, moment: float,
          last_event_at: float) -> Element:
    """Return the hosts that are there, and the last that have left, at a time of this clock."""
    section, (rows, others) = _section("The fleet"), bounded(host_rows(status, now), MOST_ROWS)
    if SILENT_S < moment - last_event_at < math.inf and not status.is_over:
        SubElement(section, "p", {"class": "dim"}).text = (
            f"The last event was {age(moment - last_event_at)} ago. All figures end there.")
    if not rows:
        SubElement(section, "p").text = "No host is there."
        return section
    section.set("class", "one-line")
    heads = columns(status, now, prices)
    table(section, heads, cells(rows, heads, prices, moment))
    for line in filter(None, (others, caption(now))):
        SubElement(section, "p", {"class": "dim"}).text = line
    return section


def books(run: Run) -> Element:
    """Return the seconds of all hosts by account."""
    section, seconds = _section("Where the time of the hosts went"), run.result["host_seconds"]
    whole, costs = sum(seconds.values()) or 1.0, run.result.get("costs")
    rows = []
    for account, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        row = [account, f"{spent:,.1f} s", f"{spent / whole:.2%}"]
        rows.append([*row, f"{costs['by_account'].get(account, 0.0):.4g}"] if costs else row)
    last = ["all hosts", f"{sum(seconds.values()):,.1f} s", "100 %"]
    rows.append([*last, f"{costs['cost']:.4g}"] if costs else last)
    table(section, ["account", "seconds", "share",
                     *([plain(costs["currency"])] if costs else [])], rows)
    return section


def recoveries(run: Run) -> Element:
    """Return the longest pauses after a change of the world, and the mean of their parts."""
    section, story = _section("Recoveries"), run.story
    longest = story.longest_recoveries()
    if not longest:
        SubElement(section, "p").text = "The world has not changed."
        return section
    _figure(section).append(charts.recoveries(longest, run.history.books.periods[0][1]))
    section.append(charts.parts_legend())
    means = ", ".join(f"{part} {story.recovered_s[part] / story.recoveries:.3f} s"
                      for part in PAUSE_PARTS)
    SubElement(section, "p").text = (
        f"Recoveries: {story.recoveries}. The mean of their parts: {means}. "
        + (f"The {len(longest)} longest are shown." if story.recoveries > len(longest) else ""))
    return section


def checkpoints(run: Run) -> Element:
    """Return the newest checkpoints, and the sums of all."""
    section, story = _section("Checkpoints"), run.story
    if not story.published:
        SubElement(section, "p").text = "No checkpoint was published."
        return section
    SubElement(section, "p").text = (
        f"{story.published} published, {story.published_bytes / 1e6:,.1f} MB uploaded, "
        f"{story.snapshot_s:.2f} s of pauses."
        + (f" The newest {NEWEST_CHECKPOINTS}:" if story.published > NEWEST_CHECKPOINTS else ""))
    table(section, ["time (UTC)", "step", "MB", "uploaded MB", "pause", "upload"], (
        [_clock(it["time"]), f"{it['step']}", f"{it.get('bytes', 0) / 1e6:,.1f}",
         f"{it.get('uploaded_bytes', 0) / 1e6:,.1f}", f"{it.get('pause_s', 0.0):.3f} s",
         f"{it.get('duration_s', 0.0):.2f} s"] for it in reversed(story.checkpoints)))
    return section


def events(run: Run) -> Element:
    """Return the events in words."""
    section, story = _section("Events"), run.story
    SubElement(section, "p", {"class": "dim"}).text = ", ".join(
        f"{number} {level}" for level, number in story.levels.items())
    rows = SubElement(_scroll(section), "table", {"class": "events"})
    for it in story.first:
        _event(rows, it)
    if story.left_out:
        row = SubElement(rows, "tr")
        SubElement(row, "td", {"colspan": "3"}).text = (
            f"… {story.left_out:,} events are left out here; the event log has them …")
    for it in story.newest:
        _event(rows, it)
    return section


def newest_events(run: Run) -> Element:
    """Return the events in words, the newest first."""
    section = _section("Events, the newest first")
    box = _scroll(section)
    box.set("class", "scroll tall")
    rows = SubElement(box, "table", {"class": "events"})
    for it in (*reversed(run.story.newest), *reversed(run.story.first)):
        _event(rows, it)
    return section


def _event(rows: Element, told: Telling) -> None:
    row = SubElement(rows, "tr", {"class": told.level})
    SubElement(row, "td").text = _clock(told.time)
    SubElement(row, "td").text = "" if told.level == "info" else told.level
    SubElement(row, "td").text = told.text


def configuration(run: Run) -> Element:
    """Return the options, the job and the versions."""
    section, story = _section("Configuration"), run.story
    rows = [[str(name), _value(value)] for name, value in
            [*story.options.items(), *story.versions.items()]]
    rows += [[name, _value(story.job[name])] for name in
             ("dataset_size", "global_batch", "microbatches", "epochs", "max_steps", "steps",
              "seed",
              "reduce", "order", "drop_last") if story.job.get(name) is not None]
    if run.result["weights_sha256"]:
        rows.append(["weights (SHA-256)", str(run.result["weights_sha256"])])
    table(section, ["option", "value"], rows)
    return section


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {it}" for key, it in value.items())
    return str(value)


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def _section(title: str) -> Element:
    section = Element("section")
    SubElement(section, "h2").text = title
    return section


def _figure(section: Element) -> Element:
    return SubElement(section, "figure")


def _scroll(section: Element) -> Element:
    return SubElement(section, "div", {"class": "scroll"})


def table(section: Element, head: Sequence[str], rows: Iterable[Sequence[str]],
          links: Sequence[str] = ()) -> None:
    """Add a table; `links`: the address behind the first cell of each row."""
    found = SubElement(_scroll(section), "table")
    top = SubElement(found, "tr")
    for cell in head:
        SubElement(top, "th").text = plain(cell)
    for number, texts in enumerate(rows):
        row = SubElement(found, "tr")
        for cell in texts:
            SubElement(row, "td").text = plain(cell)
        if links:
            link = SubElement(row[0], "a", {"href": links[number]})
            link.text, row[0].text = row[0].text, None

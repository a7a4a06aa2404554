"""Runs as they go on: the sections of a run's page, a row for each of several runs, their metrics.

event log, now.json → run, status → Live (each run), Overview (all) → web

What always holds:
1. It only reads, and only when somebody looks: without a reader it costs nothing.
2. A reader asks for the sections that are newer than it has.
3. Charts and costs of a long run take time, so they are drawn and added up for at most 1/REST and
   1/COSTS_REST of the time. Texts and tables follow each event, whatever the number of hosts that
   have gone.
4. The figures are those of the report of the events so far: they end at the last event. Events
   after run.finished are on no account.
5. A counter never falls, until the log is replaced. The time since the last step of a world is on
   no counter: the next event says what it was.
6. Each run has a name of its own: in the page's addresses, and as the label `run` of its metrics.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elastic_trainer.config import ConfigError
from elastic_trainer.events.now import Now, NowReader
from elastic_trainer.events.run import Run
from elastic_trainer.events.segments import Reader, first_line
from elastic_trainer.events.summary import figures_of, hosts_of
from elastic_trainer.views import page
from elastic_trainer.views.metrics import METRICS, Sample, samples, text_of
from elastic_trainer.views.prices import Pricing, costs
from elastic_trainer.views.status import Status, host_rows, status_of
from elastic_trainer.views.tables import Table

REST = 50
"""A chart that took a second is drawn again after 50 s."""
COSTS_REST = 200
"""Costs that took a second are added up again after 200 s. 10,000 hosts take 0.3 s."""
LEAST_S = 0.5
"""The log is read at most twice a second, whatever the number of readers."""

TEXTS: Mapping[str, Callable[[page.Shown], str]] = {
    "figures": page.figures, "checkpoints": page.checkpoints, "events": page.newest_events}
CHARTS: Mapping[str, Callable[[page.Shown], str]] = {
    "picture": page.picture, "loss": page.loss, "hosts": page.hosts, "recoveries": page.recoveries}


class Sections:
    """The sections of a page that is followed: each has a version, which rises when it changes."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[int, str]] = {}
        self._version = 0

    def show(self, name: str, html: str) -> None:
        """Replace a section, if it is another one."""
        if html != self._shown.get(name, (0, ""))[1]:
            self._version += 1
            self._shown[name] = self._version, html

    def newer(self, than: int) -> dict[str, Any]:
        """Return the version, and the HTML of the sections that are newer than a version."""
        return {"version": self._version, "sections": {
            name: html for name, (version, html) in self._shown.items() if version > than}}


class Live:
    """A run that is being read. Threads share it."""

    sections = ("figures", "picture", "fleet", "loss", "hosts", "recoveries", "checkpoints",
                "events")
    """In the order of the page."""

    def __init__(self, run_dir: Path, prices: Pricing | None = None, *, is_copy: bool = False):
        """`is_copy`: the folder is that of a mirror."""
        self.run_dir, self.is_copy, self.prices = run_dir, is_copy, prices
        self.name = run_dir.resolve().name
        self.title = f"run {self.name}"
        self._now_reader = NowReader(run_dir, is_copy=is_copy)
        self._now: Now | None = None
        self._lock = threading.Lock()
        self._sections = Sections()
        self._read_at = self._drawn_at = self._priced_at = self._fleet_of = -math.inf
        self._drawing_s = self._pricing_s = 0.0
        self._begin()

    def _begin(self) -> None:
        run = Run()
        self.status = replace(status_of(run), run=self.name)
        self._log, self._first_line, self._was_lost = Reader(self.run_dir), "", False
        self._run = page.Shown(run, run.closed(is_drawn=False), {})
        self._costs: dict[str, Any] = {}
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}
        """The highest value of each counter so far, by its name and labels."""
        self._last_event_at = -math.inf
        self._are_texts_old = self._are_charts_old = self._are_costs_old = True

    def newer(self, than: int) -> dict[str, Any]:
        """Return the sections that are newer than a version, as HTML by name, and the version."""
        with self._lock:
            self._read()
            self._draw()
            return self._sections.newer(than)

    def known(self) -> tuple[Status, Mapping[str, Any]]:
        """Return the run's status, and result.json's content so far."""
        with self._lock:
            self._read()
            return self.status, self._run.result

    def samples(self) -> list[Sample]:
        with self._lock:
            self._read()
            return list(self._rising(self._samples()))

    def _samples(self) -> Iterator[Sample]:
        run = self._run.run
        newest = run.steps.newest
        moments = {
            "last_event": self._last_event_at, "last_step": newest.end if newest else None,
            "last_checkpoint": max((it.time for it in run.checkpoints[-1:]), default=None),
            "heartbeats": self._now.time if self._now else None}
        return samples(
            self.status, self._run.result,
            {f"{name}_timestamp_seconds": moment for name, moment in moments.items()
             if moment is not None and math.isfinite(moment)},
            {"checkpoints_total": len(run.checkpoints), "hosts": self._run.hosts,
             **run.told.levels},
            run.booked(), host_rows(self.status, self._now), self.prices)

    def _rising(self, found: Iterator[Sample]) -> Iterator[Sample]:
        """Yield the samples; a counter has at least the value that it had."""
        for name, labels, value in found:
            if METRICS[name][0] == "counter":
                key = name, tuple(labels.values())
                value = self._counted[key] = max(value, self._counted.get(key, value))
            yield name, labels, value

    def _read(self) -> None:
        now = time.monotonic()
        if now - self._read_at < LEAST_S and self._run.result:  # else the log could not be read
            return
        self._read_at, has_news, self._now = now, False, self._now_reader.read()
        if self._is_replaced():
            self._begin()
        for event in self._log.events():
            has_news = True
            self._last_event_at = max(self._last_event_at, event["time"])
            self._run.run.read(event)
        if has_news or not self._run.result:
            self._are_texts_old = self._are_charts_old = self._are_costs_old = True
            run = self._run.run
            accounts = run.closed(is_drawn=False)
            self._run = replace(self._run, accounts=accounts, result={
                **figures_of(run, accounts), "run": run.name or self.name,
                "segments_left_out": self._log.left_out})
            status = status_of(run, self._log.malformed)
            self.status = replace(status, run=status.run or self.name)
        self._price()
        self._run = replace(self._run, result={**self._run.result, **self._costs})

    def _is_replaced(self) -> bool:
        """True if the folder has the log of another run now."""
        line = first_line(self.run_dir)
        is_another = bool(line and self._first_line) and line != self._first_line
        self._first_line = self._first_line or line
        # It asks twice, because a segment may be sealed within a question. A mirror has no newest
        # segment for a moment, so a copy must be shorter at two reads in a row.
        is_lost = self._log.is_lost() and self._log.is_lost()
        was_lost, self._was_lost = self._was_lost, is_lost
        return is_another or (is_lost and (was_lost or not self.is_copy))

    def _price(self) -> None:
        """Add the costs up if they are old, and it is not too soon."""
        now = time.monotonic()
        if self.prices is None or not self._are_costs_old or (
                now - self._priced_at < COSTS_REST * self._pricing_s):
            return
        started = time.thread_time()
        result = {**self._run.result, "hosts": hosts_of(self._run.accounts)}
        try:
            self._costs = {"costs": costs(result, self.prices)}
        except ConfigError as error:  # also while AWS is being asked
            self._costs = {"costs_unknown": str(error)}
        self._are_costs_old, self._are_texts_old = "costs" not in self._costs, True
        self._pricing_s, self._priced_at = time.thread_time() - started, now

    def _draw(self) -> None:
        if self._are_texts_old:
            for name, section in TEXTS.items():
                self._sections.show(name, section(self._run))
            self._are_texts_old = False
        if self._fleet_of != self._read_at:  # not again for each reader
            self._fleet_of = self._read_at
            self._sections.show("fleet", page.fleet(
                self.status, self._now, self.prices, time.time(), self._last_event_at))
        now = time.monotonic()
        if self._are_charts_old and now - self._drawn_at >= REST * self._drawing_s:
            started = time.thread_time()
            run = replace(self._run, accounts=self._run.run.closed())
            for name, section in CHARTS.items():
                self._sections.show(name, section(run))
            self._drawing_s, self._drawn_at = time.thread_time() - started, time.monotonic()
            self._are_charts_old = False


HEADS = ("run", "state", "steps", "loss", "samples/s", "workers", "goodput")


class Overview:
    """All runs. Threads share it."""

    sections = ("runs",)

    def __init__(self, runs: Sequence[Live]):
        self.runs = {live.name: live for live in runs}
        self.title = f"{len(runs)} runs"
        self._lock = threading.Lock()
        self._sections = Sections()

    def newer(self, than: int) -> dict[str, Any]:
        """Return the table of the runs, if it is newer than a version, and the version."""
        known = {name: live.known() for name, live in self.runs.items()}
        with self._lock:
            self._sections.show("runs", table(known))
            return self._sections.newer(than)

    def metrics(self) -> str:
        found = {name: live.samples() for name, live in self.runs.items()}
        named = Counter(live.status.run for live in self.runs.values())
        labels = {name: live.status.run if named[live.status.run] == 1 else name
                  for name, live in self.runs.items()}
        return text_of({labels[name]: of_run for name, of_run in found.items()})


def open_runs(run_dirs: Sequence[Path], prices: Pricing | None = None,
              copies: Collection[Path] = ()) -> list[Live]:
    """Return the runs of these folders. `copies`: those of them that are of mirrors. Raises
    ConfigError if two have one name."""
    runs = [Live(run_dir, prices, is_copy=run_dir in copies) for run_dir in run_dirs]
    for name, number in Counter(live.name for live in runs).items():
        if number > 1:
            raise ConfigError(f"{number} of the folders are named {name}, which is the name of a "
                              f"run on the page. Watch them one by one, each with its own --bind.")
    return runs


def table(known: Mapping[str, tuple[Status, Mapping[str, Any]]]) -> str:
    """Return a row for each run, by its name, with a link to its page."""
    rows, links = list[list[str]](), list[str]()
    currencies = [result["costs"]["currency"] for _, result in known.values() if "costs" in result]
    for name, (status, result) in known.items():
        speed, due = status.samples_per_s, status.steps_due
        costs = result.get("costs")
        rows.append([
            name, status.phase, f"{status.steps}/{'?' if due is None else due}",
            "-" if status.loss is None else f"{status.loss:.4g}",
            "-" if speed is None else f"{speed:.1f}", f"{status.size}", f"{result['goodput']:.1%}",
            *([f"{costs['cost']:.4g}" if costs else "-"] if currencies else [])])
        links.append(f"run/{quote(name, safe='')}/")
    return page.section("", Table([*HEADS, *(f"cost ({it})" for it in currencies[:1])], rows,
                                  links=links))

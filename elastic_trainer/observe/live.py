"""A run's story as it goes on: the sections of its page, drawn again when something has happened.

event log, now.json → history, timeline, story, status → here → web, overview

What always holds:
1. It only reads, and only when somebody looks: without a reader it costs nothing.
2. A reader asks for the sections that are newer than it has.
3. Charts of a long run take time to draw, so they are drawn at most for 1/REST of the time. Texts
   and tables follow each event.
4. Events behind run.finished are on no account, as in result.json.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from elastic_trainer.config import ConfigError
from elastic_trainer.observe import page
from elastic_trainer.observe.history import History, UntilFinished
from elastic_trainer.observe.host_rows import host_rows
from elastic_trainer.observe.metrics import Sample, samples
from elastic_trainer.observe.now import Now, NowReader
from elastic_trainer.observe.prices import Pricing, costs
from elastic_trainer.observe.report import result_of
from elastic_trainer.observe.sections import Sections
from elastic_trainer.observe.segments import Reader
from elastic_trainer.observe.status import Status, fold
from elastic_trainer.observe.story import Story
from elastic_trainer.observe.timeline import Timeline

REST = 50
"""A chart that took a second is drawn again after 50 s."""
LEAST_S = 0.5
"""The log is read at most twice a second, whatever the number of readers."""

TEXTS: Mapping[str, Callable[[page.Run], Element]] = {
    "figures": page.figures, "checkpoints": page.checkpoints, "events": page.newest_events}
CHARTS: Mapping[str, Callable[[page.Run], Element]] = {
    "picture": page.picture, "loss": page.loss, "hosts": page.hosts, "recoveries": page.recoveries}


class Live:
    """A run that is being read. Threads share it."""

    sections = ("figures", "picture", "fleet", "loss", "hosts", "recoveries", "checkpoints",
                "events")
    """In the order of the page."""

    def __init__(self, run_dir: Path, prices: Pricing | None = None, *, is_copy: bool = False):
        """`is_copy`: the folder is that of a mirror."""
        self.name, self.prices = run_dir.resolve().name, prices
        self.title = f"run {self.name}"
        self.status = Status(run=self.name)
        self._log, self._now_reader = Reader(run_dir), NowReader(run_dir, is_copy=is_copy)
        self._now: Now | None = None
        self._run = page.Run(History(run=self.name), Timeline(), Story(), {})
        self._gate = UntilFinished()
        self._lock = threading.Lock()
        self._sections = Sections()
        self._read_at = self._drawn_at = self._fleet_of = -REST * 1e6
        self._cost_s, self._last_event_at = 0.0, -math.inf
        self._are_texts_old = self._are_charts_old = True
        self._spent = 0.0
        """The highest cost so far: a counter must not fall, also when a host turns out to have gone
        with its attempt."""

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
        """Return the samples of the run's metrics."""
        with self._lock:
            self._read()
            story, history = self._run.story, self._run.history
            newest = history.kept.get(history.next - 1)
            moments = {
                "last_event": self._last_event_at, "last_step": newest[3] if newest else None,
                "last_checkpoint": story.checkpoints[-1]["time"] if story.checkpoints else None,
                "heartbeats": self._now.time if self._now else None}
            return [*samples(
                self.status, self._run.result,
                {f"{name}_timestamp_seconds": moment for name, moment in moments.items()
                 if moment is not None and math.isfinite(moment)},
                {"checkpoints_total": story.published, **story.levels},
                host_rows(self.status, self._now), self.prices, self._spent)]

    def _read(self) -> None:
        """Take what is new."""
        now = time.monotonic()
        if now - self._read_at < LEAST_S and self._run.result:  # else the log could not be read
            return
        self._read_at, has_news, self._now = now, False, self._now_reader.read()
        for event in self._log.events():
            has_news = True
            self._last_event_at = max(self._last_event_at, event["time"])
            self.status = fold(self.status, event)
            for part in (self._run.timeline, self._run.story):
                part.take(event)
            for through in self._gate.take(event):
                self._run.history.read(through)
        if has_news or not self._run.result:
            self._are_texts_old = self._are_charts_old = True
            result = result_of(self._run.history)
            self._run = replace(self._run, result=result | self._costs(result))

    def _costs(self, result: Mapping[str, Any]) -> dict[str, Any]:
        if self.prices is None:
            return {}
        try:
            found = costs(result, self.prices)
        except ConfigError as error:
            return {"costs_unknown": str(error)}
        self._spent = max(self._spent, found["cost"])
        return {"costs": found}

    def _draw(self) -> None:
        """Draw what is old."""
        if self._are_texts_old:
            self._show(TEXTS)
            self._are_texts_old = False
        if self._fleet_of != self._read_at:  # not again for each reader
            self._fleet_of = self._read_at
            self._sections.show("fleet", page.fleet(self.status, self._now, self.prices,
                                                    time.time()))
        now = time.monotonic()
        if self._are_charts_old and now - self._drawn_at >= REST * self._cost_s:
            started = time.thread_time()
            self._show(CHARTS)
            self._cost_s, self._drawn_at = time.thread_time() - started, time.monotonic()
            self._are_charts_old = False

    def _show(self, sections: Mapping[str, Callable[[page.Run], Element]]) -> None:
        for name, section in sections.items():
            self._sections.show(name, section(self._run))

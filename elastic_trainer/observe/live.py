"""A run's story as it goes on: the sections of its page, drawn again when something has happened.

event log, now.json → history, timeline, story, status → here → web

What always holds:
1. It only reads, and only when somebody looks: without a reader it costs nothing.
2. A section has a version, which rises when its content changes. A reader asks for what is newer
   than it has.
3. Charts of a long run take time to draw, so they are drawn at most for 1/REST of the time. Texts
   and tables follow each event.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

from elastic_trainer.observe import page
from elastic_trainer.observe.history import History, UntilFinished
from elastic_trainer.observe.metrics import text_of
from elastic_trainer.observe.now import NowReader
from elastic_trainer.observe.report import result_of
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
SECTIONS = ("figures", "picture", "fleet", "loss", "hosts", "recoveries", "checkpoints", "events")
"""In the order of the page."""


class Live:
    """A run that is being read. Threads share it."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.status = Status(run=run_dir.name)
        self._log, self._now = Reader(run_dir), NowReader(run_dir)
        self._run = page.Run(History(run=run_dir.name), Timeline(), Story(), {})
        self._gate = UntilFinished()
        self._lock = threading.Lock()
        self._read_at = self._drawn_at = -REST * 1e6
        self._cost_s, self._last_event_at = 0.0, -math.inf
        self._are_charts_old = True
        self._html: dict[str, str] = {}
        self._versions: dict[str, int] = {}
        self._version = 0

    def newer(self, than: int) -> dict[str, Any]:
        """Return the sections that are newer than a version, as HTML by name, and the version."""
        with self._lock:
            self._refresh()
            return {"version": self._version, "sections": {
                name: html for name, html in self._html.items() if self._versions[name] > than}}

    def metrics(self) -> str:
        """Return the run in Prometheus's text format."""
        with self._lock:
            self._refresh()
            story, history = self._run.story, self._run.history
            newest = history.kept.get(history.next - 1)
            moments = {
                "last_event": self._last_event_at, "last_step": newest[3] if newest else None,
                "last_checkpoint": story.checkpoints[-1]["time"] if story.checkpoints else None}
            return text_of(
                self.status, self._run.result,
                {f"{name}_timestamp_seconds": moment for name, moment in moments.items()
                 if moment is not None and math.isfinite(moment)},
                {"checkpoints_total": story.published, **story.levels})

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._read_at < LEAST_S:
            return
        self._read_at = now
        if self._read() or not self._html:
            self._are_charts_old = True
            self._run = replace(self._run, result=result_of(self._run.history))
            self._draw(TEXTS)
        self._show("fleet", page.fleet(self.status, self._now.read(), None, time.time()))
        if self._are_charts_old and now - self._drawn_at >= REST * self._cost_s:
            started = time.thread_time()
            self._draw(CHARTS)
            self._cost_s, self._drawn_at = time.thread_time() - started, time.monotonic()
            self._are_charts_old = False

    def _read(self) -> bool:
        """Take the new events; True if there are any."""
        has_news = False
        for event in self._log.events():
            has_news = True
            self._last_event_at = max(self._last_event_at, event["time"])
            self.status = fold(self.status, event)
            for part in (self._run.timeline, self._run.story):
                part.take(event)
            for through in self._gate.take(event):
                self._run.history.read(through)
        return has_news

    def _draw(self, sections: Mapping[str, Callable[[page.Run], Element]]) -> None:
        for name, section in sections.items():
            self._show(name, section(self._run))

    def _show(self, name: str, section: Element) -> None:
        html = tostring(section, encoding="unicode", method="html")
        if html != self._html.get(name):
            self._version += 1
            self._html[name], self._versions[name] = html, self._version

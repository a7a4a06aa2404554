"""Several runs that are watched at once: a row for each, and the metrics of all.

live (each run) → here → web

What always holds:
1. Each run has a name of its own: in the page's addresses, and as the label `run` of its metrics.
2. It reads the logs, and draws nothing of a run.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elastic_trainer.config import ConfigError
from elastic_trainer.views import page
from elastic_trainer.views.live import Live, Sections
from elastic_trainer.views.metrics import text_of
from elastic_trainer.views.prices import Pricing
from elastic_trainer.views.status import Status
from elastic_trainer.views.tables import Table

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
        """Return the metrics of all runs in Prometheus's text format."""
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

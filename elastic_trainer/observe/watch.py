"""Show a run: progress, the fleet, the last events, and the command that kills a worker.

    elastic-trainer watch runs/NAME

Where it stands: event log → Reader → status → here: a panel, or lines if there is no terminal.

What always holds:
1. It only reads, so it can be started, stopped and killed at any time, during the run or later.
2. A line that is being written is read when it is whole. A malformed line is left out.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_trainer.observe.segments import Reader
from elastic_trainer.observe.status import RECENT_EVENTS, Status, fold
from elastic_trainer.wire.plain import plain

REFRESH_S = 0.25
PLAIN_LINE_S = 10.0
PLAIN_LINE_PART = 0.1


def plain_line(status: Status) -> str:
    """Return the status in one line."""
    facts = [f"{name} {value}" for name, value in _facts(status)]
    shows_kill = status.kill_command and status.phase == "training"
    kill = f"; try it: {status.kill_command}" if shows_kill else ""
    refusal = f"; {status.refusal}" if status.refusal else ""
    return plain(f"run {status.run}, {status.phase}: {', '.join(facts)}{refusal}{kill}")


def panel(status: Status) -> Panel:
    """Lay the status out for a terminal."""
    table = Table.grid(padding=(0, 3), expand=False)
    facts = _facts(status)
    table.add_row(*(Text(name, style="dim") for name, _ in facts))
    table.add_row(*(Text(value, style="bold") for _, value in facts))
    bar = Padding(ProgressBar(total=status.steps_due or 1, completed=status.steps), 0)
    recent = [Text(line) for line in status.recent]
    kill = [Text(f"try it: {status.kill_command}", style="yellow")] if status.kill_command else []
    refusal = [Text(status.refusal, style="red")] if status.refusal else []
    title = Text(plain(f"{status.run}: {status.phase}"))
    return Panel(Group(bar, table, *refusal, Text(), *recent, Text(), *kill),
                 title=title, title_align="left")


def _facts(status: Status) -> list[tuple[str, str]]:
    speed, eta_s = status.samples_per_s, status.eta_s
    return [
        ("step", f"{status.steps}/{'?' if status.steps_due is None else status.steps_due}"),
        ("loss", "-" if status.loss is None else f"{status.loss:.4f}"),
        ("samples/s", "-" if speed is None else f"{speed:.1f}"),
        ("workers", f"{status.size}"),
        ("ETA", "-" if eta_s is None else f"{int(eta_s) // 60}:{int(eta_s) % 60:02d}"),
        ("generation", f"{status.generation}"),
        ("attempt", f"{status.attempt}"),
        *([("skipped lines", f"{status.skipped}")] if status.skipped else []),
    ]


def is_line_due(printed: Status, now: Status, since_s: float, is_last: bool) -> bool:
    """True if a line about the run is due, `since_s` after the last one.

    A line is due when training begins, every 10 s, every 10 % of the run, and at its end.
    """
    if now == printed or (now.is_over and printed.is_over):
        return False
    part_steps = (now.steps_due or math.inf) * PLAIN_LINE_PART
    begins = now.phase == "training" and printed.generation == 0
    is_far = now.steps - printed.steps >= part_steps
    return is_last or now.is_over or begins or is_far or since_s >= PLAIN_LINE_S


class Watch:
    """Show a run's progress from a thread of its own, until stop().

    A terminal gets a panel at the bottom. Other outputs get a line for each event, and lines about
    the run.
    """

    def __init__(self, run_dir: str | Path, console: Console | None = None):
        self.console = console or Console()
        self.status = Status(run=Path(run_dir).name)
        self._log = Reader(Path(run_dir))
        self._printed, self._printed_at = self.status, time.monotonic()
        self._news: list[str] = []
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._show, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Show the newest status once more, and end."""
        self._is_stopped.set()
        self._thread.join()

    def wait(self) -> None:
        """Return when the run is over."""
        while not self.status.is_over and self._thread.is_alive():
            self._thread.join(REFRESH_S)

    def _show(self) -> None:
        if self.console.is_terminal:
            with Live(panel(self.status), console=self.console, auto_refresh=False) as live:
                self._follow(lambda: live.update(panel(self.status), refresh=True))
        else:
            self._follow(self._print_news)

    def _follow(self, show: Callable[[], None]) -> None:
        is_last = False
        while True:
            self._read()
            show()
            if is_last:
                return
            is_last = self._is_stopped.wait(REFRESH_S)

    def _read(self) -> None:
        status = self.status
        for event in self._log.events():
            before, status = status, fold(status, event)
            self._news += status.recent[-1:] if status.recent is not before.recent else []
        self.status = replace(status, skipped=self._log.malformed)

    def _print_news(self) -> None:
        for line in self._news[-RECENT_EVENTS:]:  # at the start the log may have many
            self._print(line)
        self._news.clear()
        now = time.monotonic()
        if is_line_due(self._printed, self.status, now - self._printed_at,
                       is_last=self._is_stopped.is_set()):
            self._print(plain_line(self.status))
            self._printed, self._printed_at = self.status, now

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def watch(run_dir: str | Path, console: Console | None = None) -> None:
    """Show a run until it is over or the user presses Ctrl-C: `elastic-trainer watch`."""
    shown = Watch(run_dir, console)
    shown.start()
    try:
        shown.wait()
    except KeyboardInterrupt:
        pass
    finally:
        shown.stop()

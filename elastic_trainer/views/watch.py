"""Show a run: progress, the fleet, the last events, and the command that kills a worker.

    elastic-trainer watch runs/NAME

Where it stands: event log → Reader → status → here: a panel, or lines if there is no terminal.

What always holds:
1. It only reads, so it can be started, stopped and killed at any time, during the run or later.
2. A line that is being written is read when it is whole. A malformed line is left out.
3. The terminal is as it was before, also after Ctrl-C, an exception and SIGTERM.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment, SegmentLines
from rich.text import Text

from elastic_trainer.events.now import Now, NowReader
from elastic_trainer.events.run import Run
from elastic_trainer.events.segments import Reader
from elastic_trainer.events.sigterm import ended_by_sigterm
from elastic_trainer.events.told import Told
from elastic_trainer.views.prices import Pricing
from elastic_trainer.views.status import (
    PHASE,
    RECENT_EVENTS,
    HostRow,
    Status,
    age,
    bounded,
    caption,
    cells,
    columns,
    host_rows,
    line_of,
    status_of,
)
from elastic_trainer.views.tables import grid
from elastic_trainer.wire.plain import plain

if TYPE_CHECKING:
    from elastic_trainer.views.far import FarRun

REFRESH_S = 0.25
FULL_REFRESH_S = 1.0
"""Of the view: a picture of 24 lines takes 5 to 10 ms of CPU."""
NARROW = 100
"""A terminal of fewer columns has no room for both what a worker does and the type of its host."""
FRAME_LINES, FRAME_COLUMNS = 2, 4
"""Of the panel around the view."""
HEAD_LINES = 3
"""The heads of the hosts' columns, the count of the others, and the space above the events."""
FEWEST_ROWS = 2
"""Of hosts, before there is room for an event."""
PLAIN_LINE_S = 10.0
PLAIN_LINE_PART = 0.1
MOST_NEWS = 1000
"""Without a terminal, the lines that are printed at once are at most the last ones of so many."""


def kill_hint(status: Status, *, is_far: bool = False) -> str:
    """Return how to try out a recovery; "" if no command kills a worker from here."""
    shows = status.kill_command and status.phase == "training" and not is_far
    return f"try it: {status.kill_command}" if shows else ""


def plain_line(status: Status, *, is_far: bool = False) -> str:
    facts = [f"{name} {value}" for name, value in _facts(status)]
    hint = kill_hint(status, is_far=is_far)
    kill = f"; {hint}" if hint else ""
    refusal = f"; {status.refusal}" if status.refusal else ""
    return plain(f"run {status.run}, {status.phase}: {', '.join(facts)}{refusal}{kill}")


def view(watch: Watch, moment: float) -> Panel:
    """Lay the run out for a whole terminal: the facts, the hosts, the events, how to go on.

    In a small terminal events go first, the oldest of them.
    """
    status = watch.status
    hint = "    ".join(filter(None, [kill_hint(status, is_far=watch.far is not None),
                                     f"Ctrl-C: {watch.ctrl_c}"]))
    last = Text(plain(hint), style="yellow", no_wrap=True, overflow="ellipsis")
    room = max(0, watch.console.height - FRAME_LINES - 1)
    facts = [*_facts(status), ("checkpoint", _checkpoint(status, moment)),
             ("goodput", "-" if watch.goodput is None else f"{watch.goodput:.1%}")]
    columns = Columns([Text.assemble((f"{name} ", "dim"), (value, "bold"))
                       for name, value in facts], padding=(0, 3))
    bar = Padding(ProgressBar(total=status.steps_due or 1, completed=status.steps), 0)
    troubles = [it.trouble for it in (watch.far, watch.prices) if it]
    refusal = [Text(plain(line), style="red") for line in (status.refusal, *troubles) if line]
    head = _rendered(watch.console, bar, columns, *refusal)
    copied = caption(watch.now)
    free = room - len(head) - HEAD_LINES - bool(copied)
    told = status.recent[-max(0, free - FEWEST_ROWS):] if free > FEWEST_ROWS else ()
    rows, others = bounded(host_rows(status, watch.now), max(FEWEST_ROWS, free - len(told)))
    more = [Text(line, style="dim") for line in (others, copied) if line]
    recent = [Text(line, no_wrap=True, overflow="ellipsis") for line in told]
    body = _rendered(watch.console, _hosts(watch, rows, moment), *more, Text(), *recent)
    lines = [*head, *body][:room]
    return Panel(Group(SegmentLines(lines, new_lines=True), last),
                 title=Text(plain(f"{status.run}: {status.phase}")), title_align="left",
                 height=min(watch.console.height, FRAME_LINES + len(lines) + 1))


def _rendered(console: Console, *parts: RenderableType) -> list[list[Segment]]:
    width = max(1, console.width - FRAME_COLUMNS)
    return console.render_lines(Group(*parts), console.options.update(width=width, height=None))


def _hosts(watch: Watch, rows: list[HostRow], moment: float) -> RenderableType:
    table = grid([])
    heads = columns(watch.status, watch.now, watch.prices)
    if PHASE in heads and watch.console.width < NARROW:
        heads = [name for name in heads if name != "type"]
    for name in heads:
        # If there is no room, the column that may wrap is cut first. Its texts do not wrap.
        table.add_column(name, no_wrap=name != PHASE, overflow="ellipsis",
                         min_width=10 if name == "state" else None)
    for texts in cells(rows, heads, watch.prices, moment):
        table.add_row(*(Text(plain(text), no_wrap=True, overflow="ellipsis") for text in texts))
    return table


def _checkpoint(status: Status, moment: float) -> str:
    return "-" if status.checkpoint is None else f"{age(moment - status.checkpoint[1])} ago"


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
        *([("left out", ", ".join(status.left_out))] if status.left_out else []),
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
    the run. `far`: the run that `run_dir` is a copy of. `ctrl_c`: what the key does.
    """

    def __init__(self, run_dir: str | Path, console: Console | None = None,
                 prices: Pricing | None = None, far: FarRun | None = None, ctrl_c: str = "quit"):
        self.console, self.prices, self.far = console or Console(), prices, far
        self.ctrl_c = ctrl_c
        self._run = Run(name=Path(run_dir).name, told=Told(most_newest=MOST_NEWS))
        self.status = status_of(self._run)
        self.goodput: float | None = None
        self.now: Now | None = None
        self._now_reader = NowReader(Path(run_dir), is_copy=far is not None)
        self._drawn_at = -math.inf
        self.failure: OSError | None = None
        """Why the view has ended before stop(): the log could not be read."""
        self._log = Reader(Path(run_dir))
        self._printed, self._printed_at = self.status, time.monotonic()
        # At the start the log may have many.
        self._news: deque[str] = deque(maxlen=RECENT_EVENTS)
        self._is_stopped, self._has_ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._show, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Show the newest status once more, and end."""
        self._is_stopped.set()
        self._thread.join()

    def wait(self) -> None:
        """Return when the run is over."""
        # Not by Thread.join: when a signal interrupts it, Python 3.11 takes the thread for ended
        # (threading.py, _wait_for_tstate_lock), and the cursor would stay hidden.
        while not self.status.is_over and not self._has_ended.wait(REFRESH_S):
            pass

    def _show(self) -> None:
        try:
            if self.console.is_terminal:
                with Live(self.picture(), console=self.console, auto_refresh=False) as live:
                    self._follow(lambda: self._redraw(live))
            else:
                self._follow(self._print_news)
        except OSError as error:
            self.failure = error
        finally:
            self._has_ended.set()

    def _redraw(self, live: Live) -> None:
        """Draw at the end, and otherwise once in FULL_REFRESH_S."""
        now = time.monotonic()
        if self._is_stopped.is_set() or now - self._drawn_at >= FULL_REFRESH_S:
            self._drawn_at = now
            live.update(self.picture(), refresh=True)

    def picture(self) -> Panel:
        self.goodput, self.now = self._run.goodput, self._now_reader.read()
        return view(self, time.time())

    def _follow(self, show: Callable[[], None]) -> None:
        is_last = False
        while True:
            self._read()
            show()
            if is_last:
                return
            is_last = self._is_stopped.wait(REFRESH_S)

    def _read(self) -> None:
        before = len(self._run.told)
        self._run.read_all(self._log.events())
        self._news += map(line_of, self._run.told.last(len(self._run.told) - before))
        left_out = self._log.left_out
        self._news += [f"{name} {reason}, and its events are left out."
                       for name, reason in left_out.items() if name not in self.status.left_out]
        self.status = status_of(self._run, self._log.malformed, left_out)

    def _print_news(self) -> None:
        for line in self._news:
            self._print(line)
        self._news = deque(maxlen=MOST_NEWS)  # the news of a bucket come all at once
        now = time.monotonic()
        if is_line_due(self._printed, self.status, now - self._printed_at,
                       is_last=self._is_stopped.is_set()):
            self._print(plain_line(self.status, is_far=self.far is not None))
            self._printed, self._printed_at = self.status, now

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def watch(run_dir: str | Path, console: Console | None = None,
          prices: Pricing | None = None, far: FarRun | None = None) -> None:
    """Show a run until it is over or the user presses Ctrl-C: `elastic-trainer watch`.

    Raises OSError if the log cannot be read.
    """
    shown = Watch(run_dir, console, prices, far)
    if far:
        far.follow(tells=not shown.console.is_terminal)
    with ended_by_sigterm():
        try:
            shown.start()
            shown.wait()
        except KeyboardInterrupt:
            pass
        finally:
            shown.stop()
    if shown.failure:
        raise shown.failure

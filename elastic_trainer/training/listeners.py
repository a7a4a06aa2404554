"""What gets a worker's events: its event log, the user's listeners, the timeline, a person.

launch → here → events → the user's listener (train(listeners=…)); without a launcher: a bar on a
terminal, a line every 10 s elsewhere (notebook, file)

What always holds:
1. A listener that raises is called again at the next event.
2. Its exception is logged with its traceback, on stderr and as `worker.listener_failed`: the 1st,
   10th, 100th … time. So a listener that always fails does not fill the event log.
3. These exceptions pass: those of a broken world (a listener may use Horovod's
   collectives), and what is no `Exception` (sys.exit(), Ctrl-C).

What it does not do: show workers, hosts and attempts (watch.py does, for a run under a launcher).
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod.common.exceptions import HorovodInternalError

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.events.log import Events
from elastic_trainer.events.log_shipper import LogShipper, shares_runs
from elastic_trainer.events.trace import FOLDER, Trace
from elastic_trainer.host import stacks
from elastic_trainer.host.own import OursFirst
from elastic_trainer.options import Words
from elastic_trainer.world.collectives import PeersLost

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

Listener = Callable[[str, dict[str, Any]], None]


class Guarded:
    """A listener of the user's, and how often it has raised."""

    def __init__(self, listener: Listener, events: Events):
        self.listener, self.events = listener, events
        self.failures = 0

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        try:
            self.listener(event, facts)
        except (HorovodInternalError, PeersLost):
            raise
        except Exception:
            self.failures += 1
            if str(self.failures).rstrip("0") == "1":
                self._log(event, traceback.format_exc())

    def _log(self, event: str, error: str) -> None:
        name = getattr(self.listener, "__qualname__", type(self.listener).__qualname__)
        print(f"elastic-trainer: the listener {name} raised at {event} (failure {self.failures}). "
              f"The run goes on, and the listener is called again.\n{error}", file=sys.stderr)
        self.events.emit("worker.listener_failed", listener=name, heard=event,
                         failures=self.failures, error=error)


def opened(launch: Launch, listeners: Sequence[Listener] = ()) -> tuple[Launch, Events]:
    """Open the event log of a worker that has its place. Returns the launch without the folder of
    the run where this host does not share it. Raises ConfigError."""
    shipper = None
    if launch.driver and not shares_runs(launch):
        if not launch.store:
            raise ConfigError(
                f"the host {launch.host} does not share the folder of runs ({launch.run_dir}), and "
                "no store is given. Use --store s3://bucket/prefix, or put --runs-dir on a disk "
                "that all share.")
        shipper, launch = LogShipper(launch), replace(launch, run_dir=None)
    stacks.answer()
    events = Events(launch.run_dir, shipper=shipper, run=launch.run, attempt=launch.attempt,
                    worker=launch.worker or launch.host)
    events.listeners += [Guarded(listener, events) for listener in listeners]
    return launch, events


def open_timeline(launch: Launch, events: Events, words: Words) -> None:
    """Let a worker write its timeline: into the folder of the run, or into a new one on a host that
    does not share it. Raises ConfigError."""
    if launch.run_dir:
        folder = launch.run_dir / FOLDER
    elif launch.driver:
        folder = Path(tempfile.mkdtemp(prefix=f"elastic-trainer-{FOLDER}-"))
    else:
        raise ConfigError(f"{words.name}: timeline is on, but there is no folder for it. Give "
                          f"run_dir=, or timeline=False.")
    events.trace = Trace(folder)
    events.listeners.append(events.trace.note)
    events.emit("worker.timeline_opened", folder=str(folder))


# --- a person ------------------------------------------------------------------------------------

LINE_S = 10.0
"""The seconds between two lines if stderr is no terminal: in a notebook or a log of CI."""


class Shown:
    """A listener that shows steps, loss, speed and the time left."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        # Here: a launched worker shows nothing, and would load rich for nothing.
        with OursFirst():
            import rich.console
            import rich.progress
        self.console, self._rich = console or rich.console.Console(stderr=True), rich.progress
        self._clock, self.steps_due, self.first = clock, 0, 0
        self.bar: Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._samples = self._samples_shown = 0
        self._began_at = self._shown_at = self._clock()
        self._is_first = True

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        match event:
            case "worker.generation_started":
                self.first = facts["step"]
            case "job.described":
                self._begin(facts["steps"])
            case "worker.step_committed" if not facts.get("repeated"):
                self._samples += facts["samples"]
                self._show(facts["step"] + 1, facts["loss"])
            case "run.finished":
                self._end(facts)

    def close(self) -> None:
        """End the bar, so that a traceback is printed below it."""
        if self.bar is not None:
            self.bar.stop()

    def _begin(self, steps_due: int) -> None:
        self.steps_due, self._began_at = steps_due, self._clock()
        self._shown_at = self._began_at
        if self.console.is_terminal:
            rich, text = self._rich, self._rich.TextColumn
            self.bar = rich.Progress(
                text("step"), rich.MofNCompleteColumn(), rich.BarColumn(),
                text("loss {task.fields[loss]:.4f}"), text("{task.fields[speed]:.0f} samples/s"),
                rich.TimeRemainingColumn(), console=self.console)
            self._task = self.bar.add_task("", total=steps_due, completed=self.first,
                                           loss=float("nan"), speed=0.0)
            self.bar.start()

    def _show(self, steps: int, loss: float) -> None:
        if self.bar is not None:
            speed = self._samples / max(1e-9, self._clock() - self._began_at)
            self.bar.update(self._task, completed=steps, loss=loss, speed=speed)
            return
        now = self._clock()
        if not self._is_first and now - self._shown_at < LINE_S:
            return
        speed = (self._samples - self._samples_shown) / max(1e-9, now - self._shown_at)
        left_s = (self.steps_due - steps) * (now - self._began_at) / max(1, steps - self.first)
        self._print(f"step {steps}/{self.steps_due}, loss {loss:.4f}, {speed:.1f} samples/s, "
                    f"about {left_s:.0f} s left")
        self._is_first, self._shown_at, self._samples_shown = False, now, self._samples

    def _end(self, facts: dict[str, Any]) -> None:
        self.close()
        self._print(f"finished: {facts['steps']} steps, {facts['samples']} samples, "
                    f"loss {facts['loss']:.4f}, {self._clock() - self._began_at:.0f} s")

    def _print(self, line: str) -> None:
        self.console.print(f"elastic-trainer: {line}", markup=False, highlight=False,
                           soft_wrap=True)


@contextmanager
def shown(events: Events) -> Iterator[None]:
    progress = Shown()
    events.listeners.append(Guarded(progress, events))
    try:
        yield
    finally:
        progress.close()

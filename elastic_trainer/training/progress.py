"""Show the progress of a run without a launcher (`python my_train.py`) on stderr.

events of this worker → here → a bar on a terminal, a line every 10 s elsewhere (notebook, file)

What it does not do: show workers, hosts and attempts (watch.py does, for a run under a launcher).
"""

from __future__ import annotations

import time
from typing import Any

import rich.progress
from rich.console import Console

LINE_S = 10.0
"""The seconds between two lines if stderr is no terminal: in a notebook or a log of CI."""


class Progress:
    """A listener that shows steps, loss, speed and the time left."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True)
        self.steps_due = self.first = 0
        self.bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._samples = self._samples_shown = 0
        self._began_at = self._shown_at = time.monotonic()
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
        self.steps_due, self._began_at = steps_due, time.monotonic()
        self._shown_at = self._began_at
        if self.console.is_terminal:
            text = rich.progress.TextColumn
            self.bar = rich.progress.Progress(
                text("step"), rich.progress.MofNCompleteColumn(), rich.progress.BarColumn(),
                text("loss {task.fields[loss]:.4f}"), text("{task.fields[speed]:.0f} samples/s"),
                rich.progress.TimeRemainingColumn(), console=self.console)
            self._task = self.bar.add_task("", total=steps_due, completed=self.first,
                                           loss=float("nan"), speed=0.0)
            self.bar.start()

    def _show(self, steps: int, loss: float) -> None:
        if self.bar is not None:
            speed = self._samples / max(1e-9, time.monotonic() - self._began_at)
            self.bar.update(self._task, completed=steps, loss=loss, speed=speed)
            return
        now = time.monotonic()
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
                    f"loss {facts['loss']:.4f}, {time.monotonic() - self._began_at:.0f} s")

    def _print(self, line: str) -> None:
        self.console.print(f"elastic-trainer: {line}", markup=False, highlight=False,
                           soft_wrap=True)

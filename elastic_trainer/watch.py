"""Show a run while it goes: progress, the fleet, the last events in words, and how to kill a worker.

    elastic-trainer watch runs/x

Where it stands: the event log → Reader → fold → Picture → a live panel, or plain lines where there is no terminal.

What always holds:
1. It only reads, so it can be started, stopped and killed at any time, beside the run or long after it.
2. A picture is a pure function of the events so far; what is shown is one of the picture and the time.
3. A line that is still being written is read when it is whole; one that makes no sense is passed over.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_trainer.config import ConfigError
from elastic_trainer.edge.plain import plain
from elastic_trainer.schedule import Schedule
from elastic_trainer.schema import UNREADABLE
from elastic_trainer.segments import Reader

REFRESH_S = 0.25
MAX_WORDS = 1000
"""Characters of one event that are shown: the text of an error may have 50,000."""
PLAIN_LINE_S = 10.0
PLAIN_LINE_PART = 0.1
SPEED_STEPS = 20
RECENT_EVENTS = 6

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Living:
    """A worker whose process runs."""

    host: str
    pid: int
    """For one on another host that of our ssh to it, until the worker stands ready and says its own."""
    over_ssh: bool = False
    is_ready: bool = False


@dataclass(frozen=True, kw_only=True)
class Picture:
    """All that is shown of a run."""

    run: str = ""
    phase: str = "booting"
    """booting, training, pausing, restarting, or at the end finished, failed, interrupted."""
    attempt: int = 0
    generation: int = 0
    size: int = 0
    steps: int = 0
    """Committed, in the kept history."""
    steps_due: int | None = None
    global_batch: int = 0
    loss: float | None = None
    speed: tuple[tuple[float, int], ...] = ()
    """(time, samples) of the last steps."""
    workers: Mapping[str, Living] = field(default_factory=dict)
    refusal: str = ""
    """Why AWS gives the fleet no more machines, while it does not."""
    skipped: int = 0
    """Lines of the event log that were left out, torn or malformed."""
    recent: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        return self.phase in ("finished", "failed", "interrupted")

    @property
    def samples_per_s(self) -> float | None:
        """Samples between the first and the last of the steps in `speed`, pauses included; None before two."""
        if len(self.speed) < 2 or self.speed[-1][0] <= self.speed[0][0]:
            return None
        return sum(samples for _, samples in self.speed[1:]) / (self.speed[-1][0] - self.speed[0][0])

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the present speed."""
        if self.steps_due is None or not self.samples_per_s or not self.global_batch:
            return None
        return (self.steps_due - self.steps) * self.global_batch / self.samples_per_s

    @property
    def kill_command(self) -> str | None:
        """The command that kills a worker: one that stands ready, if any does. None where nobody's pid is known."""
        known = [worker for worker in self.workers.values() if worker.is_ready or not worker.over_ssh]
        worker = next((worker for worker in reversed(known) if worker.is_ready), known[-1] if known else None)
        if worker is None:
            return None
        return f"ssh {worker.host} kill -9 {worker.pid}" if worker.over_ssh else f"kill -9 {worker.pid}"


def fold(picture: Picture, event: Event) -> Picture:
    """Return the picture after one more event. One that it cannot read leaves it as it was."""
    try:
        picture = _FOLDS.get(event["event"], lambda same, _: same)(picture, event)
        words = in_words(event, picture)
    except UNREADABLE:
        return picture
    if words is None:
        return picture
    clock = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
    return replace(picture, recent=(*picture.recent, f"{clock} {plain(words)[:MAX_WORDS]}")[-RECENT_EVENTS:])


def in_words(event: Event, picture: Picture) -> str | None:
    """Say what happened to a person; None where it is not worth a line."""
    match event["event"]:
        case "run.started":
            return f"run {event.get('run', '')} started"
        case "attempt.started":
            return f"attempt {event['attempt']} started"
        case "attempt.ended":
            return f"attempt {event['attempt']} ended: {event['verdict'].replace('_', ' ')}"
        case "discovery.launch_refused":
            return f"{_refused(event)}. {plain(event['remedy'])}"
        case "discovery.launch_refusal_ended":
            return f"AWS refuses no more machines: {event['machines']} of {event['wanted']} are there"
        case "driver.host_added":
            return f"host {event['host']}: here, with {_count(event['slots'], 'slot')}"
        case "driver.host_removed":
            return f"host {event['host']}: taken away"
        case "driver.worker_started":
            return f"host {event['host']}: worker {event['pid']} boots"
        case "driver.worker_ready":
            worker = picture.workers[event["worker"]]
            return f"host {worker.host}: worker {worker.pid} ready after {event['boot_s']:.1f} s"
        case "standby.booted":
            return f"a worker stands by, booted in {event['boot_s']:.0f} s"
        case "standby.failed":
            return f"a standby failed while {event['state']}"
        case "driver.worker_gone":
            ending = _ending(event)
            return ending and f"host {event['host']}: worker {event['pid']} {ending}"
        case "driver.worker_evicted":
            worker = picture.workers[event["worker"]]
            return f"host {worker.host}: worker {worker.pid} given up: {event['reason']}"
        case "driver.clock_differs":
            return f"host {event['host']}: its clock is {event['off_s']:+.0f} s off"
        case "worker.steps_slower":
            return f"steps take {event['step_s']:.2f} s, not {event['best_s']:.2f}: a host or a line is slow"
        case "worker.steps_as_before":
            return f"steps take {event['step_s']:.2f} s again"
        case "worker.generation_started":
            workers = f"generation {event['generation']}: {_count(event['size'], 'worker')}"
            if event["source"] == "memory":
                return f"{workers}, paused {event['pause_s']:.2f} s"
            source = (
                "fresh weights" if event["source"] == "fresh" else f"the checkpoint of step {event['step']}"
            )
            return f"{workers}, starts from {source}"
        case "worker.step_redone":
            return f"step {event['step']} was in flight and is done again"
        case "state.checkpoint_published":
            return f"checkpoint of step {event['step']} published"
        case "state.checkpoint_failed":
            return f"checkpoint of step {event['step']} FAILED: {event['error']}"
        case "state.upload_stalled":
            what = f"{event['worker']} waits {event['still_s']:.0f} s for {event['what']} to be taken"
            return f"checkpoint of step {event['step']}: {what}"
        case "state.checkpoint_refused":
            return f"a checkpoint is damaged and passed over: {event['error']}"
        case "state.checkpoint_restored":
            return f"checkpoint of step {event['step']} restored"
        case "state.store_unavailable":
            return f"the store is asked again: {event['error']}"
        case "state.checkpoint_overdue":
            return f"the last good checkpoint is {event['age_s']:.0f} s old"
        case "state.fenced":
            return f"STOPPED: {event['error']}"
        case "run.finished":
            return f"finished: {event['steps']} steps, {event['samples']} samples, loss {event['loss']:.4f}"
    return None


def plain_line(picture: Picture) -> str:
    """Say the picture in one line."""
    facts = [f"{name} {value}" for name, value in _facts(picture)]
    kill = f"; try it: {picture.kill_command}" if picture.kill_command and picture.phase == "training" else ""
    refusal = f"; {picture.refusal}" if picture.refusal else ""
    return plain(f"run {picture.run}, {picture.phase}: {', '.join(facts)}{refusal}{kill}")


def panel(picture: Picture) -> Panel:
    """Lay the picture out for a terminal."""
    table = Table.grid(padding=(0, 3), expand=False)
    facts = _facts(picture)
    table.add_row(*(Text(name, style="dim") for name, _ in facts))
    table.add_row(*(Text(value, style="bold") for _, value in facts))
    bar = Padding(ProgressBar(total=picture.steps_due or 1, completed=picture.steps), 0)
    recent = [Text(words) for words in picture.recent]
    kill = [Text(f"try it: {picture.kill_command}", style="yellow")] if picture.kill_command else []
    refusal = [Text(picture.refusal, style="red")] if picture.refusal else []
    title = Text(plain(f"{picture.run}: {picture.phase}"))
    return Panel(Group(bar, table, *refusal, Text(), *recent, Text(), *kill), title=title, title_align="left")


class Watch:
    """Show a run's progress from a thread of its own, until stop().

    On a terminal a panel at the bottom; elsewhere a line for each event, and one of the picture when training begins,
    every 10 s or 10 % of the run, and at its end.
    """

    def __init__(self, run_dir: str | Path, console: Console | None = None):
        self.console = console or Console()
        self.picture = Picture(run=Path(run_dir).name)
        self._log = Reader(Path(run_dir))
        self._printed, self._printed_at = self.picture, time.monotonic()
        self._news: list[str] = []
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._show, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Show what there is once more, and end."""
        self._is_stopped.set()
        self._thread.join()

    def wait(self) -> None:
        """Return when the run is over."""
        while not self.picture.is_over and self._thread.is_alive():
            self._thread.join(REFRESH_S)

    def _show(self) -> None:
        if self.console.is_terminal:
            with Live(panel(self.picture), console=self.console, auto_refresh=False) as live:
                self._follow(lambda: live.update(panel(self.picture), refresh=True))
        else:
            self._follow(self._print_when_due)

    def _follow(self, show: Callable[[], None]) -> None:
        is_last = False
        while True:
            picture = self.picture
            for event in self._log.events():
                before, picture = picture, fold(picture, event)
                self._news += picture.recent[-1:] if picture.recent is not before.recent else []
            self.picture = replace(picture, skipped=self._log.malformed)
            show()
            if is_last:
                return
            is_last = self._is_stopped.wait(REFRESH_S)

    def _print_when_due(self) -> None:
        for words in self._news[-RECENT_EVENTS:]:  # more at once are an older run's
            self._print(words)
        self._news.clear()
        if self.picture == self._printed or (self.picture.is_over and self._printed.is_over):
            return
        is_over = self._is_stopped.is_set() or self.picture.is_over
        is_far = (
            self.picture.steps - self._printed.steps >= (self.picture.steps_due or math.inf) * PLAIN_LINE_PART
        )
        is_long = time.monotonic() - self._printed_at >= PLAIN_LINE_S
        is_new = self.picture.phase == "training" and self._printed.generation == 0
        if is_over or is_far or is_long or is_new:
            self._print(plain_line(self.picture))
            self._printed, self._printed_at = self.picture, time.monotonic()

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


def _fold_attempt_started(picture: Picture, event: Event) -> Picture:
    phase = "restarting" if picture.generation else "booting"
    return replace(picture, phase=phase, attempt=int(event["attempt"]), size=0, speed=())


def _fold_attempt_ended(picture: Picture, event: Event) -> Picture:
    return replace(picture, phase=_PHASE_AFTER[event["verdict"]], workers={})


def _fold_worker_started(picture: Picture, event: Event) -> Picture:
    worker = Living(host=event["host"], pid=int(event["pid"]), over_ssh=bool(event.get("over_ssh")))
    return replace(picture, workers={**picture.workers, event["worker"]: worker})


def _fold_worker_ready(picture: Picture, event: Event) -> Picture:
    worker = picture.workers[event["worker"]]
    worker = replace(worker, is_ready=True, pid=int(event.get("pid") or worker.pid))
    return replace(picture, workers={**picture.workers, event["worker"]: worker})


def _fold_worker_gone(picture: Picture, event: Event) -> Picture:
    return replace(
        picture, workers={name: it for name, it in picture.workers.items() if name != event["worker"]}
    )


def _fold_generation_formed(picture: Picture, event: Event) -> Picture:
    return replace(picture, phase="pausing") if picture.phase == "training" else picture


def _fold_job_described(picture: Picture, event: Event) -> Picture:
    keys = ("dataset_size", "global_batch", "shards", "epochs", "seed", "max_steps")
    try:
        steps_due = Schedule(**{key: event[key] for key in keys}, drop_last=bool(event.get("drop_last"))).steps
    except ConfigError:
        return picture
    return replace(picture, steps_due=steps_due, global_batch=int(event["global_batch"]))


def _fold_generation_started(picture: Picture, event: Event) -> Picture:
    generation, size, step = int(event["generation"]), int(event["size"]), int(event["step"])
    picture = replace(picture, attempt=int(event["attempt"]), generation=generation, size=size)
    return replace(picture, phase="training", steps=step)


def _fold_step_committed(picture: Picture, event: Event) -> Picture:
    speed = picture.speed
    if not event.get("repeated"):
        speed = (*speed, (float(event["time"]), int(event["samples"])))[-SPEED_STEPS:]
    steps = int(event["step"]) + 1
    return replace(picture, phase="training", steps=steps, loss=float(event["loss"]), speed=speed)


def _fold_launch_refused(picture: Picture, event: Event) -> Picture:
    return replace(picture, refusal=_refused(event))


def _fold_run_finished(picture: Picture, event: Event) -> Picture:
    return replace(picture, phase="finished", steps=int(event["steps"]), loss=float(event["loss"]))


_PHASE_AFTER = {
    "finished": "finished",
    "failed": "restarting",
    "user_error": "failed",
    "interrupted": "interrupted",
}
_FOLDS: dict[str, Callable[[Picture, Event], Picture]] = {
    "run.started": lambda picture, event: replace(picture, run=str(event["run"]), phase="booting"),
    "attempt.started": _fold_attempt_started,
    "attempt.ended": _fold_attempt_ended,
    "discovery.launch_refused": _fold_launch_refused,
    "discovery.launch_refusal_ended": lambda picture, event: replace(picture, refusal=""),
    "driver.worker_started": _fold_worker_started,
    "driver.worker_ready": _fold_worker_ready,
    "driver.worker_gone": _fold_worker_gone,
    "driver.generation_formed": _fold_generation_formed,
    "job.described": _fold_job_described,
    "worker.generation_started": _fold_generation_started,
    "worker.step_committed": _fold_step_committed,
    "run.finished": _fold_run_finished,
}


def _facts(picture: Picture) -> list[tuple[str, str]]:
    speed, eta_s = picture.samples_per_s, picture.eta_s
    return [
        ("step", f"{picture.steps}/{'?' if picture.steps_due is None else picture.steps_due}"),
        ("loss", "-" if picture.loss is None else f"{picture.loss:.4f}"),
        ("samples/s", "-" if speed is None else f"{speed:.1f}"),
        ("workers", f"{picture.size}"),
        ("ETA", "-" if eta_s is None else f"{int(eta_s) // 60}:{int(eta_s) % 60:02d}"),
        ("generation", f"{picture.generation}"),
        ("attempt", f"{picture.attempt}"),
        *([("skipped lines", f"{picture.skipped}")] if picture.skipped else []),
    ]


def _ending(event: Event) -> str | None:
    """Say how a worker went; None where that is nothing new."""
    code = event["exit_code"]
    match event["reason"]:
        case "crashed":
            name = _signal_name(code)
            return f"killed ({name})" if name else f"crashed (exit code {code})"
        case "frozen":
            return "was silent for too long and is given up"
        case "boot_failed":
            return f"failed to boot ({_signal_name(code) or f'exit code {code}'})"
        case "boot_timeout":
            return "took too long to boot"
        case "finished" | "evicted":
            return None
    return str(event["reason"]).replace("_", " ")


def _refused(event: Event) -> str:
    """Say that AWS refuses machines."""
    have = f"{event['machines']} of {event['wanted']} are there"
    return plain(f"AWS refuses machines, {have}: {event['says']} ({event['code']})")


def _signal_name(exit_code: int | None) -> str | None:
    """Name the signal of an exit code: -9 as Python says it, 137 as a shell does."""
    number = 0 if exit_code is None else -exit_code if exit_code < 0 else exit_code - 128
    return signal.Signals(number).name if number in set(signal.Signals) else None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

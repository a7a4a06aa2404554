"""Sum a run up: what was trained, what the fleet's changes cost, where every second went.

    elastic-trainer report runs/x

Where it stands: events.jsonl → here → result.json and a table for a person.

What always holds:
1. The books close: booting + training + pausing + restarting + stopped = wall_s, to the rounding.
2. goodput is between 0 and 1, and a step that was done twice counts once.
3. result.json is replaced whole: a reader sees the old one or the new one. One that says "finished" is of a run that has
   not been resumed with more steps since.

What it does not do: judge. Events that contradict each other are summed up all the same; see `verify`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.edge.plain import plain
from elastic_trainer.schema import UNREADABLE
from elastic_trainer.segments import Reader
from elastic_trainer.state.modes import write_text
from elastic_trainer.step_table import StepTable

if TYPE_CHECKING:
    from rich.console import Console

RESULT_FILE = "result.json"
POLLER_GONE_S = 10.0
"""A poller that runs has written its table anew within two seconds."""
PHASES = ("booting", "training", "pausing", "restarting", "stopped")
LOST_REASONS = ("crashed", "differed", "frozen", "cut_off", "stuck", "evicted", "boot_failed", "boot_timeout",
                "exit_timeout", "machine_failed", "join_failed")

Event = Mapping[str, Any]


def summarize(events: Iterable[Event]) -> dict[str, Any]:
    """Return the content of result.json: a pure function of a run's events, which are read once.

    steps, samples, loss: of the kept history, without the steps that a start from a checkpoint dropped.
    weights_sha256: None until the run has finished.
    steps_redone: steps thrown away in flight and done again, and committed steps that such a start dropped.
    wall_s: from the first event to run.finished, or to the last event where the run has not finished.
    pauses: the duration_s of each worker.pause_ended: from the end of the last finished step, less one normal step, to
        the end of the next. In lines of an older version the pause_s of each generation but the first of an attempt.
    books: wall_s cut into what the run was doing,
        booting_s: until the first generation of all starts;
        training_s: steps, kept or not, and the time between them;
        pausing_s: the pauses;
        restarting_s: from an attempt's last sign of training to the first generation of the next;
        stopped_s: from the last event of an invocation to the start of the next, by a person.
    goodput: the sum of step_s of the kept steps / (wall_s - booting_s - stopped_s). Pauses, restarts, steps
        done twice and time between steps lower it; the first boot does not. 0 when no training began.
    hosts: the workers of each, and their seconds booting and working (from ready until gone, or the end).
    """
    story = _Story()
    for event in _until_finished(events):
        story.read(event)
    story.close()
    samples, loss, useful_s = 0, None, 0.0
    for step in story.kept.steps():
        step_samples, loss, step_s = story.kept.get(step) or (0, None, 0.0)
        samples, useful_s = samples + int(step_samples), useful_s + step_s
    books = {f"{phase}_s": seconds for phase, seconds in story.books.items()}
    wall_s = sum(books.values())
    trained_s = wall_s - books["booting_s"] - books["stopped_s"]
    finished = story.finished or {}
    return {
        "run": story.run,
        "finished": story.finished is not None,
        "steps": finished.get("steps", len(story.kept)),
        "samples": finished.get("samples", samples),
        "loss": finished.get("loss", loss),
        "weights_sha256": finished.get("weights_sha256"),
        "attempts": len(story.attempts),
        "generations": story.generations,
        "steps_redone": len(story.redone) + story.rolled_back,
        "steps_rolled_back": story.rolled_back,
        "wall_s": round(wall_s, 3),
        "goodput": round(min(1.0, useful_s / trained_s), 4) if trained_s > 0 else 0.0,
        "books": {key: round(seconds, 3) for key, seconds in books.items()},
        "pauses": [round(pause_s, 3) for pause_s in story.pauses],
        "workers_lost": dict(story.lost),
        "hosts": {name: host.summary() for name, host in sorted(story.hosts.items())},
    }


def summarize_log(run_dir: str | Path, through: Callable[[Iterable[Event]], Iterable[Event]] = iter) -> dict[str, Any]:
    """Return the content of result.json of a run's event log, read once; `through` sees the events, too.

    skipped_lines: torn and malformed ones, which were left out.
    """
    log = Reader(Path(run_dir))
    result = summarize(through(log.events(to_the_end=True)))
    return result | {"skipped_lines": log.malformed}


def write_result(run_dir: str | Path) -> dict[str, Any]:
    """Write the run's result.json whole, and return its content. A disk that does not take it is said: all of it can be
    made again from the diary, and a finished run has not failed for it."""
    folder = Path(run_dir)
    result = summarize_log(folder)
    temporary = folder / f".{RESULT_FILE}.{os.getpid()}"
    try:
        write_text(temporary, json.dumps(result, indent=2) + "\n")
        temporary.replace(folder / RESULT_FILE)
    except OSError as error:
        print(f"elastic-trainer: {folder / RESULT_FILE} cannot be written: {error}. Make room; the same run, called "
              f"again, writes it.", file=sys.stderr)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return result


def take_back_result(run_dir: str | Path, steps: int) -> None:
    """Write result.json again if it says that the run finished, but not with so many steps: it was made longer."""
    try:
        result = json.loads(Path(run_dir, RESULT_FILE).read_text())
        is_of_another_length = result.get("finished") and result.get("steps") != steps
    except (FileNotFoundError, RecursionError, *UNREADABLE):
        return
    if is_of_another_length:
        write_result(run_dir)


def print_summary(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Print what summarize() returned as a table for a person."""
    from rich.console import Console  # here, because every worker imports this module and none prints
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    table = Table(title=Text(plain(f"run {result['run']}")), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in summary_rows(result):
        table.add_row(label, Text(plain(text)))
    console.print(table)


def summary_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Say a result in pairs of a label and a text."""
    books, pauses, wall_s = result["books"], result["pauses"], result["wall_s"]
    spent = [(key.removesuffix("_s"), seconds) for key, seconds in books.items() if seconds]
    shares = [f"{phase} {seconds:.1f} s ({seconds / wall_s:.1%})" for phase, seconds in spent]
    lost = ", ".join(f"{count} {reason}" for reason, count in result["workers_lost"].items())
    rows = [
        ("training", f"{'finished' if result['finished'] else 'not finished'}: {result['steps']} steps"),
        ("samples", f"{result['samples']}"),
        ("loss", "none" if result["loss"] is None else f"{result['loss']:.4f}"),
        ("goodput", f"{result['goodput']:.1%}"),
        ("wall time", f"{wall_s:.1f} s: {', '.join(shares)}"),
        ("fleet", f"generations: {result['generations']}, attempts: {result['attempts']}"),
        ("workers lost", lost or "none"),
        ("pauses", f"{len(pauses)}, the longest {max(pauses):.2f} s" if pauses else "none"),
        ("steps done again", f"{result['steps_redone']}"),
    ]
    if result.get("skipped_lines"):
        rows.append(("skipped", f"{result['skipped_lines']} lines of the event log, torn or malformed"))
    return (
        rows
        if result["weights_sha256"] is None
        else [*rows, ("weights", f"SHA-256 {result['weights_sha256']}")]
    )


@dataclass
class _Host:
    workers: int = 0
    booting_s: float = 0.0
    working_s: float = 0.0
    booting: dict[str, float] = field(default_factory=dict)  # worker → since
    working: dict[str, float] = field(default_factory=dict)  # worker → since

    def summary(self) -> dict[str, Any]:
        seconds = {"booting_s": round(self.booting_s, 3), "working_s": round(self.working_s, 3)}
        return {"workers": self.workers, **seconds}


@dataclass
class _Story:
    """What a run did so far, on a clock that never goes back."""

    run: str = ""
    now: float = -math.inf
    booked: float = math.inf  # the books are written up to here
    books: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    invocations: int = 0
    attempts: set[tuple[int, int]] = field(default_factory=set)  # invocation, attempt
    world_of: tuple[int, int] | None = None  # the attempt that has a world now
    generations: int = 0
    pauses: list[float] = field(default_factory=list)
    open_pauses: list[tuple[float, float]] = field(default_factory=list)  # end, seconds: no step has ended since
    kept: StepTable = field(default_factory=lambda: StepTable("qdd"))  # step → samples, loss, step_s
    redone: set[tuple[int, int, int, int]] = field(
        default_factory=set
    )  # invocation, attempt, generation, step
    rolled_back: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    hosts: dict[str, _Host] = field(default_factory=dict)
    host_of: dict[str, str] = field(default_factory=dict)  # worker → host
    finished: Event | None = None

    def read(self, event: Event) -> None:
        before = self.now
        self.now = max(before, float(event["time"]))
        self.booked = min(self.booked, self.now)
        self.run = self.run or str(event.get("run", ""))
        match event["event"]:
            case "run.started":
                self.invocations += 1
                self._book("restarting" if self.generations else "booting", max(before, self.booked))
                self._book("stopped", self.now)
                self.world_of = None
            case "attempt.started":
                self.attempts.add(self._attempt(event))
                self._leave_world()
            case "attempt.ended":
                self._leave_world()
            case "worker.generation_started":
                self._start_generation(event)
            case "worker.step_redone":
                self.redone.add((*self._attempt(event), self.generations, int(event["step"])))
            case "job.described":
                if self.finished and event.get("steps") != self.finished["steps"]:
                    self.finished = None  # resumed with more steps
            case "worker.pause_ended":
                self.open_pauses.clear()
                self._pause(self.now, float(event["duration_s"]))
            case "worker.step_committed":
                if not event.get("repeated"):
                    self._close_pauses()
                if (step := int(event["step"])) not in self.kept:
                    self.kept[step] = (int(event["samples"]), float(event["loss"]), float(event.get("step_s") or 0.0))
                if not self.open_pauses:
                    self._book("training", self.now)
            case "run.finished":
                self.finished = event
                self._close_pauses()
                self._book("training", self.now)
            case "driver.worker_started":
                self._host(event).workers += 1
                self._host(event).booting[event["worker"]] = self.now
            case "driver.worker_ready":
                self._end_of_boot(event)
                self._host(event).working[event["worker"]] = self.now
            case "driver.worker_gone":
                self._end_of_boot(event)
                host = self._host(event)
                host.working_s += self.now - host.working.pop(event["worker"], self.now)
                if event.get("reason") in LOST_REASONS:
                    self.lost[event["reason"]] += 1

    def close(self) -> None:
        """Book what still goes on."""
        if math.isinf(self.now):
            return
        self._close_pauses()
        if self.world_of is not None:
            self._book("training", self.now)
        self._leave_world()
        for host in self.hosts.values():
            host.booting_s += sum(self.now - since for since in host.booting.values())
            host.working_s += sum(self.now - since for since in host.working.values())

    def _start_generation(self, event: Event) -> None:
        attempt, step = self._attempt(event), int(event["step"])
        if attempt == self.world_of:
            self.open_pauses.append((self.now, float(event.get("pause_s") or 0.0)))  # worker.pause_ended may say more
        else:
            self._leave_world()
        self.generations += 1
        self.attempts.add(attempt)
        self.world_of = attempt
        for later in list(self.kept.steps(step)):
            self.kept.pop(later)
            self.rolled_back += 1
            self.finished = None

    def _pause(self, end: float, seconds: float) -> None:
        self.pauses.append(seconds)
        self._book("training", max(self.booked, end - seconds))
        self._book("pausing", max(self.booked, end))

    def _close_pauses(self) -> None:
        """Book the pauses of which only the generation that began behind them is known."""
        for end, seconds in self.open_pauses:
            self._pause(end, seconds)
        self.open_pauses.clear()

    def _leave_world(self) -> None:
        self._close_pauses()
        self._book("restarting" if self.generations else "booting", self.now)
        self.world_of = None

    def _end_of_boot(self, event: Event) -> None:
        host = self._host(event)
        host.booting_s += self.now - host.booting.pop(event["worker"], self.now)

    def _host(self, event: Event) -> _Host:
        """Return the host of a worker; only its first event must name it."""
        name = self.host_of.setdefault(event["worker"], str(event.get("host", "")))
        return self.hosts.setdefault(name, _Host())

    def _attempt(self, event: Event) -> tuple[int, int]:
        return (self.invocations, int(event["attempt"]))

    def _book(self, phase: str, until: float) -> None:
        """Book the time since the last booking as `phase`."""
        self.books[phase] += until - self.booked
        self.booked = until


def _until_finished(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events up to the last run.finished; all of them where the run was made longer after it."""
    finished: Event | None = None
    later: list[Event] = []
    """What came after it: a few lines, unless the run was made longer."""
    for event in events:
        later.append(event)
        is_longer = finished is not None and (
            event["event"] == "job.described" and event.get("steps") != finished["steps"])
        if event["event"] == "run.finished" or finished is None or is_longer:
            finished = event if event["event"] == "run.finished" else None
            yield from later
            later.clear()


def lacking(supply: Mapping[str, Any] | None) -> list[str]:
    """Say how many machines are lacking, why AWS refuses them, and what to do about it."""
    if not supply or supply["there"] >= supply["wanted"]:
        return []
    said = f"{supply['there']} of {supply['wanted']} machines are there"
    if not (refusal := supply["refusal"]):
        return [f"{said}; AWS has refused none, so others are on their way."]
    return [f"{said}. AWS refuses more: {refusal['says']} ({refusal['code']})", f"  {refusal['remedy']}"]


def print_hosts(fleet: dict[str, Any]) -> None:
    """Print the poller's table: who is in, who is out, and why."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("host", "type", "slots", "cloud", "agent", "workers", "standby", "notice", "since", "in", "why")
    for host in fleet["hosts"]:
        cloud = " ".join(filter(None, [host["lifecycle"], host["state"], host["group_state"]]))
        left_s = host["deadline"] - fleet["time"] if host["deadline"] else None
        hazards = [f"{code} in {in_s / 60:.0f} min" for code, in_s in host["events"]] + ["rebalance"] * host["rebalance"]
        notice = f"{left_s:.0f} s left" if left_s is not None else ", ".join(hazards)
        agent = host["agent"] + (f", {host['refused']} refused" if host["refused"] else "")
        since = "" if host["since_s"] is None else f"{host['since_s']:.0f} s"
        workers = ", ".join(f"{count} at {doing}" if doing.startswith("step") else f"{count} {doing}"
                            for doing, count in sorted(Counter(host["workers"] or ()).items()))
        standby = "" if host["standby"] is None else str(host["standby"])
        row = (host["name"], host["type"], host["slots"], cloud, agent, workers, standby, notice, since,
               "in" if host["is_in"] else "out", host["why"] if not host["is_in"] else host["agent_why"])
        table.add_row(*(Text(plain(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    if (age_s := time.time() - fleet["time"]) > POLLER_GONE_S:
        console.print(f"this was {age_s:.0f} s ago: the poller has not run since. Look at its service on the coordinator.")
    for line in lacking(fleet.get("supply")):
        console.print(Text(plain(line)))
    if fleet["cloud_failures"]:
        console.print(f"the cloud has not answered {fleet['cloud_failures']} times in a row; what it said last stands")
    if fleet["unheard"]:
        console.print(f"{fleet['unheard']} agents are not heard, or have another clock: too many to be their fault, so "
                      "their hosts stay. Look at the poller's network and clock.")

"""A run as its event log tells it: the one fold, whose queries are all views of a run.

event log → here (accounts, fleet, steps, stalls, told) → summary, status, page, pictures, traces

What always holds:
1. `read` takes one event after another, so a view follows a run that goes on. A query never changes
   the run.
2. An attempt without an end (its supervisor was killed) ends at its last event, not at the start of
   the next one. Events after the end of an invocation do not prolong it.
3. The accounts end at the last run.finished, unless the run was resumed with more steps.
4. The memory is 48 bytes a step, a few numbers for each attempt, generation, pause and change, and
   an entry for each worker and host. Of the events in words the first and the newest ones are kept.
5. An event with a field that cannot be read changes nothing.

What it does not do: judge. It takes events that contradict each other, too; `verify` judges, by its
own reading of the log. driver/past.py has what the supervisor may believe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from elastic_trainer.events import sentences
from elastic_trainer.events.accounts import Accounts, Event, Pause
from elastic_trainer.events.event_kind import Phase
from elastic_trainer.events.fleet import Fleet, Stalls
from elastic_trainer.events.schema import UNREADABLE
from elastic_trainer.events.steps import Steps
from elastic_trainer.events.told import Told

SET_BACK_S = 60.0
"""Events of several hosts may be out of order by less: their clocks differ."""
FINAL = ("finished", "interrupted", "user_error", "unsaved")
"""The verdicts of an attempt that none follows (driver/supervisor.py)."""
BEGINS = ("run.started", "attempt.started")
_LATE = "run.host_not_reached"
"""The next supervisor logs it before it starts the run: it may be days later."""


def ends_run(event: Event) -> bool:
    """True if no attempt follows, until the run is started again."""
    name = event["event"]
    return name in ("run.given_up", "run.stopped") or (
        name == "attempt.ended" and event.get("verdict") in FINAL)


class Mark(Enum):
    """A change of the fleet."""

    LOST = "a worker lost"
    SMALLER = "smaller world"
    LARGER = "larger world"
    JOINED = "a worker takes a free place"
    RESTART = "everybody gone: a new attempt"
    LEAVES = "a host leaves the list"
    CHECKPOINT = "a checkpoint"


class Change(NamedTuple):
    """A mark, and its time."""

    time: float
    mark: Mark
    how: str = ""
    """How the worker was lost: "killed", "frozen"."""


@dataclass
class Attempt:
    """One life of horovodrun."""

    number: int
    start: float
    end: float | None = None
    verdict: str = ""
    """Of its attempt.ended; "": its supervisor was killed, or it goes on."""


@dataclass
class Generation:
    """One membership of the world, from its first step on."""

    number: int
    attempt: Attempt | None
    start: float
    size: int
    step: int
    source: str
    first: int
    """The place of its first step in Run.steps."""
    end: float | None = None


class Checkpoint(NamedTuple):
    """A checkpoint that is complete in the store."""

    time: float
    step: int
    bytes: int
    uploaded_bytes: int
    pause_s: float
    duration_s: float


@dataclass
class Run:
    """The facts of a run so far."""

    name: str = ""
    told: Told = field(default_factory=Told)
    first: float = math.inf
    """The time of the first event."""
    now: float = -math.inf
    """The latest time of an event."""
    end: float = -math.inf
    """The time of the newest event while the run went on."""
    is_over: bool = False
    stops: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each time between two invocations."""
    started: float | None = None
    """When a person, or the service, started or resumed the run the last time."""
    phase: str = "booting"
    """booting, training, pausing, restarting; at the end finished, failed or interrupted."""
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    """Of Python and the packages, where the run was started."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """The newest job.described."""
    steps: Steps = field(default_factory=Steps)
    step: int = 0
    """The number of committed steps in the kept history."""
    loss: float | None = None
    attempts: list[Attempt] = field(default_factory=list)
    attempt: int = 0
    """The number of the newest one."""
    generations: list[Generation] = field(default_factory=list)
    size: int = 0
    """Workers of the newest world of this attempt; 0: it has had none."""
    fleet: Fleet = field(default_factory=Fleet)
    refusal: str = ""
    """Why machines are refused, while they are."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """Times, and how many workers the world had from then on."""
    compressed: Event | None = None
    """What rank 0 has sent of its gradients in 16 bits, as it was last measured."""
    stalls: Stalls = field(default_factory=Stalls)
    set_back: tuple[float, Event] | None = None
    """The largest step back of the log's clock, and its event."""

    def __post_init__(self) -> None:
        self.accounts = Accounts(self.steps)
        self.final: Accounts | None = None
        """The accounts at the last run.finished, unless the run was resumed with more steps."""
        self.speed_from = 0
        """The place of the first step that counts for the present speed."""
        self._trained_size = 0
        """The size of the newest world that has trained."""
        self._formed = self._world = self._alive = frozenset[str]()
        """The members that the driver last named, those of the newest world that has trained, and
        those whose processes run."""

    def read(self, event: Event) -> None:
        try:
            name, time, before = event["event"], float(event["time"]), self.end
        except UNREADABLE:
            return
        if name == "worker.step_committed" and time > self.now and self.name:  # nearly all events
            self.now = time
            if time > before:
                self.end = time
            self._step_committed(event, before)
            self.accounts.read_step(event, before, time)
            return
        self.first = min(self.first, time)
        if time > self.now:
            self.now = time
        elif self.now - time > (self.set_back[0] if self.set_back else SET_BACK_S):
            self.set_back = self.now - time, event
        self._follow(name, event, max(before, time))
        self.name = self.name or str(event.get("run") or "")
        self.accounts.read(event, before)
        if name == "run.finished":
            self.final = self.accounts.frozen()
        elif name == "job.described" and self.final and self.final.finished and (
                event.get("steps") != self.final.finished["steps"]):
            self.final = None
        try:
            self.fleet.read(event, self.now)
            self.stalls.read(event)
            if reader := _READERS.get(name):
                reader(self, event, before)
            self.told.take(event, self.fleet.known)
        except UNREADABLE:
            return

    def read_all(self, events: Iterable[Event]) -> Run:
        """Take events, and return the run."""
        for event in events:
            self.read(event)
        return self

    def closed(self, *, is_drawn: bool = True) -> Accounts:
        """Return the accounts of the events so far: up to the last event, or run.finished."""
        return self.final or self.accounts.closed(is_drawn=is_drawn)

    def booked(self) -> Mapping[Phase, float]:
        """Return the seconds of the phases that no later event changes. In a world the time is
        booked up to the last step: what comes next may be a pause."""
        accounts = self.final or (self.accounts if self.accounts.world_of else
                                  self.closed(is_drawn=False))
        return accounts.periods.seconds()

    @property
    def goodput(self) -> float | None:
        """The time of the kept steps, by the time so far since the first world; None before the
        first step."""
        return self.closed(is_drawn=False).share(Phase.BOOTING, Phase.STOPPED)

    @property
    def generation(self) -> Generation | None:
        """The generation that goes on."""
        newest = self.generations[-1] if self.generations else None
        return newest if newest and newest.end is None else None

    @property
    def open_attempt(self) -> Attempt | None:
        """The attempt that goes on."""
        newest = self.attempts[-1] if self.attempts else None
        return newest if newest and newest.end is None else None

    @property
    def recoveries(self) -> list[Pause]:
        """The pauses of which the parts are known."""
        return [pause for pause in self.accounts.pauses if pause.parts]

    @property
    def span(self) -> tuple[float, float] | None:
        """The start of the first step, and the time of the last event of the run: its end, if it
        is over. None before two steps."""
        if len(self.steps) < 2:
            return None
        return self.steps.ends[0] - self.steps.seconds[0], self.end

    def _follow(self, name: str, event: Event, time: float) -> None:
        if name in BEGINS:
            if name == "run.started" and not math.isinf(self.end):
                self.stops.append((self.end, time))
            self.is_over = False
        if name != _LATE and (not self.is_over or name == "worker.step_committed"):
            self.end = time
        self.is_over = self.is_over or name == "run.finished" or ends_run(event)

    def _run_started(self, event: Event, before: float) -> None:
        self._end_attempt(before)
        self.name, self.started, self.phase = str(event["run"]), self.now, "booting"
        self.options = event.get("options") or {}
        self.versions = event.get("versions") or {}
        self.fleet.begin()

    def _attempt_started(self, event: Event, before: float) -> None:
        if self._trained_size:
            self._change(event, Mark.RESTART)
        self._end_attempt(before)
        self.phase = "restarting" if self.generations else "booting"
        self.attempt = int(event["attempt"])
        self.attempts.append(Attempt(int(event["attempt"]), self.now))
        self.size, self.speed_from = 0, len(self.steps)

    def _attempt_ended(self, event: Event, before: float) -> None:
        if self.open_attempt:
            self.open_attempt.verdict = str(event["verdict"])
        self._end_attempt(float(event["time"]), ends_listing=False)
        self.phase = _PHASE_AFTER[event["verdict"]]

    def _end_attempt(self, time: float, *, ends_listing: bool = True) -> None:
        """End what an attempt has left open, at the time of its last event."""
        if math.isinf(time):
            return
        self.fleet.end_attempt(time, ends_listing=ends_listing)
        if self.open_attempt:
            self.open_attempt.end = time
        self._end_world(time)

    def _end_world(self, time: float) -> None:
        self._world = self._alive = frozenset()
        if self.generation:
            self.generation.end = time
        if self.sizes and self.sizes[-1][1]:
            self.sizes.append((time, 0))

    def _generation_formed(self, event: Event, before: float) -> None:
        self._formed = self._alive = frozenset(map(str, event.get("workers") or ()))
        if self.phase == "training":
            self.phase = "pausing"

    def _generation_started(self, event: Event, before: float) -> None:
        size, step = int(event["size"]), int(event["step"])
        attempt = self.open_attempt
        begun = Generation(int(event["generation"]), attempt, self.now, size, step,
                           str(event["source"]), len(self.steps))
        if not (open_one := self.generation) or (open_one.number, open_one.attempt) != (
                begun.number, attempt):
            if open_one:
                open_one.end = self.now
            self.generations.append(begun)
        if (trained := self._trained_size) and size != trained:
            self._change(event, Mark.LARGER if size > trained else Mark.SMALLER)
        if self._world and self._formed - self._world and size <= trained:
            self._change(event, Mark.JOINED)
        self._world, self._trained_size, self.size = self._formed, size, size
        self.sizes.append((self.now, size))
        self.phase, self.step = "training", step
        self.attempt = int(event["attempt"])

    def _job_described(self, event: Event, before: float) -> None:
        self.job = event

    def _step_committed(self, event: Event, before: float) -> None:
        self.stalls.step(self.now)
        self.phase, self.step, self.loss = "training", event["step"] + 1, event["loss"]

    def _commit_kept(self, event: Event, before: float) -> None:
        self.phase, self.step = "training", int(event["step"]) + 1

    def _run_finished(self, event: Event, before: float) -> None:
        self.phase, self.step = "finished", int(event["steps"])
        self.loss = float(event["loss"]) if "loss" in event else self.loss

    def _host_removed(self, event: Event, before: float) -> None:
        self._change(event, Mark.LEAVES)

    def _worker_gone(self, event: Event, before: float) -> None:
        ending = sentences.ENDINGS.get(str(event.get("reason")))
        if ending and ending.is_lost and ending.has_booted:
            self._change(event, Mark.LOST, sentences.loss(event))
        if event["worker"] in self._alive:
            self._alive -= {event["worker"]}
            if not self._alive:
                self._end_world(float(event["time"]))

    def _change(self, event: Event, mark: Mark, how: str = "") -> None:
        self.changes.append(Change(float(event["time"]), mark, how))

    def _published(self, event: Event, before: float) -> None:
        get = event.get
        self.checkpoints.append(Checkpoint(
            float(event["time"]), int(event["step"]), int(get("bytes") or 0),
            int(get("uploaded_bytes") or 0), float(get("pause_s") or 0.0),
            float(get("duration_s") or 0.0)))

    def _gradients_compressed(self, event: Event, before: float) -> None:
        self.compressed = event


_PHASE_AFTER = {"finished": "finished", "failed": "restarting", "user_error": "failed",
                "interrupted": "interrupted", "unsaved": "failed"}


def _becomes(phase: str) -> Callable[[Run, Event, float], None]:
    return lambda run, event, before: setattr(run, "phase", phase)


_READERS: dict[str, Callable[[Run, Event, float], None]] = {
    "run.started": Run._run_started,
    "run.given_up": _becomes("failed"),
    "run.stopped": _becomes("interrupted"),
    "run.finished": Run._run_finished,
    "attempt.started": Run._attempt_started,
    "attempt.ended": Run._attempt_ended,
    "job.described": Run._job_described,
    "driver.generation_formed": Run._generation_formed,
    "driver.host_removed": Run._host_removed,
    "driver.worker_gone": Run._worker_gone,
    "worker.generation_started": Run._generation_started,
    "worker.step_committed": Run._step_committed,
    "worker.commit_kept": Run._commit_kept,
    "worker.gradients_compressed": Run._gradients_compressed,
    "state.checkpoint_published": Run._published,
    "discovery.launch_refused": lambda run, event, before: setattr(
        run, "refusal", sentences.refusal(event)),
    "discovery.launch_refusal_ended": lambda run, event, before: setattr(run, "refusal", ""),
}

"""The accounts of a run: its wall time by phase, the seconds of its hosts, and what losses cost.

run (which reads the event log) → here → summary, charts, metrics

What always holds:
1. The periods follow each other without a gap, from the first event to the last one. event_table
   declares the account of the time before an event (`closes`).
2. A step that was done twice counts once.
3. The clock never goes back: an event with an earlier time counts as of the latest time before.
4. A sum costs the same for a log of any length. `closed` copies a few numbers for each host that is
   there, and one entry of a dict for each host that has gone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elastic_trainer.events.event_kind import PAUSE_PARTS, Phase
from elastic_trainer.events.host_accounts import HostAccounts
from elastic_trainer.events.ledger import Account
from elastic_trainer.events.sentences import ENDINGS
from elastic_trainer.events.steps import Steps

Event = Mapping[str, Any]
Attempt = tuple[int, int]
"""Invocation and attempt: each invocation may count its attempts from 1."""
TRAINING = Phase.TRAINING
"""Each step needs it, and a member of an enum that is looked up costs 0.1 µs."""
Period = tuple[Phase, float, float]
"""Phase, start, end."""
ACCOUNTS = {Phase.BOOTING: Account.BOOTING, Phase.TRAINING: Account.IDLE,
            Phase.PAUSING: Account.FORMING, Phase.RESTARTING: Account.RESTARTING,
            Phase.STOPPED: Account.STOPPED}
"""The account of a host's seconds in each phase, where the events say no more."""
PARTS = dict(zip(PAUSE_PARTS, (Account.NOTICING, Account.FORMING, Account.FORMING,
                               Account.TRANSFER), strict=False))
"""The account of each part of a pause. The rest is the step, which is done again."""
DOES = {"driver.worker_started": "booting", "driver.worker_ready": "ready",
        "driver.worker_gone": ""}
"""What a worker does from an event on; "": it is gone."""


class Pause(NamedTuple):
    """A pause after a change of the world: it ends with the first step of the next one."""

    duration_s: float
    time: float
    """Its end."""
    step: int
    parts: tuple[float, ...] = ()
    """The seconds of PAUSE_PARTS. None in a log of version 0.1, which has no worker.pause_ended."""


class Periods:
    """The periods of a run's wall time, one after another."""

    def __init__(self) -> None:
        self.until = math.inf
        """The time is booked up to here."""
        self._past: list[Period] = []
        self._before = dict.fromkeys(Phase, 0.0)
        """The seconds of the past periods."""
        self._phase: Phase | None = None
        self._since = 0.0
        """The last period, which goes on."""

    def book(self, phase: Phase, until: float) -> None:
        """Book the time since the last booking as `phase`."""
        if until <= self.until:
            return
        if phase is not self._phase:
            for period in self._last():
                self._past.append(period)
                self._before[period[0]] += period[2] - period[1]
            self._phase, self._since = phase, self.until
        self.until = until

    def all(self) -> list[Period]:
        """Return all periods. Neighbours have different phases."""
        return [*self._past, *self._last()]

    def _last(self) -> list[Period]:
        return [] if self._phase is None else [(self._phase, self._since, self.until)]

    def seconds(self) -> dict[Phase, float]:
        found = dict(self._before)
        for phase, start, end in self._last():
            found[phase] += end - start
        return found

    def copy(self, *, is_drawn: bool) -> Periods:
        """Return a copy; without `is_drawn` it has only the last period, and the same sums."""
        found = copy(self)
        found._past, found._before = self._past[:] if is_drawn else [], dict(self._before)
        return found


@dataclass
class Host:
    """The workers of one host, and their seconds booting and working (from ready until gone)."""

    workers: int = 0
    booting_s: float = 0.0
    working_s: float = 0.0
    booting: dict[str, float] = field(default_factory=dict)  # worker → since
    working: dict[str, float] = field(default_factory=dict)  # worker → since

    def take(self, worker: str, does: str, now: float) -> None:
        """Take what a worker does from now on (DOES)."""
        if does == "booting":
            self.workers += 1
            self.booting[worker] = now
            return
        self.booting_s += now - self.booting.pop(worker, now)
        if does:
            self.working[worker] = now
        else:
            self.working_s += now - self.working.pop(worker, now)

    def summary(self, now: float) -> dict[str, Any]:
        """Return the host's part of result.json, with the workers that still boot or work."""
        booting_s = self.booting_s + sum(now - since for since in self.booting.values())
        working_s = self.working_s + sum(now - since for since in self.working.values())
        return {"workers": self.workers, "booting_s": round(booting_s, 3),
                "working_s": round(working_s, 3)}


@dataclass
class Crews:
    """The workers and the machines of all hosts."""

    hosts: dict[str, Host] = field(default_factory=dict)
    machines: dict[str, dict[str, str]] = field(default_factory=dict)
    """Type, zone and lifecycle of each host of a cloud, as far as they are known."""
    _host_of: dict[str, str] = field(default_factory=dict)

    def of(self, event: Event) -> Host:
        """Return the host of a worker. Only the worker's first event must name it."""
        name = self._host_of.setdefault(event["worker"], str(event.get("host", "")))
        return self.hosts.setdefault(name, Host())

    def name_of(self, worker: str) -> str:
        """Return the host of a worker. Its name begins with its host
        (driver/roster.py)."""
        return self._host_of.get(worker) or worker.partition("/")[0]

    def take_machine(self, event: Event) -> None:
        self.machines[str(event["host"])] = {
            name: str(event[name]) for name in ("type", "zone", "lifecycle") if event.get(name)}


@dataclass
class Accounts:
    """A fold over the events of a run. `read` takes each of them."""

    steps: Steps
    now: float = -math.inf
    before: float = -math.inf
    """The time of the newest event before this one while the run went on."""
    periods: Periods = field(default_factory=Periods)
    hosts: HostAccounts = field(default_factory=HostAccounts)
    crews: Crews = field(default_factory=Crews)
    invocations: int = 0
    attempts: set[Attempt] = field(default_factory=set)
    world_of: Attempt | None = None
    """The attempt that has a world now."""
    is_booting: bool = True
    """No world has formed since the last start by a person."""
    generations: int = 0
    pauses: list[Pause] = field(default_factory=list)
    open_pauses: list[Pause] = field(default_factory=list)
    """Pauses after which no step has ended yet."""
    kept_steps: int = 0
    samples: int = 0
    useful_s: float = 0.0
    """Of the kept steps."""
    redone: set[tuple[int, int, int, int]] = field(default_factory=set)
    """Invocation, attempt, generation, step."""
    rolled_back: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """Workers lost, by reason."""
    formed: list[str] = field(default_factory=list)
    """The members of the newest world, in the order of their ranks."""
    is_redoing: bool = False
    """A step that was in flight is being done again."""
    is_forming_after_loss: bool = False
    failures: int = 0
    """Pauses after the loss of a worker."""
    stalled_s: float = 0.0
    """In those pauses."""
    dropped_s: float = 0.0
    """Of steps that a restart from a checkpoint has dropped, if no person had stopped the run."""
    finished: Event | None = None

    def read(self, event: Event, before: float) -> None:
        """Take one more event. `before`: the time of the newest one before it while the run went
        on."""
        time = float(event["time"])
        if self.now < 0.0:  # the first event
            self.periods.until = self.hosts.until = time
            before = time
        self.before = before
        if time > self.now:
            self.now = time
        if reader := _READERS.get(event["event"]):
            reader(self, event)

    def read_step(self, event: Event, before: float, now: float) -> None:
        """Take a worker.step_committed that is the newest event, and not the first one. `read`
        takes it, too; the log of a long run has hardly anything else."""
        self.before, self.now = before, now
        self._step_committed(event)

    def close(self) -> None:
        """Book the time up to the last event."""
        if math.isinf(self.now):
            return
        self._close_pauses()
        if self.world_of is not None:
            self._book(Phase.TRAINING, self.now)
        self._leave_world()
        self.hosts.close()

    def closed(self, *, is_drawn: bool) -> Accounts:
        """Return the closed accounts of the events so far; these read on.

        Without `is_drawn` they have the sums, and no periods and lanes to draw.
        """
        found = copy(self)
        found.periods = self.periods.copy(is_drawn=is_drawn)
        found.hosts = self.hosts.copy(is_drawn=is_drawn)
        found.pauses, found.open_pauses = self.pauses[:], self.open_pauses[:]
        found.close()
        return found

    def frozen(self) -> Accounts:
        """Return the closed accounts, which share nothing that a later event changes."""
        found = self.closed(is_drawn=True)
        for name in ("crews", "attempts", "redone", "lost"):
            setattr(found, name, deepcopy(getattr(self, name)))
        return found

    def share(self, *without: Phase) -> float | None:
        """Return the time of the kept steps, by the booked time without some phases; None if that
        is 0 s."""
        time_s = sum(s for phase, s in self.periods.seconds().items() if phase not in without)
        return min(1.0, self.useful_s / time_s) if time_s > 0 else None

    def _run_started(self, event: Event) -> None:
        self.invocations += 1
        self._book(Phase.RESTARTING, self.before)
        self.hosts.end_attempt(self.before)
        self._book(Phase.STOPPED, self.now)
        self.is_booting = True
        self.hosts.least = least_workers(event.get("options"))
        self.world_of = None

    def _attempt_started(self, event: Event) -> None:
        self.attempts.add(self._attempt(event))
        self._leave_world()
        self.hosts.end_attempt(self.now)

    def _attempt_ended(self, event: Event) -> None:
        if event.get("verdict") == "interrupted" and self.world_of is not None:
            self._close_pauses()
            self._book(Phase.TRAINING, self.now)  # a person stopped it: nothing is lost
        self._leave_world()

    def _generation_formed(self, event: Event) -> None:
        self.is_forming_after_loss = event.get("reason") == "death"
        self._form(event.get("workers") or self.hosts.booted())

    def _form(self, workers: Iterable[str]) -> None:
        self.formed = [str(worker) for worker in workers]
        self.hosts.form({worker: self.crews.name_of(worker) for worker in self.formed}, self.now)

    def _generation_started(self, event: Event) -> None:
        attempt, step = self._attempt(event), int(event["step"])
        if attempt == self.world_of:  # a worker.pause_ended may follow
            self.open_pauses.append(Pause(float(event.get("pause_s") or 0.0), self.now, step))
        else:
            self._leave_world()
        self.generations += 1
        self.attempts.add(attempt)
        self.world_of = attempt
        worker = str(event.get("worker") or "")
        if worker and not self.formed:  # without our driver nobody tells the members
            self._form([worker])
        self._drop_steps(step)
        self.is_booting = False
        self.hosts.begin_world(step)

    def _drop_steps(self, first: int) -> None:
        """Take back the steps that a start from a checkpoint has dropped."""
        if not (dropped := self.steps.drop(first)):
            return
        self.kept_steps -= len(dropped)
        self.samples -= sum(step.samples for step in dropped)
        for step in dropped:
            self.useful_s -= step.seconds
            self.dropped_s += 0.0 if self.is_booting else step.seconds
        self.hosts.drop_steps({step.number: step.seconds for step in dropped},
                              min(step.end - step.seconds for step in dropped))
        self.rolled_back += len(dropped)
        self.finished = None

    def _step_redone(self, event: Event) -> None:
        self.redone.add((*self._attempt(event), self.generations, int(event["step"])))
        self.is_redoing = True

    def _job_described(self, event: Event) -> None:
        self.hosts.microbatches = int(event["microbatches"])
        if self.finished and event.get("steps") != self.finished["steps"]:
            self.finished = None  # resumed with more steps

    def _run_finished(self, event: Event) -> None:
        self.finished = event
        self._close_pauses()
        self._book(Phase.TRAINING, self.now)

    def _step_committed(self, event: Event) -> None:
        get = event.get
        step_s, samples = get("step_s") or 0.0, event["samples"]
        is_repeated: bool = get("repeated") or False
        if self.open_pauses and not is_repeated:
            self._close_pauses()
        if self.steps.add(event["step"], self.now, step_s, samples, event["loss"],
                          is_repeated=is_repeated):
            self.kept_steps += 1
            self.samples += samples
            self.useful_s += step_s
        if not self.open_pauses:
            self._book_step(step_s, get("checkpoint_s") or 0.0)

    def _commit_kept(self, event: Event) -> None:
        """Take a commit of a script in Horovod's own style: it says nothing of samples or loss."""
        if not self.steps:
            self.steps.counts_samples = False
        commit_s = float(event["commit_s"])
        if self.steps.add(event["step"], self.now, commit_s, 0, math.nan):
            self.kept_steps += 1
            self.useful_s += commit_s
        if not self.open_pauses:
            self._book_step(commit_s, 0.0)

    def _book_step(self, step_s: float, checkpoint_s: float) -> None:
        self.is_redoing = False
        self.hosts.book_step(step_s, checkpoint_s, self.now)
        self.periods.book(TRAINING, self.now)

    def _pause_ended(self, event: Event) -> None:
        self.open_pauses.clear()
        self._pause(Pause(float(event["duration_s"]), self.now, int(event.get("step") or 0), tuple(
            float(event.get(f"{part}_s") or 0.0) for part in PAUSE_PARTS)))

    def _pause(self, pause: Pause) -> None:
        self.pauses.append(pause)
        seconds, end = pause.duration_s, pause.time
        if self.is_forming_after_loss:
            self.failures, self.stalled_s = self.failures + 1, self.stalled_s + seconds
        # What is left of the time since the last step is the usual time of this one.
        self._book(Phase.TRAINING, end - seconds, Account.USEFUL)
        until = end - seconds
        for part, account in zip(pause.parts, PARTS.values(), strict=False):
            until += part
            self._book(Phase.PAUSING, min(until, end), account)
        self._book(Phase.PAUSING, end,
                   Account.REDONE if pause.parts and self.is_redoing else Account.FORMING)
        self.is_redoing = False

    def _close_pauses(self) -> None:
        """Book the pauses that have no worker.pause_ended (version 0.1)."""
        for pause in self.open_pauses:
            self._pause(pause)
        self.open_pauses.clear()

    def _worker(self, event: Event) -> None:
        """Take a worker's start, the end of its boot, or its end."""
        worker, does = event["worker"], DOES[event["event"]]
        self.crews.of(event).take(worker, does, self.now)
        self.hosts.take_worker(worker, self.crews.name_of(worker), does, self.now)
        reason = str(event.get("reason"))
        if not does and reason in ENDINGS and ENDINGS[reason].is_lost:
            self.lost[reason] += 1

    def _leave_world(self) -> None:
        self._close_pauses()
        self._book(Phase.RESTARTING, self.now)
        self.world_of = None

    def _attempt(self, event: Event) -> Attempt:
        return (self.invocations, int(event["attempt"]))

    def _book(self, phase: Phase, until: float, account: Account | None = None) -> None:
        if phase is Phase.RESTARTING and self.is_booting:
            phase = Phase.BOOTING
        self.hosts.book(account or ACCOUNTS[phase], until)
        self.periods.book(phase, until)


_READERS: dict[str, Callable[[Accounts, Event], None]] = {
    "run.started": Accounts._run_started,
    "attempt.started": Accounts._attempt_started,
    "attempt.ended": Accounts._attempt_ended,
    "discovery.host_in": lambda accounts, event: accounts.crews.take_machine(event),
    "driver.host_added": lambda accounts, event: accounts.hosts.list_host(
        event["host"], int(event["slots"]), accounts.now),
    "driver.host_removed": lambda accounts, event: accounts.hosts.list_host(
        event["host"], 0, accounts.now),
    "driver.generation_formed": Accounts._generation_formed,
    "job.described": Accounts._job_described,
    "worker.generation_started": Accounts._generation_started,
    "worker.step_redone": Accounts._step_redone,
    "worker.step_committed": Accounts._step_committed,
    "worker.commit_kept": Accounts._commit_kept,
    "worker.pause_ended": Accounts._pause_ended,
    "run.finished": Accounts._run_finished,
    **dict.fromkeys(DOES, Accounts._worker),
}


def least_workers(options: Any) -> int:
    """Return --min-np of a run's options; 1 if they do not have it."""
    words = (options if isinstance(options, Mapping) else {}).get("horovodrun") or []
    with suppress(ValueError, LookupError, TypeError):
        return int(words[words.index("--min-np") + 1])
    return 1

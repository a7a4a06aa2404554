"""The history of a run, and the books of its wall time: a fold over its events.

event log → here → report (result.json, table, picture)

What always holds:
1. The periods follow each other without a gap, from the first event to the last one. event_table
   declares the account of the time before an event (`closes`).
2. A step that was done twice counts once.
3. The clock never goes back: an event with an earlier time counts as of the latest time before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.events.accounts import Accounts
from elastic_trainer.events.books import Books, Clock, Fleet
from elastic_trainer.events.event_kind import Phase
from elastic_trainer.events.event_table import KINDS
from elastic_trainer.events.ledger import Account
from elastic_trainer.events.sentences import ENDINGS
from elastic_trainer.events.standstills import Standstills
from elastic_trainer.events.step_table import StepTable

Event = Mapping[str, Any]
Attempt = tuple[int, int]
"""Invocation and attempt: each invocation may count its attempts from 1."""
ACCOUNTS = {Phase.BOOTING: Account.BOOTING, Phase.TRAINING: Account.IDLE,
            Phase.PAUSING: Account.FORMING, Phase.RESTARTING: Account.RESTARTING,
            Phase.STOPPED: Account.STOPPED}
"""The account of a host's seconds in each phase, where the events say no more."""
PARTS = {"noticing_s": Account.NOTICING, "deciding_s": Account.FORMING,
         "forming_s": Account.FORMING, "transfer_s": Account.TRANSFER}
"""The parts of a pause, in their order. The rest is the step, which is done again."""


@dataclass
class History:
    """What a run has done. `read` takes each event; `close` is called once after the last one."""

    run: str = ""
    now: float = -math.inf
    before: float = -math.inf
    """The time of the event before this one."""
    books: Books = field(default_factory=Books)
    accounts: Accounts = field(default_factory=Accounts)
    standstills: Standstills = field(default_factory=Standstills)
    clock: Clock = field(default_factory=Clock)
    invocations: int = 0
    attempts: set[Attempt] = field(default_factory=set)
    world_of: Attempt | None = None
    """The attempt that has a world now."""
    is_booting: bool = True
    """No world has formed since the last start by a person."""
    generations: int = 0
    pauses: list[float] = field(default_factory=list)
    open_pauses: list[tuple[float, float]] = field(default_factory=list)
    """End and seconds of pauses behind which no step has ended yet."""
    kept: StepTable = field(default_factory=lambda: StepTable("qddd"))
    """Step → samples, loss, step_s, time."""
    next: int = 0
    """The step behind the newest one of the kept steps."""
    samples: int = 0
    useful_s: float = 0.0
    """Of the kept steps."""
    redone: set[tuple[int, int, int, int]] = field(default_factory=set)
    """Invocation, attempt, generation, step."""
    rolled_back: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """Workers lost, by reason."""
    fleet: Fleet = field(default_factory=Fleet)
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
    compressed: Event | None = None
    """What rank 0 has sent of its gradients in 16 bits, as it was last measured."""

    def read(self, event: Event) -> None:
        """Take one more event."""
        time, self.before = float(event["time"]), self.now
        if time > self.now:
            self.now = time
        else:
            self.clock.read(event, self.now)
        if self.before < 0.0:  # the first event
            self.books.until = self.accounts.until = self.now
        if not self.run:
            self.run = str(event.get("run", ""))
        if (name := event["event"]) != "worker.step_committed":
            self.standstills.read(event)
        if reader := _READERS.get(name):
            reader(self, event)

    def close(self) -> None:
        """Book the time up to the last event."""
        if math.isinf(self.now):
            return
        self._close_pauses()
        if self.world_of is not None:
            self._book(Phase.TRAINING, self.now)
        self._leave_world()
        self.accounts.close()

    def closed(self, *, is_drawn: bool = True) -> History:
        """Return the closed history of the events so far; this one reads on.

        Without `is_drawn` it has the sums, and no periods and lanes to draw. Then it costs a few
        numbers for each host that is there, and for one that has gone a place in a dict's copy.
        """
        found = copy(self)
        found.books = self.books.copy(is_drawn=is_drawn)
        found.accounts = self.accounts.copy(is_drawn=is_drawn)
        found.pauses, found.open_pauses = self.pauses[:], self.open_pauses[:]
        found.close()
        return found

    def _run_started(self, event: Event) -> None:
        self.invocations += 1
        self._book(Phase.RESTARTING, self.before)
        self.accounts.end_attempt(self.before)
        self._book_closed_by(event)
        self.is_booting = True
        self.accounts.least = least_workers(event.get("options"))
        self.world_of = None

    def _attempt_started(self, event: Event) -> None:
        self.attempts.add(self._attempt(event))
        self._leave_world()
        self.accounts.end_attempt(self.now)

    def _attempt_ended(self, event: Event) -> None:
        if event.get("verdict") == "interrupted" and self.world_of is not None:
            self._close_pauses()
            self._book(Phase.TRAINING, self.now)  # a person stopped it: nothing is lost
        self._leave_world()

    def _generation_formed(self, event: Event) -> None:
        self.is_forming_after_loss = event.get("reason") == "death"
        self._form(event.get("workers") or self.accounts.booted())

    def _form(self, workers: Iterable[str]) -> None:
        self.formed = [str(worker) for worker in workers]
        self.accounts.form({worker: self.fleet.name_of(worker) for worker in self.formed}, self.now)

    def _generation_started(self, event: Event) -> None:
        attempt, step = self._attempt(event), int(event["step"])
        if attempt == self.world_of:  # a worker.pause_ended may follow
            self.open_pauses.append((self.now, float(event.get("pause_s") or 0.0)))
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
        self.accounts.begin_world(step)

    def _drop_steps(self, first: int) -> None:
        """Take back the steps that a start from a checkpoint has dropped."""
        dropped, since = dict[int, float](), math.inf
        for step in list(self.kept.steps(first)) if first < self.next else ():
            samples, _, step_s, time = self.kept.pop(step) or (0, 0.0, 0.0, math.inf)
            self.samples, self.useful_s = self.samples - int(samples), self.useful_s - step_s
            dropped[step], since = step_s, min(since, time - step_s)
            self.dropped_s += 0.0 if self.is_booting else step_s
        self.next = min(self.next, first)
        if dropped:
            self.accounts.drop_steps(dropped, since)
            self.rolled_back += len(dropped)
            self.finished = None

    def _step_redone(self, event: Event) -> None:
        self.redone.add((*self._attempt(event), self.generations, int(event["step"])))
        self.is_redoing = True

    def _job_described(self, event: Event) -> None:
        self.accounts.microbatches = int(event["microbatches"])
        if self.finished and event.get("steps") != self.finished["steps"]:
            self.finished = None  # resumed with more steps

    def _pause_ended(self, event: Event) -> None:
        self.open_pauses.clear()
        self._pause(self.now, float(event["duration_s"]), event)

    def _step_committed(self, event: Event) -> None:
        if self.open_pauses and not event.get("repeated"):
            self._close_pauses()
        self.standstills.step(self.now)
        step_s = float(event.get("step_s") or 0.0)
        self._keep(event["step"], event["samples"], float(event["loss"]), step_s)
        if not self.open_pauses:
            self._book_step(step_s, float(event.get("checkpoint_s") or 0.0))

    def _commit_kept(self, event: Event) -> None:
        """Take a commit of a script in Horovod's own style: it says nothing of samples or loss."""
        commit_s = float(event["commit_s"])
        self._keep(event["step"], 0, math.nan, commit_s)
        if not self.open_pauses:
            self._book_step(commit_s, 0.0)

    def _keep(self, step: int, samples: int, loss: float, step_s: float) -> None:
        """Keep a step, unless its line has come before."""
        if self.kept.add(step, (samples, loss, step_s, self.now)):
            self.samples += samples
            self.useful_s += step_s
            if step >= self.next:
                self.next = step + 1

    def _book_step(self, step_s: float, checkpoint_s: float) -> None:
        self.is_redoing = False
        self.accounts.book_step(step_s, checkpoint_s, self.now)
        self.books.book(Phase.TRAINING, self.now)

    def _gradients_compressed(self, event: Event) -> None:
        self.compressed = event

    def _run_finished(self, event: Event) -> None:
        self.finished = event
        self._close_pauses()
        self._book_closed_by(event)

    def _worker_started(self, event: Event) -> None:
        self.fleet.of(event).start(event["worker"], self.now)
        self.accounts.start_worker(event["worker"], self.fleet.name_of(event["worker"]), self.now)

    def _worker_ready(self, event: Event) -> None:
        self.fleet.of(event).ready(event["worker"], self.now)
        self.accounts.ready_worker(event["worker"], self.fleet.name_of(event["worker"]), self.now)

    def _worker_gone(self, event: Event) -> None:
        self.fleet.of(event).gone(event["worker"], self.now)
        self.accounts.end_worker(event["worker"], self.fleet.name_of(event["worker"]), self.now)
        reason = str(event.get("reason"))
        if reason in ENDINGS and ENDINGS[reason].is_lost:
            self.lost[reason] += 1

    def _pause(self, end: float, seconds: float, parts: Event | None = None) -> None:
        self.pauses.append(round(seconds, 3))
        if self.is_forming_after_loss:
            self.failures, self.stalled_s = self.failures + 1, self.stalled_s + seconds
        # What is left of the time since the last step is the usual time of this one.
        self._book(Phase.TRAINING, end - seconds, Account.USEFUL)
        until = end - seconds
        for name, account in PARTS.items():
            until += float((parts or {}).get(name) or 0.0)
            self._book(Phase.PAUSING, min(until, end), account)
        self._book(Phase.PAUSING, end,
                   Account.REDONE if parts and self.is_redoing else Account.FORMING)
        self.is_redoing = False

    def _close_pauses(self) -> None:
        """Book the pauses that have no worker.pause_ended (version 0.1)."""
        for end, seconds in self.open_pauses:
            self._pause(end, seconds)
        self.open_pauses.clear()

    def _leave_world(self) -> None:
        self._close_pauses()
        self._book(Phase.RESTARTING, self.now)
        self.world_of = None

    def _attempt(self, event: Event) -> Attempt:
        return (self.invocations, int(event["attempt"]))

    def _book_closed_by(self, event: Event) -> None:
        if phase := KINDS[event["event"]].closes:
            self._book(phase, self.now)

    def _book(self, phase: Phase, until: float, account: Account | None = None) -> None:
        if phase is Phase.RESTARTING and self.is_booting:
            phase = Phase.BOOTING
        self.accounts.book(account or ACCOUNTS[phase], until)
        self.books.book(phase, until)


_READERS: dict[str, Callable[[History, Event], None]] = {
    "run.started": History._run_started,
    "attempt.started": History._attempt_started,
    "attempt.ended": History._attempt_ended,
    "discovery.host_in": lambda history, event: history.fleet.take_machine(event),
    "driver.host_added": lambda history, event: history.accounts.list_host(
        event["host"], int(event["slots"]), history.now),
    "driver.host_removed": lambda history, event: history.accounts.list_host(
        event["host"], 0, history.now),
    "driver.generation_formed": History._generation_formed,
    "job.described": History._job_described,
    "worker.generation_started": History._generation_started,
    "worker.step_redone": History._step_redone,
    "worker.step_committed": History._step_committed,
    "worker.commit_kept": History._commit_kept,
    "worker.pause_ended": History._pause_ended,
    "worker.gradients_compressed": History._gradients_compressed,
    "run.finished": History._run_finished,
    "driver.worker_started": History._worker_started,
    "driver.worker_ready": History._worker_ready,
    "driver.worker_gone": History._worker_gone,
}


def least_workers(options: Any) -> int:
    """Return --min-np of a run's options; 1 if they do not have it."""
    words = (options if isinstance(options, Mapping) else {}).get("horovodrun") or []
    with suppress(ValueError, LookupError, TypeError):
        return int(words[words.index("--min-np") + 1])
    return 1


def history_of(events: Iterable[Event]) -> History:
    """Return the history of a run whose events are read once, up to its last run.finished."""
    history = History()
    gate = UntilFinished()
    for event in gate.through(events):
        history.read(event)
    history.close()
    return history


def goodput_of(history: History) -> float | None:
    """Return the time of the kept steps, by the time so far since the first world; None before the
    first step."""
    books = history.closed(is_drawn=False).books
    return books.share(history.useful_s, Phase.BOOTING, Phase.STOPPED)


class UntilFinished:
    """Lets the events through, up to the last run.finished; those behind it only if the run was
    resumed with more steps."""

    def __init__(self) -> None:
        self._finished: Event | None = None
        self._later: list[Event] = []
        """The events behind run.finished: a few, unless the run was resumed with more steps."""

    def through(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events that are let through."""
        for event in events:
            if self._finished is None and event["event"] != "run.finished":  # nearly all events
                yield event
            else:
                yield from self.take(event)

    def take(self, event: Event) -> Sequence[Event]:
        """Take one more event; return those that are let through now."""
        if self._finished is None and event["event"] != "run.finished":
            return (event,)
        self._later.append(event)
        is_resumed = event["event"] == "job.described" and (
            self._finished is not None and event.get("steps") != self._finished["steps"])
        if event["event"] != "run.finished" and not is_resumed:
            return ()
        self._finished = None if is_resumed else event
        through, self._later = self._later, []
        return through

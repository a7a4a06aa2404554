"""The present status of a run: a fold over its events.

event log → here → watch (a panel, or lines)

What always holds:
1. A status is a pure function of the events so far, and the display is one of the status alone.
2. An event that cannot be read does not change the status.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from elastic_trainer.config import ConfigError
from elastic_trainer.events import sentences
from elastic_trainer.events.event_kind import Level
from elastic_trainer.events.event_table import KINDS
from elastic_trainer.events.schema import UNREADABLE
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.wire.plain import plain

MAX_SENTENCE = 1000
"""Characters of an event's sentence: the text of an error may have 50,000."""
SPEED_STEPS = 20
RECENT_EVENTS = 6
GONE_HOSTS = 5

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LiveWorker:
    """A worker whose process runs."""

    host: str
    pid: int
    """Of a worker on another host: the pid of our ssh, until the worker is ready and reports its
    own."""
    over_ssh: bool = False
    is_ready: bool = False


@dataclass(frozen=True, kw_only=True)
class Status:
    """The facts that `watch` shows of a run."""

    run: str = ""
    started: float | None = None
    """When a person, or the service, started or resumed the run the last time."""
    phase: str = "booting"
    """booting, training, pausing, restarting; at the end finished, failed or interrupted."""
    attempt: int = 0
    generation: int = 0
    size: int = 0
    steps: int = 0
    """Committed, in the kept history."""
    steps_due: int | None = None
    global_batch: int = 0
    microbatches: int | None = None
    """Of a global batch: more workers of a world than this have none."""
    loss: float | None = None
    speed: tuple[tuple[float, int], ...] = ()
    """(time, samples) of the last steps."""
    workers: Mapping[str, LiveWorker] = field(default_factory=dict)
    refusal: str = ""
    """Why AWS refuses machines, while it does."""
    listed: frozenset[str] = frozenset()
    """The hosts that the discovery lists."""
    noticed: frozenset[str] = frozenset()
    """The hosts that a rehearsal's trace has announced to take."""
    members: tuple[str, ...] = ()
    """The workers of the newest world, in the order of their ranks."""
    types: Mapping[str, str] = field(default_factory=dict)
    """The machine types of a cloud's hosts."""
    markets: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Zone and lifecycle of a cloud's hosts, "" if not known: they decide on the price."""
    gone: tuple[tuple[str, float], ...] = ()
    """The last hosts that have left, and when: neither listed nor with a worker."""
    checkpoint: tuple[int, float] | None = None
    """The step of the newest checkpoint, and when it was published."""
    skipped: int = 0
    """Lines of the event log that were left out, torn or malformed."""
    left_out: tuple[str, ...] = ()
    """Segments of the event log that are missing or cannot be read to their end."""
    recent: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        return self.phase in ("finished", "failed", "interrupted")

    @property
    def samples_per_s(self) -> float | None:
        """The rate over the steps in `speed`, pauses included; None before 2 steps."""
        if len(self.speed) < 2 or self.speed[-1][0] <= self.speed[0][0]:
            return None
        samples = sum(samples for _, samples in self.speed[1:])
        return samples / (self.speed[-1][0] - self.speed[0][0])

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the present speed."""
        if self.steps_due is None or not self.samples_per_s or not self.global_batch:
            return None
        return (self.steps_due - self.steps) * self.global_batch / self.samples_per_s

    @property
    def kill_command(self) -> str | None:
        """The command that kills a worker, a ready one if there is any; None if no pid is known."""
        known = [worker for worker in self.workers.values()
                 if worker.is_ready or not worker.over_ssh]
        ready = [worker for worker in known if worker.is_ready]
        if not known:
            return None
        worker = (ready or known)[-1]
        kill = f"kill -9 {worker.pid}"
        return f"ssh {worker.host} {kill}" if worker.over_ssh else kill


def fold(status: Status, event: Event) -> Status:
    """Return the status after one more event. An event that cannot be read leaves it unchanged."""
    try:
        if change := _FOLDS.get(event["event"]):
            status = change(status, event)
        text = sentence(event, status)
    except UNREADABLE:
        return status
    if not text:
        return status
    clock = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
    line = f"{clock} {plain(text)[:MAX_SENTENCE]}"
    return replace(status, recent=(*status.recent, line)[-RECENT_EVENTS:])


def sentence(event: Event, status: Status) -> str:
    """Return the sentence about an event; "" if a person does not need to know of it."""
    kind = KINDS.get(event["event"])
    if kind is None or kind.level is Level.DETAIL:
        return ""
    worker = status.workers.get(event.get("worker", ""))
    known = {} if worker is None else {"host": worker.host, "pid": worker.pid}
    return sentences.filled(kind.sentence, {"run": "", **known, **event})


def _run_started(status: Status, event: Event) -> Status:
    return replace(status, run=str(event["run"]), started=float(event["time"]), phase="booting",
                   listed=frozenset(), noticed=frozenset(), members=(), gone=())


def _attempt_started(status: Status, event: Event) -> Status:
    phase = "restarting" if status.generation else "booting"
    return replace(status, phase=phase, attempt=int(event["attempt"]), size=0, speed=(),
                   listed=frozenset(), members=())


def _attempt_ended(status: Status, event: Event) -> Status:
    return replace(status, phase=_PHASE_AFTER[event["verdict"]], workers={},
                   members=())


def _given_up(status: Status, event: Event) -> Status:
    return replace(status, phase="failed")


def _stopped(status: Status, event: Event) -> Status:
    return replace(status, phase="interrupted")


def _host_added(status: Status, event: Event) -> Status:
    host = str(event["host"])
    return replace(status, listed=status.listed | {host}, noticed=status.noticed - {host},
                   gone=tuple(it for it in status.gone if it[0] != host))


def _host_removed(status: Status, event: Event) -> Status:
    host = str(event["host"])
    return _without_host(replace(status, listed=status.listed - {host}), host, event)


def _host_noticed(status: Status, event: Event) -> Status:
    return replace(status, noticed=status.noticed | {str(event["host"])})


def _without_host(status: Status, host: str, event: Event) -> Status:
    """Count a host as gone if it is neither listed nor has a worker."""
    if host in status.listed or any(it.host == host for it in status.workers.values()):
        return status
    others = tuple(it for it in status.gone if it[0] != host)
    return replace(status, gone=(*others, (host, float(event["time"])))[-GONE_HOSTS:],
                   noticed=status.noticed - {host})


def _poller_lists(status: Status, event: Event) -> Status:
    host = str(event["host"])
    market = str(event.get("zone") or ""), str(event.get("lifecycle") or "")
    return replace(status, types={**status.types, host: str(event["type"])},
                   markets={**status.markets, host: market})


def _poller_unlists(status: Status, event: Event) -> Status:
    types = {host: it for host, it in status.types.items() if host != event["host"]}
    markets = {host: it for host, it in status.markets.items() if host != event["host"]}
    return replace(status, types=types, markets=markets)


def _published(status: Status, event: Event) -> Status:
    return replace(status, checkpoint=(int(event["step"]), float(event["time"])))


def _worker_started(status: Status, event: Event) -> Status:
    worker = LiveWorker(host=event["host"], pid=int(event["pid"]),
                        over_ssh=bool(event.get("over_ssh")))
    return replace(status, workers={**status.workers, event["worker"]: worker})


def _worker_ready(status: Status, event: Event) -> Status:
    worker = status.workers[event["worker"]]
    worker = replace(worker, is_ready=True, pid=int(event.get("pid") or worker.pid))
    return replace(status, workers={**status.workers, event["worker"]: worker})


def _worker_gone(status: Status, event: Event) -> Status:
    others = {name: it for name, it in status.workers.items() if name != event["worker"]}
    left = status.workers.get(event["worker"])
    status = replace(status, workers=others)
    return _without_host(status, left.host, event) if left else status


def _generation_formed(status: Status, event: Event) -> Status:
    members = event.get("workers")
    if isinstance(members, list):
        status = replace(status, members=tuple(map(str, members)))
    return replace(status, phase="pausing") if status.phase == "training" else status


def _job_described(status: Status, event: Event) -> Status:
    keys = ("dataset_size", "global_batch", "microbatches", "epochs", "seed", "max_steps")
    try:
        schedule = Schedule(**{key: event[key] for key in keys},
                            drop_last=bool(event.get("drop_last")))
    except ConfigError:
        return status
    return replace(status, steps_due=schedule.steps, global_batch=int(event["global_batch"]),
                   microbatches=int(event["microbatches"]))


def _generation_started(status: Status, event: Event) -> Status:
    return replace(status, phase="training", attempt=int(event["attempt"]),
                   generation=int(event["generation"]), size=int(event["size"]),
                   steps=int(event["step"]))


def _step_committed(status: Status, event: Event) -> Status:
    speed = status.speed
    if not event.get("repeated"):
        speed = (*speed, (float(event["time"]), int(event["samples"])))[-SPEED_STEPS:]
    return replace(status, phase="training", steps=int(event["step"]) + 1,
                   loss=float(event["loss"]), speed=speed)


def _commit_kept(status: Status, event: Event) -> Status:
    return replace(status, phase="training", steps=int(event["step"]) + 1)


def _launch_refused(status: Status, event: Event) -> Status:
    return replace(status, refusal=sentences.refusal(event))


def _launch_refusal_ended(status: Status, event: Event) -> Status:
    return replace(status, refusal="")


def _run_finished(status: Status, event: Event) -> Status:
    loss = float(event["loss"]) if "loss" in event else status.loss
    return replace(status, phase="finished", steps=int(event["steps"]), loss=loss)


_PHASE_AFTER = {"finished": "finished", "failed": "restarting", "user_error": "failed",
                "interrupted": "interrupted", "unsaved": "failed"}
_FOLDS: dict[str, Callable[[Status, Event], Status]] = {
    "run.started": _run_started,
    "attempt.started": _attempt_started,
    "attempt.ended": _attempt_ended,
    "run.given_up": _given_up,
    "run.stopped": _stopped,
    "driver.host_added": _host_added,
    "driver.host_removed": _host_removed,
    "rehearsal.host_noticed": _host_noticed,
    "discovery.host_in": _poller_lists,
    "discovery.host_out": _poller_unlists,
    "state.checkpoint_published": _published,
    "discovery.launch_refused": _launch_refused,
    "discovery.launch_refusal_ended": _launch_refusal_ended,
    "driver.worker_started": _worker_started,
    "driver.worker_ready": _worker_ready,
    "driver.worker_gone": _worker_gone,
    "driver.generation_formed": _generation_formed,
    "job.described": _job_described,
    "worker.generation_started": _generation_started,
    "worker.step_committed": _step_committed,
    "worker.commit_kept": _commit_kept,
    "run.finished": _run_finished,
}

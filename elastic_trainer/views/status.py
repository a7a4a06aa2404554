"""The present status of a run: what `watch` and the page show of it.

run (the fold of the event log) → here → watch (a panel, or lines), host_rows, metrics

What always holds: a status is a pure function of the events so far, and the display is one of the
status alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from elastic_trainer.config import ConfigError
from elastic_trainer.events.fleet import LiveWorker
from elastic_trainer.events.run import Run
from elastic_trainer.events.told import Telling
from elastic_trainer.schedule.schedule import Schedule

SPEED_STEPS = 20
RECENT_EVENTS = 6

Event = Mapping[str, Any]


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


def status_of(run: Run, skipped: int = 0, left_out: Iterable[str] = ()) -> Status:
    """Return the status of a run after the events so far."""
    fleet, steps, newest = run.fleet, run.steps, run.checkpoints[-1:]
    first = max(run.speed_from, len(steps) - SPEED_STEPS) if steps.counts_samples else len(steps)
    return Status(
        run=run.name, started=run.started, phase=run.phase, size=run.size, steps=run.step,
        attempt=run.attempt, loss=run.loss,
        generation=run.generations[-1].number if run.generations else 0,
        **_job(run.job),
        speed=tuple(zip(steps.ends[first:], steps.samples[first:], strict=True)),
        workers=dict(fleet.workers), refusal=run.refusal, listed=frozenset(fleet.listed),
        noticed=frozenset(fleet.noticed), members=fleet.members, gone=tuple(fleet.gone.items()),
        types={host: str(it["type"]) for host, it in fleet.machines.items()},
        markets={host: (str(it.get("zone") or ""), str(it.get("lifecycle") or ""))
                 for host, it in fleet.machines.items()},
        checkpoint=(newest[0].step, newest[0].time) if newest else None,
        skipped=skipped, left_out=tuple(left_out),
        recent=tuple(map(line_of, run.told.last(RECENT_EVENTS))))


def line_of(told: Telling) -> str:
    """Return an event in words, with its time of day."""
    return f"{datetime.fromtimestamp(told.time).strftime('%H:%M:%S')} {told.text}"


def _job(job: Event) -> dict[str, Any]:
    keys = ("dataset_size", "global_batch", "microbatches", "epochs", "seed", "max_steps")
    try:
        schedule = Schedule(**{key: job[key] for key in keys},
                            drop_last=bool(job.get("drop_last")))
    except (ConfigError, LookupError):
        return {}
    return {"steps_due": schedule.steps, "global_batch": int(job["global_batch"]),
            "microbatches": int(job["microbatches"])}

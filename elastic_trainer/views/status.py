"""The present status of a run, and a row for each of its hosts: what `watch` and the page show.

run (the fold of the event log), now (now.json), prices → here → watch, page, metrics

What always holds:
1. Status and rows are pure functions of the events so far and of what the driver last knew, if it
   is there. The display is a function of them alone.
2. There are at most as many rows as asked for, and the other hosts are counted by state.
3. Hosts whose state is about to change come first, and hosts that have left come last.
4. Ages of heartbeats and phases are those that the driver knew. If it is a copy of the driver's
   file, `caption` has its age, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from elastic_trainer.config import ConfigError
from elastic_trainer.events.fleet import LiveWorker
from elastic_trainer.events.now import Now, WorkerNow
from elastic_trainer.events.run import Run
from elastic_trainer.events.told import Telling
from elastic_trainer.schedule.schedule import Schedule

if TYPE_CHECKING:
    from elastic_trainer.views.prices import Pricing

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
    """Why machines are refused, while they are."""
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
        """The command that kills a worker, a ready one if there is any; None if no pid is known,
        or if only agents reach the hosts."""
        known = [worker for worker in self.workers.values()
                 if not worker.by_agent and (worker.is_ready or not worker.over_ssh)]
        ready = [worker for worker in known if worker.is_ready]
        if not known:
            return None
        worker = (ready or known)[-1]
        kill = f"kill -9 {worker.pid}"
        return f"ssh {worker.host} {kill}" if worker.over_ssh else kill


def status_of(run: Run, skipped: int = 0, left_out: Iterable[str] = ()) -> Status:
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
    return f"{datetime.fromtimestamp(told.time).strftime('%H:%M:%S')} {told.text}"


def _job(job: Event) -> dict[str, Any]:
    keys = ("dataset_size", "global_batch", "microbatches", "epochs", "seed", "max_steps")
    try:
        schedule = Schedule(**{key: job[key] for key in keys}, drop_last=bool(job.get("drop_last")))
    except (ConfigError, LookupError):
        return {}
    return {"steps_due": schedule.steps, "global_batch": int(job["global_batch"]),
            "microbatches": int(job["microbatches"])}


STATES = ("draining", "waiting", "booting", "training", "finished", "spare", "standby", "idle",
          "gone")
"""In the order of the rows; docs/guide/watch.md explains them. A host with several workers has the
first state that one of them has."""
PHASE = "phase"
"""The head of the column of what a worker's loop does."""
LASTS_S = 3.0
"""A phase that has lasted so long is shown with its time and with what it works on. The step of a
small model takes less, and a row that changes each second is hard to read."""
NO_WORKER = WorkerNow(host="", rank=-1, phase="", step=0, drains=False, silent_s=None)


@dataclass(frozen=True)
class HostRow:
    """One host."""

    host: str
    state: str
    ranks: tuple[int, ...] = ()
    type: str = ""
    gone_at: float | None = None
    steps: tuple[int, ...] = ()
    """How many steps each of its workers in the world has finished."""
    silent_s: float | None = None
    """The age of the newest heartbeat, of the worker that has the oldest one."""
    does: str = ""
    """The phase of the worker that has been in its phase for the longest time; "": none is."""
    what: str = ""
    does_for_s: float = 0.0
    zone: str = ""
    lifecycle: str = ""


def host_rows(status: Status, now: Now | None = None) -> list[HostRow]:
    """Return the rows of all hosts, in the order of STATES and then of the ranks."""
    ranks = {worker: rank for rank, worker in enumerate(status.members)}
    workers: dict[str, list[tuple[str, LiveWorker]]] = {host: [] for host in status.listed}
    for name, worker in status.workers.items():
        workers.setdefault(worker.host, []).append((name, worker))
    rows = [_row(status, now, host, theirs, ranks) for host, theirs in workers.items()]
    for host, at in status.gone:
        if host not in workers:
            zone, lifecycle = status.markets.get(host, ("", ""))
            rows.append(HostRow(host, "gone", (), status.types.get(host, ""), at, zone=zone,
                                lifecycle=lifecycle))
    return sorted(rows, key=lambda row: (STATES.index(row.state), row.ranks or (len(ranks),),
                                         row.host))


def bounded(rows: list[HostRow], most: int) -> tuple[list[HostRow], str]:
    """Return at most `most` rows, and a sentence about the other hosts ("": there are none)."""
    if len(rows) <= most:
        return rows, ""
    counts = Counter(row.state for row in rows[most:])
    states = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    hosts = "1 more host" if len(rows) == most + 1 else f"{len(rows) - most} more hosts"
    return rows[:most], f"{hosts}: {states}"


def _row(status: Status, now: Now | None, host: str, workers: list[tuple[str, LiveWorker]],
         ranks: dict[str, int]) -> HostRow:
    known = {name: now.workers.get(name) if now else None for name, _ in workers}
    members = [name for name, _ in workers if name in ranks]
    states = {_state(worker, known[name], ranks.get(name), status.microbatches)
              for name, worker in workers} or {"idle"}
    if host in status.noticed or host not in status.listed or any(
            it.drains for it in known.values() if it):
        states.add("draining")
    zone, lifecycle = status.markets.get(host, ("", ""))
    silences = [it.silent_s for it in known.values() if it and it.silent_s is not None]
    in_phase = [it for it in known.values() if it and it.does and it.phase == "training"]
    slowest = max(in_phase, key=lambda it: it.does_for_s, default=NO_WORKER)
    return HostRow(
        host, min(states, key=STATES.index), tuple(sorted(ranks[name] for name in members)),
        status.types.get(host, ""),
        steps=tuple(it.step if (it := known[name]) else status.steps for name in members),
        silent_s=max(silences, default=None), zone=zone, lifecycle=lifecycle,
        does=slowest.does, what=slowest.what, does_for_s=slowest.does_for_s)


def _state(worker: LiveWorker, now: WorkerNow | None, rank: int | None,
           microbatches: int | None) -> str:
    """Return the state of a worker. The driver's file may be a second older than the log."""
    state = now.phase if now else ""
    if state not in ("booting", "waiting", "finished"):
        state = "booting" if not worker.is_ready else "standby" if rank is None else "training"
    is_spare = state == "training" and microbatches and rank and rank >= microbatches
    return "spare" if is_spare else state


def columns(status: Status, now: Now | None, prices: Pricing | None) -> list[str]:
    """Return the heads of the columns: those of which something is known."""
    return ["host", "state", "rank", "step", *(["heartbeat", PHASE] if now else []),
            *(["type"] if status.types else []), *([f"{prices.currency}/h"] if prices else [])]


def cells(rows: Iterable[HostRow], heads: list[str], prices: Pricing | None, moment: float
          ) -> Iterator[list[str]]:
    """Yield the texts of each row, at a time of the reader's clock."""
    for row in rows:
        known = {
            "host": row.host, "rank": span_of(row.ranks), "step": span_of(row.steps),
            "state": row.state if row.gone_at is None else f"gone {age(moment - row.gone_at)}",
            "heartbeat": "-" if row.silent_s is None else f"{age(row.silent_s)} old",
            PHASE: doing(row) or "-",
            "type": row.type or "-"}
        yield [known[head] if head in known else _price(prices, row) for head in heads]


def doing(row: HostRow) -> str:
    """Return the phase in a word; of one that lasts, also how long and with what."""
    if row.does_for_s < LASTS_S:
        return row.does
    return f"{row.does} {age(row.does_for_s)}" + (f": {row.what}" if row.what else "")


def caption(now: Now | None) -> str:
    """Return the age of a copy of the driver's file; "" if there is none, or the file itself."""
    if now is None or now.copied_s is None:
        return ""
    return f"Step, heartbeat, phase: {age(now.copied_s)} ago (the bucket's copy)"


def span_of(numbers: tuple[int, ...]) -> str:
    """Return "-", "3", or "4-7" for the lowest and the highest of several."""
    if not numbers:
        return "-"
    first, last = min(numbers), max(numbers)
    return f"{first}" if first == last else f"{first}-{last}"


def age(seconds: float) -> str:
    """Return a duration in whole seconds, minutes or hours."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"


def _price(prices: Pricing | None, row: HostRow) -> str:
    price = prices.find(row.host, row.type, row.zone, row.lifecycle) if prices else None
    return f"{price.spot:.4g}" if price else "-"

"""A row for each host of a run: its state, ranks, step, heartbeat and price.

status (event log), now (now.json), prices → here → watch, the page

What always holds:
1. The rows are a pure function of the status and of what the driver last knew, if it is there.
2. There are at most as many rows as asked for, and the other hosts are counted by state.
3. Hosts whose state is about to change come first, and hosts that have left come last.
4. Ages of heartbeats and phases are those that the driver knew. If it is a copy of the driver's
   file, `caption` has its age, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_trainer.events.fleet import LiveWorker
from elastic_trainer.events.now import Now, WorkerNow
from elastic_trainer.views.status import Status

if TYPE_CHECKING:
    from elastic_trainer.views.prices import Pricing

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

"""A row for each host of a run, as the terminal view shows it.

status → here → watch

What always holds:
1. The rows are a pure function of the status.
2. There are at most as many rows as asked for, and the other hosts are counted by state.
3. Hosts whose state is about to change come first, and hosts that have left come last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from elastic_trainer.observe.status import LiveWorker, Status

STATES = ("draining", "booting", "training", "idle", "gone")
"""In the order of the rows. draining: a host under notice, or one that has left the list and still
has a worker. idle: a host without a worker in the world."""


@dataclass(frozen=True)
class HostRow:
    """One host."""

    host: str
    state: str
    ranks: tuple[int, ...] = ()
    type: str = ""
    gone_at: float | None = None

    @property
    def ranks_in_words(self) -> str:
        """The ranks: "-", "3", or "4-7" for the first and the last of several."""
        if not self.ranks:
            return "-"
        first, last = min(self.ranks), max(self.ranks)
        return f"{first}" if first == last else f"{first}-{last}"


def host_rows(status: Status) -> list[HostRow]:
    """Return the rows of all hosts, in the order of STATES and then of the ranks."""
    ranks = {worker: rank for rank, worker in enumerate(status.members)}
    workers: dict[str, list[tuple[str, LiveWorker]]] = {host: [] for host in status.listed}
    for name, worker in status.workers.items():
        workers.setdefault(worker.host, []).append((name, worker))
    rows = [_row(status, host, theirs, ranks) for host, theirs in workers.items()]
    rows += [HostRow(host, "gone", (), status.types.get(host, ""), at) for host, at in status.gone
             if host not in workers]
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


def _row(status: Status, host: str, workers: list[tuple[str, LiveWorker]],
         ranks: dict[str, int]) -> HostRow:
    theirs = tuple(sorted(ranks[name] for name, _ in workers if name in ranks))
    if host in status.noticed or host not in status.listed:
        state = "draining"
    elif any(not worker.is_ready for _, worker in workers):
        state = "booting"
    else:
        state = "training" if theirs else "idle"
    return HostRow(host, state, theirs, status.types.get(host, ""))

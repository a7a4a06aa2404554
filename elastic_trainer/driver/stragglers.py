"""A worker that computes slower than its peers over many steps: it makes all of them wait.

heartbeats (each worker's own time for a micro-batch) → here → driver.straggler_found → membership,
if stragglers are replaced

What always holds:
1. A worker is compared by its own time for one micro-batch: forward and backward. Waiting for
   others, or for its loader, is no part of it.
2. A host is named when its workers, and those of no other, were the slowest in WINDOWS windows in a
   row, which together last `straggler_s`.
3. The slow workers of a host leave between two steps, so no step is done again. They leave only
   while the others are at least --min-np, and the host gets no worker for OUT_S.
4. At most one host leaves within OUT_S. If one of its peers becomes slow with the rank that it had,
   the script has more work for that rank, and no straggler leaves any more in this attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median_high

from elastic_trainer.driver.membership import Membership
from elastic_trainer.driver.roster import OUT_S, Phase, Worker
from elastic_trainer.events.mark import WINDOW

SLOWER = 1.5
"""A straggler takes this many times the median of its peers."""
LEAST_S = 0.005
"""A smaller difference for a micro-batch is no reason to replace a host."""
WINDOWS = 3
LEAST_PEERS = 2


def slowest(own_s: Mapping[str, float], host_of: Mapping[str, str]) -> tuple[list[str], float]:
    """Return the workers of one host that are slower than their peers, the slowest first, and the
    median of their peers: the workers on other hosts, or if these are too few, all others. A worker
    without micro-batches has 0.
    """
    own_s = {name: seconds for name, seconds in own_s.items() if seconds}
    if len(own_s) <= LEAST_PEERS:
        return [], 0.0
    worst = max(own_s, key=lambda one: own_s[one])
    here = {name for name in own_s if host_of[name] == host_of[worst]}
    if len(own_s) - len(here) < LEAST_PEERS:
        here = {worst}
    # Of two peers the slower one: a worker that is as slow is no reason to name the other.
    peers_s = median_high(seconds for name, seconds in own_s.items() if name not in here)
    slow = [name for name in here
            if own_s[name] > SLOWER * peers_s and own_s[name] - peers_s > LEAST_S]
    return sorted(slow, key=lambda one: -own_s[one]), peers_s


class Stragglers:
    """Compares the workers of one attempt. The driver calls it under its lock."""

    def __init__(self, membership: Membership, env: Mapping[str, str],
                 emit: Callable[..., None]):
        self.roster, self.least = membership.roster, membership.rounds.min_workers
        self.window_s = membership.limits.straggler_s / WINDOWS
        self.replaces = env.get("ELASTIC_TRAINER_REPLACE_STRAGGLERS") == "1"
        self.emit = emit
        self._window = 0, -1, 0.0
        """The generation, step and time of the last window's end."""
        self._slow, self._times, self._named = "", 0, ""
        self._left_rank, self._left_at = -1, -OUT_S
        """The rank of the slowest worker that has left last, and when it was told to."""
        self._peers: set[str] = set()
        """The workers on other hosts then."""

    def look(self, now: float) -> None:
        """End a window if it is long enough."""
        current = self.roster.current()
        if any(w.phase is not Phase.TRAINING or w.at is None for w in current) or not current:
            return
        step = min(w.at.step for w in current if w.at)
        generation, since, at = self._window
        if generation != self.roster.generation:
            self._window, self._times = (self.roster.generation, step, now), 0
        elif step - since >= WINDOW and now - at >= self.window_s:
            self._window = generation, step, now
            self._compare(current, step, now)

    def _compare(self, current: list[Worker], step: int, now: float) -> None:
        own_s = {w.name: w.at.own_s for w in current if w.at and w.at.steps >= WINDOW}
        all_have = len(own_s) == len(current)
        slow, peers_s = slowest(own_s, {w.name: w.host for w in current}) if all_have else ([], 0.0)
        host = self.roster.workers[slow[0]].host if slow else ""
        if host != self._slow:
            self._slow, self._times = host, 0
            self._named = self._named if host else ""
        if not host:
            return
        self._times += 1
        if self._times < WINDOWS:
            return
        worker = self.roster.workers[slow[0]]
        leaves = (self.replaces and len(current) - len(slow) >= self.least and not worker.drains
                  and self._may_leave(worker, now))
        if self._named == host and not leaves:
            return
        self._named = host
        self.emit("driver.straggler_found", worker=worker.name, host=worker.host,
                  rank=worker.rank, step=step, own_s=round(own_s[worker.name], 4),
                  peers_s=round(peers_s, 4), is_replaced=leaves)
        if leaves:
            self._left_rank, self._left_at = worker.rank, now
            self._peers = {w.name for w in current if w.host != host}
            for name in slow:
                self.roster.workers[name].drains = True
            self.roster.hosts[worker.host].keep_out(now + OUT_S)

    def _may_leave(self, worker: Worker, now: float) -> bool:
        if worker.rank == self._left_rank and worker.name in self._peers:
            self.replaces = False
        return self.replaces and now - self._left_at >= OUT_S

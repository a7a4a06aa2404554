"""The driver's decisions, as one state machine without threads, sockets or clocks.

discovered hosts, heartbeats, processes' exits → here → actions: start or stop a process, form a
generation, end the attempt

What always holds:
1. A worker is offered a place only after it has reported that it stands ready. No member waits for
   a worker that boots: a newcomer that crashes or hangs at import is never offered one (F1).
2. A generation is formed only when every member of the one before is gone or waiting, and every
   member of the new one has accepted the offer. No worker enters `hvd.init()` while another one is
   known to be missing.
3. A worker counts as gone from its eviction on (ends.py).
4. A generation after the first has a member that holds the live state. If no worker holds it, the
   attempt is over, and the next one starts from the checkpoint.
5. All members of a generation reach each other. If two workers reach the driver, but not each
   other, one of them is evicted: they would break every generation that they share.
6. A worker whose host left the list is not in the next generation. While fewer than `min_workers`
   may work, the others wait, alive, with their state. So they do while a worker has reported that
   it has no memory for its part of so small a world.

The parts: roster (hosts and workers) · ends (who is ended, and why workers end) · differences (who
may join) · rounds (offers).

It replaces `ElasticDriver._activate_workers`, `WorkerStateRegistry` and `HostManager.blacklist`
(horovod/runner/elastic/{driver,registration,discovery}.py, 0.28.1). Their barrier can neither time
out nor survive a death while it waits (F3), and their ban has no end. Here a host whose worker died
gets a new worker after a back-off. By (1) this costs the others nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from elastic_trainer.config import Limits
from elastic_trainer.driver import ends
from elastic_trainer.driver.differences import Differences
from elastic_trainer.driver.progress import of_most
from elastic_trainer.driver.roster import Action, End, Phase, Roster, Start, Worker, loud
from elastic_trainer.driver.rounds import Rounds
from elastic_trainer.wire.heartbeat import Heartbeat, News, RankAssignment
from elastic_trainer.wire.proof import Proof
from elastic_trainer.world.arithmetic import Arithmetic

DRIVER_GAP_S = 1.0
"""A longer gap between two decisions means that the driver itself stood still."""
MAX_IDLE_GENERATIONS = 20
"""The attempt is over after this many generations in a row without a finished step."""
FAILED_RESTARTS = 6
"""The attempt is over when each listed host has failed this often, after a minute of back-off, and
no worker stands ready."""


class Membership:
    """All that the driver knows. `decide` returns what to do next."""

    def __init__(self, first_workers: int, min_workers: int, max_workers: int | None, *,
                 limits: Limits | None = None, refuses_mixed: bool = True,
                 has_trained: bool = False, wait_s: float | None = None,
                 allow_change: Collection[str] = ()):
        self.limits = limits or Limits()
        self.roster = Roster()
        self.differences = Differences(self.roster, allow_change, refuses_mixed=refuses_mixed)
        self.rounds = Rounds(self.roster, self.limits, self.differences, first_workers,
                             min_workers, max_workers, wait_s)
        self.blame = ends.Blame(self.roster, self.limits.settle_s, has_trained)
        self.state_exists = False
        """A worker has held the run's state in this attempt."""
        self.is_finished = False
        """A member has passed the last vote, so all members have applied the last step."""
        self.left = ""
        """Why the user's code on a worker has stopped the run, without an error."""
        self.unsaved = ""
        """Why the last checkpoint could not be written, as the first worker reports it."""
        self.verdict: End | None = None
        self.decided_at = 0.0

    @property
    def workers(self) -> dict[str, Worker]:
        """The workers by name; those whose process is gone are forgotten later."""
        return self.roster.workers

    # --- what happens ---------------------------------------------------------------------------

    def hosts_listed(self, hosts: Mapping[str, int]) -> None:
        """Take the discovery's newest answer (an ordered mapping host → slots)."""
        self.roster.list_hosts(hosts, self.decided_at)

    def reported(self, name: str, now: float, heartbeat: Heartbeat) -> bool:
        """Take a worker's heartbeat; False if a newer one was taken before.

        A heartbeat about an older generation changes little.
        """
        worker = self.workers.get(name)
        if worker is None or worker.phase is Phase.GONE or heartbeat.count <= worker.count:
            return False
        worker.count, worker.heard_at = heartbeat.count, now
        worker.arithmetic = worker.arithmetic or Arithmetic.from_dict(heartbeat.arithmetic)
        worker.proof = worker.proof or Proof.from_dict(heartbeat.proof)
        worker.step, worker.published = heartbeat.step, heartbeat.published
        worker.at = heartbeat.at if worker.is_credible(heartbeat) else None
        worker.drains = worker.drains or heartbeat.drains
        worker.needs = heartbeat.needs
        if heartbeat.error:
            self.blame.raised(worker, heartbeat.error)
        if heartbeat.left and not self.roster.is_let_go(worker):
            self.left = self.left or heartbeat.left
        self.unsaved = self.unsaved or heartbeat.unsaved
        if heartbeat.phase == "reviving":
            worker.phase, worker.started_at, worker.accepted = Phase.BOOTING, now, 0
        elif heartbeat.phase != "booting" and heartbeat.generation == worker.generation:
            self._take_state(worker, heartbeat, now)
        # Else the worker has not received the place that it was given.
        if heartbeat.machine:
            self.blame.machine_failed(worker, heartbeat.machine)
        if heartbeat.differs:
            self.blame.differed(worker, now)
        return True

    def _take_state(self, worker: Worker, heartbeat: Heartbeat, now: float) -> None:
        """Take what a worker reports of its place in its newest generation."""
        worker.holds_state = heartbeat.holds_state
        self.state_exists = self.state_exists or heartbeat.holds_state
        self._take_phase(worker, heartbeat.phase, now)
        if heartbeat.phase in (Phase.STANDBY.value, Phase.WAITING.value):
            worker.accepted, worker.unreachable = heartbeat.accepted, heartbeat.unreachable

    def _take_phase(self, worker: Worker, phase: str, now: float) -> None:
        if phase == Phase.STANDBY.value:
            if worker.phase is Phase.BOOTING:
                worker.phase, worker.ready_at = Phase.STANDBY, now
                self.blame.has_booted = True
        elif worker.generation > 0:
            if phase == Phase.WAITING.value and worker.phase is not Phase.WAITING:
                worker.waits_since = now
            worker.phase = Phase(phase)
            self.is_finished = self.is_finished or worker.phase is Phase.FINISHED

    def exited(self, name: str, code: int, now: float, place: str = "") -> str:
        """Take the end of a worker's process, and where it died; return the reason."""
        worker = self.workers[name]
        before = worker.phase
        worker.phase, worker.has_exited = Phase.GONE, True
        self.roster.tried.add((worker.host, worker.slot))
        return self.blame.exited(worker, before, code, now, place, is_over=bool(self.verdict))

    def dismiss(self, name: str) -> None:
        """Note that a worker has been sent away. It ends by itself."""
        if worker := self.workers.get(name):
            worker.dismissed = True

    def end(self, verdict: End) -> End:
        """End the attempt for a reason that is not among those of `decide`."""
        self.verdict = verdict
        return verdict

    # --- what to do -----------------------------------------------------------------------------

    def decide(self, now: float) -> list[Action]:
        """Return what has to be done now, and note it as done.

        Call it after each happening, and at least every DRIVER_GAP_S.
        """
        if self.verdict:
            return []
        if self.decided_at and now - self.decided_at > DRIVER_GAP_S:
            self.roster.forgive(now - self.decided_at, now)
        self.decided_at = now
        self.roster.forget(self.rounds.offered())
        actions = [
            *ends.evict(self.roster, self.limits, now, is_finished=self.is_finished),
            *ends.drop_failed(self.roster, now), *ends.stop_unlisted(self.roster)]
        if end := self._end():
            actions.append(end)
        elif not self.is_finished:
            actions += self.differences.newcomers(now)
            actions += self._start(now)
            actions += self.rounds.next(now)
        self.verdict = next((action for action in actions if isinstance(action, End)), None)
        return actions

    def _start(self, now: float) -> list[Action]:
        """Start a worker in each listed slot that has none, unless its host is in a back-off."""
        roster = self.roster
        taken = {(w.host, w.slot) for w in roster.alive()}
        return [Start(host, slot, roster.add(host, slot, now).name)
                for host, slots in roster.listed.items() for slot in range(slots)
                if (host, slot) not in taken and now >= roster.hosts[host].not_before]

    def _end(self) -> End | None:
        """Return the end of the attempt, if there is a reason for one."""
        roster, alive = self.roster, self.roster.alive()
        if error := (self.blame.user_error
                     or self.blame.common_crash(state_exists=self.state_exists)):
            return End("user_error", error)
        if self.unsaved:
            return End("unsaved", self.unsaved)
        if self.left:
            return End("interrupted", self.left)
        if self.is_finished:
            working = (Phase.FINISHED, Phase.TRAINING, Phase.WAITING)
            is_over = not any(w.phase in working for w in roster.current())
            return End("finished", "") if is_over else None
        have_all_failed = bool(roster.listed) and all(
            roster.hosts[host].failures >= FAILED_RESTARTS for host in roster.listed)
        if have_all_failed and all(w.phase is Phase.BOOTING and not w.generation for w in alive):
            return End("failed", f"No worker stands ready, though each of {len(roster.listed)} "
                                 f"hosts was tried {FAILED_RESTARTS} times or more.")
        if self.rounds.idle_generations > MAX_IDLE_GENERATIONS:
            return End("failed", f"{self.rounds.idle_generations} generations in a row finished "
                                 f"no step.")
        if self.state_exists and not any(
                roster.may_hold_state(w) and not w.dismissed for w in alive):
            return End("failed", "No living worker holds the state any more. The next attempt "
                                 "starts from the checkpoint.")
        return None

    # --- what workers and the supervisor are sent -----------------------------------------------

    def hold_s(self) -> float:
        """Return how long the driver holds the answer to a heartbeat without news."""
        return ends.hold_s(self.limits, len(self.workers))

    def basis(self, notice: str) -> tuple[Any, ...]:
        """Return all on which answers rest: while it stays the same, no worker has news."""
        roster, holder = self.roster, self.roster.holder()
        return (notice, roster.generation, self.rounds.offer and self.rounds.offer.round,
                self.verdict, self.is_finished, holder and holder.name, dict(roster.listed),
                [loud(w) for w in self.workers.values()])

    def reached(self) -> tuple[int, int]:
        """Return the steps that most living members have finished, and their newest checkpoint.

        The checkpoint is the newest that most of them know to be published. The report of a single
        worker counts only where it is alone.
        """
        current = self.roster.current()
        if not current:
            return 0, -1
        return of_most(w.step for w in current), of_most(w.published for w in current)

    def notice(self, now: float) -> str:
        """Return why the training members should leave for a new generation; "" if not."""
        roster, most = self.roster, self.rounds.max_workers
        current = roster.current()
        if not roster.generation or self.is_finished:
            return ""
        if any(not roster.is_wanted(w) for w in current) or (most and len(current) > most):
            return "leave"
        newcomers = [w for w in roster.newcomers() if roster.reaches_all(w)]
        has_room = most is None or len(current) < most
        if newcomers and has_room and self.rounds.has_settled(newcomers, now):
            return "join"
        return "death" if len(current) < len(roster.members) else ""

    def news_for(self, name: str, now: float, notice: str | None = None) -> News:
        """Return all that concerns this worker now, without its peers' addresses.

        `notice` is the result of the method of this name, where the caller has it. A worker that
        is sent `leave` is to be noted with `dismiss`.
        """
        worker = self.workers.get(name)
        if worker is None or worker.phase is Phase.GONE:
            return News(evicted=True)
        roster, is_writer = self.roster, self.roster.is_writer(name)
        if self.verdict and self.verdict.verdict != "finished":
            return News(over=self.verdict.verdict, detail=self.verdict.detail, writes=is_writer)
        is_wanted = roster.is_wanted(worker)
        # All workers that hold the state may end at any moment.
        is_last = worker.phase is Phase.WAITING and not any(
            roster.is_wanted(w) for w in roster.current() if w.holds_state)
        leaves = worker.dismissed or (worker.phase is Phase.STANDBY and not is_wanted)
        is_offered = name in self.rounds.offered()
        news = News(finished=self.is_finished, writes=is_last and is_writer, leave=leaves,
                    offer=self.rounds.number if is_offered else 0)
        if worker.phase is not Phase.TRAINING or worker.generation != roster.generation:
            return news
        dead = tuple(rank for rank, member in enumerate(roster.members)
                     if self.workers[member].phase is Phase.GONE)
        return replace(
            news, place=RankAssignment(generation=roster.generation, rank=worker.rank,
                             size=len(roster.members)),
            notice=self.notice(now) if notice is None else notice, unwanted=not is_wanted,
            dead=dead)

    def peers_of(self, name: str) -> list[str]:
        """Return the workers to which this one should try to connect before its next place."""
        worker, offered = self.workers.get(name), self.rounds.offered()
        is_over = self.verdict is not None and self.verdict.verdict != "finished"
        if worker is None or worker.phase is Phase.GONE or is_over:
            return []
        if name in offered:
            return [member for member in offered if member != name]
        is_newcomer = worker.phase is Phase.STANDBY
        return [member.name for member in self.roster.current()] if is_newcomer else []

"""Who is in the world: the driver's decisions, as one state machine without threads, sockets or clocks.

discovered hosts, workers' words, processes' exits → here → start / stop a process, offer a place, form a generation

What always holds:
1. A worker is offered a place only after it has said that it stands ready, so nobody waits for one that boots
   (F1: a newcomer that crashes or hangs at import is never in any round).
2. A generation is formed only when every member of the one before it is gone or waiting, and every member of the
   new one has accepted the offer: nobody enters `hvd.init()` while somebody is known to be missing.
3. A worker counts as gone from the moment of its eviction, not from the exit of its process, its ssh or the end of
   its output (F3: Horovod's own barrier waits for those without a time-out).
4. A generation after the first has a member that holds the live state; if nobody holds it the attempt is over and
   the next one starts from the checkpoint.
5. Nobody is in a generation with somebody whom it does not reach: two workers that both reach the driver, but not each
   other, would break every generation that they share. One of the two has to go.
6. The list of hosts is law: a worker on a host that left the list is out at the next generation, and while fewer
   than `min_workers` may work, the rest wait, alive, with their state.

What it replaces: `ElasticDriver._activate_workers`, `WorkerStateRegistry` and `HostManager.blacklist`
(horovod/runner/elastic/{driver,registration,discovery}.py, 0.28.1), whose barrier can neither time out nor survive a
death while it waits (F3) and whose ban is for ever. Here a host whose worker died gets a new one after
a back-off, which costs nobody anything since (1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from operator import attrgetter
from typing import Any

from elastic_trainer.config import EXIT_DIFFERS, EXIT_FINISHED, EXIT_LEFT, EXIT_USER_ERROR, Limits
from elastic_trainer.host.crash import SAME_CRASHES, SameCrashes
from elastic_trainer.launch.reached import of_most
from elastic_trainer.world.arithmetic import Arithmetic, computes_otherwise, facts_that_differ, most_common

MAX_BACK_OFF_S = 60.0
OUT_S, MAX_OUT_S = 600.0, 86400.0
"""A host on which a replica differs for the second time stays out for so long, then for twice as long each time."""
REFUSED_S, MAX_REFUSED_S = 60.0, 3600.0
"""A host whose arithmetic differs from the world's is tried again after so long, and at least so often."""
STEADY_S = 30.0
"""A worker that lived this long in the world wipes its host's failures out."""
MAX_REFUSED_OFFERS = 3
MAX_FAILED_JOINS = 2
"""So many generations in which nobody died ended before a newcomer had received the state: then the newcomer goes."""
OFFER_EACH_S = 0.2
"""What `admit_s` is at least for each member: all try to reach each other. 48 on 2 cores took up to 2 s (measured)."""
ORDERLY_EXITS = (EXIT_FINISHED, EXIT_LEFT, EXIT_USER_ERROR, 1, -15, -9)
"""How a worker may end when the attempt is over."""
DRIVER_GAP_S = 1.0
MAX_IDLE_GENERATIONS = 20
"""So many generations in a row without a finished step, and the attempt is over."""
FAILED_STARTS = 3
"""When a listed host has failed so often, the first generation no longer waits for it."""
FAILED_RESTARTS = 6
"""When each listed host has failed so often (after a minute of back-off), and nobody stands ready, the attempt is over."""
FREQUENT_BEATS = 16
"""Worlds of so many workers have heartbeats every `beat_s`; larger ones less often, see `hold_s`."""
BEATS_EACH_S = 48.0
"""How many heartbeats a second each larger world adds up to: the driver takes 0.4 ms of a core for one (measured)."""
HOST_KEPT_S = 3600.0
"""How long the failures of a host that has left the list are remembered."""


class Phase(str, Enum):
    """What a worker does.

    booting → standby → training ⇄ waiting → finished; gone from anywhere
                 (training → booting: it revives itself after `hvd.init()` broke under it)
    """

    BOOTING = "booting"
    STANDBY = "standby"
    TRAINING = "training"
    WAITING = "waiting"
    FINISHED = "finished"
    GONE = "gone"


@dataclass
class Worker:
    name: str
    host: str
    slot: int
    started_at: float
    heard_at: float
    phase: Phase = Phase.BOOTING
    generation: int = 0
    """The generation it was last given a place in."""
    rank: int = -1
    accepted: int = 0
    ready_at: float = 0.0
    formed_at: float = 0.0
    waits_since: float = 0.0
    holds_state: bool = False
    drains: bool = False
    count: int = -1
    """The number of its newest word; older ones (late or replayed) change nothing."""
    refused_offers: int = 0
    failed_joins: int = 0
    failed_in: int = 0
    """The generation of the newest of them."""
    unreachable: tuple[str, ...] | None = ()
    """Whom it did not reach when it last tried; None: it has not tried yet."""
    dismissed: bool = False
    step: int = 0
    published: int = -1
    """The newest checkpoint that it knows to be published."""
    has_failed_machine: bool = False
    """It has said that its machine has failed, so it leaves as a dead one does."""
    ended_by: str = ""
    """Why we ended it, if we did."""
    arithmetic: Arithmetic | None = None
    """How it computes; None: it has not said."""
    is_compared: bool = False
    """Its arithmetic has been compared with the world's."""
    has_exited: bool = False
    """Its process is gone too: nobody will ask for it again."""

    def __repr__(self) -> str:
        return f"<{self.name} {self.phase.value} g{self.generation} r{self.rank}>"


loud = attrgetter(*(f.name for f in fields(Worker) if f.name not in (
    "heard_at", "started_at", "count", "step", "published")))
"""What decisions rest on, as one value: all that a heartbeat of a worker with no news leaves as it was."""


@dataclass(frozen=True)
class MachineFault:
    """What a worker says of an exception that its machine has caused."""

    host: str
    step: int
    shard: int
    """-1: not in a shard, but where all workers do the same."""
    kind: str
    text: str
    """The traceback."""


@dataclass
class Host:
    slots: int
    order: int
    failures: int = 0
    not_before: float = 0.0
    listed_at: float = 0.0
    differences: int = 0
    """How often a worker here has held other bits than the others: a sign of bad memory or a bad processor."""

    refusals: int = 0
    """How often a worker here computed other bits than the world."""

    def refuse(self, now: float) -> None:
        """Let nothing start here for a while, twice as long each time: a host seldom becomes another."""
        self.refusals += 1
        self.not_before = now + min(MAX_REFUSED_S, REFUSED_S * 2.0 ** min(self.refusals - 1, 9))

    def differ(self, now: float) -> None:
        """Count a replica that differs. Once may be a cosmic ray; twice is the host."""
        self.fail(now)
        self.differences += 1
        if self.differences > 1:
            self.not_before = now + min(MAX_OUT_S, OUT_S * 2.0 ** min(self.differences - 2, 9))

    def fail(self, now: float) -> None:
        """Count a failure, and let nothing start here until a back-off, twice as long each time, is over."""
        self.failures += 1
        self.not_before = now + min(MAX_BACK_OFF_S, 0.5 * 2 ** min(self.failures, 9))


@dataclass(frozen=True)
class Start:
    host: str
    slot: int
    worker: str


@dataclass(frozen=True)
class Stop:
    worker: str
    reason: str
    at_once: bool
    """True: it does not answer, SIGKILL; False: SIGTERM first."""


@dataclass(frozen=True)
class Form:
    generation: int
    members: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class End:
    verdict: str
    """finished · failed · user_error"""
    detail: str


@dataclass(frozen=True)
class Differ:
    """A newcomer computes other bits than the world, or was built with other weights."""

    worker: str
    host: str
    other_host: str
    differ: dict[str, tuple[str, str]]
    """Name of a fact → (the newcomer's, the world's)."""
    is_arithmetic: bool
    """False: its weights as built, or its first samples, are others. That is allowed."""
    is_refused: bool
    kept_out_s: float


Action = Start | Stop | Form | End | Differ


@dataclass
class Offer:
    round: int
    members: tuple[str, ...]
    made_at: float
    reason: str


@dataclass
class Membership:
    """All that the driver knows; `decide` says what to do next."""

    first_workers: int
    """So many must stand ready before the first generation (horovodrun's -np)."""
    min_workers: int
    max_workers: int | None
    limits: Limits = field(default_factory=Limits)
    refuses_mixed: bool = True
    """A newcomer that computes other bits than an exact world gets no place (--mixed-hardware refuse)."""
    has_trained: bool = False
    """An earlier attempt of this run has."""
    workers: dict[str, Worker] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)
    """Every host ever listed (for its failures); `listed` are those of now."""
    listed: dict[str, int] = field(default_factory=dict)
    generation: int = 0
    members: tuple[str, ...] = ()
    offer: Offer | None = None
    rounds: int = 0
    names: int = 0
    state_exists: bool = False
    """Some worker has held the run's state in this attempt: from now on it must not be lost unnoticed."""
    is_finished: bool = False
    """A member has passed the last vote, so all members have applied the last step: no more generations."""
    verdict: End | None = None
    user_error: str = ""
    wait_s: float | None = None
    """Give the attempt up after waiting so long for enough workers (horovodrun's --elastic-timeout); None: never."""
    waits_since: float | None = None
    is_doubted: bool = False
    """In the last offer some did not reach each other."""
    newest_step: int = -1
    idle_generations: int = 0
    decided_at: float = 0.0
    hosts_known: int = 0
    crashes: SameCrashes = field(default_factory=SameCrashes)
    """How often workers have died in one place, if all of them have."""
    machine_faults: list[MachineFault] = field(default_factory=list)
    """Those of the newest step in which there were any."""
    has_booted: bool = False
    """Some worker has stood ready in this attempt."""
    tried: set[tuple[str, int]] = field(default_factory=set)
    """The slots (host, number) in which a worker has ended."""

    # --- what happens ---------------------------------------------------------------------------------------------

    def hosts_listed(self, hosts: Mapping[str, int]) -> None:
        """Take the discovery's newest answer (an ordered mapping host → slots)."""
        for host in self.listed:
            self.hosts[host].listed_at = self.decided_at
        self.listed = dict(hosts)
        for host, slots in hosts.items():
            if host not in self.hosts:
                self.hosts[host] = Host(slots, self.hosts_known)
                self.hosts_known += 1
            self.hosts[host].slots = slots
        used = {w.host for w in self.workers.values()} | self.listed.keys()
        for host in [h for h, known in self.hosts.items()
                     if h not in used and self.decided_at - known.listed_at > HOST_KEPT_S]:
            del self.hosts[host]
            self.tried = {(h, slot) for h, slot in self.tried if h != host}

    def reported(self, name: str, count: int, now: float, *, phase: str, generation: int, accepted: int = 0,
                 holds_state: bool = False, drains: bool = False, step: int = 0, error: str = "",
                 unreachable: Sequence[str] | None = (), arithmetic: Arithmetic | None = None,
                 published: int = -1) -> bool:
        """Take a worker's own word; False if it is not its newest. One about an older generation changes little."""
        worker = self.workers.get(name)
        if worker is None or worker.phase is Phase.GONE or count <= worker.count:
            return False
        worker.count, worker.heard_at = count, now
        worker.arithmetic = worker.arithmetic or arithmetic
        worker.step, worker.drains, worker.published = step, worker.drains or drains, published
        if error and not self.user_error and not self._is_let_go(worker):
            self.user_error = error
        if phase == "reviving":
            worker.phase, worker.started_at, worker.accepted = Phase.BOOTING, now, 0
            return True
        if generation != worker.generation or phase == "booting":
            return True  # it has not yet heard of the place it was given
        worker.holds_state = holds_state
        self.state_exists = self.state_exists or holds_state
        if phase == Phase.STANDBY.value and worker.phase is Phase.BOOTING:
            worker.phase, worker.ready_at = Phase.STANDBY, now
            self.has_booted = True
        elif phase in (Phase.WAITING.value, Phase.FINISHED.value, Phase.TRAINING.value) and worker.generation > 0:
            if phase == Phase.WAITING.value and worker.phase is not Phase.WAITING:
                worker.waits_since = now
            worker.phase = Phase(phase)
            self.is_finished = self.is_finished or worker.phase is Phase.FINISHED
        if phase in (Phase.STANDBY.value, Phase.WAITING.value):
            worker.accepted, worker.unreachable = accepted, None if unreachable is None else tuple(unreachable)
        return True

    def machine_failed(self, name: str, fault: Mapping[str, Any]) -> None:
        """Take a worker's word that its machine has failed; its heartbeats say it again until it is gone."""
        worker = self.workers[name]
        if not worker.has_failed_machine:
            worker.has_failed_machine = True
            if not self._is_let_go(worker):
                self._blame(MachineFault(worker.host, **fault))

    def _blame(self, fault: MachineFault) -> None:
        """Note a fault of a machine. The same part of the same step on another host, too, is the user's error.

        Where there is only one host the second time is it: nobody else can be asked.
        """
        same = [f for f in self.machine_faults if (f.step, f.shard) == (fault.step, fault.shard)]
        before = next((f for f in same if f.host != fault.host or len(self.listed) < 2), None)
        self.machine_faults = [*(f for f in self.machine_faults if f.step == fault.step), fault]
        if before and not self.user_error:
            where = f"shard {fault.shard} of " if fault.shard >= 0 else ""
            self.user_error = (
                f"{where}step {fault.step} fails with {before.kind} on {before.host} and with {fault.kind} "
                f"on {fault.host}, so it is no machine's fault.\n\non {before.host}:\n{before.text}\n"
                f"on {fault.host}:\n{fault.text}")

    def exited(self, name: str, code: int, now: float, place: str = "") -> str:
        """Take the end of a worker's process, and where it died; returns in one word how it ended."""
        worker = self.workers[name]
        before = worker.phase
        worker.phase, worker.has_exited = Phase.GONE, True
        self.tried.add((worker.host, worker.slot))
        if before is Phase.FINISHED and code == EXIT_FINISHED:
            return "finished"
        is_own_error = (code == EXIT_USER_ERROR and before is not Phase.BOOTING) or (
            before is Phase.FINISHED and 0 < code < 126)
        if is_own_error and not self._is_let_go(worker):
            self.user_error = self.user_error or f"worker {name} ended with exit code {code} after an error of its own"
            return "user_error"
        if worker.ended_by or (self.verdict and code in ORDERLY_EXITS):
            return worker.ended_by or "stopped"
        host = self.hosts[worker.host]
        # Its host may be gone before the end of a process that had nothing left to do was heard.
        if code == EXIT_LEFT or (worker.dismissed and worker.slot >= self.listed.get(worker.host, 0)):
            host.not_before = now + self.limits.settle_s
            return "left"
        if worker.formed_at and now - worker.formed_at > STEADY_S:
            host.failures = 0
        if code == EXIT_DIFFERS and worker.formed_at:
            host.differ(now)
            return "differed"
        host.fail(now)
        self.crashes.note((worker.host, worker.slot), code, place)
        if before is Phase.BOOTING and worker.generation == 0:
            is_own = 0 <= code < 126 or code == 127  # no signal's
            if is_own and not self._has_ever_booted() and self._are_all_tried():
                self.user_error = (f"the command ended with exit code {code} on {worker.host}, and nowhere did a worker "
                                   f"stand ready. What it said is above")
            return "boot_failed"
        return "crashed"

    def _is_let_go(self, worker: Worker) -> bool:
        """True if no world counts on this worker: an error of its code may come from a host that shuts down."""
        is_newcomer = worker.generation == 0
        return bool(worker.ended_by) or worker.dismissed or (is_newcomer and not self._is_wanted(worker))

    def _has_ever_booted(self) -> bool:
        """True if the command is known to work: then what fails while it boots is its host's fault."""
        return self.has_trained or self.has_booted

    def _are_all_tried(self) -> bool:
        """True if a worker has ended in every slot of the list."""
        return self.tried >= {(host, slot) for host, slots in self.listed.items() for slot in range(slots)}

    # --- what to do -----------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Action]:
        """Return what has to be done now, and note it as done. Call again after each happening, and now and then."""
        if self.verdict:
            return []
        self._forgive(now)
        self._forget()
        actions: list[Action] = [*self._evict(now), *self._drop_failed(now), *self._dismiss()]
        end = self._end()
        if end:
            self.verdict = end
            return [*actions, end]
        if not self.is_finished:
            model = next((w for w in self._current() if w.arithmetic), None)
            actions += self._compare(self._newcomers(), model, now) if model else []
            actions += self._start(now)
            actions += self._round(now)
        return actions

    def _forgive(self, now: float) -> None:
        """When nobody asked for a decision for a while it was the driver that stood still, not the workers."""
        gap = now - self.decided_at
        if self.decided_at and gap > DRIVER_GAP_S:
            for worker in self._alive():
                worker.heard_at += gap
                worker.started_at += gap
        self.decided_at = now

    def _forget(self) -> None:
        """Drop the workers whose process has ended and who are in no generation or offer of now: a run of weeks has
        10,000 of them, and each decision looked at all (0.9 of a core)."""
        kept = {*self.members, *(self.offer.members if self.offer else ())}
        for name in [w.name for w in self.workers.values() if w.has_exited and w.name not in kept]:
            del self.workers[name]

    def hold_s(self) -> float:
        """Return how long the driver holds the answer to a heartbeat for which there is no news; the next heartbeat
        follows the answer. Workers wait half of `silence_s` or of `driver_lost_s` for an answer, so it is well below."""
        longest_s = max(self.limits.beat_s, min(self.limits.silence_s / 4, self.limits.driver_lost_s / 3))
        return min(longest_s, max(self.limits.beat_s, (len(self.workers) - FREQUENT_BEATS) / BEATS_EACH_S))

    def _silence_s(self) -> float:
        """Return after how long a worker counts as frozen: as many seconds may be lost in a large world as in a small."""
        return self.limits.silence_s + self.hold_s() - self.limits.beat_s

    def basis(self, notice: str) -> tuple[Any, ...]:
        """Return all on which `told` rests: while it is the same as before, there is no news for anybody."""
        holder = self._holder()
        return (notice, self.generation, self.offer and self.offer.round, self.verdict, self.is_finished,
                holder and holder.name, dict(self.listed), [loud(w) for w in self.workers.values()])

    def reached(self) -> tuple[int, int]:
        """Return how many steps most living members of the newest generation have finished, and the newest checkpoint
        that most of them know to be published: no one worker's word counts alone, unless it is alone."""
        current = self._current()
        return (of_most(w.step for w in current), of_most(w.published for w in current)) if current else (0, -1)

    def _alive(self) -> list[Worker]:
        return [w for w in self.workers.values() if w.phase is not Phase.GONE]

    def _current(self) -> list[Worker]:
        """The living members of the newest generation, by rank."""
        return [self.workers[name] for name in self.members if self.workers[name].phase is not Phase.GONE]

    def _holder(self) -> Worker | None:
        """Return the one member to rely on for the state, if any has it: of those with the newest step the first.

        Of two whose last vote broke one may have seen it pass: it has finished a step that the other has not.
        """
        return max((w for w in self._current() if w.holds_state), key=lambda w: (not w.dismissed, w.step), default=None)

    def _is_writer(self, name: str) -> bool:
        """True for the one who writes down what only memory holds, when nobody trains."""
        holder = self._holder()
        return holder is not None and holder.name == name

    def _evict(self, now: float) -> list[Action]:
        actions: list[Action] = []
        current, silence_s = self._current(), self._silence_s()
        waiting = [w.waits_since for w in current if w.phase is Phase.WAITING]
        stuck = [w.name for w in current if w.phase is Phase.TRAINING] if (
            waiting and now - min(waiting) > self.limits.stuck_s) else []
        for worker in self._alive():
            if worker.has_failed_machine:
                actions.append(self._strike(worker, "machine_failed", now))
            elif worker.phase is Phase.BOOTING:
                if now - worker.started_at > self.limits.boot_s:
                    actions.append(self._strike(worker, "boot_timeout", now))
            elif worker.phase is Phase.FINISHED or worker.dismissed or self.is_finished:
                if now - worker.heard_at > self.limits.exit_s:  # an interpreter that ends says nothing any more
                    actions.append(self._strike(worker, "exit_timeout", now))
            elif now - worker.heard_at > silence_s:
                actions.append(self._strike(worker, "frozen", now))
            elif worker.name in stuck:
                actions.append(self._strike(worker, "stuck", now))
            elif worker.refused_offers > MAX_REFUSED_OFFERS:
                actions.append(self._strike(worker, "stuck", now))
        return actions

    def _strike(self, worker: Worker, reason: str, now: float) -> Stop:
        self.hosts[worker.host].fail(now)
        worker.phase, worker.ended_by = Phase.GONE, reason
        return Stop(worker.name, reason, at_once=True)

    def _drop_failed(self, now: float) -> list[Action]:
        """End newcomers whose generations break again and again before they have the state, while nobody dies in them:
        what keeps them from it costs all others a pause each time."""
        members = [self.workers[name] for name in self.members]
        if any(w.phase is not Phase.WAITING for w in members) or not any(w.holds_state for w in members):
            return []
        actions: list[Action] = []
        for worker in members:
            if not worker.holds_state and worker.failed_in < self.generation:
                worker.failed_joins, worker.failed_in = worker.failed_joins + 1, self.generation
                if worker.failed_joins >= MAX_FAILED_JOINS:
                    actions.append(self._strike(worker, "join_failed", now))
        return actions

    def is_broken(self) -> bool:
        """True when somebody of the newest generation has left it or is gone: nobody can complete it any more."""
        return any(self.workers[name].phase is not Phase.TRAINING for name in self.members)

    def _admit_s(self, members: int) -> float:
        return max(self.limits.admit_s, OFFER_EACH_S * members)

    def _is_wanted(self, worker: Worker) -> bool:
        return not worker.dismissed and worker.slot < self.listed.get(worker.host, 0) and not worker.drains

    def _dismiss(self) -> list[Action]:
        """Stop those who are in no generation and whose host is not listed any more."""
        actions: list[Action] = []
        for worker in self._alive():
            idle = worker.phase is Phase.BOOTING and worker.generation == 0
            if idle and not self._is_wanted(worker):
                worker.phase, worker.ended_by = Phase.GONE, "host_left"
                actions.append(Stop(worker.name, "host_left", at_once=False))
        return actions

    def _may_hold_state(self, worker: Worker) -> bool:
        """True if this worker holds the state, or has not said so yet: its last heartbeat may be from before its first step
        in this generation. It says which when it waits for its next place."""
        return worker.holds_state or (worker.phase is Phase.TRAINING and worker.generation == self.generation)

    def _common_crash(self) -> str:
        """Say of which signal, and where, all workers have died in each slot as often as is no accident; "" if not so.

        Once a step is finished it is no mistake of the job, or of the machines' image, any more.
        """
        slots = {(host, slot) for host, count in self.listed.items() for slot in range(count)}
        if self.has_trained or self.state_exists or not self.crashes.are_everywhere(slots):
            return ""
        return (f"all workers died of {self.crashes} before the first step, {SAME_CRASHES} times in each slot. What they "
                f"said is above; no other attempt would end otherwise")

    def _end(self) -> End | None:
        if self.user_error or (common := self._common_crash()):
            return End("user_error", self.user_error or common)
        if self.is_finished:
            if not [w for w in self._current() if w.phase in (Phase.FINISHED, Phase.TRAINING, Phase.WAITING)]:
                return End("finished", "")
            return None
        if self.listed and all(self.hosts[h].failures >= FAILED_RESTARTS for h in self.listed) and not [
                w for w in self._alive() if w.phase is not Phase.BOOTING or w.generation]:
            return End("failed", f"no worker stands ready, though each host was tried {FAILED_RESTARTS} times or more")
        if self.idle_generations > MAX_IDLE_GENERATIONS:
            return End("failed", f"{self.idle_generations} generations in a row finished no step")
        if self.state_exists and not any(self._may_hold_state(w) and not w.dismissed for w in self._alive()):
            return End("failed", "no living worker holds the state any more; the next attempt starts from the checkpoint")
        return None

    def _newcomers(self) -> list[Worker]:
        return [w for w in self._alive() if w.phase is Phase.STANDBY and self._is_wanted(w)]

    def _compare(self, newcomers: Sequence[Worker], model: Worker, now: float) -> list[Action]:
        """Tell which newcomers do not compute as `model` does; let those go whom the user does not want."""
        actions: list[Action] = []
        for worker in newcomers:
            mine, worlds = worker.arithmetic, model.arithmetic
            if worker.is_compared or mine is None or worlds is None:
                continue
            worker.is_compared = True
            is_other = computes_otherwise(mine, worlds)
            is_refused = is_other and self.refuses_mixed and mine.is_exact
            kept_out_s = 0.0
            if is_refused:
                host = self.hosts[worker.host]
                host.refuse(now)
                kept_out_s = host.not_before - now
                worker.phase, worker.ended_by = Phase.GONE, "arithmetic_differs"
                actions.append(Stop(worker.name, worker.ended_by, at_once=False))
            if is_other or mine.inputs != worlds.inputs:
                actions.append(Differ(worker.name, worker.host, model.host, facts_that_differ(mine, worlds), is_other,
                                      is_refused, kept_out_s))
        return actions

    def _start(self, now: float) -> list[Action]:
        taken = {(w.host, w.slot) for w in self._alive()}
        actions: list[Action] = []
        for host, slots in self.listed.items():
            for slot in range(slots):
                if (host, slot) not in taken and now >= self.hosts[host].not_before:
                    self.names += 1
                    name = f"{host}/{slot}/{self.names}"
                    self.workers[name] = Worker(name, host, slot, started_at=now, heard_at=now)
                    actions.append(Start(host, slot, name))
        return actions

    def _candidates(self) -> list[Worker]:
        """Those who could be in the next generation, in order of rank: members first, then by age of their host."""
        ready = [w for w in self._alive() if w.phase in (Phase.STANDBY, Phase.WAITING) and self._is_wanted(w)
                 and (w.phase is Phase.WAITING or self._reaches_all(w))]
        seats = {name: rank for rank, name in enumerate(self.members)}
        ready.sort(key=lambda w: (seats.get(w.name, len(seats)), self.hosts[w.host].order, w.slot, w.ready_at))
        return ready[: self.max_workers]

    def _reaches_all(self, newcomer: Worker) -> bool:
        """True if a newcomer has tried to reach the members and did. (Where there are none to reach: the offer asks.)"""
        current = {w.name for w in self._current()}
        return not current or (newcomer.unreachable is not None and current.isdisjoint(newcomer.unreachable))

    def _cut_off(self, members: list[Worker]) -> Worker | None:
        """Return the member that the most others do not reach, if there is any: one without the state, or the youngest."""
        pairs = {frozenset((w.name, other)) for w in members for other in w.unreachable or ()}
        cut = {w.name: sum(w.name in pair and pair <= {m.name for m in members} for pair in pairs) for w in members}
        seats = {w.name: seat for seat, w in enumerate(members)}
        worst = max(members, key=lambda w: (cut[w.name], not w.holds_state, seats[w.name]))
        return worst if cut[worst.name] else None

    def _are_settled(self, newcomers: list[Worker], now: float) -> bool:
        """True when nobody else is about to stand ready, or the first newcomer has waited long enough."""
        booting = [w for w in self._alive() if w.phase is Phase.BOOTING and self._is_wanted(w)]
        return not booting or now - min(w.ready_at for w in newcomers) > self.limits.settle_s

    def notice(self, now: float) -> str:
        """Say why the training members should leave their step boundary for a new generation, or ''."""
        current = self._current()
        if not self.generation or self.is_finished:
            return ""
        if any(not self._is_wanted(w) for w in current) or (self.max_workers and len(current) > self.max_workers):
            return "leave"
        newcomers = [w for w in self._alive() if w.phase is Phase.STANDBY and self._is_wanted(w) and self._reaches_all(w)]
        room = self.max_workers is None or len(current) < self.max_workers
        if newcomers and room and self._are_settled(newcomers, now):
            return "join"
        return "death" if len(current) < len(self.members) else ""

    def _round(self, now: float) -> list[Action]:
        if self.offer:
            members = [self.workers[name] for name in self.offer.members]
            lost = [w for w in members if w.phase not in (Phase.STANDBY, Phase.WAITING)]
            late = [w for w in members if w.accepted != self.offer.round]
            if not lost and not late:
                cut_off = self._cut_off(members)
                if cut_off is None:
                    return [self._form(now)]
                self.offer, was_doubted, self.is_doubted = None, self.is_doubted, not self.is_doubted
                if was_doubted:  # two lost packets are no broken line: all have tried twice
                    return [self._strike(cut_off, "cut_off", now)]
            elif not lost and now - self.offer.made_at <= self._admit_s(len(members)):
                return []
            else:
                for worker in late if not lost else ():  # an offer that broke has refused nobody
                    worker.refused_offers += 1
                self.offer, self.is_doubted = None, False
        current = self._current()
        if any(w.phase is not Phase.WAITING for w in current):
            return []  # somebody still trains, or revives itself and will be back with its state
        candidates = self._candidates()
        if self.generation == 0:
            hopeless = any(self.hosts[h].failures >= FAILED_STARTS or self.hosts[h].refusals for h in self.listed)
            is_late = bool(candidates) and now - min(w.ready_at for w in candidates) > self.limits.start_s
            enough = self.min_workers if hopeless or is_late else self.first_workers
            if len(candidates) < enough or not self._are_settled(candidates, now):
                return self._wait(now)
            reason = "start"
        else:
            if len(candidates) < self.min_workers or not candidates:
                return self._release_drainers() or self._wait(now)
            reason = "death" if len(current) < len(self.members) else "change"
            holder = self._holder()
            if holder and not holder.dismissed and not any(w.holds_state and w.step >= holder.step for w in candidates):
                candidates.append(holder)  # an old one comes along, hands the newest state over, and leaves after that
        if not current and (known := [w for w in candidates if w.arithmetic]):  # the first: as most of them compute
            model = known[most_common([w.arithmetic for w in known if w.arithmetic])]
            if odd := self._compare(candidates, model, now):
                return odd
        self.waits_since = None
        self.rounds += 1
        self.offer = Offer(self.rounds, tuple(w.name for w in candidates), now, reason)
        return []

    def _release_drainers(self) -> list[Action]:
        """Let those go who were told to leave, while the rest waits for more; not the last one with the state."""
        current = self._current()
        if not any(w.drains for w in current):
            return []
        newest = max((w.step for w in current if w.holds_state and not w.drains and not w.dismissed), default=None)
        if newest is not None:  # who has finished a step that the others have not stays as long as it may
            for worker in current:
                worker.dismissed = worker.dismissed or (worker.drains and worker.step <= newest)
            return []
        self.verdict = End("failed", "all who hold the state were told to leave; the next attempt starts from the "
                                     "checkpoint that they write now")
        return [self.verdict]

    def _wait(self, now: float) -> list[Action]:
        """Wait for enough workers, for ever unless the user set a limit: hosts that are not there cost nothing."""
        self.waits_since = self.waits_since or now
        if self.wait_s is None or now - self.waits_since <= self.wait_s:
            return []
        self.verdict = End("failed", f"waited {self.wait_s:.0f} s for {self.min_workers} workers (--elastic-timeout)")
        return [self.verdict]

    def _form(self, now: float) -> Form:
        assert self.offer is not None
        self.generation += 1
        self.members, self.is_doubted = self.offer.members, False
        step = max((w.step for w in self.workers.values()), default=0)
        self.idle_generations = 0 if step > self.newest_step else self.idle_generations + 1
        self.newest_step = max(step, self.newest_step)
        reason, self.offer = self.offer.reason, None
        for rank, name in enumerate(self.members):
            worker = self.workers[name]
            worker.phase, worker.generation, worker.rank = Phase.TRAINING, self.generation, rank
            worker.formed_at = worker.formed_at or now
            worker.refused_offers = 0
        for worker in self._alive():
            if worker.phase is Phase.WAITING and worker.name not in self.members:
                worker.dismissed = True  # its state is old from now on, wanted or not
        return Form(self.generation, self.members, reason)

    # --- what a worker is told --------------------------------------------------------------------------------------

    def told(self, name: str, now: float, notice: str | None = None) -> dict[str, Any]:
        """Return all that concerns this worker now; every word can be lost and is simply said again.

        `notice` is what the method of this name returns, where the caller knows it.
        """
        worker = self.workers.get(name)
        if worker is None or worker.phase is Phase.GONE:
            return {"evicted": True}
        told: dict[str, Any] = {}
        if self.verdict and self.verdict.verdict != "finished":
            return {"over": self.verdict.verdict, "detail": self.verdict.detail, "writes": self._is_writer(name)}
        if self.is_finished:
            told["finished"] = True
        if worker.phase is Phase.WAITING and not any(self._is_wanted(w) for w in self._current() if w.holds_state):
            told["writes"] = self._is_writer(name)  # all who hold the state may go any moment
        if worker.dismissed or (worker.phase is Phase.STANDBY and not self._is_wanted(worker)):
            worker.dismissed = told["leave"] = True
        if worker.phase is Phase.TRAINING and worker.generation == self.generation:
            told["place"] = {"generation": self.generation, "rank": worker.rank, "size": len(self.members)}
            told["notice"] = self.notice(now) if notice is None else notice
            told["unwanted"] = not self._is_wanted(worker)
            told["dead"] = [r for r, m in enumerate(self.members) if self.workers[m].phase is Phase.GONE]
        if self.offer and name in self.offer.members:
            told["offer"] = self.offer.round
            told["reach"] = [member for member in self.offer.members if member != name]
        elif worker.phase is Phase.STANDBY:
            told["reach"] = [member.name for member in self._current()]
        return told

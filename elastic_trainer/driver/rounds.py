"""Rounds: who is offered a place in the next generation, and when that generation is formed.

roster → here → membership → Form, Stop, End

    no offer → offered → formed
                  └→ no offer, when a member is gone, late, or does not reach another one
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.config import Limits
from elastic_trainer.driver.differences import Differences
from elastic_trainer.driver.ends import strike
from elastic_trainer.driver.roster import Action, End, Form, Phase, Roster, Worker

OFFER_EACH_S = 0.2
"""The least `admit_s` for each member: each connects to all others. 48 members on 2 cores took up
to 2 s (measured)."""
FAILED_STARTS = 3
"""The first generation no longer waits for all -np workers once a listed host has failed this
often."""


@dataclass(frozen=True)
class Offer:
    """A generation that is formed when all its members have accepted."""

    round: int
    members: tuple[str, ...]
    made_at: float
    reason: str


@dataclass
class Rounds:
    """The offers of one attempt, and the conditions under which one is made."""

    roster: Roster
    limits: Limits
    differences: Differences
    first_workers: int
    """How many workers must stand ready before the first generation (horovodrun's -np)."""
    min_workers: int
    max_workers: int | None
    wait_s: float | None = None
    """The attempt ends after waiting this long for enough workers (horovodrun's
    --elastic-timeout); None: it waits without a limit."""
    offer: Offer | None = None
    number: int = 0
    is_doubted: bool = False
    """Some members of the last offer did not reach each other."""
    waits_since: float | None = None
    newest_step: int = -1
    idle_generations: int = 0
    """How many generations in a row have finished no step."""

    @property
    def least(self) -> int:
        """How many workers a generation after the first must have."""
        return max(self.min_workers, *(w.needs for w in self.roster.alive()), 0)

    def offered(self) -> tuple[str, ...]:
        """Return the names of the offer's members."""
        return self.offer.members if self.offer else ()

    def next(self, now: float) -> list[Action]:
        """Form the generation that is offered, or make an offer, if it is time for either."""
        if self.offer:
            actions = self._settle_offer(self.offer, now)
            if actions is not None:
                return actions
        if any(w.phase is not Phase.WAITING for w in self.roster.current()):
            return []  # a member still trains, or revives itself and returns with its state
        candidates = self._candidates()
        is_first = self.roster.generation == 0
        may_offer = self._may_begin(candidates, now) if is_first else self._are_enough(candidates)
        if not may_offer:
            return ([] if is_first else self._release_drainers()) or self._wait(now)
        reason = "start" if is_first else self._add_holder(candidates)
        if differing := self.differences.first(candidates, now):
            return differing
        self.waits_since = None
        self.number += 1
        self.offer = Offer(self.number, tuple(w.name for w in candidates), now, reason)
        return []

    def has_settled(self, newcomers: list[Worker], now: float) -> bool:
        """True when no other worker is about to stand ready, or the wait was long enough."""
        workers = self.roster.alive()
        boots = any(w.phase is Phase.BOOTING and self.roster.is_wanted(w) for w in workers)
        return not boots or now - min(w.ready_at for w in newcomers) > self.limits.settle_s

    # --- an offer -------------------------------------------------------------------------------

    def _settle_offer(self, offer: Offer, now: float) -> list[Action] | None:
        """Return what follows from the members' answers; None: the offer is withdrawn."""
        members = [self.roster.workers[name] for name in offer.members]
        is_lost = any(w.phase not in (Phase.STANDBY, Phase.WAITING) for w in members)
        late = [w for w in members if w.accepted != offer.round]
        if not is_lost and not late:
            return self._form_or_cut(offer, members, now)
        admit_s = max(self.limits.admit_s, OFFER_EACH_S * len(members))
        if not is_lost and now - offer.made_at <= admit_s:
            return []
        if not is_lost:  # no member has refused an offer that another one's death ended
            for worker in late:
                worker.refused_offers += 1
        self.offer, self.is_doubted = None, False
        return None

    def _form_or_cut(self, offer: Offer, members: list[Worker],
                     now: float) -> list[Action] | None:
        """Form the generation, unless a member does not reach another one."""
        cut_off = self._cut_off(members)
        if cut_off is None:
            return [self._form(offer, now)]
        self.offer, was_doubted = None, self.is_doubted
        self.is_doubted = not was_doubted
        if was_doubted:  # two lost packets do not prove a broken line, so all have tried twice
            return [strike(self.roster, cut_off, "cut_off", now)]
        return None

    def _cut_off(self, members: list[Worker]) -> Worker | None:
        """Return the member that the most others do not reach; None if all reach each other.

        Of equals it is one without the state, or the youngest.
        """
        names = {w.name for w in members}
        pairs = {frozenset((w.name, other)) for w in members for other in w.unreachable or ()}
        cut = {name: sum(name in pair and pair <= names for pair in pairs) for name in names}
        seats = {w.name: seat for seat, w in enumerate(members)}
        worst = max(members, key=lambda w: (cut[w.name], not w.holds_state, seats[w.name]))
        return worst if cut[worst.name] else None

    def _form(self, offer: Offer, now: float) -> Form:
        roster = self.roster
        roster.generation += 1
        roster.members, self.offer, self.is_doubted = offer.members, None, False
        step = max((w.step for w in roster.workers.values()), default=0)
        self.idle_generations = 0 if step > self.newest_step else self.idle_generations + 1
        self.newest_step = max(step, self.newest_step)
        for rank, name in enumerate(roster.members):
            worker = roster.workers[name]
            worker.phase, worker.generation, worker.rank = Phase.TRAINING, roster.generation, rank
            worker.formed_at = worker.formed_at or now
            worker.refused_offers, worker.at = 0, None
        for worker in roster.alive():
            if worker.phase is Phase.WAITING and worker.name not in roster.members:
                worker.dismissed = True  # its state is old from now on, wanted or not
        return Form(roster.generation, roster.members, offer.reason)

    # --- conditions for an offer ----------------------------------------------------------------

    def _candidates(self) -> list[Worker]:
        """Return the workers for the next generation by rank: members, then by their host's age.

        Workers of one host have consecutive ranks, so that their micro-batches are neighbours, and
        the sums of a host cross the network once (reduce/exchange.py). Rank 0 stays.
        """
        roster = self.roster
        ready = [w for w in roster.alive()
                 if w.phase in (Phase.STANDBY, Phase.WAITING) and roster.is_wanted(w)
                 and (w.phase is Phase.WAITING or roster.reaches_all(w))]
        seats = {name: rank for rank, name in enumerate(roster.members)}
        ready.sort(key=lambda w: (seats.get(w.name, len(seats)), roster.hosts[w.host].order,
                                  w.slot, w.ready_at))
        chosen = ready[: self.max_workers]
        hosts = [w.host for w in chosen]
        return sorted(chosen, key=lambda w: hosts.index(w.host))

    def _may_begin(self, candidates: list[Worker], now: float) -> bool:
        """True when the first generation has enough workers, and more would come too late."""
        hosts = [self.roster.hosts[host] for host in self.roster.listed]
        is_hopeless = any(host.failures >= FAILED_STARTS or host.refusals for host in hosts)
        has_waited = bool(candidates) and (
            now - min(w.ready_at for w in candidates) > self.limits.start_s)
        enough = self.min_workers if is_hopeless or has_waited else self.first_workers
        return len(candidates) >= enough and self.has_settled(candidates, now)

    def _are_enough(self, candidates: list[Worker]) -> bool:
        return bool(candidates) and len(candidates) >= self.least

    def _add_holder(self, candidates: list[Worker]) -> str:
        """Add the member that holds the newest state, if no candidate does; return the reason.

        The new generation receives the state from that member, which leaves afterwards.
        """
        holder = self.roster.holder()
        if holder and not holder.dismissed and not any(
                w.holds_state and w.step >= holder.step for w in candidates):
            candidates.append(holder)
        has_lost = len(self.roster.current()) < len(self.roster.members)
        return "death" if has_lost else "change"

    # --- too few workers ------------------------------------------------------------------------

    def _release_drainers(self) -> list[Action]:
        """Dismiss members that drain while the others wait for more; not the last with the state.

        A drainer that has finished a step more than the others stays as long as its host lets it.
        """
        current = self.roster.current()
        if not any(w.drains for w in current):
            return []
        staying = [w.step for w in current if w.holds_state and not w.drains and not w.dismissed]
        if not staying:
            return [End("failed", "All workers that hold the state are draining. The next attempt "
                                  "starts from the checkpoint that they write now.")]
        for worker in current:
            may_go = worker.drains and worker.step <= max(staying)
            worker.dismissed = worker.dismissed or may_go
        return []

    def _wait(self, now: float) -> list[Action]:
        """Wait for enough workers, without a limit unless the user set one."""
        self.waits_since = self.waits_since or now
        if self.wait_s is None or now - self.waits_since <= self.wait_s:
            return []
        return [End("failed", f"No {self.least} workers stood ready within {self.wait_s:.0f} "
                              f"s (--elastic-timeout).")]

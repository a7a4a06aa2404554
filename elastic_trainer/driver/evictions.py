"""Evictions: workers that are frozen, stuck, too slow to boot, unwanted, or compute other bits.

roster (who is there, when heard) → here → membership → Stop, Differ

A worker counts as gone from the moment of its eviction, not from the exit of its process, its ssh
or the end of its output. (F3: Horovod's own barrier waits for those without a timeout.)
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_trainer.config import Limits
from elastic_trainer.driver.actions import Action, Differ, Stop
from elastic_trainer.driver.roster import Phase, Roster, Worker
from elastic_trainer.events.mark import FIRST_STEPS, USERS_CODE
from elastic_trainer.world.arithmetic import computes_otherwise, facts_that_differ

MAX_REFUSED_OFFERS = 3
MAX_FAILED_JOINS = 2
"""A newcomer is evicted after this many generations that ended, without a death, before the
newcomer had received the state."""
FREQUENT_HEARTBEATS = 16
"""The largest world in which workers send a heartbeat every `heartbeat_s`, see `hold_s`."""
HEARTBEATS_EACH_S = 48.0
"""The number of heartbeats per second that all workers of a larger world send together. One costs
the driver 0.4 ms of a core (measured)."""


def hold_s(limits: Limits, workers: int) -> float:
    """Return how long the driver holds the answer to a heartbeat for which there is no news.

    The worker sends its next heartbeat after the answer. A worker waits for an answer half of
    `silence_s` or of `driver_lost_s`, so the result is well below both.
    """
    longest_s = max(limits.heartbeat_s, min(limits.silence_s / 4, limits.driver_lost_s / 3))
    shared_s = (workers - FREQUENT_HEARTBEATS) / HEARTBEATS_EACH_S
    return min(longest_s, max(limits.heartbeat_s, shared_s))


def silence_s(limits: Limits, workers: int) -> float:
    """Return the silence after which a worker counts as frozen.

    Heartbeats in a large world may be lost for as many seconds as in a small one.
    """
    return limits.silence_s + hold_s(limits, workers) - limits.heartbeat_s


def strike(roster: Roster, worker: Worker, reason: str, now: float) -> Stop:
    """Count a worker as gone, and return the order to kill it."""
    if reason != "differed":  # that was counted when the worker reported it
        roster.hosts[worker.host].fail(now)
    worker.phase, worker.ended_by = Phase.GONE, reason
    return Stop(worker.name, reason, at_once=True)


def evict(roster: Roster, limits: Limits, now: float, *, is_finished: bool) -> list[Action]:
    """Evict each worker for which there is a reason."""
    hung = _hung(roster, limits, now)
    stuck, most_silent_s = _stuck(roster, limits, now), silence_s(limits, len(roster.workers))
    actions: list[Action] = []
    for worker in roster.alive():
        is_ending = worker.phase is Phase.FINISHED or worker.dismissed or is_finished
        reason = ""
        if worker.has_failed_machine or worker.has_differed:
            reason = "machine_failed" if worker.has_failed_machine else "differed"
        elif worker.phase is Phase.BOOTING:
            reason = "boot_timeout" if now - worker.started_at > limits.boot_s else ""
        elif is_ending:  # an interpreter that ends sends no heartbeats
            reason = "exit_timeout" if now - worker.heard_at > limits.exit_s else ""
        elif now - worker.heard_at > most_silent_s:
            reason = "frozen"
        elif worker.name in hung:
            reason = "hung"
        elif worker.name in stuck or worker.refused_offers > MAX_REFUSED_OFFERS:
            reason = "stuck"
        if reason:
            actions.append(strike(roster, worker, reason, now))
    return actions


def _stuck(roster: Roster, limits: Limits, now: float) -> set[str]:
    """Return the members that still train although others have waited longer than `stuck_s`."""
    current = roster.current()
    waiting = [w.waits_since for w in current if w.phase is Phase.WAITING]
    if not waiting or now - min(waiting) <= limits.stuck_s:
        return set()
    return {w.name for w in current if w.phase is Phase.TRAINING}


def hang_s(limits: Limits, is_any_waiting: bool) -> float:
    """Return how long a member may be in one phase of the user's code. If all members are, it may
    be what the code does, and their end would lose steps: the limit is at least `stuck_s` then.
    """
    return limits.hang_s if is_any_waiting else max(limits.hang_s, limits.stuck_s)


def _hung(roster: Roster, limits: Limits, now: float) -> set[str]:
    """Return the members that have been in the user's code for longer than `hang_s`, if all others
    have waited for so long, by their heartbeats: without these they are frozen. The first steps of
    a process may take longer: it compiles.
    """
    current = roster.current()
    if not limits.hang_s or any(w.phase is not Phase.TRAINING or w.at is None for w in current):
        return set()
    ats = {w.name: w.at for w in current if w.at}
    waits_s = [roster.awake_s(at.waits_s, now) for at in ats.values() if at.waits_s]
    most_s = hang_s(limits, bool(waits_s))
    hung = {name for name, at in ats.items()
            if at.steps >= FIRST_STEPS and not at.waits_s and at.phase in USERS_CODE
            and roster.awake_s(at.for_s, now) > most_s}
    all_wait = len(hung) + len(waits_s) == len(current)
    return hung if all_wait and min(waits_s, default=most_s) >= most_s else set()


def drop_failed(roster: Roster, now: float) -> list[Action]:
    """Evict newcomers whose generations end again and again before they have the state.

    No member died in those generations, so the newcomer is the cause, and each one is a pause for
    all.
    """
    members = [roster.workers[name] for name in roster.members]
    all_wait = all(w.phase is Phase.WAITING for w in members)
    if not all_wait or not any(w.holds_state for w in members):
        return []
    actions: list[Action] = []
    for worker in members:
        if not worker.holds_state and worker.failed_in < roster.generation:
            worker.failed_joins += 1
            worker.failed_in = roster.generation
            if worker.failed_joins >= MAX_FAILED_JOINS:
                actions.append(strike(roster, worker, "join_failed", now))
    return actions


def stop_unlisted(roster: Roster) -> list[Action]:
    """Stop the workers that boot for their first generation on a host that left the list."""
    actions: list[Action] = []
    for worker in roster.alive():
        boots_first = worker.phase is Phase.BOOTING and worker.generation == 0
        if boots_first and not roster.is_wanted(worker):
            worker.phase, worker.ended_by = Phase.GONE, "host_left"
            actions.append(Stop(worker.name, "host_left", at_once=False))
    return actions


def compare(roster: Roster, newcomers: Sequence[Worker], model: Worker, now: float, *,
            refuses_mixed: bool) -> list[Action]:
    """Report each newcomer that does not compute as `model` does, and stop those not allowed."""
    actions: list[Action] = []
    for worker in newcomers:
        mine, worlds = worker.arithmetic, model.arithmetic
        if worker.is_compared or mine is None or worlds is None:
            continue
        worker.is_compared = True
        is_other = computes_otherwise(mine, worlds)
        is_refused = is_other and refuses_mixed and mine.is_exact
        kept_out_s = 0.0
        if is_refused:
            host = roster.hosts[worker.host]
            host.refuse(now)
            kept_out_s = host.not_before - now
            worker.phase, worker.ended_by = Phase.GONE, "arithmetic_differs"
            actions.append(Stop(worker.name, worker.ended_by, at_once=False))
        proofs = worker.proof, model.proof
        has_other_weights = (proofs[0].weights != proofs[1].weights if proofs[0] and proofs[1] else
                             mine.inputs != worlds.inputs)
        if is_other or has_other_weights:
            differ = facts_that_differ(mine, worlds)
            actions.append(Differ(worker.name, worker.host, model.host, differ, is_other,
                                  is_refused, kept_out_s))
    return actions

"""The ends of workers: those that the driver ends, and the causes of those that end by themselves.

roster (who is there, when heard) → `evict` → membership → Stop
heartbeats (errors, failed machines), exits → `Blame` → the exit's reason, the user's error

What always holds:
1. A worker counts as gone from the moment of its eviction, not from the exit of its process, its
   ssh or the end of its output. (F3: Horovod's own barrier waits for those without a timeout.)
2. An error of a worker that no world counts on is not the user's: its host may be shutting down.
3. The same part of the same step that fails on two hosts, or twice where there is one host, is the
   user's error. Of errors of CUDA, which come late, the same step is enough.
4. Once a worker stood ready, a command that ends while it boots is the fault of its host.
5. SIGTERM is the notice of a host that will be taken. A worker that boots has nothing to hand over,
   and no handler yet: the signal ends it, and it has left.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from elastic_trainer.config import (
    EXIT_DIFFERS,
    EXIT_FINISHED,
    EXIT_LEFT,
    EXIT_UNSAVED,
    EXIT_USER_ERROR,
    Limits,
)
from elastic_trainer.driver.roster import (
    Action,
    Host,
    Phase,
    Report,
    Roster,
    Stop,
    Worker,
    report,
)
from elastic_trainer.events.mark import FIRST_STEPS, USERS_CODE
from elastic_trainer.host.stacks import SAME_CRASHES, SameCrashes
from elastic_trainer.wire.heartbeat import GPU_LOST, MachineFault

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
        if reason == "differed":
            actions.append(host_kept_out(roster, worker.host, now))
    return actions


def host_kept_out(roster: Roster, name: str, now: float) -> Report:
    """Return what to report of a host on which a replica held other bits."""
    host = roster.hosts[name]
    return report("driver.host_kept_out", host=name, differences=host.differences,
                  kept_out_s=round(host.not_before - now, 1),
                  why="a replica on it held other bits than the other workers' "
                      "(worker.replica_differs)")


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


STEADY_S = 30.0
"""A worker that lived this long in the world clears the failures of its host."""
ORDERLY_EXITS = (EXIT_FINISHED, EXIT_LEFT, EXIT_USER_ERROR, EXIT_UNSAVED, 1, -15, -9)
"""The exit codes that mean nothing once the attempt is over."""
NEVER_TRAINED = (
    "The command ended with exit code 0 on {host} and never began to train: it made no Trainer and "
    "called no train(), or it made a Trainer and did not loop over it. Write `for step in "
    "trainer:` (docs/guide/script.md), or run a command that does not train without the launcher.")
SHELL_CODES = range(126)
"""Exit codes of a program. Shells use 126 and more for what they could not run and for signals."""
COMMAND_NOT_FOUND = 127


@dataclass
class Blame:
    """The evidence against the user's code, the machines and the command."""

    roster: Roster
    settle_s: float
    has_trained: bool = False
    """An earlier attempt of this run has finished a step."""
    user_error: str = ""
    crashes: SameCrashes = field(default_factory=SameCrashes)
    """The newest deaths of workers, while all are of one signal in one place."""
    machine_faults: list[tuple[str, MachineFault]] = field(default_factory=list)
    """Hosts and their faults, of the newest step that had any."""
    has_booted: bool = False
    """A worker has stood ready in this attempt."""

    def raised(self, worker: Worker, error: str) -> None:
        """Take a traceback of the user's code that a worker reports."""
        if not self.user_error and not self.roster.is_let_go(worker):
            self.user_error = error

    def machine_failed(self, worker: Worker, fault: MachineFault) -> None:
        """Take a worker's report that its machine failed. Heartbeats repeat it until it leaves."""
        if not worker.has_failed_machine:
            worker.has_failed_machine = True
            if not self.roster.is_let_go(worker):
                self._compare(worker.host, fault)

    def differed(self, worker: Worker, now: float) -> None:
        """Take a worker's report that its replica differs. Its process may end much later."""
        if not worker.has_differed:
            worker.has_differed = True
            self.roster.hosts[worker.host].differ(now)

    def _compare(self, host: str, fault: MachineFault) -> None:
        """Note a machine's fault, and find the same one on another host (rule 2)."""
        is_only_host = len(self.roster.listed) < 2
        of_step = [one for one in self.machine_faults if one[1].step == fault.step]
        is_late = fault.kind == GPU_LOST
        same = [(other, one) for other, one in of_step
                if (one.microbatch == fault.microbatch or (is_late and one.kind == GPU_LOST))
                and (other != host or is_only_host)]
        self.machine_faults = [*of_step, (host, fault)]
        if same and not self.user_error:
            other, one = same[0]
            is_in_one = one.microbatch == fault.microbatch >= 0
            part = f"Micro-batch {fault.microbatch} of step" if is_in_one else "Step"
            self.user_error = (
                f"{part} {fault.step} fails with {one.kind} on {other} and with {fault.kind} on "
                f"{host}, so no machine is at fault.\n\n"
                f"on {other}:\n{one.text}\non {host}:\n{fault.text}")

    def exited(self, worker: Worker, before: Phase, code: int, now: float, place: str, *,
               is_over: bool) -> str:
        """Take the end of a worker's process; return the reason.

        `before` is the phase until then, `place` the function in which it died of a signal, and
        `is_over`: the attempt has its verdict.
        """
        if before is Phase.FINISHED and code == EXIT_FINISHED:
            return "finished"
        if self._is_own_error(before, code) and not self.roster.is_let_go(worker):
            self.user_error = self.user_error or (
                f"Worker {worker.name} ended with exit code {code} after an error of its own.")
            return "user_error"
        if worker.ended_by or (is_over and code in ORDERLY_EXITS):
            return worker.ended_by or "stopped"
        host = self.roster.hosts[worker.host]
        if code == EXIT_LEFT or self._is_end_of_unlisted(worker):
            host.keep_out(now + self.settle_s)
            return "left"
        if code == -signal.SIGTERM and before is Phase.BOOTING and not worker.generation:
            host.fail(now)  # with a back-off: something may end each worker there
            return "left"
        return self._failed(worker, host, before, code, now, place)

    @staticmethod
    def _is_own_error(before: Phase, code: int) -> bool:
        has_raised = code == EXIT_USER_ERROR and before is not Phase.BOOTING
        return has_raised or (before is Phase.FINISHED and 0 < code < SHELL_CODES.stop)

    def _is_end_of_unlisted(self, worker: Worker) -> bool:
        """True for a dismissed worker whose host left the list before the exit was seen."""
        return worker.dismissed and worker.slot >= self.roster.listed.get(worker.host, 0)

    def _failed(self, worker: Worker, host: Host, before: Phase, code: int, now: float,
                place: str) -> str:
        """Count a failure of the worker's host; return the reason."""
        if worker.formed_at and now - worker.formed_at > STEADY_S:
            host.failures = 0
        if code == EXIT_DIFFERS and worker.formed_at:
            host.differ(now)
            return "differed"
        host.fail(now)
        self.crashes.note((worker.host, worker.slot), code, place)
        if before is not Phase.BOOTING or worker.generation:
            return "crashed"
        is_of_command = code in SHELL_CODES or code == COMMAND_NOT_FOUND
        has_ever_booted = self.has_trained or self.has_booted
        if is_of_command and not has_ever_booted and self.roster.tried >= self.roster.slots():
            self.user_error = NEVER_TRAINED.format(host=worker.host) if code == EXIT_FINISHED else (
                f"The command ended with exit code {code} on {worker.host}, and no worker stood "
                f"ready on any host. Its output is above.")
        return "boot_failed"

    def common_crash(self, *, state_exists: bool) -> str:
        """Return the signal and the place of which all workers died; "" if they did not.

        It counts only before the first finished step: after that neither the job nor the machines'
        image can be at fault.
        """
        is_everywhere = self.crashes.are_everywhere(self.roster.slots())
        if self.has_trained or state_exists or not is_everywhere:
            return ""
        return (f"All workers died of {self.crashes} before the first step, {SAME_CRASHES} times "
                f"in each slot. Another attempt would end in the same way. Their output is above.")

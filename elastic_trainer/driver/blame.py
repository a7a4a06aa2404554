"""The cause of a worker's end or exception: the user's code, a machine, or neither.

heartbeats (errors, failed machines), exits → membership → here: the exit's reason, the user's error

What always holds:
1. An error of a worker that no world counts on is not the user's: its host may be shutting down.
2. The same part of the same step that fails on two hosts, or twice where there is one host, is the
   user's error.
3. Once a worker stood ready, a command that ends while it boots is the fault of its host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_trainer.config import (
    EXIT_DIFFERS,
    EXIT_FINISHED,
    EXIT_LEFT,
    EXIT_UNSAVED,
    EXIT_USER_ERROR,
)
from elastic_trainer.driver.roster import Host, Phase, Roster, Worker
from elastic_trainer.host.crash import SAME_CRASHES, SameCrashes
from elastic_trainer.wire.heartbeat import MachineFault

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
        same = [(other, one) for other, one in of_step
                if one.microbatch == fault.microbatch and (other != host or is_only_host)]
        self.machine_faults = [*of_step, (host, fault)]
        if same and not self.user_error:
            other, one = same[0]
            part = f"Micro-batch {fault.microbatch} of step" if fault.microbatch >= 0 else "Step"
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

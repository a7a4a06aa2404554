"""Whether the event log has the proof that each worker had the run's dataset and program.

worker.program_proved, job.program_proved → judge → here → verdict: what is not proved

What always holds:
1. Each member that the driver has given a place has a proof, wherever its line stands in the log:
   the worker was compared with the run before it got the place. Where no driver forms generations
   (plain horovodrun, a process alone), there are at least as many proofs as members.
2. Each start from a checkpoint has the comparison with the checkpoint's proof.
"""

from __future__ import annotations

from elastic_trainer.events.sentences import count
from elastic_trainer.views.lineage import Event

OLDER = "as in a log of version 0.1"


class ProgramProofs:
    """The proofs in the log so far, and what needs one."""

    def __init__(self) -> None:
        self._proved: set[tuple[int | None, str]] = set()
        self._placed: set[tuple[int | None, str]] = set()
        self._resumed: set[tuple[int, int]] = set()
        self._starts: set[tuple[int, int]] = set()
        self._lines = self._most = 0
        """How many proofs there are, and the largest world that no driver has formed."""

    def proved(self, event: Event) -> None:
        self._proved.add((event.get("attempt"), event.get("worker", "")))
        self._lines += 1

    def resumed(self, event: Event) -> None:
        self._resumed.add((event["attempt"], event["step"]))

    def formed(self, event: Event) -> None:
        self._placed |= {(event["attempt"], name) for name in event.get("workers", ())}

    def started(self, event: Event, is_formed: bool) -> None:
        """Take the start of a generation. `is_formed`: a driver has named its members."""
        if event["source"] == "checkpoint":
            self._starts.add((event["attempt"], event["step"]))
        if not is_formed:
            self._most = max(self._most, event["size"])

    def lacking(self) -> list[str]:
        """Return what the log does not prove."""
        found = []
        lacking = len(self._placed - self._proved) or max(0, self._most - self._lines)
        if lacking:
            found.append(f"that all workers had the run's dataset and program: the log has no line "
                         f"worker.program_proved of {count(lacking, 'worker')}, {OLDER}.")
        if starts := sorted(self._starts - self._resumed):
            steps = ", ".join(str(step) for _, step in starts[:3])
            more = f" and {len(starts) - 3} more" if len(starts) > 3 else ""
            found.append(f"that the run went on from its checkpoints with their dataset and "
                         f"program: the log has no line job.program_proved of the start at step "
                         f"{steps}{more}, {OLDER}.")
        return found

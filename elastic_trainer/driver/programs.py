"""Whether each worker has the dataset and the program of the run, before it gets a place.

heartbeats (a worker's proof) → roster → here → membership: a newcomer is refused, or the run ends

What always holds:
1. The proof of the run is that of the first worker of its first generation in this attempt. (The
   workers compare it with the one in their checkpoint: training/account.py.)
2. If workers of the first generation differ, the run ends with the user's error: nothing shows
   which of them is right.
3. A newcomer that differs gets no place, and its host is kept out for twice as long each time. The
   others go on. A worker without a proof (Horovod's own style, another version) is not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastic_trainer.driver.actions import Action, End, OtherProgram, Stop
from elastic_trainer.driver.roster import Phase, Roster, Worker
from elastic_trainer.wire.proof import Difference, Proof, differences, refused, remedy, sentence


class Programs:
    """The proof of the run, and the parts of it that may differ (--allow-change)."""

    def __init__(self, allowed: Collection[str] = ()):
        self.allowed = allowed
        self.run: Proof | None = None
        self.host = ""
        """The host whose worker gave it."""

    def first(self, candidates: Sequence[Worker]) -> list[Action]:
        """Compare the workers of the first generation; returns the end of the run if they
        differ."""
        known = [worker for worker in candidates if worker.proof]
        if self.run is not None or not known:
            return []
        self.run, self.host = known[0].proof, known[0].host
        actions = [self._differs(worker, found, 0.0) for worker in known
                   if (found := self._found(worker))]
        if not actions:
            return []
        self.run = None
        told = actions[0]
        return [*actions, End("user_error", (
            f"The worker on {told.host} has other data, or another program, than the worker on "
            f"{told.other_host} (\"the run\"): {told.differ}. {told.remedy}"))]

    def newcomers(self, roster: Roster, workers: Sequence[Worker], now: float) -> list[Action]:
        """Refuse the newcomers that have other data, or another program, than the run."""
        actions: list[Action] = []
        for worker in workers if self.run else ():
            if worker.is_proved or worker.proof is None:
                continue
            worker.is_proved = True
            if found := self._found(worker):
                host = roster.hosts[worker.host]
                host.refuse(now)
                worker.phase, worker.ended_by = Phase.GONE, "program_differs"
                actions += [self._differs(worker, found, host.not_before - now),
                            Stop(worker.name, worker.ended_by, at_once=False)]
        return actions

    def _found(self, worker: Worker) -> list[Difference]:
        assert worker.proof and self.run
        return refused(differences(worker.proof, self.run), self.allowed)

    def _differs(self, worker: Worker, found: list[Difference], kept_out_s: float) -> OtherProgram:
        assert worker.proof and self.run
        return OtherProgram(worker.name, worker.host, self.host, sentence(found),
                            remedy(found, worker.proof, self.run),
                            tuple(dict.fromkeys(one.part for one in found)), kept_out_s)

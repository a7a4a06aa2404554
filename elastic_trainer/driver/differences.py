"""Whether workers have one dataset and one program, and compute the same bits: compared before a
worker gets a place.

heartbeats (proof, arithmetic) → roster → here → membership: Stop, End, Report

What always holds:
1. The proof of the run is that of the first worker of its first generation in this attempt. (The
   workers compare it with the one in their checkpoint: training/account.py.)
2. If workers of the first generation differ in their data or program, the run ends with the user's
   error: nothing shows which of them is right. If they compute other bits, most of them are right.
3. A newcomer that differs gets no place, and its host is kept out for twice as long each time. The
   others go on. A worker without a proof (Horovod's own style, another version) is not compared.
4. Other bits are allowed with --mixed-hardware warn, and in runs that do not promise the same bits.
   Weights that differ as built are allowed: a newcomer receives those of the world.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastic_trainer.driver.roster import (
    Action,
    End,
    Host,
    Phase,
    Report,
    Roster,
    Stop,
    Worker,
    report,
)
from elastic_trainer.wire.plain import plain
from elastic_trainer.wire.proof import Proof, differences, refused, remedy, sentence
from elastic_trainer.world.arithmetic import (
    advice,
    computes_otherwise,
    facts_that_differ,
    most_common,
)

AS_BUILT = ("The weights as built differ. A newcomer receives the world's weights, so it trains on "
            "the same ones. Set torch's seed before the model is built, and the workers' gradients "
            "can be compared.")


class Differences:
    """Compares the workers of one attempt. `allowed` are the parts of a proof that may differ
    (--allow-change); `refuses_mixed`: a newcomer that computes other bits than an exact world gets
    no place (--mixed-hardware)."""

    def __init__(self, roster: Roster, allowed: Collection[str] = (), *,
                 refuses_mixed: bool = True):
        self.roster, self.allowed, self.refuses_mixed = roster, allowed, refuses_mixed
        self.run: Proof | None = None
        self.host = ""
        """The host whose worker gave it."""
        self._is_build_reported = False

    def first(self, candidates: Sequence[Worker], now: float) -> list[Action]:
        """Compare the candidates of a generation with most of them, where no member of another
        generation is there to compare with. Return what keeps them from it; []: nothing does."""
        if ended := self._programs_of_first(candidates):
            return ended
        known = [worker for worker in candidates if worker.arithmetic]
        if self.roster.current() or not known:
            return []
        model = known[most_common([w.arithmetic for w in known if w.arithmetic])]
        return self._compare_arithmetic(candidates, model, now)

    def newcomers(self, now: float) -> list[Action]:
        """Compare the newcomers with the run and with the members, and stop those not allowed."""
        newcomers = self.roster.newcomers()
        actions: list[Action] = []
        for worker in newcomers if self.run else ():
            if worker.is_proved or worker.proof is None:
                continue
            worker.is_proved = True
            host = self.roster.hosts[worker.host]
            if found := self._program_of(worker, host, now):
                actions += [found, _refuse(worker, "program_differs")]
        model = next((w for w in self.roster.current() if w.arithmetic), None)
        return actions + (self._compare_arithmetic(newcomers, model, now) if model else [])

    # --- dataset and program --------------------------------------------------------------------

    def _programs_of_first(self, candidates: Sequence[Worker]) -> list[Action]:
        known = [worker for worker in candidates if worker.proof]
        if self.run is not None or not known:
            return []
        self.run, self.host = known[0].proof, known[0].host
        found = [it for worker in known if (it := self._program_of(worker))]
        if not found:
            return []
        self.run = None
        first = found[0].fields
        return [*found, End("user_error", (
            f"The worker on {first['host']} has other data, or another program, than the worker on "
            f"{first['other_host']} (\"the run\"): {first['differ']}. {first['meaning']}"))]

    def _program_of(self, worker: Worker, kept_out: Host | None = None,
                    now: float = 0.0) -> Report | None:
        """Return what to report of a worker with other data, or another program, than the run, and
        whose host is `kept_out` for it; None: it has the same."""
        assert worker.proof and self.run
        found = refused(differences(worker.proof, self.run), self.allowed)
        if not found:
            return None
        differ, meaning = sentence(found), remedy(found, worker.proof, self.run)
        kept_out_s = kept_out.refuse(now) if kept_out else 0.0
        printed = plain(
            f"The worker on {worker.host} has other data, or another program, than the run, and "
            f"gets no place: {differ}. {meaning} The other workers go on, and the host is tried "
            f"again after {kept_out_s:.0f} s.") if kept_out else ""
        return report("worker.program_differs", printed, host=worker.host, newcomer=worker.name,
                      other_host=self.host, parts=list(dict.fromkeys(one.part for one in found)),
                      differ=differ, meaning=meaning, kept_out_s=round(kept_out_s, 1))

    # --- arithmetic -----------------------------------------------------------------------------

    def _compare_arithmetic(self, workers: Sequence[Worker], model: Worker,
                            now: float) -> list[Action]:
        """Report each worker that does not compute as `model` does, and stop those not allowed."""
        actions: list[Action] = []
        for worker in workers:
            mine, worlds = worker.arithmetic, model.arithmetic
            if worker.is_compared or mine is None or worlds is None:
                continue
            worker.is_compared = True
            is_other = computes_otherwise(mine, worlds)
            kept_out_s = 0.0
            if is_refused := is_other and self.refuses_mixed and mine.is_exact:
                kept_out_s = self.roster.hosts[worker.host].refuse(now)
                actions.append(_refuse(worker, "arithmetic_differs"))
            if is_other:
                actions.append(_arithmetic_differs(worker, model, is_refused, kept_out_s))
            elif _were_built_with_others(worker, model) and not self._is_build_reported:
                self._is_build_reported = True
                actions.append(report("worker.weights_differ_as_built", host=worker.host,
                                      newcomer=worker.name, other_host=model.host,
                                      meaning=AS_BUILT))
        return actions


def _refuse(worker: Worker, reason: str) -> Stop:
    worker.phase, worker.ended_by = Phase.GONE, reason
    return Stop(worker.name, reason, at_once=False)


def _were_built_with_others(worker: Worker, model: Worker) -> bool:
    assert worker.arithmetic and model.arithmetic
    if worker.proof and model.proof:
        return worker.proof.weights != model.proof.weights
    return worker.arithmetic.inputs != model.arithmetic.inputs


def _arithmetic_differs(worker: Worker, model: Worker, is_refused: bool,
                        kept_out_s: float) -> Report:
    assert worker.arithmetic and model.arithmetic
    differ = facts_that_differ(worker.arithmetic, model.arithmetic)
    meaning = advice(is_refused, differ)
    facts = "; ".join(f"{name} {theirs!r} there, {ours!r} here"
                      for name, (theirs, ours) in differ.items())
    printed = (f"The worker on {worker.host} computes other bits than the one on {model.host} "
               f"({facts or 'no name differs'}), and gets no place. {meaning}"
               if is_refused else "")
    return report("worker.arithmetic_differs", printed, host=worker.host, newcomer=worker.name,
                  other_host=model.host, differs=differ, refused=is_refused,
                  kept_out_s=round(kept_out_s, 1), meaning=meaning)

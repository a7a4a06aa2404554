"""What a worker logs of the run: the job, its steps, and which settings hold.

loop → here → event log; on rank 0 also one sentence on stderr for each remark
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.events import summary as report
from elastic_trainer.events.versions import versions
from elastic_trainer.host.modes import write_text
from elastic_trainer.schedule.order import facts_of
from elastic_trainer.state.checkpoints.cadence import Cadence
from elastic_trainer.state.checkpoints.commit_log import CommitLog, Damaged
from elastic_trainer.state.stores.by_url import open_store
from elastic_trainer.state.stores.store import StoreUnavailable
from elastic_trainer.training.checks.proving import remarks_on_random
from elastic_trainer.training.job.settings import (
    PROOF,
    Remark,
    allowed_settings,
    compared,
    hold_given,
    remarks_on_sparse,
    remarks_on_workers,
    require_known,
    schedule_differs,
    settle,
)
from elastic_trainer.training.work import Work
from elastic_trainer.wire.proof import Proof, differences, refused, remedy, sentence
from elastic_trainer.world.arithmetic import (
    Arithmetic,
    advice,
    computes_otherwise,
    facts_that_differ,
)
from elastic_trainer.world.collectives import World

FINISHED_EARLY_FILE = "finished_early.json"
"""The file in the folder of a run that the user's code has finished early. It has the numbers of
steps done and planned."""


class Account:
    """One worker's account of the run."""

    def __init__(self, work: Work, launch: Launch, every: Cadence):
        self.job, self.state, self.events = work.job, work.state, work.events
        self.launch, self.reduce, self.every = launch, work.reduce, every
        self._built = work.built_settings
        self._proof: Proof | None = None
        """That of this worker; None: it has none."""
        self._is_proof_logged = False
        self._found: list[Remark] = []
        """Remarks on what the warm-up has found."""

    def steps_due(self) -> int:
        """Return how many steps the run has: fewer than planned if the user's code has asked to
        finish it."""
        if self.state.is_finished_early:
            return self.state.committed
        return self.job.schedule.steps

    def require_possible(self, restored_step: int | None) -> None:
        """Raise ConfigError if the run has more steps already than it is to have, or
        --allow-change names what neither the run nor the script has."""
        if restored_step is None or self.state.has_state:  # else others know the run's settings
            require_known(self.launch.allow_change, self.state.settings, self._built)
        planned = self.job.schedule.steps
        if restored_step is not None and restored_step > planned:
            raise ConfigError(
                f"the run has a checkpoint of step {restored_step}, but it is to have {planned} "
                f"steps. Give at least as many steps as before (until), or "
                f"another name (--run).")

    def remark(self, remark: Remark, rank: int) -> None:
        """Log a remark, and write its sentence to stderr; by rank 0 alone."""
        if rank == 0:
            self.events.emit(remark.event, **remark.facts)
            print(f"elastic-trainer: {remark.sentence}", file=sys.stderr, flush=True)

    def begin(self, rank: int, sparse: Mapping[str, int]) -> None:
        """Begin the account of an attempt; `sparse` has the bytes of sparse gradients."""
        if rank == 0 and not self.launch.driver:  # no launcher logs this attempt
            self.events.emit("run.started", options={}, versions=versions())
            self.events.emit("attempt.started")
        for remark in (*self.job.remarks, *self._found, *remarks_on_sparse(sparse)):
            self.remark(remark, rank)

    def describe(self) -> None:
        schedule = self.job.schedule
        numbers = {name: getattr(schedule, name) for name in (
            "dataset_size", "global_batch", "microbatches", "epochs", "seed", "steps", "drop_last",
            "max_steps", "dropped_samples")}
        self.events.emit("job.described", reduce=self.reduce, checkpoint_every=str(self.every),
                         **numbers, **facts_of(schedule.order))

    def enter(self, world: World) -> None:
        self._log_proof()
        if world.rank != 0:
            return
        self.describe()
        for remark in remarks_on_workers(world.size, self.job.schedule.microbatches):
            self.remark(remark, world.rank)
        if self.launch.run_dir:
            report.take_back_result(self.launch.run_dir, self.steps_due())

    def step_committed(self, step: int, step_s: float, rank: int, found: Mapping[str, float],
                       is_skipped: bool, **more: Any) -> None:
        """Log a finished step, with what it has `found`, by rank 0 alone. Loggers note it on every
        worker: another one may become the first."""
        if rank != 0 and not self.events.listeners:
            return
        samples, digest, *_ = self.state.last_vote
        self.events.reach(
            "step.noted", step=step, samples=samples, loss=self.state.loss, metrics=found,
            lr=self.state.rates.used, step_s=step_s, run_id=self.state.run_id, **more)
        if rank != 0:
            return
        metrics = {"metrics": found} if found else {}
        skipped = {"skipped": True} if is_skipped else {}
        self.events.emit("worker.step_committed", step=step, samples=samples, digest=digest,
                         loss=self.state.loss, lr=self.state.rates.used, step_s=round(step_s, 5),
                         **metrics, **skipped, **more)

    def prove(self, proof: Proof | None, settings: dict[str, Any]) -> None:
        """Log the proof of this worker, and keep it in the settings that its checkpoints have."""
        assert proof
        settings[PROOF] = proof.to_dict()
        self._found, self._proof = remarks_on_random(proof), proof
        if self.launch.driver:  # it names the members before they enter
            self._log_proof()

    def _log_proof(self) -> None:
        if (proof := self._proof) and not self._is_proof_logged:
            self._is_proof_logged = True
            self.events.emit("worker.program_proved", proof=proof.digest, dataset_size=proof.length,
                             samples=[int(number) for number in proof.samples],
                             index=proof.index[:16], random=proof.random)

    def _compare_program(self, step: int, rank: int) -> None:
        """Log that the run has the dataset and the program of its checkpoint. Raises ConfigError
        for a difference that is not allowed."""
        mine, runs = self._proof, Proof.from_dict(self.state.settings.get(PROOF))
        if mine is None or runs is None:  # written by an older version
            return
        found = differences(mine, runs, is_resumed=True)
        allowed = self.launch.allow_change
        if wrong := refused(found, allowed):
            raise ConfigError(
                f"the run is resumed with other data, or another program, than that of its "
                f"checkpoint of step {step} (\"the run\"): {sentence(wrong)}. "
                f"{remedy(wrong, mine, runs)}")
        if rank == 0:
            self.events.emit("job.program_proved", step=step, proof=mine.digest,
                             run_proof=runs.digest, allowed=[one.text for one in found])
        for part in dict.fromkeys(one.part for one in found):
            text = sentence([one for one in found if one.part == part])
            self.remark(Remark("job.program_changed", f"{text}. --allow-change {part} allows it.",
                               {"part": part, "differ": text}), rank)

    def resumed(self, step: int, built: dict[str, Any], rank: int) -> None:
        """Log where the settings of a resumed run differ from those it was built with now, and
        which hold. Raises ConfigError for a change of the configuration, of the data or of the
        program that is not allowed."""
        state, job = self.state, self.job
        of_configuration = compared(state.settings, built, self.launch)
        self._compare_program(step, rank)
        allowed = allowed_settings(state.settings, built, self.launch.allow_change)
        hold_given(allowed, job.optimizer, state.rates)
        remarks, state.settings = settle(state.settings, built, allowed)
        remarks = of_configuration + remarks
        if job.scheduler is None and (job.rate or not state.rates.are_moved):
            now = state.rates.of(job.multiplier(step - 1))
            remarks += schedule_differs(step - 1, state.rates.used, now)
        for remark in remarks:
            self.remark(remark, rank)

    def compare_with_writer(self, step: int, mine: Arithmetic | None,
                            facts: Mapping[str, Any]) -> None:
        """Log that a run goes on with other arithmetic than its checkpoint was computed with: this
        is allowed, but the bits are not the same any more."""
        writers = None
        # Another version may have written these facts. They are no reason to stop.
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            writers = Arithmetic.from_dict(facts.get("arithmetic"))
        if mine and writers and computes_otherwise(mine, writers):
            differ = facts_that_differ(mine, writers)
            self.events.emit(
                "worker.arithmetic_differs", step=step, differs=differ,
                other="the checkpoint's writers", refused=False, meaning=advice(False, differ))

    def finish(self, world: World, reason: str | None) -> None:
        """Log why the run has fewer steps than planned, if it has; and if it has no best step.

        All workers call it. Network: one exchange of the reasons, if it has fewer steps.
        """
        if self.state.is_finished_early and self.state.committed < self.job.schedule.steps:
            self._finished_early(world, reason)
        self._remark_on_best(world.rank)

    def _remark_on_best(self, rank: int) -> None:
        if (best := self.job.best) and best.value is None:
            facts = {"metric": best.rule.metric}
            self.remark(Remark(
                "job.best_not_found",
                f"best is to follow {best.rule.metric!r}, but no evaluation gave a finite value of "
                f"it, so no checkpoint is kept as the best. Call trainer.evaluate(…) after steps.",
                facts), rank)

    def _finished_early(self, world: World, mine: str | None) -> None:
        texts = map(json.loads, world.gather_texts(json.dumps(mine)))
        reason = next((text for text in texts if text is not None), "asked for before")
        if world.rank != 0:
            return
        steps, planned = self.state.committed, self.job.schedule.steps
        note = {"steps": steps, "planned_steps": planned, "reason": reason}
        if self.launch.run_dir:
            write_text(Path(self.launch.run_dir, FINISHED_EARLY_FILE), json.dumps(note) + "\n")
        self.remark(Remark(
            "run.finished_early",
            f"the run is finished after {steps} of {planned} steps: {reason}", note), world.rank)


def is_finished(run_dir: Path | None, steps: int) -> bool:
    """Return whether the run of this folder is finished, with these steps planned.

    Then the loop yields no micro-batch to be tried. Otherwise the user's code would run after a
    step that does not exist.
    """
    if run_dir is None:
        return False
    try:
        result = json.loads(Path(run_dir, report.RESULT_FILE).read_text())
        if not result["finished"] or result["steps"] == steps:
            return bool(result["finished"])
        early = json.loads(Path(run_dir, FINISHED_EARLY_FILE).read_text())
        return bool(early["steps"] == result["steps"] and early["planned_steps"] == steps)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def is_in_store(store: str | None, steps: int) -> bool:
    """Return whether a store has the checkpoint of the last step of a run.

    Network: two requests. If they fail, the answer is no: the restore asks again.
    """
    if store is None:
        return False
    try:
        kept = CommitLog(open_store(store)).tail().kept
    except (Damaged, FileNotFoundError, StoreUnavailable):
        return False
    return max(kept.values(), default=-1) == steps

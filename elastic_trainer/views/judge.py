"""Judge the lines of an event log one after another: one lineage, each step once, no step lost.

verify (whose head has the rules) → here, lineage, due → Verdict

Each public method of Judge reads one kind of event, in the order of a run's life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_trainer.events.schema import UNREADABLE, flaw
from elastic_trainer.events.sentences import count
from elastic_trainer.views.due import Due
from elastic_trainer.views.lineage import (
    Checkpoints,
    Event,
    Findings,
    Lineage,
    ProgramProofs,
    StepLine,
    StepLines,
    is_about,
    is_same,
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of `verify`."""

    finished: bool
    steps: int
    """In the kept history."""
    steps_due: int | None
    """In the whole run; None when no job was described."""
    samples: int
    """Counted by the kept steps."""
    whole_epochs: int
    """The epochs of which every sample counted exactly once, as is proved."""
    attempts: int
    generations: int
    repeated_lines: int
    steps_redone: int
    """Steps in flight that the survivors did again."""
    steps_rolled_back: int
    """Committed steps that a start from a checkpoint dropped."""
    finishes: tuple[tuple[int, int, str], ...]
    """Steps, samples and SHA-256 of the weights, of each run.finished."""
    violations: tuple[str, ...]
    notes: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """The segments of the log that are missing or cannot be read. The violations may come from the
    lines that they lack."""
    unproved: tuple[str, ...] = ()
    """What the event log neither proves nor contradicts."""

    @property
    def is_proved(self) -> bool:
        return not (self.violations or self.left_out or self.unproved)

    def sentences(self, *, most: int = 20) -> list[str]:
        """Return what was proved, or what was violated, and the notes; at most `most` of each."""
        if self.left_out:
            found = _first(most, "not proved", (*self.left_out, *self.violations))
        elif self.violations:
            found = _first(most, "violated", self.violations)
        else:
            found = self._proofs()
        return (found + _first(most, "not proved", self.unproved)
                + _first(most, "note", self.notes))

    def _proofs(self) -> list[str]:
        due = "" if self.steps_due is None else f" of {self.steps_due}"
        attempts = count(self.attempts, "attempt")
        generations = count(self.generations, "generation")
        epochs = (count(self.whole_epochs, "whole epoch") if self.whole_epochs
                  else "no whole epoch yet")
        label = "proved" if self.is_proved else "counted"
        programs = ["proved: each worker, and each start from a checkpoint, had the run's dataset "
                    "and program."] if self.is_proved else []
        return [
            f"{label}: {self.samples} samples in {self.steps}{due} steps, each counted exactly "
            f"once.",
            f"{label}: {epochs}; a whole one has every sample of the dataset once.",
            f"{label}: one lineage through {attempts} and {generations}.",
            *programs,
            f"done again: {self.steps_redone} in flight, {self.steps_rolled_back} since a "
            f"checkpoint.",
        ]


def _first(most: int, label: str, sentences: Sequence[str]) -> list[str]:
    lines = [f"{label}: {sentence}" for sentence in sentences[:most]]
    more = len(sentences) - most
    return lines if more <= 0 else [*lines, f"{label}: and {more} more."]


class Judge:
    """The facts of the lines so far, and the contradictions in them."""

    def __init__(self, restored: set[tuple[int, int]]):
        self.findings = Findings()
        self.due = Due(self.findings)
        self.lineage = Lineage(self.findings)
        self.checkpoints = Checkpoints(self.findings, restored)
        self.programs = ProgramProofs()
        self.left_out = 0
        """The number of malformed events whose kinds prove nothing."""
        self.kept, self.next = StepLines(), 0
        """The kept history, and the step that must come next."""
        self.dropped = StepLines()
        """The steps that were rolled back and are not done again yet."""
        self.redone: set[tuple[int, int | None, int]] = set()
        """Attempt, the generation that broke, step."""
        self.finish_line: int | None = None
        self.finishes: list[tuple[int, int, str]] = []
        self.weights: tuple[int, str] | None = None
        """Line and SHA-256 of a finish after all steps of the present job."""
        self.attempts = self.generations = self.repeated_lines = self.rolled_back = 0

    def read(self, line: int, event: Event | None) -> None:
        """Take one more line; None is a torn one."""
        self.findings.line = line
        if self.findings.open_torn:
            self.findings.resolve_torn(event)
        if event is None:
            self.findings.take_torn(self.finish_line is not None)
        elif wrong := flaw(event):
            self._leave_out(event, wrong)
        elif reader := _READERS.get(event["event"]):
            try:
                reader(self, event)
            except UNREADABLE as error:
                self._violate(f"{event['event']} is malformed: {type(error).__name__} {error}.")

    def _violate(self, sentence: str) -> None:
        self.findings.violate(sentence)

    def _leave_out(self, event: Event, wrong: str) -> None:
        """Leave a malformed event out: a violation if its kind proves something."""
        if event["event"] in _READERS or event["event"] == "state.checkpoint_restored":
            self._violate(f"{event['event']} is malformed: {wrong}. Its content is lost.")
        else:
            self.left_out += 1

    def run_started(self, event: Event) -> None:
        self.lineage.start_run()

    def attempt_started(self, event: Event) -> None:
        self.lineage.start_attempt(event["attempt"])

    def attempt_ended(self, event: Event) -> None:
        if event["verdict"] == "finished" and self.finish_line is None:
            self._violate(f"attempt {event['attempt']} ended as finished without a run.finished "
                          f"line.")

    def generation_formed(self, event: Event) -> None:
        if self.lineage.enter_attempt_of(event):
            self.lineage.form(event["generation"])
            self.programs.formed(event)

    def state_lost(self, event: Event) -> None:
        self._violate(f"after step {event['received_step']} rank {event['receivers']} received a "
                      f"state that lacks a part of the training: in step {event['step']} it holds "
                      f"other bits than rank {event['holders']}.")

    def job_described(self, event: Event) -> None:
        if not self.lineage.enter_attempt_of(event):
            return
        is_taken = self.due.describe(event, may_be_longer=not self.lineage.has_job)
        self.lineage.has_job = True
        if is_taken and (self.due.steps or 0) > len(self.kept):
            self.finish_line = self.weights = None

    def generation_started(self, event: Event) -> None:
        if not self.lineage.enter_attempt_of(event):
            return
        lineage, step = self.lineage, event["step"]
        lineage.check_generation(event["generation"])
        if step > self.next + 1:  # the repeated line that follows may be the first of one step more
            self._violate(f"starts at step {step}, but step {self.next} never came.")
        self._check_start(event, step)
        self._roll_back_to(step)
        self.attempts += not lineage.has_generation
        self.generations += 1
        lineage.start_generation(event["generation"], event["size"], step)
        self.programs.started(event, is_formed=lineage.formed is not None)

    def _check_start(self, event: Event, step: int) -> None:
        # The only worker that knew of the finished step may have died after it wrote the line. For
        # the others that step is in flight.
        is_in_flight = step == self.next - 1 and (
            event["attempt"], self.lineage.generation, step) in self.redone
        if step < self.next and self.lineage.has_generation and not is_in_flight:
            self._violate(f"goes back to step {step} within an attempt where step {self.next} is "
                          f"due.")
        elif (step < self.next and not is_in_flight) or event["source"] != "memory":
            self.checkpoints.start(step, self.lineage.attempt)

    def step_redone(self, event: Event) -> None:
        if not self.lineage.enter_attempt_of(event):
            return
        step = event["step"]
        if step not in (self.next - 1, self.next, self.next + 1):
            self._violate(f"step {step} is done again, but step {self.next} was in flight.")
        # The generation that logs it may break before it trains.
        self.redone.add((event["attempt"], self.lineage.generation, step))

    def step_committed(self, event: Event) -> None:
        if not self.lineage.enter_attempt_of(event):
            return
        step = StepLine(event["step"], self.findings.line, self.lineage.life,
                        event["generation"], event["samples"], event["digest"], event["loss"])
        self.lineage.check_world(step, event["size"])
        self.due.check(step)
        if not event.get("repeated"):
            self.lineage.check_first(step)
        elif step.step == self.next:
            self.repeated_lines += 1  # its first writer died before it wrote the line
        else:
            self.repeated_lines += 1
            self._check_repeat(step)
            return
        self.programs.trained(event["attempt"])
        self._check_order(step)
        self._check_against_dropped(step)
        self.kept.put(step)
        self.next = step.step + 1

    def checkpoint_published(self, event: Event) -> None:
        attempt, step = event["attempt"], event["step"]
        is_over = self.lineage.attempt is not None and attempt != self.lineage.attempt
        if is_over and self.lineage.has_generation:
            self.findings.note(f"attempt {attempt}, which is over, published step {step}: not "
                               f"counted.")
            return
        self.checkpoints.publish(step)

    def run_finished(self, event: Event) -> None:
        if not self.lineage.enter_attempt_of(event):
            return
        steps, samples, weights = event["steps"], event["samples"], event["weights_sha256"]
        claim = f"the run finished with {steps} steps and {samples} samples"
        if steps != len(self.kept) or samples != self.kept.samples:
            self._violate(f"{claim}, but its lines count {len(self.kept)} and "
                          f"{self.kept.samples}.")
        is_early = event.get("planned_steps", 0) > steps  # the user's code asked for it: step.stop
        if self.due.steps is not None and steps != self.due.steps and not is_early:
            self._violate(f"{claim}, but {self.due.steps} steps were due.")
        last = self.kept.get(self.next - 1)
        if last is not None and not is_about(event["loss"], last.loss):
            self._violate(f"{claim}, but its loss {event['loss']} is {last.loss} in line "
                          f"{last.line}.")
        self.finishes.append((steps, samples, weights))
        if self.weights is None:
            self.weights = (self.findings.line, weights)
        elif self.weights[1] != weights:
            self._violate(f"the run finished again, with other weights than in line "
                          f"{self.weights[0]}.")
        self.finish_line = self.findings.line

    def verdict(self) -> Verdict:
        self.findings.resolve_torn_at_end()
        violations, notes = self.findings.violations, self.findings.notes
        whole, broken = self.due.whole_epochs(self.kept)
        violations += [f"the digests of epoch {epoch} do not add up to the whole dataset's."
                       for epoch in broken]
        return Verdict(
            finished=self.finish_line is not None, steps=len(self.kept), steps_due=self.due.steps,
            samples=self.kept.samples, whole_epochs=len(whole), attempts=self.attempts,
            generations=self.generations, repeated_lines=self.repeated_lines,
            steps_redone=len(self.redone), steps_rolled_back=self.rolled_back,
            finishes=tuple(self.finishes), violations=tuple(violations),
            unproved=tuple(self.programs.lacking()) if self.kept else (),
            notes=(*notes, *self._last_notes()))

    def _last_notes(self) -> list[str]:
        notes, schedule = [], self.due.schedule
        if self.left_out:
            notes.append(f"{count(self.left_out, 'malformed event')} of kinds that prove nothing: "
                         f"left out.")
        if schedule is not None and schedule.dropped_samples and schedule.order.drops:
            notes.append(f"each epoch leaves out {schedule.dropped_samples} samples (drop_last). "
                         "A whole epoch has every other sample of the dataset once.")
        if schedule is not None and schedule.order.counts_positions:
            notes.append(f"the order is {schedule.order.name}: each position of an epoch is proved "
                         f"to count once. The sample of a position follows from a table with "
                         f"SHA-256 {schedule.order.sha256[:16]}…, which the event log does not "
                         f"have.")
        if self.finish_line is None:
            due = "" if schedule is None else f" of {schedule.steps}"
            notes.append(f"the run has not finished: {len(self.kept)}{due} steps so far.")
        return notes

    def _roll_back_to(self, step: int) -> None:
        if step >= self.next:
            return
        for later in list(self.kept.numbers(step)):
            dropped = self.kept.pop(later)
            assert dropped is not None
            self.dropped.put(dropped)
            self.rolled_back += 1
        self.checkpoints.go_back(step)
        self.next = step
        self.finish_line = None

    def _check_repeat(self, step: StepLine) -> None:
        first = self.kept.get(step.step)
        if first is None or step.step != self.next - 1:
            self._violate(f"step {step.step} is repeated, but step {self.next - 1} was the last.")
            return
        if first.life == step.life and first.generation >= step.generation:
            self._violate(f"step {step.step} is repeated by the generation that wrote line "
                          f"{first.line}.")
        for key in ("samples", "digest", "loss"):
            now, then = getattr(step, key), getattr(first, key)
            if not is_same(now, then):
                self._violate(f"repeated with {key} {now}, not {then} as in line {first.line}.")

    def _check_order(self, step: StepLine) -> None:
        if step.step > self.next:
            self._violate(f"step {step.step} comes where step {self.next} is due. Steps are lost.")
        elif step.step < self.next:
            self._violate(f"step {step.step} comes again where {self.next} is due. Its samples "
                          f"count twice.")
        if self.finish_line is not None:
            self._violate(f"step {step.step} comes after the run finished, in line "
                          f"{self.finish_line}.")

    def _check_against_dropped(self, step: StepLine) -> None:
        """Compare a step done again after a rollback with what it was: the same bits.

        On unlike processors the bits may differ, so that is a note.
        """
        before, job = self.dropped.pop(step.step), self.due.job
        if before is None or job is None or job["reduce"] != "exact":
            return
        if is_same(step.loss, before.loss):
            self.checkpoints.made_again(step.step + 1)
            return
        difference = (f"step {step.step} again with loss {step.loss}, not {before.loss} as in line "
                      f"{before.line}")
        if self.checkpoints.is_start_published:
            self.findings.note(f"{difference}. Not the same bits: do processors, thread counts or "
                               f"kernels differ?")
        else:
            self._violate(f"{difference}, since an unpublished checkpoint. Two lineages.")


_READERS: dict[str, Callable[[Judge, Event], None]] = {
    "run.started": Judge.run_started,
    "attempt.started": Judge.attempt_started,
    "attempt.ended": Judge.attempt_ended,
    "driver.generation_formed": Judge.generation_formed,
    "job.described": Judge.job_described,
    "worker.generation_started": Judge.generation_started,
    "worker.step_redone": Judge.step_redone,
    "worker.step_committed": Judge.step_committed,
    "state.checkpoint_published": Judge.checkpoint_published,
    "worker.state_lost": Judge.state_lost,
    "run.finished": Judge.run_finished,
    "job.program_proved": lambda judge, event: judge.programs.resumed(event),
    "worker.program_proved": lambda judge, event: judge.programs.proved(event),
}

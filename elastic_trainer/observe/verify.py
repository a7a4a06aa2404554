"""Prove from a run's events that every sample of every step counted exactly once, in one lineage.

    elastic-trainer verify runs/x

Where it stands: rank 0's lines in events.jsonl → here → what was proved, or which line says otherwise.

What always holds:
1. Exactly once: the samples and the digest that the vote totalled over all workers are what the schedule was
   due, on every step line. A whole epoch's digests add up to that of the whole dataset, in whatever order.
2. No step back: steps count up by one. Only the last line may come again, marked "repeated" and saying the
   same. Training starts again only where a checkpoint of this lineage stands, or at 0 while there is none.
3. One lineage: attempts and their generations only count up, nobody writes for a world that a newer one
   replaced, and each attempt describes the same job.
4. A run that says it finished covered all its steps, and says of them what their lines say. Its result.json says the
   same: a diary whose end was cut off stands beside one that knows better.
5. One wrong line costs one sentence or a few: judging goes on from what that line claims.

The kept history is what the weights were made of: a start from a checkpoint drops the later steps from it.

What it does not do: look at weights or checkpoints. The order of lines in the file is taken as the order of
events; two lineages are seen as far as their lines differ from one story.

Two things are notes and no violations. The last line of an attempt without success may be torn: its writer
was killed. And a restored checkpoint may have no published line when it is newer than all that have one: its
publisher died in between. In `exact` mode the steps done again from it must then show the losses they had.

Memory: one line of the log, and 45 bytes a step in arrays (a run of 10^6 steps with 10^4 faults: under 150 MB in all).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.config import ConfigError
from elastic_trainer.observe.report import RESULT_FILE
from elastic_trainer.observe.schema import UNREADABLE, flaw
from elastic_trainer.observe.segments import Reader, has_events
from elastic_trainer.observe.step_table import StepTable
from elastic_trainer.schedule import Schedule, samples_digest

Event = dict[str, Any]
Line = tuple[int, Event | None]
"""A line's number in the file, from 1, and its event; None when it is torn."""

LENGTH_KEYS = ("epochs", "max_steps")
"""What a run may be resumed with another value of: the steps that are done stay what they are."""
SCHEDULE_KEYS = ("dataset_size", "global_batch", "shards", "seed", *LENGTH_KEYS)
DIGEST_CHUNK_SAMPLES = 2**20
DUE_CHUNK_SAMPLES = 2**16
"""What the steps of so many samples were due is computed at once: one call a step took 40 µs, which is 40 s for 10^6."""
MOST_SENTENCES, MOST_CHARACTERS = 10_000, 1000
DUE_CHUNKS = 4
"""So many chunks are remembered: a start from a checkpoint goes back a few."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a run's events prove, and what in them contradicts the promise."""

    finished: bool
    steps: int
    """In the kept history."""
    steps_due: int | None
    """In the whole run; None when no job was described."""
    samples: int
    """Counted by the kept steps."""
    whole_epochs: int
    """Epochs of which every sample is proved to have counted exactly once."""
    attempts: int
    generations: int
    repeated_lines: int
    steps_redone: int
    """Thrown away in flight and done again, by the survivors."""
    steps_rolled_back: int
    """Committed, then dropped by a start from a checkpoint, and due again."""
    finishes: tuple[tuple[int, int, str], ...]
    """Steps, samples and SHA-256 of the weights, each time that the run said it finished."""
    violations: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_proved(self) -> bool:
        return not self.violations

    def sentences(self, *, most: int = 20) -> list[str]:
        """Say to a person what was proved, or else what was violated, and the notes; `most` of each."""
        if self.is_proved:
            due = "" if self.steps_due is None else f" of {self.steps_due}"
            attempts, generations = _count(self.attempts, "attempt"), _count(self.generations, "generation")
            epochs = _count(self.whole_epochs, "whole epoch") if self.whole_epochs else "no whole epoch yet"
            said = [
                f"proved: {self.samples} samples in {self.steps}{due} steps, each counted exactly once.",
                f"proved: {epochs}; a whole one has every sample of the dataset once.",
                f"proved: one lineage through {attempts} and {generations}.",
                f"done again: {self.steps_redone} in flight, {self.steps_rolled_back} since a checkpoint.",
            ]
        else:
            said = _first(most, "violated", self.violations)
        return said + _first(most, "note", self.notes)


def verify(run_dir: str | Path) -> Verdict:
    """Judge the events of a run's folder, and its result.json by them. Raises FileNotFoundError where there are none."""
    if not has_events(Path(run_dir)):
        raise FileNotFoundError(f"{run_dir} has no event log")
    verdict = judge(read_lines(run_dir), _restored_steps(read_lines(run_dir, b'"state.checkpoint_restored"')))
    wrong = [] if verdict.steps else ["no step has a line in events.jsonl, so nothing is proved."]
    try:
        result = json.loads(Path(run_dir, RESULT_FILE).read_text())
        said = [(result["steps"], result["samples"], result["weights_sha256"])] if result["finished"] else []
    except FileNotFoundError:
        said = []
    except (RecursionError, *UNREADABLE) as error:
        said, wrong = [], [*wrong, f"{RESULT_FILE} makes no sense: {type(error).__name__} {error}."]
    told = verdict.finishes[-1:] if verdict.finished else verdict.finishes  # an older one, of a run that was made longer
    wrong += [f"{RESULT_FILE} says that the run finished with {steps} steps, {samples} samples and weights {weights}, but "
              f"events.jsonl does not." for steps, samples, weights in said if (steps, samples, weights) not in told]
    return replace(verdict, violations=(*verdict.violations, *wrong))


def read_lines(run_dir: str | Path, having: bytes = b"") -> Iterator[Line]:
    """Read the folder's events, torn lines included, one at a time; only the lines that have some bytes in them.

    A writer killed in a line leaves no line end, so the next event stands on the same line: it counts as two.
    """
    for number, raw in enumerate(Reader(Path(run_dir)).lines(to_the_end=True), start=1):
        if having not in raw:
            continue
        if (event := _parse_event(raw)) is not None:
            yield number, event
        else:
            yield from _torn(number, raw)


def judge(lines: Iterable[Line], restored: set[tuple[int, int]] | None = None) -> Verdict:
    """Judge a run's lines: the pure core of verify().

    `restored` is (attempt, step) of all checkpoints that were restored, and is looked for in the lines where it is not
    given: then they have to be a list.
    """
    history = _History(restored=_restored_steps(lines) if restored is None else restored)
    for number, event in lines:
        history.number = number
        if history.open_torn:
            history.resolve_torn(event)
        if event is None:
            history.torn()
        elif wrong := flaw(event):
            history.malformed(event, wrong)
        elif event["event"] in _READERS:
            try:
                _READERS[event["event"]](history, event)
            except UNREADABLE as error:
                history.violate(f"{event['event']} makes no sense: {type(error).__name__} {error}.")
    history.resolve_torn_at_end()
    return history.verdict()


class _Step(NamedTuple):
    """What one line says of a committed step."""

    step: int
    line: int
    life: int
    """Which attempt, counted over all invocations."""
    generation: int
    samples: int
    digest: int
    loss: float


class _Steps:
    """Steps by number, in arrays."""

    def __init__(self) -> None:
        self._rows = StepTable("qiqqqd")

    def __len__(self) -> int:
        return len(self._rows)

    def has(self, number: int) -> bool:
        return number in self._rows

    def put(self, step: _Step) -> None:
        number, line, life, generation, samples, digest, loss = step
        self._rows[number] = (line, life, generation, samples, digest, loss)

    def get(self, number: int) -> _Step | None:
        row = self._rows.get(number)
        return None if row is None else _Step(number, *row)  # type: ignore[arg-type]

    def pop(self, number: int) -> _Step | None:
        row = self._rows.pop(number) if len(self._rows) else None
        return None if row is None else _Step(number, *row)  # type: ignore[arg-type]

    def numbers(self, start: int | None = None) -> Iterator[int]:
        return self._rows.steps(start)


@dataclass
class _History:
    """What the lines so far say. Each public method reads one kind of line, in the order of a run's life."""

    restored: set[tuple[int, int]]
    """(attempt, step) of every state.checkpoint_restored line, later ones too."""
    number: int = 0
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    more_violations: int = 0
    more_notes: int = 0
    left_out: int = 0
    """Malformed events of kinds that prove nothing."""

    attempt: int | None = None
    life: int = 0
    announced: set[int] = field(default_factory=set)  # attempts of this invocation
    has_job: bool = False  # this attempt
    has_generation: bool = False  # this attempt
    attempts: int = 0

    generation: int | None = None
    size: int | None = None
    first_step: int | None = None  # of this generation, by its own words; None once it came
    formed: int | None = None
    generations: int = 0

    job: Event | None = None
    job_line: int = 0
    schedule: Schedule | None = None
    due: dict[int, list[int]] = field(default_factory=dict)  # first step of a chunk → digests

    kept: _Steps = field(default_factory=lambda: _Steps())
    next: int = 0
    dropped: _Steps = field(default_factory=lambda: _Steps())  # rolled back and not yet done again
    samples_kept: int = 0
    published: dict[int, int] = field(default_factory=dict)  # step → line
    abandoned: dict[int, int] = field(default_factory=dict)  # published, then the lineage went back behind it
    start_is_published: bool = True

    finish_line: int | None = None
    finishes: list[tuple[int, int, str]] = field(default_factory=list)  # steps, samples, SHA-256
    weights: tuple[int, str] | None = None  # line, SHA-256, of a finish after as many steps
    open_torn: list[tuple[int, int, int, bool]] = field(default_factory=list)
    """Torn lines whose attempt has not ended yet: line, violations and notes before it, whether a run had finished."""
    repeated_lines: int = 0
    steps_rolled_back: int = 0
    redone: set[tuple[int, int | None, int]] = field(default_factory=set)  # attempt, the generation that broke, step

    def violate(self, sentence: str) -> None:
        self._say(self.violations, len(self.violations), f"line {self.number}: {sentence}")

    def note(self, sentence: str) -> None:
        self._say(self.notes, len(self.notes), f"line {self.number}: {sentence}")

    def _say(self, said: list[str], at: int, sentence: str) -> None:
        """Put a sentence in its place; the first MOST_SENTENCES of a kind are kept, the others are counted."""
        if len(said) < MOST_SENTENCES:
            said.insert(at, sentence[:MOST_CHARACTERS])
        elif said is self.violations:
            self.more_violations += 1
        else:
            self.more_notes += 1

    def malformed(self, event: Event, wrong: str) -> None:
        """Leave out an event that cannot be read; it is a violation if it is of a kind that proves something."""
        if event["event"] in _READERS or event["event"] == "state.checkpoint_restored":
            self.violate(f"{event['event']} makes no sense: {wrong}. What it said is lost.")
        else:
            self.left_out += 1

    def torn(self) -> None:
        """Take a torn line: what it costs is known when its attempt ends."""
        self.open_torn.append((self.number, len(self.violations), len(self.notes), self.finish_line is not None))

    def resolve_torn(self, event: Event | None) -> None:
        """Say of the open torn line what the line behind it decides, if it does.

        It is harmless if only the driver's lines follow before its attempt ends, without success.
        """
        if event is not None and event["event"] == "attempt.ended":
            self._judge_torn(event.get("verdict") != "finished")
        elif event is None or not event["event"].startswith("driver."):
            self._judge_torn(event is not None and event["event"] in ("attempt.started", "run.started"))

    def resolve_torn_at_end(self) -> None:
        """Say the same when no line follows."""
        self._judge_torn(is_last=True)

    def _judge_torn(self, is_last: bool) -> None:
        for number, violations, notes, has_finished in self.open_torn:  # in its place among the sentences
            if is_last and not has_finished:
                self._say(self.notes, notes, f"line {number}: torn, the last of an attempt that did not finish. Its "
                                             f"writer was killed.")
            else:
                self._say(self.violations, violations, f"line {number}: torn, and not the last of an attempt that did "
                                                       f"not finish. What it said is lost.")
        self.open_torn.clear()

    def run_started(self, event: Event) -> None:
        self._leave_attempt(None)
        self.announced.clear()

    def attempt_started(self, event: Event) -> None:
        attempt, newest = event["attempt"], max(self.announced, default=0)
        if attempt <= newest:
            self.violate(f"attempt {attempt} starts after attempt {newest}. Two lineages of one run.")
        self.announced.add(attempt)
        self._leave_attempt(attempt)

    def attempt_ended(self, event: Event) -> None:
        if event["verdict"] == "finished" and self.finish_line is None:
            self.violate(f"attempt {event['attempt']} ended as finished without a run.finished line.")

    def generation_formed(self, event: Event) -> None:
        if not self._is_of_this_attempt(event):
            return
        formed = event["generation"]
        if self.formed is not None and formed <= self.formed:
            self.violate(f"the driver formed generation {formed} after {self.formed}. Two lineages.")
        self.formed = formed

    def job_described(self, event: Event) -> None:
        if not self._is_of_this_attempt(event):
            return
        job = {key: event[key] for key in (*SCHEDULE_KEYS, "reduce")}
        job["drop_last"] = bool(event.get("drop_last"))  # older lines have none
        may_change = () if self.has_job else LENGTH_KEYS
        self.has_job = True
        changed = {key for key, value in job.items() if self.job is not None and value != self.job[key]}
        for key in sorted(changed.difference(may_change)):
            assert self.job is not None
            self.violate(f"the job's {key} is {job[key]!r}, but {self.job[key]!r} in line {self.job_line}.")
        if self.job is None or (changed and changed <= {*may_change}):
            self._take_job(job)

    def _take_job(self, job: Event) -> None:
        self.job, self.job_line = job, self.number
        try:
            self.schedule = Schedule(**{key: job[key] for key in (*SCHEDULE_KEYS, "drop_last")})
        except ConfigError as error:
            self.violate(f"the job has no schedule, so nothing is known to be due: {error}")
        if self.schedule is not None and self.schedule.steps > len(self.kept):
            self.finish_line = self.weights = None

    def generation_started(self, event: Event) -> None:
        if not self._is_of_this_attempt(event):
            return
        generation, step, size = event["generation"], event["step"], event["size"]
        if self.generation is not None and generation <= self.generation:
            self.violate(f"generation {generation} starts after generation {self.generation}. Two lineages.")
        if step > self.next + 1:  # one more is fine: the repeated line that follows may be that step's first
            self.violate(f"starts at step {step}, but step {self.next} never came.")
        # The only one who knew that a step was finished may have died behind its line: to the others it is in flight.
        is_in_flight = step == self.next - 1 and (event["attempt"], self.generation, step) in self.redone
        if step < self.next and self.has_generation and not is_in_flight:
            self.violate(f"goes back to step {step} within an attempt where step {self.next} is due.")
        elif (step < self.next and not is_in_flight) or event["source"] != "memory":
            self._check_start(step)
        self._roll_back_to(step)
        self.attempts += not self.has_generation
        self.generations += 1
        self.has_generation = True
        self.generation, self.size, self.first_step = generation, size, step

    def step_redone(self, event: Event) -> None:
        if not self._is_of_this_attempt(event):
            return
        step = event["step"]
        if step not in (self.next - 1, self.next, self.next + 1):
            self.violate(f"step {step} is done again, but step {self.next} was in flight.")
        self.redone.add((event["attempt"], self.generation, step))  # the one that tells it may break before it trains

    def step_committed(self, event: Event) -> None:
        if not self._is_of_this_attempt(event):
            return
        step = _Step(event["step"], self.number, self.life, event["generation"], event["samples"], event["digest"],
                     event["loss"])
        self._check_world(step, event["size"])
        self._check_samples(step)
        if not event.get("repeated"):
            self._check_first(step)
        elif step.step == self.next:
            self.repeated_lines += 1  # whose turn it was died before writing it
        else:
            self.repeated_lines += 1
            self._check_repeat(step)
            return
        self._check_order(step)
        self._check_against_dropped(step)
        self._keep(step)
        self.next = step.step + 1

    def checkpoint_published(self, event: Event) -> None:
        step = event["step"]
        if self.attempt is not None and event["attempt"] != self.attempt and self.has_generation:
            self.note(f"attempt {event['attempt']}, which is over, published step {step}: not counted.")
            return
        self.published.setdefault(step, self.number)
        self.abandoned.pop(step, None)

    def run_finished(self, event: Event) -> None:
        if not self._is_of_this_attempt(event):
            return
        said = f"the run finished with {event['steps']} steps and {event['samples']} samples"
        if event["steps"] != len(self.kept) or event["samples"] != self._samples():
            self.violate(f"{said}, but its lines count {len(self.kept)} and {self._samples()}.")
        if self.schedule is not None and event["steps"] != self.schedule.steps:
            self.violate(f"{said}, but {self.schedule.steps} steps were due.")
        last = self.kept.get(self.next - 1)
        if last is not None and not _is_about(event["loss"], last.loss):
            self.violate(f"{said}, but its loss {event['loss']} is {last.loss} in line {last.line}.")
        self.finishes.append((event["steps"], event["samples"], event["weights_sha256"]))
        if self.weights is None:
            self.weights = (self.number, event["weights_sha256"])
        elif self.weights[1] != event["weights_sha256"]:
            self.violate(f"the run finished again, with other weights than in line {self.weights[0]}.")
        self.finish_line = self.number

    def verdict(self) -> Verdict:
        steps_due = None if self.schedule is None else self.schedule.steps
        violations, notes = list(self.violations), list(self.notes)
        violations += [f"{self.more_violations} more, which are not listed."] if self.more_violations else []
        notes += [f"{self.more_notes} more, which are not listed."] if self.more_notes else []
        if self.left_out:
            notes.append(f"{_count(self.left_out, 'malformed event')} of kinds that prove nothing: left out.")
        whole, broken = self._whole_epochs()
        for epoch in broken:
            violations.append(f"the digests of epoch {epoch} do not add up to the whole dataset's.")
        if self.schedule is not None and self.schedule.dropped_samples:
            notes.append(f"each epoch leaves out {self.schedule.dropped_samples} samples (drop_last). "
                         "A whole epoch has every other sample of the dataset once.")
        if self.finish_line is None:
            due = "" if steps_due is None else f" of {steps_due}"
            notes.append(f"the run has not finished: {len(self.kept)}{due} steps so far.")
        return Verdict(
            finished=self.finish_line is not None,
            steps=len(self.kept),
            steps_due=steps_due,
            samples=self._samples(),
            whole_epochs=len(whole),
            attempts=self.attempts,
            generations=self.generations,
            repeated_lines=self.repeated_lines,
            steps_redone=len(self.redone),
            steps_rolled_back=self.steps_rolled_back,
            finishes=tuple(self.finishes),
            violations=tuple(violations),
            notes=tuple(notes),
        )

    def _is_of_this_attempt(self, event: Event) -> bool:
        """Say so, and violate for an older one; a newer one begins here when no launcher announced it."""
        attempt = event["attempt"]
        if self.attempt is None or attempt > self.attempt:
            self._leave_attempt(attempt)
        elif attempt < self.attempt:
            self.violate(f"{event['event']} of attempt {attempt} in attempt {self.attempt}. Two lineages.")
            return False
        return True

    def _leave_attempt(self, entered: int | None) -> None:
        self.attempt = entered
        self.life += 1
        self.has_job = self.has_generation = False
        self.generation = self.size = self.first_step = self.formed = None

    def _check_start(self, step: int) -> None:
        self.start_is_published = step in self.published or (step == 0 and not self.published)
        if self.start_is_published:
            return
        if step in self.abandoned:
            self.violate(f"starts at step {step}, from a branch left behind, line {self.abandoned[step]}.")
        elif step > max(self.published, default=0) and (self.attempt, step) in self.restored:
            self.note(f"starts at step {step} without a published line. Did the checkpoint's publisher die?")
        else:
            newest = f"step {max(self.published)}" if self.published else "none"
            self.violate(f"starts at step {step}, where no checkpoint was published. The newest: {newest}.")

    def _roll_back_to(self, step: int) -> None:
        if step >= self.next:
            return
        for later in list(self.kept.numbers(step)):
            self.dropped.put(self._drop(later))
            self.steps_rolled_back += 1
        for later in [published for published in self.published if published > step]:
            self.abandoned[later] = self.published.pop(later)
        self.next = step
        self.finish_line = None

    def _check_world(self, step: _Step, size: int) -> None:
        if not self.has_job:
            self.violate(f"step {step.step} comes before attempt {self.attempt} described its job.")
            self.has_job = True  # once is enough
        said = f"step {step.step} is of generation {step.generation}"
        if self.generation is None or step.generation > self.generation:
            self.violate(f"{said}, which never started.")
        elif step.generation < self.generation:
            self.violate(f"{said}, but generation {self.generation} started. Two lineages.")
        elif size != self.size:
            self.violate(f"{said} with {size} workers, which has {self.size}.")

    def _check_samples(self, step: _Step) -> None:
        if self.schedule is None:
            return
        if not 0 <= step.step < self.schedule.steps:
            self.violate(f"step {step.step} is none of the run's {self.schedule.steps} steps.")
            return
        samples, digest = self.schedule.batch_size(step.step), self._due_digest(self.schedule, step.step)
        if step.samples != samples:
            self.violate(f"step {step.step} counted {step.samples} samples, but {samples} were due.")
        if step.digest != digest:
            self.violate(f"step {step.step} has digest {step.digest}, but {digest} was due: other samples.")

    def _due_digest(self, schedule: Schedule, step: int) -> int:
        """Return the digest that a step was due: a chunk of steps of one epoch is computed together."""
        in_epoch, length = step % schedule.steps_per_epoch, max(1, DUE_CHUNK_SAMPLES // schedule.global_batch)
        first = step - in_epoch % length
        if first not in self.due:
            while len(self.due) >= DUE_CHUNKS:
                del self.due[next(iter(self.due))]
            count = min(length, schedule.steps_per_epoch - (first % schedule.steps_per_epoch))
            self.due[first] = schedule.batch_digests(range(first, first + count))
        return self.due[first][step - first]

    def _keep(self, step: _Step) -> None:
        if self.kept.has(step.step):  # the line violates
            self._drop(step.step)
        self.kept.put(step)
        self.samples_kept += step.samples

    def _drop(self, number: int) -> _Step:
        step = self.kept.pop(number)
        assert step is not None
        self.samples_kept -= step.samples
        return step

    def _check_first(self, step: _Step) -> None:
        if self.first_step is not None and step.generation == self.generation:
            if step.step != self.first_step:
                self.violate(f"step {step.step} comes first, but its generation starts at {self.first_step}.")
            self.first_step = None

    def _check_repeat(self, step: _Step) -> None:
        first = self.kept.get(step.step)
        if first is None or step.step != self.next - 1:
            self.violate(f"step {step.step} is repeated, but step {self.next - 1} was the last.")
            return
        if first.life == step.life and first.generation >= step.generation:
            self.violate(f"step {step.step} is repeated by the generation that wrote line {first.line}.")
        for key in ("samples", "digest", "loss"):
            now, then = getattr(step, key), getattr(first, key)
            if not _is_same(now, then):
                self.violate(f"repeated with {key} {now}, not {then} as in line {first.line}.")

    def _check_order(self, step: _Step) -> None:
        if step.step > self.next:
            self.violate(f"step {step.step} comes where step {self.next} is due. Steps are lost.")
        elif step.step < self.next:
            self.violate(f"step {step.step} comes again where {self.next} is due. Its samples count twice.")
        if self.finish_line is not None:
            self.violate(f"step {step.step} comes after the run finished, in line {self.finish_line}.")

    def _check_against_dropped(self, step: _Step) -> None:
        """Compare a step done again after a rollback with what it was: the same bits, on like processors."""
        before = self.dropped.pop(step.step)
        if before is None or self.job is None or self.job["reduce"] != "exact":
            return
        if _is_same(step.loss, before.loss):
            if (
                step.step + 1 in self.abandoned
            ):  # the same weights again, so their old checkpoint is of this lineage
                self.published[step.step + 1] = self.abandoned.pop(step.step + 1)
            return
        sentence = f"step {step.step} again with loss {step.loss}, not {before.loss} as in line {before.line}"
        if self.start_is_published:
            self.note(f"{sentence}. Not the same bits: do processors, thread counts or kernels differ?")
        else:
            self.violate(f"{sentence}, since an unpublished checkpoint. Two lineages.")

    def _samples(self) -> int:
        return self.samples_kept

    def _whole_epochs(self) -> tuple[list[int], list[int]]:
        """Return the epochs with all steps kept: those whose digests add up to the dataset's, and others."""
        if self.schedule is None:
            return [], []
        each = self.schedule.steps_per_epoch
        digests: Counter[int] = Counter()
        steps: Counter[int] = Counter()
        for number in self.kept.numbers():
            step = self.kept.get(number)
            assert step is not None
            digests[number // each] += step.digest
            steps[number // each] += 1
        complete = sorted(epoch for epoch, count in steps.items() if count == each)
        everything = _dataset_digest(self.schedule.dataset_size) if complete else 0
        whole = [epoch for epoch in complete if digests[epoch] + self.schedule.dropped_digest(epoch) == everything]
        return whole, [epoch for epoch in complete if epoch not in whole]


_READERS = {
    "run.started": _History.run_started,
    "attempt.started": _History.attempt_started,
    "attempt.ended": _History.attempt_ended,
    "driver.generation_formed": _History.generation_formed,
    "job.described": _History.job_described,
    "worker.generation_started": _History.generation_started,
    "worker.step_redone": _History.step_redone,
    "worker.step_committed": _History.step_committed,
    "state.checkpoint_published": _History.checkpoint_published,
    "run.finished": _History.run_finished,
}


def _torn(number: int, raw: bytes) -> Iterable[Line]:
    """Return a torn line, and the event that is glued to it; nothing for an empty line."""
    if not raw.strip():
        return
    yield number, None
    glued = raw.rfind(b'{"time"')
    event = _parse_event(raw[glued:]) if glued > 0 else None
    if event is not None:
        yield number, event


def _parse_event(raw: bytes) -> Event | None:
    try:
        event = json.loads(raw.decode())  # to look for another encoding takes as long as half of the parsing
    except (ValueError, RecursionError):  # also where it is no UTF-8
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _restored_steps(lines: Iterable[Line]) -> set[tuple[int, int]]:
    events = (event for _, event in lines if event and event["event"] == "state.checkpoint_restored")
    pairs = ((event.get("attempt"), event.get("step")) for event in events)
    return {(attempt, step) for attempt, step in pairs if isinstance(attempt, int) and isinstance(step, int)}


def _dataset_digest(size: int) -> int:
    starts = range(0, size, DIGEST_CHUNK_SAMPLES)
    stops = [*starts[1:], size]
    chunks = (np.arange(start, stop, dtype=np.int64) for start, stop in zip(starts, stops, strict=True))
    return sum(samples_digest(chunk) for chunk in chunks)


def _is_same(now: float, then: float) -> bool:
    return now == then or (math.isnan(now) and math.isnan(then))


def _is_about(now: float, then: float) -> bool:
    return _is_same(now, then) or math.isclose(now, then, rel_tol=1e-4, abs_tol=1e-4)  # one may be rounded


def _first(most: int, label: str, sentences: Sequence[str]) -> list[str]:
    said = [f"{label}: {sentence}" for sentence in sentences[:most]]
    return said if len(sentences) <= most else [*said, f"{label}: and {len(sentences) - most} more."]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

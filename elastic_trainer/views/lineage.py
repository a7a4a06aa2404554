"""The lineage that an event log claims: attempts, generations, checkpoints, steps, and proofs.

judge → here → Findings: the violations and notes, each with the number of its line

What always holds:
1. Attempts and generations only count up, and checkpoints are of one history.
2. The first MOST_SENTENCES violations and notes are kept, and the others are counted. A million
   steps take 49 MB here (StepLines), and 0.5 GB as objects in a dict.
3. Each member that the driver has given a place has a proof of its program, wherever its line is in
   the log: the worker was compared with the run before it got the place. Where no driver forms
   generations (plain horovodrun, a process alone), there are at least as many proofs as members.
   Each start from a checkpoint has the comparison with the checkpoint's proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import compress
from struct import Struct
from typing import Any, NamedTuple

from elastic_trainer.events.sentences import count

MOST_SENTENCES, MOST_CHARACTERS = 10_000, 1000


class _Torn(NamedTuple):
    """A torn line whose attempt has not ended yet."""

    line: int
    violations: int
    notes: int
    """The number of violations and notes before it: its sentence belongs after them."""
    has_finished: bool


class Findings:
    """Violations and notes, in the order of the lines."""

    def __init__(self) -> None:
        self.line = 0
        """The line that is judged now."""
        self._violations, self._notes = list[str](), list[str]()
        self._more_violations = self._more_notes = 0
        self.open_torn: list[_Torn] = []

    def violate(self, sentence: str) -> None:
        self._put(self._violations, len(self._violations), f"line {self.line}: {sentence}")

    def note(self, sentence: str) -> None:
        self._put(self._notes, len(self._notes), f"line {self.line}: {sentence}")

    @property
    def violations(self) -> list[str]:
        return self._violations + _more(self._more_violations)

    @property
    def notes(self) -> list[str]:
        return self._notes + _more(self._more_notes)

    def take_torn(self, has_finished: bool) -> None:
        """Take a torn line. Whether it is a violation is known when its attempt ends."""
        self.open_torn.append(
            _Torn(self.line, len(self._violations), len(self._notes), has_finished))

    def resolve_torn(self, event: dict[str, Any] | None) -> None:
        """Decide the torn lines by the line after them (None: another torn one), if it decides.

        A torn line is harmless if only lines of the driver follow before its attempt ends without
        success: its writer was killed.
        """
        name = "" if event is None else event["event"]
        if event is not None and name == "attempt.ended":
            self._judge_torn(is_last=event.get("verdict") != "finished")
        elif not name.startswith("driver."):
            self._judge_torn(is_last=name in ("attempt.started", "run.started"))

    def resolve_torn_at_end(self) -> None:
        """Decide the torn lines after which no line comes."""
        self._judge_torn(is_last=True)

    def _judge_torn(self, is_last: bool) -> None:
        for torn in self.open_torn:
            if is_last and not torn.has_finished:
                self._put(self._notes, torn.notes,
                          f"line {torn.line}: torn, the last of an attempt that did not finish. "
                          f"Its writer was killed.")
            else:
                self._put(self._violations, torn.violations,
                          f"line {torn.line}: torn, and not the last of an attempt that did not "
                          f"finish. Its content is lost.")
        self.open_torn.clear()

    def _put(self, sentences: list[str], place: int, sentence: str) -> None:
        if len(sentences) < MOST_SENTENCES:
            sentences.insert(place, sentence[:MOST_CHARACTERS])
        elif sentences is self._violations:
            self._more_violations += 1
        else:
            self._more_notes += 1


def _more(number: int) -> list[str]:
    return [f"{number} more, which are not listed."] if number else []


ROWS = 4096
_ROW = Struct("=qqqqqd")


class StepLine(NamedTuple):
    """The content of one line about a committed step."""

    step: int
    line: int
    life: int
    """The attempt, counted over all invocations."""
    generation: int
    samples: int
    digest: int
    loss: float


class _Block:
    """The rows of ROWS steps, and which of them are there."""

    def __init__(self) -> None:
        self.has, self.rows = bytearray(ROWS), bytearray(ROWS * _ROW.size)


class StepLines:
    """Step lines by step, packed."""

    def __init__(self) -> None:
        self._blocks = dict[int, _Block]()
        self._count = self.samples = 0
        """The sum over all steps."""

    def __len__(self) -> int:
        return self._count

    def put(self, step: StepLine) -> None:
        """Add a step; a line of the same step is replaced."""
        self.pop(step.step)
        number, at = divmod(step.step, ROWS)
        block = self._blocks.get(number) or self._blocks.setdefault(number, _Block())
        _ROW.pack_into(block.rows, at * _ROW.size, *step[1:])
        block.has[at] = 1
        self._count, self.samples = self._count + 1, self.samples + step.samples

    def get(self, number: int) -> StepLine | None:
        block, at = self._blocks.get(number // ROWS), number % ROWS
        if block is None or not block.has[at]:
            return None
        return StepLine(number, *_ROW.unpack_from(block.rows, at * _ROW.size))

    def pop(self, number: int) -> StepLine | None:
        """Remove a step's line and return it."""
        if (step := self.get(number)) is not None:
            block = self._blocks[number // ROWS]
            block.has[number % ROWS] = 0
            if not block.has.count(1):
                del self._blocks[number // ROWS]
            self._count, self.samples = self._count - 1, self.samples - step.samples
        return step

    def numbers(self, start: int = 0) -> Iterator[int]:
        """Yield the steps from `start` on, in order. No step may be added or removed meanwhile."""
        for number in sorted(self._blocks):
            steps = compress(range(number * ROWS, (number + 1) * ROWS), self._blocks[number].has)
            yield from (step for step in steps if step >= start)


def is_same(now: float, then: float) -> bool:
    """True for equal numbers, and for two NaNs."""
    return now == then or (math.isnan(now) and math.isnan(then))


def is_about(now: float, then: float) -> bool:
    """True for numbers that are equal but for a rounding."""
    return is_same(now, then) or math.isclose(now, then, rel_tol=1e-4, abs_tol=1e-4)


Event = dict[str, Any]


class Lineage:
    """The present attempt and its newest generation."""

    def __init__(self, findings: Findings):
        self.findings = findings
        self.attempt: int | None = None
        self.life = 0
        """The attempt, counted over all invocations."""
        self.announced: set[int] = set()
        """Attempts of this invocation."""
        self.has_job = self.has_generation = False
        """Of this attempt."""
        self.generation: int | None = None
        self.size: int | None = None
        self.formed: int | None = None
        self.first_step: int | None = None
        """The step at which this generation starts; None after that step."""

    def start_run(self) -> None:
        self._leave_attempt(None)
        self.announced.clear()

    def start_attempt(self, attempt: int) -> None:
        newest = max(self.announced, default=0)
        if attempt <= newest:
            self.findings.violate(f"attempt {attempt} starts after attempt {newest}. Two lineages "
                                  f"of one run.")
        self.announced.add(attempt)
        self._leave_attempt(attempt)

    def enter_attempt_of(self, event: Event) -> bool:
        """Enter the event's attempt if it is newer; violate and return False if it is older.

        Under plain horovodrun no line announces an attempt.
        """
        attempt = event["attempt"]
        if self.attempt is None or attempt > self.attempt:
            self._leave_attempt(attempt)
        elif attempt < self.attempt:
            self.findings.violate(f"{event['event']} of attempt {attempt} in attempt "
                                  f"{self.attempt}. Two lineages.")
            return False
        return True

    def _leave_attempt(self, entered: int | None) -> None:
        self.attempt = entered
        self.life += 1
        self.has_job = self.has_generation = False
        self.generation = self.size = self.first_step = self.formed = None

    def form(self, formed: int) -> None:
        """Take the driver's line about a new generation."""
        if self.formed is not None and formed <= self.formed:
            self.findings.violate(f"the driver formed generation {formed} after {self.formed}. "
                                  f"Two lineages.")
        self.formed = formed

    def check_generation(self, generation: int) -> None:
        """Judge that a generation starts."""
        if self.generation is not None and generation <= self.generation:
            self.findings.violate(f"generation {generation} starts after generation "
                                  f"{self.generation}. Two lineages.")

    def start_generation(self, generation: int, size: int, step: int) -> None:
        self.has_generation = True
        self.generation, self.size, self.first_step = generation, size, step

    def check_world(self, step: StepLine, size: int) -> None:
        """Judge that a step is of the present world."""
        violate, generation = self.findings.violate, step.generation
        if generation == self.generation and size == self.size and self.has_job:
            return
        if not self.has_job:
            violate(f"step {step.step} comes before attempt {self.attempt} described its job.")
            self.has_job = True  # once is enough
        claim = f"step {step.step} is of generation {generation}"
        if self.generation is None or generation > self.generation:
            violate(f"{claim}, which never started.")
        elif generation < self.generation:
            violate(f"{claim}, but generation {self.generation} started. Two lineages.")
        elif size != self.size:
            violate(f"{claim} with {size} workers, which has {self.size}.")

    def check_first(self, step: StepLine) -> None:
        """Judge that the first step of a generation is the one at which it started."""
        if self.first_step is None or step.generation != self.generation:
            return
        if step.step != self.first_step:
            self.findings.violate(f"step {step.step} comes first, but its generation starts at "
                                  f"{self.first_step}.")
        self.first_step = None


class Checkpoints:
    """The published checkpoints: those of this lineage, and those on branches left behind."""

    def __init__(self, findings: Findings, restored: set[tuple[int, int]]):
        self.findings, self.restored = findings, restored
        """`restored`: attempt and step of each state.checkpoint_restored line, later lines too."""
        self.published: dict[int, int] = {}
        """Step → line."""
        self.abandoned: dict[int, int] = {}
        """Published, before the lineage went back after that step."""
        self.is_start_published = True
        """The training started where a checkpoint of this lineage is, or at 0 without any."""

    def publish(self, step: int) -> None:
        self.published.setdefault(step, self.findings.line)
        self.abandoned.pop(step, None)

    def start(self, step: int, attempt: int | None) -> None:
        """Judge a start at a step."""
        published, violate = self.published, self.findings.violate
        self.is_start_published = step in published or (step == 0 and not published)
        if self.is_start_published:
            return
        if step in self.abandoned:
            violate(f"starts at step {step}, from a branch left behind, line "
                    f"{self.abandoned[step]}.")
        elif step > max(published, default=0) and (attempt, step) in self.restored:
            self.findings.note(f"starts at step {step} without a published line. Did the "
                               f"checkpoint's publisher die?")
        else:
            newest = f"step {max(published)}" if published else "none"
            violate(f"starts at step {step}, where no checkpoint was published. The newest: "
                    f"{newest}.")

    def go_back(self, step: int) -> None:
        """Leave the checkpoints of later steps behind."""
        for later in [published for published in self.published if published > step]:
            self.abandoned[later] = self.published.pop(later)

    def made_again(self, step: int) -> None:
        """Take back a checkpoint that was left behind: the same weights were made again."""
        if step in self.abandoned:
            self.published[step] = self.abandoned.pop(step)


OLDER = "as in a log of version 0.1"


class ProgramProofs:
    """The proofs in the log so far, and what needs one: not an attempt that has done no step, as
    that of a finished run which is started again."""

    def __init__(self) -> None:
        self._proved: set[tuple[int | None, str]] = set()
        self._placed: set[tuple[int | None, str]] = set()
        self._resumed: set[tuple[int, int]] = set()
        self._starts: set[tuple[int, int]] = set()
        self._trained: set[int] = set()
        """The attempts that have done a step."""
        self._lines = self._most = 0
        """How many proofs there are, and the largest world that no driver has formed."""

    def proved(self, event: Event) -> None:
        self._proved.add((event.get("attempt"), event.get("worker", "")))
        self._lines += 1

    def resumed(self, event: Event) -> None:
        self._resumed.add((event["attempt"], event["step"]))

    def formed(self, event: Event) -> None:
        self._placed |= {(event["attempt"], name) for name in event.get("workers", ())}

    def trained(self, attempt: int) -> None:
        self._trained.add(attempt)

    def started(self, event: Event, is_formed: bool) -> None:
        """Take the start of a generation. `is_formed`: a driver has named its members."""
        if event["source"] == "checkpoint":
            self._starts.add((event["attempt"], event["step"]))
        if not is_formed:
            self._most = max(self._most, event["size"])

    def lacking(self) -> list[str]:
        """Return what the log does not prove."""
        found = []
        placed = {worker for worker in self._placed if worker[0] in self._trained}
        lacking = len(placed - self._proved) or max(0, self._most - self._lines)
        if lacking:
            found.append(f"that all workers had the run's dataset and program: the log has no line "
                         f"worker.program_proved of {count(lacking, 'worker')}, {OLDER}.")
        starts = sorted(start for start in self._starts - self._resumed
                        if start[0] in self._trained)
        if starts:
            steps = ", ".join(str(step) for _, step in starts[:3])
            more = f" and {len(starts) - 3} more" if len(starts) > 3 else ""
            found.append(f"that the run went on from its checkpoints with their dataset and "
                         f"program: the log has no line job.program_proved of the start at step "
                         f"{steps}{more}, {OLDER}.")
        return found

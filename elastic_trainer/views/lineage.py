"""One lineage: attempts and generations only count up, and checkpoints are of one history.

judge → here → findings
"""

from __future__ import annotations

from typing import Any

from elastic_trainer.views.findings import Findings
from elastic_trainer.views.step_lines import StepLine

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
        """Begin an invocation."""
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

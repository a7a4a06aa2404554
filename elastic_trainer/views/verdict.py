"""The verdict on a run: what its event log proves, and what in it contradicts the promise.

judge → here → `elastic-trainer verify`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_trainer.events.sentences import count


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

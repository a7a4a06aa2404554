"""The findings of a judgement: violations and notes, each with the number of its line.

judge → here → verdict

What always holds: the memory is bounded. The first MOST_SENTENCES violations and notes are kept,
and the others are counted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MOST_SENTENCES, MOST_CHARACTERS = 10_000, 1000


class _Torn(NamedTuple):
    """A torn line whose attempt has not ended yet."""

    line: int
    violations: int
    notes: int
    """The number of violations and notes before it: its sentence belongs behind them."""
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
        """Add a violation by the present line."""
        self._put(self._violations, len(self._violations), f"line {self.line}: {sentence}")

    def note(self, sentence: str) -> None:
        """Add a note about the present line."""
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
        """Decide the torn lines by the line behind them (None: another torn one), if it decides.

        A torn line is harmless if only lines of the driver follow before its attempt ends without
        success: its writer was killed.
        """
        name = "" if event is None else event["event"]
        if event is not None and name == "attempt.ended":
            self._judge_torn(is_last=event.get("verdict") != "finished")
        elif not name.startswith("driver."):
            self._judge_torn(is_last=name in ("attempt.started", "run.started"))

    def resolve_torn_at_end(self) -> None:
        """Decide the torn lines behind which no line follows."""
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

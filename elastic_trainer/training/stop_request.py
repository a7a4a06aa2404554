"""The wish to finish the run early, on one worker.

step.stop(reason), keep_best(patience=…) → here → the vote (loop.py) → all workers
"""

from __future__ import annotations

from elastic_trainer.evaluate.best import Best


class Wish:
    """Why this worker asks to finish the run, if it does."""

    def __init__(self, best: Best | None = None) -> None:
        self._asked: str | None = None
        self._best = best

    def __repr__(self) -> str:
        return f"Wish({self.reason!r})"

    @property
    def reason(self) -> str | None:
        """What the user's code has asked for, or that patience is exhausted."""
        return self._asked if self._asked is not None or not self._best else self._best.why_over()

    def ask(self, reason: str) -> None:
        """Ask for it."""
        self._asked = reason

    def forget(self) -> None:
        """Forget what was asked: the run goes back, and the step that it came from is undone."""
        self._asked = None

"""The wish to finish the run early, on one worker.

step.stop(reason) → here → the vote (loop.py), which carries it to all workers
"""

from __future__ import annotations


class Wish:
    """Why the user's code on this worker asks to finish the run, if it does."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def __repr__(self) -> str:
        return f"Wish({self.reason!r})"

    def forget(self) -> None:
        """Forget it: the run goes back, and the step that it came from is undone."""
        self.reason = None

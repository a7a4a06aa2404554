"""How far a logger has written, as a small file beside what it has written.

tensorboard_folder.py ⇄ here ⇄ FILE.json

What always holds: the file is replaced whole.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from elastic_trainer.host.modes import write_text
from elastic_trainer.loggers.row import Run


@dataclass(frozen=True)
class Position:
    """The last step that is written, and by which attempt."""

    run_id: str
    attempt: int
    step: int

    def write(self, file: Path) -> None:
        """Write it in the place of the former one."""
        part = file.with_name(f"{file.name}.{os.getpid()}")
        write_text(part, json.dumps([self.run_id, self.attempt, self.step]))
        os.replace(part, file)

    @staticmethod
    def read(file: Path) -> Position | None:
        """Return what was written; None if there is nothing."""
        try:
            run_id, attempt, step = json.loads(file.read_text())
            return Position(str(run_id), int(attempt), int(step))
        except (OSError, ValueError, TypeError):
            return None

    def lacking(self, run: Run) -> int:
        """Return the first step that has to be written: behind this position, and from the
        beginning of a history that replaces an older one."""
        is_left = run.goes_back or self.attempt < run.attempt
        return min(self.step + 1, run.first) if is_left else self.step + 1

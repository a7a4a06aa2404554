"""The numbers of a run for TensorBoard, by its own writer of event files.

writer.py → here → torch.utils.tensorboard → FOLDER/events.out.tfevents.…

What always holds:
1. Each worker writes a file of its own. It begins with the first step that is lacking, as
   `purge_step`: TensorBoard drops that step and later ones from the files of before.
2. A position stands beside the files, in POSITION_FILE, which is replaced whole. It is written
   after a flush, so no step is lacking that was before it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.host.modes import replace_whole
from elastic_trainer.loggers.row import Row, Run, placed, require_package

POSITION_FILE = "elastic-trainer.json"


@dataclass(frozen=True)
class Position:
    """The last step that is written, and by which attempt of which run."""

    run_id: str
    attempt: int
    step: int

    def write(self, file: Path) -> None:
        replace_whole(file, json.dumps([self.run_id, self.attempt, self.step]))

    @staticmethod
    def read(file: Path) -> Position | None:
        """Return what was written; None if there is nothing."""
        try:
            run_id, attempt, step = json.loads(file.read_text())
            return Position(str(run_id), int(attempt), int(step))
        except (OSError, ValueError, TypeError):
            return None

    def lacking(self, run: Run) -> int:
        """Return the first step that has to be written: after this position, and from the
        beginning of a history that replaces an older one."""
        is_left = run.goes_back or self.attempt < run.attempt
        return min(self.step + 1, run.first) if is_left else self.step + 1


class TensorBoard:
    """Log for TensorBoard, by default into the folder tensorboard of the run."""

    def __init__(self, folder: str | os.PathLike[str] | None = None):
        self._given = folder
        self._folder = Path()
        self._run: Run | None = None
        self._writer: Any = None
        self._step = -1

    def __repr__(self) -> str:
        return f"TensorBoard({str(self._given or 'tensorboard')!r})"

    def check(self) -> None:
        """Raise ConfigError without the package tensorboard."""
        require_package("TensorBoard", "tensorboard")

    def where(self) -> str:
        return str(self._folder)

    def open(self, run: Run) -> int:
        """Begin a file, after the position of the last one."""
        from torch.utils.tensorboard import SummaryWriter  # here: it takes 1 s

        self._folder = placed("TensorBoard", self._given, run, "tensorboard")
        self._folder.mkdir(parents=True, exist_ok=True)
        position = Position.read(self._folder / POSITION_FILE)
        # Without a position there may be files of a worker that died before its first flush.
        lacking = position.lacking(run) if position and position.run_id == run.id else 0
        made: Any = SummaryWriter  # it has no types
        self._run, self._writer = run, made(str(self._folder), purge_step=lacking)
        return lacking

    def write(self, row: Row) -> None:
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.step, walltime=row.time)
        self._step = row.step

    def flush(self) -> None:
        """Write all to the file, then the position."""
        self._writer.flush()
        if self._run and self._step >= 0:
            Position(self._run.id, self._run.attempt, self._step).write(
                self._folder / POSITION_FILE)

    def close(self) -> None:
        if self._writer:
            self.flush()
            self._writer.close()

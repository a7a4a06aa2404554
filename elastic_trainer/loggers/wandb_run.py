"""The numbers of a run for Weights & Biases: one W&B run, which all attempts go on with.

writer.py → here → wandb → its service, or FOLDER/wandb/offline-run-…

What always holds:
1. The W&B run has the id of the run, and is resumed by it. Offline each worker writes a folder of
   its own; `wandb sync` joins them by the id.
2. W&B takes steps in their order only. A step is noted as sent (position.py) before it is, and is
   not sent again, also if the run has gone back and does it again.
3. The user's own W&B runs are another thing: nothing global is set.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from elastic_trainer.loggers.position import Position
from elastic_trainer.loggers.row import Row, Run, placed, require_package


class WandB:
    """Log to Weights & Biases. The key is what `wandb login`, or WANDB_API_KEY, has set.

    `offline`: into `folder`, by default that of the run, for `wandb sync`.
    """

    def __init__(self, project: str = "elastic-trainer", *, entity: str | None = None,
                 offline: bool = False, folder: str | os.PathLike[str] | None = None):
        self._project, self._entity, self._offline = project, entity, offline
        self._given = folder
        self._position = Path()
        self._run: Run | None = None
        self._wandb: Any = None

    def __repr__(self) -> str:
        return f"WandB({self._project!r}, offline={self._offline})"

    def check(self) -> None:
        """Raise ConfigError without the package wandb."""
        require_package("WandB", "wandb")

    def where(self) -> str:
        """Return the folder, or the project and the id."""
        return (str(self._position.parent) if self._offline
                else f"{self._project}/{self._run.id if self._run else ''}")

    def open(self, run: Run) -> int:
        """Begin the W&B run, or resume it, and return the step after the last one sent."""
        import wandb  # here: it takes 0.5 s

        given = None if self._given is None else Path(self._given)
        folder = placed("WandB", given, run, ".").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        self._position = folder / f"wandb-{run.id}.json"
        position = Position.read(self._position)
        # W&B names an offline folder by the second and the id, and overwrites one that is there.
        while list(folder.glob(f"wandb/*-{time.strftime('%Y%m%d_%H%M%S')}-{run.id}")):
            time.sleep(0.1)
        self._run, self._wandb = run, wandb.init(
            project=self._project, entity=self._entity, id=run.id, name=run.name or None,
            dir=str(folder), mode="offline" if self._offline else None, resume="allow",
            reinit="create_new", config=dict(run.config), settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False))
        sent = position.step + 1 if position else 0
        return max(sent, int(self._wandb.starting_step))

    def write(self, row: Row) -> None:
        """Send the numbers of a step."""
        assert self._run
        Position(self._run.id, self._run.attempt, row.step).write(self._position)
        self._wandb.log(row.values, step=row.step)

    def flush(self) -> None:
        """W&B's own process sends what it got."""

    def close(self) -> None:
        """End the W&B run: it is resumed if need be."""
        if self._wandb:
            self._wandb.finish()

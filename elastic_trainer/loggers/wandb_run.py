"""The numbers of a run for Weights & Biases: one W&B run, which all attempts go on with.

writer.py → here → wandb → its service, or FOLDER/wandb/offline-run-…

What always holds:
1. The W&B run has the id of the run, and is resumed by it. Offline each worker writes a folder of
   its own; `wandb sync` joins them by the id.
2. W&B takes steps in their order only. A step that its files or its service have is not sent
   again, also if the run has gone back and does it again.
3. The user's own W&B runs are another thing: nothing global is set.

Source of the files: wandb 0.31. A file has 7 bytes of header, then records in LevelDB's log format:
blocks of 32 KiB, and 7 bytes before each piece (checksum, length, kind). A record is a message of
wandb.proto.wandb_internal_pb2. A worker that was killed leaves a torn end.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from elastic_trainer.loggers.row import Row, Run, placed, require_package

HEADER, PIECE, BLOCK = 7, 7, 1 << 15
WHOLE, FIRST, LAST = 1, 2, 4
WRITTEN_S, WRITTEN_POLL_S = 20.0, 0.05
"""How long the end of a run waits for W&B's own process."""


class WandB:
    """Log to Weights & Biases. The key is what `wandb login`, or WANDB_API_KEY, has set.

    `offline`: into `folder`, by default that of the run, for `wandb sync`.
    """

    def __init__(self, project: str = "elastic-trainer", *, entity: str | None = None,
                 offline: bool = False, folder: str | os.PathLike[str] | None = None):
        self._project, self._entity, self._offline = project, entity, offline
        self._given = folder
        self._folder, self._id = Path(), ""
        self._wandb: Any = None
        self._sent = -1
        """The last step that this process has sent. W&B's own process may not have written it yet
        when the run goes back."""

    def __repr__(self) -> str:
        return f"WandB({self._project!r}, offline={self._offline})"

    def check(self) -> None:
        """Raise ConfigError without the package wandb."""
        require_package("WandB", "wandb")

    def where(self) -> str:
        return str(self._folder) if self._offline else f"{self._project}/{self._id}"

    def open(self, run: Run) -> int:
        """Begin the W&B run, or resume it, and return the step after the last one sent."""
        import wandb  # here: it takes 0.5 s

        self._folder = folder = placed("WandB", self._given, run, ".")
        if self._id != run.id:
            self._id, self._sent = run.id, -1
        folder.mkdir(parents=True, exist_ok=True)
        sent = max(last_step(folder, run.id), self._sent)
        # W&B names an offline folder by the second and the id, and overwrites one that is there.
        while list(folder.glob(f"wandb/*-{time.strftime('%Y%m%d_%H%M%S')}-{run.id}")):
            time.sleep(0.1)
        self._wandb = wandb.init(
            project=self._project, entity=self._entity, id=run.id, name=run.name or None,
            dir=str(folder), mode="offline" if self._offline else None, resume="allow",
            reinit="create_new", config=dict(run.config), settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False,
                x_disable_meta=True))  # it would send the script's command line
        return max(sent + 1, int(self._wandb.starting_step))

    def write(self, row: Row) -> None:
        self._wandb.log(row.values, step=row.step)
        self._sent = max(self._sent, row.step)

    def flush(self) -> None:
        """W&B's own process sends what it got."""

    def close(self) -> None:
        """End the W&B run: it is resumed if need be.

        `finish()` returns before W&B's own process has written the rest of its file. On a busy
        machine the file was still empty when the run was resumed, which sent its steps again.
        """
        if self._wandb:
            file = Path(self._wandb.settings.sync_file)
            self._wandb.finish()
            waiting = Retrying(retry=retry_if_result(lambda is_whole: not is_whole),
                               wait=wait_fixed(WRITTEN_POLL_S), stop=stop_after_delay(WRITTEN_S),
                               retry_error_callback=lambda _: False)  # W&B's exit hook waits, too
            waiting(lambda: file.exists() and _is_whole(file, self._sent))


def last_step(folder: Path, run_id: str) -> int:
    """Return the last step of which a file of the run has a row; -1: none. Disk: all its files."""
    files = folder.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb")
    return max((record.history.step.num for file in files for record in records_of(file)
                if record.HasField("history")), default=-1)


def _is_whole(file: Path, sent: int) -> bool:
    """True if a file has the record of its run's end, and the last row sent, in any order."""
    records = list(records_of(file))
    rows = [record.history.step.num for record in records if record.HasField("history")]
    return any(record.HasField("exit") for record in records) and max(rows, default=-1) >= sent


def records_of(file: Path) -> Iterator[Any]:
    """Yield the records of a file, up to a torn end."""
    from wandb.proto import wandb_internal_pb2  # here: it is an optional package

    made: Any = wandb_internal_pb2  # it has no types
    return map(made.Record.FromString, _bytes_of_records(file.read_bytes()))


def _bytes_of_records(data: bytes) -> Iterator[bytes]:
    at, record = HEADER, b""
    while at + PIECE <= len(data):
        if (rest := BLOCK - at % BLOCK) < PIECE:  # no piece begins in the rest of a block
            at += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + PIECE : at + PIECE + length]
        if not WHOLE <= kind <= LAST or len(piece) < length:
            return
        record = piece if kind in (WHOLE, FIRST) else record + piece
        if kind in (WHOLE, LAST):
            yield record
        at += PIECE + length

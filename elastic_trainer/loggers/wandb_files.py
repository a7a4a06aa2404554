"""How far W&B's own files of a run reach. Each worker that has logged the run has left one.

FOLDER/wandb/…run-…-ID/run-ID.wandb → here → wandb_run.py

Source: wandb 0.31. A file has 7 bytes of header, then records in LevelDB's log format: blocks of
32 KiB, and 7 bytes before each piece (checksum, length, kind). A record is a message of
wandb.proto.wandb_internal_pb2. A worker that was killed leaves a torn end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, PIECE, BLOCK = 7, 7, 1 << 15
WHOLE, FIRST, LAST = 1, 2, 4


def last_step(folder: Path, run_id: str) -> int:
    """Return the last step of which a file of the run has a row; -1: none. Disk: all its files."""
    from wandb.proto import wandb_internal_pb2  # here: it is an optional package

    made: Any = wandb_internal_pb2  # it has no types
    newest = -1
    for file in folder.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb"):
        for data in _records(file.read_bytes()):
            record = made.Record.FromString(data)
            if record.HasField("history"):
                newest = max(newest, record.history.step.num)
    return newest


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file, up to a torn end."""
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

"""A table of a run as a CSV file: one line for each finished step.

writer.py → here → FILE.csv

What always holds:
1. Each step has one line. The first line that this worker writes takes the place of what an earlier
   attempt has written of the same and later steps.
2. The file is always replaced whole when this worker begins. A worker that was frozen and wakes
   finds another file at its path, and writes no more.
3. A new name of a number is a new column, at the end: the file is replaced whole then, too.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from elastic_trainer.host.modes import private
from elastic_trainer.loggers.row import Row, Run, placed

FIRST_COLUMNS = ("step", "time", "attempt")


class Csv:
    """Log to a CSV file, by default metrics.csv in the folder of the run."""

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self._given = path
        self._path = Path()
        self._columns: list[str] = []
        self._attempt = 0
        self._file: IO[str] | None = None

    def __repr__(self) -> str:
        return f"Csv({str(self._given or 'metrics.csv')!r})"

    def check(self) -> None:
        """Csv needs nothing."""

    def where(self) -> str:
        return str(self._path)

    def open(self, run: Run) -> int:
        """Keep the lines that stay, and return the step after the last of them."""
        self._path = placed("Csv", self._given, run, "metrics.csv")
        self._attempt = run.attempt
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._columns, lines = _read(self._path)
        kept = [line for line in lines if not _is_left(line, run)]
        self._replace(kept)
        return int(kept[-1]["step"]) + 1 if kept else 0

    def write(self, row: Row) -> None:
        assert self._file
        if new := [name for name in row.values if name not in self._columns]:
            self._file.flush()
            self._require_own()
            lines = _read(self._path)[1]
            self._columns += new
            self._replace(lines)
        first = {"step": row.step, "time": round(row.time, 3), "attempt": self._attempt}
        self._writer().writerow(first | row.values)

    def flush(self) -> None:
        """Let other processes see the lines."""
        self._require_own()
        if self._file:
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _require_own(self) -> None:
        assert self._file
        is_own = False
        with suppress(FileNotFoundError):
            is_own = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        if not is_own:
            raise OSError(f"{self._path} was replaced by another worker, or removed")

    def _replace(self, lines: Iterable[dict[str, str]]) -> None:
        """Write a new file in the place of the old one, and go on with it."""
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        self.close()
        self._file = open(part, "w", newline="", encoding="utf-8", opener=private)
        writer = self._writer()
        writer.writeheader()
        writer.writerows(lines)
        self._file.flush()
        os.replace(part, self._path)

    def _writer(self) -> Any:
        assert self._file
        return csv.DictWriter(self._file, [*FIRST_COLUMNS, *self._columns])


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns of numbers, and the whole lines: a killed worker may have left the last
    one torn."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], []
    whole = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(whole.splitlines())
    columns = list(reader.fieldnames or ())
    if columns and tuple(columns[: len(FIRST_COLUMNS)]) != FIRST_COLUMNS:
        raise ValueError(f"{path} is no table of this logger: its first columns are {columns[:3]}. "
                         f"Give another path, or remove it")
    return columns[len(FIRST_COLUMNS):], list(reader)


def _is_left(line: dict[str, str], run: Run) -> bool:
    """Return whether a line is of a history that the run has left."""
    is_before = run.goes_back or int(line["attempt"]) < run.attempt
    return is_before and int(line["step"]) >= run.first

"""What loggers get: one row for each finished step, and the run that the rows belong to.

rows.py (makes them, on each worker) → here → writer.py (a thread for each logger) → Logger
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from elastic_trainer.config import ConfigError


@dataclass(frozen=True)
class Row:
    """The numbers of one finished step: of the step ("train/…") and of evaluations ("eval/…")."""

    step: int
    values: dict[str, float]
    time: float
    """When the step was finished (time.time)."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run whose rows a logger gets."""

    name: str
    id: str
    """Another one for each run, and the same in all its attempts, on every worker."""
    attempt: int
    folder: Path | None
    """The folder of the run, if this host has it."""
    first: int
    """The first step that this worker has done in this attempt. Rows of earlier attempts with this
    step or a later one are of a history that the run has left."""
    goes_back: bool = False
    """The run has gone back: rows from `first` on are of that history in this attempt, too."""
    config: dict[str, Any] = field(default_factory=dict)
    """The numbers of the job, as the event job.described has them."""


class Logger(Protocol):
    """What the option `loggers` takes. All but `check` is called in a thread of the logger's own,
    on the first worker of the world alone. What raises is logged, and the run goes on."""

    def check(self) -> None:
        """Raise ConfigError if it cannot work. Called when the job is built."""

    def open(self, run: Run) -> int:
        """Begin, or go on with what an earlier worker has written; return the first step that is
        lacking."""

    def where(self) -> str:
        """Return the place to which it writes, for people."""

    def write(self, row: Row) -> None:
        """Write a row. Steps come in order, from the step on that `open` has returned."""

    def flush(self) -> None:
        """Bring what was written to its place: the rows count as delivered when this returns.
        Called about once a second, and before `close`."""

    def close(self) -> None:
        """End."""


def require_package(logger: str, package: str) -> None:
    """Raise ConfigError if a package that a logger needs is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"loggers has a {logger}, but {package} is not installed. Install it: "
                          f"pip install 'elastic-trainer[loggers]'.")


def placed(logger: str, given: str | os.PathLike[str] | None, run: Run, default: str) -> Path:
    """Return the path of a logger: the one that was given, or its default in the folder of the
    run. Raises ConfigError."""
    if given is not None:
        return Path(given).absolute()
    if run.folder is None:
        raise ConfigError(f"{logger}() has no path, and this host has no folder of the run. Give "
                          f"{logger}(path).")
    return (run.folder / default).absolute()


def require_loggers(given: Any) -> None:
    """Raise ConfigError for an option `loggers` that cannot work."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise ConfigError(f"loggers is {given!r}. Give a list: loggers=[TensorBoard(), Csv()].")
    for place, logger in enumerate(given):
        lacking = [name for name in ("check", "open", "where", "write", "flush", "close")
                   if not callable(getattr(logger, name, None))]
        if lacking or isinstance(logger, type):
            raise ConfigError(f"loggers[{place}] is {logger!r}, which is no logger. Give an object "
                              f"of elastic_trainer.loggers, e.g. Csv(), or one with the methods of "
                              f"Logger.")
        if any(logger is other for other in given[:place]):
            raise ConfigError(f"loggers has {logger!r} twice. Give one object for each place.")
        logger.check()


AFTER_STEP = {"evaluated": "eval/", "logged": ""}
"""The events and points that have more numbers of a step, and what their names begin with."""


def values_of_step(facts: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a step, from its facts as the event worker.step_committed has them."""
    values = {"train/loss": float(facts["loss"]), "train/lr": _first_of(facts["lr"]),
              "train/world_size": float(facts.get("size", 1)),
              **numbers_of(facts.get("metrics", {}), "train/")}
    if facts["step_s"] > 0:
        values["train/samples_per_s"] = facts["samples"] / facts["step_s"]
    return values


def numbers_of(metrics: Mapping[str, Any], before: str = "") -> dict[str, float]:
    """Return those metrics that are one number, with a text before their names."""
    return {f"{before}{name}": float(value) for name, value in metrics.items()
            if isinstance(value, (int, float))}


def _first_of(rate: Any) -> float:
    """Return a rate, or the first of several."""
    while isinstance(rate, (list, tuple, dict)):
        rate = next(iter(rate.values() if isinstance(rate, dict) else rate), math.nan)
    return float(rate)

"""Storms and recorded traces, as `plan` needs them: a pool, or a list of changes.

--storm, --trace → here → plan

A trace is CSV in one of two forms. The first line of the simple form names its columns:

    time_s,event,host        events: join, notice, loss
    0,join,a

A recorded one has no such line: milliseconds, add or remove, node.
"""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

from elastic_trainer.config import ConfigError
from elastic_trainer.rehearse.pools import Change, Pool, number

HEAD = ["time_s", "event", "host"]
KINDS = {"join": "joined", "add": "joined", "notice": "noticed", "loss": "lost", "remove": "lost"}


def storm_pool(text: str, hosts: int, price: float) -> Pool:
    """Read e.g. "rate=12/h,bulk=0.4,zero=0.1,seed=7" as a pool. Raises ConfigError.

    `rate` counts events of loss of the whole fleet in an hour; each brings a replacement.
    """
    given = {"rate": 0.0, "bulk": 0.0, "zero": 0.0, "seed": 0.0, "notice": 0.0}
    for item in text.split(","):
        name, _, value = item.strip().partition("=")
        try:
            if name not in given:
                raise ValueError
            given[name] = number(value)
        except ValueError as error:
            raise ConfigError(f"--storm has {item!r}. Use e.g. rate=12/h,bulk=0.4,zero=0.1,"
                              f"seed=7.") from error
    bulk, zero = given["bulk"], given["zero"]
    if not 0.0 <= bulk + zero <= 1.0:
        raise ConfigError(f"--storm has bulk {bulk:g} and zero {zero:g}, which are shares of the "
                          f"losses. Use numbers whose sum is at most 1.")
    return Pool(name=f"storm {given['seed']:.0f}", hosts=hosts, price=price, bulk=bulk,
                zero=zero, notice=given["notice"], rate=given["rate"])


def trace_of(path: Path) -> list[Change]:
    """Read a trace. Raises ConfigError."""
    try:
        with open(path, newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path} cannot be read: {error}. Name a CSV file.") from error
    scale = 1.0 if rows[:1] == [HEAD] else 1e-3
    found: list[Change] = []
    for line, row in enumerate(rows[scale == 1.0 :], 1 + (scale == 1.0)):
        try:
            at, what, _ = row
            found.append(Change(float(at) * scale)._replace(**{KINDS[what.strip()]: 1}))
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"--trace {path}, line {line} is {','.join(row)!r}. Use lines time_s,event,host "
                f"below such a first line, with the events join, notice and loss.") from error
    if not found:
        raise ConfigError(f"--trace {path} has no line. Name a file with changes.")
    found.sort(key=lambda change: change.time_s)
    return [Change(at, *(sum(column) for column in zip(*(one[1:] for one in group), strict=True)))
            for at, group in itertools.groupby(found, key=lambda change: change.time_s)]

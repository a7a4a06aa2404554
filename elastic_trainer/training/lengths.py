"""Lengths and intervals that a user gives as texts: "10 epochs", "5000 steps", "10 min".

Trainer(until=…), step.every(…) → here → numbers

What always holds: a text without a number and a unit is a ConfigError with examples that work.
"""

from __future__ import annotations

import re

from elastic_trainer.config import ConfigError

SECONDS = {"s": 1, "min": 60, "h": 3600}
"""The units of time of an interval, in seconds."""
_INTERVAL = re.compile(r"\s*(\d[\d_]*)\s*(?:(epoch|step)s?|(s|min|h))\s*")
_LENGTH = re.compile(r"\s*(\d[\d_]*)\s+(epoch|step)s?\s*")


def interval_of(text: str) -> tuple[int, str]:
    """Return the number and the unit of an interval. Raises ConfigError."""
    found = _INTERVAL.fullmatch(text) if isinstance(text, str) else None
    if not found or not int(found[1]):
        raise ConfigError(f"every() got {text!r}. Use a number and a unit: "
                          f'"1 epoch", "500 steps", "10 min".')
    return int(found[1]), found[2] or found[3]


def length_of(text: str) -> tuple[int | None, int | None]:
    """Return the epochs or the steps of a length. Raises ConfigError."""
    found = _LENGTH.fullmatch(text) if isinstance(text, str) else None
    if not found or not int(found[1]):
        raise ConfigError(f"until is {text!r}. Use a number of epochs or of steps: "
                          f'"10 epochs", "5000 steps".')
    return (int(found[1]), None) if found[2] == "epoch" else (None, int(found[1]))

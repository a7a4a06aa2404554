"""Lengths and intervals that a user gives as texts: "10 epochs", "5000 steps", "10 min".

Trainer(until=…), step.every(…), Evaluation(every=…) → here → numbers

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
        raise ConfigError(f"every is {text!r}. Use a number and a unit: "
                          f'"1 epoch", "500 steps", "10 min".')
    return int(found[1]), found[2] or found[3]


def ends_interval(interval: str, step: int, steps_per_epoch: int,
                  clocks_ms: tuple[int, int]) -> bool:
    """Return whether a step ends an interval. The clocks are the run's, at the ends of the step
    before and of this one. Raises ConfigError."""
    number, unit = interval_of(interval)
    if unit in SECONDS:
        before_ms, now_ms = clocks_ms
        interval_ms = 1000 * number * SECONDS[unit]
        return now_ms // interval_ms > before_ms // interval_ms
    return (step + 1) % (number * (steps_per_epoch if unit == "epoch" else 1)) == 0


def length_of(text: str) -> tuple[int | None, int | None]:
    """Return the epochs or the steps of a length. Raises ConfigError."""
    found = _LENGTH.fullmatch(text) if isinstance(text, str) else None
    if not found or not int(found[1]):
        raise ConfigError(f"until is {text!r}. Use a number of epochs or of steps: "
                          f'"10 epochs", "5000 steps".')
    return (int(found[1]), None) if found[2] == "epoch" else (None, int(found[1]))

"""Exact sums of an evaluation: what the user's function has found in each batch.

the function of evaluate() → here → Found (also the states of metrics: metric_states.py, and what is
kept of single batches) → means

What always holds:
1. Sums are fractions, so their order does not change the result.
2. What is kept of a batch has its bits on every worker. It travels as tensors and JSON, not as
   pickled objects.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy
import torch

from elastic_trainer.evaluate.metric_states import States, states_added
from elastic_trainer.state.layout import byte_view, decode, pack

Sums = dict[str, tuple[Fraction, Fraction | None, bool]]
"""By name: the total, the number of items (None: a plain sum), and whether all were finite."""


class Kept:
    """What the function of evaluate() keeps of a batch: containers of tensors and numbers. All
    workers get it of all batches, in their order. Costs: memory, and network, for all of it."""

    def __init__(self, values: Any):
        packed = pack(values)
        payload = b"".join(byte_view(tensor).numpy().tobytes() for tensor in packed.tensors)
        self.text = [packed.header.decode(), base64.b64encode(payload).decode()]


class AllKept(list[Any]):
    """What was kept of all batches. The event of the evaluation does not have it."""


@dataclass
class Found:
    """What was found in some batches."""

    sums: Sums = field(default_factory=dict)
    states: States = field(default_factory=dict)
    kept: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    """By name and batch."""

    def plus(self, other: Found) -> Found:
        """Return what was found in the batches of both. Raises RuntimeError if names differ."""
        names = self.kept.keys() | other.kept.keys()
        return Found(added(self.sums, other.sums), states_added(self.states, other.states),
                     {name: self.kept.get(name, {}) | other.kept.get(name, {}) for name in names})

    def encoded(self) -> dict[str, Any]:
        """Return this as JSON values."""
        return {"sums": encoded(self.sums),
                "states": {name: [number if isinstance(number, int) or number is None
                                  else str(number) for number in numbers]
                           for name, numbers in self.states.items()},
                "kept": {name: list(texts.items()) for name, texts in self.kept.items()}}

    @staticmethod
    def decoded(values: Mapping[str, Any]) -> Found:
        """Read what `encoded` has returned."""
        return Found(decoded(values["sums"]),
                     {name: [Fraction(number) if isinstance(number, str) else number
                             for number in numbers]
                      for name, numbers in values["states"].items()},
                     {name: dict(texts) for name, texts in values["kept"].items()})

    def all_kept(self) -> dict[str, AllKept]:
        """Return what was kept, by name, in the order of the batches."""
        return {name: AllKept(_kept(*texts[number]) for number in sorted(texts))
                for name, texts in self.kept.items()}


def found_in(number: int, returned: Any, states: States) -> Found:
    """Return what the user's function has found in a batch. Raises TypeError."""
    kept = {name: {number: value.text} for name, value in returned.items()
            if isinstance(value, Kept)} if isinstance(returned, Mapping) else {}
    return Found(sums_of({name: value for name, value in returned.items() if name not in kept}
                         if kept else returned), states, kept)


def _kept(header: str, payload: str) -> Any:
    given = numpy.frombuffer(bytearray(base64.b64decode(payload)), dtype=numpy.uint8)
    return decode(header.encode(), torch.from_numpy(given))


def sums_of(found: Any) -> Sums:
    """Return what the user's function has found in a batch, exactly. Raises TypeError."""
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise TypeError(
            f"the function of evaluate() returned a {type(found).__name__}. Return a dict of sums "
            'by name: {"accuracy": (hits, n), "errors": errors}.')
    return {name: _sum_of(name, value) for name, value in found.items()}


def _sum_of(name: str, value: Any) -> tuple[Fraction, Fraction | None, bool]:
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    try:
        numbers = [float(part) for part in (value if is_pair else [value])]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"the function of evaluate() returned {name}={value!r}. Return a sum and "
                        f"its number of items, {name}=(hits, n), or one number.") from error
    is_finite = all(map(math.isfinite, numbers))
    exact = [Fraction(number) if is_finite else Fraction(0) for number in numbers]
    return exact[0], exact[1] if is_pair else None, is_finite


def added(first: Sums, second: Sums) -> Sums:
    """Return the sums of both. Raises RuntimeError if their names differ, and one is not empty."""
    if not first or not second:
        return first or second
    kinds = [{name: one[name][1] is None for name in one} for one in (first, second)]
    if kinds[0] != kinds[1]:
        raise RuntimeError(
            f"the function of evaluate() returned {sorted(first)} for one batch and "
            f"{sorted(second)} for another, or a pair for one and a number for the other. Return "
            f"the same names for each batch, with (0, 0) where there is nothing to add.")
    return {name: (total + second[name][0],
                   None if weight is None else weight + (second[name][1] or 0),
                   is_finite and second[name][2])
            for name, (total, weight, is_finite) in first.items()}


def means_of(sums: Sums) -> dict[str, float]:
    """Return total by number of items, or the total where there is no such number; NaN where a
    number was not finite or nothing was counted."""
    return {name: _mean(*one) for name, one in sorted(sums.items())}


def _mean(total: Fraction, weight: Fraction | None, is_finite: bool) -> float:
    if not is_finite or weight == 0:
        return math.nan
    return float(total if weight is None else total / weight)


def encoded(sums: Sums) -> dict[str, Any]:
    """Return sums as JSON values."""
    return {name: [str(total), None if weight is None else str(weight), is_finite]
            for name, (total, weight, is_finite) in sums.items()}


def decoded(values: Mapping[str, Any]) -> Sums:
    """Read what `encoded` has returned."""
    return {name: (Fraction(total), None if weight is None else Fraction(weight), is_finite)
            for name, (total, weight, is_finite) in values.items()}

"""What the micro-batches of a step have counted and logged: sums that are the same in every world.

step.backward(loss, count=…), step.log(acc=(hits, n)) → here → flat buffer → reducer → here →
step.metrics

What always holds:
1. The sums are exact, so their order does not matter. A number is a whole multiple of 2^-64, cut
   into limbs of 8 bits, and each limb is an element of the flat buffer. 32-bit floats add whole
   numbers exactly up to 2^24, so 2^16 workers may add their limbs.
2. The sums travel with the gradients, without a collective of their own. So a worker that holds the
   gradient of a step holds its sums, too, and can finish the step alone.
3. The layout is fixed in the warm-up, by the names that the user's code logs there. So all workers
   have the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

FRACTION_BITS = 64
LIMB_BITS, LIMBS = 8, 16
LARGEST = 2.0 ** (LIMB_BITS * LIMBS - FRACTION_BITS - 1)
"""Each number must be smaller than this one."""
PARTS = 2 * LIMBS + 1
"""Elements of one entry: two numbers, and how many of them were not finite."""
HIDDEN = "."
"""The beginning of names that an adapter has made, and that step.metrics does not have."""
COUNT = "count"
"""The entry of what was counted: the total, and the number of micro-batches that were counted."""


class Tally:
    """What this worker's micro-batches of a step have counted and logged."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._sums: dict[str, list[int]] = {}

    @property
    def size(self) -> int:
        """The number of elements of the flat buffer that the tally needs."""
        return PARTS * len(self.names)

    def lay_out(self) -> bool:
        """Give each name that was added a place, for the rest of this process; returns whether
        there is one."""
        self.names = sorted(self._sums)
        self.clear()
        return bool(self.names)

    def clear(self) -> None:
        """Forget what was added, before the micro-batches of a step are run."""
        self._sums = {}

    def add(self, name: str, total: Any, weight: Any) -> None:
        """Add a pair of numbers of one micro-batch."""
        numbers = [float(total), float(weight)]
        finite = [number if math.isfinite(number) else 0.0 for number in numbers]
        found = [_fixed(number) for number in finite] + [numbers != finite]
        sums = self._sums.setdefault(name, [0, 0, 0])
        self._sums[name] = [was + new for was, new in zip(sums, found, strict=True)]

    def elements(self) -> list[float]:
        """Return what this worker adds to the flat buffer."""
        return [
            element for name in self.names for element in _encoded(self._sums.get(name, (0, 0, 0)))
        ]


def read(names: Sequence[str], elements: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Return the sums over all workers, by name: total and weight. A total is NaN if a number was
    not finite."""
    found = {}
    for place, name in enumerate(names):
        part = elements[PARTS * place : PARTS * (place + 1)]
        total, weight = (_decoded(part[start : start + LIMBS]) for start in (0, LIMBS))
        found[name] = (math.nan if part[-1] else total, weight)
    return found


def means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return what was logged, as total by weight; NaN where no micro-batch logged it."""
    return {
        name: total / weight if weight else math.nan
        for name, (total, weight) in sums.items()
        if name != COUNT and not name.startswith(HIDDEN)
    }


def pair_of(name: str, value: Any) -> tuple[Any, Any]:
    """Return a pair of numbers that was given to step.log. Raises TypeError, ValueError."""
    is_sequence = isinstance(value, (tuple, list)) and len(value) == 2
    if not is_sequence or not all(_is_number(part) for part in value):
        raise TypeError(
            f"step.log got {name}={value!r}. Give a sum and its number of items: {name}=(hits, n). "
            "The result is the sum of the first by the sum of the second, over all micro-batches.")
    for part in value:
        number = float(part)
        if math.isfinite(number) and abs(number) >= LARGEST:
            raise ValueError(f"step.log got {name}={value!r}, which is too large. Use numbers "
                             f"under {LARGEST:.1e}.")
    return value[0], value[1]


def require_count(count: Any) -> None:
    """Raise TypeError unless a value is a count of items."""
    if not _is_number(count) or not 0 <= float(count) < LARGEST:
        raise TypeError(
            f"backward got count={count!r}. Give the number of items that the loss is the sum over."
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )


def _fixed(number: float) -> int:
    above, below = number.as_integer_ratio()
    return (above << FRACTION_BITS) // below


def _encoded(sums: Sequence[int]) -> list[float]:
    elements = list[float]()
    for total in sums[:2]:
        sign, rest = (-1.0 if total < 0 else 1.0), abs(total)
        for _ in range(LIMBS):
            elements.append(sign * (rest & (1 << LIMB_BITS) - 1))
            rest >>= LIMB_BITS
        if rest:
            raise RuntimeError(
                f"what the micro-batches of a worker have logged in a step adds up to {total:.1e} "
                f"or more, which is too large. Use numbers whose sum is under {LARGEST:.1e}.")
    return [*elements, float(sums[2])]


def _decoded(limbs: Sequence[float]) -> float:
    total = sum(int(limb) << (LIMB_BITS * place) for place, limb in enumerate(limbs))
    return total / (1 << FRACTION_BITS)

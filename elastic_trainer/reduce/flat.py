"""The flat buffers: all gradients of a step in one tensor per type, with counts and statistics in
front.

micro-batches → here → reducer (in place) → here → optimizer, buffers, loss; step.backward(loss,
count=…), step.log(acc=(hits, n)) → Tally → here → step.metrics

One buffer: | micro-batches run | to be trained | statistics | used | tally | mark | gradients … |
            |------------------------- the front ---------------------------|

What always holds:
1. There is a buffer for each type that any parameter has, trained or not. So all workers take part
   in the same collectives.
2. Whether the buffers of all workers have the same lengths is known before they are read
   (agreement.py).
3. The counts say in how many micro-batches each parameter of the model was to be trained, and in
   how many it got a gradient. From them follows whether all micro-batches trained the same
   parameters, and which parameters no micro-batch has used.
4. The worker that has run the step's first micro-batch sets the mark: whether that micro-batch has
   left something in modules that all workers need (training/differing.py). All others add zeros.
5. What is counted and logged has exact sums, so their order does not matter. A number is a whole
   multiple of 2^-64, cut into limbs of 8 bits, and each limb is an element of the flat buffer.
   32-bit floats add whole numbers exactly up to 2^24, so 2^16 workers may add their limbs. The
   layout is fixed in the warm-up, by the names that the user's code logs there.
6. All of it travels with the gradients, without a collective of its own. So a worker that holds the
   gradient of a step holds its counts, too, and can finish the step alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastic_trainer.reduce.buffers import BufferRules, Statistics
from elastic_trainer.reduce.gradient_sums import Gradients
from elastic_trainer.reduce.leaving import LeavingGradients
from elastic_trainer.state.host_copy import HostCopy

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
        self._sums = {}

    def add(self, name: str, total: Any, weight: Any) -> None:
        numbers = [float(total), float(weight)]
        finite = [number if math.isfinite(number) else 0.0 for number in numbers]
        found = [_fixed(number) for number in finite] + [numbers != finite]
        sums = self._sums.setdefault(name, [0, 0, 0])
        self._sums[name] = [was + new for was, new in zip(sums, found, strict=True)]

    def elements(self) -> list[float]:
        return [element for name in self.names
                for element in _encoded(self._sums.get(name, (0, 0, 0)))]


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
    return {name: total / weight if weight else math.nan
            for name, (total, weight) in sums.items()
            if name != COUNT and not name.startswith(HIDDEN)}


def pair_of(name: str, value: Any) -> tuple[Any, Any]:
    """Return a pair of numbers that was given to step.log. Raises TypeError, ValueError."""
    is_sequence = isinstance(value, (tuple, list)) and len(value) == 2
    if not is_sequence or not all(_is_number(part) for part in value):
        raise TypeError(
            f"step.log got {name}={value!r}. Give a sum and its number of items: {name}=(hits, n). "
            "The result is the sum of the first by the sum of the second, over all micro-batches.")
    for part in value:
        # item() of a part of a graph does not warn; float() does.
        number = float(part.item() if isinstance(part, torch.Tensor) else part)
        if math.isfinite(number) and abs(number) >= LARGEST:
            raise ValueError(f"step.log got {name}={value!r}, which is too large. Use numbers "
                             f"under {LARGEST:.1e}.")
    return value[0], value[1]


def require_count(count: Any) -> None:
    if not _is_number(count) or not 0 <= float(count) < LARGEST:
        raise TypeError(f"backward got count={count!r}. Give the number of items that the loss is "
                        f"the sum over.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1)


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


ALIGNED = 16
"""The first gradient begins at a multiple of this number of elements: at a cache line, as the
buffer does."""
PAD = 4096
"""Elements after each flat buffer, so that it can be cut into equal slices for any world of up to
this size."""


class SetsDiffer(Exception):
    """Micro-batches of one step trained different parameters. Raised on all workers alike."""


@dataclass(frozen=True)
class Layout:
    """Where everything lies in the flat buffers, in elements."""

    members: list[int]
    """The numbers of the parameters that are trained."""
    places: list[tuple[torch.dtype, int, int]]
    """Of each trained parameter: the type of its sum, and the range of its gradient."""
    lengths: dict[torch.dtype, int]
    """Of each type, without the room after it."""
    statistics_start: int
    used_start: int
    tally_start: int
    mark: int
    head_stop: int
    """The end of all that is no gradient."""

    def front(self) -> Layout:
        """Return this layout without the gradients."""
        lengths = dict.fromkeys(self.lengths, ALIGNED)
        lengths[torch.float32] = -(-self.head_stop // ALIGNED) * ALIGNED
        return replace(self, places=[], lengths=lengths)


def laid_out(parameters: Sequence[torch.Tensor], trained: Sequence[bool], statistics: int,
             tally: int) -> Layout:
    """Return the layout for these parameters of the model, with this number of elements for the
    statistics and for the tally."""
    members = [number for number, is_trained in enumerate(trained) if is_trained]
    statistics_start = 1 + len(parameters)
    used_start = statistics_start + statistics
    tally_start = used_start + len(parameters)
    mark = tally_start + tally
    head_stop = mark + 1
    lengths = {sum_dtype(parameter.dtype): ALIGNED for parameter in parameters}
    lengths[torch.float32] = -(-head_stop // ALIGNED) * ALIGNED
    places = []
    for number in members:
        dtype, count = sum_dtype(parameters[number].dtype), parameters[number].numel()
        places.append((dtype, lengths[dtype], lengths[dtype] + count))
        lengths[dtype] += count
    return Layout(members, places, lengths, statistics_start, used_start, tally_start, mark,
                  head_stop)


class Sums(dict[torch.dtype, torch.Tensor]):
    """A set of flat buffers by type, and views of what lies in them."""

    gradients: list[torch.Tensor]
    """Of each trained parameter."""
    counts: torch.Tensor
    """The micro-batches run, and those in which each parameter was to be trained."""
    statistics: torch.Tensor
    used: torch.Tensor
    tally: torch.Tensor
    mark: torch.Tensor


class Flat:
    """The flat buffers of this worker, and what the micro-batches add to them."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter],
                 buffers: dict[str, torch.Tensor], device: torch.device,
                 rules: BufferRules | None = None, leaves: bool = False):
        self.device = device
        self.leaving = LeavingGradients(parameters) if leaves else None
        self.gradients: Gradients = self.leaving or Gradients(parameters)
        self.is_front = leaves
        """The gradients leave (leaving.py): the buffers have the front alone."""
        self.reduced: dict[int, torch.Tensor] = {}
        """What this worker holds of a reduced gradient that leaves, by the parameter's number."""
        self._rules = rules
        self.statistics = self._statistics_of(buffers)
        self.tally = Tally()
        self.microbatches_run = 0
        """Micro-batches of the step in flight whose gradients are in the sums of this worker."""
        self._uncounted = 0
        """The newest of them, which all used the same parameters: no sum has these counts yet."""
        self._facts: HostCopy | Facts | None = None
        self.lay_out(self.gradients.trained_now())

    @property
    def names(self) -> list[str]:
        return self.gradients.names

    def lay_out(self, trained: Sequence[bool],
                buffers: dict[str, torch.Tensor] | None = None) -> None:
        """Make the flat buffers anew, for these parameters of the model (and for these buffers).
        All are zero."""
        if buffers is not None:
            self.statistics = self._statistics_of(buffers)
        self.trained = list(trained)
        everyone = self.gradients.everyone
        self.layout = laid_out(everyone, trained, self.statistics.size, self.tally.size)
        if self.is_front:
            self.layout = self.layout.front()
        self._strides = [stride_of(everyone[number]) for number in self.layout.members]
        self._one_run = torch.tensor([1.0, *map(float, trained)], device=self.device)
        """What a micro-batch adds to the counts."""
        self._used_in_one: tuple[list[int], torch.Tensor] | None = None
        """What the newest micro-batch has used, and what it adds to the counts."""
        self.sums, self._facts = self.new_sums(), None
        self.gradients.lay_out(self.layout.members, self.sums.gradients)

    def _statistics_of(self, buffers: dict[str, torch.Tensor]) -> Statistics:
        return Statistics(buffers, self._rules.of(buffers) if self._rules else None)

    def new_sums(self) -> Sums:
        """Return a zeroed set of flat buffers, with room after for equal slices."""
        sums = Sums({dtype: torch.zeros(length + PAD, dtype=dtype, device=self.device)
                     for dtype, length in self.layout.lengths.items()})
        layout, front = self.layout, sums[torch.float32]
        sums.counts = front[: layout.statistics_start]
        sums.statistics = front[layout.statistics_start : layout.used_start]
        sums.used = front[layout.used_start : layout.tally_start]
        sums.tally = front[layout.tally_start : layout.mark]
        sums.mark = front[layout.mark : layout.head_stop]
        everyone = self.gradients.everyone
        # If the gradients leave, none has a place. `.data` gives each view a version of its own.
        sums.gradients = [sums[dtype][start:stop].as_strided(everyone[number].shape, stride).data
                          for number, stride, (dtype, start, stop)
                          in zip(self.layout.members, self._strides, self.layout.places,
                                 strict=not self.is_front)]
        return sums

    def add_into(self, sums: Sums) -> None:
        """Make autograd add into these buffers from now on."""
        self.sums, self._facts = sums, None
        self.gradients.add_into(sums.gradients)

    # --- one micro-batch --------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step."""
        self.microbatches_run = self._uncounted = 0

    def add_statistics(self, weight: float, loss: torch.Tensor, before: dict[str, torch.Tensor],
                       after: dict[str, torch.Tensor], *, is_sum: bool = False) -> None:
        """Add the loss of one micro-batch and its changes of the buffers, weighted. A loss that
        `is_sum` gets no weight."""
        self.statistics.add(self.sums.statistics, weight, loss, before, after, is_sum)

    def close_microbatch(self) -> None:
        """Note a micro-batch whose backward pass is done. Raises GradientsWritten."""
        used = self.gradients.close()
        if self._used_in_one is None or self._used_in_one[0] != used:
            self.add_used(self.sums)
            counts = [0.0] * len(self.gradients.everyone)
            for number, is_used in zip(self.layout.members, used, strict=True):
                counts[number] = float(is_used)
            self._used_in_one = (used, torch.tensor(counts, device=self.device))
        self.microbatches_run += 1
        self._uncounted += 1

    def add_used(self, sums: Sums) -> None:
        """Count which parameters the newest micro-batches have used. Micro-batches mostly use the
        same ones, so this is done once a step."""
        if self._uncounted and self._used_in_one:
            sums.used.add_(self._used_in_one[1], alpha=self._uncounted)
        self._uncounted = 0

    def add_counts(self, sums: Sums, mark: int) -> None:
        """Add what this worker's micro-batches have counted and logged to the sums that it sends,
        and the mark of the step's first micro-batch; 0, if this worker has not run it."""
        sums.counts.add_(self._one_run, alpha=self.microbatches_run)
        self.add_used(sums)
        if self.tally.size:
            sums.tally.add_(torch.tensor(self.tally.elements(), device=self.device))
        if mark:
            sums.mark.add_(mark)

    # --- what the reduced sums say ----------------------------------------------------------------

    def copy_facts(self) -> None:
        """Let the host have all of the reduced sums that it decides by: one copy, for which nobody
        waits yet."""
        assert not self._uncounted, "add_counts was not called"  # no gradient would be applied
        front, layout = self.sums[torch.float32], self.layout
        self._facts = HostCopy(torch.cat([
            self.sums.counts, front[layout.used_start : layout.head_stop],
            *self.statistics.facts(self.sums.statistics)]))

    @property
    def _known(self) -> Facts:
        """What the host knows of the reduced sums. On a GPU the first look of a step waits for the
        device."""
        if self._facts is None:
            self.copy_facts()
        assert self._facts
        if isinstance(self._facts, HostCopy):
            self._facts = Facts.of(self._facts.read().tolist(), len(self.names), self.tally.size)
        return self._facts

    def hand_out(self) -> None:
        self.gradients.hand_out(self._known.used)

    def used(self) -> list[float]:
        """Return in how many micro-batches each parameter got a gradient."""
        return self._known.used

    def run(self) -> float:
        """Return how many micro-batches all workers have run in the step."""
        return self._known.run

    def tallied(self) -> dict[str, tuple[float, float]]:
        """Return what all micro-batches of the step have counted and logged, by name: total and
        weight."""
        return read(self.tally.names, self._known.tally) if self.tally.size else {}

    def mark(self) -> int:
        """Return the mark of the step's first micro-batch."""
        return int(self._known.mark)

    def counted(self) -> float:
        """Return the total of what the micro-batches have counted; 0.0: the losses are means over
        samples."""
        return self.tallied().get(COUNT, (0.0, 0.0))[0]

    def divide(self) -> None:
        """Make the sum of the gradients their mean over what was counted."""
        if total := self.counted():
            for gradient in self.reduced.values():
                gradient.div_(total)
            for dtype, tensor in self.sums.items():
                start = self.layout.head_stop if dtype == torch.float32 else 0
                tensor[start : self.layout.lengths[dtype]].div_(total)

    def mean_loss(self) -> float:
        """Return the reduced loss of the step."""
        return self._known.statistics[0] / (self.counted() or 1.0)

    def changed_buffers(self) -> list[str]:
        """Return the buffers without a rule that several micro-batches of the step could change,
        and one has."""
        found = self.statistics.changed(self._known.statistics)
        return found if found and self._known.run > 1 else []

    def has_lost_digits(self) -> bool:
        return self.statistics.has_lost_digits(self._known.statistics)

    def apply_statistics(self, before: dict[str, torch.Tensor],
                         buffers: dict[str, torch.Tensor]) -> float:
        """Set the buffers to (before + mean change) and return the mean loss."""
        self.statistics.apply(self.sums.statistics, before, buffers)
        return self.mean_loss()


@dataclass(frozen=True)
class Facts:
    """What the host knows of the reduced sums of a step."""

    run: float
    used: list[float]
    """Of each parameter: in how many micro-batches it got a gradient."""
    tally: list[float]
    mark: float
    statistics: list[float]
    """See Statistics.facts."""

    @staticmethod
    def of(numbers: list[float], parameters: int, tally: int) -> Facts:
        used_start = 1 + parameters
        tally_start = used_start + parameters
        mark = tally_start + tally
        return Facts(numbers[0], numbers[used_start:tally_start], numbers[tally_start:mark],
                     numbers[mark], numbers[mark + 1 :])


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def stride_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter's gradient: its own where they leave no gaps, as autograd
    has it.

    The fused optimizers of torch 2.13 on the CPU read both as if they had the same strides.
    """
    return torch.empty_like(parameter, device="meta").stride()

"""The flat buffers: all gradients of a step in one tensor per type, with counts and statistics in
front.

micro-batches → here → reducer (in place) → here → optimizer, buffers, loss

One buffer: | micro-batches run | to be trained | statistics | used | tally | modes | gradients … |
            |---- known before the backward pass -----|

What always holds:
1. There is a buffer for each type that any parameter has, trained or not. So all workers take part
   in the same collectives.
2. What is known before the backward pass has the same length on all workers. So `ring` learns from
   it whether the gradients have the same length, too.
3. The counts say in how many micro-batches each parameter of the model was to be trained, and in
   how many it got a gradient. From them follows whether all micro-batches trained the same
   parameters, and which parameters no micro-batch has used.
4. In the modes, the worker that has run the step's first micro-batch marks the modules whose mode
   (train or eval) that micro-batch has changed. One more mark tells what it has done to plain
   attributes. All others add zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from elastic_trainer.reduce.buffer_rules import BufferRules
from elastic_trainer.reduce.counts import COUNT, Tally, read
from elastic_trainer.reduce.gradients import Gradients
from elastic_trainer.reduce.statistics import Statistics

ALIGNED = 16
"""The first gradient begins at a multiple of this number of elements: at a cache line, as the
buffer does."""
PAD = 4096
"""Elements behind each flat buffer, so that it can be cut into equal slices for any world of up to
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
    """Of each type, without the room behind."""
    statistics_start: int
    early_stop: int
    """What lies before is known before the backward pass. The counts of parameters used begin."""
    tally_start: int
    modes_start: int
    head_stop: int
    """The end of the modes, and of all that is no gradient."""


def laid_out(parameters: Sequence[torch.Tensor], trained: Sequence[bool], statistics: int,
             tally: int, modes: int) -> Layout:
    """Return the layout for these parameters of the model, with this number of elements for the
    statistics, for the tally and for the modes."""
    members = [number for number, is_trained in enumerate(trained) if is_trained]
    statistics_start = 1 + len(parameters)
    early_stop = statistics_start + statistics
    tally_start = early_stop + len(parameters)
    modes_start = tally_start + tally
    head_stop = modes_start + modes
    lengths = {_sum_dtype(parameter.dtype): ALIGNED for parameter in parameters}
    lengths[torch.float32] = -(-head_stop // ALIGNED) * ALIGNED
    places = []
    for number in members:
        dtype, count = _sum_dtype(parameters[number].dtype), parameters[number].numel()
        places.append((dtype, lengths[dtype], lengths[dtype] + count))
        lengths[dtype] += count
    return Layout(members, places, lengths, statistics_start, early_stop, tally_start, modes_start,
                  head_stop)


class Sums(dict[torch.dtype, torch.Tensor]):
    """A set of flat buffers by type, and a view of the gradient of each trained parameter."""

    gradients: list[torch.Tensor]


class Flat:
    """The flat buffers of this worker, and what the micro-batches add to them."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter],
                 buffers: dict[str, torch.Tensor], device: torch.device, modes: int = 0,
                 rules: BufferRules | None = None):
        self.device, self._modes = device, modes + 1
        self.gradients = Gradients(parameters)
        self._rules = rules
        self.statistics = self._statistics_of(buffers)
        self.tally = Tally()
        self.microbatches_run = 0
        """Micro-batches of the step in flight whose gradients are in the sums of this worker."""
        self.lay_out(self.gradients.trained_now())

    @property
    def names(self) -> list[str]:
        """The names of all parameters of the model."""
        return self.gradients.names

    def lay_out(self, trained: Sequence[bool],
                buffers: dict[str, torch.Tensor] | None = None) -> None:
        """Make the flat buffers anew, for these parameters of the model (and for these buffers).
        All are zero."""
        if buffers is not None:
            self.statistics = self._statistics_of(buffers)
        self.trained = list(trained)
        everyone = self.gradients.everyone
        self.layout = laid_out(everyone, trained, self.statistics.size, self.tally.size,
                               self._modes)
        self._strides = [_stride(everyone[number]) for number in self.layout.members]
        self._one_run = torch.tensor([1.0, *map(float, trained)], device=self.device)
        """What a micro-batch adds to the counts before its backward pass."""
        self._used_in_one: tuple[list[int], torch.Tensor] | None = None
        self.sums = self.new_sums()
        self.gradients.lay_out(self.layout.members, self.sums.gradients)

    def _statistics_of(self, buffers: dict[str, torch.Tensor]) -> Statistics:
        return Statistics(buffers, self.device,
                          self._rules.of(buffers) if self._rules else None)

    def new_sums(self) -> Sums:
        """Return a zeroed set of flat buffers, with room behind for equal slices."""
        sums = Sums({dtype: torch.zeros(length + PAD, dtype=dtype, device=self.device)
                     for dtype, length in self.layout.lengths.items()})
        everyone = self.gradients.everyone
        # `.data` gives each view a version of its own.
        sums.gradients = [sums[dtype][start:stop].as_strided(everyone[number].shape, stride).data
                          for number, stride, (dtype, start, stop)
                          in zip(self.layout.members, self._strides, self.layout.places,
                                 strict=True)]
        return sums

    def bind(self, sums: Sums) -> None:
        """Make autograd add into these buffers from now on."""
        self.sums = sums
        self.gradients.bind(sums.gradients)

    def _front(self, start: int, stop: int) -> torch.Tensor:
        return self.sums[torch.float32][start:stop]

    # --- one micro-batch
    # --------------------------------------------------------------------------------

    def add_statistics(self, weight: float, loss: torch.Tensor, before: dict[str, torch.Tensor],
                       after: dict[str, torch.Tensor], *, is_sum: bool = False) -> None:
        """Count one micro-batch, and add its loss and its changes of the buffers, weighted: all
        that is known before its backward pass. A loss that `is_sum` gets no weight."""
        self._front(0, self.layout.statistics_start).add_(self._one_run)
        self.statistics.add(self._statistics(), weight, loss, before, after, is_sum)

    def close_microbatch(self) -> None:
        """Count a micro-batch whose backward pass is done. Raises GradientsWritten,
        ParametersWritten."""
        used = self.gradients.close()
        self._front(self.layout.early_stop, self.layout.tally_start).add_(self._counts_where(used))
        self.microbatches_run += 1

    def _counts_where(self, used: list[int]) -> torch.Tensor:
        """Return what a micro-batch adds to the counts. It is kept: micro-batches mostly use the
        same parameters."""
        if self._used_in_one is None or self._used_in_one[0] != used:
            counts = [0.0] * len(self.gradients.everyone)
            for number, is_used in zip(self.layout.members, used, strict=True):
                counts[number] = float(is_used)
            self._used_in_one = (used, torch.tensor(counts, device=self.device))
        return self._used_in_one[1]

    def add_tally(self, sums: Sums) -> None:
        """Add what this worker's micro-batches have counted and logged to the sums that it
        sends."""
        if self.tally.size:
            elements = torch.tensor(self.tally.elements(), device=self.device)
            layout = self.layout
            sums[torch.float32][layout.tally_start : layout.modes_start].add_(elements)

    def add_modes(self, sums: Sums, changed: list[int], attributes: int) -> None:
        """Mark the modules whose modes the step's first micro-batch, which this worker has run, has
        changed, and what it has done to attributes."""
        sums[torch.float32][self.layout.head_stop - 1] += attributes
        for number in changed:
            sums[torch.float32][self.layout.modes_start + number] += 1.0

    # --- what the reduced sums say ----------------------------------------------------------------

    def agreed(self, head: torch.Tensor) -> list[bool]:
        """Return which parameters all micro-batches of the step were to train. Raises SetsDiffer if
        it was not one set."""
        run, *counts = head[: self.layout.statistics_start].tolist()
        if any(count not in (0.0, run) for count in counts):
            raise SetsDiffer
        return [count > 0 for count in counts]

    def hand_out(self) -> None:
        """Give each parameter its summed gradient, and None to those that no micro-batch has
        used."""
        used = self._front(self.layout.early_stop, self.layout.tally_start)
        self.gradients.hand_out(used.tolist())

    def tallied(self) -> dict[str, tuple[float, float]]:
        """Return what all micro-batches of the step have counted and logged, by name: total and
        weight."""
        if not self.tally.size:
            return {}
        elements = self._front(self.layout.tally_start, self.layout.modes_start)
        return read(self.tally.names, elements.tolist())

    def modes_changed(self) -> list[int]:
        """Return the numbers of the modules whose modes the step's first micro-batch has
        changed."""
        marks: list[int] = self._front(
            self.layout.modes_start, self.layout.head_stop - 1).nonzero().flatten().tolist()
        return marks

    def mark_of_attributes(self) -> int:
        """Return what the step's first micro-batch has done to plain attributes
        (attributes_moved.py)."""
        return int(self._front(self.layout.head_stop - 1, self.layout.head_stop))

    def counted(self) -> float:
        """Return the total of what the micro-batches have counted; 0.0: the losses are means over
        samples."""
        return self.tallied().get(COUNT, (0.0, 0.0))[0]

    def divide(self) -> None:
        """Make the sum of the gradients their mean over what was counted."""
        if total := self.counted():
            for gradient in self.sums.gradients:
                gradient.div_(total)

    def _statistics(self) -> torch.Tensor:
        return self._front(self.layout.statistics_start, self.layout.early_stop)

    def mean_loss(self) -> float:
        """Return the reduced loss of the step. On a GPU this waits for the device."""
        return float(self._statistics()[0]) / (self.counted() or 1.0)

    def changed_buffers(self) -> list[str]:
        """Return the buffers without a rule that several micro-batches of the step could change,
        and one has."""
        found = self.statistics.changed(self._statistics())
        return found if found and float(self.sums[torch.float32][0]) > 1 else []

    def has_lost_digits(self) -> bool:
        """True if a buffer of whole numbers has changed by more than 32-bit sums hold exactly."""
        return self.statistics.has_lost_digits(self._statistics())

    def apply_statistics(self, before: dict[str, torch.Tensor],
                         buffers: dict[str, torch.Tensor]) -> float:
        """Set the buffers to (before + mean change) and return the mean loss."""
        self.statistics.apply(self._statistics(), before, buffers)
        return self.mean_loss()  # on a GPU this line waits for the device


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter's gradient: its own where they leave no gaps, as autograd
    has it.

    The fused optimizers of torch 2.13 on the CPU read both as if they had the same strides.
    """
    return torch.empty_like(parameter, device="meta").stride()

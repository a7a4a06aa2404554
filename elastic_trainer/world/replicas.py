"""Whether all workers hold the same bits: each vote compares a checksum of a slice of the state.

LiveState → here → vote (one checksum) → equal: apply; different: each worker's checksums → judge

What always holds:
1. A checksum depends only on the bytes of the values, their names and the step. It does not depend
   on memory addresses, strides, or the time at which a worker joined. So equal replicas have equal
   checksums.
2. Each flipped bit of a slice changes its checksum. Blocks of 4,096 bytes are summed as 64-bit
   integers, so one flipped bit changes one sum by ±2^k, which is a run of at most 64 changed bits.
   CRC-32 detects each burst of up to 32 bits and each run of fewer than 2^32 - 1 changed bits (its
   polynomial is primitive). It misses other differences with a probability of 2^-32, and it misses
   each exchange of 64-bit values within a block.
3. Step t checks slice t mod `slices`. So a difference is found at most `slices` (at most 256) steps
   after it arose.
4. The whole state is compared before a newcomer receives a share of it from each worker, and before
   the run finishes.
5. A worker that has received its state within the last TRIAL_STEPS steps is no witness against one
   that has held its own for longer: if something of the training is not in the state, then all
   receivers lack it, and agree with each other. If only receivers speak against a worker, or if two
   receivers agree on other bits than the rest, then the state is lost in the transfer (`judge`).

A slice is at least 256 KiB of the parameters, or 8 of them, with all that the optimizer keeps of
them (AdamW: three times the bytes). Measured with AdamW, 2 workers on 2 cores: 0.63 ms of the demo
model's steps of 194 ms (0.3 %; 0.8 M parameters, 12 slices). In a loop of its own: 0.27 ms, and
0.5 ms for 105 M parameters (256 slices).

Consequence of 3: between the flip and the step that finds it, the worker computed its micro-batches
on a wrong value. Its gradients were wrong, too, and all workers have applied them. With more than
one slice the weights may therefore differ from those of an undisturbed run, although all replicas
are equal again. With one slice (a model of under 512 KiB) they do not differ. A checkpoint of a
step in between may have the wrong value in that worker's share. `compared_after`
(state/checkpoints/checkpoint.py) keeps an older checkpoint, and a run that goes back restores
that one.

What it does not do:
- It finds no fault in a world of one, where the vote carries no checksum.
- It finds no wrong gradient: all workers apply the same one.
- It evicts no worker in a world whose workers compute different bits (arithmetic.py). Rounding
  makes their replicas drift, and the drift is only logged.
- It does not check extras, whose `state_dict()` may be expensive, and it does not check the data.

Source: Peterson and Brown, "Cyclic Codes for Error Detection" (1961), for the bursts.
"""

from __future__ import annotations

import bisect
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy
import torch

from elastic_trainer.data.leaves import inner_tensors
from elastic_trainer.state.host_copy import HostCopy
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.values.forms import SCALARS, form_of, plain_tensor
from elastic_trainer.state.values.layout import flat_bytes
from elastic_trainer.state.values.names import named_parameters

SLICE_BYTES = 256 << 10
"""The least bytes of parameters in a slice. A tensor of this size takes 0.03 ms (measured)."""
SLICE_TENSORS = 8
"""The parameters in a slice of a model of many small tensors. A tensor takes at least 0.01 ms."""
MOST_SLICES = 256
"""The most slices of a model, so a difference is found within this number of steps."""
BLOCK_BYTES = 4096
NUMBER = " (number)"
"""The end of the name of a part that has numbers and texts of the optimizer's attributes."""
ATTRIBUTES_EVERY = 8
"""The attributes of the optimizer are compared each time after this number of slices."""

Part = tuple[str, int]
"""A tensor's name and the checksum of its bytes in the slice."""
Held = tuple[str, Any, int, int, int]
"""A name, its value, and the share of the value that belongs to the elements [low, high) of a
number of elements."""
Summed = Callable[[torch.Tensor, int], int]
"""Goes on with a checksum over the bytes of a flat tensor."""

TRIAL_STEPS = 256
"""A worker that has received its state is on trial for this number of steps (phases, if a step has
several). All votes of these steps have compared it with the others, so it was the same. Values
that count only in each k-th step (Lookahead) show up later than in the first one."""


class StateLost(RuntimeError):
    """Something of the training is not in the state, so a worker that has received the state does
    not compute as one that has not."""


class ReplicaDiffers(Exception):
    """This worker holds other bits than most of its world. It leaves, and a new worker receives the
    state."""


class ReplicasDisagree(RuntimeError):
    """The workers hold different bits, no majority holds the same, and no checkpoint is old enough
    to go back to; or a value of the user's differs."""


class Replica:
    """The checksums of one worker's state."""

    def __init__(self, state: LiveState):
        self.state = state
        self.parameters = named_parameters(state.model)
        self.names = list(self.parameters)
        self._ends = list(accumulate(p.numel() * p.element_size()
                                     for p in self.parameters.values()))
        total = self._ends[-1] if self._ends else 0
        self.slices = max(
            1, min(MOST_SLICES, max(total // SLICE_BYTES,
                                    len(self.names) // SLICE_TENSORS)))
        """After this number of steps the whole state has been compared."""

    def start(self, step: int, is_alone: bool = False) -> Callable[[], list[Part]]:
        """Begin with the checksums of a step's slice: weights, optimizer state, buffers and
        numbers. The result returns them; nothing in the slice changes before. On a GPU it waits.

        In a world of one there are none. The walk through the optimizer's attributes remains: it
        finds what has changed and cannot be kept.
        """
        if is_alone:
            self._attributes_held(step % self.slices, self.slices)
            return list
        held = self._held(step % self.slices, self.slices)
        copied = Copied(held)
        return lambda: copied.parts(held)

    def all_parts(self) -> list[Part]:
        """Return the checksums of everything."""
        held = self._held(0, 1)
        return Copied(held).parts(held)

    def _held(self, index: int, slices: int) -> list[Held]:
        found: list[Held] = [("numbers", self._numbers(), 0, 0, 1)]
        for name, parameter, low, high in self._parameters_of(index, slices):
            found.append((name, parameter, low, high, parameter.numel()))
            if self.state.shards is None:
                found += self._kept(name, parameter, low, high)
        found += self._attributes_held(index, slices)
        # A forward pass of this step has changed the others.
        buffers = self.state.model_buffers.before or self.state.buffers
        names = sorted(buffers)
        for name in names[len(names) * index // slices : len(names) * (index + 1) // slices]:
            found.append((name, buffers[name], 0, 1, 1))
        return found

    def _parameters_of(self, index: int,
                       slices: int) -> Iterator[tuple[str, torch.nn.Parameter, int, int]]:
        """Yield the parameters of a slice, with their first element in it and the end."""
        total = self._ends[-1] if self._ends else 0
        start, stop = total * index // slices, total * (index + 1) // slices
        for number in range(bisect.bisect_right(self._ends, start), len(self.names)):
            name = self.names[number]
            parameter = self.parameters[name]
            size = parameter.element_size()
            at = self._ends[number] - parameter.numel() * size
            if at >= stop:
                break
            # An element belongs to the slice in which it starts.
            low, high = (min(parameter.numel(), max(0, -(-(edge - at) // size)))
                         for edge in (start, stop))
            yield name, parameter, low, high

    def _kept(self, name: str, parameter: torch.Tensor, low: int, high: int) -> list[Held]:
        """Return what the optimizer keeps of a part of a parameter."""
        kept = self.state.optimizer.state.get(parameter, {})
        kept = kept if isinstance(kept, dict) else {"": kept}
        return [(f"{name}/{key}", kept[key], low, high, parameter.numel())
                for key in sorted(kept, key=str)]

    def shards_sum(self, step: int | None) -> int:
        """Return what this worker adds to a sum over all workers that is 0 if all holders of each
        part of a sharded optimizer's state hold the same bits in a step's slice (None: in all).

        The owner adds its checksum once for each buddy, and each buddy takes its own away.
        """
        if (shards := self.state.shards) is None:
            return 0
        index, slices = (0, 1) if step is None else (step % self.slices, self.slices)
        held, weights = list[Held](), list[int]()
        for name, parameter, low, high in self._parameters_of(index, slices):
            if weight := shards.weight(name):
                more = self._kept(name, parameter, low, high)
                if name in shards.averages:
                    more.append((f"{name} averaged", shards.averages[name], low, high,
                                 parameter.numel()))
                held, weights = held + more, weights + [weight] * len(more)
        parts = Copied(held).parts(held)
        return shards.differs + sum(
            weight * value for weight, (_, value) in zip(weights, parts, strict=True))

    def _attributes_held(self, index: int, slices: int) -> list[Held]:
        """Return what the optimizer keeps in its attributes: all numbers, and the
        tensors of this slice and of the next ones. Not in each step, because the walk through the
        attributes takes longer than the checksums."""
        stride = min(ATTRIBUTES_EVERY, slices)
        if index % stride:
            return []
        numbers, tensors = dict[str, list[Any]](), list[tuple[str, torch.Tensor]]()
        for place, value in self.state.optimizer_values.leaves():
            if isinstance(value, torch.Tensor):
                tensors.append((place, value))
            else:
                numbers.setdefault(place, []).append(value)
        low, high = (min(len(tensors), len(tensors) * edge // slices)
                     for edge in (index, index + stride))
        return [*((place + NUMBER, values, 0, 0, 1) for place, values in numbers.items()),
                *((place, value, 0, 1, 1) for place, value in tensors[low:high])]

    def _numbers(self) -> Any:
        state = self.state
        groups = [{key: value for key, value in group.items() if key != "params"}
                  for group in state.optimizer.param_groups]
        return [state.committed, state.samples, groups,
                state.scaler.state_dict() if state.scaler else None]


def checksum(parts: Sequence[Part]) -> int:
    """Return 32 bits that differ if the checksum of exactly one part does."""
    found = 0
    for name, value in parts:
        found = zlib.crc32(value.to_bytes(4, "little"), zlib.crc32(name.encode(), found))
    return found


def summands(value: int) -> list[int]:
    """Return 32 bits as integers to be summed over all workers: each half, and its square.

    n numbers are equal if and only if n times the sum of their squares is the square of their sum.
    The sums fit 64 bits for worlds of up to 2^31 workers.
    """
    low, high = value & 0xFFFF, value >> 16
    return [low, low * low, high, high * high]


def are_same(sums: Sequence[int], size: int) -> bool:
    """True if `size` workers, whose `summands` have these sums, hold the same checksum."""
    return all(size * square == total * total for total, square in (sums[:2], sums[2:]))


@dataclass(frozen=True)
class Difference:
    """The workers whose slices differ."""

    majority: tuple[int, ...]
    """The ranks that hold equal parts, if they are more than half of all; otherwise none."""
    outliers: tuple[int, ...]
    """The other ranks."""
    tensors: tuple[str, ...]
    """The names of what differs."""
    holders: tuple[int, ...] = ()
    """If the state was lost in a transfer: the ranks that have not received it, or not lately, so
    theirs is right. Otherwise none."""


def received_of(received: int, ticks: int) -> int:
    """Return when a worker has received its state, if it is on trial; otherwise -1."""
    return received if received >= 0 and ticks - received < TRIAL_STEPS else -1


def judge(parts_by_rank: Sequence[Sequence[Part]], received: Sequence[int] = (),
          outlying_receivers: int = 0) -> Difference:
    """Find the ranks whose parts differ from those of the majority.

    `received` is when each rank has received its state, or -1 (`received_of`);
    `outlying_receivers` is how many receivers have already left because they differed.
    """
    found = _by_majority(parts_by_rank)
    at = list(received) or [-1] * len(parts_by_rank)
    return replace(found, holders=_holders(parts_by_rank, at, found, outlying_receivers))


def _holders(held: Sequence[Sequence[Part]], at: Sequence[int], found: Difference,
             outlying_receivers: int) -> tuple[int, ...]:
    """Return the ranks whose state is right, if that of the others was lost in a transfer.

    The eldest are the workers that have held their state for the longest time.

    | majority | who differs from it | then |
    |---|---|---|
    | with one of the eldest | anybody | who differs leaves |
    | with one of the eldest | two receivers with the same bits, or a second one | lost |
    | of receivers alone | the eldest | lost |
    | none | receivers from the eldest, who agree | lost |
    | none | the eldest from each other | the run goes back to a checkpoint |
    """
    eldest = [rank for rank, when in enumerate(at) if when == min(at)]
    if len(eldest) == len(at):
        return ()
    if not found.majority:
        are_one = all(list(held[rank]) == list(held[eldest[0]]) for rank in eldest)
        return tuple(eldest) if are_one else ()
    right = tuple(rank for rank in eldest if rank in found.majority)
    if not right:
        return tuple(eldest)
    outliers = [tuple(held[rank]) for rank in found.outliers if at[rank] > min(at)]
    return right if len(set(outliers)) < len(outliers) or (outliers and outlying_receivers) else ()


def _by_majority(parts_by_rank: Sequence[Sequence[Part]]) -> Difference:
    held = [tuple((name, value) for name, value in parts) for parts in parts_by_rank]
    common, count = Counter(held).most_common(1)[0]
    has_majority = 2 * count > len(held)
    majority = tuple(rank for rank, parts in enumerate(held) if has_majority and parts == common)
    outliers = tuple(rank for rank in range(len(held)) if rank not in majority)
    names = dict.fromkeys(name for parts in held
                          for name, value in sorted(set(parts) ^ set(common)))
    return Difference(majority, outliers, tuple(names))


def fingerprint(value: Any) -> int:
    """Return a checksum of tensors, numbers and texts in any containers. It is never 0."""
    held: list[Held] = [("", value, 0, 1, 1)]
    return Copied(held).parts(held)[0][1] or 1


class Copied:
    """What checksums need of tensors, on its way to the host: one copy from each device.

    The values are walked through twice: first each tensor is reduced on its device, then the
    checksums are computed on the host.
    """

    def __init__(self, held: Sequence[Held]):
        self._pieces: list[torch.Tensor] = []
        for _, value, low, high, count in held:
            _folded(value, low, high, count, self._reduce)
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for piece in self._pieces:
            by_device.setdefault(piece.device, []).append(piece)
        self._copies = {device: HostCopy(torch.cat(pieces))
                        for device, pieces in by_device.items()}

    def _reduce(self, flat: torch.Tensor, before: int) -> int:
        self._pieces += _reduced(flat)
        return before

    def parts(self, held: Sequence[Held]) -> list[Part]:
        """Return the checksums. On a GPU this waits for the device."""
        data = {device: copy.read().numpy().data for device, copy in self._copies.items()}
        at, pieces = dict.fromkeys(data, 0), iter(self._pieces)

        def summed(flat: torch.Tensor, before: int) -> int:
            for piece in (next(pieces), next(pieces)):
                start = at[piece.device]
                at[piece.device] = stop = start + piece.numel()
                before = zlib.crc32(data[piece.device][start:stop], before)
            return before

        return [(name, _folded(value, low, high, count, summed))
                for name, value, low, high, count in held]


def _folded(value: Any, low: int, high: int, count: int, summed: Summed, before: int = 0) -> int:
    """Return a checksum of a value; of a tensor, the share that belongs to the elements [low, high)
    of `count`."""
    if isinstance(value, torch.Tensor) and (inner := inner_tensors(value)):
        return _folded(inner, 0, 1, 1, summed, before)
    if isinstance(value, numpy.ma.MaskedArray):
        value = [value.data, numpy.ma.getmaskarray(value)]
    if (isinstance(value, torch.Tensor) and value.layout == torch.strided
            and value.device.type != "meta"):
        size = value.numel()
        facts = f"{value.dtype}{size}".encode()
        return summed(_elements(value.detach(), size * low // count, size * high // count),
                      zlib.crc32(facts, before)) if count else before
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            before = _folded(value[key], low, high, count, summed,
                             zlib.crc32(str(key).encode(), before))
        return before
    if isinstance(value, (list, tuple, set, frozenset)):
        is_set = isinstance(value, (set, frozenset))  # its order is another one in each process
        for item in sorted(value, key=str) if is_set else value:
            before = _folded(item, low, high, count, summed, zlib.crc32(b",", before))
        return before
    if form := form_of(value):
        return _folded([form.kind, form.main, form.more], low, high, count, summed, before)
    is_plain = type(value) in SCALARS
    # A repr may be an address.
    return zlib.crc32((repr(value) if is_plain else type(value).__name__).encode(), before)


def _elements(tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Return the elements [low, high), flat, in the order of a contiguous tensor.

    Of a tensor that is not contiguous only their rows are copied.
    """
    if tensor.is_contiguous() or tensor.dim() == 0:
        return tensor.reshape(-1)[low:high]
    while tensor.shape[0] == 1:
        tensor = tensor[0]
    row = max(1, tensor.numel() // max(1, tensor.shape[0]))
    first = low // row
    return tensor[first : -(-high // row)].reshape(-1)[low - first * row : high - first * row]


def _reduced(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the checksum of a flat tensor's bytes is computed from, as bytes on its device:
    the sums of its whole blocks, and the rest."""
    data = flat_bytes(plain_tensor(flat))
    whole = data.numel() // BLOCK_BYTES * BLOCK_BYTES
    blocks = data[:whole]
    if whole and (blocks.storage_offset() % 8 or blocks.data_ptr() % 8):
        blocks = blocks.clone()  # the sums must not depend on where the bytes lie
    sums = blocks.view(torch.int64).view(-1, BLOCK_BYTES // 8).sum(1) if whole else blocks
    return sums.view(torch.uint8), data[whole:]

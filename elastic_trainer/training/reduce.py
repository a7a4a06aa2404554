"""Gradients of all shards become one: in flat buffers, in place, with the same bits for every world
or as fast as can be.

forward/backward of my shards → here → vote → apply

Two reducers behind one interface (`begin`, `shard`, `lay_out`, `send`, `finish`):
- `exact`: sums in the order of a fixed binary tree over the shards. Each worker adds the aligned
  subtrees that it owns; an alltoall sends everyone its slice of everybody's subtree sums; each
  finishes the tree for its slice; an allgather returns the result. Floating-point addition is
  commutative, so a tree fixes every bit.
- `ring`: float allreduce, started bucket by bucket during the last shard's backward pass.

A flat buffer: | shards run | to be trained | loss | changes of buffers | used | tally | gradients … |
               |---------------- known before the backward pass -----------|

What always holds:
1. `.grad` of every trained parameter is a view of a flat buffer (autograd adds into it in place),
   so nothing is copied before the network. The gradients of 16-bit parameters are summed in 32 bits
   and copied.
2. In front of the gradients in the same buffer lie the loss and what the forward passes changed in
   the model's buffers (BatchNorm): the weighted mean over shards of (after - before). They follow
   the same rule as the gradients.
3. Weights of shards are shard / batch, so the result is the gradient of the mean over the global
   batch.
4. The gradient of a shard is what plain PyTorch leaves in `.grad` for that shard alone. Where the
   user's code writes to `.grad` (`zero_grad()`, a backward pass of its own, a hook), the views
   cannot hold it: then `Flat.isolates` is set, each shard starts with `.grad = None`, and what it
   leaves is added to the sums. Both ways give the same bits, so workers need not agree on one.
5. There also lie three kinds of counts: the shards that were run, and for each parameter of the
   model the shards in which it was to be trained and in which it got a gradient. They say whether
   all shards trained the same parameters, and which parameters no shard used: `.grad` of those is
   None for the optimizer. What is known before the backward pass has the same length on all
   workers, so `ring` learns from it whether the gradients' lengths are the same.

How a write to `.grad` is seen: each view has a version counter of its own (`.data`), which every
operation in place increments. One backward pass adds once to a gradient; more is a hook, or
reentrant checkpointing.

Why not fixed point: it would need an exponent agreed before the first shard is done, so a second
pass or the last step's; the tree costs the same bytes as a ring for one subtree per worker and
keeps float32's own precision.

What it does not do: sparse gradients (they are added densely); float64 buffers keep float32's
precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from elastic_trainer.schedule import aligned_subtrees, owned_shards
from elastic_trainer.training.supported import parameters_stay
from elastic_trainer.training.tally import COUNT, Tally, read

BUCKET_BYTES = 1 << 20
"""How much of the gradient `ring` sends at once. Small enough to start early, large enough for the
network."""
MARK = 1e30
"""A buffer's value of this size, or the largest of its type, is no quantity but a mark."""
MOST_CHANGE = 2.0**22
"""A whole number changes by at most so much in a step: the mean over shards is then exact when it
is rounded."""
ALIGNED = 16
"""The first gradient begins at a multiple of so many elements: at a cache line, as the buffer
does."""
PAD = 4096
"""Room behind each flat buffer, so that it can be cut into equal slices for any world of up to this
size."""


class GradientsWritten(Exception):
    """The user's code has written to `.grad` of flat buffers that other shards share. Run the step
    isolated."""


class ParametersWritten(RuntimeError):
    """The user's code has changed parameters while a shard was computed."""


class SetsDiffer(Exception):
    """Shards of one step trained different parameters. Raised on all workers alike."""


class Collectives(Protocol):
    """What a reducer needs of the world."""

    rank: int
    size: int

    def allreduce_start(self, tensor: torch.Tensor, name: str) -> Any: ...
    def wait(self, handle: Any) -> torch.Tensor: ...
    def exchange_start(self, tensor: torch.Tensor, splits: list[int], name: str) -> Any: ...
    def exchanged(self, handle: Any) -> tuple[torch.Tensor, list[int]]: ...
    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor: ...


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Sums(dict[torch.dtype, torch.Tensor]):
    """A set of flat buffers by type, and the gradients in them: views, one for each trained
    parameter."""

    gradients: list[torch.Tensor]


class Flat:
    """The flat buffers: one per sum type. Counts and statistics (float32 only), then gradients."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter],
                 buffers: dict[str, torch.Tensor], device: torch.device):
        self.names, self.everyone = list(parameters), list(parameters.values())
        self.device = device
        self._before: dict[str, torch.Tensor] | None = None
        self._marks: set[str] = set()
        self.isolates = False
        """Each shard has gradients of its own, which are added to the sums (rule 4)."""
        self.tally = Tally()
        self.shards_run = 0
        """Shards of the step in flight whose gradients are in the sums of this worker."""
        self.lay_out([p.requires_grad for p in self.everyone], buffers)

    def lay_out(self,
                trained: Sequence[bool],
                buffers: dict[str, torch.Tensor] | None = None) -> None:
        """Make the flat buffers anew, for these parameters of the model (and for these buffers).
        All are zero."""
        if buffers is not None:
            self.buffer_names = list(buffers)
            self._buffer_elements = sum(_real(b).numel() for b in buffers.values())
            is_whole = [
                torch.full((_real(b).numel(), ),
                           not (b.is_floating_point() or b.is_complex() or b.dtype == torch.bool))
                for b in buffers.values()
            ]
            self._whole = 1 + torch.cat(is_whole).nonzero().flatten().to(
                self.device) if is_whole else torch.empty(0)
            """Where the statistics hold changes of whole numbers."""
        self.trained = list(trained)
        self.members = [number for number, is_trained in enumerate(trained) if is_trained]
        self.parameters = [self.everyone[number] for number in self.members]
        self.places: list[tuple[torch.dtype, int, int]] = []
        self.statistics_start = 1 + len(self.everyone)
        self.early_stop = self.statistics_start + 1 + self._buffer_elements
        self.tally_start = self.early_stop + len(self.everyone)
        self.head_stop = self.tally_start + self.tally.size
        # Each type that any parameter has, trained or not: all workers then take part in the same
        # collectives
        lengths = {_sum_dtype(p.dtype): ALIGNED for p in self.everyone}
        lengths[torch.float32] = -(-self.head_stop // ALIGNED) * ALIGNED
        for parameter in self.parameters:
            dtype = _sum_dtype(parameter.dtype)
            start = lengths[dtype]
            self.places.append((dtype, start, start + parameter.numel()))
            lengths[dtype] = start + parameter.numel()
        self.lengths = lengths
        self.narrow = [
            p.dtype != dtype for p, (dtype, _, _) in zip(self.parameters, self.places, strict=True)
        ]
        """Which of the trained parameters have fewer bits than their sum: `.grad` is no view of it
        then."""
        self._without_view = [p for p, is_trained in zip(self.everyone, trained, strict=True)
                              if not is_trained or p.dtype != _sum_dtype(p.dtype)]
        if not self.isolates:
            for parameter in self.everyone:
                parameter.grad = None
        self._counted = [0] * len(self.members)
        self._one_run = torch.tensor([1.0, *map(float, trained)], device=self.device)
        """What a shard adds to the counts before its backward pass."""
        self._used_in_one: tuple[list[int], torch.Tensor] | None = None
        self.strides = [_stride(parameter) for parameter in self.parameters]
        self.sums = self.new_sums()

    def trained_now(self) -> list[bool]:
        """Return which parameters of the model require a gradient at this moment."""
        return [p.requires_grad for p in self.everyone]

    def new_sums(self) -> Sums:
        """Return a zeroed set of flat buffers, with room behind for equal slices."""
        sums = Sums(
            {d: torch.zeros(n + PAD, dtype=d, device=self.device)
             for d, n in self.lengths.items()})
        # A version counter of its own.
        sums.gradients = [sums[dtype][start:stop].as_strided(parameter.shape, stride).data
                          for parameter, stride, (dtype, start, stop)
                          in zip(self.parameters, self.strides, self.places, strict=True)]
        return sums

    def bind(self, sums: Sums) -> None:
        """Make autograd add into these buffers from now on."""
        self.sums = sums
        if not self.isolates:
            for parameter, gradient in zip(self.parameters, sums.gradients, strict=True):
                parameter.grad = gradient if parameter.dtype == gradient.dtype else None

    def hand_out(self) -> None:
        """Give each parameter its summed gradient, and None to those that no shard has used (as
        plain PyTorch does)."""
        used = self.sums[torch.float32][self.early_stop : self.tally_start].tolist()
        gradients = dict(zip(self.members, self.sums.gradients, strict=True))
        for number, parameter in enumerate(self.everyone):
            gradient = gradients[number] if used[number] else None
            if parameter.grad is not gradient:  # to set it takes longer than to look
                parameter.grad = gradient if gradient is None else gradient.to(parameter.dtype)

    # --- one shard --------------------------------------------------------------------------------

    def open_shard(self) -> None:
        """Prepare `.grad` for a shard's forward pass."""
        self._written = self._writes()
        for parameter in self.everyone if self.isolates else self._without_view:
            parameter.grad = None
        if not self.isolates:
            self._counted = [gradient._version for gradient in self.sums.gradients]

    def _writes(self) -> list[tuple[int, int]]:
        """Return what tells a write to each parameter: its version, and where it lies (cuDNN's RNNs
        move their weights)."""
        return [(p._version, p.data_ptr()) for p in self.everyone]

    def check_parameters(self) -> None:
        """Raise ParametersWritten if somebody has changed a parameter in place since the shard was
        opened.

        A write to `.data` is not seen: no version counts it. The warm-up compares the values.
        """
        if (now := self._writes()) != self._written:
            changed = [
                name
                for name, (was, at), (version,
                                      place) in zip(self.names, self._written, now, strict=True)
                if version != was and place == at
            ]
            if changed:
                raise ParametersWritten(parameters_stay(changed))

    def check_untouched(self) -> None:
        """Raise GradientsWritten if somebody has written to `.grad` since the shard was opened."""
        if not self.isolates and (any(self._additions()) or any(p.grad is not None
                                                                for p in self._without_view)):
            raise GradientsWritten

    def _additions(self) -> list[int]:
        """Count how often each gradient was written to since the shard was opened; -1: another
        tensor is in its place."""
        return [int(parameter.grad is not None) if is_narrow
                else gradient._version - counted if parameter.grad is gradient else -1
                for parameter, gradient, counted, is_narrow in zip(
                    self.parameters, self.sums.gradients, self._counted, self.narrow, strict=True)]

    def weigh_rest(self, weight: float) -> None:
        """Give what the user's own backward passes have left in `.grad` the shard's weight, as the
        loss has it."""
        for parameter in self.parameters if self.isolates and weight != 1 else ():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach() * weight

    def close_shard(self) -> None:
        """Count a shard whose backward pass is done. Raises GradientsWritten if that pass wrote
        more than one sum."""
        self.check_parameters()
        if self.isolates:
            used = self._add_isolated(self.sums.gradients)
        else:
            used = self._additions()
            if not all(0 <= additions <= 1 for additions in used):
                raise GradientsWritten
            if any(self.narrow):
                self._add_isolated([
                    gradient if is_narrow else None
                    for gradient, is_narrow in zip(self.sums.gradients, self.narrow, strict=True)
                ])
        self.sums[torch.float32][self.early_stop : self.tally_start].add_(self._counts_where(used))
        self.shards_run += 1

    def _counts_where(self, used: list[int]) -> torch.Tensor:
        """Return what a shard adds to the counts; it is kept, since shards mostly use the same
        parameters."""
        if self._used_in_one is None or self._used_in_one[0] != used:
            counts = [0.0] * len(self.everyone)
            for number, is_used in zip(self.members, used, strict=True):
                counts[number] = float(is_used)
            self._used_in_one = (used, torch.tensor(counts, device=self.device))
        return self._used_in_one[1]

    def _add_isolated(self, sums: Sequence[torch.Tensor | None]) -> list[int]:
        """Add each `.grad` to its sum, where one is given, and drop it; returns which parameters
        had a gradient."""
        found, used = list[tuple[torch.Tensor, torch.Tensor]](), []
        for parameter, total in zip(self.parameters, sums, strict=True):
            used.append(int(parameter.grad is not None))
            if total is not None and parameter.grad is not None:
                found.append((total, parameter.grad.detach()))
                parameter.grad = None
        for total, gradient in found:
            total.add_(gradient)
        return used

    # --- what the counts say ----------------------------------------------------------------------

    def agreed(self, head: torch.Tensor) -> list[bool]:
        """Return which parameters all shards of the step were to train. Raises SetsDiffer if it was
        not one set."""
        run, *counts = head[: self.statistics_start].tolist()
        if any(count not in (0.0, run) for count in counts):
            raise SetsDiffer
        return [count > 0 for count in counts]

    def adopt(self, trained: list[bool]) -> None:
        """Train what the others train: this worker has run no shard of the step, in which its loss
        might have said so."""
        for parameter, is_trained in zip(self.everyone, trained, strict=True):
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)

    # --- the loss and the model's buffers ---------------------------------------------------------

    @property
    def statistics(self) -> torch.Tensor:
        """The loss (1) and the changes of the buffers (their elements, in order), as a view."""
        return self.sums[torch.float32][self.statistics_start : self.early_stop]

    def add_statistics(self, weight: float, loss: torch.Tensor, before: dict[str, torch.Tensor],
                       after: dict[str, torch.Tensor], *, is_sum: bool = False) -> None:
        """Count one shard, and add its loss and its changes of the buffers, weighted: all that is
        known before its backward pass. A loss that `is_sum` gets no weight."""
        self.sums[torch.float32][: self.statistics_start].add_(self._one_run)
        statistics, marked = self.statistics, self.find_marks(before)
        statistics[0] += loss.detach().reshape(
            ()).to(statistics.device, torch.float32) * (1.0 if is_sum else weight)
        at = 1
        for name in self.buffer_names:
            was, now = _real(before[name]), _real(after[name])
            count = now.numel()
            # where nothing changed the change is 0
            change = torch.where(now == was, 0, now - was) if now.dtype != torch.bool else now
            # No difference to "none yet" has a digit of the value (inf: it is NaN)
            if name in marked:
                change = torch.where(_is_mark(was), now, change)
            # multiplied first: add_(alpha=) may round once instead of twice, and then a sum in one
            # buffer has other bits than the sum of two
            statistics[at : at + count].add_(change.reshape(-1).to(torch.float32) * weight)
            at += count

    def find_marks(self, before: dict[str, torch.Tensor]) -> set[str]:
        """Return the buffers that hold a mark at the step's begin. A GPU is waited for, so it is
        called while idle."""
        if before is not self._before:
            found = {name: values for name in self.buffer_names
                     if (values := _real(before[name])).is_floating_point() and values.numel()}
            largest = torch._foreach_norm(list(found.values()), float("inf")) if found else ()
            are_quantities = [one.float() < _mark(one.dtype) for one in largest]  # NaN is none
            told = torch.stack(are_quantities).tolist() if are_quantities else []
            self._marks = {
                name
                for name, is_quantity in zip(found, told, strict=True) if not is_quantity
            }
            self._before = before
        return self._marks

    def has_lost_digits(self) -> bool:
        """True if a buffer of whole numbers has changed by more than 32-bit sums hold exactly."""
        return bool(self._whole.numel()) and float(
            self.statistics[self._whole].abs().max()) > MOST_CHANGE

    def mean_loss(self) -> float:
        """Return the reduced loss of the step. On a GPU this waits for the device."""
        return float(self.statistics[0]) / (self.counted() or 1.0)

    # --- what was counted and logged --------------------------------------------------------------

    def add_tally(self, sums: Sums) -> None:
        """Add what this worker's shards have counted and logged to the sums that it sends."""
        if self.tally.size:
            elements = torch.tensor(self.tally.elements(), device=self.device)
            sums[torch.float32][self.tally_start : self.head_stop].add_(elements)

    def told(self) -> dict[str, tuple[float, float]]:
        """Return what all shards of the step have counted and logged, by name: total and weight."""
        if not self.tally.size:
            return {}
        return read(self.tally.names,
                    self.sums[torch.float32][self.tally_start:self.head_stop].tolist())

    def counted(self) -> float:
        """Return the total of what the shards have counted; 0.0: the losses are means over
        samples."""
        return self.told().get(COUNT, (0.0, 0.0))[0]

    def divide(self) -> None:
        """Make the sum of the gradients their mean over what was counted."""
        if total := self.counted():
            for gradient in self.sums.gradients:
                gradient.div_(total)

    def apply_statistics(self, before: dict[str, torch.Tensor],
                         buffers: dict[str, torch.Tensor]) -> float:
        """Set the buffers to (before + mean change) and return the mean loss."""
        statistics, marked, at = self.statistics, self.find_marks(before), 1
        for name in self.buffer_names:
            buffer, was = _real(buffers[name]), _real(before[name])
            change = statistics[at : at + buffer.numel()].view(buffer.shape)
            if buffer.is_floating_point():
                now = torch.where(change == 0, was, was + change.to(buffer.dtype))
                buffer.copy_(_with_marks(was, change, now) if name in marked else now)
            elif buffer.dtype == torch.bool:
                buffer.copy_(change > 0.5)
            else:
                buffer.copy_(was + change.round().to(buffer.dtype))
            at += buffer.numel()
        return self.mean_loss()  # on a GPU this line waits for the device


def _stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter's gradient: its own where they leave no gaps, as autograd
    has it.

    The fused optimizers of torch 2.13 on the CPU read both as if they had the same strides.
    """
    return torch.empty_like(parameter, device="meta").stride()


def _mark(dtype: torch.dtype) -> float:
    """Return from which size on a buffer's value of this type says "none yet", as an infinite
    minimum does."""
    return min(MARK, torch.finfo(dtype).max)


def _is_mark(values: torch.Tensor) -> torch.Tensor:
    """Say which values are marks: those that are not finite, or so large."""
    return ~(values.abs() < _mark(values.dtype))


def _with_marks(was: torch.Tensor, change: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Return a buffer's new values: where it had a mark, the sum over the shards is the mean
    itself."""
    # The mean of marks is the mark, whatever was rounded; the sign tells inf from -inf
    stays = (change.abs() >= 0.999 * was.abs().to(change.dtype)) & (change.sign() == was.sign())
    return torch.where(_is_mark(was), torch.where(stays, was, change.to(was.dtype)), now)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without imaginary numbers: a view with one dimension more, if it has any."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


class ExactReducer:
    """Sums in the order of a fixed tree: the same bits for every world size and every history."""

    name = "exact"

    def __init__(self, flat: Flat, shards: int):
        self.flat, self.shards = flat, shards
        self._spare: list[Sums] = []
        self._stack: list[tuple[int, int, Sums]] = []
        self._leaf_open = False
        self._sent: dict[torch.dtype, Any] = {}

    def begin(self, world: Collectives) -> range:
        """Start a step; returns the shards that this worker runs, in order."""
        self._spare += [sums for _, _, sums in self._stack]
        self._stack = []
        self.flat.shards_run = 0
        mine = owned_shards(world.rank, world.size, self.shards)
        self._trees = aligned_subtrees(mine, self.shards)
        self._open()
        return mine

    def lay_out(self,
                trained: Sequence[bool],
                buffers: dict[str, torch.Tensor] | None = None) -> None:
        """Train another set of parameters from this shard on, the first one of the step that is
        run."""
        assert self.flat.shards_run == 0
        self._spare, self._leaf_open = [], False
        self.flat.lay_out(trained, buffers)
        # Of shards without samples.
        self._stack = [(low, high, self.flat.new_sums()) for low, high, _ in self._stack]
        self._open()

    def has_sent(self) -> bool:
        """True if other workers hold a part of this step already."""
        return False

    def mine(self) -> Sums:
        """Return sums that go into this worker's part of the step, after its last shard."""
        return self._stack[-1][2]

    def _open(self) -> None:
        """Bind a zeroed set of buffers for the next leaf (or pair of leaves)."""
        if self._leaf_open:
            sums = self.flat.sums
        else:
            sums = self._spare.pop() if self._spare else self.flat.new_sums()
        for tensor in sums.values():
            tensor.zero_()
        self.flat.bind(sums)
        self._leaf_open = True

    def shard(self, shard: int, is_last: bool) -> Callable[[], None]:
        """Announce the next shard; call the result after its backward pass."""

        def done() -> None:
            low, high = shard, shard + 1
            if shard % 2 == 0 and not is_last and self._holds(low, low + 2):
                # Its sibling adds into the same buffer: autograd's own addition is the tree's.
                return
            if shard % 2 == 1 and self._holds(low - 1, high):
                low -= 1
            self._stack.append((low, high, self.flat.sums))
            self._leaf_open = False
            self._merge()
            if not is_last:
                self._open()

        return done

    def _holds(self, low: int, high: int) -> bool:
        """True if [low, high) lies within one subtree that this worker owns."""
        return any(tree.start <= low and high <= tree.stop for tree in self._trees)

    def _merge(self) -> None:
        """Add siblings on top of the stack, as a binary counter carries."""
        while len(self._stack) >= 2:
            (low, middle, left), (start, high, right) = self._stack[-2:]
            span = self._span(low, middle)
            is_sibling = middle == start and low % (2 * span) == 0 and high == min(
                low + 2 * span, self.shards)
            if not is_sibling or not self._holds(low, high):
                return
            for dtype, tensor in left.items():
                tensor.add_(right[dtype])
            self._stack[-2:] = [(low, high, left)]
            self._spare.append(right)

    @staticmethod
    def _span(low: int, high: int) -> int:
        """The width of the smallest node of the tree that starts at low and covers [low, high)."""
        span = 1
        while low + span < high:
            span *= 2
        return span

    def send(self, world: Collectives) -> None:
        """Give everybody its slice of this worker's subtree sums, without waiting for theirs."""
        # No shard of the batch is mine: nothing to give, but I take part.
        if self._leaf_open and not self._stack:
            self._spare.append(self.flat.sums)
            self._leaf_open = False
        assert [(low, high) for low, high, _ in self._stack] == [(t.start, t.stop)
                                                                 for t in self._trees]
        self._sent = {dtype: self._send(world, dtype)
                      for dtype in self.flat.lengths} if world.size > 1 else {}

    def finish(self, world: Collectives) -> None:
        """Finish the tree; afterwards the reduced gradient is in `flat.sums` on every worker.

        Raises SetsDiffer, on all workers alike, when their shards trained different parameters.
        """
        flat = self.flat
        if world.size == 1:
            result = self._stack[0][2]
            flat.agreed(result[torch.float32])
        else:
            found = {
                dtype: self._exchanged(world, dtype, handle)
                for dtype, handle in self._sent.items()
            }
            self._sent = {}
            self._spare += [sums for _, _, sums in self._stack]
            self._stack = []
            wholes = {dtype: whole for dtype, whole in found.items() if whole is not None}
            if len(wholes) < len(found):
                raise SetsDiffer
            if not len(wholes[torch.float32]):
                return  # nobody has run a shard: the vote says why
            trained = flat.agreed(wholes[torch.float32])
            if trained != flat.trained:  # only where no shard was run
                flat.adopt(trained)
                flat.lay_out(trained)
                self._spare = []
            result = self._spare.pop() if self._spare else flat.new_sums()
            for dtype, whole in wholes.items():
                result[dtype][: flat.lengths[dtype]].copy_(whole[: flat.lengths[dtype]])
        self._stack = []
        flat.bind(result)
        self._leaf_open = True

    def _send(self, world: Collectives, dtype: torch.dtype) -> Any:
        """Start to send the sums of my subtrees. A worker that has run no shard gives nothing."""
        slice_ = -(-self.flat.lengths[dtype] // world.size)
        mine = [sums[dtype][:slice_ * world.size]
                for _, _, sums in self._stack] if self.flat.shards_run else []
        if len(mine) == 1:
            outgoing = mine[0]
        elif mine:  # one copy: slices must lie behind one another for each receiver
            outgoing = torch.stack(mine).view(len(mine), world.size,
                                              slice_).transpose(0, 1).reshape(-1)
        else:
            outgoing = torch.empty(0, dtype=dtype, device=self.flat.device)
        return world.exchange_start(outgoing, [len(mine) * slice_] * world.size,
                                    f"exact.slices.{_suffix(dtype)}")

    def _exchanged(self, world: Collectives, dtype: torch.dtype,
                   handle: Any) -> torch.Tensor | None:
        """Return the sum over all shards; None on all workers if their buffers do not have the same
        length.

        A worker that has run no shard takes the length from what it gets.
        """
        incoming, counts = world.exchanged(handle)  # network
        pieces: dict[tuple[int, int], torch.Tensor] = {}
        at = 0
        for rank, count in enumerate(counts):
            trees = aligned_subtrees(owned_shards(rank, world.size, self.shards),
                                     self.shards) if count else []
            for tree in trees:
                pieces[tree.start, tree.stop] = incoming[at : at + count // len(trees)]
                at += count // len(trees)
        are_equal = len({piece.numel() for piece in pieces.values()}) <= 1
        total = tree_sum(pieces, self.shards) if pieces and are_equal else incoming[:0]
        whole = world.allgather(total, f"exact.result.{_suffix(dtype)}")  # network
        # Two workers with shards that differ: each worker sees both lengths.
        return whole if are_equal else None


def _suffix(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tree_sum(pieces: dict[tuple[int, int], torch.Tensor], shards: int) -> torch.Tensor:
    """Add the sums of subtrees, given by their ranges of shards, up to the root of the fixed tree.
    Changes them."""
    span = 1
    while span < shards:
        span *= 2
    total = _node_sum(pieces, shards, 0, span)
    assert total is not None
    return total


def _node_sum(pieces: dict[tuple[int, int], torch.Tensor], shards: int, low: int,
              span: int) -> torch.Tensor | None:
    """Not a function within the other: that is a cycle, and kept each step's pieces (a gradient)
    until the next gc."""
    found = pieces.get((low, min(low + span, shards)))
    if found is not None:
        return found
    if span == 1:
        # Its worker has run no shard: to add nothing gives the bits that to add its zeros would.
        return None
    half = span // 2
    left = _node_sum(pieces, shards, low, half)
    right = _node_sum(pieces, shards, low + half, half) if low + half < shards else None
    return left.add_(
        right) if left is not None and right is not None else right if left is None else left


class RingReducer:
    """Float allreduce in place, overlapped with the last shard's backward pass. The bits depend on
    the world size."""

    name = "ring"

    def __init__(self, flat: Flat, shards: int, *, compress: bool = False):
        self.flat, self.shards, self.compress = flat, shards, compress
        self._started: dict[int, Any] = {}
        self._world: Collectives | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._plan()

    def _plan(self) -> None:
        """Cut the buffers as they are now, and hear of each gradient that is complete."""
        self.flat.bind(self.flat.sums)
        self.buckets = self._cut()
        self._bucket_of = {p: b for b, members in enumerate(self.buckets) for p in members[3]}
        self._missing = [0] * len(self.buckets)
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                lambda _, number=number: self._ready(number))
            for number, parameter in enumerate(self.flat.parameters)
        ]

    def _cut(self) -> list[tuple[torch.dtype, int, int, list[int]]]:
        """Cut the buffers into buckets (type, start, stop, parameters): what is known before the
        backward pass, then the gradients, those of the last parameters first.

        The counts of the parameters used, which are complete last, go with the last gradients: a
        bucket of their own would cost a cycle of Horovod's (0.8 ms, measured).
        """
        flat = self.flat
        buckets: list[tuple[torch.dtype, int, int,
                            list[int]]] = [(torch.float32, 0, flat.early_stop, [])]
        for number in reversed(range(len(self.flat.parameters))):
            dtype, start, stop = self.flat.places[number]
            last_dtype, low, high, members = buckets[-1]
            if last_dtype == dtype and stop == low and (high - start) * 4 <= BUCKET_BYTES:
                buckets[-1] = (dtype, start, high, [*members, number])
            else:
                buckets.append((dtype, start, stop, [number]))
        last_dtype, low, high, members = buckets[-1]
        if members and last_dtype == torch.float32 and low - flat.head_stop < ALIGNED and not self.compress:
            return [*buckets[:-1], (torch.float32, flat.early_stop, high, members)]
        return [*buckets, (torch.float32, flat.early_stop, flat.head_stop, [])]

    def _count_missing(self) -> list[int]:
        """Return of how many gradients each bucket has to hear. The last one waits for the counts
        too."""
        return [len(members) + (bucket == len(self.buckets) - 1)
                for bucket, (_, _, _, members) in enumerate(self.buckets)]

    def begin(self, world: Collectives) -> range:
        """Start a step; returns the shards that this worker runs, in order."""
        for tensor in self.flat.sums.values():
            tensor.zero_()
        self.flat.bind(self.flat.sums)
        self.flat.shards_run = 0
        self._world, self._started = None, {}
        return owned_shards(world.rank, world.size, self.shards)

    def lay_out(self,
                trained: Sequence[bool],
                buffers: dict[str, torch.Tensor] | None = None) -> None:
        """Train another set of parameters from this shard on, the first one of the step that is
        run."""
        assert self.flat.shards_run == 0
        self.flat.lay_out(trained, buffers)
        self._plan()
        self._missing = self._count_missing()

    def has_sent(self) -> bool:
        """True if other workers hold a part of this step already."""
        return bool(self._started)

    def mine(self) -> Sums:
        """Return the sums of this worker's part of the step."""
        return self.flat.sums

    def shard(self, shard: int, is_last: bool) -> Callable[[], None]:
        """Announce the next shard; call the result after its backward pass."""
        if is_last:
            self._missing = self._count_missing()
        return lambda: None

    def overlap(self, world: Collectives) -> None:
        """Let the backward pass that comes next start the network as its buckets fill."""
        self._world = None if self.flat.isolates or any(self.flat.narrow) else world

    def _ready(self, number: int) -> None:
        if self._world is None or self._world.size == 1:
            return
        bucket = self._bucket_of[number]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            if 0 not in self._started:
                # Known since the loss was; with this one it costs no cycle of its own.
                self._start(0, self._world)
            # The order in which buckets fill is the same on all workers as long as the graphs are;
            # Horovod's negotiation copes with any order.
            self._start(bucket, self._world)

    def _start(self, bucket: int, world: Collectives) -> None:
        dtype, start, stop, members = self.buckets[bucket]
        piece = self.flat.sums[dtype][start:stop]
        # The others keep their 32 bits.
        outgoing = piece.to(torch.float16) if self.compress and members else piece
        self._started[bucket] = (world.allreduce_start(outgoing, f"ring.{bucket}"), outgoing, piece)

    def send(self, world: Collectives) -> None:
        """Start the buckets that are not on their way: unused parameters, the counts."""
        self._world = None
        if world.size == 1:
            return
        is_idle = not self.flat.shards_run and not self._started
        for bucket in range(1 if is_idle else len(self.buckets)):
            if bucket not in self._started:
                self._start(bucket, world)

    def finish(self, world: Collectives) -> None:
        """Wait for the sums; afterwards the reduced gradient is in `flat.sums` on every worker.

        Raises SetsDiffer, on all workers alike, when their shards trained different parameters.
        """
        if world.size == 1:
            self.flat.agreed(self.flat.sums[torch.float32])
            return
        # The first bucket's length is the same everywhere, and it says whether the others' is
        handle, _, early = self._started.pop(0)
        world.wait(handle)
        trained = self.flat.agreed(early)
        if not early[0]:
            return  # nobody has run a shard: the vote says why
        if not self._started:
            self._follow(trained, early)
            for bucket in range(1, len(self.buckets)):
                self._start(bucket, world)
        for handle, outgoing, piece in self._started.values():
            world.wait(handle)
            if outgoing is not piece:
                piece.copy_(outgoing)
        self._started = {}

    def _follow(self, trained: list[bool], early: torch.Tensor) -> None:
        """Have buffers for what the others train: this worker has run no shard, and gives zeros."""
        if trained != self.flat.trained:
            self.flat.adopt(trained)
            self.lay_out(trained)
            self.flat.sums[torch.float32][: self.flat.early_stop].copy_(early)


Reducer = ExactReducer | RingReducer

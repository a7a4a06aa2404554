"""What a step does to the model's buffers that its micro-batches have changed (BatchNorm), and the
loss.

model, option `buffers` → BufferRules → Statistics (the rule "mean": sums in front of the gradients,
with the loss) and BufferValues (the others: one allgather of all values) → the model's buffers

What always holds:
1. Each micro-batch begins with the buffers of the step's begin. In a step of one micro-batch a
   buffer takes the value that this one has left, as in plain PyTorch, whatever its rule is.
2. Running statistics of torch's own modules (BatchNorm, InstanceNorm, SyncBatchNorm, observers of
   quantization, and classes derived from them) have the rule "mean". The vectors of spectral_norm
   follow from the weight alone, so all micro-batches leave the same: "last". Any other buffer that
   changes has the rule of the option `buffers`, or it is an error that names it.
3. "mean" adds to the buffers of the step's begin the weighted mean over micro-batches of (after -
   before). A buffer of whole numbers is rounded, and one of truth values takes the value of more
   than half of the batch.
4. A mark (an infinite value, NaN, or one of 1e30) stands for "none yet". No difference to it has a
   digit of the value, so there the sum over the micro-batches is the mean of the values themselves.
5. Of a buffer without a rule only whether it has changed is counted.
6. Values of the other rules keep their bytes, and stand in the order of the micro-batches, so the
   result has the same bits in every world. All workers hold them before the vote, so a worker that
   rolls the step forward has them. Without such buffers this costs nothing; with them, each
   micro-batch sends each of them whole.

What it does not do: buffers of 64-bit floats keep 32 bits of their change.

Source: torch 2.13, nn/modules/batchnorm.py (`_NormBase`), ao/quantization, and in nn/utils
spectral_norm.py and parametrizations.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise, starmap
from operator import attrgetter
from typing import Any

import torch
from torch.ao.quantization import FakeQuantizeBase, ObserverBase
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.forward import ModelBuffers
from elastic_trainer.state.together import Group, groups_of
from elastic_trainer.state.values.layout import byte_view
from elastic_trainer.state.values.names import plain
from elastic_trainer.state.values.supported import some
from elastic_trainer.world.collectives import World

VERSION = attrgetter("_version")
RULES = ("mean", "sum", "last")
RUNNING = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Gather:
    fn: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]

    def __repr__(self) -> str:
        return "gather"


def gather(fn: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]) -> Gather:
    """Return the rule for a buffer whose next value a function computes: `fn(before, values)`.

    `before` is the value at the step's begin, `values` has those that the micro-batches have left,
    in their order. All workers call it in the same way, at the end of the step, under
    torch.no_grad(). The model's buffers then have the values of the step's begin.
    """
    return Gather(fn)


Rule = str | Gather


class BufferRules:
    def __init__(self, model: torch.nn.Module, given: Mapping[str, Rule] | None = None,
                 microbatches: int = 1):
        self._model, self._given, self.microbatches = model, dict(given or {}), microbatches
        self._known: dict[str, Rule | None] = {}
        """The rules of the buffers that were asked for last."""
        for name, rule in self._given.items():
            if rule not in RULES and not isinstance(rule, Gather):
                raise ConfigError(f"the rule of the buffers {name!r} is {rule!r}. Use one of "
                                  f"{RULES}, or gather(fn).")

    @property
    def settings(self) -> dict[str, str]:
        """The rules as given, as JSON values by key."""
        return {f"buffers.{name}": str(rule) for name, rule in self._given.items()}

    def of(self, names: Iterable[str]) -> dict[str, Rule | None]:
        """Return the rules of these buffers; None for one that has none."""
        if self._known.keys() != set(names := list(names)):
            of_torch = _of_torch(self._model)  # a walk through the modules
            self._known = {name: self._found(name) or of_torch.get(name) for name in names}
        return {name: self._known[name] for name in names}

    def _found(self, name: str) -> Rule | None:
        return self._given.get(name) or next(
            (rule for pattern, rule in self._given.items() if fnmatchcase(name, pattern)), None)

    def require_used(self, names: Iterable[str]) -> None:
        known = list(names)
        if bad := [pattern for pattern in self._given
                   if not any(fnmatchcase(name, pattern) for name in known)]:
            raise ConfigError(f"buffers has rules for {some(bad)}, but the model has no such "
                              f"buffers. Its buffers are {some(known) or 'none'}.")

    def refusal(self, names: Iterable[str], after: str) -> str:
        found = list(names)
        return (
            f"forward has changed the buffers {some(found)}, and a step has {self.microbatches} "
            f"micro-batches, each of which begins with the step's buffers. Say what the step ends "
            f"with: buffers={{{found[0]!r}: \"mean\"}} (the mean of their changes), \"sum\" (of "
            f"their changes), \"last\" (what the last one has left), or gather(fn), which gets all "
            f"their values in order. Or change the buffer {after}.")


def _of_torch(model: torch.nn.Module) -> dict[str, Rule]:
    """Return the rules of buffers of torch's own modules, by name."""
    found = dict[str, Rule]()
    for name, module in model.named_modules():
        start = f"{plain(name)}." if plain(name) else ""
        rule = "mean"
        if isinstance(module, _NormBase):
            own: Iterable[str] = RUNNING
        elif isinstance(module, (ObserverBase, FakeQuantizeBase)):
            own = [one for one, _ in module.named_buffers(recurse=False)]
        else:
            rule = "last"
            own = [f"{hook.name}_{vector}" for hook in module._forward_pre_hooks.values()
                   if isinstance(hook, SpectralNorm) for vector in "uv"]
            if isinstance(module, _SpectralNorm):
                own = ["_u", "_v"]
        found |= {f"{start}{one}": rule for one in own}
    return found


MARK = 1e30
"""A buffer's value from this size on, or from the largest of its type on, is a mark (rule 3)."""
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_CHANGE = 2.0**22
"""The most by which a whole number changes in a step: up to here the mean over micro-batches is
exact when it is rounded."""


class Statistics:
    """The model's buffers, and how a step changes them. `sums` holds the loss, a count for each
    buffer without a rule, then the changes of the others, those of one type together. `rules`: by
    name; None: all have the rule "mean".
    """

    def __init__(self, buffers: dict[str, torch.Tensor],
                 rules: Mapping[str, Any] | None = None):
        self._watched = Watched({name: buffers[name] for name, rule in (rules or {}).items()
                                 if rule is None})
        means = [name for name in buffers if rules is None or rules[name] == "mean"]
        reals = {name: _real(buffers[name]) for name in means}
        is_complex = {one: buffers[one].is_complex() for one in means}
        groups = [Means(group, are_complex) for are_complex in (False, True)
                  for group in groups_of(reals, [one for one in means
                                                 if is_complex[one] == are_complex])]
        self._groups = sorted(groups, key=lambda group: group.is_whole)  # those last
        self._start = 1 + len(self._watched.names)
        ends = [*accumulate((group.size for group in self._groups), initial=self._start)]
        self._places = [*starmap(slice, pairwise(ends))]
        wholes = sum(group.size for group in self._groups if group.is_whole)
        self.size = ends[-1]
        """The number of elements of the flat buffer that the statistics need."""
        self._whole = slice(self.size - wholes, self.size)
        """Where the statistics hold changes of whole numbers."""
        self._before: dict[str, torch.Tensor] | None = None

    @torch.no_grad()
    def add(self, sums: torch.Tensor, weight: float, loss: torch.Tensor,
            before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], is_sum: bool) -> None:
        """Add a micro-batch's loss, a scalar, and changes of the buffers, weighted. A loss that
        `is_sum` gets no weight."""
        loss = loss.to(sums.device, torch.float32)
        sums[:1].add_(loss if is_sum else loss * weight)
        self._begin(before)
        for group, place in zip(self._groups, self._places, strict=True):
            sums[place].add_(group.change(after, weight).to(sums.device))
        if self._watched.names:
            sums[1 : self._start].add_(self._watched.changed(after).to(sums.device))

    def _begin(self, before: dict[str, torch.Tensor]) -> None:
        """Have the values of a step's begin, those of one type together."""
        if before is not self._before:
            self._before = before
            self._watched.begin(before)
            for group in self._groups:
                group.begin(before)

    def facts(self, sums: torch.Tensor) -> list[torch.Tensor]:
        """Return what the host has to know of the statistics before a step is applied: the loss,
        the counts, and the largest change of a whole number."""
        whole = sums[self._whole]
        return [sums[: self._start], whole.abs().amax(0, keepdim=True) if whole.numel() else whole]

    def changed(self, facts: Sequence[float]) -> list[str]:
        """Return the buffers without a rule that micro-batches have changed, by `facts` as read."""
        counts = facts[1 : self._start]
        return [name for name, count in zip(self._watched.names, counts, strict=True) if count]

    def has_lost_digits(self, facts: Sequence[float]) -> bool:
        return any(change > MOST_CHANGE for change in facts[self._start :])

    def apply(self, sums: torch.Tensor, before: dict[str, torch.Tensor],
              buffers: dict[str, torch.Tensor]) -> None:
        self._begin(before)
        for group, place in zip(self._groups, self._places, strict=True):
            group.apply(sums[place], buffers)


SMALL_BYTES = 1 << 18
"""Watched buffers of up to this size are compared together, in a copy. A larger one is compared
where it lies: then the launch of a kernel counts less than a copy."""


class Watched:
    """Buffers without a rule: whether a micro-batch has changed them. A GPU is not waited for."""

    def __init__(self, buffers: dict[str, torch.Tensor]):
        sizes = {name: one.nbytes for name, one in buffers.items() if one.numel()}
        small = [name for name, size in sizes.items() if size <= SMALL_BYTES]
        self._groups, self._was = groups_of(buffers, small), list[torch.Tensor]()
        self._large = [name for name in sizes if name not in small]
        self.names = [*(name for group in self._groups for name in group.names), *self._large]
        self._before: dict[str, torch.Tensor] = {}

    def begin(self, before: dict[str, torch.Tensor]) -> None:
        self._before = before
        self._was = [self._flat(group, before) for group in self._groups]

    @staticmethod
    def _flat(group: Group, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return _bits(group.flat(tensors))

    def changed(self, after: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return 1.0 for each buffer that has other bytes than at the step's begin, else 0.0."""
        found = list[torch.Tensor]()
        for group, was in zip(self._groups, self._was, strict=True):
            differ = self._flat(group, after) != was
            if differ.dim() > 1:  # a complex number has two parts
                differ = differ.any(1)
            differ = differ.to(torch.float32)
            found += torch._foreach_norm(group.parts(differ), float("inf"))
        for name in self._large:
            was = self._before[name]
            found.append((_bits(was) != _bits(after[name])).any().to(torch.float32))
        return torch.stack([one.to(found[0].device) for one in found])


class Means:
    """Buffers of one type with the rule "mean": their changes in one operation."""

    def __init__(self, group: Group, are_complex: bool):
        self._group, self.size, self._are_complex = group, group.size, are_complex
        self.is_whole = not (group.dtype.is_floating_point or group.dtype == torch.bool)
        self._was = self._is_mark = torch.empty(0)

    def begin(self, before: dict[str, torch.Tensor]) -> None:
        self._was = self._flat(before)
        if self._was.is_floating_point():
            self._is_mark = ~(self._was.abs() < _mark(self._was.dtype))  # NaN is one

    def _flat(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._group.flat(tensors if not self._are_complex else {
            name: _real(tensors[name]) for name in self._group.names})

    def change(self, after: dict[str, torch.Tensor], weight: float) -> torch.Tensor:
        """Return the weighted change of a micro-batch, in 32 bits."""
        was, now = self._was, self._flat(after)
        if now.dtype == torch.bool:
            change = now
        elif now.is_floating_point():
            # where nothing changed the change is 0, also for inf - inf
            change = torch.where(now == was, 0, now - was)
            change = torch.where(self._is_mark, now, change)
        else:
            change = now - was
        # multiplied first: add_(alpha=) may round once instead of twice, and then a sum in one
        # buffer has other bits than the sum of two
        return change.to(torch.float32) * weight

    def apply(self, change: torch.Tensor, buffers: dict[str, torch.Tensor]) -> None:
        was, change = self._was, change.to(self._was.device)
        if was.is_floating_point():
            now = torch.where(change == 0, was, was + change.to(was.dtype))
            now = _with_marks(self._is_mark, was, change, now)
        elif was.dtype == torch.bool:
            now = change > 0.5
        else:
            now = was + change.round().to(was.dtype)
        self._group.copy_into(buffers if not self._are_complex else {
            name: _real(buffers[name]) for name in self._group.names}, now)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor's elements as whole numbers."""
    real = _real(tensor)
    return real.view(WHOLE[real.element_size()])


def _mark(dtype: torch.dtype) -> float:
    """Return from which size on a buffer's value of this type is a mark."""
    return min(MARK, torch.finfo(dtype).max)


def _with_marks(is_mark: torch.Tensor, was: torch.Tensor, change: torch.Tensor,
                now: torch.Tensor) -> torch.Tensor:
    """Return a buffer's new values: where it had a mark, the sum over the microbatches is the mean
    itself."""
    # The mean of marks is the mark, whatever was rounded; the sign tells inf from -inf.
    stays = (change.abs() >= 0.999 * was.abs().to(change.dtype)) & (change.sign() == was.sign())
    return torch.where(is_mark, torch.where(stays, was, change.to(was.dtype)), now)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of real numbers: a view with one dimension more, if it is complex."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


Values = dict[str, torch.Tensor]


class BufferValues:
    """What the micro-batches of a step have left, on this worker and then on all."""

    def __init__(self, buffers: ModelBuffers, rules: BufferRules, schedule: Schedule):
        self._buffers, self._rules, self._schedule = buffers, rules, schedule
        self._of: dict[str, Any] = {}
        """The rules by the names of the buffers that there are."""
        self._step = 0
        self._mine: list[Values] = []
        self._names: list[str] = []
        self._groups: list[Group] = []
        self._marked: list[torch.Tensor] = []
        self._versions: list[int] = []

    def begin(self, step: int) -> None:
        if self._of.keys() != self._buffers.named.keys():
            self._of = self._rules.of(self._buffers.named)
        self._step, is_single = step, self._schedule.parts(step) == 1
        self._mine, self._buffers.left = [], []
        names = [name for name, rule in self._of.items()
                 if is_single or rule not in (None, "mean")]
        if names != self._names:
            self._names, self._groups = names, groups_of(self._buffers.named, names)

    def keep(self, after: Values) -> None:
        """Keep what a micro-batch's forward pass has left."""
        if self._names:
            with torch.no_grad():
                flats = [(group, group.flat(after)) for group in self._groups]
            self._mine.append({name: part for group, flat in flats
                               for name, part in zip(group.names, group.parts(flat), strict=True)})

    def note(self) -> None:
        """Note that the backward pass of a micro-batch is over. (It may have run a part of forward
        again.)"""
        self._marked = self._buffers.held()
        self._versions = list(map(VERSION, self._marked))

    def check(self, replaced: list[tuple[str, torch.Tensor]]) -> None:
        """Raise RuntimeError if buffers were changed since the backward pass. `replaced` are the
        tensors that stand in the place of buffers now."""
        now = list(map(VERSION, self._marked))
        if not replaced and now == self._versions:
            return
        known = set(map(id, self._marked))
        bad = [name for name, tensor in replaced if id(tensor) not in known] or [
            name for name, version, was in zip(self._of, now, self._versions, strict=False)
            if version != was]
        if bad:
            raise RuntimeError(
                f"the buffer {bad[0]} was changed after step.backward(), where the step has taken "
                f"the buffers' values already. Change it before step.backward(), or after the "
                f"inner loop; a forward pass there may run in eval mode.")

    def share(self, world: World, owned: Callable[[int, int], range]) -> None:
        """Give all workers the values of all micro-batches, in their order. `owned` has those of a
        rank. Network: one allgather of them."""
        mine = self._mine
        if self._names and world.size > 1:
            before = self._buffers.before
            bytes_each = sum(before[name].nbytes for name in self._names)
            parts = [byte_view(values[name]) for values in mine for name in self._names]
            everyone = world.allgather(
                torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8), "buffers")
            mine = [self._read(everyone[at : at + bytes_each], before)
                    for at in range(0, len(everyone), max(1, bytes_each))]
            numbers = [number for rank in range(world.size) for number in owned(rank, world.size)
                       if len(self._schedule.microbatch_positions(self._step, number))]
            if len(numbers) == len(mine):  # else a worker has failed, and no step is applied
                mine = [mine[place] for place in sorted(range(len(mine)), key=numbers.__getitem__)]
        self._buffers.left = mine

    def _read(self, data: torch.Tensor, before: Values) -> Values:
        found, at = Values(), 0
        for name in self._names:
            was = before[name]
            found[name] = data[at : at + was.nbytes].clone().view(was.dtype).view(was.shape).to(
                was.device)
            at += was.nbytes
        return found


def results(left: list[Values], rules: BufferRules, before: Values) -> Values:
    """Return the next values of the buffers whose values the micro-batches have left."""
    found = Values()
    names = list(left[0]) if left else []
    for name, rule in rules.of(names).items():
        values = [one[name] for one in left]
        if len(values) == 1 and not isinstance(rule, Gather) or rule == "last":
            found[name] = values[-1]
        elif rule == "sum":
            found[name] = _sum(before[name], values)
        elif isinstance(rule, Gather):
            found[name] = _gathered(name, rule, before[name], values)
    return found


def _sum(before: torch.Tensor, values: list[torch.Tensor]) -> torch.Tensor:
    """Add the changes in the order of the micro-batches. An element that one of them alone has
    changed takes its value."""
    total = before
    for value in values:
        added = value if total is before else (
            total | value if total.dtype == torch.bool else total + (value - before))
        total = torch.where(value == before, total, torch.where(total == before, value, added))
    return total


def _gathered(name: str, rule: Gather, before: torch.Tensor,
              values: list[torch.Tensor]) -> torch.Tensor:
    found: Any = rule.fn(before.clone(), values)
    if not isinstance(found, torch.Tensor) or found.shape != before.shape:
        kind = (f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor)
                else f"a {type(found).__name__}")
        raise TypeError(f"the function of gather() for the buffer {name} returned {kind}. Return a "
                        f"tensor of shape {tuple(before.shape)}.")
    return found

"""The values that micro-batches have left in buffers whose rule needs each of them.

a micro-batch's buffers → here → all workers (one allgather) → here → the model's buffers

What always holds:
1. Values keep their bytes, and stand in the order of the micro-batches. So the result has the same
   bits in every world.
2. All workers hold these values before the vote. So a worker that rolls the step forward has them.
3. Without such buffers this costs nothing. With them, each micro-batch sends each of them whole.
"""

from __future__ import annotations

from typing import Any

import torch

from elastic_trainer.reduce.buffer_rules import BufferRules, Gather
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.layout import byte_view
from elastic_trainer.state.model_buffers import ModelBuffers
from elastic_trainer.world.collectives import World

Values = dict[str, torch.Tensor]


class BufferValues:
    """What the micro-batches of a step have left, on this worker and then on all."""

    def __init__(self, buffers: ModelBuffers, rules: BufferRules, schedule: Schedule):
        self._buffers, self._rules, self._schedule = buffers, rules, schedule
        self._of: dict[str, Any] = {}
        """The rules by the names of the buffers that there are."""
        self._mine: list[Values] = []
        self._names: list[str] = []
        self._marks: list[tuple[torch.Tensor, int]] = []

    def begin(self, step: int) -> None:
        """Begin a step, or begin it again."""
        if self._of.keys() != self._buffers.named.keys():
            self._of = self._rules.of(self._buffers.named)
        is_single = sum(bool(self._schedule.microbatch_positions(step, microbatch))
                        for microbatch in range(self._schedule.microbatches)) == 1
        self._mine, self._buffers.left = [], []
        self._names = [name for name, rule in self._of.items()
                       if is_single or rule not in (None, "mean")]

    def keep(self, after: Values) -> None:
        """Keep what a micro-batch's forward pass has left."""
        if self._names:
            self._mine.append({name: after[name].detach().clone() for name in self._names})

    def note(self, now: Values) -> None:
        """Note that the backward pass of a micro-batch is over. (It may have run a part of forward
        again.)"""
        self._marks = [(tensor, tensor._version) for tensor in now.values()]

    def check(self, replaced: list[tuple[str, torch.Tensor]]) -> None:
        """Raise RuntimeError if buffers were changed since the backward pass. `replaced` are the
        tensors that stand in the place of buffers now."""
        known = {id(tensor) for tensor, _ in self._marks}
        odd = [name for name, tensor in replaced if id(tensor) not in known] or [
            name for name, (tensor, version) in zip(self._of, self._marks, strict=False)
            if tensor._version != version]
        if odd:
            raise RuntimeError(
                f"the buffer {odd[0]} was changed behind step.backward(), where the step has taken "
                f"the buffers' values already. Change it before step.backward(), or behind the "
                f"inner loop; a forward pass there may run in eval mode.")

    def share(self, world: World) -> None:
        """Give all workers the values of all micro-batches. Network: one allgather of them."""
        mine = self._mine
        if self._names and world.size > 1:
            before = self._buffers.before
            bytes_each = sum(before[name].nbytes for name in self._names)
            parts = [byte_view(values[name]) for values in mine for name in self._names]
            everyone = world.allgather(
                torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8), "buffers")
            mine = [self._read(everyone[at : at + bytes_each], before)
                    for at in range(0, len(everyone), max(1, bytes_each))]
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

"""What a commit keeps in Horovod's own style: model, optimizer and the named values of the script.

state.commit() → here (one copy in reused host memory) → newcomer, checkpoint, the way back

What always holds:
1. Newcomers and checkpoints get the last commit, also while the live values are of a later step.
2. The copy never shares memory with live tensors, in either direction (F8).
3. No gradient is in a commit. A commit between `backward` and `step` raises.

What it does not do: decide when all workers have committed (votes.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from horovod.torch.elastic.sampler import ElasticSampler

from elastic_trainer.config import ConfigError
from elastic_trainer.state.device_copies import (
    Copying,
    await_devices,
    copy_range,
    devices_of,
)
from elastic_trainer.state.frozen import FrozenContent
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.shards import Entries
from elastic_trainer.state.values.forms import CannotKeep
from elastic_trainer.state.values.layout import Packed, decode


class LastCommit:
    """The values of one commit, in host memory that the next one uses again."""

    def __init__(self) -> None:
        self._header = b""
        self._classes: Mapping[str, type] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.step = -1
        """How many commits were made before and with it; -1: none is kept."""

    def keep(self, packed: Packed, step: int) -> None:
        """Copy the live values. Cost: one copy of model and optimizer."""
        total = packed.payload_bytes
        if self._memory.numel() != total:
            self._memory = torch.empty(total, dtype=torch.uint8)
        self.step = -1  # until it is whole
        copy_range(packed, 0, total, self._memory)
        await_devices(devices_of(packed.tensors))
        self._header, self._classes, self.step = packed.header, packed.classes, step

    def packed(self) -> Packed:
        return Packed(self._header, [self._memory], self._classes)

    def values(self) -> dict[str, Any]:
        """Return a copy of the kept values, as a tree."""
        return dict(decode(self._header, self._memory.clone(), self._classes))


class CommitState(LiveState):
    """This worker's state. It exists before the script has built its model, and is empty then."""

    def __init__(self) -> None:
        self.committed = self.phase = self.prepared = self.begun = self.lineage = 0
        self.phases, self.last_vote = 1, (0, 0, 0, 0)
        self.has_state = self.is_applying = self.is_built = False
        self.last, self.copying, self.frozen = LastCommit(), Copying(), FrozenContent()

    def build(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
              named: Mapping[str, Named]) -> None:
        """Take what the script has built. Raises ConfigError for what cannot be kept."""
        super().__init__(model, optimizer, identity={"style": "horovod"})
        self.extras = dict(named)
        if any(hasattr(optimizer, "_starting_models") for optimizer in self.optimizers()):
            raise ConfigError("an optimizer has op=hvd.Adasum, which needs MPI, and no elastic "
                              "world has MPI. Leave op out, or give op=hvd.Average or hvd.Sum.")
        try:
            super().packed(learns=True)
        except CannotKeep as error:
            raise ConfigError(f"ElasticState cannot keep a value: {error}. Give the object "
                              f"state_dict and load_state_dict, or keep it outside.") from error
        self.is_built = True

    @property
    def is_kept(self) -> bool:
        return self.last.step == self.committed

    def optimizers(self) -> list[Any]:
        values = (named.value for named in self.extras.values())
        return [self.optimizer, *(v for v in values if isinstance(v, torch.optim.Optimizer))]

    def check_no_gradient(self, call: str) -> None:
        """Raise RuntimeError if a hvd.DistributedOptimizer is between `backward` and `step`."""
        if any(is_between_steps(optimizer) for optimizer in self.optimizers()):
            raise RuntimeError(
                f"{call} was called after loss.backward() and before optimizer.step(), also of the "
                f"backward_passes_per_step. A gradient is not in a commit, so its samples would "
                f"be lost when the world changes. Call it after optimizer.step().")

    def restore(self) -> None:
        """Do nothing: which commit is the last is known when all members have met again."""

    def packed(self, *, learns: bool = False, absent: Mapping[str, str] | None = None,
               entries: Entries | None = None) -> Packed:
        """Return the last commit; the live values, if none is kept. (Nothing is sharded here.)"""
        return (self.last.packed() if self.last.step >= 0
                else super().packed(learns=learns, absent=absent))

    def keep(self) -> None:
        """Copy the live values: they are the last commit."""
        self.last.keep(super().packed(), self.committed)
        self.begun = self.committed + 1

    def go_back(self) -> None:
        """Take the values of the last commit, if one is kept, and drop the step in flight.

        A gradient may be half reduced.
        """
        if self.last.step >= 0:
            self.load(self.last.values())
        self.drop_gradients()
        for optimizer in self.optimizers():
            reset_optimizer(optimizer)

    def drop_gradients(self) -> None:
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def repartition(self) -> None:
        """Let each sampler share its remaining samples among the workers that are here now."""
        for named in self.extras.values():
            if isinstance(sampler := named.value, ElasticSampler):
                sampler.load_state_dict(sampler.state_dict())
                pad(sampler)


class Named:
    """A value of the script's by its name, as `ElasticState` keeps it."""

    def __init__(self, holder: object, name: str):
        self._holder, self._name = holder, name

    @property
    def value(self) -> Any:
        return getattr(self._holder, self._name)

    def state_dict(self) -> dict[str, Any]:
        value = self.value
        return value.state_dict() if _has_state(value) else {"value": value}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        if _has_state(was := self.value):
            was.load_state_dict(kept)
            return
        value = kept["value"]
        if isinstance(was, torch.Tensor) and isinstance(value, torch.Tensor):
            value = value.to(was.device)
        setattr(self._holder, self._name, value)


def pad(sampler: ElasticSampler) -> None:
    """Repeat the remaining samples until each worker has as many.

    Horovod's sampler repeats them once at most. With fewer samples left than half of the workers it
    raises AssertionError on all of them (horovod/torch/elastic/sampler.py, __iter__, 0.28.1).
    """
    left = sampler.remaining_indices
    while 0 < len(left) < sampler.total_size:
        left += left[: sampler.total_size - len(left)]


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def is_between_steps(optimizer: Any) -> bool:
    """True if a hvd.DistributedOptimizer holds gradients that `step` has not applied."""
    if not hasattr(optimizer, "_allreduce_delay"):
        return False
    passes = optimizer.backward_passes_per_step
    return bool(optimizer._handles) or optimizer._synchronized or any(
        delay != passes for delay in optimizer._allreduce_delay.values())


def reset_optimizer(optimizer: Any) -> None:
    """Let hvd.DistributedOptimizer forget the step in flight.

    Handles, flags and counters stay as an error has left them: the next backward pass would raise,
    or wait for ever (horovod/torch/optimizer.py, 0.28.1).
    """
    if not hasattr(optimizer, "_allreduce_delay"):
        return
    optimizer._handles.clear()
    optimizer._synchronized, optimizer._should_synchronize = False, True
    for parameter in optimizer._allreduce_delay:
        optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
    for group in optimizer._group_counts:
        optimizer._group_counts[group] = 0

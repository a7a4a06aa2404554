"""Averages of the weights over the steps: exponential (EMA) and stochastic (SWA).

options → Average ← each applied step (commit_step.py)
checkpoint, newcomer ⇄ the state, as an extra
trainer.averaged() → the model with the averaged weights, for a while

What always holds:
1. Every worker computes the average itself, from weights that are the same on every worker. With
   `shard` it does so for the parameters whose entries it holds (state/shards.py), and receives the
   others while the averaged weights are shown (training/sharded_average.py).
2. Parameters stay the same objects. While the averaged weights are shown, the trained values lie
   aside, untouched. Stages of an evaluation see the trained values.
3. Buffers are the model's. What changes them while the average is shown (a refresh of BatchNorm)
   is dropped with it.

The arithmetic is torch's (torch/optim/swa_utils.py, 2.13). The bits are those of AveragedModel with
get_ema_multi_avg_fn or get_swa_multi_avg_fn. Its default for a mean on the CPU rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import swa_utils

from elastic_trainer.config import ConfigError
from elastic_trainer.state.values.names import named_parameters

SHOWN = ("a step ended, and the averaged weights are still in the model. Leave the block `with "
         "trainer.averaged()` before the step ends.")
PART = ("this worker has a part of the averaged weights: the run was finished without it. Export "
        "them from the last checkpoint: elastic-trainer checkpoints export --averaged.")
Gather = Callable[[], "dict[str, torch.Tensor] | None"]
"""Returns the whole average, in the types of the parameters; None: this worker has it."""
NOT_AVERAGED = ("no weights are averaged: neither ema nor swa is given. Use ema=0.999, or "
                "swa=Swa(from_step=…).")


@dataclass(frozen=True)
class Swa:
    """Stochastic weight averaging: the mean of the weights after step `from_step`, and after every
    `every`-th step from there on. Steps count from 0."""

    from_step: int
    every: int = 1

    def __post_init__(self) -> None:
        if self.from_step < 0 or self.every < 1:
            raise ConfigError(f"swa is {self}. Use a from_step of 0 or more, and an every of 1 or "
                              f"more.")


class Average:
    """The averaged weights of a model."""

    def __init__(self, model: torch.nn.Module, ema: float | None, swa: Swa | None,
                 in_32_bits: bool = False, is_sharded: bool = False):
        self._model, self._swa, self.is_sharded = model, swa, is_sharded
        self.name = "ema" if swa is None else "swa"
        """The name that a state has it by."""
        self.settings: dict[str, Any] = (
            {"ema": ema} if swa is None else {"swa": [swa.from_step, swa.every]})
        made: Any = swa_utils  # its functions have no types
        self._mean = (made.get_swa_multi_avg_fn() if ema is None
                      else made.get_ema_multi_avg_fn(ema))
        self.parameters, self._in_32_bits = named_parameters(model), in_32_bits
        self.holds: Callable[[str], bool] = lambda name: True
        """True for the parameters whose average this worker computes."""
        self.weights = {} if is_sharded else self._copies()
        """What this worker has of the average. The dict stays the same one."""
        self.updates = 0
        """How many steps are in the average."""
        self.whole: dict[str, torch.Tensor] = {}
        """The average of a finished run, where workers had parts of it."""
        self.is_shown = False
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, step: int) -> None:
        """Take up the weights after a step, if they belong into the average."""
        if self._swa and (step < self._swa.from_step
                          or (step - self._swa.from_step) % self._swa.every):
            return
        if self.updates == 0:
            self.weights.update(self._copies())
        else:
            pairs = [(mine, self.parameters[name].detach()) for name, mine in self.weights.items()]
            count = torch.tensor(self.updates)
            for dtype in sorted({mine.dtype for mine, now in pairs if mine.dtype == now.dtype},
                                key=str):
                alike = [pair for pair in pairs if pair[0].dtype == pair[1].dtype == dtype]
                self._mean([mine for mine, _ in alike], [now for _, now in alike], count)
            for mine, now in pairs:
                if mine.dtype != now.dtype:  # one by one: each is copied
                    self._mean([mine], [now.to(mine.dtype)], count)
        self.updates += 1

    @property
    def lacks_parts(self) -> bool:
        """True if this worker has a part of the average, and other workers the others."""
        return self.updates > 0 and len(self.whole or self.weights) < len(self.parameters)

    def _copies(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().to(self._type(p), copy=True)
                for name, p in self.parameters.items() if self.holds(name)}

    def _type(self, parameter: torch.Tensor) -> torch.dtype:
        is_narrow = self._in_32_bits and parameter.is_floating_point()
        return torch.float32 if is_narrow else parameter.dtype

    # --- in the state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "weights": self.weights}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        self.updates, theirs = int(values["updates"]), values["weights"]
        if self.is_sharded:
            self.weights.clear()
            if self.updates:
                self.weights.update({name: theirs[name].to(p.device, self._type(p), copy=True)
                                     for name, p in self.parameters.items()
                                     if name in theirs and self.holds(name)})
            return
        for name, mine in self.weights.items():
            if self.updates or name in theirs:  # a sharded one has no weights before its first step
                mine.copy_(theirs[name])

    # --- in the model -----------------------------------------------------------------------------

    @contextmanager
    def shown(self, gather: Gather | None = None) -> Iterator[None]:
        if self.updates == 0:
            raise RuntimeError("no step is in the average yet" + (
                f": it begins after step {self._swa.from_step}." if self._swa else "."))
        if self.is_shown:
            raise RuntimeError("the averaged weights are in the model already. Use one block `with "
                               "trainer.averaged()`, not one in another.")
        # What a BatchNorm refresh or the user's code writes to is a copy.
        if gather and (every := gather()) is not None:
            # Who has gathered them holds the dict until the next step.
            self._aside = [(p, every.pop(name)) for name, p in self.parameters.items()]
        else:
            every = self.whole or self.weights
            if self.lacks_parts:
                raise RuntimeError(PART)
            self._aside = [(p, every[name].to(p.device, p.dtype, copy=True))
                           for name, p in self.parameters.items()]
        self._aside += [(b, b.detach().clone()) for b in self._model.buffers()]
        self._exchange()
        self.is_shown = True
        try:
            yield
        finally:
            self._exchange()
            self.is_shown, self._aside = False, []

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let the model have the trained values for a while, if it has the averaged ones."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """Exchange the values of the model with those aside. Nothing is copied."""
        for number, (tensor, aside) in enumerate(self._aside):
            self._aside[number] = (tensor, tensor.data)
            tensor.data = aside


def shown(average: Average | None,
          gather: Gather | None = None) -> AbstractContextManager[None]:
    """Let the model have the averaged weights for a while. Raises RuntimeError if it has none."""
    if average is None:
        raise RuntimeError(NOT_AVERAGED)
    return average.shown(gather)


def average_of(model: torch.nn.Module, ema: float | None, swa: Swa | None, *,
               in_32_bits: bool, is_sharded: bool) -> Average | None:
    """Return the average of the weights; `in_32_bits`, whatever their type is."""
    return Average(model, ema, swa, in_32_bits, is_sharded) if ema is not None or swa else None


def extras_with(ours: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the objects of the state: those of the user, and those of options, by the option's
    name. Raises ConfigError."""
    ours = {name: one for name, one in ours.items() if one is not None}
    for name in ours.keys() & (given or {}).keys():
        raise ConfigError(f"state has an object with the name {name!r}, which is the name of "
                          f"the option {name}. Give it another name.")
    return {**(given or {}), **ours}

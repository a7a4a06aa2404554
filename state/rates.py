"""The rates of an optimizer: what sets them, and what of them is in the state.

train(lr=…) → here → the groups → optimizer.step() → here → checkpoint, newcomer

What always holds:
1. A function of the step multiplies the rates that the optimizer was built with. A torch scheduler
   sets the rates itself; it is part of the state, and is stepped exactly once per finished step. If
   other code sets a rate or steps the scheduler, `Rates.check` raises, with the remedy. Else
   `train` and the user's code would overwrite each other's rates in silence. Without both, a rate
   that the optimizer sets in its own step stays.
2. A rate that is a tensor stays the same tensor: a compiled optimizer reads it in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elastic_trainer.state.values.forms import as_built


class RateChanged(RuntimeError):
    """Something other than train() has set a learning rate or stepped the scheduler."""


class Rates:
    """The rates of one optimizer's groups, and the scheduler if a torch scheduler sets them."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None):
        self.optimizer, self.scheduler = optimizer, scheduler
        self.base = [_own(group["lr"]) for group in optimizer.param_groups]
        """The rates that the optimizer was built with."""
        self.used = math.nan
        """The first group's rate in the last finished step."""
        self._built = list(map(float, self.base))
        self._left: list[Any] | None = None
        """The rates as `set` has left them, where the optimizer may change them."""
        self._marks = self._now()

    def _now(self) -> tuple[list[Any], Any]:
        """Return values that differ after a change of a rate or of the scheduler.

        A tensor's version is a number on the host. Reading its value would wait for the GPU.
        """
        rates = [(id(rate), rate._version) if isinstance(rate, torch.Tensor) else rate
                 for rate in (group["lr"] for group in self.optimizer.param_groups)]
        return rates, _progress(self.scheduler)

    def check(self, step: int) -> None:
        """Raise RateChanged unless the rates, and the scheduler, are as `set` and `advance` left
        them."""
        (rates, progress), (were, progress_was) = self._now(), self._marks
        remedy = ("Learning rates come from the option lr (with train(): schedule) alone: give it "
                  "the torch scheduler, and do not step it, or a function of the step")
        for number, (rate, was) in enumerate(zip(rates, were, strict=True)):
            if rate != was and not (rate != rate and was != was):  # NaN is no change
                value = float(self.optimizer.param_groups[number]["lr"])
                before = "another" if isinstance(was, tuple) else was
                raise RateChanged(
                    f"at step {step} the learning rate of the optimizer's group {number} is "
                    f"{value}, but the trainer had set it to {before}. {remedy}.")
        if self.scheduler is not None and progress != progress_was:
            raise RateChanged(
                f"at step {step} the {kind_of(self.scheduler)} has been stepped by something other "
                f"than the trainer, which steps it once per finished step. {remedy}.")

    def set(self, multiplier: float | None) -> None:
        """Set the rates of a step, unless a scheduler has done so when the last step ended. None:
        they are the optimizer's own, which its step may change."""
        if self.scheduler is None:
            factor = 1.0 if multiplier is None else multiplier
            for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
                _put(group, base * factor)
        self._left = self._now()[0] if self.scheduler is None and multiplier is None else None
        self.used = float(self.optimizer.param_groups[0]["lr"])

    def of(self, multiplier: float | None) -> float:
        """Return the first group's rate under a multiplier."""
        return float(self.base[0] * (1.0 if multiplier is None else multiplier))

    @contextmanager
    def tried(self, optimizer: torch.optim.Optimizer, multiplier: float | None) -> Iterator[None]:
        """Give an optimizer (it may be one of several) the rates that `set` will give it, and put
        back those that it had."""
        groups, factor = optimizer.param_groups, 1.0 if multiplier is None else multiplier
        were, is_marked = [_own(group["lr"]) for group in groups], self._now() == self._marks
        bases = {id(group): base for group, base
                 in zip(self.optimizer.param_groups, self.base, strict=True)}
        for group in groups if self.scheduler is None else ():
            _put(group, bases[id(group)] * factor)
        try:
            yield
        finally:
            for group, rate in zip(groups, were, strict=True):
                _put(group, rate)
            if is_marked:  # to put a tensor back is a change of it
                self._marks = self._now()

    @property
    def are_moved(self) -> bool:
        """True if the optimizer has set a rate in its own step."""
        return list(map(float, self.base)) != self._built

    def _follow(self) -> None:
        """Take over the rates that the optimizer has set in its own step."""
        for number, (was, now) in enumerate(zip(self._left or (), self._now()[0], strict=False)):
            if now != was:
                self.base[number] = _own(self.optimizer.param_groups[number]["lr"])
        self._left = None

    def advance(self, loss: float) -> None:
        """End a step: let the scheduler set the rates of the next one."""
        self._follow()
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if math.isfinite(loss):
                self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()
        self._marks = self._now()

    def note(self) -> None:
        """End a phase of a step that has another one: the rates stay as `set` left them."""
        self._follow()
        self._marks = self._now()

    def rebase(self, group: int, rate: float) -> None:
        """Let a group have another rate than the run has. No torch scheduler may be there."""
        own = self.optimizer.param_groups[group]
        for place, key in ((self.base, group), (own, "lr")):
            if isinstance(place[key], torch.Tensor):  # type: ignore[index]
                place[key].fill_(rate)  # type: ignore[index]
            else:
                place[key] = rate  # type: ignore[index]
        self._marks = self._now()

    # --- as values --------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """Return what the state keeps (nothing is copied)."""
        scheduler = self.scheduler and {"class": kind_of(self.scheduler),
                                        "state": self.scheduler.state_dict()}
        return {"base_rates": self.base, "rate_used": self.used, "scheduler": scheduler}

    def misfit(self, values: dict[str, Any]) -> str:
        """Return why values cannot be taken over; "" if they can."""
        theirs = (values.get("scheduler") or {}).get("class")
        mine = kind_of(self.scheduler) if self.scheduler else None
        if theirs == mine:
            return ""
        return (f"the schedule of the learning rates is {theirs or 'no torch scheduler'} there, "
                f"but {mine or 'none'} here")

    def load(self, values: dict[str, Any]) -> None:
        """Take over values, after the optimizer's groups have been."""
        self.base = [_as_rate(mine, theirs) for mine, theirs
                     in zip(self.base, values["base_rates"], strict=True)]
        self.used = float(values.get("rate_used", self.optimizer.param_groups[0]["lr"]))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(
                as_built(self.scheduler.state_dict(), values["scheduler"]["state"]))
        self._marks = self._now()


def kind_of(scheduler: LRScheduler) -> str:
    """Return the class of a scheduler. One that is made of several names the classes of all."""
    return str(getattr(scheduler, "kind", type(scheduler).__name__))


def _as_rate(mine: Any, theirs: Any) -> Any:
    """Return a rate that was kept, as a tensor where it is one here (version 0.1 kept numbers)."""
    if isinstance(mine, torch.Tensor) and not isinstance(theirs, torch.Tensor):
        return torch.full_like(mine, theirs)
    return as_built(mine, theirs)


def _put(group: dict[str, Any], rate: Any) -> None:
    """Set the rate of a group: in place, where it is a tensor."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].copy_(rate)
    else:
        group["lr"] = rate


def _own(rate: Any) -> Any:
    return rate.detach().clone() if isinstance(rate, torch.Tensor) else rate


def _progress(scheduler: Any) -> Any:
    """Return the progress of a scheduler, and of the schedulers that it contains."""
    inner = [_progress(one) for one in getattr(scheduler, "_schedulers", ())]
    return getattr(scheduler, "last_epoch", None), inner

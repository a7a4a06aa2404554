"""What train() was asked for: refused where it cannot be, said where one option holds over another.

train()'s options → here → one line on stderr and one event each, by rank 0 (loop.py)

What always holds:
1. Each remark names the key, the values, and which of them holds.
2. Everything here is a pure function of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule import Schedule


@dataclass(frozen=True)
class Remark:
    """A sentence for a person, and the event that tells a program the same."""

    event: str
    sentence: str
    facts: dict[str, Any] = field(default_factory=dict)


def remarks_on_length(schedule: Schedule) -> list[Remark]:
    """Say which of `epochs` and `max_steps` ends the run, where `max_steps` cannot be reached."""
    if schedule.max_steps is None or schedule.max_steps <= schedule.steps:
        return []
    facts = {"max_steps": schedule.max_steps, "epochs": schedule.epochs, "steps": schedule.steps}
    return [Remark("job.steps_capped",
                   f"max_steps is {schedule.max_steps}, but epochs={schedule.epochs} has only "
                   f"{schedule.steps} steps, so the run ends after {schedule.steps}. Leave epochs out "
                   f"to train for max_steps.", facts)]


def remarks_on_last_batch(schedule: Schedule) -> list[Remark]:
    """Say how many samples `drop_last` leaves out."""
    if not (dropped := schedule.dropped_samples):
        return []
    return [Remark("job.samples_dropped",
                   f"drop_last leaves {dropped} of {schedule.dataset_size} samples out of each epoch, others each time.",
                   {"samples": dropped, "dataset_size": schedule.dataset_size})]


def split_schedule(
    schedule: Callable[[int], float] | LRScheduler | None,
    optimizer: torch.optim.Optimizer,
    steps: int,
) -> tuple[LRScheduler | None, Callable[[int], float]]:
    """Return the torch scheduler, if it is one, and the multiplier of the rates. Raises ConfigError."""
    if not isinstance(schedule, LRScheduler):
        # LRScheduler.__init__ leaves this mark on the optimizer (torch 2.13, optim/lr_scheduler.py).
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise ConfigError(
                "a torch learning-rate scheduler was built on this optimizer, but train() was not given "
                "it, so both would set the rates. Hand it over as schedule=scheduler, or build a new "
                "optimizer."
            )
        if schedule is not None and not callable(schedule):
            raise ConfigError(
                f"schedule is {schedule!r}. Use a function of the step, or a torch LRScheduler."
            )
        return None, schedule or (lambda step: 1.0)
    name = type(schedule).__name__
    if schedule.optimizer is not optimizer:
        raise ConfigError(
            f"the schedule {name} belongs to another optimizer than train() was given. Build it on "
            f"this one."
        )
    if isinstance(schedule, ReduceLROnPlateau) and schedule.mode != "min":
        raise ConfigError(
            f"the schedule {name} has mode {schedule.mode!r}, but it hears each step's loss, which is "
            f"to fall. Use mode='min', or set the rate by a function of the step."
        )
    if isinstance(schedule, OneCycleLR) and schedule.total_steps < steps:
        raise ConfigError(
            f"the schedule {name} has total_steps {schedule.total_steps}, but the run has {steps} "
            f"steps, so it would raise at the end. Use OneCycleLR(total_steps={steps})."
        )
    return schedule, lambda step: 1.0

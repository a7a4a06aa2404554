"""The learning rate as a function of the step: multipliers of the rates of the optimizer.

step → here → the factor by which every rate of the optimizer is multiplied

    lr=cosine(warmup_steps=100, total_steps=5000)
    lr=linear_scaling(base_batch=256, warmup_steps=500, then=step_decay(every_steps=3000))

What always holds: each multiplier is a pure function of the step, so a resumed run needs nothing
else to go on with the same rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule.schedule import require_whole

Multiplier = Callable[[int], float]


def constant() -> Multiplier:
    """Return the multiplier of the base learning rate that leaves it as it is."""
    return lambda step: 1.0


def linear_decay(*, warmup_steps: int, total_steps: int, floor: float = 0.0) -> Multiplier:
    """Return the multiplier that rises linearly to 1, then falls linearly to `floor` at
    `total_steps`."""
    return _falling(lambda fallen: 1.0 - fallen, warmup_steps, total_steps, floor)


def cosine(*, warmup_steps: int, total_steps: int, floor: float = 0.0) -> Multiplier:
    """Return the multiplier that rises linearly to 1, then falls as a cosine to `floor` at
    `total_steps`."""
    return _falling(lambda fallen: (1.0 + math.cos(math.pi * fallen)) / 2, warmup_steps,
                    total_steps, floor)


def step_decay(*, every_steps: int, factor: float = 0.1, warmup_steps: int = 0) -> Multiplier:
    """Return the multiplier that rises linearly to 1, and falls by `factor` at each multiple of
    `every_steps` (torch's StepLR, with a warm-up). Raises ConfigError."""
    require_whole("every_steps", every_steps, 1)
    require_whole("warmup_steps", warmup_steps, 0)
    if not 0.0 < factor <= 1.0:
        raise ConfigError(f"factor is {factor}, but the learning rate must fall. Use a number "
                          f"above 0, up to 1.")
    return lambda step: _rise(step, warmup_steps) * factor**(step // every_steps)


def inverse_root(*, warmup_steps: int) -> Multiplier:
    """Return the multiplier that rises linearly to 1, then falls with the inverse square root of
    the step (Vaswani et al., 2017, section 5.3, scaled to a highest value of 1)."""
    require_whole("warmup_steps", warmup_steps, 1)
    return lambda step: min((step + 1) / warmup_steps, math.sqrt(warmup_steps / (step + 1)))


@dataclass(frozen=True)
class LinearScaling:
    """A multiplier that depends on the global batch, which the trainer knows."""

    base_batch: int
    warmup_steps: int
    then: Multiplier

    def of_batch(self, global_batch: int) -> Multiplier:
        """Return the multiplier for a global batch of this number of samples."""
        scale = global_batch / self.base_batch

        def multiplier(step: int) -> float:
            risen = _rise(step, self.warmup_steps)
            return (1.0 + (scale - 1.0) * risen) * self.then(step)

        return multiplier


def linear_scaling(*, base_batch: int, warmup_steps: int = 0,
                   then: Multiplier | None = None) -> LinearScaling:
    """Return the multiplier for rates that were chosen for a batch of `base_batch` samples.

    A global batch that is k times as large gets k times the rate (Goyal et al., 2017, section 2.1).
    Over `warmup_steps` the multiplier rises linearly from 1 to k (section 2.2). `then(step)`, such
    as `cosine(…)`, multiplies the result. It needs no warm-up of its own. The scale depends on
    `global_batch`, and never on the number of workers.

    Raises ConfigError.
    """
    require_whole("base_batch", base_batch, 1)
    require_whole("warmup_steps", warmup_steps, 0)
    if then is not None and not callable(then):
        raise ConfigError(f"then is {then!r}. Use a function of the step, such as cosine(…).")
    return LinearScaling(base_batch, warmup_steps, then or constant())


def _falling(fall: Callable[[float], float], warmup_steps: int, total_steps: int,
             floor: float) -> Multiplier:
    require_whole("warmup_steps", warmup_steps, 0)
    require_whole("total_steps", total_steps, 1)
    if warmup_steps >= total_steps:
        raise ConfigError(
            f"warmup_steps is {warmup_steps}, so the learning rate would never fall in "
            f"{total_steps} steps. Use at most {total_steps - 1}.")
    if not 0.0 <= floor <= 1.0:
        raise ConfigError(
            f"floor is {floor}, but it is a share of the base learning rate. Use 0 to 1.")

    def multiplier(step: int) -> float:
        if step < warmup_steps:
            return _rise(step, warmup_steps)
        progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return floor + (1.0 - floor) * fall(progress)

    return multiplier


def _rise(step: int, warmup_steps: int) -> float:
    """Return how much of a linear warm-up is done: 1 / warmup_steps in the first step."""
    return 1.0 if step >= warmup_steps else (step + 1) / warmup_steps

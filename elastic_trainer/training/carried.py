"""Whether a micro-batch has one result, whatever was computed before it: nothing is carried from
one batch to the next.

warm-up (one micro-batch, again, another one, the first one again) → here → the user's error

What it does not do: find a value that changes no result of these micro-batches (a counter that acts
every tenth batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule.schedule import Schedule

CLEAR = 1e-3
"""Two losses that differ by this share are not the same up to rounding."""


class Tried(NamedTuple):
    """What went into a micro-batch, and what came out."""

    inputs: int
    """The checksum of weights and samples."""
    result: int
    """The checksum of loss and gradient."""
    loss: float
    weights: int


def another(schedule: Schedule, place: tuple[int, int]) -> tuple[int, int] | None:
    """Return step and micro-batch of another micro-batch than the first one, if possible of its
    size; None: the run has one micro-batch only."""
    size = len(schedule.microbatch_positions(*place))
    found = [(step, microbatch) for step in range(min(2, schedule.steps))
             for microbatch in range(schedule.microbatches)
             if (step, microbatch) != place and schedule.microbatch_positions(step, microbatch)]
    return next((one for one in found if len(schedule.microbatch_positions(*one)) == size),
                found[0] if found else None)


def may_waver(device: torch.device) -> bool:
    """Return whether this machine may give other bits for one program and the same values."""
    if device.type == "cuda":
        return not torch.are_deterministic_algorithms_enabled()
    return device.type != "cpu" or torch.get_num_threads() > 1


def require_same_result(tried: Sequence[Tried], wavers: bool) -> None:
    """Raise ConfigError if one micro-batch had different results. Samples that differ are no
    result: the proof leaves them out, with a remark."""
    one = tried[0]
    for other in tried[1:]:
        if other.inputs != one.inputs or other.result == one.result:
            continue
        most = CLEAR * max(abs(one.loss), abs(other.loss))
        if wavers and not abs(one.loss - other.loss) > most:
            continue
        what = (f"the gradient of one batch (loss {one.loss:.9g}) has other bits"
                if one.loss == other.loss else
                f"the loss of one batch is {one.loss:.9g}, and {other.loss:.9g}")
        raise ConfigError(
            f"{what} when the batch is computed again, with the same samples, weights and random "
            f"numbers. So the loop, the loss or the model carries a value from one batch to the "
            f"next (a hidden state, a counter, a running mean, a generator of its own), and the "
            f"result would depend on the number of workers, because each computes other batches. "
            f"Compute it from the batch and the number of the step, draw from the default "
            f"generators of torch, numpy or random, or change it behind the inner loop, in an "
            f"object in state. docs/guide/script.md has the cases.")

"""A loss that is not finite: its micro-batches and samples, and what train(on_nan=…) does then.

reduced loss → here → the step is refused (raise), left out (skip), or done all the same (continue)

What always holds:
1. The decision rests on the reduced loss, which all workers hold, and is made before anything is
   applied: all do the same. Only the loss counts. A scaler handles gradients that overflow.
2. The worker that ran a micro-batch knows its loss, and logs the samples of the micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from elastic_trainer.training.option_names import Words

MAX_NAMED_SAMPLES = 64
"""The largest number of samples of a micro-batch that the event names."""
MAX_IN_ERROR = 8
"""The largest number of micro-batches, and of samples of each, that the error names."""


class LossNotFinite(ArithmeticError):
    """The loss of a step is not finite, and train(on_nan="raise") ended the run before it was
    applied."""


def require_scalar(loss: Any, words: Words) -> torch.Tensor:
    """Return a loss of one value without dimensions. Raises TypeError for what is none."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.reshape(())
    kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(
        loss, torch.Tensor) else f"{type(loss).__name__}"
    raise TypeError(
        f"{words.loss} {kind}. Use the mean over the batch's samples: a tensor of one value.")


def not_finite(losses: Mapping[int, tuple[torch.Tensor, numpy.ndarray]]) -> dict[int, list[int]]:
    """Return the samples of the micro-batches whose loss is not finite, by micro-batch. On a GPU
    this waits for the device."""
    return {microbatch: samples[:MAX_NAMED_SAMPLES].tolist() for microbatch,
            (loss, samples) in losses.items()
            if not math.isfinite(float(loss))}


def verdict(step: int, loss: float, microbatches: Mapping[int, list[int]]) -> str:
    """Return the error for a loss that is not finite: its micro-batches and samples, and the
    remedy."""
    named = [
        f"micro-batch {microbatch} (samples {', '.join(map(str, samples[:MAX_IN_ERROR]))}"
        f"{', …' * (len(samples) > MAX_IN_ERROR)})"
        for microbatch, samples in sorted(microbatches.items())[:MAX_IN_ERROR]
    ]
    more = (f" and {len(microbatches) - MAX_IN_ERROR} more micro-batches"
            if len(microbatches) > MAX_IN_ERROR else "")
    where = f"in {', '.join(named)}{more}" if named else "only in the mean over the micro-batches"
    return (
        f"the loss of step {step} is {loss}: it is not finite {where}. The step was not applied. "
        f"Look at these samples and at the learning rate, or use on_nan=\"skip\" to leave such "
        f"steps out.")

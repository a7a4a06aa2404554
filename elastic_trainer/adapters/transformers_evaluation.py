"""The evaluations of a `transformers.Trainer`.

ElasticTrainer.evaluate(), .predict() → here → trainer.evaluate (the loss: all workers share the
batches), or transformers' evaluation_loop (predictions: each worker computes all)

What always holds:
1. All workers have the same metrics. Metrics that a clock has measured are left out.
2. An evaluation leaves no trace in modes and random numbers.

Source: transformers 5.24, trainer.py (evaluation_loop, prediction_step).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from elastic_trainer.data.seeds import seed_everything
from elastic_trainer.training.precision import PRECISIONS


def measured(hf: Any, dataset: Any, ignore_keys: list[str] | None,
             prefix: str) -> dict[str, float]:
    """Return the metrics of a dataset, for an ElasticTrainer. The loss alone is a sum, which the
    workers share. compute_metrics gets all predictions, which each worker computes itself."""
    if hf.compute_metrics is None and hf.elastic is not None:
        plain, collate = hf.columns(dataset, "evaluation")
        means = hf.elastic.evaluate(plain, lambda model, inputs: sums_of(hf, model, inputs),
                                    batch_size=hf.args.per_device_eval_batch_size, collate=collate)
        return {f"{prefix}_{name}": mean for name, mean in means.items()}
    with apart(hf):
        output = hf.evaluation_loop(
            hf.get_eval_dataloader(dataset), description="Evaluation",
            prediction_loss_only=True if hf.compute_metrics is None else None,
            ignore_keys=ignore_keys, metric_key_prefix=prefix)
    return {name: value for name, value in output.metrics.items()
            if not name.endswith("_model_preparation_time")}


def sums_of(hf: Any, model: torch.nn.Module, inputs: Any) -> dict[str, tuple[float, int]]:
    """Return the loss of a batch, weighted by its samples as transformers does it."""
    from accelerate.utils import find_batch_size

    samples = find_batch_size(inputs)
    loss, _, _ = hf.prediction_step(model, inputs, True)
    if loss is None:
        return {}
    value = float(loss)
    if hf.args.logging_nan_inf_filter and not math.isfinite(value):
        return {"loss": (0.0, 0)}
    return {"loss": (value * samples, samples)}


@contextmanager
def apart(hf: Any) -> Iterator[None]:
    """Evaluate for a while with the precision of the training, and leave no trace."""
    modes = [(module, module.training) for module in hf.model.modules()]
    drawn = random.getstate(), numpy.random.get_state()
    device, dtype = hf.args.device, PRECISIONS[hf.precision]
    try:
        with (torch.random.fork_rng([device] if device.type == "cuda" else []),
              torch.autocast(device.type, dtype, enabled=dtype is not None)):
            seed_everything(hf.args.seed)
            yield
    finally:
        random.setstate(drawn[0])
        numpy.random.set_state(drawn[1])
        for module, mode in modes:
            module.training = mode

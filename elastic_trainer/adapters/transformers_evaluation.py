"""The evaluations of a `transformers.Trainer`.

ElasticTrainer.evaluate(), .predict() → here: prediction_step() for each batch, by one worker → the
loss (a sum), or all predictions → evaluation_loop() of transformers over them → metrics

What always holds:
1. All workers have the same metrics. Metrics that a clock has measured are left out.
2. Each batch is computed by one worker. evaluation_loop() then goes through what was kept of all
   batches, with the arguments and containers of transformers.
3. An evaluation leaves no trace in modes and random numbers.

Before train() there is no run: each worker computes all batches.

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
from elastic_trainer.evaluate.sums import Kept
from elastic_trainer.training.job.precision import PRECISIONS


def measured(hf: Any, dataset: Any, ignore_keys: list[str] | None, prefix: str) -> dict[str, float]:
    """Return the metrics of a dataset, for an ElasticTrainer."""
    if hf.compute_metrics is None and hf.elastic is not None:
        means = hf.shared(dataset, lambda model, inputs: sums_of(hf, model, inputs))
        return {f"{prefix}_{name}": mean for name, mean in means.items()}
    output = predicted(hf, dataset, "Evaluation", True if hf.compute_metrics is None else None,
                       ignore_keys, prefix)
    metrics: dict[str, float] = output.metrics
    return metrics


def predicted(hf: Any, dataset: Any, description: str, loss_only: bool | None,
              ignore_keys: list[str] | None, prefix: str) -> Any:
    """Return the EvalLoopOutput of a dataset, with all predictions."""
    if hf.elastic is None:
        loader = hf.get_test_dataloader(dataset)
        with apart(hf):
            output = hf.evaluation_loop(loader, description, loss_only, ignore_keys, prefix)
    else:
        is_loss = hf.args.prediction_loss_only if loss_only is None else loss_only
        batches = hf.shared(dataset, lambda model, inputs: {
            "kept": kept_of(hf, model, inputs, is_loss, ignore_keys)})["kept"]
        with apart(hf), replaying(hf, batches, len(dataset)) as loader:
            output = hf.evaluation_loop(loader, description, loss_only, ignore_keys, prefix)
    output.metrics.pop(f"{prefix}_model_preparation_time", None)
    return output


def kept_of(hf: Any, model: torch.nn.Module, inputs: Any, loss_only: bool,
            ignore_keys: list[str] | None) -> Kept:
    """Return what evaluation_loop() needs of a batch: the result of prediction_step(), and the
    inputs if compute_metrics gets them."""
    from accelerate.utils import find_batch_size

    step = hf.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)
    name = getattr(hf.model, "main_input_name", "input_ids")
    given = (dict(inputs) if hf.args.batch_eval_metrics else {name: inputs[name]}
             ) if "inputs" in hf.args.include_for_metrics else {
                 name: torch.empty(find_batch_size(inputs), 0)}
    return Kept({"step": tuple(step), "inputs": given})


@contextmanager
def replaying(hf: Any, batches: list[Any], samples: int) -> Iterator[Any]:
    """Yield a loader of what was kept, and let prediction_step() return it, for a while."""
    size, steps = hf.args.per_device_eval_batch_size, iter(batches)
    loader: Any = torch.utils.data.DataLoader(
        range(samples), batch_size=size,  # type: ignore[arg-type]
        collate_fn=lambda numbers: batches[numbers[0] // size]["inputs"])
    hf.prediction_step = lambda *_, **__: next(steps)["step"]  # hides the method
    try:
        yield hf.accelerator.prepare(loader)
    finally:
        del hf.prediction_step


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

"""The validation of a LightningModule: all workers share the batches of val_dataloader.

lightning_flow.py → here (what to compute) ⇄ moves of a worker (evaluation.py) → sums of what
validation_step has logged, states of its metrics

What always holds:
1. Each sample counts once, and all workers have the same sums.
2. validation_step changes no attribute of the module, and no parameter. A worker computes some of
   the batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from elastic_trainer.adapters.lightning_hooks import takes
from elastic_trainer.adapters.lightning_loaders import Source
from elastic_trainer.adapters.lightning_logs import Kind
from elastic_trainer.evaluate.evaluation import Examination
from elastic_trainer.evaluate.sums import Found, means_of
from elastic_trainer.training.job import Job


class States:
    """The metrics of the module, as an evaluation uses metrics."""

    def __init__(self, flow: Any):
        self.names = frozenset[str]()
        self.reset, self.states = flow.metrics.reset, flow.metrics.states

    def computed(self, states: Any) -> dict[str, Any]:
        """Return nothing: the values are computed when the metrics have the totals."""
        return {}


class Validation(Examination):
    """One validation of this worker's module, on one of its datasets."""

    def __init__(self, job: Job, flow: Any, source: Source, number: int):
        super().__init__(job, source.dataset, self._step, source.batch_size, source.collate,
                         None, source.loader)
        self._metrics: Any = States(flow)
        self._flow, self._number, self._index = flow, number, 0
        has_several = len(flow.validations) > 1
        self.suffix = f"/dataloader_idx_{number}" if has_several else ""
        step = flow.module.validation_step
        self._takes = [takes(step, 2), has_several and takes(step, 3)]
        self.total = Found()

    def found(self, number: int, following: Sequence[int] = ()) -> Found:
        """Compute one batch, and have the following ones read."""
        self._index = number
        with self._flow.metrics.apart():
            return super().found(number, following)

    def _step(self, model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        """Run validation_step, and return what it has logged."""
        flow, module = self._flow, self._flow.module
        with (flow._attributes["module"].constant("validation_step", "on_validation_epoch_end"),
              flow.inside("validation_step")):
            batch = flow.after_transfer(batch, self._number)
            flow.logs.begin_batch(batch)
            flow.logs.suffix = self.suffix
            try:
                module.validation_step(batch, *[self._index] * self._takes[0],
                                       *[self._number] * self._takes[1])
                found: dict[str, Any] = flow.logs.end_validation_batch()
            finally:
                flow.logs.drop_batch()
                flow.logs.suffix = ""
        return found

    def means(self, total: Found) -> dict[str, Any]:
        """Keep the sums over all batches, and return them as the event has them."""
        self.total = total
        means, found = means_of(total.sums), dict[str, Any]()
        for key, (whole, _, is_finite) in total.sums.items():
            name, *kind = json.loads(key)
            if (place := Kind(*kind).metric) is not None:
                found[name] = self._flow.metrics.value(place, total.states)
            elif Kind(*kind).is_sum:
                found[name] = float(whole) if is_finite else math.nan
            else:
                found[name] = means[key]
        return found

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return the totals and weights that validation_step has logged."""
        return {key: (float(total) if is_finite else math.nan, float(weight or 0))
                for key, (total, weight, is_finite) in self.total.sums.items()}

"""The evaluation that train() does by itself, as the loop of a Trainer's user does.

train(evaluate=Evaluation(…)) → here → Examination (evaluation.py)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_trainer.config import ConfigError
from elastic_trainer.data.loader import Loader
from elastic_trainer.evaluate.evaluation import Examination, Fn
from elastic_trainer.evaluate.metric_states import require_sums
from elastic_trainer.schedule.lengths import interval_of
from elastic_trainer.state.supported import refused_dataset
from elastic_trainer.training.job import Job


@dataclass(frozen=True)
class Evaluation:
    """What train() evaluates, and when: `evaluate=Evaluation(held_out, measure, every="1 epoch")`.

    `every` is an interval as `step.every` has it. `fn`, `batch_size`, `collate`, `metrics` and
    `loader` are those of `trainer.evaluate`. `averaged`: evaluate the averaged weights (`ema`,
    `swa`).
    """

    dataset: Any
    fn: Fn
    every: str = "1 epoch"
    batch_size: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    metrics: Any = None
    averaged: bool = False
    loader: Loader | None = None

    def __post_init__(self) -> None:
        interval_of(self.every)
        require_sums(self.metrics or {})
        if why := refused_dataset(self.dataset):
            raise ConfigError(why)


def examination_of(plan: Evaluation, job: Job) -> Examination:
    """Return the evaluation of a job's model, as it is now. Raises ValueError."""
    return Examination(job, plan.dataset, plan.fn, plan.batch_size, plan.collate, plan.metrics,
                       plan.loader)


def require_evaluation(evaluate: Evaluation | None, job: Job) -> None:
    """Raise ConfigError if train() cannot do an evaluation, or if none gives what `best` needs."""
    if evaluate is None:
        if job.best:
            raise ConfigError(
                f"best is keep_best({job.best.rule.metric!r}, …), but nothing is evaluated: with "
                f'train() give evaluate=Evaluation(held_out, measure, every="1 epoch").')
        return
    if evaluate.averaged and job.average is None:
        raise ConfigError("evaluate has averaged=True, but no weights are averaged. Give ema=0.999 "
                          "or swa=Swa(from_step=…), or leave averaged out.")
    try:
        examination_of(evaluate, job)
    except ValueError as error:
        raise ConfigError(str(error)) from error

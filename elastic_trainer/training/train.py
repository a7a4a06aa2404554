"""train(): training to the end with a loss as a function, on the moves that trainer.py hands to a
loop.

model, optimizer, dataset, loss, numbers → here → weights

    from elastic_trainer import train
    train(model, optimizer, dataset, loss=loss, global_batch=256, microbatches=16, until="3 epochs")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate

from elastic_trainer.data.loader import Loader
from elastic_trainer.evaluate.best import KeepBest
from elastic_trainer.evaluate.evaluation_plan import (
    Evaluation,
    examination_of,
    require_evaluation,
)
from elastic_trainer.loggers.row import Logger
from elastic_trainer.reduce.buffer_rules import Rule
from elastic_trainer.schedule.lengths import ends_interval
from elastic_trainer.schedule.order import Order
from elastic_trainer.state.checkpoint import PART_BYTES
from elastic_trainer.training.averages import Swa
from elastic_trainer.training.job import Result, checked
from elastic_trainer.training.moves import Finished, Microbatch, Move
from elastic_trainer.training.options import Options, Schedule
from elastic_trainer.training.overridden import overridden
from elastic_trainer.training.precision import Precision
from elastic_trainer.training.worker import Worker

Loss = Callable[[torch.nn.Module, Any], torch.Tensor | tuple[torch.Tensor, Any]]


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, dataset: Any, *,
    loss: Loss, global_batch: int, microbatches: int = 8, until: str = "1 epoch", seed: int = 0,
    lr: Schedule | None = None,
    clip_norm: float | None = None, clip_value: float | None = None,
    ema: float | None = None, swa: Swa | None = None,
    evaluate: Evaluation | None = None, best: KeepBest | None = None,
    precision: str = "fp32", scaler: torch.amp.GradScaler | None = None,
    order: str | Order = "shuffled", drop_last: bool = False,
    min_microbatch_samples: int | None = None,
    collate: Callable[[list[Any]], Any] = default_collate, loader: Loader | None = None,
    state: Mapping[str, Any] | None = None, after_step: Callable[[int], None] | None = None,
    checkpoint_every: int | str | None = "auto", keep_last: int = 3, keep_every: int = 0,
    part_bytes: int = PART_BYTES, reduce: str | None = None, compress: bool | str = False,
    predivide: float = 1.0, bucket_bytes: int | None = None,
    cpu_threads: int = 1, on_nan: str = "raise", buffers: Mapping[str, Rule] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    store: str | None = None,
    listeners: Sequence[Callable[[str, dict[str, Any]], None]] | None = None,
    loggers: Sequence[Logger] = (),
    timeline: bool = False, progress: bool = True,
) -> Result:
    """Train to the end, whatever the fleet does, and return the same result on every worker.

    Every worker calls this with a model that was built with the same seed. `loss(model, batch)`
    returns the mean over the batch's samples, a scalar; or a pair: the sum over what was counted
    (tokens, pixels), and the count, as `step.backward(loss_sum, count=n)` has them. `dataset` has
    `len` and `[i]` (or `__getitems__`). `after_step(step)` runs on every worker alike, as the last
    part of each step, under torch.no_grad(): a backward pass of its own needs `with
    torch.enable_grad():`. Modules, parameters and the optimizer's groups stay the same objects.
    `evaluate` evaluates the model behind steps: `Evaluation(held_out, measure, every="1 epoch")`.
    The section Options of the reference has the other options (training/options.py).

    Raises ConfigError for what cannot work, and what the user's code raises (UserExited for its
    sys.exit()). Leaves by SystemExit 75 if this worker is not wanted any more.
    """
    options = overridden(Options(
        global_batch=global_batch, microbatches=microbatches, until=until, seed=seed,
        lr=lr, clip_norm=clip_norm, clip_value=clip_value, ema=ema, swa=swa,
        best=best,
        precision=precision, scaler=scaler,
        order=order, drop_last=drop_last, min_microbatch_samples=min_microbatch_samples,
        collate=collate,
        loader=loader, state=state,
        checkpoint_every=checkpoint_every, keep_last=keep_last, keep_every=keep_every,
        part_bytes=part_bytes, reduce=reduce, compress=compress,
        predivide=predivide, bucket_bytes=bucket_bytes, cpu_threads=cpu_threads,
        on_nan=on_nan, buffers=buffers, run_dir=run_dir, store=store, listeners=listeners or (),
        loggers=loggers,
        timeline=timeline, progress=progress))
    job = checked(model, optimizer, dataset, options, after_step)
    require_evaluation(evaluate, job)
    worker = Worker(job, options)
    return drive(worker.moves(), model, loss, job.precision,
                 partial(evaluate_behind, evaluate, worker) if evaluate else lambda *_: None)


def drive(moves: Generator[Move, None, Result], model: torch.nn.Module, loss: Loss,
          precision: Precision,
          behind: Callable[[int, Callable[[], Move]], None] = lambda *_: None) -> Result:
    """Run the loss of each micro-batch, until the run is finished. What it raises is voted: all
    workers stop in one step. `behind` runs behind each finished step."""
    while True:
        try:
            move = next(moves)
        except StopIteration as end:
            result: Result = end.value
            return result
        if isinstance(move, Microbatch):
            try:
                with precision.batch():
                    found = loss(model, move.batch)
                move.backward(*(found if type(found) is tuple and len(found) == 2 else (found,)))
            except KeyboardInterrupt:
                moves.close()
                raise
            except BaseException as error:  # sys.exit() too
                move.fail(error)
        elif isinstance(move, Finished):
            behind(move.step, partial(next, moves))


def evaluate_behind(evaluate: Evaluation, worker: Worker, step: int,
                    draw: Callable[[], Move]) -> None:
    """Evaluate the model behind a step if that is due. None is due when a finished run is started
    once more: then its last step is shown again."""
    assert worker.loop
    steps_per_epoch = worker.job.schedule.steps_per_epoch
    if not worker.loop.behind.is_running or not ends_interval(
            evaluate.every, step, steps_per_epoch, worker.loop.state.clocks_ms):
        return
    with worker.averaged() if evaluate.averaged else nullcontext():
        means = worker.evaluate(examination_of(evaluate, worker.job), draw)
    try:
        worker.take_for_best(means)
    except Exception as error:  # on all workers alike
        worker.fail(error)
        raise

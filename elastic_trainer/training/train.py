"""train(): training to the end with a loss as a function, on the stages that trainer.py hands to a
loop.

model, optimizer, dataset, loss, numbers → here → weights

    from elastic_trainer import train
    train(model, optimizer, dataset, loss=loss, global_batch=256, microbatches=16, until="3 epochs")
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from elastic_trainer.evaluate.evaluation import (
    Evaluation,
    examination_of,
    require_evaluation,
)
from elastic_trainer.options import Options, shows_options
from elastic_trainer.schedule.intervals import ends_interval
from elastic_trainer.training.configured import in_force
from elastic_trainer.training.job import Result, checked
from elastic_trainer.training.option_names import OF_TRAIN
from elastic_trainer.training.precision import Precision
from elastic_trainer.training.stages import Finished, Microbatch, Stage
from elastic_trainer.training.worker import Worker

if TYPE_CHECKING:
    from typing_extensions import Unpack

Loss = Callable[[torch.nn.Module, Any], torch.Tensor | tuple[torch.Tensor, Any]]


@shows_options()
def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, dataset: Any, *,
    loss: Loss, evaluate: Evaluation | None = None,
    after_step: Callable[[int], None] | None = None, **options: Unpack[Options],
) -> Result:
    """Train to the end, whatever the fleet does, and return the same result on every worker.

    Every worker calls this with a model that was built with the same seed. `loss(model, batch)`
    returns the mean over the batch's samples, a scalar; or a pair: the sum over what was counted
    (tokens, pixels), and the count, as `step.backward(loss_sum, count=n)` has them. `dataset` has
    `len` and `[i]` (or `__getitems__`). `after_step(step)` runs on every worker alike, as the last
    part of each step, under torch.no_grad(): a backward pass of its own needs `with
    torch.enable_grad():`. Modules, parameters and the optimizer's groups stay the same objects.
    `evaluate` evaluates the model after steps: `Evaluation(held_out, measure, every="1 epoch")`.
    The section Options of the reference has the options (options.py).

    Raises ConfigError for what cannot work, and what the user's code raises (UserExited for its
    sys.exit()). Leaves by SystemExit 75 if this worker is not wanted any more.
    """
    held = in_force(options, OF_TRAIN)
    job = checked(model, optimizer, dataset, held, after_step)
    require_evaluation(evaluate, job)
    worker = Worker(job, held)
    return drive(worker.stages(), model, loss, job.precision,
                 partial(evaluate_behind, evaluate, worker) if evaluate else lambda *_: None)


def drive(stages: Generator[Stage, None, Result], model: torch.nn.Module, loss: Loss,
          precision: Precision,
          behind: Callable[[int, Callable[[], Stage]], None] = lambda *_: None) -> Result:
    """Run the loss of each micro-batch, until the run is finished. What it raises is voted: all
    workers stop in one step. `behind` runs after each finished step."""
    while True:
        try:
            stage = next(stages)
        except StopIteration as end:
            result: Result = end.value
            return result
        if isinstance(stage, Microbatch):
            try:
                with precision.batch():
                    found = loss(model, stage.batch)
                stage.backward(*(found if type(found) is tuple and len(found) == 2 else (found,)))
            except KeyboardInterrupt:
                stages.close()
                raise
            except BaseException as error:  # sys.exit() too
                stage.fail(error)
        elif isinstance(stage, Finished):
            behind(stage.step, partial(next, stages))


def evaluate_behind(evaluate: Evaluation, worker: Worker, step: int,
                    draw: Callable[[], Stage]) -> None:
    """Evaluate the model after a step if that is due. None is due when a finished run is started
    once more: then its last step is shown again."""
    assert worker.loop
    steps_per_epoch = worker.job.schedule.steps_per_epoch
    if not worker.loop.after_step.is_running or not ends_interval(
            evaluate.every, step, steps_per_epoch, worker.loop.state.clocks_ms):
        return
    with worker.averaged() if evaluate.averaged else nullcontext():
        means = worker.evaluate(examination_of(evaluate, worker.job), draw)
    try:
        worker.take_for_best(means)
    except Exception as error:  # on all workers alike
        worker.fail(error)
        raise

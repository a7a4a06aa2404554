"""Training, for the loop of the user, and train() for a loss as a function. Read this first.

model, optimizer, dataset, numbers → here → the user's `for step in trainer` ⇄ stages of a worker
(worker.py, loop.py)

    from elastic_trainer import Trainer

    trainer = Trainer(model, optimizer, dataset, global_batch=256, until="10 epochs")
    for step in trainer:                            # a newcomer enters at the current step
        for batch in step:                          # this worker's micro-batches, on the device
            step.backward(loss_of(model, batch))
        print(step.number, step.epoch, step.loss)   # here the step is finished, on every worker

A script with this loop runs under `./horovodrun_elastic.sh -- python my_train.py`, under plain
`horovodrun --host-discovery-script …`, and alone. train() is the same with a loss as a function:

    train(model, optimizer, dataset, loss=loss, global_batch=256, microbatches=16, until="3 epochs")

What always holds:
1. All collectives happen inside `next()`. The user's code never runs in a frame of ours.
2. A step that broke is handed out again by the same inner iterator (step.py). The code after the
   inner loop runs once for each finished step.
3. Each misuse that can be seen raises at once, with the remedy.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from elastic_trainer.data.loader import Loader
from elastic_trainer.evaluate.best import NOT_KEPT, Best
from elastic_trainer.evaluate.evaluation import (
    NOT_FINISHED,
    Evaluation,
    Examination,
    Fn,
    examination_of,
    require_evaluation,
)
from elastic_trainer.options import OF_TRAIN, OF_TRAINER, Options, shows_options
from elastic_trainer.schedule.intervals import ends_interval
from elastic_trainer.training.job.job import Result, checked
from elastic_trainer.training.job.optimizers import hooked
from elastic_trainer.training.job.precision import Precision
from elastic_trainer.training.job.settings import in_force
from elastic_trainer.training.loop_exit import LoopExit
from elastic_trainer.training.stages import Finished, Microbatch, Stage
from elastic_trainer.training.step import Step
from elastic_trainer.training.worker import Worker, remark_on_carried

if TYPE_CHECKING:
    from typing_extensions import Unpack

ANOTHER = ("another trainer's loop is running: a process is one worker of one run. End that loop "
           "first, or give one Trainer several optimizers.")
AGAIN = "this trainer was iterated before. Build a new Trainer for another run."


class Trainer:
    """Trains to the end, whatever the fleet does: an iterator over the steps that are left.

    Every worker builds the same model, with the same seed, and runs the same loop. `optimizer` is
    one, or several by name: then each has a phase of its own in every step (`step.phase`).
    `dataset` has `len` and `[i]` (or `__getitems__`). A batch is what `collate` returns, with its
    tensors on the model's device. `until` is a number of epochs or of steps: "10 epochs", "5000
    steps". The section Options of the reference has the other options (options.py).

    What the loop may keep, and where:

    - `state={"best": best}`: objects with state_dict and load_state_dict. They are in each
      checkpoint, and a newcomer receives them. Change them after the inner loop only, in the same
      way on every worker.
    - Outside of `state`: what does not matter when it is lost, such as a progress bar or a timer.
    - Inside the inner loop nothing may be kept: its code runs again for a step that broke. It runs
      first for batches that are only tried (the warm-up). Use step.log() for sums.
    - Before the inner loop the number of the step is not always known. Put what depends on
      step.number into the inner loop.
    - After the inner loop the code runs once for each finished step. A run that goes on from a
      checkpoint runs it again for the steps that it does again. Log with step.number.

    A run that is finished does no more steps. docs/guide/script.md says which code runs again.

    The trainer clears and scales gradients, and steps the optimizer. To clip, use `clip_norm`:
    `clip_grad_norm_` in the loop raises, because a batch has a part of the gradient only, and
    after the inner loop the step is applied.

    Raises ConfigError for what cannot work.
    """

    _in_thread: ClassVar[threading.local] = threading.local()
    """The trainer whose loop runs in this thread."""

    @shows_options()
    def __init__(self, model: torch.nn.Module,
                 optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
                 dataset: Any, **options: Unpack[Options]):
        held = in_force(options, OF_TRAINER)
        self._worker = Worker(checked(model, optimizer, dataset, held, words=OF_TRAINER), held)
        self._stages = self._worker.stages()
        self._exit = LoopExit(self._worker, self._end_with)
        self._step: Step | None = None
        self._was_entered = False
        self._result: Result | None = None
        self._ended_with: BaseException | None = None

    # --- where this worker is ---------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's number in the world. It may change with each step. In the first batches,
        which are only tried (the warm-up), it is -1, and `size` is 0.

        Before the first inner loop it is not known: reading it there, or `size` or `is_first`,
        raises RuntimeError.
        """
        self._require_place("rank")
        return self._worker.rank

    @property
    def size(self) -> int:
        """The number of workers, as long as `rank` is known."""
        self._require_place("size")
        return self._worker.size

    @property
    def is_first(self) -> bool:
        """True on one worker of the world: for output that may be missing or repeated.

        If this worker dies, its successor does not run its code again for the steps that both have
        finished. For the last of them, the code of both may run, or of none. What must not be lost
        belongs into `state`.
        """
        self._require_place("is_first")
        return self._worker.rank == 0

    def _require_place(self, what: str) -> None:
        is_tried = self._step is not None and self._step.is_tried
        if not (self._worker.has_joined or is_tried or self._result):
            raise RuntimeError(
                f"trainer.{what} is not known yet: this worker has not joined the run. Read it "
                f"inside of `for batch in step`, or after it. What the first worker needs (a "
                f"writer, a progress bar) is made there, when it is used first.")

    @property
    def steps(self) -> int:
        """The number of steps of the whole run, also before the loop. For a progress bar, after
        the inner loop: `bar.update(step.number + 1 - bar.n)`; `bar = tqdm(total=trainer.steps)`."""
        return self._worker.job.schedule.steps

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of one pass over the dataset, also before the loop."""
        return self._worker.job.schedule.steps_per_epoch

    @property
    def result(self) -> Result:
        """The result of the finished run, the same on every worker."""
        if self._result is None:
            raise RuntimeError("the run is not finished, so it has no result. Read trainer.result "
                               "after the loop.")
        return self._result

    def evaluate(self, dataset: Any, fn: Fn, *, batch_size: int | None = None,
                 collate: Callable[[list[Any]], Any] | None = None, metrics: Any = None,
                 loader: Loader | None = None, decides: bool = True) -> dict[str, Any]:
        """Return the means of `fn(model, batch)`, {"accuracy": (hits, n)}, over the dataset: each
        sample once, shared by all workers, the same in every world. A plain number is summed.

        Call it on every worker, after the inner loop. `batch_size` is by default that of a
        micro-batch. `metrics` has objects of torchmetrics by name, which `fn` updates. Processes of
        `loader` start at the first call with this dataset, and stay. `decides`: the option `best`
        follows this evaluation.
        """
        examination = Examination(self._worker.job, dataset, fn, batch_size, collate, metrics,
                                  loader)
        self._require_finished("evaluate")
        means = self._worker.evaluate(examination, self._next)
        if decides:
            self._worker.take_for_best(means)
        return means

    @property
    def best(self) -> Best:
        """The best evaluation so far: its `value`, its `step`, and how many evaluations since
        (`waited`)."""
        if self._worker.job.best is None:
            raise RuntimeError(NOT_KEPT)
        return self._worker.job.best

    def averaged(self) -> AbstractContextManager[None]:
        """Let the model have the averaged weights (`ema`, `swa`) in a block of `with`: after the
        inner loop, or when the run is finished. What the block changes in weights and buffers is
        dropped. With `shard` each worker has a part of the average: enter the block on all."""
        self._require_finished("averaged")
        return self._worker.averaged(self._next)

    def _require_finished(self, what: str) -> None:
        is_in_loop = getattr(self._in_thread, "trainer", None) is self
        if not (self._step and self._step.is_finished if is_in_loop else self._result):
            raise RuntimeError(NOT_FINISHED.replace("evaluate", what))

    # --- the loop ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        """Yield each step that is left. A standby waits in here until it gets a place."""
        if self._was_entered:
            raise RuntimeError(AGAIN)
        self._require_alone()
        self._was_entered = True
        return self._steps()

    def _require_alone(self) -> None:
        if getattr(self._in_thread, "trainer", None) is not None:
            raise RuntimeError(ANOTHER)

    def _steps(self) -> Generator[Step, None, None]:
        self._require_alone()  # zip() enters several before it asks the first one for a step
        hook = hooked(self._worker.job.optimizer, self._worker.forbid_step)
        self._in_thread.trainer = self
        self._exit.enter()
        try:
            while (stage := self._next()) is not None:
                self._step = Step(self._worker, self._next, self._fail, stage)
                yield self._step
                remark_on_carried(self._worker)
                if misuse := self._worker.left_averaged() or self._step.end():
                    self._fail(misuse)
            self._exit.finish()
        except GeneratorExit:
            self._worker.advice = self._step.advice if self._step else ""
            self._exit.leave(sys._getframe().f_back)
            if self._worker.advice:
                print(f"elastic-trainer: {self._worker.advice}", file=sys.stderr, flush=True)
            if not self._worker.launch.horovod:
                self._stages.close()  # it writes result.json
            raise
        finally:
            self._in_thread.trainer = None
            self._worker.carried.drop()
            hook.close()

    def _next(self) -> Stage | None:
        """Let the worker go on to its next stage; None: the run is finished.

        What the worker raises passes through the user's loop, which it may reach inside of the
        inner loop. The worker has reported it, so the loop is not left by the user.
        """
        try:
            return next(self._stages)
        except StopIteration as end:
            if self._ended_with is not None:
                raise caught(self._ended_with) from self._ended_with
            self._result = end.value or self._result  # None: asked again after a step without one
            return None
        except KeyboardInterrupt:
            raise  # of a person, who is in the user's code as well as here
        except BaseException as error:
            self._ended_with = error
            self._exit.finish()
            raise

    def _fail(self, error: RuntimeError) -> NoReturn:
        self._exit.finish()
        self._worker.fail(error)
        raise error

    def _end_with(self, error: BaseException) -> None:
        if self._step and self._worker.must_vote:
            self._step.give_up(error)
        self._worker.end_with(error, self._stages)


def caught(error: BaseException) -> RuntimeError:
    """Return what to raise if the script goes on after an exception that has ended its worker."""
    return RuntimeError(
        f"the run has ended with {type(error).__name__}, which the script has caught "
        f"({str(error)[:200]}). Let the exception end the script.")


# --- train() -------------------------------------------------------------------------------------

Loss = Callable[[torch.nn.Module, Any], torch.Tensor | tuple[torch.Tensor, Any]]


@shows_options()
def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, dataset: Any, *, loss: Loss,
          evaluate: Evaluation | None = None, after_step: Callable[[int], None] | None = None,
          **options: Unpack[Options]) -> Result:
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
                 partial(evaluate_after, evaluate, worker) if evaluate else lambda *_: None)


def drive(stages: Generator[Stage, None, Result], model: torch.nn.Module, loss: Loss,
          precision: Precision,
          after: Callable[[int, Callable[[], Stage]], None] = lambda *_: None) -> Result:
    """Run the loss of each micro-batch, until the run is finished. What it raises is voted: all
    workers stop in one step. `after` runs after each finished step."""
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
            after(stage.step, partial(next, stages))


def evaluate_after(evaluate: Evaluation, worker: Worker, step: int,
                    draw: Callable[[], Stage]) -> None:
    """Evaluate the model after a step if that is due. None is due when a finished run is started
    once more: then its last step is shown again."""
    assert worker.loop
    steps_per_epoch = worker.job.schedule.steps_per_epoch
    if not worker.loop.after_step.is_running or not ends_interval(
            evaluate.every, step, steps_per_epoch, worker.loop.state.clocks_ms):
        return
    with worker.averaged(draw) if evaluate.averaged else nullcontext():
        means = worker.evaluate(examination_of(evaluate, worker.job), draw)
    try:
        worker.take_for_best(means)
    except Exception as error:  # on all workers alike
        worker.fail(error)
        raise

"""Training, for the loop of the user. Read this first.

model, optimizer, dataset, numbers → here → the user's `for step in trainer` ⇄ moves of a worker
(worker.py, loop.py)

    from elastic_trainer import Trainer

    trainer = Trainer(model, optimizer, dataset, global_batch=256, shards=32, until="10 epochs",
    seed=0)
    for step in trainer:                            # a newcomer enters at the current step
        for batch in step:                          # the shards of this worker, seeded, on the
        device
            step.backward(loss_of(model, batch))
        print(step.number, step.epoch, step.loss)   # here the step is finished, on every worker

under `./horovodrun_elastic.sh -- python my_train.py`, under plain `horovodrun
--host-discovery-script …`, or as `python my_train.py` alone. train() is the same with a loss as a
function.

What always holds:
1. All collectives happen inside `next()`. The user's code never runs in a frame of ours.
2. A step that broke is handed out again by the same inner iterator. The code behind the inner loop
   runs once for each finished step.
3. Each misuse that can be seen raises at once, with the remedy.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate

from elastic_trainer.config import ConfigError
from elastic_trainer.state.checkpoint import PART_BYTES
from elastic_trainer.training.job import Options, Result, checked
from elastic_trainer.training.leaving import Leaving
from elastic_trainer.training.moves import Begun, Finished, Move, PhaseFinished, Shard
from elastic_trainer.training.worker import Worker


class Trainer:
    """Trains to the end, whatever the fleet does: an iterator over the steps that are left.

    Every worker builds the same model, with the same seed, and runs the same loop. `dataset` has
    `len` and `[i]` (or `__getitems__`). A batch is what `collate` returns, with its tensors on the
    model's device. `until` is a number of epochs or of steps: "10 epochs", "5000 steps". `lr` is a
    function, which multiplies the optimizer's rates by `lr(step)`, or a torch scheduler of this
    optimizer, which is stepped once per finished step. The other options mean what they mean in
    train(). `state` is what train() calls `extras`.

    What the loop may keep, and where:
    - `state={"ema": ema}`: objects with state_dict and load_state_dict. They are in each
      checkpoint, and a newcomer receives them. Change them behind the inner loop only, in the same
      way on every worker.
    - Outside of `state`: what does not matter when it is lost, such as a progress bar, a timer, the
      last printed loss. A newcomer and a resumed run begin without it, and it is not put back when
      a step is done again.
    - Inside the inner loop nothing may be kept: its code runs again for a step that broke, and it
      runs first for a shard that is only tried (the warm-up). Each worker runs other shards there.
      Use step.log() for sums.
    - Behind the inner loop the code runs once for each finished step. A run that goes back to an
      older checkpoint, because replicas held different bits, runs it again for the steps that it
      does again.

    A debugger works: `breakpoint()` in the loop stops this worker alone, and its heartbeats go on.
    The other workers wait in a collective, until Horovod's time-out breaks their generation, and
    then for `stuck_s`. Set both for a session: ELASTIC_TRAINER_LIMITS="gloo_s=3600,stuck_s=3600".

    Raises ConfigError for what cannot work.
    """

    _in_thread: ClassVar[threading.local] = threading.local()
    """The trainer whose loop runs in this thread."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        dataset: Any,
        *,
        global_batch: int,
        shards: int = 8,
        until: str = "1 epoch",
        seed: int = 0,
        lr: Callable[[int], float] | LRScheduler | None = None,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        state: Mapping[str, Any] | None = None,
        drop_last: bool = False,
        min_shard_samples: int | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        checkpoint_every: int | str = "auto",
        keep_last: int = 3,
        keep_every: int = 0,
        part_bytes: int = PART_BYTES,
        reduce: str | None = None,
        compress: bool = False,
        cpu_threads: int = 1,
        on_nan: str = "raise",
        run_dir: str | os.PathLike[str] | None = None,
        store: str | None = None,
        listeners: Sequence[Callable[[str, dict[str, Any]], None]] = (),
        progress: bool = True,
    ):
        epochs, max_steps = length_of(until)
        options = Options(
            global_batch=global_batch,
            shards=shards,
            epochs=epochs,
            max_steps=max_steps,
            seed=seed,
            schedule=lr,
            clip_norm=clip_norm,
            scaler=scaler,
            extras=state,
            drop_last=drop_last,
            min_shard_samples=min_shard_samples,
            collate=collate,
            checkpoint_every=checkpoint_every,
            keep_last=keep_last,
            keep_every=keep_every,
            part_bytes=part_bytes,
            reduce=reduce,
            compress=compress,
            cpu_threads=cpu_threads,
            on_nan=on_nan,
            run_dir=run_dir,
            store=store,
            listeners=listeners,
            progress=progress,
        )
        self._worker = Worker(checked(model, optimizer, dataset, options), options)
        self._moves = self._worker.moves()
        self._was_entered = False
        self._result: Result | None = None

    # --- where this worker is
    # -------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's number in the world; -1 until it has joined one. It may change with each
        step."""
        return self._worker.rank

    @property
    def size(self) -> int:
        """The number of workers; 0 until this one has joined."""
        return self._worker.size

    @property
    def is_first(self) -> bool:
        """True on one worker of the world: for what is to be printed or written once."""
        return self.rank == 0

    @property
    def result(self) -> Result:
        """The result of the finished run, the same on every worker."""
        if self._result is None:
            raise RuntimeError(
                "the run is not finished, so it has no result. Read trainer.result behind the loop."
            )
        return self._result

    # --- the loop ---------------------------------------------------------------------------------
    # ----------------

    def __iter__(self) -> Iterator[Step]:
        """Yield each step that is left. A standby waits in here until it gets a place."""
        if self._was_entered:
            raise RuntimeError(
                "this trainer was iterated before. Build a new Trainer for another run."
            )
        if getattr(self._in_thread, "trainer", None) is not None:
            raise RuntimeError(
                "another trainer's loop is running: a process is one worker of one run. End that "
                "loop "
                "first, or give one Trainer several optimizers."
            )
        self._was_entered = True
        return self._steps()

    def _steps(self) -> Generator[Step, None, None]:
        leaving = Leaving(self._worker)
        hook = self._worker.job.optimizer.register_step_pre_hook(self._forbid_step)
        self._in_thread.trainer = self
        leaving.enter()
        step: Step | None = None
        try:
            while (move := self._next()) is not None:
                step = Step(self, move)
                yield step
                if misuse := step.end():
                    raise self._failed(misuse)
            leaving.finish()
        except GeneratorExit:
            leaving.leave(sys._getframe().f_back)
            if step is not None and step.advice:
                print(f"elastic-trainer: {step.advice}", file=sys.stderr, flush=True)
            if not self._worker.launch.horovod:
                self._moves.close()  # it writes result.json
            raise
        except BaseException:
            leaving.finish()  # it was reported where it was raised
            raise
        finally:
            self._in_thread.trainer = None
            hook.remove()

    def _next(self) -> Move | None:
        """Let the worker go on to its next move; None: the run is finished."""
        try:
            return next(self._moves)
        except StopIteration as end:
            self._result = end.value
            return None

    def _failed(self, error: Exception) -> Exception:
        """Report an error of the loop, which is then to be raised."""
        self._worker.fail(error)
        return error

    def _forbid_step(self, *_: Any) -> None:
        if not self._worker.is_applying:
            raise RuntimeError(
                "optimizer.step() was called in the loop. The trainer calls it, once for each "
                "step, when every "
                "worker's gradient has arrived. Remove the call (and zero_grad(), which is not "
                "needed)."
            )


class Step:
    """One step of the run, in the hands of the user's loop."""

    def __init__(self, trainer: Trainer, move: Move):
        self._trainer, self._worker = trainer, trainer._worker
        self._phases = self._worker.job.phases
        self._entered: list[str] = []
        """The phases whose loops were entered."""
        self._stage = "begun"  # begun, running, finished, over
        self._done = 0
        """How many phases are done, on every worker."""
        self._shard: Shard | None = None
        self.number = 0
        """Counted from 0. It is 0 in the first pass of a worker that has not joined yet. Inside the
        inner loop it may change: to the number of the step that the others do, and to an older one
        if the run goes back."""
        self._take(move, 0)

    def __repr__(self) -> str:
        return f"Step({self.number}, {self._stage})"

    @property
    def epoch(self) -> int:
        """The pass over the dataset that this step belongs to, counted from 0."""
        return self._worker.job.schedule.epoch(self.number)

    @property
    def loss(self) -> float:
        """The mean loss over the samples of all workers; of the last phase, if there are several.
        Known behind the inner loop."""
        self._require_finished("loss")
        assert self._worker.loop
        return self._worker.loop.state.loss

    @property
    def losses(self) -> dict[str, float]:
        """The loss of each phase, by name. Known behind the last inner loop."""
        self._require_finished("losses")
        assert self._worker.loop
        return dict(self._worker.loop.end.losses)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batch of each shard of this worker, until the step is finished on every
        worker."""
        if len(self._phases) > 1:
            raise RuntimeError(
                f"the trainer has the optimizers {', '.join(self._phases)}, and each has a loop of "
                f"its own. Use `for batch in step.phase({self._phases[0]!r})`."
            )
        return self.phase(self._phases[0])

    def phase(self, name: str) -> Iterator[Any]:
        """Yield the batch of each shard of this worker, until the optimizer of this name has made
        its step on every worker. All phases of a step have the same samples.

        A worker that joins in the middle of a step has no batches in the phases that are done.
        """
        if self._stage == "over":
            raise RuntimeError(self._is_over())
        if name not in self._phases:
            raise ValueError(f"there is no phase {name!r}. Use one of {list(self._phases)}.")
        if name in self._entered:
            raise RuntimeError(
                f"step {self.number} is iterated a second time: its batches come once. Use one "
                f"loop over them, without a break."
            )
        if name != (expected := self._phases[len(self._entered)]):
            raise RuntimeError(
                f"the phase {name!r} of step {self.number} comes before {expected!r}. Run them in "
                f"the order in which the optimizers were given: {', '.join(self._phases)}."
            )
        if self._stage == "running" and self._done < len(self._entered):
            raise RuntimeError(
                f"the phase {name!r} of step {self.number} begins, but the one before it was left "
                f"early. Run each loop to its end, without a break."
            )
        self._entered.append(name)
        if self._stage == "begun":
            self._stage = "running"
        return self._batches(len(self._entered) - 1)

    def _batches(self, phase: int) -> Generator[Any, None, None]:
        while self._stage == "running" and self._done <= phase:
            move = self._trainer._next()
            if isinstance(move, Shard):
                self._shard = move
                yield move.batch
            else:
                self._shard = None
                self._take(move, phase)

    def _take(self, move: Move | None, phase: int) -> None:
        """Note what the worker has moved on to, while the loop is in a phase."""
        match move:
            case Begun():
                self.number, self._done = move.step, move.phase
                if self._done < phase:
                    raise self._trainer._failed(
                        RuntimeError(
                            f"the run goes back to step {move.step}, and the loop is in the phase "
                            f"{self._phases[phase]!r}. Start the same command again."
                        )
                    )
            case PhaseFinished():
                self.number, self._done = move.step, move.phase + 1
            case Finished():
                self.number, self._done, self._stage = move.step, len(self._phases), "finished"
            case None:
                self._stage = "finished"

    @property
    def metrics(self) -> dict[str, float]:
        """What the step has logged, by name: the sum over all shards by their number of items.
        Known behind the inner loop, and the same number in every world."""
        self._require_finished("metrics")
        assert self._worker.loop
        return dict(self._worker.loop.end.metrics)

    def backward(self, loss: torch.Tensor, count: float | None = None) -> None:
        """Run the backward pass of the batch in hand, once.

        `loss` is the mean over its samples, a tensor of one value. With `count`, it is the sum over
        what was counted (tokens, pixels): the gradient is then that of the mean over all that the
        shards of the step have counted.
        """
        self._in_hand("backward()").backward(loss, count)

    def log(self, **sums: tuple[Any, Any]) -> None:
        """Add sums of the batch in hand to what the step logs: `step.log(acc=(hits, n))`.

        Each name has a sum and a number of items. `step.metrics` then has their quotient over all
        shards. Log the same names for each batch. A tensor is read at once, so on a GPU this waits
        for the device.
        """
        shard = self._in_hand("log()")
        for name, value in sums.items():
            shard.log(name, value)

    @property
    def advice(self) -> str:
        """What a person should know if the user's code has failed on the batch in hand."""
        return self._shard.advice if self._shard else ""

    def _in_hand(self, what: str) -> Shard:
        if self._stage == "over":
            raise RuntimeError(self._is_over())
        if self._shard is None:
            raise RuntimeError(
                f"{what} was called in step {self.number} without a batch. Call it inside of "
                f"`for batch in step`."
            )
        return self._shard

    def every(self, interval: str) -> bool:
        """Return whether this step ends an interval: "1 epoch", "500 steps", "30 s", "10 min", "2
        h".

        The same on every worker: rank 0's clock, which comes with the vote, decides of times. They
        are times of training, over all attempts.
        """
        self._require_finished("every()")
        number, unit = interval_of(interval)
        assert self._worker.loop
        if unit in SECONDS:
            before_ms, now_ms = self._worker.loop.state.clocks_ms
            interval_ms = 1000 * number * SECONDS[unit]
            return now_ms // interval_ms > before_ms // interval_ms
        steps = number * (self._worker.job.schedule.steps_per_epoch if unit == "epoch" else 1)
        return (self.number + 1) % steps == 0

    def stop(self, reason: str) -> None:
        """Finish the run early, on every worker: after this step if called in its inner loop, else
        after the next one, whose vote tells all workers.

        One worker is enough. The run then counts as finished: the same command does no more steps.
        """
        if self._stage == "over":
            raise RuntimeError(self._is_over())
        self._worker.finish(reason)

    def end(self) -> RuntimeError | None:
        """End this step: the loop asks for the next one. Returns the misuse if an inner loop did
        not run to the end."""
        stage, self._stage = self._stage, "over"
        if stage == "finished":
            return None
        is_left = self._done < len(self._entered)
        of = f"the phase {self._phases[self._done]!r} of " if len(self._phases) > 1 else ""
        how = (
            f"the inner loop of {of}step {self.number} was {'left early' if is_left else 'not run'}"
        )
        return RuntimeError(
            f"{how}, so samples would be lost. Run `for batch in step` to its end: it ends when "
            f"the "
            f"step is finished on every worker.")

    def _require_finished(self, what: str) -> None:
        if self._stage == "over":
            raise RuntimeError(self._is_over())
        if self._stage != "finished":
            raise RuntimeError(
                f"{what} of step {self.number} is known when the step is finished. Use it behind "
                f"`for batch in step`."
            )

    def _is_over(self) -> str:
        return (
            f"step {self.number} is over, and the loop is in a later one. Use the step that "
            f"`for step in trainer` gives."
        )


SECONDS = {"s": 1, "min": 60, "h": 3600}


def interval_of(text: str) -> tuple[int, str]:
    """Return the number and the unit of an interval. Raises ConfigError."""
    units = r"\s*(\d[\d_]*)\s*(?:(epoch|step)s?|(s|min|h))\s*"
    found = re.fullmatch(units, text) if isinstance(text, str) else None
    if not found or not int(found[1]):
        raise ConfigError(
            f"every() got {text!r}. Use a number and a unit: \"1 epoch\", \"500 steps\", \"10 "
            f"min\"."
        )
    return int(found[1]), found[2] or found[3]


def length_of(text: str) -> tuple[int | None, int | None]:
    """Return the epochs or the steps that a text like "10 epochs" or "5000 steps" names. Raises
    ConfigError."""
    found = (
        re.fullmatch(r"\s*(\d[\d_]*)\s+(epoch|step)s?\s*", text) if isinstance(text, str) else None
    )
    if not found or not int(found[1]):
        raise ConfigError(
            f'until is {text!r}. Use a number of epochs or of steps: "10 epochs", "5000 steps".'
        )
    return (int(found[1]), None) if found[2] == "epoch" else (None, int(found[1]))

"""train(): training to the end with a loss as a function, on the moves that trainer.py hands to a
loop.

model, optimizer, dataset, loss, numbers → here → weights

    from elastic_trainer import train
    train(model, optimizer, dataset, loss=loss, global_batch=256, shards=16, epochs=3, seed=0)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate

from elastic_trainer.state.checkpoint import PART_BYTES
from elastic_trainer.training.job import Options, Result, checked
from elastic_trainer.training.moves import Move, Shard
from elastic_trainer.training.worker import Worker

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    loss: Loss,
    global_batch: int,
    shards: int = 8,
    epochs: int | None = None,
    seed: int = 0,
    max_steps: int | None = None,
    schedule: Callable[[int], float] | LRScheduler | None = None,
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    drop_last: bool = False,
    min_shard_samples: int | None = None,
    collate: Callable[[list[Any]], Any] = default_collate,
    extras: Mapping[str, Any] | None = None,
    after_step: Callable[[int], None] | None = None,
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
    listeners: list[Callable[[str, dict[str, Any]], None]] | None = None,
    progress: bool = True,
) -> Result:
    """Train to the end, whatever the fleet does, and return the same result on every worker.

    Every worker calls this with a model that was built with the same seed. `loss(model, batch)`
    returns the mean over the batch's samples, a scalar. `dataset` has `len` and `[i]` (or
    `__getitems__`). A batch is what `collate` returns: its tensors are moved to the model's device
    in containers, dataclasses, and objects with a method `to(device)`. A global batch is always
    `shards` parts. Workers share the parts, so batch, learning rate and result do not depend on
    their number. The run has `max_steps` steps, or `epochs` passes over the dataset (one, if
    neither is given). If both are given, the earlier end holds. `schedule` is a function:
    `schedule(step)` multiplies the optimizer's learning rates. Or it is a torch scheduler of this
    optimizer: `train` steps it once per finished step (not per epoch), and it is part of the state.
    ReduceLROnPlateau gets the loss of each step, so its patience counts steps. Nothing else may set
    a rate. `clip_norm` clips the global norm. `extras` are objects with state_dict and
    load_state_dict that belong to the state (a moving average of the weights, metrics). They change
    only in `after_step(step)`, which runs on every worker alike, as the last part of the step,
    under torch.no_grad(): a backward pass of its own needs `with torch.enable_grad():`. Modules,
    parameters and the optimizer's groups stay the same objects. An epoch whose samples do not
    divide by `global_batch` ends with a short batch; `drop_last` leaves those samples out. Each
    shard of a short batch has at least `min_shard_samples` samples, so fewer shards have any; None:
    2 for a model with BatchNorm, which cannot compute a variance of one sample, else 1. A loss that
    is not finite ends the run with LossNotFinite, which names step, shards and samples, before the
    step is applied (`on_nan="raise"`). With "skip" the step is finished and its samples count, but
    weights, optimizer, scaler and buffers stay as they were; the schedule goes on, and `after_step`
    is called. With "continue" the step is applied. `checkpoint_every` is a number of steps (50), of
    seconds ("30s"), or "auto": as often as it pays, for at most 1 % of the time ("0.5%": auto, for
    at most that). The last `keep_last` checkpoints stay, and the first at or after each multiple of
    `keep_every` steps. Objects in the store have `part_bytes` bytes, whatever the world's size (≤
    64 MiB). `store` is a folder or s3://bucket/prefix of this run's own; None takes the launcher's
    (--store, and behind it the run's name). `reduce` is "exact" (the same bits for every world) or
    "ring" (float allreduce; `compress` sends 16 bits); None takes the launcher's. `cpu_threads` is
    torch's thread count: part of the arithmetic, so the same everywhere. `run_dir` is where events,
    result and checkpoints go when no launcher gives a folder. `listeners` are called with every
    event of this worker. What a listener raises does not end the run: its traceback is logged, and
    it is called again at the next event. `progress` shows the progress on stderr, where no launcher
    does that.

    Raises ConfigError for what cannot work, and what the user's code raises (UserExited for its
    sys.exit()). Leaves by SystemExit 75 if this worker is not wanted any more.
    """
    options = Options(
        global_batch=global_batch,
        shards=shards,
        epochs=epochs,
        seed=seed,
        max_steps=max_steps,
        schedule=schedule,
        clip_norm=clip_norm,
        scaler=scaler,
        drop_last=drop_last,
        min_shard_samples=min_shard_samples,
        collate=collate,
        extras=extras,
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
        listeners=listeners or (),
        progress=progress,
    )
    worker = Worker(checked(model, optimizer, dataset, options, after_step), options)
    return drive(worker.moves(), model, loss)


def drive(moves: Generator[Move, None, Result], model: torch.nn.Module, loss: Loss) -> Result:
    """Run the loss of each shard, until the run is finished. What it raises is voted: all workers
    stop in one step."""
    while True:
        try:
            move = next(moves)
        except StopIteration as end:
            result: Result = end.value
            return result
        if isinstance(move, Shard):
            try:
                move.backward(loss(model, move.batch))
            except KeyboardInterrupt:
                moves.close()
                raise
            except BaseException as error:  # sys.exit() too
                move.fail(error)

"""The options that train() and Trainer share, each with its meaning. docs/reference.md has them.

arguments of train() and Trainer → here → job.py (checked), worker.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate

from elastic_trainer.config import ConfigError
from elastic_trainer.data.loader import Loader
from elastic_trainer.evaluate.best import KeepBest
from elastic_trainer.loggers.row import Logger
from elastic_trainer.reduce.buffer_rules import Rule
from elastic_trainer.reduce.sending import Sending, sending_of
from elastic_trainer.schedule.learning_rate import LinearScaling
from elastic_trainer.schedule.order import Order
from elastic_trainer.state.cadence import Cadence
from elastic_trainer.state.checkpoint import PART_BYTES, Plan
from elastic_trainer.training.averages import Swa

Rates = Callable[[int], float] | LRScheduler | Mapping[str, LRScheduler]
"""What sets the learning rates: a function of the step, a torch scheduler, or several by name."""
Schedule = Rates | LinearScaling
"""The same, or what becomes a function of the step when the global batch is known."""
OF_CHECKPOINTS = ("checkpoint_every", "keep_last", "keep_every", "part_bytes")
"""The options that have no effect without a store."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of train() and Trainer, as the user gave them."""

    global_batch: int
    """The number of samples of a step, over all workers."""
    microbatches: int = 8
    """The number of parts of a global batch. Workers share the parts, so batch, learning rate and
    result do not depend on the number of workers. BatchNorm computes its statistics over one part,
    so with BatchNorm this number is part of the result."""
    until: str = "1 epoch"
    """The length of the run: a number of passes over the dataset ("10 epochs"), or of steps ("5000
    steps")."""
    seed: int = 0
    """Seeds the order of the samples, and the random numbers of each micro-batch."""
    lr: Schedule | None = None
    """A function: `lr(step)` multiplies the rates with which the optimizer was built. Or a
    torch scheduler of this optimizer: it is stepped once for each finished step (not epoch), and it
    is part of the state. With several optimizers, a dict of torch schedulers by the names of the
    optimizers; one that has none keeps its rates. ReduceLROnPlateau gets the loss of each step, so
    its patience counts steps. Nothing else may set a rate."""
    clip_norm: float | None = None
    """The largest global norm of the gradient: a larger one is scaled down to it."""
    clip_value: float | None = None
    """The largest absolute value of an element of the gradient: larger ones are set to it. With
    `clip_norm` it is an error."""
    ema: float | None = None
    """Keep an exponential moving average of the weights, as torch's AveragedModel with
    get_ema_multi_avg_fn does: this share of the average stays in each step. It is part of the
    state. `trainer.averaged()` shows it."""
    swa: Swa | None = None
    """Keep the mean of the weights (stochastic weight averaging): `Swa(from_step=1000, every=50)`.
    With `ema` it is an error."""
    best: KeepBest | None = None
    """Keep the checkpoint of the step with the best evaluation, and finish the run when no better
    one comes: `keep_best("accuracy", mode="max", patience=5)`. It is part of the state."""
    precision: str = "fp32"
    """The precision of the forward pass: "bf16" or "fp16" let torch.autocast be on while your code
    computes a batch, also in the warm-up and in evaluate(). Weights keep their type. "fp16" makes a
    `scaler`, if none is given. docs/guide/optimization.md."""
    scaler: torch.amp.GradScaler | None = None
    """Scales the loss, for training in 16 bits. It is part of the state."""
    order: str | Order = "shuffled"
    """The order of the samples in an epoch: "shuffled" (drawn for each epoch), "sequential" (that
    of the dataset), `Weighted(weights)` or `LikeLength(lengths)`. A `Mixture` of datasets has an
    order of its own."""
    drop_last: bool = False
    """Leave out the samples of an epoch that do not fill a global batch. Otherwise the epoch ends
    with a short batch."""
    min_microbatch_samples: int | None = None
    """The fewest samples of a micro-batch of a short batch: fewer micro-batches then have any.
    None: 2 for a model with BatchNorm, which cannot compute a variance of one sample, else 1."""
    collate: Callable[[list[Any]], Any] = default_collate
    """Makes a batch of a list of samples. The tensors of the batch are moved to the model's device,
    also those in containers, dataclasses, and objects with a method `to(device)`."""
    loader: Loader | None = None
    """Loader processes: `Loader(workers=4)`. They read the next micro-batches of each worker while
    it computes. Each sample then has random numbers of its own. None: the worker reads each
    micro-batch when it computes it."""
    state: Mapping[str, Any] | None = None
    """Objects with state_dict and load_state_dict that belong to the state, by name: a moving
    average of the weights, metrics. They change only in `after_step` (with Trainer: behind the
    inner loop)."""
    checkpoint_every: int | str | None = "auto"
    """The interval of checkpoints: a number of steps (50), of seconds ("30s"), or "auto": as often
    as it pays, for at most 1 % of the time ("0.5%": for at most that). 0 and None: none but the
    last, of the run or of an attempt that is stopped, and that of the best evaluation."""
    keep_last: int = 3
    """The number of the newest checkpoints that stay in the store."""
    keep_every: int = 0
    """Of the older ones, the first checkpoint at or after each multiple of this number of steps
    stays; 0: none."""
    part_bytes: int = PART_BYTES
    """The size of the objects in the store in bytes, whatever the world's size; at most 64 MiB."""
    reduce: str | None = None
    """The reducer: "exact" (the same bits in every world) or "ring" (float allreduce). None takes
    the launcher's."""
    compress: bool | str = False
    """Send gradients in 16 bits, with the reducer "ring": "bf16" (True is the same), or "fp16",
    which needs a scaler. Losses, counts and the statistics of buffers keep 32 bits."""
    predivide: float = 1.0
    """Divide gradients by this number before they are sent in 16 bits, and multiply the sum by it,
    so that "fp16" does not overflow."""
    bucket_bytes: int | None = None
    """How much of the gradient the reducer "ring" sends at once; None: 1 MiB."""
    cpu_threads: int = 1
    """The number of torch's threads. It is part of the arithmetic, so the same on every worker."""
    on_nan: str = "raise"
    """What a loss that is not finite does. "raise": it ends the run, before the step is applied,
    with LossNotFinite, which names step, micro-batches and samples. "skip": the step is finished
    and its samples count, but weights, optimizer, scaler and buffers stay as they were. The
    schedule goes on. "continue": the step is applied."""
    buffers: Mapping[str, Rule] | None = None
    """What a step does to buffers that forward changes and that are no running statistics of
    torch's modules, by name ("encoder.queue", "*.count"): "mean" or "sum" of the micro-batches'
    changes, "last", or `gather(fn)`. docs/guide/script.md, Buffers that a forward pass changes."""
    run_dir: str | os.PathLike[str] | None = None
    """The folder of events, result and checkpoints, where no launcher gives one."""
    store: str | None = None
    """The place of the checkpoints, of this run alone: a folder or s3://bucket/prefix. None takes
    the launcher's (--store, and behind it the run's name)."""
    listeners: Sequence[Callable[[str, dict[str, Any]], None]] = ()
    """Functions that are called with the name and the fields of every event of this worker. If one
    raises, its traceback is logged, and it is called again at the next event."""
    loggers: Sequence[Logger] = ()
    """Where the numbers of each step and of evaluations go besides the event log: `[TensorBoard(),
    Csv()]` of `elastic_trainer.loggers`. The first worker writes them, in threads."""
    timeline: bool = False
    """Write what this worker does in each step into the folder `timeline` of the run, for Perfetto.
    The launcher's --timeline does the same."""
    progress: bool = True
    """Show the progress on stderr, where no launcher does that."""

    def plan(self) -> Plan:
        """Return when checkpoints are made and which are kept. Raises ConfigError."""
        try:
            return Plan(every=Cadence.parse(self.checkpoint_every), keep_last=self.keep_last,
                        keep_every=self.keep_every, part_bytes=self.part_bytes)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def sending(self) -> Sending:
        """Return how gradients are sent. Raises ConfigError."""
        return sending_of(self.compress, self.predivide, self.bucket_bytes)

    def unusual_for_checkpoints(self) -> dict[str, Any]:
        """Return the options of checkpoints that are not the defaults."""
        usual = {field.name: field.default for field in fields(self)}
        if self.checkpoint_every in (0, "0", None):  # none are wanted
            usual["checkpoint_every"] = self.checkpoint_every
        return {name: value for name in OF_CHECKPOINTS
                if (value := getattr(self, name)) != usual[name]}

"""What a job is: what the user gave, checked, and what the launcher adds to it.

options of train() and Trainer, launcher's environment → here → loop, world, checkpoints

What always holds:
1. A mistake of the user's is a ConfigError before any machine does work. It names the key and a
   value that works.
2. Where the user and the launcher give different options, a remark names the one that holds.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import horovod
import numpy
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate

from elastic_trainer.config import CARRIES, ConfigError, Launch
from elastic_trainer.data.loader import MicrobatchRecipe, Reader, Readers, require_loader
from elastic_trainer.data.mixture import order_of
from elastic_trainer.evaluate.best import Best, require_rule
from elastic_trainer.events.log import newest_attempt
from elastic_trainer.loggers.row import require_loggers
from elastic_trainer.options import OF_TRAIN, Options, Words, declared
from elastic_trainer.reduce.buffers import BufferRules, Rule
from elastic_trainer.reduce.ring import Sending, sending_of
from elastic_trainer.schedule.intervals import length_of
from elastic_trainer.schedule.learning_rate import LinearScaling
from elastic_trainer.schedule.order import facts_of
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.checkpoints.cadence import Cadence
from elastic_trainer.state.checkpoints.checkpoint import Plan
from elastic_trainer.state.live_state import MASTERS
from elastic_trainer.state.values.names import named_parameters
from elastic_trainer.state.values.supported import refusal, refused_dataset
from elastic_trainer.training.job.averages import Average, Swa, average_of, extras_with, shown
from elastic_trainer.training.job.masters import Masters, masters_of
from elastic_trainer.training.job.optimizers import (
    Several,
    as_one,
    kind_of,
    members_of,
    parameters_of,
    split_schedule,
)
from elastic_trainer.training.job.precision import Precision, precision_of, scaler_of
from elastic_trainer.training.job.settings import (
    Remark,
    remarks_on_effect,
    remarks_on_last_batch,
    remarks_on_launcher,
)
from elastic_trainer.training.job.shardable import shard_refusal, sharing_memory


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished run hands back, the same on every worker."""

    steps: int
    samples: int
    loss: float
    weights_sha256: str
    model: torch.nn.Module
    rank: int
    average: Average | None = None
    best: Best | None = None
    """The best evaluation, with `best=keep_best(…)`: its `value` and its `step`."""

    def averaged(self) -> AbstractContextManager[None]:
        """Let the model have the averaged weights, as long as the block of `with` runs."""
        return shown(self.average)


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that the user handed over, checked."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    """One, or several as one (optimizers.py)."""
    dataset: Any
    schedule: Schedule
    rate: Callable[[int], float] | None
    """Multiplies the rates of the optimizer; None: nothing does, or `scheduler` sets them."""
    clip_norm: float | None
    scaler: torch.amp.GradScaler | None
    collate: Callable[[list[Any]], Any]
    readers: Readers
    """Read the batches of micro-batches, and those of evaluations."""
    state: dict[str, Any]
    """Objects that belong to the state."""
    device: torch.device
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """The rules of buffers, as given."""
    clip_value: float | None = None
    average: Average | None = None
    best: Best | None = None
    precision: Precision = field(default_factory=Precision)
    masters: Masters = field(default_factory=Masters)
    logs: bool = False
    """There are loggers, so the run has an id."""
    after_step: Callable[[int], None] = lambda step: None
    """The last part of each step."""
    phases: tuple[str, ...] = ("",)
    """The names of the phases of a step: of the optimizers, if there are several."""
    scheduler: LRScheduler | None = None
    """Sets the rates instead of `rate`."""
    on_nan: str = "raise"
    """The policy for a loss that is not finite (failures.py)."""
    carry_frozen: str = CARRIES[0]
    """Who carries frozen content (state/frozen.py)."""
    words: Words = OF_TRAIN
    """What messages call the options."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """The values of the run's configuration by full keys; empty: it has none."""
    remarks: tuple[Remark, ...] = ()
    """Remarks for a person, logged at the start of each attempt."""
    shard: str | None = None
    """What is sharded over the workers; None: nothing."""
    buddies: int = 1
    built: dict[str, dict[str, str]] = field(default_factory=dict)
    """The model as the script has built it (proving.py)."""

    def multiplier(self, step: int) -> float | None:
        """Return the multiplier of the rates in a step. Raises TypeError for one that is none."""
        if self.rate is None:
            return None
        found: Any = self.rate(step)
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            return float(found)
        if not isinstance(found, (int, float, numpy.number)):
            raise TypeError(f"lr({step}) returned {found!r}. Return a number, by which the rates "
                            f"of the optimizer are multiplied.")
        return found  # type: ignore[return-value]

    @cached_property
    def buffers(self) -> BufferRules:
        """What a step does to buffers."""
        return BufferRules(self.model, self.rules, self.schedule.microbatches)


def checked(model: torch.nn.Module,
            given: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer], dataset: Any,
            options: Options, after_step: Callable[[int], None] | None = None,
            words: Words = OF_TRAIN) -> Job:
    """Return the job that the options describe. Raises ConfigError."""
    optimizer = as_one(given) if isinstance(given, Mapping) else given
    device = require_model(model, optimizer)
    require_shardable(model, optimizer, options["shard"], options["precision"])
    require_objects(options)
    min_samples = options["min_microbatch_samples"]
    if min_samples is None:
        min_samples = fewest_samples(model, options["global_batch"], options["microbatches"])
    if why := refused_dataset(dataset):
        raise ConfigError(why)
    order = order_of(dataset, options["order"])
    epochs, max_steps = length_of(options["until"])
    numbers = Schedule(dataset_size=order.epoch_size(len(dataset)), order=order,
                       global_batch=options["global_batch"], microbatches=options["microbatches"],
                       epochs=epochs, seed=options["seed"], max_steps=max_steps,
                       drop_last=options["drop_last"], min_microbatch_samples=min_samples)
    rates = options["lr"]
    if isinstance(rates, LinearScaling):
        rates = rates.of_batch(numbers.global_batch)
    average = average_of(model, options["ema"], options["swa"],
                         in_32_bits=options["precision"] == MASTERS,
                         is_sharded=options["shard"] is not None)
    best = Best(options["best"]) if options["best"] else None
    scheduler, rate = split_schedule(rates, optimizer, numbers.steps, words)
    collate = collate_of(options)
    return Job(
        model=model,
        optimizer=optimizer,
        dataset=dataset,
        rate=rate,
        scheduler=scheduler,
        schedule=numbers,
        remarks=tuple(remarks_on_last_batch(numbers)),
        clip_norm=options["clip_norm"],
        clip_value=options["clip_value"],
        precision=precision_of(options["precision"], device.type),
        scaler=scaler_of(options["precision"], options["scaler"], device.type),
        on_nan=options["on_nan"], carry_frozen=options["carry_frozen"],
        collate=collate,
        readers=Readers(Reader(dataset, collate, MicrobatchRecipe(numbers), options["loader"],
                               device)),
        average=average,
        best=best,
        logs=bool(options["loggers"]),
        shard=options["shard"],
        buddies=options["buddies"],
        rules=options["buffers"] or {},
        state=extras_with({average.name if average else "ema": average, "best": best},
                           options["state"]),
        after_step=after_step or (lambda step: None),
        device=device,
        words=words,
        phases=tuple(optimizer.members) if isinstance(optimizer, Several) else ("",),
        masters=masters_of(options["precision"], model, optimizer),  # last: it changes the model
    )


def collate_of(options: Options) -> Callable[[list[Any]], Any]:
    """Return what makes batches. Raises ConfigError if it is given twice."""
    loader, given = options["loader"], options["collate"]
    if loader is None or loader.collate is None:
        return given or default_collate
    if given:
        raise ConfigError("collate is given, and Loader has a collate of its own. Leave one of "
                          "them out.")
    return loader.collate


def require_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.device:
    """Return the device on which the model is trained. Raises ConfigError if the optimizer cannot
    train it."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}. Give a torch.nn.Module.")
    for one in members_of(optimizer):
        if not (isinstance(getattr(one, "param_groups", None), list) and hasattr(one, "step")):
            raise ConfigError(
                f"the optimizer is a {type(one).__name__}, which has no param_groups and step(). "
                'Give an optimizer of torch, or several by name: {"d": …, "g": …}.')
    trained = [p for p in model.parameters() if p.requires_grad]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = held - {id(p) for p in model.parameters()}
    if not trained or others:
        raise ConfigError(
            f"the optimizer holds {len(others)} parameters that are not the model's, and the model "
            f"has {len(trained)} that can be trained. Build the optimizer from model.parameters().")
    for one in members_of(optimizer):
        if why := refusal(model, one):
            raise ConfigError(why)
    require_one_device(model)
    return trained[0].device


def require_one_device(model: torch.nn.Module) -> None:
    """Raise ConfigError if a model's parameters are on several devices. What is not trained may be
    on the CPU."""
    first: dict[torch.device, str] = {}
    for name, parameter in named_parameters(model).items():
        if parameter.requires_grad or parameter.device.type != "cpu":
            first.setdefault(parameter.device, name)
    if len(first) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise ConfigError(
            f"the model is on several devices ({where}), but each worker trains it on one: its "
            f"gradients are summed in one buffer. Put all of it on one device, without device_map; "
            f"docs/guide/large.md has what needs less memory.")


def require_shardable(model: torch.nn.Module, optimizer: torch.optim.Optimizer,
                      shard: str | None, precision: str = "fp32") -> None:
    """Raise ConfigError if the optimizer's state is to be sharded, or to have masters, and
    cannot."""
    if not shard and precision != MASTERS:
        return
    option = f"shard={shard!r}" if shard else f"precision={precision!r}"
    for one in members_of(optimizer):
        if why := shard_refusal(one):
            raise ConfigError(f"{option}: {why}. Leave {option} out, or use an optimizer that "
                              f"treats each parameter by itself, as torch.optim.AdamW does.")
    names = {id(p): name for name, p in named_parameters(model).items()}
    if shared := sharing_memory({names[id(p)]: p for p in parameters_of(optimizer)
                                 if id(p) in names}):
        raise ConfigError(f"{option}: the parameters {' and '.join(shared)} lie in one "
                          f"memory, so a step of one moves the other. Tie them as one parameter "
                          f"(b.weight = a.weight), or leave {option} out.")


def require_objects(options: Options) -> None:
    """Raise ConfigError for objects that cannot work, whatever the model and the data are."""
    require_loader(options["loader"])
    for name, is_sound, use in (
            ("buffers", _is_named(options["buffers"]), 'a dict by names: {"encoder.queue": "sum"}'),
            ("state", _is_named(options["state"]), 'a dict by names: {"ema": ema}'),
            ("swa", isinstance(options["swa"], (Swa, type(None))), "Swa(from_step=1000, every=50)"),
            ("collate", options["collate"] is None or callable(options["collate"]),
             "a function that makes a batch of a list of samples"),
            ("listeners", _are_functions(options["listeners"]), "a list of functions")):
        if not is_sound:
            given: Any = options
            raise ConfigError(f"{name} is {str(given[name])[:200]}. Use {use}.")
    BufferRules(torch.nn.Identity(), options["buffers"])
    require_rule(options["best"])
    require_loggers(options["loggers"])
    plan_of(options)
    sent(options)
    if lacking := [name for name, one in (options["state"] or {}).items()
                   if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))]:
        raise ConfigError(f"the objects {lacking} in state have no state_dict and load_state_dict. "
                          f"Give them both.")


def _is_named(given: Any) -> bool:
    """True for a dict with texts as names: a checkpoint with other names could not be read."""
    return given is None or isinstance(given, Mapping) and all(
        isinstance(name, str) for name in given)


def _are_functions(given: Any) -> bool:
    return given is None or isinstance(given, Sequence) and all(map(callable, given))


def plan_of(options: Options) -> Plan:
    try:
        return Plan(every=Cadence.parse(options["checkpoint_every"]),
                    keep_last=options["keep_last"], keep_every=options["keep_every"],
                    part_bytes=options["part_bytes"])
    except ValueError as error:
        raise ConfigError(str(error)) from error


def sent(options: Options) -> Sending:
    return sending_of(options["compress"], options["predivide"], options["bucket_bytes"])


def unusual_for_checkpoints(options: Options) -> dict[str, Any]:
    """Return the options of checkpoints that are not the defaults, without a request for none."""
    given: Any = options
    return {name: given[name] for name, (_, option) in declared().items()
            if option.needs_store and given[name] != option.default
            and (name, given[name]) not in NO_CHECKPOINTS}


NO_CHECKPOINTS = [("checkpoint_every", value) for value in (0, "0", None)]


def settled(launch: Launch, options: Options, device: torch.device,
            words: Words = OF_TRAIN) -> tuple[Launch, str, list[Remark]]:
    """Put together what the user and the launcher ask for: where the job runs, and its reducer."""
    run_dir, store = options["run_dir"], options["store"]
    remarks = remarks_on_launcher(options, launch, words.name)
    if run_dir is not None and launch.run_dir is None:
        launch = replace(launch, run_dir=Path(run_dir))
    if store is not None:
        launch = replace(launch, store=store)
    if launch.run_dir and not launch.driver:  # no launcher counts: each process is an attempt
        launch = replace(launch, attempt=newest_attempt(launch.run_dir) + 1)
    remarks += remarks_on_effect(bool(launch.run_dir or launch.store), device.type,
                                 options["cpu_threads"], unusual_for_checkpoints(options))
    return launch, options["reduce"] or launch.reduce, remarks


def describe(job: Job) -> dict[str, Any]:
    """Return the description of the job in a checkpoint's record, for people."""
    schedule = job.schedule
    return {
        "schedule": {
            name: getattr(schedule, name) for name in (
                "dataset_size", "global_batch", "microbatches", "epochs", "seed", "max_steps",
                "drop_last", "min_microbatch_samples", "steps")
        } | facts_of(schedule.order),
        "config": {
            "optimizer": kind_of(job.optimizer),
            "clip_norm": job.clip_norm,
            "clip_value": job.clip_value,
            "precision": job.precision.name,
            "model": type(job.model).__name__,
        },
        **({"configuration": dict(job.configuration)} if job.configuration else {}),
        "hash_seed": Launch.from_environment().hash_seed,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "horovod": horovod.__version__,
            "numpy": numpy.__version__,
        },
    }


def fewest_samples(model: torch.nn.Module, global_batch: int, microbatches: int) -> int:
    """Return the number of samples that a micro-batch of this model needs, as far as its modules
    show it. It is at most the number that the micro-batches of a full batch have."""
    return 2 if has_batch_norm(model) and global_batch >= 2 * microbatches > 0 else 1


def has_batch_norm(model: torch.nn.Module) -> bool:
    """Return whether a module of the model may need two samples.

    In training mode a BatchNorm raises on one value per channel (torch/nn/functional.py,
    _verify_batch_size).
    """
    kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d,
             torch.nn.SyncBatchNorm)
    return any(isinstance(module, kinds) for module in model.modules())


def cut_of(schedule: Schedule) -> dict[str, Any]:
    """Return the part of the state's identity that describes short last batches and the order. It
    is empty where they are as in version 0.1."""
    dropped = {"drop_last": True} if schedule.dropped_samples else {}
    merged = {"min_microbatch_samples": schedule.min_microbatch_samples} if schedule.merges else {}
    return {**dropped, **merged, **facts_of(schedule.order)}

"""Check the options of train(), and remark on those that another option overrides.

train()'s options → here → one line on stderr and one event each, by rank 0 (loop.py)

What always holds:
1. Each remark names the key, the values, and which of them holds.
2. Everything here is a pure function of values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.options import Options
from elastic_trainer.reduce.ring import BUCKET_BYTES
from elastic_trainer.schedule.schedule import Schedule as Numbers
from elastic_trainer.state.supported import some
from elastic_trainer.training.option_names import Words
from elastic_trainer.training.several_optimizers import Schedulers, Several, kind_of

Rates = Callable[[int], float] | LRScheduler | Mapping[str, LRScheduler]
"""What sets the learning rates, when the global batch is known."""


@dataclass(frozen=True)
class Remark:
    """A sentence for a person, and the event that has the same facts for a program."""

    event: str
    sentence: str
    facts: dict[str, Any] = field(default_factory=dict)


def remarks_on_last_batch(schedule: Numbers) -> list[Remark]:
    """Remark on the samples that `drop_last` leaves out."""
    if not (dropped := schedule.dropped_samples) or not schedule.order.drops:
        return []
    return [
        Remark(
            "job.samples_dropped",
            f"drop_last leaves {dropped} of {schedule.dataset_size} samples out of each epoch, "
            f"{schedule.order.drops}.",
            {"samples": dropped, "dataset_size": schedule.dataset_size})
    ]


def split_schedule(
    schedule: Rates | None,
    optimizer: torch.optim.Optimizer,
    steps: int,
    words: Words,
) -> tuple[LRScheduler | None, Callable[[int], float]]:
    """Return the torch scheduler, if there is one, and the multiplier of the rates. Raises
    ConfigError."""
    members = optimizer.members if isinstance(optimizer, Several) else {"": optimizer}
    given = _schedulers_of(schedule, members)
    for name, scheduler in given.items():
        _require_usable(scheduler, members[name], steps, words, is_one_of_several=len(members) > 1)
    for name, member in members.items():
        if name not in given:
            _require_no_scheduler(member, words)
    if isinstance(schedule, LRScheduler):
        return schedule, lambda step: 1.0
    if isinstance(schedule, Mapping):
        return Schedulers(given), lambda step: 1.0
    return None, schedule or (lambda step: 1.0)


def _schedulers_of(schedule: Rates | None,
                   members: Mapping[str, torch.optim.Optimizer]) -> dict[str, LRScheduler]:
    """Return the torch schedulers by the names of their optimizers. Raises ConfigError."""
    names = ", ".join(map(repr, members))
    if isinstance(schedule, Mapping):
        odd = [name for name in schedule if name not in members]
        if odd or not schedule or "" in members:
            raise ConfigError(
                f"the lr is a dict with the names {list(schedule)}, but "
                + ("there is one optimizer. Give its torch scheduler, or a function of the step."
                   if "" in members else f"the optimizers are {names}. Give at least one of them "
                   f"a torch scheduler, by the same name."))
        for name, scheduler in schedule.items():
            if not isinstance(scheduler, LRScheduler):
                raise ConfigError(
                    f"the lr of {name!r} is a {type(scheduler).__name__}. A dict holds torch "
                    f"schedulers. Use one function of the step for all optimizers, or an "
                    f"LRScheduler for each.")
        return dict(schedule)
    if not isinstance(schedule, LRScheduler):
        if schedule is not None and not callable(schedule):
            raise ConfigError(
                f"lr is {schedule!r}. Use a function of the step, or a torch LRScheduler.")
        return {}
    if "" not in members:
        raise ConfigError(
            f"the lr is a {type(schedule).__name__}, which sets the rates of one optimizer, "
            f"but there are several: {names}. Give a dict of torch schedulers by these names, or a "
            f"function of the step.")
    return {"": schedule}


def _require_no_scheduler(optimizer: torch.optim.Optimizer, words: Words) -> None:
    # LRScheduler.__init__ leaves this mark on the optimizer (torch 2.13, optim/lr_scheduler.py).
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ConfigError(
            f"a torch learning-rate scheduler was built on this optimizer, but {words.api} was not "
            f"given it, so both would set the rates. Hand it over as lr=scheduler, or "
            f"build a new optimizer.")


def _require_usable(scheduler: LRScheduler, optimizer: torch.optim.Optimizer, steps: int,
                    words: Words, is_one_of_several: bool) -> None:
    """Raise ConfigError for a torch scheduler that would fail or do harm later."""
    name = type(scheduler).__name__
    if scheduler.optimizer is not optimizer:
        raise ConfigError(f"the lr {name} belongs to another optimizer than "
                          f"{words.api} was given. Build it on this one.")
    if isinstance(scheduler, ReduceLROnPlateau):
        if is_one_of_several:
            raise ConfigError(
                f"the lr {name} follows the loss of a step, but a step with several "
                f"optimizers has a loss for each. Use another torch scheduler, or a function of "
                f"the step.")
        if scheduler.mode != "min":
            raise ConfigError(
                f"the lr {name} has mode {scheduler.mode!r}, but it gets the loss of "
                f"each step, which is to fall. Use mode='min', or set the rate by a function of "
                f"the step.")
    if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < steps:
        raise ConfigError(
            f"the lr {name} has total_steps {scheduler.total_steps}, but the run has "
            f"{steps} steps, so it would raise at the end. Use OneCycleLR(total_steps={steps}).")


# --- what a resumed run was built with before -----------------------------------------

PROGRESS_KEYS = {
    "last_epoch", "base_lrs", "min_lrs", "best", "num_bad_epochs", "cooldown_counter", "T_cur"
}
"""The keys of a torch scheduler's state that are no settings, besides those that begin with "_"."""
OLDER = {"precision": "fp32", "predivide": 1.0, "bucket_bytes": BUCKET_BYTES}
"""The settings of runs whose checkpoints do not have them: of version 0.1."""
CONFIGURATION = "configuration"
"""The setting that is the run's configuration, which configured.py compares."""
PROOF = "proof"
"""The setting that is the run's proof (wire/proof.py), which account.py compares."""
RUN_HOLDS = ("optimizer.", "schedule.", "scaler.")
"""Settings that are in the state, so a checkpoint brings its own."""


def settings_of(
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    scaler: torch.amp.GradScaler | None,
    **more: Any,
) -> dict[str, Any]:
    """Return what a job was built with, as JSON values: before its first step, and before a
    checkpoint is read."""
    found: dict[str, Any] = {"optimizer": kind_of(optimizer), **more}
    groups = optimizer.param_groups
    for number, group in enumerate(groups):
        place = f"optimizer.groups[{number}]" if len(groups) > 1 else "optimizer"
        # A scheduler has changed lr already.
        doubled = {"params", "lr" if "initial_lr" in group else "initial_lr"}
        found |= {
            f"{place}.{key}": _plain(value)
            for key, value in group.items() if key not in doubled
        }
    if scheduler is not None:
        found |= {f"schedule.{key}": value for key, value in _scheduler_settings(scheduler).items()}
    if scaler is not None and (kept := scaler.state_dict()):
        found |= {
            f"scaler.{key}": kept[key]
            for key in ("growth_factor", "backoff_factor", "growth_interval")
        }
    return found


def settle(run: dict[str, Any], given: dict[str, Any],
           allowed: Mapping[str, Any] | None = None) -> tuple[list[Remark], dict[str, Any]]:
    """Return remarks on the settings of a run that differ from those now given, and the settings
    that hold. `allowed` are those that the user lets hold although the run has its own."""
    run = OLDER | run if run else run
    kept = {key: value for key, value in run.items()
            if key.startswith(RUN_HOLDS) and key not in (allowed or {})}
    remarks = [_differs(key, run[key], given[key], "run" if key in kept else "given")
               for key in sorted(run.keys() & given.keys() - {CONFIGURATION, PROOF})
               if run[key] != given[key]]
    return remarks, {**given, **kept}


def schedule_differs(step: int, used: float, now: float) -> list[Remark]:
    """Remark that a function of the step gives another rate for a step that is done."""
    return [] if used == now or used != used else [
        _differs(f"schedule (the rate of step {step})", used, now, "given")
    ]


def configuration_differs(key: str, run: Any, given: Any) -> Remark:
    """Remark that a key of the configuration has another value than the run had."""
    return _differs(key, run, given, "given")


def _differs(key: str, run: Any, given: Any, holds: str) -> Remark:
    what = {
        "run": "The run's value holds, because it is part of the checkpoint. To train with the "
               "other value, give the run another name (--run, run_dir)",
        "given": "The value given now holds from here on"
    }[holds]
    # The event has the key under one name.
    named = "lr" + key.removeprefix("schedule") if key.startswith("schedule") else key
    return Remark("job.settings_differ",
                  f"{named} is {run!r} in the run, but {given!r} is given. {what}.",
                  {"key": key, "run_value": run, "given": given, "holds": holds})


def _scheduler_settings(scheduler: Any) -> dict[str, Any]:
    if isinstance(scheduler, Schedulers):
        return {f"{name}.{key}": value for name, member in scheduler.members.items()
                for key, value in _scheduler_settings(member).items()}
    kept = {"class": type(scheduler).__name__} | {
        key: _plain(value) for key, value in scheduler.state_dict().items()
        if not key.startswith("_") and key not in PROGRESS_KEYS}
    if milestones := getattr(scheduler, "_milestones", None):
        kept["milestones"] = _plain(milestones)
    for number, inner in enumerate(getattr(scheduler, "_schedulers", ())):
        kept |= {f"{number}.{key}": value for key, value in _scheduler_settings(inner).items()}
    return kept


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, so that it equals what comes out of a checkpoint."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value,
                                                (bool, int, float, str)) else type(value).__name__


# --- options that have no effect ------------------------------------------------------------------


def remarks_on_launcher(options: Options, launch: Launch, caller: str) -> list[Remark]:
    """Remark on options that both the caller and the launcher have, with different values."""
    remarks = []
    if (run_dir := options["run_dir"]) and launch.run_dir and Path(run_dir) != launch.run_dir:
        remarks.append(
            _ignored("run_dir", os.fspath(run_dir), f"the launcher keeps this run in "
                     f"{launch.run_dir}", f"Leave run_dir out, or start the launcher with "
                     f"--runs-dir {Path(run_dir).parent} --run {Path(run_dir).name}"))
    for name, theirs in (("store", launch.store), ("reduce", launch.reduce_asked)):
        mine = cast(Any, options)[name]
        if mine and theirs and mine != theirs:
            remarks.append(_ignored(f"--{name}", theirs, f"{caller}({name}={mine!r}) holds",
                                    "Give one of the two"))
    return remarks


def remarks_on_effect(has_place: bool, device: str, cpu_threads: int,
                      checkpoints: dict[str, Any]) -> list[Remark]:
    """Remark on options without effect; `checkpoints` are those that are not the defaults."""
    remarks = []
    if not has_place:
        remarks += [
            _ignored(key, value, "nothing is written without run_dir, store or a launcher",
                     "Give run_dir=…") for key, value in checkpoints.items()
        ]
    if device != "cpu" and cpu_threads != 1:
        remarks.append(
            _ignored("cpu_threads", cpu_threads, f"the model is on {device}",
                     "Use torch.set_num_threads"))
    return remarks


def remarks_on_workers(size: int, microbatches: int) -> list[Remark]:
    """Remark that some workers compute nothing, because each takes whole micro-batches."""
    if size <= microbatches:
        return []
    return [
        Remark(
            "job.workers_idle",
            f"the world has {size} workers, but a batch has {microbatches} micro-batches, so "
            f"{size - microbatches} workers compute nothing. Use microbatches={size} or more (for "
            "a new run), or fewer workers.",
            {"size": size, "microbatches": microbatches, "idle": size - microbatches})
    ]


def remarks_on_sparse(found: Mapping[str, int]) -> list[Remark]:
    """Remark that sparse gradients are summed densely; `found` has the bytes of each parameter."""
    if not found:
        return []
    names, size = list(found), sum(found.values())
    return [
        Remark(
            "job.gradients_sparse",
            f"the gradients of {some(names)} are sparse, but they are summed and sent densely: "
            f"{size / 1e6:.3g} MB a step, however few rows a batch uses. With sparse=False the "
            f"steps are the same, and the backward pass is not run apart for each micro-batch.",
            {"parameters": names, "bytes": size})
    ]


def _ignored(option: str, value: Any, because: str, remedy: str) -> Remark:
    return Remark("job.option_ignored", f"{option} {value!r} has no effect: {because}. {remedy}.",
                  {"option": option, "value": value, "because": because})

"""Which options, configuration and settings hold, and a remark on each that another one overrides.

options of train(), --override, configuration → here → job.py, worker.py
launcher's environment, or a TOML file → configuration() → script, Trainer
settings of a resumed run ⇄ those given now → here → account.py; one line on stderr and one event
for each remark, by rank 0

    from elastic_trainer import Trainer, configuration

    config = configuration()
    model = Net(width=config["model"]["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["training"]["lr"])
    trainer = Trainer(model, optimizer, dataset, **config.training)

What always holds:
1. Each remark names the key, the values, and which of them holds.
2. A configuration that was given, and has no effect, is an error: the script must call
   configuration(), and Trainer's options must have the values of the section `training`.
3. A change of a key that changes the bits ends a resumed run on all workers, before its first step,
   unless `--allow-change` names the key.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from horovod.torch import Adasum
from torch.optim.lr_scheduler import LRScheduler

from elastic_trainer.config import ADASUM, ConfigError, Launch
from elastic_trainer.options import Options, Words, declared, nearest, resolved
from elastic_trainer.reduce.ring import BUCKET_BYTES
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.configuration import (
    DEEPSPEED,
    RUN,
    TRAINING,
    VARIABLE,
    Configuration,
    changes,
    is_taken,
    overrides_of,
    require_allowed,
    require_options,
    taken,
)
from elastic_trainer.state.rates import Rates
from elastic_trainer.state.values.supported import some
from elastic_trainer.training.job.optimizers import Schedulers, kind_of
from elastic_trainer.wire.proof import PARTS
from elastic_trainer.wire.redact import redacted_settings

if TYPE_CHECKING:
    from elastic_trainer.training.job.job import Job

T = TypeVar("T")
NO_CONFIGURATION = (
    "The script asks for a configuration, and none is given. Start it with --config run.toml, set "
    "ELASTIC_TRAINER_CONFIG=run.toml, or name a file in the script: "
    "configuration(file=\"run.toml\").")
UNUSED_DEEPSPEED = (
    "{source} has DeepSpeed's JSON, but the script does not read it, so it has no effect. Call "
    "`ds = from_deepspeed(model)` of elastic_trainer and use Trainer(model, ds.optimizer, dataset, "
    "**ds.options), or leave --deepspeed out.")


@dataclass(frozen=True)
class Remark:
    """A sentence for a person, and the event that has the same facts for a program."""

    event: str
    sentence: str
    facts: dict[str, Any] = field(default_factory=dict)


def remarks_on_last_batch(schedule: Schedule) -> list[Remark]:
    if not (dropped := schedule.dropped_samples) or not schedule.order.drops:
        return []
    return [
        Remark(
            "job.samples_dropped",
            f"drop_last leaves {dropped} of {schedule.dataset_size} samples out of each epoch, "
            f"{schedule.order.drops}.",
            {"samples": dropped, "dataset_size": schedule.dataset_size})
    ]


# --- what a resumed run was built with before -----------------------------------------

PROGRESS_KEYS = {"last_epoch", "base_lrs", "min_lrs", "best", "num_bad_epochs", "cooldown_counter",
                 "T_cur"}
"""The keys of a torch scheduler's state that are no settings, besides those that begin with "_"."""
OLDER = {"precision": "fp32", "predivide": 1.0, "bucket_bytes": BUCKET_BYTES}
"""The settings of runs whose checkpoints do not have them: of version 0.1."""
CONFIGURATION = "configuration"
"""The setting that is the run's configuration, which `compared` compares."""
PROOF = "proof"
"""The setting that is the run's proof (wire/proof.py), which account.py compares."""
RUN_HOLDS = ("optimizer.", "schedule.", "scaler.")
"""Settings that are in the state, so a checkpoint brings its own."""


def settings_of(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None,
                scaler: torch.amp.GradScaler | None, **more: Any) -> dict[str, Any]:
    """Return what a job was built with, as JSON values: before its first step, and before a
    checkpoint is read."""
    found: dict[str, Any] = {"optimizer": kind_of(optimizer), **more}
    groups = optimizer.param_groups
    for number, group in enumerate(groups):
        place = f"optimizer.groups[{number}]" if len(groups) > 1 else "optimizer"
        # A scheduler has changed lr already.
        doubled = {"params", "lr" if "initial_lr" in group else "initial_lr"}
        found |= {f"{place}.{key}": _plain(value) for key,
                  value in group.items() if key not in doubled}
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
    return [] if used == now or used != used else [
        _differs(f"schedule (the rate of step {step})", used, now)]


def _differs(key: str, run: Any, given: Any, holds: str = "given") -> Remark:
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


# --- the configuration ---------------------------------------------------------------------------

@overload
def configuration(model: None = None, *, file: str | Path | None = None) -> Configuration: ...
@overload
def configuration(model: type[T], *, file: str | Path | None = None) -> T: ...
def configuration(model: type[T] | None = None, *,
                  file: str | Path | None = None) -> Configuration | T:
    """Return the configuration of this run: that of the launcher (`--config`, `--set`), or of the
    file that the variable ELASTIC_TRAINER_CONFIG names, or else of `file`.

    `config["model"]["width"]` is a value of a section, `config.training` has the options for
    Trainer and train(). Nothing of it can be changed.

    `model` is a dataclass or a pydantic model whose fields are the user's sections: then they are
    validated, and an instance of it is returned. Raises ConfigError.
    """
    text = Launch.from_environment().configuration or (str(file) if file is not None else "")
    if not text or not (found := taken(text, file)) and overrides_of(text):
        raise ConfigError(NO_CONFIGURATION)
    os.environ[VARIABLE] = text  # Trainer finds it there, as it does under a launcher
    require_options(found)
    return found if model is None else _validated(found, model)


def _validated(found: Configuration, model: type[T]) -> T:
    from pydantic import TypeAdapter, ValidationError

    fields = (set(getattr(model, "model_fields", ())) or
              {field.name for field in dataclasses.fields(model)})  # type: ignore[arg-type]
    given = found.as_dict()
    for section in (TRAINING, RUN):
        if section not in fields:
            given.pop(section, None)
    if unknown := sorted(given.keys() - fields):
        raise ConfigError(f"{found.source} has the section {unknown[0]}, which "
                          f"{model.__name__} does not have. Add the field, or leave it out.")
    try:
        return TypeAdapter(model).validate_python(given)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise ConfigError(f"{found.source} has no valid {key}: {fault['msg']}. Correct it in the "
                          f"file, or with --set {key}=VALUE.") from error


# --- a configuration in use -----------------------------------------------------------------------

def in_force(given: Options, words: Words) -> Options:
    """Return the options that hold: the script's, those of --override over them, and the defaults.
    Raises ConfigError."""
    if given.get("reduce") == Adasum:  # a number
        raise ConfigError(ADASUM)
    overrides = overrides_of(Launch.from_environment().configuration)
    held: Options = resolved(given, overrides, words.api)
    return held


def in_use(job: Job, options: Options) -> Job:
    """Return the job with the configuration that it has. Raises ConfigError where the script does
    not use it."""
    text = Launch.from_environment().configuration
    overrides = overrides_of(text)
    if overrides:
        job = replace(job, remarks=(*job.remarks, _overridden(overrides, job)))
    if text and not is_taken(text) and (given := Configuration.from_text(text)):
        if set(given) == {DEEPSPEED}:
            raise ConfigError(UNUSED_DEEPSPEED.format(source=given.source))
        raise ConfigError(
            "A configuration is given (--config, --set, ELASTIC_TRAINER_CONFIG), but the script "
            "does not read it, so it has no effect. Call `config = configuration()` of "
            "elastic_trainer and use its values, or leave --config and --set out.")
    if not text or not is_taken(text):
        return job
    found, held = taken(text), cast(Mapping[str, Any], options)
    for key, value in found.training.items():
        if held[key] != value and key not in overrides:
            raise ConfigError(
                f"{found.source} has {TRAINING}.{key} = {value!r}, but the script gives "
                f"{job.words.api} {held[key]!r}. Use {job.words.name}(…, **config.training).")
    unread = redacted_settings(found.unread())
    if any(key.startswith(f"{DEEPSPEED}.") for key in unread):
        raise ConfigError(UNUSED_DEEPSPEED.format(source=found.source))
    remarks = tuple(_ignored(key, value, "the script has not read it before training begins",
                             "Read it from configuration(), or leave it out")
                    for key, value in unread.items())
    return replace(job, configuration=redacted_settings(found.flat()),
                   remarks=(*job.remarks, *remarks))


def _overridden(overrides: Mapping[str, Any], job: Job) -> Remark:
    numbers = job.schedule
    told = ", ".join(f"{name}={value!r}" for name, value in overrides.items())
    return Remark(
        "job.overridden", f"--override holds over the script's options: {told}.",
        {"steps": numbers.steps, "microbatches": numbers.microbatches,
         "global_batch": numbers.global_batch})


# --- a run goes on --------------------------------------------------------------------------------

def compared(run: Mapping[str, Any], built: Mapping[str, Any], launch: Launch) -> list[Remark]:
    """Return remarks on a configuration that differs from the run's. Raises ConfigError for changes
    that are not allowed."""
    was, now = run.get(CONFIGURATION), built.get(CONFIGURATION)
    if was is None:
        return [] if now is None else [_differs("configuration", None, sorted(now))]
    found = changes(was, now or {})
    require_allowed(found, launch.allow_change, launch.run)
    return [_differs(change.key, change.was, change.now) for change in found]


def allowed_settings(run: Mapping[str, Any], built: Mapping[str, Any],
                     allow_change: Collection[str]) -> dict[str, Any]:
    """Return the settings of the optimizer that the user lets change: their last names are those of
    allowed keys (training.lr: optimizer.lr)."""
    names = {key.rpartition(".")[2] for key in allow_change}
    return {key: value for key, value in built.items() if key.startswith("optimizer.")
            and (key.rpartition(".")[2] in names or "optimizer" in allow_change)
            and key in run and run[key] != value}


def require_known(allow_change: Collection[str], run: Mapping[str, Any],
                  built: Mapping[str, Any]) -> None:
    """Raise ConfigError if --allow-change names what neither the run nor the script has: a part of
    a proof, an option of the optimizer, or a key of the configuration."""
    parts = [part for part in PARTS if part != "length"]
    of_optimizer = sorted({key for one in (run, built) for key in one
                           if key.startswith("optimizer.")})
    keys = sorted({key for one in (run, built) for key in one.get(CONFIGURATION) or {}})
    last = {key.rpartition(".")[2] for key in of_optimizer}
    trainers = [f"{TRAINING}.{name}" for name in declared()]
    for name in allow_change:
        if name not in (*parts, *keys, *trainers) and name.rpartition(".")[2] not in last:
            known = [*parts, *keys, *of_optimizer, *last]
            raise ConfigError(
                f"--allow-change names {name!r}, which is no part of a run's proof, no option of "
                f"the optimizer and no key of the configuration.{nearest(name, known)} The parts "
                f"are {', '.join(parts)}.")


def hold_given(allowed: Mapping[str, Any], optimizer: torch.optim.Optimizer, rates: Rates) -> None:
    """Let the given settings hold in the optimizer, which has those of the checkpoint. Raises
    ConfigError."""
    for key, value in allowed.items():
        place, _, name = key.rpartition(".")
        number = int(place.partition("[")[2].rstrip("]") or 0)
        if name in ("lr", "initial_lr"):
            if rates.scheduler is not None:
                raise ConfigError(
                    f"--allow-change names {name}, but a torch scheduler sets the rates, and it is "
                    f"part of the checkpoint. Use a function of the step, or leave it out.")
            rates.rebase(number, value)
        else:
            group = optimizer.param_groups[number]
            group[name] = tuple(value) if isinstance(group.get(name), tuple) else value

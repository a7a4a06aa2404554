"""configuration(): the configuration of this run, for the script; and what a resumed run does with
it.

launcher's environment, or a TOML file → here → script, Trainer (job.py), account.py

    from elastic_trainer import Trainer, configuration

    config = configuration()
    model = Net(width=config["model"]["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["training"]["lr"])
    trainer = Trainer(model, optimizer, dataset, **config.training)

What always holds:
1. A configuration that was given, and has no effect, is an error: the script must call
   configuration(), and Trainer's options must have the values of the section `training`.
2. A change of a key that changes the bits ends a resumed run on all workers, before its first step,
   unless `--allow-change` names the key.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import torch
from horovod.torch import Adasum

from elastic_trainer.config import ADASUM, ConfigError, Launch
from elastic_trainer.options import Options, resolved
from elastic_trainer.state.configuration import (
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
from elastic_trainer.state.optimizer_values import Rates
from elastic_trainer.training.job import Job
from elastic_trainer.training.option_names import Words
from elastic_trainer.training.settings import CONFIGURATION, Remark, configuration_differs
from elastic_trainer.wire.redact import redacted_settings

T = TypeVar("T")
NO_CONFIGURATION = (
    "The script asks for a configuration, and none is given. Start it with --config run.toml, set "
    "ELASTIC_TRAINER_CONFIG=run.toml, or name a file in the script: "
    "configuration(file=\"run.toml\").")

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
    if text and not is_taken(text) and Configuration.from_text(text):
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
    remarks = tuple(_unread(key, value) for key, value in unread.items())
    return replace(job, configuration=redacted_settings(found.flat()),
                   remarks=(*job.remarks, *remarks))


def _overridden(overrides: Mapping[str, Any], job: Job) -> Remark:
    numbers = job.schedule
    told = ", ".join(f"{name}={value!r}" for name, value in overrides.items())
    return Remark(
        "job.overridden", f"--override holds over the script's options: {told}.",
        {"steps": numbers.steps, "microbatches": numbers.microbatches,
         "global_batch": numbers.global_batch})


def _unread(key: str, value: Any) -> Remark:
    because = "the script has not read it before training begins"
    return Remark("job.option_ignored",
                  f"{key} {value!r} has no effect: {because}. Read it from configuration(), or "
                  f"leave it out.", {"option": key, "value": value, "because": because})


# --- a run goes on --------------------------------------------------------------------------------

def compared(run: Mapping[str, Any], built: Mapping[str, Any], launch: Launch) -> list[Remark]:
    """Return remarks on a configuration that differs from the run's. Raises ConfigError for changes
    that are not allowed."""
    was, now = run.get(CONFIGURATION), built.get(CONFIGURATION)
    if was is None:
        return [] if now is None else [configuration_differs("configuration", None, sorted(now))]
    found = changes(was, now or {})
    require_allowed(found, launch.allow_change, launch.run)
    return [configuration_differs(change.key, change.was, change.now) for change in found]


def allowed_settings(run: Mapping[str, Any], built: Mapping[str, Any],
                     allow_change: Collection[str]) -> dict[str, Any]:
    """Return the settings of the optimizer that the user lets change: their last names are those of
    allowed keys (training.lr: optimizer.lr)."""
    names = {key.rpartition(".")[2] for key in allow_change}
    return {key: value for key, value in built.items() if key.startswith("optimizer.")
            and (key.rpartition(".")[2] in names or "optimizer" in allow_change)
            and key in run and run[key] != value}


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

"""What of DeepSpeed's JSON is taken over, and what is refused, by name and with the remedy.

ds_config.json, or the section `deepspeed` of a configuration → here → launcher (before anything
starts), objects.py, given.py (the script), adapters/transformers_deepspeed.py

What always holds:
1. A key is taken over with the meaning that it has in DeepSpeed, or refused. None is ignored.
2. All faults of a file are in one error.
3. Neither the global batch nor the number of micro-batches depends on the number of workers.

It imports no torch: the launcher reads it.

Source: DeepSpeed 0.19.8, runtime/config.py, runtime/precision_config.py, runtime/lr_schedules.py,
runtime/engine.py (_configure_basic_optimizer), runtime/zero/config.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_trainer.config import ConfigError
from elastic_trainer.deepspeed.remedies import (
    OPTIMIZERS_REFUSED,
    REMEDIES,
    SCHEDULERS_REFUSED,
    UNKNOWN,
)

AUTO = "auto"
"""The value that only transformers fills in, from TrainingArguments."""
ADAM = "lr betas eps weight_decay amsgrad bias_correction adam_w_mode torch_adam"
OPTIMIZERS = {
    "Adam": ADAM, "AdamW": ADAM,
    "SGD": "lr momentum dampening weight_decay nesterov maximize",
    "Adagrad": "lr lr_decay weight_decay initial_accumulator_value eps",
    "RMSprop": "lr alpha eps weight_decay momentum centered",
    "NAdam": "lr betas eps weight_decay momentum_decay decoupled_weight_decay",
    "RAdam": "lr betas eps weight_decay decoupled_weight_decay",
    "Adamax": "lr betas eps weight_decay",
}
"""The optimizers with the parameters that they take."""
OF_DEEPSPEED = ("Adam", "AdamW", "Adagrad")
"""Names that DeepSpeed takes in small and large letters. Others are torch's."""
WARMUP = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type"
SCHEDULERS = {
    "WarmupLR": WARMUP,
    "WarmupDecayLR": f"total_num_steps {WARMUP}",
    "WarmupCosineLR": "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type",
    "StepLR": "step_size gamma", "MultiStepLR": "milestones gamma", "ExponentialLR": "gamma",
    "ConstantLR": "factor total_iters", "LinearLR": "start_factor end_factor total_iters",
    "PolynomialLR": "total_iters power", "CosineAnnealingLR": "T_max eta_min",
    "CosineAnnealingWarmRestarts": "T_0 T_mult eta_min",
}
"""The schedulers with their parameters: DeepSpeed's, then torch's."""
TRUTHS = ("amsgrad", "bias_correction", "adam_w_mode", "torch_adam", "nesterov", "maximize",
          "centered", "decoupled_weight_decay")
LISTS = ("betas", "milestones")
LENGTHS = ("total_num_steps", "step_size", "total_iters", "T_max", "T_0", "T_mult")
"""Parameters that are no plain numbers, and those that count steps."""
NEEDED = {"WarmupDecayLR": ("total_num_steps",), "WarmupCosineLR": ("total_num_steps",),
          "StepLR": ("step_size",), "MultiStepLR": ("milestones",), "ExponentialLR": ("gamma",),
          "CosineAnnealingLR": ("T_max",), "CosineAnnealingWarmRestarts": ("T_0",)}
"""The parameters without a default."""
STAGES: dict[int, str | None] = {0: None, 1: "optimizer", 2: "gradients"}
"""The stages of ZeRO that are supported → the trainer's option `shard`."""
NOT_SHARDED = (
    "The weights are not sharded: each worker holds all of them, 4 bytes a parameter in 32 bits (1 "
    "billion parameters: 4 GB), and its part of gradients and optimizer. Use stage 2 if that fits. "
    "docs/guide/large.md shows how activations need less")
WHERE = "docs/migrate-from-deepspeed.md has the whole table."

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Fp16(Part):
    enabled: bool | Auto = False
    loss_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Auto = 0
    """0: the scale follows the overflows."""
    initial_scale_power: Annotated[int, Field(ge=0, le=64)] | Auto = 16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1


class Bf16(Part):
    enabled: bool | Auto = False


class Zero(Part):
    stage: Annotated[int, Field(ge=0, le=3)] = 0


class Named(Part):
    """An optimizer or a scheduler."""

    type: str
    params: dict[str, Any] = {}


class File(Part):
    """DeepSpeed's JSON, as far as it is supported."""

    train_batch_size: Count | Auto | None = None
    train_micro_batch_size_per_gpu: Count | Auto | None = None
    gradient_accumulation_steps: Count | Auto | None = None
    gradient_clipping: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Auto = 0
    fp16: Fp16 = Fp16()
    bf16: Bf16 = Bf16()
    zero_optimization: Zero = Zero()
    optimizer: Named | None = None
    scheduler: Named | None = None


# --- reading --------------------------------------------------------------------------------------

def read(path: str | Path) -> dict[str, Any]:
    """Read a JSON file, without its nulls. Raises ConfigError."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"DeepSpeed's JSON {path} cannot be read: {error.strerror}. Name a file "
                          f"such as ds_config.json.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}. Correct it.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} has a {type(found).__name__}. Give an object: "
                          f'{{"train_batch_size": 256}}.')
    return without_nulls(found)


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without those that are null, which DeepSpeed takes as not given."""
    return {key: without_nulls(value) if isinstance(value, Mapping) else value
            for key, value in values.items() if value is not None}


def checked(values: Mapping[str, Any], source: str, takes_auto: bool = False) -> File:
    """Return the file that values make. Raises ConfigError with all that is wrong."""
    faults = []
    try:
        found = File.model_validate(dict(values))
    except ValidationError as error:
        found, faults = File(), list(dict.fromkeys(_told(values, error)))
    faults += list(_wrong(found))
    if not takes_auto:
        faults += [f"{key} is \"auto\", which only transformers fills in. Write the value, or give "
                   f"--set deepspeed.{key}=VALUE" for key in autos(values)
                   if not any(fault.startswith(f"{key} ") for fault in faults)]
    if faults:
        listed = "".join(f"\n  {fault}." for fault in faults)
        raise ConfigError(f"{source} has what is not supported:{listed}\n{WHERE}")
    return found


def autos(values: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield the keys whose value is "auto"."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from autos(value, f"{place}{key}.")
        elif value == AUTO:
            yield f"{place}{key}"


def _told(values: Mapping[str, Any], error: ValidationError) -> Iterator[str]:
    """Yield what is wrong with each key that does not fit the models."""
    for fault in error.errors():
        path, given = list[str](), values
        for part in fault["loc"]:  # its last parts may be members of a union
            if not isinstance(given, Mapping) or part not in given:
                break
            path.append(str(part))
            given = given[str(part)]
        key = ".".join(path)
        if fault["type"] == "extra_forbidden":
            yield f"{key} is {_short(given)}. {_remedy(path)}"
        elif fault["type"] == "missing":
            yield f"{'.'.join(map(str, fault['loc']))} is not given. Write it"
        else:
            yield f"{key} is {_short(given)}. Use {_takes(path)}"


def _short(value: Any) -> str:
    return text if len(text := json.dumps(value)) < 60 else text[:57] + "..."


def _remedy(path: list[str]) -> str:
    key = ".".join(path)
    return (REMEDIES.get(key) or REMEDIES.get(path[0] if len(path) == 1 else f"{path[0]}.*")
            or UNKNOWN.format(known=", ".join(File.model_fields)))


def _takes(path: list[str]) -> str:
    """Return what a key takes, by the type of its default."""
    model: Any = File
    for name in path[:-1]:
        model = {"fp16": Fp16, "bf16": Bf16, "zero_optimization": Zero}.get(name, Named)
    kind = str(model.model_fields[path[-1]].annotation)
    if path == ["zero_optimization", "stage"]:
        return f"one of {', '.join(map(str, STAGES))}"
    if "bool" in kind:
        return "true or false"
    if "float" in kind:
        return "a number that is not negative"
    if "int" in kind:
        return "a whole number from 1"
    return "a name in quotes" if path[-1] == "type" else "an object"


# --- what fits the models, and is not supported ---------------------------------------------------

def _wrong(file: File) -> Iterator[str]:
    if (stage := file.zero_optimization.stage) not in STAGES:
        yield f"zero_optimization.stage is {stage}. {NOT_SHARDED}"
    if file.fp16.enabled is True and file.bf16.enabled is True:
        yield "fp16.enabled and bf16.enabled are true. Leave one of them out"
    yield from _wrong_name("optimizer", file.optimizer, OPTIMIZERS, OPTIMIZERS_REFUSED)
    yield from _wrong_name("scheduler", file.scheduler, SCHEDULERS, SCHEDULERS_REFUSED)
    if file.optimizer and file.optimizer.params.get("bias_correction") is False:
        yield ("optimizer.params.bias_correction is false. torch's Adam always corrects it. Give "
               "an optimizer of your own: from_deepspeed(optimizer=…)")


def _wrong_name(what: str, given: Named | None, known: Mapping[str, str],
                refused: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with an optimizer or a scheduler."""
    if given is None:
        return
    if (name := known_name(given.type)) not in known:
        remedy = refused.get(name.lower(), f"Use one of {', '.join(known)}")
        yield f"{what}.type is {given.type!r}. {remedy}"
        return
    takes = known[name].split()
    for key, value in given.params.items():
        place = f"{what}.params.{key}"
        if key not in takes:
            remedy = REMEDIES.get(place, f"{name} takes {', '.join(takes)}")
            yield f"{place} is {_short(value)}. {remedy}"
        elif remedy := _kind_of_param(key, value):
            yield f"{place} is {_short(value)}. Use {remedy}"
    for key in NEEDED.get(name, ()):
        if key not in given.params:
            yield f"{what}.params.{key} is not given, which {name} needs. Write it"
    if given.params.get("warmup_type", "log") not in ("log", "linear", AUTO):
        yield (f"{what}.params.warmup_type is {_short(given.params['warmup_type'])}. Use \"log\" "
               f"or \"linear\"")


def _kind_of_param(key: str, value: Any) -> str:
    """Return what a parameter takes; "" if the value is such a thing."""
    if value == AUTO or key == "warmup_type":
        return ""
    if key in TRUTHS:
        return "" if isinstance(value, bool) else "true or false"
    if key in LISTS:
        is_list = isinstance(value, list) and all(map(_is_number, value))
        fits = is_list and (key != "betas" or len(value) == 2)
        return "" if fits else "two numbers in a list" if key == "betas" else "a list of numbers"
    least = 1 if key in LENGTHS else -math.inf
    fits = _is_number(value) and value >= least
    return "" if fits else "a number from 1" if key in LENGTHS else "a number"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def known_name(name: str) -> str:
    """Return the name of an optimizer as it is written here."""
    return {one.lower(): one for one in OF_DEEPSPEED}.get(name.lower(), name)


# --- numbers --------------------------------------------------------------------------------------

def options_of(file: File, devices: int | None, source: str) -> dict[str, Any]:
    """Return the trainer's options that are numbers and texts. Raises ConfigError.

    `devices` is the number of GPUs for which the file was written, where its batch sizes do not
    say it.
    """
    batch, microbatches = batch_of(file, devices, source)
    shard = STAGES[file.zero_optimization.stage]
    return {
        "global_batch": batch, "microbatches": microbatches,
        "clip_norm": file.gradient_clipping or None,
        "precision": precision_of(file),
        **({"shard": shard} if shard else {}),
    }


def precision_of(file: File) -> str:
    return "fp16" if file.fp16.enabled else "bf16" if file.bf16.enabled else "fp32"


def batch_of(file: File, devices: int | None, source: str) -> tuple[int, int]:
    """Return the global batch and the number of its micro-batches. Raises ConfigError."""
    batch: Any = file.train_batch_size
    micro: Any = file.train_micro_batch_size_per_gpu
    accumulation: Any = file.gradient_accumulation_steps
    if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int)
                                or devices < 1):
        raise ConfigError(f"devices is {devices!r}. Use a whole number from 1: the number of GPUs "
                          f"for which {source} was written.")
    if batch is None and micro is None:
        raise ConfigError(f"{source} has neither train_batch_size nor "
                          f"train_micro_batch_size_per_gpu. Write one of them.")
    if devices is None and (batch is None or micro is None):
        raise ConfigError(
            f"devices is not given, and the batch sizes of {source} do not say for how many GPUs "
            f"it was written: train_batch_size is {batch} and train_micro_batch_size_per_gpu is "
            f"{micro}. Give from_deepspeed(devices=4), or write both.")
    on_devices = (devices or 1) * (accumulation or 1)
    if batch is None:
        batch = micro * on_devices
    if micro is None:
        micro = batch // on_devices
    microbatches = on_devices if devices and accumulation else batch // max(micro, 1)
    uneven = batch != micro * microbatches or microbatches % on_devices
    if not micro or uneven:
        raise ConfigError(
            f"{source} has train_batch_size {batch}, train_micro_batch_size_per_gpu {micro}, "
            f"gradient_accumulation_steps {accumulation} and devices {devices}, and the first is "
            f"not the product of the others. Correct them, or leave one out.")
    return batch, microbatches

"""What a script gets from DeepSpeed's JSON: an optimizer, and options for Trainer and train().

ds_config.json, or the launcher's --deepspeed → here → script → Trainer

    from elastic_trainer import Trainer, from_deepspeed

    ds = from_deepspeed(model, "ds_config.json", devices=8)
    trainer = Trainer(model, ds.optimizer, dataset, until="3 epochs", **ds.options)

What always holds:
1. The launcher's file (--deepspeed), or the section [deepspeed] of its configuration, holds over
   the one that the script names, as with configuration().
2. The batch does not depend on the number of workers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.deepspeed.file import checked, options_of, read, without_nulls
from elastic_trainer.deepspeed.objects import optimizer_of, scaler_of, scheduler_of
from elastic_trainer.state.configuration import DEEPSPEED, Configuration, taken


@dataclass(frozen=True, kw_only=True)
class FromDeepSpeed:
    """What DeepSpeed's JSON describes."""

    optimizer: torch.optim.Optimizer
    options: dict[str, Any]
    """Options of Trainer and train(): global_batch, microbatches, clip_norm, precision, lr,
    scaler."""


def from_deepspeed(model: torch.nn.Module, file: str | Path | dict[str, Any] | None = None, *,
                   devices: int | None = None, parameters: Iterable[Any] | None = None,
                   optimizer: torch.optim.Optimizer | None = None) -> FromDeepSpeed:
    """Return the optimizer and the options that DeepSpeed's JSON describes, in the place of
    deepspeed.initialize().

    `file` is the JSON, or its content. The launcher's file (--deepspeed) holds over it. `devices`
    is the number of GPUs for which the file was written: it is needed where the batch sizes do not
    say it. `parameters` are parameters or groups, by default all that can be trained. `optimizer`
    is one of the script's own, for a file without one. docs/migrate-from-deepspeed.md.

    Raises ConfigError, with all that the file has and that is not supported.
    """
    values, source = values_of(file)
    found = checked(values, source)
    if (optimizer is None) == (found.optimizer is None):
        raise ConfigError(
            f"{source} has no optimizer, and none is given. Write one into the file, or give "
            f"from_deepspeed(optimizer=…)." if optimizer is None else
            f"{source} has an optimizer, and from_deepspeed() got one, too. Leave one of them out.")
    if optimizer is None:
        assert found.optimizer is not None
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = optimizer_of(found.optimizer, trained if parameters is None else parameters)
    elif parameters is not None:
        raise ConfigError("from_deepspeed() got an optimizer and parameters, which the optimizer "
                          "has already. Leave one of them out.")
    options = options_of(found, devices, source)
    if found.scheduler:
        options["lr"] = scheduler_of(found.scheduler, optimizer)
    device = next((one.device.type for one in model.parameters()), "cpu")
    if scaler := scaler_of(found, device):
        options["scaler"] = scaler
    return FromDeepSpeed(optimizer=optimizer, options=options)


def values_of(file: str | Path | dict[str, Any] | None) -> tuple[dict[str, Any], str]:
    """Return the content of the JSON that holds, and its name. Raises ConfigError."""
    text = Launch.from_environment().configuration
    if _has_section(text):
        found = taken(text)
        return found[DEEPSPEED].as_dict(), found.source
    if file is None:
        raise ConfigError("No JSON of DeepSpeed is given. Start with --deepspeed ds_config.json, "
                          "or name it in the script: from_deepspeed(model, \"ds_config.json\").")
    return ((without_nulls(_as_json(file)), "the dict") if isinstance(file, dict)
            else (read(file), str(file)))


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    """Return what a file with these values would give. Raises ConfigError."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(values))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"from_deepspeed() got a dict that is no JSON: {error}. Give it what "
                          f"json.load() returns.") from None
    return found


def is_given(file: str | Path | dict[str, Any] | None) -> bool:
    """Return whether a script or its launcher has named a JSON."""
    return file is not None or _has_section(Launch.from_environment().configuration)


def _has_section(text: str) -> bool:
    return bool(text) and DEEPSPEED in Configuration.from_text(text)

"""DeepSpeed's JSON beside TrainingArguments, as transformers uses it.

ElasticTrainer(deepspeed=…), or the launcher's --deepspeed → here: "auto" → the value of
TrainingArguments; another value than theirs → ConfigError → optimizer, scheduler and scaler →
transformers.py

What always holds:
1. A value of the file is that of TrainingArguments, or "auto", or it has no counterpart there.
   transformers asks for the same.
2. An optimizer or a scheduler of the file takes the place of that of TrainingArguments. All
   parameters that can be trained are one group, as with transformers and DeepSpeed.

Source: transformers 5.24, integrations/deepspeed.py (trainer_config_process,
trainer_config_finalize, deepspeed_optim_sched).
"""

from __future__ import annotations

import copy
from typing import Any

from elastic_trainer.adapters.transformers_arguments import Numbers, precision_of
from elastic_trainer.config import ConfigError
from elastic_trainer.deepspeed.file import AUTO, File, autos, checked
from elastic_trainer.deepspeed.given import is_given, values_of
from elastic_trainer.deepspeed.objects import optimizer_of, scaler_of, scheduler_of


def file_of(given: Any, args: Any, numbers: Numbers) -> File | None:
    """Return the file, filled in and compared with TrainingArguments; None: there is none. Raises
    ConfigError."""
    if not is_given(given):
        return None
    values, source = values_of(given)
    checked(values, source, takes_auto=True)
    filled = copy.deepcopy(values)
    differing = []
    for key, (value, name) in counterparts(args, numbers).items():
        *places, last = key.split(".")
        table: Any = filled
        for place in places:
            table = table.get(place, {})
        if table.get(last) == AUTO:
            table[last] = value
        elif name and last in table and table[last] != value:
            differing.append(f"{key} is {table[last]!r}, and {name} is {value!r}")
    if differing:
        listed = "".join(f"\n  {one}." for one in differing)
        raise ConfigError(f"{source} differs from TrainingArguments:{listed}\nGive the same "
                          f"values, or \"auto\" in the file.")
    if left := list(autos(filled)):
        raise ConfigError(f"{source} has {left[0]} = \"auto\", which TrainingArguments does not "
                          f"have. Write the value.")
    return checked(filled, source)


def counterparts(args: Any, numbers: Numbers) -> dict[str, tuple[Any, str]]:
    """Return the value of each key that TrainingArguments has, and its name there; "": the file's
    value holds."""
    return {
        "train_micro_batch_size_per_gpu":
            (args.per_device_train_batch_size, "per_device_train_batch_size"),
        "gradient_accumulation_steps":
            (args.gradient_accumulation_steps, "gradient_accumulation_steps"),
        "train_batch_size":
            (numbers.global_batch, "the global batch (with devices)"),
        "gradient_clipping": (args.max_grad_norm, "max_grad_norm"),
        "fp16.enabled": (precision_of(args) == "fp16", "fp16"),
        "bf16.enabled": (precision_of(args) == "bf16", "bf16"),
        "fp16.loss_scale": (0, ""), "fp16.initial_scale_power": (16, ""),
        "optimizer.params.lr": (args.learning_rate, "learning_rate"),
        "optimizer.params.betas": ([args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2"),
        "optimizer.params.eps": (args.adam_epsilon, "adam_epsilon"),
        "optimizer.params.weight_decay": (args.weight_decay, "weight_decay"),
        "scheduler.params.warmup_min_lr": (0, ""),
        "scheduler.params.warmup_max_lr": (args.learning_rate, "learning_rate"),
        "scheduler.params.warmup_num_steps":
            (max(1, args.get_warmup_steps(numbers.steps)), "warmup_steps"),
        "scheduler.params.total_num_steps": (numbers.steps, "the number of steps"),
    }


def build(hf: Any, file: File) -> dict[str, Any]:
    """Give an ElasticTrainer the optimizer and the scheduler of a file, and return what more the
    file sets of the trainer's options. Raises ConfigError."""
    if file.optimizer and hf.optimizer is None:
        trained = [one for one in hf.model.parameters() if one.requires_grad]
        hf.optimizer = optimizer_of(file.optimizer, trained)
    elif file.optimizer:
        raise ConfigError("DeepSpeed's JSON has an optimizer, and optimizers=(…) has one, too. "
                          "Leave one of them out.")
    hf.create_optimizer()
    if file.scheduler and hf.lr_scheduler is None:
        hf.lr_scheduler = scheduler_of(file.scheduler, hf.optimizer)
    scaler = scaler_of(file, hf.args.device.type)
    return {"scaler": scaler} if scaler else {}

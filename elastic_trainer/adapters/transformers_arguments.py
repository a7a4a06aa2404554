"""Which `TrainingArguments` are taken over, and which are refused, by name and with the remedy.

TrainingArguments of a script → here → ConfigError, or the numbers of a run → transformers.py

What always holds:
1. A field is taken over, or refused if it is not the default. Nothing is ignored in silence.
2. A field that this module does not know is refused if it is not the default: a new version of
   transformers may have given it a meaning.
3. Neither the global batch nor the number of micro-batches depends on the number of workers.

Source: transformers 5.24, training_args.py and trainer.py.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from elastic_trainer.config import ConfigError
from elastic_trainer.data.loader import Loader
from elastic_trainer.schedule.order import LikeLength

SUPPORTED = frozenset("""
    output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay
    adam_beta1 adam_beta2 adam_epsilon max_grad_norm label_smoothing_factor
    activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
    gradient_checkpointing_kwargs use_cache logging_strategy logging_steps logging_first_step
    logging_nan_inf_filter log_level log_level_replica disable_tqdm eval_strategy eval_steps
    eval_delay per_device_eval_batch_size prediction_loss_only eval_do_concat_batches
    eval_accumulation_steps include_for_metrics batch_eval_metrics save_strategy save_steps
    save_total_limit load_best_model_at_end metric_for_best_model greater_is_better seed data_seed
    use_cpu dataloader_drop_last remove_unused_columns label_names bf16 fp16
    dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory
    train_sampling_strategy length_column_name
    """.split())
"""Fields with the meaning that they have in transformers. docs/guide/frameworks.md has the
exceptions."""
WITHOUT_EFFECT = frozenset("""
    do_train do_eval do_predict resume_from_checkpoint run_name project
    restore_callback_states_from_checkpoint log_on_each_node
    dataloader_persistent_workers
    """.split())
"""Fields that transformers' Trainer itself does not read without another field, or whose two values
mean the same here."""

_OURS = "Remove it: the launcher and the trainer do this."
_DDP = "Remove it: there is no DistributedDataParallel here."
_HUB = "Remove it, and upload what trainer.save_model() has written."
_LOADER = "Leave it out: loader processes are forked, and give batches in their order."
_PRECISION = "Use bf16=True (or fp16=True): an evaluation has the precision of the training."
REFUSED: dict[str, str] = {
    "optim_target_modules": "Remove it: the optimizers that need it are refused.",
    "average_tokens_across_devices":
        "Remove it: the gradient is that of the mean over all tokens of the global batch.",
    "bf16_full_eval": _PRECISION, "fp16_full_eval": _PRECISION,
    "tf32": "Remove it: `exact` computes without TF32.",
    "torch_compile": "Compile the model yourself: model = torch.compile(model).",
    "torch_compile_backend": "Compile the model yourself: model = torch.compile(model).",
    "torch_compile_mode": "Compile the model yourself: model = torch.compile(model).",
    "use_liger_kernel": "Apply the kernels to the model before you give it to the trainer.",
    "liger_kernel_config": "Apply the kernels to the model before you give it to the trainer.",
    "neftune_noise_alpha":
        "Add the noise in a forward hook of the embeddings: torch is seeded for each micro-batch.",
    "torch_empty_cache_steps": "Call torch.cuda.empty_cache() in a callback's on_step_end.",
    "auto_find_batch_size":
        "Choose per_device_train_batch_size: the size of a micro-batch is part of the result.",
    "include_num_input_tokens_seen": "Count tokens in a Trainer of elastic_trainer (step.log).",
    "report_to": "Use ElasticTrainer(loggers=[TensorBoard()]), or the callback "
                 "transformers.integrations.TensorBoardCallback().",
    "trackio_space_id": "Remove it: report_to is refused, too.",
    "trackio_bucket_id": "Remove it: report_to is refused, too.",
    "trackio_static_space_id": "Remove it: report_to is refused, too.",
    "eval_on_start": "Call trainer.evaluate() before trainer.train().",
    "eval_use_gather_object": "Remove it: predictions are tensors.",
    "save_only_model": "Remove it: a checkpoint is always complete. trainer.save_model() writes "
                       "the model alone.",
    "save_on_each_node": "Remove it: each worker writes its share of a checkpoint into the store.",
    "enable_jit_checkpoint": _OURS,
    "push_to_hub": _HUB, "hub_token": _HUB, "hub_private_repo": _HUB, "hub_model_id": _HUB,
    "hub_strategy": _HUB, "hub_always_push": _HUB, "hub_revision": _HUB,
    "ignore_data_skip": "Remove it: a resumed run goes on with the next sample.",
    "full_determinism": "Remove it: `exact`, the default reducer, is deterministic.",
    "accelerator_config": _OURS, "parallelism_config": "Remove it: each worker holds the model.",
    "dataloader_multiprocessing_context": _LOADER, "dataloader_in_order": _LOADER,
    "ddp_find_unused_parameters": _DDP, "ddp_bucket_cap_mb": _DDP, "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP, "ddp_backend": _DDP, "ddp_timeout": _DDP,
    "fsdp": "Remove it: each worker holds the whole model.",
    "fsdp_config": "Remove it: each worker holds the whole model.",
    "deepspeed": "Give the file to ElasticTrainer(deepspeed=…), or to the launcher (--deepspeed).",
    "debug": "Remove it.",
    "skip_memory_metrics": "Remove it: the values differ between workers.",
    "local_rank": "Remove it, and start the script with ./horovodrun_elastic.sh.",
}
"""The remedy for each field that must be the default."""
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
"""Optimizers of torch and transformers that keep all values in their state."""
ORDERS = ("random", "sequential", "group_by_length")
_FROM_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")
"""Schedulers that transformers steps with the metrics of an evaluation."""


def fields_of(args: Any) -> list[Any]:
    """Return the fields that transformers has declared. Those of a script's subclass are its
    own."""
    declared = {name for kind in type(args).__mro__ if kind.__module__.startswith("transformers.")
                for name in vars(kind).get("__annotations__", {})}
    return [field for field in dataclasses.fields(args) if field.name in declared]


def refuse(args: Any) -> None:
    """Raise ConfigError for an argument that is not taken over, or that contradicts another."""
    for field in fields_of(args):
        name, value = field.name, getattr(args, field.name)
        if name not in SUPPORTED | WITHOUT_EFFECT and not _is_default(field, value):
            remedy = REFUSED.get(name, "This version of elastic-trainer does not know it. Leave it "
                                       "out.")
            raise ConfigError(f"TrainingArguments({name}={_shown(value)}) is not supported. "
                              f"{remedy}")
    if args.world_size > 1:
        raise ConfigError(
            f"TrainingArguments found {args.world_size} processes of torch.distributed (WORLD_SIZE "
            f"or a cluster's variables). Start the script with ./horovodrun_elastic.sh, and unset "
            f"RANK and WORLD_SIZE.")
    if args.data_seed not in (None, args.seed):
        raise ConfigError(
            f"TrainingArguments(data_seed={args.data_seed}) is not supported beside "
            f"seed={args.seed}: one seed sets the order of the samples and the random numbers. "
            f"Leave data_seed out.")
    if args.mixed_precision not in ("no", precision_of(args)):
        raise ConfigError(
            f"ACCELERATE_MIXED_PRECISION is {args.mixed_precision!r}, and TrainingArguments asks "
            f"for {precision_of(args)!r}. Unset the variable, and use bf16=True or fp16=True.")
    _refuse_values(args)


def precision_of(args: Any) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def _refuse_values(args: Any) -> None:
    optim, kind = str(args.optim.value), str(args.lr_scheduler_type.value)
    if optim not in OPTIMIZERS:
        raise ConfigError(
            f"TrainingArguments(optim={optim!r}) is not supported. Use one of "
            f"{', '.join(OPTIMIZERS)}, or give your own: optimizers=(optimizer, None).")
    if kind in _FROM_EVALUATIONS:
        raise ConfigError(
            f"TrainingArguments(lr_scheduler_type={kind!r}) is not supported: a rate follows from "
            f"the step, and not from an evaluation. Use e.g. 'cosine', or 'linear'.")
    if args.train_sampling_strategy not in ORDERS:
        raise ConfigError(
            f"TrainingArguments(train_sampling_strategy={args.train_sampling_strategy!r}) is not "
            f"supported. Use one of {', '.join(ORDERS)}.")
    if args.save_strategy.value == "best":
        raise ConfigError(
            "TrainingArguments(save_strategy='best') is not supported: checkpoints are there to "
            "resume the run. Use load_best_model_at_end=True with eval_strategy, and "
            "trainer.save_model() at the end.")


def _is_default(field: Any, value: Any) -> bool:
    if field.name == "accelerator_config":
        return _is_plain(value)
    made = field.default_factory
    default = field.default if made is dataclasses.MISSING else made()
    if default == "none" and value == []:  # report_to
        return True
    # __post_init__ puts False, [] or {} where None or "" was.
    return value == default or (not value and not default)


def _is_plain(value: Any) -> bool:
    """Return whether an accelerate configuration is as without arguments."""
    from transformers.trainer_pt_utils import AcceleratorConfig

    if value is None:
        return True
    plain = AcceleratorConfig()
    names = [field.name for field in dataclasses.fields(plain)
             if field.name != "use_configured_state"]  # TrainingArguments takes it out
    return all(getattr(value, name) == getattr(plain, name) for name in names)


def _shown(value: Any) -> str:
    return repr(getattr(value, "value", value))


# --- numbers --------------------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The numbers of a run, from TrainingArguments and the declared number of devices."""

    global_batch: int
    microbatches: int
    steps_per_epoch: int
    steps: int
    micro_batches: int
    """The batches of an epoch on each device, of which `accumulation` make a step."""
    accumulation: int

    @property
    def epochs(self) -> int:
        return -(-self.steps // self.steps_per_epoch)

    def epoch_after(self, step: int) -> float:
        """Return how many epochs are done after a step, as transformers counts them."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return epoch + min((place + 1) * self.accumulation, self.micro_batches) / self.micro_batches

    def ends_epoch(self, step: int) -> bool:
        return (step + 1) % self.steps_per_epoch == 0


def numbers_of(args: Any, samples: int, devices: int | None) -> Numbers:
    """Return the numbers of a run. Raises ConfigError."""
    each, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if devices is None:
        raise ConfigError(
            f"devices is not given, and the global batch must not depend on the number of workers. "
            f"Give ElasticTrainer(devices=4) for a global batch of "
            f"{each} x {accumulation} x 4 = {4 * each * accumulation} samples in "
            f"{4 * accumulation} micro-batches of {each}, for up to {4 * accumulation} workers.")
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ConfigError(f"devices is {devices!r}. Use a whole number from 1: the number of "
                          f"devices for which per_device_train_batch_size was chosen.")
    microbatches = accumulation * devices
    global_batch = each * microbatches
    if args.dataloader_drop_last:
        per_epoch = samples // global_batch
        micro_batches = per_epoch * accumulation
        if not per_epoch:
            raise ConfigError(
                f"dataloader_drop_last is True and the dataset has {samples} samples, fewer than "
                f"the global batch of {global_batch}. Use fewer devices or a smaller "
                f"per_device_train_batch_size.")
    else:
        micro_batches, per_epoch = (-(-samples // (each * devices)), -(-samples // global_batch))
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    if steps < 1:
        raise ConfigError(
            f"num_train_epochs is {args.num_train_epochs}, so no step would be done. Use more "
            f"than 0, or max_steps.")
    return Numbers(global_batch=global_batch, microbatches=microbatches, steps_per_epoch=per_epoch,
                   steps=steps, micro_batches=micro_batches, accumulation=accumulation)


def order_of(args: Any, dataset: Any, processing: Any) -> str | LikeLength:
    """Return the order of the samples. For "group_by_length" without a column of lengths, it reads
    the whole dataset once. Raises ConfigError."""
    input_name = (getattr(processing, "model_input_names", None) or ["input_ids"])[0]
    if args.train_sampling_strategy != "group_by_length":
        return "sequential" if args.train_sampling_strategy == "sequential" else "shuffled"
    if args.length_column_name in getattr(dataset, "column_names", ()):
        return LikeLength([int(length) for length in dataset[args.length_column_name]])
    try:
        return LikeLength([len(dataset[i][input_name]) for i in range(len(dataset))])
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"TrainingArguments(train_sampling_strategy='group_by_length') needs the length of "
            f"each sample, and the samples have no {input_name!r}. Give a datasets.Dataset with "
            f"the column {args.length_column_name!r}.") from error


def loader_of(args: Any) -> Loader | None:
    if args.dataloader_num_workers == 0:
        return None
    return Loader(workers=args.dataloader_num_workers,
                  prefetch=args.dataloader_prefetch_factor or 2,
                  pin=args.dataloader_pin_memory and args.device.type == "cuda")


def checkpoint_interval(args: Any, save_steps: int, steps_per_epoch: int) -> int | str:
    """Return the interval of checkpoints, in steps or "auto".

    The defaults of transformers (every 500 steps) and "no" give "auto": a fleet that loses its
    workers needs checkpoints in any case.
    """
    if args.save_strategy.value == "epoch":
        return steps_per_epoch
    if args.save_strategy.value == "steps" and save_steps != 500:
        return save_steps
    return "auto"

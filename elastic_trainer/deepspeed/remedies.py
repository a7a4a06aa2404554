"""What to use instead of the keys and names of DeepSpeed's JSON that are refused.

file.py → here → errors; docs/migrate-from-deepspeed.md (a test compares)
"""

from __future__ import annotations

_SENDS = "Remove it: the trainer's reducer sends gradients, and bucket_bytes sets how many at once"
_SHOWN = "Remove it: `elastic-trainer watch` and `report` show the run"
_RING = "Remove it, or use Trainer(reduce=\"ring\", compress=\"bf16\")"
_AUTOCAST = "Remove it: the forward pass has autocast, and weights stay in 32 bits"
_OFFLOAD = "Remove it: weights and optimizer stay on the GPU"
_DATA = "Remove it, and give Trainer(order=…) or a Mixture (docs/guide/data.md)"
_LAUNCHER = "Remove it: the launcher and the trainer do this"

REMEDIES: dict[str, str] = {
    "bfloat16": "Use bf16",
    "amp": "Use fp16 or bf16",
    "torch_autocast": "Use fp16 or bf16: both are torch's autocast here",
    "data_types": "Remove it: gradients and their sums have 32 bits",
    "communication_data_type": _RING,
    "seq_parallel_communication_data_type": "Remove it: a worker computes whole sequences",
    "prescale_gradients": "Use Trainer(predivide=…) with compress=\"fp16\"",
    "gradient_predivide_factor": "Use Trainer(predivide=…) with compress=\"fp16\"",
    "gradient_allreduce_op": "Remove it: the gradient is that of the mean",
    "sparse_gradients": "Remove it: sparse gradients are summed densely",
    "disable_allgather": _SENDS,
    "zero_allow_untested_optimizer": "Remove it",
    "zero_force_ds_cpu_optimizer": "Remove it",
    "steps_per_print": _SHOWN,
    "wall_clock_breakdown": "Remove it, and start with --timeline",
    "memory_breakdown": _SHOWN,
    "dump_state": _SHOWN,
    "log_level": _SHOWN,
    "flops_profiler": "Remove it, and start with --timeline",
    "comms_logger": "Remove it, and start with --timeline",
    "timers": "Remove it, and start with --timeline",
    "monitor_config": "Use Trainer(loggers=[TensorBoard()])",
    "tensorboard": "Use Trainer(loggers=[TensorBoard()])",
    "wandb": "Use Trainer(loggers=[WandB()])",
    "csv_monitor": "Use Trainer(loggers=[Csv()])",
    "activation_checkpointing":
        "Use torch.utils.checkpoint in the model (docs/guide/large.md)",
    "checkpoint": "Use Trainer(checkpoint_every=…, keep_last=…) and --store",
    "load_universal_checkpoint": "Remove it: a checkpoint resumes on any number of workers",
    "nebula": "Use --store",
    "datastates": "Use --store",
    "elasticity": "Remove it: the global batch stays, whatever the number of workers is",
    "autotuning": "Use `elastic-trainer tune`",
    "aio": _OFFLOAD,
    "sparse_attention": "Build the attention in the model",
    "compression_training": "Compress the model in the script",
    "weight_quantization": "Quantize the model in the script",
    "progressive_layer_drop": "Drop layers in the model: torch is seeded for each micro-batch",
    "eigenvalue": "Remove it",
    "data_efficiency": _DATA,
    "curriculum_learning": _DATA,
    "dataloader_drop_last": "Use Trainer(drop_last=True)",
    "pipeline": "Remove it: each worker holds the whole model",
    "tensor_parallel": "Remove it: each worker holds the whole model",
    "expert_parallel": "Remove it: each worker holds the whole model",
    "hybrid_engine": "Remove it",
    "compile": "Compile the model in the script: model = torch.compile(model)",
    "graph_harvesting": "Remove it",
    "disable_python_gc": _LAUNCHER,
    "check_overflow": "Remove it: fp16 finds overflows, and Trainer(on_nan=…) those of the loss",
    "managed_gradient_accumulation": "Remove it: the trainer accumulates",
    "use_node_local_storage": "Use --store",
    "seed": "Use Trainer(seed=…)",
    "fp16.auto_cast": _AUTOCAST,
    "fp16.fp16_master_weights_and_grads": _AUTOCAST,
    "fp16.fp16_opt_level": _AUTOCAST,
    "fp16.opt_level": _AUTOCAST,
    "bf16.*": _AUTOCAST,
    "fp16.*": "Remove it: the keys are those of the loss scale, and enabled",
    "optimizer.legacy_fusion": "Remove it",
    "optimizer.params.max_grad_norm": "Use gradient_clipping",
    "optimizer.params.fused": "Remove it: torch chooses",
    "optimizer.params.foreach": "Remove it: torch chooses",
    "optimizer.*": "Remove it: an optimizer has type and params",
    "scheduler.params.last_batch_iteration": "Remove it: a run that goes on knows its step",
    "scheduler.*": "Remove it: a scheduler has type and params",
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.cpu_offload_param": _OFFLOAD,
    "zero_optimization.zenflow": _OFFLOAD,
    "zero_optimization.elastic_checkpoint":
        "Remove it: a checkpoint resumes on any number of workers",
    "zero_optimization.zero_quantized_gradients": _RING,
    "zero_optimization.*": _SENDS,
}
"""By key; "fp16.*" is for all other keys of a table."""
UNKNOWN = "This version of elastic-trainer does not know it. Remove it, or use one of {known}"

_OWN = "Give an optimizer of your own: from_deepspeed(optimizer=…)"
OPTIMIZERS_REFUSED = {
    "lamb": _OWN, "lion": _OWN, "muon": _OWN, "fusedadam": "Use Adam", "fusedlamb": _OWN,
    "onebitadam": "It sends compressed gradients. Use Adam, and Trainer(reduce=\"ring\", "
                  "compress=\"bf16\")",
    "zerooneadam": "It sends compressed gradients. Use Adam, and Trainer(reduce=\"ring\", "
                   "compress=\"bf16\")",
    "onebitlamb": "It sends compressed gradients. " + _OWN,
    "muadam": _OWN, "muadamw": _OWN, "musgd": _OWN,
}
"""By the name in small letters."""
_LR = "Give Trainer(lr=…) a scheduler of torch, or a function of the step"
SCHEDULERS_REFUSED = {
    "lrrangetest": _LR,
    "onecycle": "It changes the betas, too. Give Trainer(lr=…) torch's OneCycleLR",
    "onecyclelr": "It changes the betas, too. Give Trainer(lr=…) torch's OneCycleLR",
    "reducelronplateau": "Give it to Trainer(lr=…)",
}
"""By the name in small letters."""

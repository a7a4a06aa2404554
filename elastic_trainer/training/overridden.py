"""Options that a measurement sets in the place of the script's.

`elastic-trainer tune`, `elastic-trainer scaling` → ELASTIC_TRAINER_OVERRIDE → here → options of
train() and Trainer

What always holds:
1. Nothing is overridden in silence: a remark of the run names each number.
2. A run that is overridden neither reads nor writes the store that the script names, because it is
   not the script's run.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from elastic_trainer.config import Launch, Override
from elastic_trainer.events.log import Events
from elastic_trainer.training.options import Options
from elastic_trainer.training.settings import Remark


def overridden(options: Options) -> Options:
    """Return the options with the numbers of a measurement, if this is one."""
    override = Launch.from_environment().override
    if not override.is_given:
        return options
    options = replace(options, store=None, global_batch=options.global_batch * override.scale,
                      microbatches=(override.microbatches or options.microbatches) * override.scale)
    if override.steps:
        options = replace(options, until=f"{override.steps} steps")
    return options


def remarks_on_override(override: Override, options: Options) -> list[Remark]:
    """Remark on the numbers that hold instead of the script's."""
    if not override.is_given:
        return []
    facts = {"steps": override.steps, "microbatches": options.microbatches,
             "global_batch": options.global_batch}
    length = f"ends after {override.steps} steps, " if override.steps else ""
    return [Remark(
        "job.overridden",
        f"This run is a measurement: it {length}has microbatches={options.microbatches} and "
        f"global_batch={options.global_batch}, and leaves the script's store alone "
        f"(ELASTIC_TRAINER_OVERRIDE).", facts)]


def report_memory(override: Override, device: torch.device, events: Events) -> None:
    """Emit the most memory that torch has held on the GPU, if this is a measurement."""
    if override.is_given:
        held = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
        events.emit("worker.memory_measured", device_bytes=held)

"""The seeds of random generators: of a shard, and of each sample that a loader reads.

schedule (the seed of a shard) → here → torch, random and numpy
"""

from __future__ import annotations

import random
from functools import cache

import numpy
import torch

from elastic_trainer.schedule.schedule import Schedule


def seed_of(schedule: Schedule, step: int, shard: int, phase: int) -> int:
    """Return the seed of a shard in a phase of a step; of its end, if `shard` is their number."""
    return schedule.shard_seed(step, shard + phase * (schedule.shards + 1))


def seed_everything(seed: int) -> None:
    """Seed every generator that user code draws from (torch on all devices, random, numpy)."""
    if has_accelerator():
        torch.manual_seed(seed)
        _seed_python(seed)
    else:  # torch.manual_seed formats a traceback for each kind of device that is not there: 0.2 ms
        seed_cpu(seed)


def seed_cpu(seed: int) -> None:
    """Seed the generators of the processor. A process of a loader uses no other device."""
    torch.default_generator.manual_seed(seed)
    _seed_python(seed)


def _seed_python(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


@cache
def has_accelerator() -> bool:
    """Return whether this machine has a device with a random generator of its own."""
    return torch.accelerator.is_available()

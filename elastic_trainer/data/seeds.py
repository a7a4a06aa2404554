"""The seeds of random generators: of a micro-batch, and of each sample that a loader reads.

schedule (the seed of a micro-batch) → here → torch, random and numpy
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy
import torch

from elastic_trainer.schedule.schedule import Schedule


def seed_of(schedule: Schedule, step: int, microbatch: int, phase: int) -> int:
    """Return the seed of a micro-batch in a phase of a step; of its end, if `microbatch` is their
    number."""
    return schedule.microbatch_seed(step, microbatch + phase * (schedule.microbatches + 1))


def seed_everything(seed: int) -> None:
    """Seed every generator that user code draws from (torch on all devices, random, numpy). No
    device is waited for: a generator keeps its seed on the host.

    `torch.manual_seed` formats a traceback for each kind of device that is not there (0.2 ms,
    measured), and keeps it, so it seeds no device that has its own way here.
    """
    seed_cpu(seed)
    if not has_accelerator():
        return
    cuda: Any = torch.cuda  # torch has no types for some of its functions
    if not cuda.is_available():
        torch.manual_seed(seed)
    elif cuda.is_initialized():
        for generator in cuda.default_generators:
            generator.manual_seed(seed)
    else:
        cuda.manual_seed_all(seed)  # the generators take it when CUDA is initialized


def seed_cpu(seed: int) -> None:
    """Seed the generators of the processor. A process of a loader uses no other device."""
    torch.default_generator.manual_seed(seed)
    _seed_python(seed)


@contextmanager
def random_numbers_put_back(device: torch.device) -> Iterator[None]:
    """Let a block draw random numbers (torch, random, numpy), and put the generators back."""
    drawn = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(drawn[0])
        numpy.random.set_state(drawn[1])


def _seed_python(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


@cache
def has_accelerator() -> bool:
    """Return whether this machine has a device with a random generator of its own."""
    return torch.accelerator.is_available()

"""The DataLoaders of a Lightning script: what is taken over, and what is refused.

train_dataloader, val_dataloader → here → dataset, batch size, collate, order, loader processes →
lightning.py

What always holds:
1. A DataLoader is taken apart. The trainer makes the batches, because their order must not depend
   on the number of workers.
2. What would change batches or order, and is not taken over, is an error that names it.

Source: torch 2.13, utils/data/dataloader.py and sampler.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from elastic_trainer.config import ConfigError
from elastic_trainer.data.loader import Loader
from elastic_trainer.schedule.order import Order, Weighted
from elastic_trainer.state.supported import refused_dataset


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a DataLoader says of the batches."""

    dataset: Any
    batch_size: int
    collate: Callable[[list[Any]], Any]
    drop_last: bool
    order: str | Order
    """The option of elastic_trainer.Trainer."""
    samples: int
    """The samples of an epoch."""
    loader: Loader | None


def source_of(given: Any, what: str) -> Source:
    """Take a DataLoader apart. Raises ConfigError."""
    if not isinstance(given, DataLoader):
        raise ConfigError(
            f"{what} is a {type(given).__name__}. Give one DataLoader with a map-style dataset: "
            f"DataLoader(dataset, batch_size=32, shuffle=True).")
    if why := refused_dataset(given.dataset):
        raise ConfigError(f"{what}: {why}")
    if type(given.batch_sampler) is not BatchSampler or given.batch_size is None:
        kind = type(given.batch_sampler).__name__
        raise ConfigError(
            f"{what} has the batch_sampler {kind}, so its batches are its own. Give the DataLoader "
            f"batch_size and shuffle instead.")
    if given.worker_init_fn is not None:
        raise ConfigError(
            f"{what} has a worker_init_fn, which is never called. Leave it out: each sample is "
            f"seeded, whatever process reads it.")
    return Source(dataset=given.dataset, batch_size=given.batch_size, collate=given.collate_fn,
                  drop_last=given.drop_last, order=_order_of(given, what),
                  samples=len(given.sampler),  # type: ignore[arg-type]
                  loader=_loader_of(given))


def _order_of(given: DataLoader[Any], what: str) -> str | Order:
    """Return the option `order` that a sampler stands for."""
    sampler = given.sampler
    if type(sampler) is SequentialSampler:
        return "sequential"
    if type(sampler) not in (RandomSampler, WeightedRandomSampler):
        raise ConfigError(
            f"{what} has the sampler {type(sampler).__name__}, but the trainer makes the order. "
            f"Leave sampler out, and give shuffle=True. For another order use "
            f"elastic_trainer.Trainer.")
    assert isinstance(sampler, (RandomSampler, WeightedRandomSampler))
    if sampler.generator is not None:
        raise ConfigError(
            f"{what} has a generator, but the order follows from the option seed. Leave generator "
            f"out, and give fit(seed=…).")
    size, replaces = len(given.dataset), sampler.replacement  # type: ignore[arg-type]
    if isinstance(sampler, WeightedRandomSampler) and replaces:
        return Weighted(sampler.weights.tolist(), samples=sampler.num_samples)
    if replaces or sampler.num_samples != size or isinstance(sampler, WeightedRandomSampler):
        raise ConfigError(
            f"{what} has a {type(sampler).__name__}(replacement={replaces}, "
            f"num_samples={sampler.num_samples}) for {size} samples. Give shuffle=True, by which "
            f"each sample of an epoch counts once, or a WeightedRandomSampler with replacement.")
    return "shuffled"


def _loader_of(given: DataLoader[Any]) -> Loader | None:
    """Return the processes that read, with the numbers of the DataLoader."""
    if not given.num_workers:
        return None
    return Loader(workers=given.num_workers, prefetch=given.prefetch_factor or 2,
                  pin=given.pin_memory, timeout_s=float(given.timeout) or Loader.timeout_s)


def training_source(given: Any) -> Source:
    """Take the DataLoader of the training apart. Raises ConfigError."""
    if given is None:
        raise ConfigError("there is no DataLoader for the training. Give a datamodule, a module "
                          "with train_dataloader(), or train_dataloaders=….")
    return source_of(given, "train_dataloader")


def validation_sources(given: Any) -> list[Source]:
    """Take the DataLoaders of the validation apart: none, one, or a list. Raises ConfigError."""
    if given is None:
        return []
    many = list(given) if isinstance(given, (list, tuple)) else [given]
    sources = []
    for number, one in enumerate(many):
        what = f"val_dataloader {number}" if len(many) > 1 else "val_dataloader"
        source = source_of(one, what)
        if source.order != "sequential":
            raise ConfigError(f"{what} shuffles, but a validation reads its samples in order. Give "
                              f"the DataLoader shuffle=False.")
        if source.drop_last and len(source.dataset) % source.batch_size:
            raise ConfigError(f"{what} has drop_last=True, but a validation counts each sample. "
                              f"Give the DataLoader drop_last=False.")
        sources.append(source)
    return sources

"""What a Lightning script gives: its DataLoaders, one optimizer, and the schedulers of its rates.

train_dataloader, val_dataloader → here → dataset, batch size, collate, order, loader processes
configure_optimizers → here → optimizer, lr → Trainer; each finished step, each epoch, the metrics
of a validation → here → the schedulers

What always holds:
1. A DataLoader is taken apart. The trainer makes the batches, because their order must not depend
   on the number of workers.
2. A scheduler is stepped where Lightning steps it: at the end of a step, at the end of an epoch,
   or, if it follows a metric, after the validation.
3. All schedulers are one torch scheduler to the trainer. So they are part of the state.

Source: torch 2.13, utils/data/dataloader.py and sampler.py; lightning 2.6,
pytorch/core/optimizer.py and pytorch/loops/training_epoch_loop.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
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
from elastic_trainer.state.values.supported import refused_dataset


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


# --- rates ----------------------------------------------------------------------------------------

Optimizer = torch.optim.Optimizer
FORMS = ("an optimizer, [optimizer], ([optimizer], [scheduler]), or {\"optimizer\": optimizer, "
         "\"lr_scheduler\": scheduler}")
SEVERAL = (
    "configure_optimizers returned {count} optimizers ({kinds}). Their steps follow each other "
    "within a training_step, but a step here is one gradient of all workers. Write the loop with "
    "elastic_trainer.Trainer(optimizer={{\"first\": …, \"second\": …}}), where each has a phase of "
    "its own (`step.phase`).")


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """One scheduler, with the keys that Lightning has for it."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    reduce_on_plateau: bool = False
    name: str | None = None

    def is_due(self, interval: str, number: int) -> bool:
        """Return whether it is stepped at the end of this step of an epoch, or of this epoch."""
        return self.interval == interval and (number + 1) % self.frequency == 0


def configured(returned: Any) -> tuple[Optimizer, list[Scheduled]]:
    """Read what configure_optimizers has returned. Raises ConfigError."""
    optimizers, given, monitor = _parts_of(returned)
    if len(optimizers) != 1:
        kinds = ", ".join(type(one).__name__ for one in optimizers)
        raise ConfigError(SEVERAL.format(count=len(optimizers), kinds=kinds))
    schedulers = [_scheduled(one, monitor) for one in given]
    for one in schedulers:
        if one.scheduler.optimizer is not optimizers[0]:
            raise ConfigError(
                f"the {type(one.scheduler).__name__} of configure_optimizers belongs to another "
                f"optimizer than the one it returned. Build it on that one.")
    return optimizers[0], schedulers


def _parts_of(returned: Any) -> tuple[list[Optimizer], list[Any], str | None]:
    if isinstance(returned, Optimizer):
        return [returned], [], None
    if isinstance(returned, Mapping):
        return _of_dict(returned)
    if isinstance(returned, (list, tuple)) and returned:
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
            second = returned[1]
            return (list(returned[0]),
                    list(second) if isinstance(second, (list, tuple)) else [second], None)
        if all(isinstance(one, Optimizer) for one in returned):
            return list(returned), [], None
        if all(isinstance(one, Mapping) for one in returned):
            parts = [_of_dict(one) for one in returned]
            return ([part[0][0] for part in parts], [one for part in parts for one in part[1]],
                    parts[0][2])
    raise ConfigError(f"configure_optimizers returned {returned!r}. Return {FORMS}.")


def _of_dict(given: Mapping[str, Any]) -> tuple[list[Optimizer], list[Any], str | None]:
    unknown = sorted(given.keys() - {"optimizer", "lr_scheduler", "monitor"})
    if unknown or not isinstance(given.get("optimizer"), Optimizer):
        raise ConfigError(f"configure_optimizers returned a dict with the keys {sorted(given)}. "
                          f"Return {FORMS}.")
    one = given.get("lr_scheduler")
    return [given["optimizer"]], [] if one is None else [one], given.get("monitor")


def _scheduled(given: Any, monitor: str | None) -> Scheduled:
    values: dict[str, Any] = {"monitor": monitor}
    values |= given if isinstance(given, Mapping) else {"scheduler": given}
    known = {field.name for field in fields(Scheduled)}
    if unknown := sorted(values.keys() - known):
        raise ConfigError(f"the lr_scheduler of configure_optimizers has the keys {unknown}. Use "
                          f"some of {sorted(known)}.")
    scheduler = values.get("scheduler")
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(f"the lr_scheduler of configure_optimizers is {scheduler!r}. Give a "
                          f"torch scheduler (LRScheduler).")
    values.setdefault("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    one = Scheduled(**values)
    if one.interval not in ("step", "epoch"):
        raise ConfigError(f"the lr_scheduler has interval={one.interval!r}. Use \"step\" or "
                          f"\"epoch\".")
    if type(one.frequency) is not int or one.frequency < 1:
        raise ConfigError(f"the lr_scheduler has frequency={one.frequency!r}. Use a whole number "
                          f"from 1.")
    if one.reduce_on_plateau and one.monitor is None:
        raise ConfigError(
            f"the lr_scheduler {type(scheduler).__name__} follows a metric, and no monitor is "
            f"given. Return {{\"optimizer\": …, \"lr_scheduler\": …, \"monitor\": \"val_loss\"}}.")
    return one


class Schedulers(LRScheduler):
    """The schedulers of one optimizer, as one that is stepped at the end of each step."""

    def __init__(self, optimizer: Optimizer, given: list[Scheduled], steps_per_epoch: int):
        # Not LRScheduler.__init__, which sets rates: the members have set them.
        self.optimizer, self.given, self._per_epoch = optimizer, given, steps_per_epoch
        self.last_epoch = 0
        """How many steps are finished."""

    @property
    def kind(self) -> str:
        """The classes of the schedulers, and when they are stepped."""
        return ", ".join(f"{type(one.scheduler).__name__} each {one.frequency} {one.interval}"
                         for one in self.given)

    @property
    def _schedulers(self) -> list[LRScheduler]:
        """The parts, under the name that torch's composed schedulers have for theirs."""
        return [one.scheduler for one in self.given]

    def step(self, epoch: int | None = None) -> None:
        number, place = divmod(self.last_epoch, self._per_epoch)
        self.last_epoch += 1
        for one in self.given:
            is_due = one.is_due("step", place) or (
                place + 1 == self._per_epoch and one.is_due("epoch", number))
            if is_due and not one.reduce_on_plateau:
                one.scheduler.step()

    def follow(self, interval: str, number: int, metrics: Mapping[str, Any]) -> bool:
        """Let the schedulers that follow a metric, and are due, see it; returns whether one was.
        Raises RuntimeError if there is no such metric."""
        has_seen = False
        for one in self.given:
            if not one.reduce_on_plateau or not one.is_due(interval, number):
                continue
            if one.monitor is not None and one.monitor in metrics:
                one.scheduler.step(metrics[one.monitor])
                has_seen = True
            elif one.strict:
                raise RuntimeError(
                    f"the {type(one.scheduler).__name__} follows {one.monitor!r}, which was not "
                    f"logged. Log it (self.log), or give one of {sorted(metrics)} as monitor.")
        return has_seen

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch,
                "_members": [one.scheduler.state_dict() for one in self.given]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        for one, values in zip(self.given, state_dict["_members"], strict=True):
            one.scheduler.load_state_dict(values)


def rates_of(optimizer: Optimizer, given: list[Scheduled], steps_per_epoch: int
             ) -> Schedulers | None:
    return Schedulers(optimizer, given, steps_per_epoch) if given else None

"""`lightning.Trainer.fit` on workers that come and go.

script with a LightningModule → here: DataLoaders, optimizer and schedulers
(lightning_given.py), hooks (lightning_hooks.py, lightning_flow.py) → Trainer (training/trainer.py)

    from elastic_trainer.adapters.lightning import fit

    result = fit(module, datamodule, max_epochs=10, devices=8)

What always holds:
1. What a script gives is taken over with the meaning that it has in Lightning, or refused at once,
   by name.
2. Global batch and micro-batches follow from the DataLoader's batch_size and the declared number of
   devices, never from the number of workers.
3. Modules of `lightning` and of `pytorch_lightning` are accepted. Both are imported by the script
   alone.

What it does not do: manual optimization, Lightning's loggers, strategies and checkpoint files.

Source: lightning 2.6, pytorch/trainer/trainer.py (_run).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from elastic_trainer import Trainer
from elastic_trainer.adapters.lightning_flow import Flow
from elastic_trainer.adapters.lightning_given import (
    Source,
    configured,
    rates_of,
    training_source,
    validation_sources,
)
from elastic_trainer.adapters.lightning_hooks import (
    Callbacks,
    overrides,
    refuse_hooks,
    refuse_module,
    sorted_out,
)
from elastic_trainer.adapters.lightning_logs import Logs
from elastic_trainer.adapters.lightning_metrics import ModuleMetrics
from elastic_trainer.adapters.lightning_trainer import StandIn
from elastic_trainer.config import ConfigError
from elastic_trainer.data.alone import alone_on_host
from elastic_trainer.options import Common, resolved, shows_options
from elastic_trainer.training.job.job import Result
from elastic_trainer.training.worker import local_rank

if TYPE_CHECKING:
    from typing_extensions import Unpack

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
PRECISIONS = {"32-true": "fp32", "32": "fp32", 32: "fp32", "fp32": "fp32", "bf16-mixed": "bf16",
              "bf16": "bf16", "16-mixed": "fp16", "fp16": "fp16"}
"""The precisions of Lightning, and the option of elastic_trainer.Trainer."""
Lightning = Callable[[str], Any]


@shows_options(Common)
def fit(module: Any, datamodule: Any = None, *, train_dataloaders: Any = None,
        val_dataloaders: Any = None, max_epochs: int | None = None, max_steps: int = -1,
        devices: int | None = None, global_batch: int | None = None,
        microbatches: int | None = None, accelerator: str = "auto", callbacks: Any = (),
        check_val_every_n_epoch: int = 1, val_check_interval: int | float = 1.0,
        gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None,
        precision: int | str = "32-true", **options: Unpack[Common]) -> Result:
    """Train a LightningModule to the end, on every worker, and return the result of the run.

    Arguments of `lightning.Trainer` and its `fit` have the same meaning. `devices` is the number of
    devices for which the batch_size of the training's DataLoader was chosen: the global batch is
    their product, in `devices` micro-batches. Or give `global_batch`, which has 8 `microbatches` by
    default. `options` are some of those of elastic_trainer.Trainer (options.py, Common).

    Raises ConfigError for what is not supported.
    """
    lightning = package_of(module, "LightningModule")
    given = resolved(options, {}, "fit()", Common)
    _refuse(module, lightning, given["state"] or {})
    of_lightning = _options(precision, gradient_clip_val, gradient_clip_algorithm)
    seen = StandIn(
        module, datamodule, lightning, max_epochs=max_epochs, max_steps=max_steps,
        check_val_every_n_epoch=check_val_every_n_epoch, val_check_interval=val_check_interval,
        gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm,
        precision=str(precision), devices=devices or 1)
    asked = _set_up(seen, lightning, callbacks, accelerator)
    sources = Sources.of(seen, lightning, train_dataloaders, val_dataloaders)
    numbers = Numbers.of(sources.train, devices, global_batch, microbatches, max_epochs, max_steps)
    _require_intervals(check_val_every_n_epoch, val_check_interval, numbers.steps_per_epoch)
    seen.estimated_stepping_batches = numbers.steps
    seen.num_training_batches = numbers.steps_per_epoch
    flow = _flow(seen, lightning, sources)
    flow.monitor = asked.best.metric if asked.best else None
    flow.call("on_fit_start")
    elastic = Trainer(
        module, seen.optimizers[0], sources.train.dataset, global_batch=numbers.global_batch,
        microbatches=numbers.microbatches, until=f"{numbers.steps} steps", lr=flow.schedulers,
        best=asked.best, order=sources.train.order, drop_last=sources.train.drop_last,
        collate=sources.train.collate, loader=sources.train.loader,
        **of_lightning, **{
            **given, "state": {**(given["state"] or {}), "lightning": flow},
            "checkpoint_every": asked.interval(numbers.steps_per_epoch, given["checkpoint_every"]),
            "progress": given["progress"] and asked.shows_progress})
    seen._begin(elastic)
    for step in elastic:
        flow.begin_step()
        for batch in step:
            flow.compute(step, batch)
        flow.end_step(step, elastic)
    _tear_down(flow, asked, elastic)
    return elastic.result


def package_of(given: Any, name: str) -> Lightning:
    """Return what imports modules of the package that an object's class comes from, as
    `lightning("core")`. Raises ConfigError for an object of another kind."""
    for kind in type(given).__mro__:
        for package in PACKAGES:
            if kind.__name__ == name and kind.__module__.startswith(f"{package}."):
                return lambda part: import_module(f"{package}.{part}")
    raise ConfigError(f"fit() got a {type(given).__name__}, which is no {name} of lightning or "
                      f"pytorch_lightning. Give the module first, then the datamodule; DataLoaders "
                      f"are train_dataloaders=… and val_dataloaders=….")


# --- before the training --------------------------------------------------------------------------

def _refuse(module: Any, lightning: Lightning, state: Mapping[str, Any]) -> None:
    if isinstance(getattr(vars(module).get("log"), "__self__", None), Logs):
        del module.log  # of a fit() that has failed
    refuse_module(module, lightning("core").LightningModule)
    if "lightning" in state:
        raise ConfigError("state has an object with the name 'lightning', which fit() uses. Give "
                          "it another name.")


def _options(precision: int | str, clip: float | None, algorithm: str | None) -> dict[str, Any]:
    if precision not in PRECISIONS:
        raise ConfigError(f"precision is {precision!r}. Use one of \"32-true\", \"bf16-mixed\", "
                          f"\"16-mixed\": weights keep their type.")
    if algorithm not in (None, "norm", "value"):
        raise ConfigError(f"gradient_clip_algorithm is {algorithm!r}. Use \"norm\" or \"value\".")
    found: dict[str, Any] = {"precision": PRECISIONS[precision]}
    if clip:
        found["clip_value" if algorithm == "value" else "clip_norm"] = clip
    return found


def _set_up(seen: StandIn, lightning: Lightning, callbacks: Any, accelerator: str) -> Callbacks:
    """Run the hooks before the training, as Lightning orders them."""
    module, data = seen.lightning_module, seen.datamodule
    if data is not None:
        base = package_of(data, "LightningDataModule")("core").LightningDataModule
        refuse_hooks(data, base)
        data.trainer = seen
    module.trainer = seen
    given = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    own = module.configure_callbacks()
    own = list(own) if isinstance(own, (list, tuple)) else [own]
    kinds = {type(one) for one in own}
    asked = sorted_out([one for one in given if type(one) not in kinds] + own, lightning)
    seen.callbacks = asked.called
    # Workers of a host download into one folder.
    with alone_on_host("prepare-data", "runs prepare_data()"):
        if data is not None:
            data.prepare_data()
        module.prepare_data()
    if data is not None:
        data.setup("fit")
    for one in seen.callbacks:
        one.setup(seen, module, "fit")
    module.setup("fit")
    module.configure_model()
    _move(module, accelerator)
    return asked


def _move(module: Any, accelerator: str) -> None:
    """Move the module to this worker's own GPU, if it is to have one. Raises ConfigError."""
    if accelerator not in ("auto", "cpu", "gpu", "cuda"):
        raise ConfigError(f"accelerator is {accelerator!r}. Use \"auto\", \"cpu\" or \"gpu\".")
    has_gpu = torch.cuda.is_available()
    if accelerator in ("gpu", "cuda") and not has_gpu:
        raise ConfigError(f"accelerator is {accelerator!r}, and torch finds no GPU. Use \"auto\".")
    if has_gpu and accelerator != "cpu":
        torch.cuda.set_device(local_rank())
        module.to(torch.device("cuda", local_rank()))


def _flow(seen: StandIn, lightning: Lightning, sources: Sources) -> Flow:
    module, base = seen.lightning_module, lightning("core").LightningModule
    skipped = frozenset([*vars(base()), "log"])
    optimizer, schedulers = configured(module.configure_optimizers())
    seen.optimizers, seen.lr_scheduler_configs = [optimizer], schedulers
    metrics = ModuleMetrics(module)
    logs = Logs(module, lightning, metrics.computed)
    module.log = logs.log
    return Flow(seen, logs, metrics, sources.validations,
                rates_of(optimizer, schedulers, seen.num_training_batches), skipped)


@dataclass(frozen=True, kw_only=True)
class Sources:
    train: Source
    validations: list[Source]

    @staticmethod
    def of(seen: StandIn, lightning: Lightning, train: Any, validation: Any) -> Sources:
        """Ask for the DataLoaders: those given, those of the datamodule, or those of the module.
        Raises ConfigError."""
        module, base = seen.lightning_module, lightning("core").LightningModule
        owners = [(seen.datamodule, None), (module, base)]
        for owner, kind in owners:
            if owner is None:
                continue
            hooks = kind or lightning("core").LightningDataModule
            if train is None and overrides(owner, "train_dataloader", hooks):
                train = owner.train_dataloader()
            if validation is None and overrides(owner, "val_dataloader", hooks):
                validation = owner.val_dataloader()
        validates = overrides(module, "validation_step", base)
        return Sources(train=training_source(train),
                       validations=validation_sources(validation) if validates else [])


@dataclass(frozen=True, kw_only=True)
class Numbers:
    global_batch: int
    microbatches: int
    steps_per_epoch: int
    steps: int

    @staticmethod
    def of(source: Source, devices: int | None, global_batch: int | None, microbatches: int | None,
           max_epochs: int | None, max_steps: int) -> Numbers:
        each, samples = source.batch_size, source.samples
        if (devices is None) == (global_batch is None):
            raise ConfigError(
                f"fit() got devices={devices} and global_batch={global_batch}, and the global "
                f"batch must not depend on the number of workers. Give devices=4 for a global "
                f"batch of {each} x 4 = {4 * each} samples in 4 micro-batches of {each}, for up to "
                f"4 workers; or global_batch={each}, microbatches={min(4, each)}.")
        whole = global_batch or each * (devices or 0)
        if whole < 1 or (devices is not None and devices < 1):
            raise ConfigError(f"fit() got devices={devices} and global_batch={global_batch}. Use "
                              f"whole numbers from 1.")
        per_epoch = samples // whole if source.drop_last else -(-samples // whole)
        if not per_epoch:
            raise ConfigError(
                f"train_dataloader has drop_last=True and {samples} samples, fewer than the global "
                f"batch of {whole}. Use fewer devices, or a smaller batch_size.")
        ends = ([max_epochs * per_epoch] if max_epochs is not None else []) + (
            [max_steps] if max_steps != -1 else [])
        if not ends or min(ends) < 1:
            raise ConfigError(f"fit() got max_epochs={max_epochs} and max_steps={max_steps}. Give "
                              f"one of them, from 1.")
        return Numbers(global_batch=whole, microbatches=microbatches or devices or min(8, whole),
                       steps_per_epoch=per_epoch, steps=min(ends))


def _require_intervals(epochs: int, interval: int | float, steps_per_epoch: int) -> None:
    if type(epochs) is not int or epochs < 1:
        raise ConfigError(f"check_val_every_n_epoch is {epochs!r}. Use a whole number from 1.")
    is_share = type(interval) is float and 0 < interval <= 1
    is_steps = type(interval) is int and 1 <= interval <= steps_per_epoch
    if not (is_share or is_steps):
        raise ConfigError(f"val_check_interval is {interval!r}, and an epoch has {steps_per_epoch} "
                          f"steps. Use a share of an epoch (0.25), or a number of steps.")


# --- after the training --------------------------------------------------------------------------

def _tear_down(flow: Flow, asked: Callbacks, elastic: Trainer) -> None:
    """Run the hooks after the training, as Lightning orders them."""
    seen, module, steps = flow.seen, flow.module, elastic.result.steps
    seen._at(None, seen._epoch or -(-steps // seen.num_training_batches), steps)
    best = elastic.result.best
    for one in asked.checkpoints:
        if best is not None and best.value is not None and one.monitor == best.rule.metric:
            one.best_model_score = torch.tensor(best.value)
    flow.call("on_train_end")
    flow.call("on_fit_end")
    if seen.datamodule is not None:
        seen.datamodule.teardown("fit")
    flow.call("teardown", "fit")
    del module.log

"""The hooks of modules, datamodules and callbacks of Lightning: which are called, and which are
refused if a script has them.

module, datamodule, callbacks → here → ConfigError, or what lightning_flow.py calls

What always holds: each hook of Lightning stands in one of the tables. A test compares them with the
installed version.

Source: lightning 2.6, pytorch/core/hooks.py, core/module.py, core/datamodule.py and
callbacks/callback.py.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from elastic_trainer.config import ConfigError
from elastic_trainer.evaluate.best import KeepBest, keep_best

CALLED = frozenset("""
    prepare_data setup teardown configure_model configure_callbacks configure_optimizers
    train_dataloader val_dataloader on_fit_start on_fit_end on_train_start on_train_end
    on_train_epoch_start on_train_epoch_end on_train_batch_start on_train_batch_end
    on_validation_start on_validation_end on_validation_epoch_start on_validation_epoch_end
    training_step validation_step on_before_backward on_after_batch_transfer state_dict
    load_state_dict forward state_key
    """.split())
"""The hooks that are called, where Lightning calls them."""
NOT_IN_FIT = frozenset("""
    on_test_start on_test_end on_test_epoch_start on_test_epoch_end on_test_batch_start
    on_test_batch_end on_test_model_eval on_test_model_train test_step test_dataloader
    on_predict_start on_predict_end on_predict_epoch_start on_predict_epoch_end
    on_predict_batch_start on_predict_batch_end on_predict_model_eval on_predict_model_train
    predict_step predict_dataloader
    """.split())
"""The hooks that Lightning does not call in fit either."""

_BATCHES = "a worker computes some of the batches. Use validation_step, or on_validation_epoch_end"
_GRADIENT = ("the gradient of all workers arrives and is applied in one piece. Use "
             "on_train_batch_end, where .grad is the gradient as it was applied (NaN with "
             "shard='gradients': no worker has all of it)")
_STEP = ("the trainer clears gradients and steps the optimizer. Use a scheduler, "
         "gradient_clip_val, or elastic_trainer.Trainer")
_MODES = "an evaluation sets the modes of all modules, and puts them back"
_SAVED = ("checkpoints have no Lightning format. Plain attributes of the module and of callbacks "
          "are kept; give other objects as fit(state={\"name\": object})")
REFUSED = {
    "on_validation_batch_start": _BATCHES, "on_validation_batch_end": _BATCHES,
    "on_after_backward": _GRADIENT, "on_before_optimizer_step": _GRADIENT,
    "on_before_zero_grad": _STEP, "optimizer_step": _STEP, "optimizer_zero_grad": _STEP,
    "backward": _STEP, "configure_gradient_clipping": _STEP,
    "lr_scheduler_step": "the trainer steps the scheduler, as part of the step. Return a torch "
                         "scheduler from configure_optimizers",
    "configure_sharded_model": "each worker holds the whole model. Use configure_model",
    "on_validation_model_zero_grad": _MODES, "on_validation_model_eval": _MODES,
    "on_validation_model_train": _MODES,
    "on_before_batch_transfer": "the trainer moves the batch to the device. Use collate_fn, or "
                                "on_after_batch_transfer",
    "transfer_batch_to_device": "the trainer moves the batch to the device. Give the batch a "
                                "method to(device)",
    "on_save_checkpoint": _SAVED, "on_load_checkpoint": _SAVED,
    "on_sanity_check_start": "there is no sanity check before the training. Use on_fit_start",
    "on_sanity_check_end": "there is no sanity check before the training. Use on_train_start",
    "on_exception": "an exception ends the run on all workers. Put `try` around fit()",
    "log": "fit() gives the module another one, which sums over all workers. Call self.log",
}
"""Methods that are refused if they are overridden, and why."""
OF_CALLBACKS = frozenset(["on_before_backward"])
"""Hooks that are called for the module, and refused for callbacks."""
BUILT_IN = {
    "StochasticWeightAveraging": "Use fit(swa=Swa(from_step=…)).",
    "WeightAveraging": "Use fit(ema=0.999).", "EMAWeightAveraging": "Use fit(ema=0.999).",
    "GradientAccumulationScheduler": "A global batch is the same for all steps: fit(global_batch="
                                     "…).",
    "LearningRateMonitor": "Leave it out: the event of each step has the rate.",
    "ModelSummary": "Print lightning.pytorch.utilities.model_summary.summarize(module) yourself.",
    "RichModelSummary": "Print lightning.pytorch.utilities.model_summary.summarize(module) "
                        "yourself.",
    "ModelPruning": "Prune the model before fit().",
    "BaseFinetuning": "Set requires_grad before fit(): the optimizer keeps its groups.",
    "BackboneFinetuning": "Set requires_grad before fit(): the optimizer keeps its groups.",
    "LearningRateFinder": "Choose the rate before fit().",
    "BatchSizeFinder": "Choose the batch size before fit(): it is part of the result.",
    "Timer": "Use fit(max_epochs=…) or fit(max_steps=…).",
    "OnExceptionCheckpoint": "Leave it out: the run goes on from its newest checkpoint.",
}
"""The remedy for callbacks of Lightning that are refused."""


def overrides(given: Any, name: str, base: type) -> bool:
    """Return whether an object has a method of its own in place of that of Lightning."""
    mine = getattr(given, name, None)
    return mine is not None and getattr(mine, "__func__", mine) is not getattr(base, name, None)


def refuse_hooks(given: Any, base: type, *, is_callback: bool = False) -> None:
    """Raise ConfigError for an overridden hook that is never called."""
    for name in REFUSED.keys() | (OF_CALLBACKS if is_callback else set()):
        if hasattr(base, name) and overrides(given, name, base):
            why = REFUSED.get(name, "a worker computes some of the batches. Use the module's "
                                    f"{name}, or on_train_batch_end")
            raise ConfigError(f"{type(given).__name__} has {name}, which is never called: {why}.")


def refuse_module(module: Any, base: type) -> None:
    refuse_hooks(module, base)
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} has automatic_optimization=False. Its training_step steps "
            f"the optimizers, but a step here is one gradient of all workers. Return the loss, or "
            f"write the loop with elastic_trainer.Trainer(optimizer={{\"first\": …, "
            f"\"second\": …}}), where each optimizer has a phase of its own (`step.phase`).")
    if not overrides(module, "training_step", base):
        raise ConfigError(f"{type(module).__name__} has no training_step.")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigError(f"the training_step of {type(module).__name__} takes dataloader_iter, "
                          f"but the trainer makes the batches. Take (batch, batch_idx).")


def takes(method: Any, count: int) -> bool:
    """Return whether a method takes so many arguments by place."""
    kinds = [one.kind for one in inspect.signature(method).parameters.values()]
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return inspect.Parameter.VAR_POSITIONAL in kinds or sum(
        kind in by_place for kind in kinds) >= count


# --- callbacks ------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class Callbacks:
    called: list[Any]
    checkpoints: list[Any]
    shows_progress: bool
    best: KeepBest | None = None
    every: int | str = "auto"
    """The interval of checkpoints."""
    every_epochs: int = 0
    """The interval of checkpoints in epochs; 0: not given."""

    def interval(self, steps_per_epoch: int, given: int | str | None) -> int | str | None:
        """Return the interval of checkpoints, as the option checkpoint_every; `given` is that of
        fit()."""
        if given != "auto":
            return given
        return self.every_epochs * steps_per_epoch or self.every


def sorted_out(given: list[Any], lightning: Any) -> Callbacks:
    kinds = lightning("callbacks")
    found = Callbacks(called=[], checkpoints=[], shows_progress=True)
    for one in given:
        name = type(one).__name__
        if not isinstance(one, kinds.Callback):
            raise ConfigError(f"the callback {name} is no Callback of {kinds.__name__}, of which "
                              f"the module is. Use the same package for both.")
        if isinstance(one, kinds.ProgressBar):
            found.shows_progress = found.shows_progress and one.is_enabled is not False
            continue
        if isinstance(one, kinds.ModelCheckpoint):
            found.checkpoints.append(one)
            _take_checkpoint(found, one, kinds.ModelCheckpoint)
            continue
        for parent in type(one).__mro__:
            is_theirs = parent.__module__.startswith(f"{kinds.__name__}.")
            if is_theirs and parent.__name__ not in ("Callback", "EarlyStopping", "LambdaCallback"):
                raise ConfigError(
                    f"the callback {name} is not supported. "
                    + BUILT_IN.get(parent.__name__, "Leave it out, or write the loop with "
                                                    "elastic_trainer.Trainer."))
        refuse_hooks(one, kinds.Callback, is_callback=True)
        found.called.append(one)
    return found


def _take_checkpoint(found: Callbacks, one: Any, base: Any) -> None:
    """Read a ModelCheckpoint: which step is the best, and how often there is a checkpoint."""
    if one.__class__ is not base:
        raise ConfigError(f"{type(one).__name__} is a ModelCheckpoint with code of its own, which "
                          f"is never called. Use ModelCheckpoint itself.")
    usual = {"dirpath": None, "filename": None, "save_weights_only": False,
             "save_on_exception": False}
    for name, value in usual.items():
        if (now := getattr(one, name, value)) != value:
            raise ConfigError(
                f"ModelCheckpoint({name}={now!r}) is not supported: checkpoints are in the store "
                f"of the run, each complete. Leave it out; `elastic-trainer checkpoints export` "
                f"writes the weights of a step.")
    if one.save_top_k not in (0, 1):
        raise ConfigError(
            f"ModelCheckpoint(save_top_k={one.save_top_k}) is not supported. The best checkpoint "
            f"stays with save_top_k=1, and the newest ones with fit(keep_last=…).")
    if one._train_time_interval is not None:
        found.every = f"{one._train_time_interval.total_seconds():g}s"
    elif one._every_n_train_steps:
        found.every = int(one._every_n_train_steps)
    elif one._every_n_epochs > 1 and one.monitor is None:
        found.every_epochs = int(one._every_n_epochs)
    if one.monitor is None or one.save_top_k == 0:
        return
    if found.best is not None:
        raise ConfigError(f"two ModelCheckpoints have a monitor: {found.best.metric!r} and "
                          f"{one.monitor!r}. One decides which checkpoint stays. Leave one out.")
    if one._every_n_epochs > 1:
        raise ConfigError(f"ModelCheckpoint(monitor={one.monitor!r}, "
                          f"every_n_epochs={one._every_n_epochs}) is not supported: each "
                          f"validation decides. Use check_val_every_n_epoch in fit().")
    found.best = keep_best(one.monitor, mode=one.mode)

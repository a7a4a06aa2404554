"""The callbacks of a `transformers.Trainer`, in their order, and what they and it keep.

steps of a run → here → callbacks, logs, evaluations, the stop request → transformers.py

What always holds:
1. All callbacks run on every worker, once per finished step, with the same TrainerState. Only
   `is_world_process_zero` and `is_local_process_zero` differ: they are true on the first worker.
2. TrainerState, TrainerControl, the callbacks that are ExportableState, and the best weights are
   part of the run's state: checkpoints have them, and a newcomer receives them.
3. A callback, or a switch of TrainerControl, that would have no effect is an error.

In the first step of a process, on_train_begin, on_epoch_begin and on_step_begin run before this
worker has joined the run. What they change in rule 2's objects is then replaced by the run's.

Source: transformers 5.24, trainer.py (_inner_training_loop, _run_epoch) and trainer_callback.py.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from elastic_trainer.adapters.transformers_arguments import Numbers
from elastic_trainer.config import ConfigError
from elastic_trainer.state.values.names import named_buffers, named_parameters
from elastic_trainer.training.step import Step, applied

KEPT = ("epoch", "global_step", "log_history", "best_metric", "best_global_step")
"""The fields of TrainerState that change during a run, and are alike on all workers."""
NEVER_CALLED = {
    "on_pre_optimizer_step": "the gradient of all workers arrives and is applied in one piece. Use "
                             "on_optimizer_step, which sees the gradient as it was applied",
    "on_substep_end": "a worker computes some of the micro-batches of a step. Use on_step_end",
    "on_prediction_step": "a worker computes some of the batches. Use on_evaluate",
    "on_save": "checkpoints are written in the background, and not into "
               "output_dir/checkpoint-N. Use on_step_end or on_epoch_end, and `elastic-trainer "
               "checkpoints export` for the weights of a step",
}
"""Methods of callbacks that are refused, and why."""
STOP_EPOCH = (
    "a callback has set control.should_epoch_stop in step {step}, but the order of the samples "
    "follows from the number of the step, so an epoch cannot be left. Use should_training_stop.")
SAVE_NOW = (
    "a callback has set control.should_save in step {step}, in which no checkpoint is due. Use "
    "save_steps, or save_strategy='epoch'.")


def refuse_callbacks(callbacks: list[Any], base: type) -> None:
    for callback in callbacks:
        for name, why in NEVER_CALLED.items():
            if getattr(type(callback), name) is not getattr(base, name):
                raise ConfigError(
                    f"the callback {type(callback).__name__} has {name}, which is never called: "
                    f"{why}.")


class Flow:
    """The callbacks around the steps of one run, on this worker."""

    def __init__(self, hf: Any, numbers: Numbers):
        self.hf, self.numbers = hf, numbers
        self._has_begun = False
        self._loss_sum, self._total_loss, self._logged_at = 0.0, 0.0, 0
        self.best: dict[str, torch.Tensor] = {}
        """The weights and buffers of the best evaluation, with load_best_model_at_end."""

    # --- around a step ----------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Run what stands before the batches of a step."""
        is_first, self._has_begun = not self._has_begun, True
        if is_first or self.hf.state.global_step % self.numbers.steps_per_epoch == 0:
            self.call("on_epoch_begin")
        self.call("on_step_begin")

    def end_step(self, step: Step) -> None:
        """Run what stands after the batches of a step, on every worker alike."""
        hf, state, numbers = self.hf, self.hf.state, self.numbers
        rate, norm = applied(step)
        was_stopping = hf.control.should_training_stop
        self._loss_sum += step.loss
        self.see_place(hf.is_world_process_zero())
        self.call("on_optimizer_step")
        state.global_step, state.epoch = step.number + 1, numbers.epoch_after(step.number)
        self.call("on_step_end")
        self._log_and_evaluate(rate, norm, evaluates=not was_stopping)
        is_last = was_stopping or state.global_step >= numbers.steps
        if is_last or numbers.ends_epoch(step.number):
            self.call("on_epoch_end")
            self._log_and_evaluate(rate, norm, evaluates=not was_stopping)
        if hf.control.should_epoch_stop:
            raise RuntimeError(STOP_EPOCH.format(step=step.number))

    def see_place(self, is_first: bool) -> None:
        """Let the callbacks see whether this worker is the first one."""
        self.hf.state.is_world_process_zero = self.hf.state.is_local_process_zero = is_first

    def call(self, event: str) -> None:
        hf = self.hf
        hf.control = getattr(hf.callback_handler, event)(hf.args, hf.state, hf.control)

    def _log_and_evaluate(self, rate: float, norm: torch.Tensor | None, *, evaluates: bool) -> None:
        """Do what the callbacks ask for. the step after the stop request is not evaluated:
        transformers does not do that step."""
        hf, state = self.hf, self.hf.state
        if hf.control.should_log and state.global_step > self._logged_at:
            logs = {"loss": self._loss_sum / (state.global_step - self._logged_at)}
            if norm is None:
                norm = torch.nn.utils.get_total_norm(
                    [p.grad for p in hf.model.parameters() if p.grad is not None])
            if not norm.isnan():  # as of gradients that are sharded; on a GPU this waits for it
                logs["grad_norm"] = float(norm)
            logs["learning_rate"] = rate
            self._total_loss += self._loss_sum
            self._loss_sum, self._logged_at = 0.0, state.global_step
            hf.log(logs)
        hf.control.should_evaluate &= evaluates
        if hf.control.should_evaluate:
            metrics = hf.evaluate(ignore_keys=hf.ignore_keys_for_eval)
            if hf._determine_best_metric(metrics, None) and hf.args.load_best_model_at_end:
                self.best = {name: tensor.detach().clone() for name, tensor in self._values()}
        if hf.control.should_save:
            if not self._save_is_due():
                raise RuntimeError(SAVE_NOW.format(step=state.global_step - 1))
            hf.control.should_save = False

    def _save_is_due(self) -> bool:
        step, strategy = self.hf.state.global_step, self.hf.args.save_strategy.value
        is_over = step >= self.numbers.steps or self.hf.control.should_training_stop
        if strategy == "epoch":
            return bool(is_over or self.numbers.ends_epoch(step - 1))
        return bool(strategy == "steps" and (is_over or step % self.hf.state.save_steps == 0))

    # --- the end ----------------------------------------------------------------------------------

    @property
    def train_loss(self) -> float:
        return (self._total_loss + self._loss_sum) / max(int(self.hf.state.global_step), 1)

    def load_best(self) -> None:
        with torch.no_grad():
            for name, tensor in self._values() if self.best else ():
                tensor.copy_(self.best[name])

    def _values(self) -> list[tuple[str, torch.Tensor]]:
        model = self.hf.model
        return [*named_parameters(model).items(), *named_buffers(model).items()]

    # --- in the state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        from transformers.trainer_utils import denumpify_detensorize

        hf = self.hf
        plain: dict[str, Any] = denumpify_detensorize({
            "state": {name: getattr(hf.state, name) for name in KEPT},
            "control": dataclasses.asdict(hf.control),
            "callbacks": [[type(one).__name__, one.state()] for one in self._exportable()]})
        return plain | {"losses": [self._loss_sum, self._total_loss, self._logged_at],
                        "best": self.best}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over the state of the run. A callback gets the attributes that it has exported."""
        for mine, theirs in ((self.hf.state, "state"), (self.hf.control, "control")):
            for name, value in values[theirs].items():
                setattr(mine, name, list(value) if isinstance(value, list) else value)
        self._loss_sum, self._total_loss, self._logged_at = values["losses"]
        self.best = dict(values["best"])
        left = self._exportable()
        for name, exported in values["callbacks"]:
            callback = next((one for one in left if type(one).__name__ == name), None)
            if callback is None:
                warnings.warn(f"the state of the run has a callback {name}, which this script has "
                              f"not. Its values are left out.", stacklevel=2)
                continue
            left.remove(callback)
            for attribute, value in exported.get("attributes", {}).items():
                setattr(callback, attribute, value)

    def _exportable(self) -> list[Any]:
        from transformers.trainer_callback import ExportableState

        return [one for one in self.hf.callback_handler.callbacks
                if isinstance(one, ExportableState)]

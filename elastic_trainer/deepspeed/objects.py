"""The optimizer, the scheduler and the scaler of the loss that DeepSpeed's JSON describes.

file.py → here → given.py (the script), adapters/transformers_deepspeed.py

The optimizers are torch's. DeepSpeed's own FusedAdam computes the same step, and rounds
differently.

Source: DeepSpeed 0.19.8, runtime/engine.py (_configure_basic_optimizer), ops/adam/fused_adam.py
(its defaults), runtime/fp16/loss_scaler.py (DynamicLossScaler).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from elastic_trainer.config import ConfigError
from elastic_trainer.deepspeed.file import File, Fp16, Named, known_name
from elastic_trainer.deepspeed.rates import KINDS, rate_of

LARGEST = 2.0**126
"""The largest scale, doubled, that 32 bits hold."""


def optimizer_of(given: Named, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Return the optimizer of parameters, or of groups. Raises ConfigError."""
    name, options = known_name(given.type), dict(given.params)
    if name in ("Adam", "AdamW"):
        options.pop("bias_correction", None)
        decouples = bool(options.pop("adam_w_mode", True)) or name == "AdamW"
        name = "AdamW" if decouples else "Adam"
        if not options.pop("torch_adam", False):  # the default of FusedAdam; torch's AdamW has 0.01
            options.setdefault("weight_decay", 0.0)
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    try:
        made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params of DeepSpeed's JSON does not fit {name}: {error}. "
                          f"Correct it.") from error
    return made


def scheduler_of(given: Named, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return the scheduler of an optimizer. Raises ConfigError."""
    if given.type in KINDS:
        return DeepSpeedLR(optimizer, given.type, given.params)
    try:
        made: LRScheduler = getattr(lr_scheduler, given.type)(optimizer, **given.params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler.params of DeepSpeed's JSON does not fit {given.type}: "
                          f"{error}. Correct it.") from error
    return made


def scaler_of(file: File, device_type: str) -> LossScale | None:
    return LossScale(file.fp16, device_type) if file.fp16.enabled else None


class DeepSpeedLR(LRScheduler):
    """A scheduler of DeepSpeed's, by its name."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: str, params: dict[str, Any]):
        self.kind, self.params = kind, dict(params)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rates of the next step."""
        return [rate_of(self.kind, self.params, float(base), self.last_epoch)
                for base in self.base_lrs]


class LossScale(torch.amp.GradScaler):
    """A scaler of the loss that changes its scale as DeepSpeed does: after `hysteresis` steps that
    overflow it halves the scale, and after loss_scale_window steps that do not it doubles it.

    At min_loss_scale the scale stays, and steps that overflow are skipped. DeepSpeed ends there.
    """

    def __init__(self, given: Fp16, device_type: str):
        self._given = given
        start = given.loss_scale or 2.0**int(given.initial_scale_power)
        super().__init__(device_type, init_scale=float(start), growth_factor=2.0,
                         backoff_factor=0.5, growth_interval=given.loss_scale_window)
        self._left = given.hysteresis
        """The overflows up to the next smaller scale, this one included."""
        self._kept = -1
        """The steps since the last overflow, without the first one."""

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """End a step: change the scale, if its gradients ask for that."""
        given, scale = self._given, self.get_scale()
        overflows = any(float(found) for state in self._per_optimizer_states.values()
                        for found in state["found_inf_per_device"].values())
        if given.loss_scale:
            super().update(scale)
            return
        if overflows:
            if self._left == 1:
                scale = max(scale / 2.0, float(given.min_loss_scale))
            else:
                self._left -= 1
            self._kept = -1
        else:
            self._kept += 1
            is_due = self._kept > 0 and self._kept % given.loss_scale_window == 0
            if given.consecutive_hysteresis or is_due:
                self._left = given.hysteresis
            scale *= 2.0 if is_due and scale < LARGEST else 1.0
        super().update(scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and what decides its next change."""
        return {**super().state_dict(), "hysteresis_left": self._left, "steps_kept": self._kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the values of another one."""
        super().load_state_dict(state_dict)
        self._left = int(state_dict["hysteresis_left"])
        self._kept = int(state_dict["steps_kept"])

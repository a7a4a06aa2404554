"""The best evaluation of a run: its checkpoint stays, and the run ends when no better one comes.

keep_best(…) → Best ← each evaluation after a step; checkpoint, newcomer ⇄ the state, as an extra;
Best → loop: publish this step; vote: finish the run; record of a checkpoint (publish.py keeps it)

What always holds:
1. Every worker takes the same results, so all hold the same best.
2. A step whose evaluation is the best is published before the next step begins (loop.py). Retention
   keeps the newest checkpoint whose record says that it was the best when it was made.
3. Whether patience is exhausted follows from the state alone. So a resumed run ends after the same
   step as one without a break.
4. A value that is not finite is never the best. It counts against patience.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic_trainer.config import ConfigError

MODES = ("min", "max")
NOT_KEPT = ('the trainer keeps no best evaluation. Give it best=keep_best("accuracy", mode="max").')


@dataclass(frozen=True)
class KeepBest:
    """What decides which evaluation is the best, and when the run ends; made by keep_best()."""

    metric: str
    mode: str
    patience: int | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(f"keep_best got {self.metric!r}. Give the name of a metric that the "
                              f'function of evaluate() returns: keep_best("accuracy", mode="max").')
        if self.mode not in MODES:
            raise ConfigError(f'keep_best got mode={self.mode!r}. Use mode="max" if a larger '
                              f'{self.metric} is better, mode="min" if a smaller one is.')
        if self.patience is not None and (type(self.patience) is not int or self.patience < 1):
            raise ConfigError(f"keep_best got patience={self.patience!r}. Use the number of "
                              f"evaluations without a better {self.metric} after which the run "
                              f"ends, 1 or more; or None.")
        if not _is_number(self.min_delta) or not 0 <= self.min_delta < math.inf:
            raise ConfigError(f"keep_best got min_delta={self.min_delta!r}. Use a number from 0: "
                              f"by how much a better {self.metric} must be better.")


def keep_best(metric: str, *, mode: str, patience: int | None = None,
              min_delta: float = 0.0) -> KeepBest:
    """Keep the checkpoint of the step with the best evaluation: `best=keep_best("accuracy",
    mode="max", patience=5)`.

    `metric` is a name that `evaluate` returns. `mode` is "max" or "min". After `patience`
    evaluations in a row without a better value (by more than `min_delta`) the run is finished; with
    None it never ends early.
    """
    return KeepBest(metric, mode, patience, min_delta)


def require_rule(rule: Any) -> None:
    if rule is not None and not isinstance(rule, KeepBest):
        raise ConfigError(f'best is {rule!r}. Give best=keep_best("accuracy", mode="max").')


class Best:
    """The best evaluation so far. `value` is None before the first one."""

    def __init__(self, rule: KeepBest):
        self.rule = rule
        self.value: float | None = None
        self.step = -1
        """The number of the step after which it was found; -1: none yet."""
        self.waited = 0
        """How many evaluations since then were not better."""
        self._taken_after = -1

    def __repr__(self) -> str:
        return (f"<Best {self.rule.metric} {self.value} of step {self.step}, {self.waited} "
                f"evaluations ago>")

    def take(self, value: Any, step: int) -> bool:
        """Take the value after a step; returns whether it is the best. Raises RuntimeError,
        TypeError."""
        number = _number_of(value, self.rule.metric)
        if step == self._taken_after:
            raise RuntimeError(
                f"step {step} has two values of {self.rule.metric!r}, and one decides which step "
                f"is the best. Call evaluate(…, decides=False) for the other one.")
        self._taken_after = step
        if not self._is_better(number):
            self.waited += 1
            return False
        self.value, self.step, self.waited = number, step, 0
        return True

    def _is_better(self, number: float) -> bool:
        if self.value is None or not math.isfinite(number):
            return math.isfinite(number)
        gain = number - self.value if self.rule.mode == "max" else self.value - number
        return gain > self.rule.min_delta

    def found_in(self, means: Mapping[str, Any]) -> Any:
        if self.rule.metric not in means:
            raise RuntimeError(
                f"best is to follow {self.rule.metric!r}, and this evaluation has only "
                f"{sorted(means)}. Name one of these in keep_best, or call evaluate(…, "
                f"decides=False) if another evaluation decides.")
        return means[self.rule.metric]

    def why_over(self) -> str | None:
        patience, metric = self.rule.patience, self.rule.metric
        if patience is None or self.waited < patience:
            return None
        better = "risen" if self.rule.mode == "max" else "fallen"
        best = f"its best is {self.value:.6g}, of step {self.step}" if self.value is not None else (
            "it was never a finite number")
        return f"{metric} has not {better} in {self.waited} evaluations: {best}"

    def is_of(self, committed: int) -> bool:
        return self.step >= 0 and self.step + 1 == committed

    @property
    def settings(self) -> dict[str, Any]:
        """The rule as JSON values, for the worker that resumes the run."""
        rule = self.rule
        return {"best": [rule.metric, rule.mode, rule.patience, rule.min_delta]}

    def facts(self) -> dict[str, Any]:
        """Return what the record of a checkpoint says. Its step is that of the best checkpoint."""
        if self.value is None:
            return {}
        return {"best": {"metric": self.rule.metric, "mode": self.rule.mode, "value": self.value,
                         "step": self.step + 1}}

    # --- in the state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.rule.metric, "mode": self.rule.mode, "value": self.value,
                "step": self.step, "waited": self.waited}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over a best. One of another metric, or mode, counts for nothing."""
        self._taken_after = -1
        if (values["metric"], values["mode"]) != (self.rule.metric, self.rule.mode):
            self.value, self.step, self.waited = None, -1, 0
            return
        self.value = None if values["value"] is None else float(values["value"])
        self.step, self.waited = int(values["step"]), int(values["waited"])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number_of(value: Any, metric: str) -> float:
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1
    if not (is_one or _is_number(value)):
        raise TypeError(f"best is to follow {metric!r}, but the evaluation gave {value!r}. Name a "
                        f"metric that is one number.")
    return float(value)

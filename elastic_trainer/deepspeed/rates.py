"""The learning rates of DeepSpeed's schedulers, as functions of the step.

section `scheduler` of the JSON → objects.py → here → rates of the optimizer's groups

DeepSpeed steps its scheduler after each step, so step n has the rate of iteration n - 1. The first
step has the least rate: 0 with WarmupCosineLR, and warmup_min_lr with the others.

Source: DeepSpeed 0.19.8, runtime/lr_schedules.py; the defaults are those of its classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

KINDS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def rate_of(kind: str, params: Mapping[str, Any], base: float, step: int) -> float:
    """Return the rate of a step; `base` is the rate with which the optimizer was built."""
    iteration = step - 1
    warm = max(2, params.get("warmup_num_steps", 1000))
    if kind == "WarmupCosineLR":
        return base * _cosine(params, warm, iteration) if iteration >= 0 else 0.0
    least = params.get("warmup_min_lr", 0.0)
    most = params.get("warmup_max_lr", base if kind == "WarmupLR" else 0.001)
    return float(least if iteration < 0 else
                 least + (most - least) * _share(kind, params, warm, iteration))


def _rising(params: Mapping[str, Any], warm: int, iteration: int) -> float:
    """Return the share of the way up, during the warm-up."""
    if params.get("warmup_type", "log") == "linear":
        return iteration / float(warm)
    return 1.0 / math.log(warm) * math.log(iteration + 1)


def _share(kind: str, params: Mapping[str, Any], warm: int, iteration: int) -> float:
    if iteration < warm:
        return _rising(params, warm, iteration)
    if kind == "WarmupLR":
        return 1.0
    total = params["total_num_steps"]
    return float(max(0.0, (total - iteration) / max(1.0, total - warm)))


def _cosine(params: Mapping[str, Any], warm: int, iteration: int) -> float:
    if iteration < warm:
        least = params.get("warmup_min_ratio", 0.0)
        return float(least + (1.0 - least) * _rising(params, warm, iteration))
    least = params.get("cos_min_ratio", 0.0001)
    done = min(1.0, (iteration - warm + 1) / max(1, params["total_num_steps"] - warm))
    return float(least + (1.0 - least) * (1 + math.cos(math.pi * done)) / 2)

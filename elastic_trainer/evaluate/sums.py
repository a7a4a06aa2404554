"""Exact sums of an evaluation: what the user's function and its metrics have found in each batch.

the function of evaluate() → Found (sums, states of torchmetrics' metrics, what is kept of single
batches) → exact sums over all batches and workers → means; a copy of each metric → compute()

What always holds:
1. Sums are whole numbers or fractions, so their order does not change the result. A state of a
   metric is rounded once, to its type.
2. A metric is accepted only if each of its states is a tensor of zeros that torchmetrics itself
   sums over processes (`dist_reduce_fx="sum"`). So the states of single batches may be added up.
3. A metric holds nothing of a batch when the next one begins, and nothing of the evaluation when it
   has ended.
4. What is kept of a batch has its bits on every worker. It travels as tensors and JSON, not as
   pickled objects.

Source: torchmetrics/metric.py, 1.9.0 (`_defaults`, `_reductions`, `reset`, `update_count`).
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from elastic_trainer.config import ConfigError
from elastic_trainer.state.values.layout import from_text, to_text

Number = int | Fraction | None
"""None: not finite."""
States = dict[str, list[Number]]
"""By name and state: the elements. The number of updates stands under UPDATES."""
UPDATES = "updates"
MOST_LOGGED = 1000
"""The most elements of a tensor that the event of an evaluation has."""


def require_sums(metrics: Any) -> None:
    """Raise ConfigError for metrics whose states are no sums."""
    if not hasattr(metrics, "items"):
        raise ConfigError(f"metrics is a {type(metrics).__name__}. Give torchmetrics' objects by "
                          f'name: metrics={{"accuracy": Accuracy(…)}}, or a MetricCollection.')
    for name, metric in metrics.items():
        if why := _refusal(metric):
            raise ConfigError(f"the metric {name!r} is {why}")


def _refusal(metric: Any) -> str:
    kind = type(metric).__name__
    given = sys.modules.get("torchmetrics")
    if given is None or not isinstance(metric, given.Metric):
        return (f"a {kind}, which is no metric of torchmetrics. Return its sums from the function "
                f"of evaluate().")
    from torchmetrics.utilities.data import dim_zero_sum

    advice = ("Use a metric whose states are sums, or return sums from the function of "
              "evaluate().")
    if any(isinstance(part, given.Metric) for part in metric.modules() if part is not metric):
        return f"a {kind}, which holds other metrics. Give those themselves."
    if not metric._defaults:
        return f"a {kind}, which has no state. {advice}"
    for state, default in metric._defaults.items():
        if isinstance(default, list):
            return (f"a {kind}, whose state {state!r} is a list of all that it has seen, not a "
                    f"sum. {advice} Some metrics have both kinds: with thresholds=100, AUROC and "
                    f"its like keep sums.")
        if (reduction := metric._reductions[state]) is not dim_zero_sum:
            how = getattr(reduction, "__name__", reduction)
            return (f"a {kind}, whose state {state!r} is not summed (it is reduced by {how}). "
                    f"{advice}")
        if default.is_complex() or bool(default.count_nonzero()):
            return f"a {kind}, whose state {state!r} does not begin with zeros. {advice}"
    return ""


class Metrics:
    def __init__(self, given: Any, device: torch.device):
        self._given = given
        require_sums(given)
        self.names = {name for name, _ in given.items()}
        for _, metric in given.items():
            metric.to(device)

    def reset(self) -> None:
        if not isinstance(self._given, Mapping) and hasattr(self._given, "reset"):
            self._given.reset()  # a MetricCollection, which has its metrics in groups
            return
        for metric in self._given.values():
            metric.reset()

    def states(self) -> States:
        """Return what the metrics hold, exactly. On a GPU this waits for the device."""
        return {key: numbers for name, metric in self._given.items()
                for key, numbers in states_of(name, metric).items()}

    def computed(self, states: States) -> dict[str, Any]:
        """Return what the metrics compute from the sums of all batches: numbers, or tensors.

        Raises RuntimeError if a metric was not updated.
        """
        for name, _ in self._given.items():
            if not states[f"{name}/{UPDATES}"][0]:
                raise RuntimeError(
                    f"the function of evaluate() has not updated the metric {name!r} in any batch. "
                    f"Call {name}.update(…) in it, on the object that metrics= has.")
        return {name: _plain(computed_of(metric, *totals_of(name, metric, states)))
                for name, metric in self._given.items()}


def states_of(name: str, metric: Any) -> States:
    """Return what one metric holds, exactly."""
    return {f"{name}/{UPDATES}": [metric.update_count]} | {
        f"{name}/{state}": exact(getattr(metric, state)) for state in metric._defaults}


def totals_of(name: str, metric: Any, states: States) -> tuple[int, dict[str, list[Number]]]:
    """Return the number of updates of one metric, and the elements of each of its states."""
    (updates,) = states[f"{name}/{UPDATES}"]
    return int(updates or 0), {state: states[f"{name}/{state}"] for state in metric._defaults}


def alone(metric: Any, count: int, totals: Mapping[str, Sequence[Any]]) -> Any:
    """Return a copy of a metric that holds these totals alone."""
    whole = copy.deepcopy(metric)
    whole.reset()
    whole.sync_on_compute = False
    hold(whole, count, {state: rounded(totals[state], default, getattr(metric, state).device)
                        for state, default in metric._defaults.items()})
    return whole


def hold(metric: Any, count: int, states: Mapping[str, Any]) -> None:
    """Let a metric hold these states. Without the number of updates compute() would warn."""
    metric._update_count, metric._computed = count, None
    for name, state in states.items():
        setattr(metric, name, state)


def computed_of(metric: Any, count: int, totals: Mapping[str, Sequence[Any]]) -> Any:
    """Return what a metric computes from these totals."""
    with torch.no_grad():
        return alone(metric, count, totals).compute()


def states_added(first: States, second: States) -> States:
    """Return the sums of both. Raises RuntimeError if they are not of the same metrics."""
    if not first or not second:
        return first or second
    sizes = [{name: len(numbers) for name, numbers in one.items()} for one in (first, second)]
    if sizes[0] != sizes[1]:
        raise RuntimeError(
            "a metric of evaluate() has states of another shape for one batch than for another, or "
            "on another worker. Give each worker the same metrics.")
    return {name: [None if one is None or two is None else one + two
                   for one, two in zip(numbers, second[name], strict=True)]
            for name, numbers in first.items()}


def exact(state: torch.Tensor) -> list[Number]:
    """Return the elements of a state as whole numbers or fractions."""
    numbers = state.detach().flatten().tolist()
    if not state.is_floating_point():
        return [int(number) for number in numbers]
    return [Fraction(number) if math.isfinite(number) else None for number in numbers]


def rounded(numbers: Sequence[Any], default: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the numbers in the type of a state, and in its shape if it has as many elements."""
    whole = [math.nan if number is None else float(number) if default.is_floating_point()
             else int(number) for number in numbers]
    state = torch.tensor(whole, dtype=default.dtype, device=device)
    return state.reshape(default.shape) if state.numel() == default.numel() else state


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and not value.dim() else value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value


def as_json(value: Any) -> Any:
    """Return a result as the event has it: None for what is not finite, or is too large."""
    if isinstance(value, torch.Tensor):
        return as_json(value.tolist()) if value.numel() <= MOST_LOGGED else None
    if isinstance(value, dict):
        return {str(name): as_json(one) for name, one in value.items()}
    if isinstance(value, list):
        return [as_json(one) for one in value]
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


Sums = dict[str, tuple[Fraction, Fraction | None, bool]]
"""By name: the total, the number of items (None: a plain sum), and whether all were finite."""


class Kept:
    """What the function of evaluate() keeps of a batch: containers of tensors and numbers. All
    workers get it of all batches, in their order. Costs: memory, and network, for all of it."""

    def __init__(self, values: Any):
        self.text = to_text(values)


class AllKept(list[Any]):
    """What was kept of all batches. The event of the evaluation does not have it."""


@dataclass
class Found:
    sums: Sums = field(default_factory=dict)
    states: States = field(default_factory=dict)
    kept: dict[str, dict[int, str]] = field(default_factory=dict)
    """By name and batch."""

    def plus(self, other: Found) -> Found:
        """Return what was found in the batches of both. Raises RuntimeError if names differ."""
        names = self.kept.keys() | other.kept.keys()
        return Found(added(self.sums, other.sums), states_added(self.states, other.states),
                     {name: self.kept.get(name, {}) | other.kept.get(name, {}) for name in names})

    def to_values(self) -> list[Any]:
        """Return this as values that `to_json` writes."""
        return [self.sums, self.states,
                {name: list(texts.items()) for name, texts in self.kept.items()}]

    @staticmethod
    def of_values(values: list[Any]) -> Found:
        """Return what `to_values` had, from the values that `from_json` has read."""
        sums, states, kept = values
        return Found({name: (total, weight, is_finite)
                      for name, (total, weight, is_finite) in sums.items()}, states,
                     {name: dict(texts) for name, texts in kept.items()})

    def all_kept(self) -> dict[str, AllKept]:
        """Return what was kept, by name, in the order of the batches."""
        return {name: AllKept(from_text(texts[number]) for number in sorted(texts))
                for name, texts in self.kept.items()}


def found_in(number: int, returned: Any, states: States) -> Found:
    """Return what the user's function has found in a batch. Raises TypeError."""
    kept = {name: {number: value.text} for name, value in returned.items()
            if isinstance(value, Kept)} if isinstance(returned, Mapping) else {}
    return Found(sums_of({name: value for name, value in returned.items() if name not in kept}
                         if kept else returned), states, kept)


def sums_of(found: Any) -> Sums:
    """Return what the user's function has found in a batch, exactly. Raises TypeError."""
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise TypeError(
            f"the function of evaluate() returned a {type(found).__name__}. Return a dict of sums "
            'by name: {"accuracy": (hits, n), "errors": errors}.')
    return {name: _sum_of(name, value) for name, value in found.items()}


def _sum_of(name: str, value: Any) -> tuple[Fraction, Fraction | None, bool]:
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    try:
        numbers = [float(part) for part in (value if is_pair else [value])]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"the function of evaluate() returned {name}={value!r}. Return a sum and "
                        f"its number of items, {name}=(hits, n), or one number.") from error
    is_finite = all(map(math.isfinite, numbers))
    exact = [Fraction(number) if is_finite else Fraction(0) for number in numbers]
    return exact[0], exact[1] if is_pair else None, is_finite


def added(first: Sums, second: Sums) -> Sums:
    """Return the sums of both. Raises RuntimeError if their names differ, and one is not empty."""
    if not first or not second:
        return first or second
    kinds = [{name: one[name][1] is None for name in one} for one in (first, second)]
    if kinds[0] != kinds[1]:
        raise RuntimeError(
            f"the function of evaluate() returned {sorted(first)} for one batch and "
            f"{sorted(second)} for another, or a pair for one and a number for the other. Return "
            f"the same names for each batch, with (0, 0) where there is nothing to add.")
    return {name: (total + second[name][0],
                   None if weight is None else weight + (second[name][1] or 0),
                   is_finite and second[name][2])
            for name, (total, weight, is_finite) in first.items()}


def means_of(sums: Sums) -> dict[str, float]:
    """Return total by number of items, or the total where there is no such number; NaN where a
    number was not finite or nothing was counted."""
    return {name: _mean(*one) for name, one in sorted(sums.items())}


def _mean(total: Fraction, weight: Fraction | None, is_finite: bool) -> float:
    if not is_finite or weight == 0:
        return math.nan
    return float(total if weight is None else total / weight)


def to_json(values: Any) -> str:
    return json.dumps(values, default=lambda one: {"fraction": str(one)})


def from_json(text: str) -> Any:
    return json.loads(text, object_hook=lambda found: Fraction(found["fraction"])
                      if found.keys() == {"fraction"} and isinstance(found["fraction"], str)
                      else found)

"""The torchmetrics objects of a LightningModule: their states are summed over all workers.

metric.update in a batch → here: exact sums → step.log, evaluations → all workers → here → the
metric, as if one process had seen all batches

What always holds:
1. Between two batches a metric holds what all finished steps of all workers have given it.
2. Only metrics whose states are sums are supported (sums.py). Another one raises when it
   is updated.
3. Values of metrics are part of the run's state.

Source: torchmetrics 1.9, metric.py (`_defaults`, `update_count`, `_computed`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from elastic_trainer.config import ConfigError
from elastic_trainer.evaluate.sums import (
    MOST_LOGGED,
    UPDATES,
    States,
    alone,
    as_json,
    computed_of,
    hold,
    require_sums,
    rounded,
    states_of,
    totals_of,
)
from elastic_trainer.reduce.flat import HIDDEN

Pairs = dict[str, tuple[float, float]]


class ModuleMetrics:
    """The metrics that are submodules of one module, by their places in it."""

    def __init__(self, module: torch.nn.Module):
        import torchmetrics

        self._all: dict[str, Any] = {}
        for place, one in module.named_modules():
            if isinstance(one, torchmetrics.MetricCollection) and one._enable_compute_groups:
                raise ConfigError(
                    f"self.{place} is a MetricCollection whose metrics share states. Give it "
                    f"compute_groups=False.")
            if isinstance(one, torchmetrics.Metric):
                self._all[place] = one
        self._of_step: dict[str, Any] = {}
        """Metrics with the states of the last step alone."""
        self._known: list[str] | None = None
        self.names = frozenset[str]()

    # --- a batch ----------------------------------------------------------------------------------

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let the metrics hold nothing, and put back afterwards what they held."""
        held = {place: _held(one) for place, one in self._all.items()}
        self.reset()
        try:
            yield
        finally:
            for place, one in self._all.items():
                hold(one, *held[place])

    def reset(self) -> None:
        for one in self._all.values():
            one.reset()

    def pairs(self, step: int) -> Pairs:
        """Return what the batch in hand has given the metrics, as step.log takes it."""
        updated = self._updated()
        if self._known is None:
            self._known = sorted(updated)
        if late := updated.keys() - set(self._known):
            raise RuntimeError(
                f"the metric self.{min(late)} was updated for the first time in step {step}, and "
                f"the first batch decides what is sent. Update it in each batch.")
        found: Pairs = {}
        for place in self._known:
            one = self._all[place]
            found[f"{HIDDEN}{place}/{UPDATES}"] = (float(one.update_count), 1.0)
            for state in one._defaults:
                numbers = getattr(one, state).detach().flatten().tolist()
                if len(numbers) > MOST_LOGGED:
                    raise RuntimeError(
                        f"the metric self.{place} has {len(numbers)} numbers in {state!r}, which "
                        f"is too many for each step of the training. Update it in validation_step.")
                for number, value in enumerate(numbers):
                    found[f"{HIDDEN}{place}/{state}/{number}"] = (float(value), 1.0)
        return found

    def _updated(self) -> dict[str, Any]:
        """Return the metrics that the batch in hand has updated. Raises RuntimeError."""
        found = {place: one for place, one in self._all.items() if one.update_count}
        for place, one in self._all.items():
            if one._computed is not None:
                raise RuntimeError(
                    f"self.{place}.compute() was called in training_step or validation_step, where "
                    f"the metric has what this worker's batch has given it. Log the object "
                    f"(self.log), or compute it in on_train_epoch_end or on_validation_epoch_end.")
        try:
            require_sums(found)
        except ConfigError as error:
            raise RuntimeError(f"in a LightningModule: {error}") from None
        return found

    # --- totals -----------------------------------------------------------------------------------

    def take_step(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """Add the totals of a finished step to what the metrics hold."""
        self._of_step = {}
        for place in self._known or ():
            one = self._all[place]
            count = int(sums.get(f"{HIDDEN}{place}/{UPDATES}", (0.0, 0.0))[0])
            totals = {
                state: [sums[f"{HIDDEN}{place}/{state}/{number}"][0]
                        for number in range(default.numel())]
                for state, default in one._defaults.items()} if count else {}
            if count:
                self._of_step[place] = alone(one, count, totals)
                _add(one, count, totals)

    def take_validation(self, states: States) -> None:
        """Add the totals of a validation to what the metrics hold."""
        for place, one in self._all.items():
            if states.get(f"{place}/{UPDATES}", [0])[0]:
                _add(one, *totals_of(place, one, states))

    def computed(self, place: str) -> Any:
        """Return the value of a metric; with "@step" after the place, that of the last step."""
        where, _, of_step = place.partition("@")
        one = self._of_step.get(where) if of_step else self._all[where]
        if one is None or not one.update_count:
            raise RuntimeError(f"the metric self.{where} was logged, but no batch has updated it. "
                               f"Call self.{where}(…), or its update(…), before self.log.")
        return computed_of(one, one.update_count, {
            state: getattr(one, state).flatten().tolist() for state in one._defaults})

    def value(self, place: str, states: States) -> Any:
        """Return the value of a metric that has the totals of a validation alone; None if no
        batch has updated it."""
        count, totals = totals_of(place, one := self._all[place], states)
        return as_json(computed_of(one, count, totals)) if count else None

    def states(self) -> States:
        """Return what a batch of a validation has given the metrics, exactly."""
        self._updated()
        found: States = {}
        for place, one in self._all.items():
            if not any(isinstance(default, list) for default in one._defaults.values()):
                found |= states_of(place, one)
        return found

    # --- in the state -----------------------------------------------------------------------------

    def forget(self, places: set[str]) -> None:
        for place in places:
            self._all[place].reset()

    def state_dict(self) -> dict[str, Any]:
        return {place: list(_held(one)) for place, one in self._all.items() if one.update_count
                and not any(isinstance(v, list) for v in one._defaults.values())}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        for place, one in self._all.items():
            one.reset()
            if place in values:
                count, states = values[place]
                hold(one, count, {name: state.to(one.device) for name, state in states.items()})


def _held(metric: Any) -> tuple[int, dict[str, Any]]:
    # reset() empties the lists of a metric that keeps lists.
    return metric.update_count, {
        state: copy.copy(value) if isinstance(value := getattr(metric, state), list) else value
        for state in metric._defaults}


def _add(metric: Any, count: int, totals: Mapping[str, Any]) -> None:
    states = {name: getattr(metric, name) for name in totals}
    hold(metric, metric.update_count + count,
         {name: state + rounded(totals[name], state, state.device)
          for name, state in states.items()})

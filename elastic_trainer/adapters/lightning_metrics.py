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
from elastic_trainer.evaluate.sums import MOST_LOGGED, States, as_json, exact, require_sums
from elastic_trainer.reduce.flat import HIDDEN

UPDATES = "updates"
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
                _hold(one, *held[place])

    def reset(self) -> None:
        """Let the metrics hold nothing."""
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
                self._of_step[place] = _alone(one, count, totals)
                _add(one, count, totals)

    def take_validation(self, states: States) -> None:
        """Add the totals of a validation to what the metrics hold."""
        for place, one in self._all.items():
            (count,) = states.get(f"{place}/{UPDATES}", [0])
            if count:
                _add(one, int(count), {state: states[f"{place}/{state}"]
                                       for state in one._defaults})

    def computed(self, place: str) -> Any:
        """Return the value of a metric; with "@step" after the place, that of the last step."""
        where, _, of_step = place.partition("@")
        one = self._of_step.get(where) if of_step else self._all[where]
        if one is None or not one.update_count:
            raise RuntimeError(f"the metric self.{where} was logged, but no batch has updated it. "
                               f"Call self.{where}(…), or its update(…), before self.log.")
        with torch.no_grad():
            return _alone(one, one.update_count, {
                state: getattr(one, state).flatten().tolist()
                for state in one._defaults}).compute()

    def value(self, place: str, states: States) -> Any:
        """Return the value of a metric that has the totals of a validation alone; None if no
        batch has updated it."""
        (count,) = states[f"{place}/{UPDATES}"]
        one = self._all[place]
        if not count:
            return None
        with torch.no_grad():
            return as_json(_alone(one, int(count), {
                state: states[f"{place}/{state}"] for state in one._defaults}).compute())

    def states(self) -> States:
        """Return what a batch of a validation has given the metrics, exactly."""
        self._updated()
        found: States = {}
        for place, one in self._all.items():
            if any(isinstance(default, list) for default in one._defaults.values()):
                continue
            found[f"{place}/{UPDATES}"] = [one.update_count]
            for state in one._defaults:
                found[f"{place}/{state}"] = exact(getattr(one, state))
        return found

    # --- in the state -----------------------------------------------------------------------------

    def forget(self, places: set[str]) -> None:
        """Reset metrics."""
        for place in places:
            self._all[place].reset()

    def state_dict(self) -> dict[str, Any]:
        """Return what belongs to the state of the run: the values of metrics that hold some."""
        return {place: list(_held(one)) for place, one in self._all.items() if one.update_count
                and not any(isinstance(v, list) for v in one._defaults.values())}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over the state of the run."""
        for place, one in self._all.items():
            one.reset()
            if place in values:
                count, states = values[place]
                _hold(one, count, {name: state.to(one.device) for name, state in states.items()})


def _held(metric: Any) -> tuple[int, dict[str, Any]]:
    # reset() empties the lists of a metric that keeps lists.
    return metric.update_count, {
        state: copy.copy(value) if isinstance(value := getattr(metric, state), list) else value
        for state in metric._defaults}


def _hold(metric: Any, count: int, states: Mapping[str, Any]) -> None:
    metric._update_count, metric._computed = count, None
    for name, state in states.items():
        setattr(metric, name, state)


def _alone(metric: Any, count: int, totals: Mapping[str, Any]) -> Any:
    """Return a copy of a metric that holds these totals alone."""
    whole = copy.deepcopy(metric)
    whole.reset()
    whole.sync_on_compute = False
    _add(whole, count, totals)
    return whole


def _add(metric: Any, count: int, totals: Mapping[str, Any]) -> None:
    states = {}
    for name, numbers in totals.items():
        state = getattr(metric, name)
        plain = [float("nan") if one is None else float(one) if state.is_floating_point()
                 else int(one) for one in numbers]
        states[name] = state + torch.tensor(plain, dtype=state.dtype,
                                            device=state.device).reshape(state.shape)
    _hold(metric, metric.update_count + count, states)

"""What a LightningModule logs: sums over all workers, under the names that Lightning gives them.

self.log in a batch → here → step.log, evaluations → totals of a step, an epoch, a validation → here
→ trainer.callback_metrics

What always holds:
1. A number that is logged in a batch is a mean over all samples of the step, the epoch or the
   validation (each value weighted by its batch_size), or a sum. It is the same in every world.
2. Totals of an epoch are part of the run's state.
3. What cannot be computed from sums is an error.

Source: lightning 2.6, pytorch/trainer/connectors/logger_connector (fx_validator, result).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch

from elastic_trainer.reduce.flat import COUNT, HIDDEN

OF_TRAINING = ("training_step", "on_before_backward")
"""Where code runs for a batch of the training. A worker computes some."""
IN_BATCH = (*OF_TRAINING, "validation_step")
OF_STEP = (*OF_TRAINING, "on_train_batch_start", "on_train_batch_end")
"""Where a value is that of a step at first."""
LATE = (
    "self.log({name!r}) was called for the first time in step {step}, and the first batch had only "
    "{names}. The first batch decides what is sent. Log {name!r} in each batch, with batch_size=0 "
    "where it has no value.")
NOT_A_SUM = (
    "self.log({name!r}) has reduce_fx={given!r}, which cannot be computed from sums over the "
    "workers. Use \"mean\" or \"sum\".")
PER_BATCH = (
    "self.log({name!r}) was called in validation_step with on_step=True, but a worker computes "
    "some of the batches. Use on_step=False: the value is that of the whole validation.")


@dataclass(frozen=True)
class Kind:
    """How a value is logged."""

    on_step: bool
    on_epoch: bool
    is_sum: bool
    prog_bar: bool
    logger: bool
    metric: str | None = None
    """The place of a torchmetrics object in the module; None: a number."""

    def name(self, name: str, on_step: bool) -> str:
        if not (self.on_step and self.on_epoch):
            return name
        return f"{name}_{'step' if on_step else 'epoch'}"


@dataclass
class Entry:
    """The total of one name since the epoch, or the validation, began."""

    kind: Kind
    total: float = 0.0
    weight: float = 0.0

    def add(self, total: float, weight: float) -> None:
        self.total, self.weight = self.total + total, self.weight + weight


class Logs:
    """All that is logged in one run, on this worker.

    `computed` returns the value of a torchmetrics object by its place in the module.
    """

    def __init__(self, module: Any, lightning: Any, computed: Callable[[str], Any]):
        self.module, self._computed = module, computed
        connector = lightning("trainer.connectors.logger_connector.fx_validator")
        self._levels = connector._FxValidator.check_logging_and_get_default_levels
        self._size_of = lightning("utilities.data").extract_batch_size
        self._metric_type = lightning("utilities.types").Metric
        self.entries: dict[tuple[str, str], Entry] = {}
        self.callback: dict[str, torch.Tensor] = {}
        self.logged: dict[str, torch.Tensor] = {}
        self.progress: dict[str, torch.Tensor] = {}
        self.step = 0
        self._batch: Any = None
        self._sums: dict[str, tuple[float, float]] | None = None
        """What the batch in hand has logged; None: no batch is in hand."""
        self._named: dict[str, Kind] = {}
        self._kinds: dict[tuple[str, str], Kind] = {}
        """By hook and name."""
        self._known: list[str] | None = None
        """The names of the first batch, which decide what is sent."""
        self.fresh: dict[str, torch.Tensor] = {}
        """What neither the event of the step nor that of an evaluation has, by the names of
        loggers."""
        self.suffix = ""
        """What Lightning appends to the names of one of several validation datasets."""

    # --- self.log ---------------------------------------------------------------------------------

    def log(self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None,
            on_step: bool | None = None, on_epoch: bool | None = None, reduce_fx: Any = "mean",
            enable_graph: bool = False, sync_dist: bool = False, sync_dist_group: Any = None,
            add_dataloader_idx: bool = True, batch_size: int | None = None,
            metric_attribute: str | None = None, rank_zero_only: bool = False) -> None:
        """Log a value as LightningModule.log does. It is that of all workers, so sync_dist and
        rank_zero_only make no difference. Raises RuntimeError."""
        where = self.module._current_fx_name
        if where is None:
            raise RuntimeError(f"self.log({name!r}) was called where no hook runs. Call it in "
                               f"training_step, validation_step, or another hook that may log.")
        step, epoch = self._levels(where, on_step=on_step, on_epoch=on_epoch)
        name += self.suffix if add_dataloader_idx else ""
        if where == "validation_step" and step:
            raise RuntimeError(PER_BATCH.format(name=name))
        kind = Kind(step, epoch, _is_sum(name, reduce_fx), prog_bar, logger is not False,
                    self._place_of(name, value))
        if where in IN_BATCH:
            self._add_to_batch(where, name, value, kind, batch_size)
            return
        self._take_kind(where, name, kind)
        entry = self.entries.setdefault((where, name), Entry(kind))
        weight = 1.0 if batch_size is None else float(batch_size)
        if kind.metric is None:
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
            if not kind.on_epoch:
                entry.total = entry.weight = 0.0
            entry.add(number if kind.is_sum else number * weight, weight)
        self._show(name, entry, "eval" if "validation" in where else "train",
                   on_step=where in OF_STEP)

    def _place_of(self, name: str, value: Any) -> str | None:
        if not isinstance(value, self._metric_type):
            return None
        for place, one in self.module.named_modules():
            if one is value:
                return str(place)
        raise RuntimeError(f"self.log({name!r}) got a {type(value).__name__} that is no part of "
                           f"the module. Keep it as an attribute: self.accuracy = Accuracy(…).")

    def _add_to_batch(self, where: str, name: str, value: Any, kind: Kind,
                      batch_size: int | None) -> None:
        assert self._sums is not None
        self._take_kind(where, name, kind)
        self._named[name] = kind
        if kind.metric is not None:
            return
        number = float(value.detach() if isinstance(value, torch.Tensor) else value)
        if kind.is_sum:
            total, weight = number, 1.0
        else:
            weight = float(self._size_of(self._batch) if batch_size is None else batch_size)
            total = number * weight if weight else 0.0
        was = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = was[0] + total, was[1] + weight

    def _take_kind(self, where: str, name: str, kind: Kind) -> None:
        one_of = OF_TRAINING if where in OF_TRAINING else (where,)
        for other in one_of:
            known = self._kinds.get((other, name))
            if known is not None and (other, known) != (where, kind):
                raise RuntimeError(f"self.log({name!r}) was called in {other} and in {where}, or "
                                   f"twice with different arguments. Use another name for one.")
        self._kinds[where, name] = kind

    # --- batches ----------------------------------------------------------------------------------

    def begin_batch(self, batch: Any, step: int = 0) -> None:
        self._batch, self._sums, self._named, self.step = batch, {}, {}, step

    def drop_batch(self) -> None:
        """Let go of the batch in hand, and of what it has logged."""
        self._batch = self._sums = None

    def end_training_batch(self) -> dict[str, tuple[float, float]]:
        """Return what the batch has logged, with the names of the first batch. Raises
        RuntimeError."""
        assert self._sums is not None
        if self._known is None:
            self._known = sorted(self._sums)
        if late := self._sums.keys() - set(self._known):
            raise RuntimeError(LATE.format(name=min(late), step=self.step,
                                           names=", ".join(self._known) or "nothing"))
        return {self._sent(name): self._sums.get(name, (0.0, 0.0)) for name in self._known}

    def _sent(self, name: str) -> str:
        """Return the name under which step.log sends a value. step.metrics has means only."""
        is_mean = not any(self._kinds[where, name].is_sum for where in OF_TRAINING
                          if (where, name) in self._kinds)
        return name if is_mean and name != COUNT else HIDDEN + name

    def end_validation_batch(self) -> dict[str, Any]:
        """Return what the batch has logged, under names that say how: a worker may have no
        batch."""
        assert self._sums is not None
        return {json.dumps([name, *astuple(kind)]): self._sums.get(name, (0.0, 0.0))
                for name, kind in self._named.items()}

    # --- totals -----------------------------------------------------------------------------------

    def take_step(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """Take the totals of a finished step; there are none if an earlier process has finished
        it."""
        for (where, name), kind in self._kinds.items() if sums else ():
            sent = self._sent(name)
            total, weight = sums.get(sent, (0.0, 0.0))
            if where not in OF_TRAINING or (kind.metric is None and not weight):
                continue
            if kind.on_step:
                is_new = kind.metric is not None or sent != name
                self._show(name, Entry(kind, total, weight), "train" if is_new else "",
                           on_step=True)
            if kind.on_epoch:
                self.entries.setdefault((where, name), Entry(kind)).add(total, weight)

    def take_validation(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """Take the totals of a validation, under the names of end_validation_batch."""
        for key, (total, weight) in sums.items():
            name, *kind = json.loads(key)
            entry = Entry(Kind(*kind), total, weight)
            self.entries["validation_step", name] = entry
            self._show(name, entry, "", on_step=False)

    def end_epoch(self) -> None:
        for (where, name), entry in self.entries.items():
            if "validation" not in where and entry.kind.on_epoch:
                self._show(name, entry, "train", on_step=False)

    def forget(self, validation: bool) -> None:
        """Forget the totals of a validation, or of an epoch, that has ended."""
        self.entries = {key: entry for key, entry in self.entries.items()
                        if ("validation" in key[0]) != validation}

    def metrics_logged(self, validation: bool) -> set[str]:
        """Return the places of the torchmetrics objects that were logged in a validation, or in an
        epoch."""
        return {entry.kind.metric for (where, _), entry in self.entries.items()
                if entry.kind.metric and ("validation" in where) == validation}

    def _show(self, name: str, entry: Entry, of: str, on_step: bool) -> None:
        """Show a value, and keep it for loggers: of "train", of "eval", or ("") not at all."""
        kind = entry.kind
        if not (kind.on_step if on_step else kind.on_epoch):
            return
        if kind.metric is not None:
            value = self._computed(f"{kind.metric}@step" if on_step else kind.metric)
        else:
            value = entry.total if kind.is_sum else (
                entry.total / entry.weight if entry.weight else float("nan"))
        tensor = torch.as_tensor(value, dtype=None if isinstance(value, torch.Tensor)
                                 else torch.float32).detach().cpu()
        full = kind.name(name, on_step)
        if kind.logger:
            self.logged[full] = tensor
            if of:
                self.fresh[f"{of}/{full}"] = tensor
        if kind.prog_bar:
            self.progress[full] = tensor
        self.callback[name] = self.callback[full] = tensor

    # --- in the state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"entries": [[*key, list(astuple(entry.kind)), entry.total, entry.weight]
                            for key, entry in self.entries.items()],
                "shown": [dict(self.callback), dict(self.logged), dict(self.progress)]}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        self.entries = {(where, name): Entry(Kind(*kind), total, weight)
                        for where, name, kind, total, weight in values["entries"]}
        for mine, theirs in zip((self.callback, self.logged, self.progress), values["shown"],
                                strict=True):
            mine.clear()
            mine.update(theirs)


def _is_sum(name: str, given: Any) -> bool:
    known = {"mean": False, "avg": False, "sum": True, torch.mean: False, torch.sum: True,
             sum: True}
    key = given.lower() if isinstance(given, str) else given
    if key not in known:
        raise RuntimeError(NOT_A_SUM.format(name=name, given=given))
    return known[key]

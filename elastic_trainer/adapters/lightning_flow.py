"""The hooks of a LightningModule and its callbacks, in Lightning's order, around a run's steps.

steps of a Trainer → here → hooks, logs, validations, early stopping → lightning.py

What always holds:
1. Hooks after a batch run on every worker, once per finished step, with the same numbers.
2. The hooks before a batch run at the end of the step before. So what they change is in the state.
   In the first step of a process they run before this worker has joined the run, with the numbers
   of step 0. What they change in attributes is then replaced by the run's.
3. What hooks, logs and metrics keep is part of the run's state.
4. If callbacks ask for an early end, the run ends with the step that they saw. All workers must ask
   alike.
5. All workers share the batches of a validation. Each sample counts once, and all have the same
   sums. validation_step changes no attribute of the module, and no parameter.

Source: lightning 2.6, pytorch/loops/fit_loop.py, training_epoch_loop.py and evaluation_loop.py.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch

from elastic_trainer.adapters.lightning_attributes import Attributes
from elastic_trainer.adapters.lightning_given import Schedulers, Source
from elastic_trainer.adapters.lightning_hooks import takes
from elastic_trainer.adapters.lightning_logs import Kind, Logs
from elastic_trainer.adapters.lightning_metrics import ModuleMetrics
from elastic_trainer.adapters.lightning_trainer import StandIn
from elastic_trainer.evaluate.evaluation import Examination
from elastic_trainer.evaluate.sums import Found, means_of
from elastic_trainer.training.job.job import Job
from elastic_trainer.training.step import Step, end_run, log_after, note_rates, sums_of
from elastic_trainer.training.trainer import Trainer

BATCH = (
    "a hook after a batch has used `batch`, but the batch of a step is shared by all workers. Use "
    "it in training_step, and log what is needed with self.log.")
OUTPUTS = (
    "a hook after a batch has used outputs[{name!r}]. It has \"loss\" alone: the outputs of "
    "training_step stay with the worker that computed them. Log them with self.log.")
SKIPPED = (
    "on_train_batch_start returned -1, which would leave the rest of the epoch out. The order of "
    "the samples follows from the number of the step. Use trainer.should_stop = True.")
NO_LOSS = (
    "training_step returned {given}. Return the loss, or a dict with \"loss\". To leave a batch "
    "out, return a loss of zero: 0.0 * loss.")
STOP = [0]
"""The dataset of the evaluation in which workers agree on an early end."""


class NoBatch:
    """Stands for the batch where hooks run that have none. Whatever is asked of it raises."""

    def _fail(self, *_: Any) -> NoReturn:
        raise RuntimeError(BATCH)

    __getattr__ = __getitem__ = __iter__ = __len__ = _fail


class Outputs(dict[str, Any]):
    """The outputs of a step: its loss."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(OUTPUTS.format(name=name))


class States:
    def __init__(self, flow: Any):
        self.names = frozenset[str]()
        self.reset, self.states = flow.metrics.reset, flow.metrics.states

    def computed(self, states: Any) -> dict[str, Any]:
        """Return nothing: the values are computed when the metrics have the totals."""
        return {}


class Validation(Examination):
    """One validation of this worker's module, on one of its datasets."""

    def __init__(self, job: Job, flow: Any, source: Source, number: int):
        super().__init__(job, source.dataset, self._step, source.batch_size, source.collate,
                         None, source.loader)
        self._metrics: Any = States(flow)
        self._flow, self._number, self._index = flow, number, 0
        has_several = len(flow.validations) > 1
        self.suffix = f"/dataloader_idx_{number}" if has_several else ""
        step = flow.module.validation_step
        self._takes = [takes(step, 2), has_several and takes(step, 3)]
        self.total = Found()

    def found(self, number: int, following: Sequence[int] = ()) -> Found:
        """Compute one batch, and have the following ones read."""
        self._index = number
        with self._flow.metrics.apart():
            return super().found(number, following)

    def _step(self, model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        flow, module = self._flow, self._flow.module
        with (flow._attributes["module"].constant("validation_step", "on_validation_epoch_end"),
              flow.inside("validation_step")):
            batch = flow.after_transfer(batch, self._number)
            flow.logs.begin_batch(batch)
            flow.logs.suffix = self.suffix
            try:
                module.validation_step(batch, *[self._index] * self._takes[0],
                                       *[self._number] * self._takes[1])
                found: dict[str, Any] = flow.logs.end_validation_batch()
            finally:
                flow.logs.drop_batch()
                flow.logs.suffix = ""
        return found

    def means(self, total: Found) -> dict[str, Any]:
        """Keep the sums over all batches, and return them as the event has them."""
        self.total = total
        means, found = means_of(total.sums), dict[str, Any]()
        for key, (whole, _, is_finite) in total.sums.items():
            name, *kind = json.loads(key)
            if (place := Kind(*kind).metric) is not None:
                found[name] = self._flow.metrics.value(place, total.states)
            elif Kind(*kind).is_sum:
                found[name] = float(whole) if is_finite else math.nan
            else:
                found[name] = means[key]
        return found

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return the totals and weights that validation_step has logged."""
        return {key: (float(total) if is_finite else math.nan, float(weight or 0))
                for key, (total, weight, is_finite) in self.total.sums.items()}


class Flow:
    """The hooks around the steps of one run, on this worker."""

    def __init__(self, seen: StandIn, logs: Logs, metrics: ModuleMetrics, validations: list[Source],
                 schedulers: Schedulers | None, skipped: frozenset[str]):
        self.seen, self.logs, self.metrics = seen, logs, metrics
        self.validations, self.schedulers = validations, schedulers
        self.module = seen.lightning_module
        self.monitor: str | None = None
        """The metric that decides which step is the best."""
        self._callbacks = by_key(seen.callbacks)
        self._attributes = {"module": Attributes(self.module, skipped)} | {
            f"callback {key}": Attributes(one) for key, one in self._callbacks.items()}
        self._has_begun = False
        self._takes_index = takes(self.module.training_step, 2)
        seen.callback_metrics, seen.logged_metrics = logs.callback, logs.logged
        seen.progress_bar_metrics = logs.progress

    # --- hooks ------------------------------------------------------------------------------------

    @contextmanager
    def inside(self, hook: str) -> Any:
        """Let self.log know in which hook it is called."""
        before, self.module._current_fx_name = self.module._current_fx_name, hook
        try:
            yield
        finally:
            self.module._current_fx_name = before

    def call(self, hook: str, *args: Any, monitors: bool | None = None) -> None:
        """Run a hook of all callbacks, and of the module. `monitors`: only of the callbacks that
        follow a metric, or of all others."""
        with self.inside(hook):
            for one in self.seen.callbacks:
                follows = one in self.seen.early_stopping_callbacks
                if monitors is None or follows == monitors:
                    getattr(one, hook)(self.seen, self.module, *args)
            if monitors is not True and getattr(self.module, hook)(*args) == -1:
                raise RuntimeError(SKIPPED)

    # --- a batch ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Run what stands before the batches of the first step of this process."""
        if not self._has_begun:
            self._has_begun = True
            self.call("on_train_start")
            self.call("on_train_epoch_start")
            self.call("on_train_batch_start", NoBatch(), 0)

    def compute(self, step: Step, batch: Any) -> None:
        """Run forward and backward of one micro-batch, and log what training_step logs."""
        seen, module = self.seen, self.module
        seen._at(step, seen._epoch)
        index = step.number % seen.num_training_batches
        with ExitStack() as around:
            around.callback(self.logs.drop_batch)
            around.enter_context(self.metrics.apart())
            around.enter_context(self._attributes["module"].constant(
                "training_step", "on_train_batch_end", step.is_tried))
            with without_autocast(module.device.type), self.inside("on_after_batch_transfer"):
                batch = self.after_transfer(batch)
            self.logs.begin_batch(batch, step.number)
            with self.inside("training_step"):
                returned = module.training_step(batch, *[index] * self._takes_index)
            loss = loss_of(returned)
            with self.inside("on_before_backward"):
                module.on_before_backward(loss)
            sums = self.logs.end_training_batch() | self.metrics.pairs(step.number)
        step.backward(loss)
        step.log(**sums)

    def after_transfer(self, batch: Any, dataloader: int = 0) -> Any:
        data = self.seen.datamodule
        owner = data if data is not None and has_own_transfer(data) else self.module
        return owner.on_after_batch_transfer(batch, dataloader)

    # --- after a step ----------------------------------------------------------------------------

    def end_step(self, step: Step, elastic: Trainer) -> None:
        """Run what stands after the batches of a step, on every worker alike."""
        seen, logs, number = self.seen, self.logs, step.number
        epoch, place = divmod(number, seen.num_training_batches)
        seen._at(step, epoch)
        sums = sums_of(step)
        self.metrics.take_step(sums)
        logs.take_step(sums)
        self.call("on_train_batch_end", Outputs(loss=torch.tensor(step.loss)), NoBatch(), place)
        has_validated = self._validation_is_due(epoch, place)
        if has_validated:
            self._validate(elastic)
        self._follow(step, "step", place)
        ends_epoch = place + 1 == seen.num_training_batches
        is_last = number + 1 == elastic.steps
        if ends_epoch or is_last or seen.should_stop:
            self._end_epoch(step, epoch, ends_epoch)
        if self.monitor and (has_validated or (ends_epoch and not self.validations)):
            elastic._worker.take_for_best(logs.callback)
        log_after(step, logs.fresh)
        logs.fresh = {}
        if seen.should_stop and not is_last:
            self._stop(step, elastic)
        elif not is_last:
            if ends_epoch:
                self.call("on_train_epoch_start")
            self.call("on_train_batch_start", NoBatch(), (number + 1) % seen.num_training_batches)

    def _end_epoch(self, step: Step, epoch: int, is_whole: bool) -> None:
        seen, logs = self.seen, self.logs
        logs.end_epoch()
        self.call("on_train_epoch_end", monitors=False)
        self.call("on_train_epoch_end", monitors=True)
        if is_whole:
            self._follow(step, "epoch", epoch)
        self.metrics.forget(logs.metrics_logged(validation=False))
        logs.forget(validation=False)
        seen._at(step, epoch + 1)

    def _follow(self, step: Step, interval: str, number: int) -> None:
        if self.schedulers and self.schedulers.follow(interval, number, self.logs.callback):
            note_rates(step)

    def _stop(self, step: Step, elastic: Trainer) -> None:
        """End the run with this step. The evaluation raises if another worker does not ask for
        it."""
        elastic.evaluate(STOP, lambda model, batch: {"should_stop": 1}, decides=False)
        end_run(step, next((one.stopping_reason_message for one in
                            self.seen.early_stopping_callbacks if one.stopped_epoch),
                           None) or "trainer.should_stop was set")

    # --- a validation -----------------------------------------------------------------------------

    def _validation_is_due(self, epoch: int, place: int) -> bool:
        seen = self.seen
        if not self.validations or (epoch + 1) % seen.check_val_every_n_epoch:
            return False
        every = seen.val_check_interval
        if isinstance(every, float):
            every = max(1, int(seen.num_training_batches * every))
        return bool(seen.should_stop or (place + 1) % every == 0)

    def _validate(self, elastic: Trainer) -> None:
        seen, logs = self.seen, self.logs
        seen.training, seen.validating = False, True
        seen.state.stage = type(seen.state.stage)("validate")
        logs.forget(validation=True)
        self.call("on_validation_start")
        self.call("on_validation_epoch_start")
        for number, source in enumerate(self.validations):
            examination = Validation(elastic._worker.job, self, source, number)
            elastic._worker.evaluate(examination, elastic._next)
            self.metrics.take_validation(examination.total.states)
            logs.take_validation(examination.sums())
        self.call("on_validation_epoch_end")
        self.call("on_validation_end")
        self.metrics.forget(logs.metrics_logged(validation=True))
        logs.forget(validation=True)
        seen.training, seen.validating = True, False
        seen.state.stage = type(seen.state.stage)("train")

    # --- in the state -----------------------------------------------------------------------------

    def _parts(self) -> dict[str, Any]:
        data = self.seen.datamodule
        parts = {"logs": self.logs, "metrics": self.metrics, **self._attributes}
        return parts | ({} if data is None else {"datamodule": data})

    def state_dict(self) -> dict[str, Any]:
        return {"parts": {name: one.state_dict() for name, one in self._parts().items()},
                "callbacks": {key: one.state_dict() for key, one in self._callbacks.items()},
                "stops": self.seen.should_stop}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        for name, one in self._parts().items():
            if name in values["parts"]:
                one.load_state_dict(values["parts"][name])
        for key, theirs in values["callbacks"].items():
            if key in self._callbacks and theirs:
                self._callbacks[key].load_state_dict(theirs)
            elif theirs:
                warnings.warn(f"the state of the run has a callback {key}, which this script has "
                              f"not. Its values are left out.", stacklevel=2)
        self.seen.should_stop = values["stops"]


def by_key(callbacks: list[Any]) -> dict[str, Any]:
    """Return callbacks by the names that Lightning has for their states; the second one of a name
    has a number."""
    found: dict[str, Any] = {}
    for one in callbacks:
        again = sum(key.split("#")[0] == one.state_key for key in found)
        found[f"{one.state_key}#{again + 1}" if again else one.state_key] = one
    return found


def loss_of(returned: Any) -> torch.Tensor:
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if not isinstance(loss, torch.Tensor):
        kind = (f"a dict with {sorted(returned)}" if isinstance(returned, Mapping)
                else "None" if returned is None else f"a {type(returned).__name__}")
        raise RuntimeError(NO_LOSS.format(given=kind))
    return loss


def without_autocast(device: str) -> AbstractContextManager[Any]:
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def has_own_transfer(datamodule: Any) -> bool:
    return not type(datamodule).on_after_batch_transfer.__module__.startswith(
        ("lightning.", "pytorch_lightning."))

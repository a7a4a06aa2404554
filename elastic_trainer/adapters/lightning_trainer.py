"""What modules and callbacks see as `self.trainer`: the facts of a run that are the same in every
world.

lightning_flow.py → here → module.trainer, the argument of callbacks

What always holds:
1. An attribute that a Trainer of Lightning has and this one has not raises, with the remedy.
2. `world_size` is the declared number of devices, not the number of workers.

Source: lightning 2.6, pytorch/trainer/trainer.py.
"""

from __future__ import annotations

from typing import Any, NoReturn

from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.training.step import Step
from elastic_trainer.training.worker import local_rank

MISSING = (
    "self.trainer.{name} is not there: a trainer of elastic_trainer stands in for that of "
    "Lightning. It has {known}.")
GATHERED = (
    "trainer.strategy.{name} is not there: workers come and go. To have a number over all workers, "
    "log it with self.log, or keep it in a torchmetrics object.")


class Strategy:
    """What callbacks use of a strategy."""

    def __init__(self, trainer: StandIn):
        self._trainer = trainer

    @property
    def root_device(self) -> Any:
        return self._trainer.lightning_module.device

    @property
    def _lightning_optimizers(self) -> list[Any]:
        return self._trainer.optimizers

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return the decision: callbacks decide alike on all workers."""
        return decision

    def barrier(self, name: str | None = None) -> None:
        """Do nothing: workers wait for each other in each step."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(GATHERED.format(name=name))


class StandIn:
    """The trainer of a LightningModule, as far as modules and callbacks use one."""

    def __init__(self, module: Any, datamodule: Any, lightning: Any, **facts: Any):
        states = lightning("trainer.states")
        self.state = states.TrainerState(
            fn=states.TrainerFn.FITTING, stage=states.RunningStage.TRAINING,
            status=states.TrainerStatus.RUNNING)
        self.lightning_module = self.model = module
        self.datamodule = datamodule
        self.strategy = Strategy(self)
        self.should_stop = False
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.callbacks: list[Any] = []
        self.callback_metrics: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self.progress_bar_metrics: dict[str, Any] = {}
        self.training, self.validating = True, False
        self.testing = self.predicting = self.sanity_checking = self.fast_dev_run = False
        self.barebones = self.received_sigterm = self.interrupted = False
        self.logger = self.progress_bar_callback = None
        self.loggers: list[Any] = []
        self.accumulate_grad_batches = 1
        self.num_nodes = 1
        self.max_epochs: int | None = facts["max_epochs"]
        self.max_steps: int = facts["max_steps"]
        self.estimated_stepping_batches = 0
        self.num_training_batches = 0
        self.num_val_batches: list[int] = []
        self.check_val_every_n_epoch: int = facts["check_val_every_n_epoch"]
        self.val_check_interval: int | float = facts["val_check_interval"]
        self.gradient_clip_val: float | None = facts["gradient_clip_val"]
        self.gradient_clip_algorithm: str | None = facts["gradient_clip_algorithm"]
        self.precision: str = facts["precision"]
        self.world_size: int = facts["devices"]
        self._epoch = self._finished = 0
        self._step: Step | None = None
        self._elastic: Any = None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        known = sorted(one for one in {*vars(self), *vars(type(self))} if not one.startswith("_"))
        raise AttributeError(MISSING.format(name=name, known=", ".join(known)))

    # --- where the run is -------------------------------------------------------------------------

    def _begin(self, elastic: Any) -> None:
        self._elastic = elastic

    def _at(self, step: Step | None, epoch: int, finished: int = 0) -> None:
        """Note where the run is: in this step, or, without one, after so many steps."""
        self._step, self._epoch, self._finished = step, epoch, finished

    @property
    def global_step(self) -> int:
        if self._step is None:
            return self._finished
        if self._step.is_finished:
            return self._step.number + 1
        return self._step.number

    @property
    def current_epoch(self) -> int:
        """The number of the epoch, counted from 0."""
        if self._step is not None and not self._step.is_finished:
            return self._step.epoch
        return self._epoch

    @property
    def is_last_batch(self) -> bool:
        return bool(self._step) and (
            self._step.number + 1) % self.num_training_batches == 0  # type: ignore[union-attr]

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker is the first one. Under a launcher it is not known before the first
        step, and False."""
        if self._elastic is not None and self._elastic._worker.has_joined:
            return bool(self._elastic._worker.rank == 0)
        launch = Launch.from_environment()
        return not (launch.driver or launch.horovod)

    @property
    def global_rank(self) -> int:
        """0 on the first worker, else 1: ranks change."""
        return 0 if self.is_global_zero else 1

    @property
    def local_rank(self) -> int:
        return local_rank()

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        return [one for one in self.callbacks
                if any(kind.__name__ == "EarlyStopping" for kind in type(one).__mro__)]

    @property
    def early_stopping_callback(self) -> Any:
        return next(iter(self.early_stopping_callbacks), None)

    def save_checkpoint(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: checkpoints are written in the background."""
        raise ConfigError(
            "trainer.save_checkpoint() is not supported: checkpoints are written in the background "
            "(fit(checkpoint_every=…)). Save module.state_dict() when fit() has returned.")

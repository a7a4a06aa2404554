"""`transformers.Trainer` on workers that come and go.

script with a transformers.Trainer → here: TrainingArguments (transformers_arguments.py), callbacks
(transformers_flow.py), evaluations (transformers_evaluation.py) → Trainer (training/trainer.py)

    from elastic_trainer.adapters.transformers import ElasticTrainer

    trainer = ElasticTrainer(model=model, args=TrainingArguments(...), train_dataset=dataset,
                             devices=8)
    trainer.train()

What always holds:
1. What a script gives is taken over with the meaning that it has in transformers, or refused at
   once, by name.
2. The gradient is that of the mean over all tokens of the global batch, for any number of
   micro-batches and workers, where transformers counts tokens (num_items_in_batch).
3. What a subclass overrides is called, or refused.

transformers is imported when ElasticTrainer is asked for. The class below becomes a
transformers.Trainer there.

Source: transformers 5.24, trainer.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from elastic_trainer import Trainer
from elastic_trainer.adapters.transformers_arguments import (
    checkpoint_interval,
    loader_of,
    numbers_of,
    order_of,
    precision_of,
    refuse,
)
from elastic_trainer.adapters.transformers_deepspeed import build, file_of
from elastic_trainer.adapters.transformers_evaluation import measured, predicted
from elastic_trainer.adapters.transformers_flow import Flow, refuse_callbacks
from elastic_trainer.config import ConfigError, Launch
from elastic_trainer.loggers.row import Logger
from elastic_trainer.state.values.supported import refused_dataset
from elastic_trainer.training.step import Step
from elastic_trainer.training.worker import local_rank

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

NEEDED = "ElasticTrainer needs {error.name}, which is not installed. Install the extra: pip " \
         "install 'elastic-trainer[transformers]'."
OVERRIDES = frozenset("""
    compute_loss compute_loss_context_manager prediction_step log create_optimizer create_scheduler
    get_decay_parameter_names get_optimizer_cls_and_kwargs evaluate predict train save_model _save
    _prepare_inputs _prepare_input _get_num_items_in_batch _remove_unused_columns call_model_init
    add_callback pop_callback remove_callback log_metrics save_metrics save_state metrics_format
    """.split())
"""The methods of transformers.Trainer that a subclass may override: they are called here."""
Datasets = Any


def __getattr__(name: str) -> Any:
    """Make ElasticTrainer when it is asked for. Raises ConfigError without transformers."""
    if name != "ElasticTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("accelerate")
        base = import_module("transformers").Trainer
    except ImportError as error:
        raise ConfigError(NEEDED.format(error=error)) from error
    made = type(name, (Elastic, base), {"__module__": __name__, "__doc__": Elastic.__doc__})
    globals()[name] = made
    return made


class Elastic(Base):  # type: ignore[misc]
    """A transformers.Trainer whose training survives the loss of workers.

    It takes the arguments of transformers.Trainer. `devices` is the number of devices for which
    `per_device_train_batch_size` was chosen. The global batch is the product of that size,
    gradient_accumulation_steps and `devices`; it has gradient_accumulation_steps x `devices`
    micro-batches. Neither depends on the number of workers.

    `run_dir` (without a launcher, output_dir by default), `store`, `reduce`, `on_nan`,
    `listeners`, `loggers` and `timeline` are options of elastic_trainer.Trainer. `deepspeed` is
    DeepSpeed's JSON, in the place of TrainingArguments(deepspeed=…).

    Raises ConfigError for what is not supported.
    """

    control: Any

    def __init__(
        self, model: Any = None, args: Any = None, data_collator: Any = None,
        train_dataset: Any = None, eval_dataset: Datasets = None, processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None, *,
        devices: int | None = None, run_dir: str | None = None, store: str | None = None,
        reduce: str | None = None, on_nan: str = "raise",
        listeners: Sequence[Callable[[str, dict[str, Any]], None]] = (),
        loggers: Sequence[Logger] = (), timeline: bool = False,
        deepspeed: str | dict[str, Any] | None = None,
    ):
        args = args or import_module("transformers").TrainingArguments()
        refuse(args)
        _refuse_overrides(type(self))
        _take_device(args)
        self.precision = precision_of(args)
        """The option of elastic_trainer.Trainer."""
        args.mixed_precision = "no"  # of accelerate, which would wrap the model's forward
        self.elastic: Trainer | None = None
        """The trainer of elastic_trainer, from train() on."""
        self._numbers = numbers_of(args, _length_of(train_dataset), devices)
        self._deepspeed = file_of(deepspeed, args, self._numbers)
        self._options: dict[str, Any] = {
            "store": store, "reduce": reduce, "on_nan": on_nan, "listeners": listeners,
            "loggers": loggers, "timeline": timeline}
        self._run_dir = run_dir
        self.ignore_keys_for_eval: list[str] | None = None
        self._columns = Columns(self)
        self._loader = loader_of(args)
        self.is_first: bool | None = None
        """Whether this worker was the first one in the last finished step; None: not known."""
        super().__init__(
            model=model, args=args, data_collator=data_collator, train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=processing_class, model_init=model_init,
            compute_loss_func=compute_loss_func, compute_metrics=compute_metrics,
            callbacks=callbacks, optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics)
        _refuse_collator(self.data_collator)
        _refuse_parallel(self)
        _show_logs(self)

    # --- the training -----------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None,
              ignore_keys_for_eval: list[str] | None = None) -> Any:
        """Train to the end, and return the same TrainOutput on every worker.

        A run that has a checkpoint goes on from it, whatever `resume_from_checkpoint` is.

        Raises ConfigError.
        """
        if isinstance(resume_from_checkpoint, str) or trial is not None:
            raise ConfigError(
                f"train() got resume_from_checkpoint={resume_from_checkpoint!r} and trial={trial}. "
                f"A run goes on from its own newest checkpoint. Call train() without arguments, "
                f"and load other weights into the model before.")
        if self.elastic is not None:
            raise RuntimeError("train() was called before. Build a new ElasticTrainer for another "
                               "run.")
        started, self.ignore_keys_for_eval = time.monotonic(), ignore_keys_for_eval
        flow = self._begin()
        assert self.elastic is not None
        for step in self.elastic:
            flow.begin_step()
            for inputs in step:
                if self.control.should_training_stop:  # set after the last step, on every worker
                    step.stop("a callback has set control.should_training_stop")
                self._compute(step, inputs)
            self.is_first = self.elastic.is_first
            flow.end_step(step)
        return self._end(flow, started)

    def _begin(self) -> Flow:
        """Build the optimizer, the scheduler and the trainer, as TrainingArguments describe
        them."""
        from transformers import TrainerCallback, TrainerState

        args, numbers = self.args, self._numbers
        refuse_callbacks(self.callback_handler.callbacks, TrainerCallback)
        if args.activation_checkpointing:
            _checkpoint_activations(self.model, args.activation_checkpointing_kwargs)
        more = build(self, self._deepspeed) if self._deepspeed else {}
        self.create_optimizer()
        self.create_scheduler(num_training_steps=numbers.steps)
        _refuse_scheduler(self.lr_scheduler)
        handler, self.state = self.callback_handler, TrainerState()
        handler.model, handler.optimizer = self.model, self.optimizer
        handler.lr_scheduler = self.lr_scheduler
        self.state.train_batch_size = args.per_device_train_batch_size
        self.state.compute_steps(args, numbers.steps)
        self.state.max_steps, self.state.num_train_epochs = numbers.steps, numbers.epochs
        flow = Flow(self, numbers)
        dataset, collate = self._columns.of(self.train_dataset, "training")
        self.elastic = Trainer(
            self.model, self.optimizer, dataset, global_batch=numbers.global_batch,
            microbatches=numbers.microbatches, until=f"{numbers.steps} steps", seed=args.seed,
            lr=self.lr_scheduler, clip_norm=args.max_grad_norm or None, precision=self.precision,
            drop_last=args.dataloader_drop_last, collate=collate, loader=self._loader,
            order=order_of(args, self.train_dataset, self.processing_class),
            state={"transformers": flow},
            checkpoint_every=checkpoint_interval(args, self.state.save_steps,
                                                 numbers.steps_per_epoch),
            keep_last=args.save_total_limit or 3, run_dir=self._folder(),
            progress=not args.disable_tqdm, **self._options, **more)
        flow.see_place(self.is_world_process_zero())
        flow.call("on_train_begin")
        self.is_in_train = True
        return flow

    def _folder(self) -> str | None:
        """Return the folder of the run where no launcher gives one; None: nothing is written."""
        launch = Launch.from_environment()
        if self._run_dir or launch.run_dir or self.args.save_strategy.value == "no":
            return self._run_dir
        return str(self.args.output_dir)

    def _compute(self, step: Step, inputs: Any) -> None:
        """Run forward and backward of one micro-batch.

        Where transformers counts items, the loss of a micro-batch is the sum over its items by
        their number. Multiplied by it, the loss is a sum again, and the step divides by the number
        of all micro-batches. A loss that ignores num_items_in_batch is a mean, which becomes the
        same.
        """
        self.model.train()
        inputs = self._prepare_inputs(inputs)
        items = self._get_num_items_in_batch([inputs], self.args.device)
        counted, divisor = 0, None
        if items is not None:
            counted, divisor = int(items), items.clamp(min=1)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(self.model, inputs, num_items_in_batch=divisor)
        if divisor is None or self.loss_is_scaled_for_ga is False:
            step.backward(loss)
        else:
            step.backward(loss * divisor, count=counted)

    def _end(self, flow: Flow, started: float) -> Any:
        from transformers.trainer_utils import TrainOutput

        assert self.elastic is not None
        self.is_first = self.elastic.result.rank == 0
        flow.see_place(self.is_first)
        metrics = {"train_loss": flow.train_loss}
        self.log(metrics)
        flow.load_best()
        flow.call("on_train_end")
        self.is_in_train = False
        took_s = time.monotonic() - started
        return TrainOutput(self.state.global_step, flow.train_loss,
                           {**metrics, "train_runtime": round(took_s, 4)})

    # --- evaluation -------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Datasets = None, ignore_keys: list[str] | None = None,
                 metric_key_prefix: str = "eval") -> dict[str, float]:
        """Evaluate the model on every worker, and return the same metrics on each.

        Call it in the script before or after train(). In train() eval_strategy does it.
        """
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(given, str):  # one of several, by its name
            given = self.eval_dataset[given]
        if given is None:
            raise ConfigError("evaluate() has no dataset. Give ElasticTrainer(eval_dataset=…), or "
                              "evaluate(dataset).")
        if isinstance(given, dict):
            found: dict[str, float] = {}
            for name, one in given.items():
                found |= self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        metrics = measured(self, given, ignore_keys, metric_key_prefix)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control,
                                                         metrics)
        return metrics

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None,
                metric_key_prefix: str = "test") -> Any:
        """Return the predictions for a dataset, all of them on each worker."""
        from transformers.trainer_utils import PredictionOutput

        output = predicted(self, test_dataset, "Prediction", None, ignore_keys, metric_key_prefix)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control,
                                                        output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def shared(self, dataset: Any, fn: Callable[[Any, Any], dict[str, Any]]) -> dict[str, Any]:
        """Return what a function has found in the batches of a dataset, shared by all workers."""
        assert self.elastic is not None
        plain, collate = self._columns.of(dataset, "evaluation")
        return self.elastic.evaluate(plain, fn, collate=collate, loader=self._loader,
                                     batch_size=self.args.per_device_eval_batch_size)

    # --- this worker ------------------------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        """Return whether this worker is the first one. Under a launcher it is not known before the
        first step, and False."""
        if self.is_first is None:
            launch = Launch.from_environment()
            return not (launch.driver or launch.horovod)
        return self.is_first

    def is_local_process_zero(self) -> bool:
        """Return whether this worker is the first one: a host may have several."""
        return self.is_world_process_zero()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as transformers does, on the first worker alone."""
        if self.is_world_process_zero():
            super().save_model(output_dir, _internal_call)

    def hyperparameter_search(self, *_: Any, **__: Any) -> None:
        """Refuse: a process is one worker of one run."""
        raise ConfigError("hyperparameter_search() is not supported: a process is one worker of "
                          "one run. Start a run for each trial.")

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Refuse: workers have no internet by default."""
        raise ConfigError("push_to_hub() is not supported. Call save_model(), and upload what it "
                          "has written.")


class Columns:
    """The datasets without the columns that the model does not take."""

    def __init__(self, hf: Any):
        self._hf = hf
        self._pairs: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._given: list[Any] = []
        """The datasets: as long as they are here, their ids stay their own."""

    def of(self, dataset: Any, description: str) -> tuple[Any, Any]:
        """Return a dataset and its collator: the same objects each time, because loader processes
        hold them."""
        hf, key = self._hf, (id(dataset), description)
        if key not in self._pairs:
            self._given.append(dataset)
            if callable(getattr(dataset, "remove_columns", None)):  # of Hugging Face datasets
                self._pairs[key] = (hf._remove_unused_columns(dataset, description),
                                    hf.data_collator)
            else:
                self._pairs[key] = (dataset, hf._get_collator_with_removed_columns(
                    hf.data_collator, description))
        return self._pairs[key]


def _show_logs(hf: Any) -> None:
    """Print logs, and leave the bar of transformers out: it breaks when another worker becomes the
    first one. The trainer, or the launcher, shows the progress."""
    from transformers import PrinterCallback

    shown = hf.callback_handler.callbacks.pop()  # transformers adds it as the last one
    hf.add_callback(shown if isinstance(shown, PrinterCallback) else PrinterCallback())


# --- what is refused ------------------------------------------------------------------------------

def _refuse_overrides(kind: type) -> None:
    mro = kind.__mro__
    known = set(dir(mro[mro.index(Elastic) + 1]))
    for one in mro[:mro.index(Elastic)]:
        for name in vars(one):
            if name in known and not name.startswith("__") and name not in OVERRIDES:
                raise ConfigError(
                    f"{one.__name__} overrides {name}() of transformers.Trainer, which "
                    f"ElasticTrainer does not call. Override one of "
                    f"{', '.join(sorted(n for n in OVERRIDES if n[0] != '_'))}, or write the loop "
                    f"with elastic_trainer.Trainer.")


def _length_of(dataset: Any) -> int:
    if dataset is None:
        raise ConfigError("train_dataset is not given. Give ElasticTrainer(train_dataset=…).")
    if why := refused_dataset(dataset):
        raise ConfigError(why)
    return len(dataset)


def _refuse_collator(collator: Any) -> None:
    if getattr(collator, "seed", None) is not None:
        raise ConfigError(
            f"{type(collator).__name__}(seed={collator.seed}) draws from a generator of its own, "
            f"so its masks would depend on the worker. Leave seed out: torch is seeded for each "
            f"microbatch.")


def _refuse_parallel(hf: Any) -> None:
    if hf.is_model_parallel:
        raise ConfigError(
            f"the model is on several devices ({hf.model.hf_device_map}), but each worker trains "
            f"it on one. Load it without device_map.")


def _refuse_scheduler(scheduler: Any) -> None:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "the scheduler is a ReduceLROnPlateau, which transformers steps with the metrics of an "
            "evaluation. A rate follows from the step here. Use another scheduler.")


def _checkpoint_activations(model: Any, given: dict[str, Any] | None) -> None:
    options = dict(given or {})
    every, offload = options.pop("every_n_layers", 1), options.pop("offload", False)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=options or None,
                                          every_n_layers=every, offload=offload)


def _take_device(args: Any) -> None:
    """Give a worker its own GPU. transformers would use all GPUs of the host in one process."""
    if args.n_gpu > 1:
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
        args.__dict__["_setup_devices"], args._n_gpu = device, 1

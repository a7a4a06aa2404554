"""The adapter for Lightning: the steps of the real Trainer, in every world, or an error that names
what is not supported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import Fault, in_a_breaking_world
from torch.utils.data import DataLoader, TensorDataset

from elastic_trainer.config import ConfigError
from elastic_trainer.state.values.layout import byte_view

pl: Any = pytest.importorskip("lightning.pytorch")
from torchmetrics import MetricCollection  # noqa: E402
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC  # noqa: E402

from elastic_trainer.adapters import lightning_hooks as hooks  # noqa: E402
from elastic_trainer.adapters.lightning import fit  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_launcher"),
              pytest.mark.filterwarnings("ignore::UserWarning")]
SAMPLES, BATCH, SEED = 22, 4, 3
_random = torch.Generator().manual_seed(1)
INPUT = torch.randn(SAMPLES, 5, generator=_random)
TARGET = torch.randint(0, 3, (SAMPLES,), generator=_random)
DATA = TensorDataset(INPUT, TARGET)
RATES = torch.optim.lr_scheduler


def made(package: Any = None, configure: Callable[[Any], Any] | None = None, **methods: Any) -> Any:
    """A LightningModule as scripts have it; `methods` are added to its class."""
    package = package or pl

    class Net(package.LightningModule):  # type: ignore[misc]
        def __init__(self, rate: float = 0.05):
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(),
                                              torch.nn.Dropout(0.1), torch.nn.Linear(8, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)  # type: ignore[no-any-return]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("count", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            output = self(batch[0])
            self.log_dict({"val_loss": torch.nn.functional.cross_entropy(output, batch[1]),
                           "hits": (output.argmax(1) == batch[1]).float().mean()})

        def configure_optimizers(self) -> Any:
            assert configure is None or self.trainer.estimated_stepping_batches > 0
            return (configure or sgd)(self)

    return type("Net", (Net,), methods)()


def sgd(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=module.hparams.rate, momentum=0.9)


def adamw(module: Any) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=module.hparams.rate)


def plateau(interval: str) -> Callable[[Any], Any]:
    def configure(module: Any) -> Any:
        optimizer = sgd(module)
        scheduler = RATES.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        name = "val_loss" if interval == "epoch" else "train_loss"
        return {"optimizer": optimizer, "lr_scheduler": {
            "scheduler": scheduler, "monitor": name, "interval": interval}}
    return configure


def one_cycle(module: Any) -> Any:
    optimizer = adamw(module)
    return {"optimizer": optimizer, "lr_scheduler": {
        "scheduler": RATES.OneCycleLR(
            optimizer, 0.1, total_steps=module.trainer.estimated_stepping_batches),
        "interval": "step"}}


def two_schedulers(module: Any) -> Any:
    optimizer = sgd(module)
    return [optimizer], [RATES.ExponentialLR(optimizer, 0.5), {
        "scheduler": RATES.StepLR(optimizer, 1, 0.9), "interval": "step", "frequency": 2}]


def ours(module: Any, **options: Any) -> Any:
    options = {"max_epochs": 3, "devices": 1, "seed": SEED, "progress": False,
               "train_dataloaders": DataLoader(DATA, batch_size=BATCH),
               "val_dataloaders": DataLoader(DATA, batch_size=5)} | options
    return fit(module, **options)


def theirs(module: Any, package: Any = None, loaders: Any = None, **options: Any) -> Any:
    torch.set_num_threads(1)
    trainer = (package or pl).Trainer(**{
        "max_epochs": 3, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
    } | options)
    trainer.fit(module, DataLoader(DATA, batch_size=BATCH),
                loaders or DataLoader(DATA, batch_size=5))
    return trainer


def bits(module: Any) -> list[bytes]:
    return [byte_view(p.detach()).numpy().tobytes() for p in module.parameters()]


def numbers(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


# --- the steps of the real one --------------------------------------------------------------------

def with_dict(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
    self.log("train_loss", loss)
    return {"loss": loss, "other": 1}


@pytest.mark.parametrize(("configure", "options"), [
    (sgd, {}), (adamw, {}), (lambda m: [sgd(m)], {}), (plateau("epoch"), {}), (plateau("step"), {}),
    (one_cycle, {}), (two_schedulers, {}), (adamw, {"gradient_clip_val": 0.1}),
    (sgd, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    (adamw, {"precision": "bf16-mixed"}), (sgd, {"max_steps": 8, "max_epochs": None}),
    (sgd, {"check_val_every_n_epoch": 2}), (plateau("epoch"), {"val_check_interval": 2}),
    (sgd, {"val_check_interval": 0.5}),
])
def test_the_weights_have_the_bits_of_the_real_trainer(
        configure: Callable[[Any], Any], options: dict[str, Any]) -> None:
    """The metrics are the same, by the same names. Their sums are added in another order."""
    mine, other = (still(made(configure=configure)) for _ in range(2))
    ours(mine, **options)
    trainer = theirs(other, **{"max_epochs": 3} | options)
    assert bits(mine) == bits(other)
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        assert numbers(getattr(mine.trainer, name)) == pytest.approx(
            numbers(getattr(trainer, name)), rel=1e-5), name
    assert mine.trainer.callback_metrics["count"] == SAMPLES % BATCH or \
        mine.trainer.callback_metrics["count"] == SAMPLES or "max_steps" in options


def still(module: Any) -> Any:
    """Without dropout: the real trainer does not seed each step."""
    module.layers[2] = torch.nn.Identity()
    return module


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_modules_of_both_packages_are_trained(name: str) -> None:
    """A dict with the loss, a datamodule, and hooks for batches work as in the real trainer."""
    package = import_module(name)

    class Data(package.LightningDataModule):  # type: ignore[misc, name-defined]
        def setup(self, stage: str) -> None:
            self.data = DATA

        def train_dataloader(self) -> Any:
            return DataLoader(self.data, batch_size=BATCH)

        def val_dataloader(self) -> Any:
            return DataLoader(self.data, batch_size=5)

    def after(self: Any, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], batch[1]]

    mine, other = (still(made(package, training_step=with_dict, on_after_batch_transfer=after))
                   for _ in range(2))
    data = Data()
    ours(mine, datamodule=data, train_dataloaders=None, val_dataloaders=None)
    theirs(other, package)
    assert bits(mine) == bits(other) and data.trainer is mine.trainer


def noted(base: Any, names: list[str], prefix: str, seen: list[Any]) -> dict[str, Any]:
    """Methods that note their calls, with the numbers of the run."""
    def of(name: str) -> Callable[..., Any]:
        original = getattr(base, name)

        def note(self: Any, *arguments: Any, **named: Any) -> Any:
            module = arguments[1] if prefix == "callback" else self
            index = [one for one in arguments if type(one) is int]
            step = getattr(module.trainer, "_step", None)
            if step is not None and step.is_tried:  # the warm-up
                return original(self, *arguments, **named)
            seen.append((prefix, name, module.current_epoch, module.global_step, *index[:1]))
            return original(self, *arguments, **named)
        return note
    return {name: of(name) for name in names}


NOTED = ["on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start",
         "on_train_batch_end", "on_validation_start", "on_validation_epoch_start",
         "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end",
         "on_fit_end", "setup", "teardown"]


@pytest.mark.parametrize("options", [
    {}, {"max_steps": 8}, {"val_check_interval": 2}, {"check_val_every_n_epoch": 2}], ids=str)
def test_hooks_are_called_in_the_order_of_the_real_trainer(options: dict[str, Any]) -> None:
    """With the same current_epoch, global_step and batch_idx."""
    seen: list[list[Any]] = []
    for run in (ours, theirs):
        calls: list[Any] = []
        callback = type("Noting", (pl.Callback,), noted(pl.Callback, NOTED, "callback", calls))()
        module = made()
        names = [*NOTED, "training_step", "on_before_backward", "validation_step"]
        module.__class__ = type("Net", (type(module),), noted(type(module), names, "module", calls))
        run(module, callbacks=[callback], **options)
        seen.append(calls)
    assert seen[0] == seen[1] and len(seen[0]) > 60


@pytest.mark.parametrize("check", [None, False])
def test_early_stopping_ends_the_run_where_the_real_trainer_ends_it(check: Any) -> None:
    """With the weights of the step that it has seen."""
    def stopping() -> Any:
        return pl.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.1,
                                          check_on_train_epoch_end=check)

    mine, other, callbacks = still(made()), still(made()), [stopping(), stopping()]
    result = ours(mine, callbacks=callbacks[:1], max_epochs=9)
    trainer = theirs(other, callbacks=callbacks[1:], max_epochs=9)
    assert bits(mine) == bits(other)
    assert result.steps == trainer.global_step < 9 * 6
    found, expected = (one.state_dict() for one in callbacks)
    assert float(found.pop("best_score")) == pytest.approx(float(expected.pop("best_score")))
    assert found.pop("stopping_reason_message") == expected.pop("stopping_reason_message")
    assert found == expected


def test_the_run_stops_after_the_step_in_which_a_callback_asks_for_it() -> None:
    class Stop(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop |= trainer.global_step == 8

    mine, other = still(made()), still(made())
    assert ours(mine, callbacks=[Stop()]).steps == 8
    theirs(other, callbacks=[Stop()])
    assert bits(mine) == bits(other)


# --- metrics --------------------------------------------------------------------------------------

class Metered:
    """Metrics of torchmetrics, as scripts have them: logged as objects, and computed by hand."""

    @staticmethod
    def built(package: Any = None) -> Any:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            output = self(batch[0])
            self.train_hits(output, batch[1])
            self.log("train_hits", self.train_hits, on_step=True, on_epoch=True)
            self.by_hand.update(output, batch[1])
            return torch.nn.functional.cross_entropy(output, batch[1])

        def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            output = self(batch[0])
            self.val_hits(output, batch[1])
            self.several.update(output, batch[1])
            self.log("val_hits", self.val_hits, add_dataloader_idx=False)

        def on_train_epoch_end(self: Any) -> None:
            self.log("by_hand", self.by_hand.compute())
            self.by_hand.reset()

        def on_validation_epoch_end(self: Any) -> None:
            self.log_dict(self.several.compute())
            self.several.reset()

        module = made(package, training_step=training_step, validation_step=validation_step,
                      on_train_epoch_end=on_train_epoch_end,
                      on_validation_epoch_end=on_validation_epoch_end)
        module.train_hits, module.val_hits = MulticlassAccuracy(3), MulticlassAccuracy(3)
        module.by_hand = MulticlassAccuracy(3, average="micro")
        module.several = MetricCollection(
            {"micro": MulticlassAccuracy(3, average="micro"),
             "top2": MulticlassAccuracy(3, top_k=2)},
            compute_groups=False)
        return module


def test_metrics_have_the_values_of_the_real_trainer() -> None:
    """Those logged as objects, and those that hooks compute and reset."""
    mine, other = still(Metered.built()), still(Metered.built())
    ours(mine)
    trainer = theirs(other)
    found = numbers(mine.trainer.callback_metrics)
    assert found == pytest.approx(numbers(trainer.callback_metrics), rel=1e-6)
    assert {"train_hits_step", "train_hits_epoch", "by_hand", "val_hits", "micro"} <= found.keys()
    assert bits(mine) == bits(other)


# --- every world ----------------------------------------------------------------------------------

class Weighted:
    """A module whose hooks keep values in attributes, and use them in the loss."""

    @staticmethod
    def built() -> Any:
        module = Metered.built()
        kind, step = type(module), type(module).training_step
        module.layers[2] = torch.nn.Identity()  # threads share the generator of dropout

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            self.log("weight", self.weight)
            return self.weight * step(self, batch, batch_idx)

        def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.weight = 1.0 + 0.01 * float(outputs["loss"]) * batch_idx
            self.history.append(self.weight)

        module.__class__ = type("Net", (kind,), {
            "training_step": training_step, "on_train_batch_end": on_train_batch_end})
        module.weight, module.history = 1.0, []
        return module


class Counter(pl.Callback):  # type: ignore[misc]
    """Counts steps, in its state_dict."""

    def __init__(self) -> None:
        self.state = {"count": 0}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.state["count"] += 1
        assert self.state["count"] == trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = dict(state_dict)


def run_of(*listeners: Any, module: Any = None, **options: Any) -> Any:
    """Train with all that keeps a state; returns the bits, the metrics and the attributes."""
    module = module or Weighted.built()
    stopping = pl.callbacks.EarlyStopping("val_hits", mode="max", patience=2)
    result = ours(module, devices=4, train_dataloaders=DataLoader(DATA, batch_size=2, shuffle=True),
                  callbacks=[Counter(), stopping], listeners=listeners, max_epochs=5, **options)
    return (result.weights_sha256, result.steps, numbers(module.trainer.callback_metrics),
            module.history, stopping.state_dict())


@pytest.mark.parametrize("size", [2, 4])
def test_all_has_the_same_bits_in_every_world(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, metrics, attributes, and the step in which the run is stopped."""
    alone, modules = run_of(), [Weighted.built() for _ in range(size)]
    ended = in_a_breaking_world(monkeypatch, size, lambda rank: run_of(module=modules[rank]))
    assert ended == [alone] * size


def test_all_has_the_same_bits_when_generations_break(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, modules = run_of(), [Weighted.built() for _ in range(3)]
    faults = {0: [("step.voted", 1)], 1: [("step.computed", 2), ("step.applied", 5)]}
    ended = in_a_breaking_world(
        monkeypatch, 3, lambda rank: run_of(Fault(*faults.get(rank, [])), module=modules[rank]))
    assert ended == [alone] * 3


class Interrupted(Exception):
    """Ends a run in the middle."""


def test_all_has_the_same_bits_when_a_run_is_resumed(tmp_path: Path) -> None:
    class Interrupts(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                raise Interrupted

    alone = run_of()
    module = Weighted.built()
    with pytest.raises(Interrupted):
        ours(module, devices=4, train_dataloaders=DataLoader(DATA, batch_size=2, shuffle=True),
             callbacks=[Counter(), pl.callbacks.EarlyStopping("val_hits", mode="max", patience=2),
                        Interrupts()],
             max_epochs=5, run_dir=tmp_path / "run", checkpoint_every=1)
    assert run_of(run_dir=tmp_path / "run") == alone


def test_the_best_checkpoint_is_that_of_model_checkpoint(tmp_path: Path) -> None:
    """The monitored metric decides which checkpoint stays; its value is in the callback."""
    kept = pl.callbacks.ModelCheckpoint(monitor="val_loss", mode="min")
    module = made()
    result = ours(module, callbacks=[kept], run_dir=tmp_path / "run")
    assert result.best.value == float(kept.best_model_score)
    assert result.best.rule.metric == "val_loss"


class Ears:
    """Keeps what is logged after each step, by the names of loggers."""

    def __init__(self) -> None:
        self.heard: dict[int, dict[str, float]] = {}

    def check(self) -> None:
        """Nothing can fail."""

    def open(self, run: Any) -> int:
        return 0

    def where(self) -> str:
        return "memory"

    def write(self, row: Any) -> None:
        self.heard[row.step] = row.values

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is open."""


def test_loggers_get_what_the_module_logs(tmp_path: Path) -> None:
    """Values of steps, epochs and validations, sums, metrics of torchmetrics, and what hooks
    log."""
    ears, module = Ears(), Metered.built()
    ours(module, loggers=[ears], run_dir=tmp_path / "run", max_epochs=2)
    last, metrics = ears.heard[11], module.trainer.callback_metrics
    for name in ("train/train_hits_step", "train/train_hits_epoch", "train/by_hand",
                 "eval/val_hits", "eval/micro"):
        assert last[name] == float(metrics[name.split("/")[1]]), name
    assert "train/train_hits_step" in ears.heard[3] and "train/by_hand" not in ears.heard[3]
    ears, module = Ears(), made()
    ours(module, loggers=[ears], run_dir=tmp_path / "other", max_epochs=2)
    last, metrics = ears.heard[11], module.trainer.callback_metrics
    for name, mine in (("train/train_loss", "train_loss_step"), ("eval/val_loss", "val_loss"),
                       ("train/train_loss_epoch", "train_loss_epoch"), ("train/count", "count")):
        assert last[name] == pytest.approx(float(metrics[mine]), rel=1e-6), name


def test_several_validation_datasets_have_the_names_of_the_real_trainer() -> None:
    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("size", float(len(batch[0])), reduce_fx="sum")
        self.log("loss", (dataloader_idx + 1) * self(batch[0]).sum())
        self.log(f"alone_{dataloader_idx}", float(batch_idx), add_dataloader_idx=False)

    mine, other = (still(made(validation_step=validation_step)) for _ in range(2))
    loaders = [DataLoader(DATA, batch_size=5), DataLoader(DATA, batch_size=7)]
    ours(mine, val_dataloaders=loaders)
    trainer = theirs(other, loaders=loaders)
    found = numbers(mine.trainer.callback_metrics)
    assert found == pytest.approx(numbers(trainer.callback_metrics), rel=1e-5)
    assert found["size/dataloader_idx_1"] == SAMPLES and "alone_1" in found


def test_the_order_of_a_weighted_sampler_is_that_of_its_weights() -> None:
    """A sample of weight 0 is never drawn; an epoch has as many draws as the sampler."""
    drawn: list[int] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        drawn.extend(batch[1].tolist())
        return self(batch[0]).sum()

    sampler = SAMPLERS.WeightedRandomSampler((TARGET == 1).tolist(), 40)
    result = ours(made(training_step=training_step), max_epochs=1, val_dataloaders=None,
                  train_dataloaders=DataLoader(DATA, batch_size=BATCH, sampler=sampler))
    assert set(drawn) == {1} and result.steps == 10


def test_processes_of_a_data_loader_change_no_bit() -> None:
    weights = [ours(made(), max_epochs=1, devices=2, train_dataloaders=DataLoader(
        DATA, batch_size=2, num_workers=count)).weights_sha256 for count in (1, 2)]
    assert weights[0] == weights[1]


# --- what is refused ------------------------------------------------------------------------------

NO_HOOKS = frozenset("""
    print log_dict all_gather optimizers lr_schedulers manual_backward toggle_optimizer
    untoggle_optimizer toggled_optimizer clip_gradients freeze unfreeze to_onnx to_torchscript
    to_tensorrt load_from_checkpoint save_hyperparameters from_datasets
    """.split())
"""Methods that scripts call."""


def test_each_hook_of_lightning_is_called_or_refused() -> None:
    """A new version of Lightning with another hook fails here."""
    known = hooks.CALLED | hooks.NOT_IN_FIT | hooks.REFUSED.keys() | NO_HOOKS
    for kind, without in ((pl.LightningModule, torch.nn.Module), (pl.LightningDataModule, object),
                          (pl.Callback, object)):
        methods = {name for name, one in inspect.getmembers(kind, callable)
                   if not name.startswith("_") and not hasattr(without, name)
                   and "mixins" not in one.__module__ and "device_dtype" not in one.__module__}
        assert len(methods) > 8 and methods <= known, sorted(methods - known)


@pytest.mark.parametrize("name", sorted(hooks.REFUSED))
def test_a_hook_that_is_never_called_is_refused_by_name(name: str) -> None:
    def method(self: Any, *_: Any, **__: Any) -> None:
        raise AssertionError

    for base in (pl.LightningModule, pl.Callback, pl.LightningDataModule):
        if not hasattr(base, name):
            continue
        given: dict[str, Any] = {"module": made()}
        if base is pl.LightningModule:
            given = {"module": made(**{name: method})}
        elif base is pl.Callback:
            given["callbacks"] = type("Odd", (base,), {name: method})()
        else:
            given["datamodule"] = type("Odd", (base,), {name: method})()
        with pytest.raises(ConfigError, match=f"has {name}, which is never called"):
            ours(**given)


class Samples(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


SAMPLERS = torch.utils.data


@pytest.mark.parametrize(("loader", "message"), [
    (DATA, "is a TensorDataset. Give one DataLoader"),
    (DataLoader(Samples(), batch_size=2), "is an IterableDataset"),
    (DataLoader(DATA, sampler=SAMPLERS.SubsetRandomSampler([1])), "the sampler Subset"),
    (DataLoader(DATA, batch_sampler=[[0, 1]]), "the batch_sampler list"),
    (DataLoader(DATA, batch_size=None, shuffle=True), "the batch_sampler NoneType"),
    (DataLoader(DATA, shuffle=True, generator=torch.Generator()), "Leave generator out"),
    (DataLoader(DATA, shuffle=True, worker_init_fn=print), "a worker_init_fn"),
    (DataLoader(DATA, sampler=SAMPLERS.RandomSampler(DATA, replacement=True)), "replacement=True"),
    (DataLoader(DATA, sampler=SAMPLERS.WeightedRandomSampler([1.0] * 9, 9, replacement=False)),
     "a WeightedRandomSampler.replacement=False, num_samples=9"),
    ([DataLoader(DATA, shuffle=True)], "is a list"),
])
def test_data_that_cannot_be_taken_apart_are_refused(loader: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(made(), train_dataloaders=loader)


@pytest.mark.parametrize(("options", "message"), [
    ({"devices": None}, "Give devices=4 for a global batch of 4 x 4 = 16"),
    ({"global_batch": 8}, "Give devices=4"),
    ({"max_epochs": None}, "Give one of them"),
    ({"precision": "64-true"}, "precision is '64-true'"),
    ({"accelerator": "tpu"}, "accelerator is 'tpu'"),
    ({"state": {"lightning": torch.nn.Linear(1, 1)}}, "the name 'lightning'"),
    ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "max"}, "gradient_clip_algorithm"),
    ({"val_check_interval": 7}, "val_check_interval is 7, and an epoch has 6 steps"),
    ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch is 0"),
    ({"val_dataloaders": DataLoader(DATA, shuffle=True)}, "shuffle=False"),
    ({"val_dataloaders": DataLoader(DATA, batch_size=5, drop_last=True)}, "drop_last=False"),
    ({"datamodule": DataLoader(DATA)}, "no LightningDataModule"),
    ({"callbacks": [pl.callbacks.StochasticWeightAveraging(0.1)]}, "swa=Swa"),
    ({"callbacks": [pl.callbacks.LearningRateMonitor()]}, "the event of each step has the rate"),
    ({"callbacks": [pl.callbacks.ModelCheckpoint(dirpath="here")]}, "dirpath='here'|dirpath="),
    ({"callbacks": [pl.callbacks.ModelCheckpoint(monitor="a", save_top_k=3)]}, "save_top_k=3"),
    ({"callbacks": [object()]}, "is no Callback of lightning.pytorch.callbacks"),
])
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(made(), **options)


def test_an_object_that_is_no_module_of_lightning_is_refused() -> None:
    with pytest.raises(ConfigError, match="a Linear, which is no LightningModule"):
        fit(torch.nn.Linear(2, 2), devices=1, max_epochs=1)


def manual(module: Any) -> Any:
    module.automatic_optimization = False
    return module


@pytest.mark.parametrize(("module", "message"), [
    (lambda: manual(made()), "automatic_optimization=False.*step.phase"),
    (lambda: made(configure=lambda m: [sgd(m), sgd(m)]), "2 optimizers.*step.phase"),
    (lambda: made(configure=lambda m: {"optimizer": sgd(m), "lr": 1}), "the keys"),
    (lambda: made(configure=lambda m: 3), "configure_optimizers returned 3"),
    (lambda: made(configure=lambda m: ([sgd(m)], [RATES.StepLR(sgd(m), 1)])), "another optimizer"),
    (lambda: made(configure=lambda m: {
        "optimizer": (one := sgd(m)), "lr_scheduler": RATES.ReduceLROnPlateau(one)}),
     "no monitor is given"),
])
def test_modules_that_cannot_be_trained_are_refused(module: Callable[[], Any],
                                                    message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(module())


def stepping(change: Callable[[Any, Any], Any]) -> Any:
    """A module whose training_step does something more."""
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        returned = change(self, batch)
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        return loss if returned is None else returned

    return made(training_step=training_step)


def keeps(self: Any, batch: Any) -> None:
    self.kept.append(1)


def late(self: Any, batch: Any) -> None:
    if self.global_step:
        self.log("late", 1.0)


def keeping() -> Any:
    module = stepping(keeps)
    module.kept = []
    return module


def ranked(self: Any, batch: Any) -> None:
    self.rank_of_curve(self(batch[0]), batch[1])


def with_curve() -> Any:
    module = stepping(ranked)
    module.rank_of_curve = MulticlassAUROC(3)
    return module


def computes(self: Any, batch: Any) -> None:
    self.hits.update(self(batch[0]), batch[1])
    self.log("hits", self.hits.compute())


def with_metric(change: Callable[[Any, Any], Any]) -> Any:
    module = stepping(change)
    module.hits, module.others = MulticlassAccuracy(3), [MulticlassAccuracy(3)]
    return module


def validating(step: Callable[[Any, Any, int], Any]) -> Any:
    module = made(validation_step=step)
    module.kept = []
    return module


@pytest.mark.parametrize(("module", "message"), [
    (keeping, "training_step has changed self.kept"),
    (lambda: stepping(late), "self.log.'late'. was called for the first time in step"),
    (lambda: with_metric(computes), "self.hits.compute.. was called in training_step"),
    (lambda: with_metric(lambda m, b: m.others[0].update(m(b[0]), b[1])), "changed self.others"),
    (lambda: stepping(lambda m, b: {"other": 1}), "training_step returned a dict with"),
    (lambda: made(training_step=lambda m, b, i: None), "training_step returned None"),
    (lambda: stepping(lambda m, b: m.log("x", 1.0, reduce_fx="max")), "reduce_fx='max'"),
    (lambda: stepping(lambda m, b: m.trainer.world_is_flat), "trainer.world_is_flat is not there"),
    (lambda: stepping(lambda m, b: m.all_gather(b)), "strategy.all_gather is not there"),
    (with_curve, "self.rank_of_curve|rank_of_curve.*list of all"),
    (lambda: made(on_train_batch_end=lambda m, o, b, i: b[0]), "the batch of a step is shared"),
    (lambda: made(on_train_batch_end=lambda m, o, b, i: o["other"]), "outputs.*has used|has used"),
    (lambda: made(on_train_batch_start=lambda m, b, i: -1), "on_train_batch_start returned -1"),
    (lambda: validating(lambda m, b, i: m.kept.append(i)), "validation_step has changed self.kept"),
    (lambda: validating(lambda m, b, i: m.log("x", 1.0, on_step=True)), "Use on_step=False"),
    (lambda: made(configure=plateau("epoch"), validation_step=lambda m, b, i: None),
     "follows 'val_loss', which was not logged"),
    (lambda: stepping(lambda m, b: m.optimizers().step()), "optimizer.step.. was called"),
])
def test_a_misuse_raises_at_once(module: Callable[[], Any], message: str) -> None:
    with pytest.raises((RuntimeError, AttributeError, KeyError), match=message):
        ours(module())


def test_metrics_that_share_states_are_refused() -> None:
    module = made()
    module.several = MetricCollection([MulticlassAccuracy(3)])
    with pytest.raises(ConfigError, match="compute_groups=False"):
        ours(module)

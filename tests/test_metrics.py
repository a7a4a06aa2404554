"""torchmetrics' own objects in an evaluation: the numbers of one update with all samples, the same
in every world, and a refusal of what is no sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_evaluation import breaking_gathers
from test_loop import Ears, built, mse
from test_trainer import Model, in_a_breaking_world, trainer_of

from elastic_trainer import ConfigError, Evaluation
from elastic_trainer.evaluate.sums import require_sums

torchmetrics = pytest.importorskip("torchmetrics")
pytestmark = pytest.mark.usefixtures("no_launcher")
POINTS = torch.randn(53, 5, generator=torch.Generator().manual_seed(5))
CLASSES = POINTS[:, :3].argmax(1)
DATA = torch.utils.data.TensorDataset(POINTS, CLASSES)
KIND: dict[str, Any] = {"task": "multiclass", "num_classes": 3}


def metrics_of() -> dict[str, Any]:
    return {"accuracy": torchmetrics.Accuracy(**KIND), "by_class": torchmetrics.Accuracy(
                **KIND, average="none"), "confusion": torchmetrics.ConfusionMatrix(**KIND),
            "auroc": torchmetrics.AUROC(**KIND, thresholds=20),
            "mean": torchmetrics.MeanMetric(), "squares": torchmetrics.MeanSquaredError()}


def updating(metrics: Any) -> Any:
    """Return a function of evaluate() that updates the metrics."""
    def update(model: Model, batch: Any) -> dict[str, Any]:
        scores = model(batch[0])
        for name in ("accuracy", "by_class", "confusion", "auroc"):
            metrics[name].update(scores.softmax(1), batch[1])
        metrics["mean"].update(scores[:, 0])
        metrics["squares"].update(scores, torch.nn.functional.one_hot(batch[1], 3).float())
        return {"samples": len(batch[0])}

    return update


def run(model: Model, **more: Any) -> list[dict[str, Any]]:
    """Evaluate after each step; returns the results as JSON has them."""
    torch.manual_seed(0)
    trainer, metrics, seen = trainer_of(model, **more), metrics_of(), list[dict[str, Any]]()
    for step in trainer:
        for batch in step:
            step.backward(mse(model, batch))
        metrics["mean"].update(1e9)  # what a metric holds before counts for nothing
        found = trainer.evaluate(DATA, updating(metrics), metrics=metrics, batch_size=7)
        seen.append({name: getattr(value, "tolist", lambda value=value: value)()
                     for name, value in found.items()})
        assert not metrics["mean"].update_called
    return seen


def test_the_numbers_are_those_of_one_update_with_all_samples() -> None:
    ears, model = Ears(), built()
    seen = run(model, listeners=[ears])[-1]
    whole = metrics_of()
    model.eval()
    with torch.no_grad():
        updating(whole)(model, [POINTS, CLASSES])
    for name, metric in whole.items():
        assert torch.allclose(torch.tensor(seen[name]), metric.compute().to(
            torch.tensor(seen[name]).dtype), rtol=1e-6), name
    assert seen["samples"] == 53.0 and sum(map(sum, seen["confusion"])) == 53
    assert ears.facts("worker.evaluated")[-1]["metrics"] == seen


@pytest.mark.parametrize("size", [2, 4])
def test_the_bits_are_those_of_one_worker_in_every_world_and_through_a_broken_generation(
        size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of float sums: they are exact, and rounded once."""
    alone, models = run(built()), [built() for _ in range(size)]
    fired = breaking_gathers(monkeypatch, 1, 4)
    assert in_a_breaking_world(monkeypatch, size,
                               lambda rank: run(models[rank])) == [alone] * size
    assert fired == [1]


def test_a_collection_gives_what_its_metrics_give() -> None:
    """Those of one group share their states: only one of them is updated."""
    def of(metrics: Any) -> dict[str, Any]:
        model = built()
        trainer = trainer_of(model)
        for step in trainer:
            for batch in step:
                step.backward(mse(model, batch))
        def update(model: Model, batch: Any) -> None:
            for metric in [metrics] if collection is metrics else metrics.values():
                metric.update(model(batch[0]), batch[1])

        return trainer.evaluate(DATA, update, metrics=metrics, batch_size=7)

    single = {"accuracy": torchmetrics.Accuracy(**KIND, average="micro"),
              "recall": torchmetrics.Recall(**KIND), "precision": torchmetrics.Precision(**KIND)}
    collection = torchmetrics.MetricCollection(single, prefix="val_")
    assert of(collection) == {f"val_{name}": value for name, value in of(single).items()}


@pytest.mark.parametrize(("metric", "message"), [
    (lambda: torchmetrics.AUROC(**KIND), "'preds' is a list of all that it has seen"),
    (lambda: torchmetrics.MaxMetric(), r"'max_value' is not summed \(it is reduced by dim_zero"),
    (lambda: torchmetrics.PearsonCorrCoef(), "is not summed"),
    (lambda: torchmetrics.MinMaxMetric(torchmetrics.Accuracy(**KIND)), "which holds other metrics"),
    (lambda: torchmetrics.Accuracy(**KIND) + 1.0, "which holds other metrics"),
    (lambda: torch.nn.Linear(1, 1), "Linear, which is no metric of torchmetrics"),
])
def test_a_metric_whose_state_is_no_sum_is_refused_by_name(metric: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"the metric 'odd' is a .*{message}"):
        require_sums({"odd": metric()})
    with pytest.raises(ConfigError, match="the metric 'odd' is"):
        Evaluation(DATA, updating({}), metrics={"odd": metric()})


def test_a_metric_that_does_not_begin_with_zeros_is_refused() -> None:
    metric = torchmetrics.MeanMetric()
    metric.add_state("bonus", torch.ones(1), dist_reduce_fx="sum")
    with pytest.raises(ConfigError, match="'bonus' does not begin with zeros"):
        require_sums({"mean": metric})
    with pytest.raises(ConfigError, match="metrics is a list. Give torchmetrics' objects by name"):
        require_sums([metric])


@pytest.mark.parametrize(("fn", "message"), [
    (lambda model, batch: {}, "has not updated the metric 'mean' in any batch"),
    (lambda model, batch: {"mean": 1.0}, r"returned \['mean'\], which metrics= has too"),
])
def test_a_function_that_does_not_update_a_metric_raises(fn: Any, message: str) -> None:
    model = built()
    trainer = trainer_of(model)
    with pytest.raises(RuntimeError, match=message):
        for step in trainer:
            for batch in step:
                step.backward(mse(model, batch))
            trainer.evaluate(DATA, fn, metrics={"mean": torchmetrics.MeanMetric()})

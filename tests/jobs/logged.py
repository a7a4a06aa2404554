"""A job with all that follows an evaluation: torchmetrics, the best checkpoint, early stopping,
loggers.

    python tests/jobs/logged.py FOLDER      alone: the undisturbed twin, which logs into FOLDER

The faults come from outside (`ELASTIC_TEST_PLAN`, see tests/faults.py).
"""

import sys
from pathlib import Path

import injected

if injected.injector:
    import quick_boot  # noqa: F401
import torch
import torchmetrics
from injected import injector

from elastic_trainer import Trainer, cosine, keep_best
from elastic_trainer.loggers import Csv, MLflow, TensorBoard, WandB

folder = Path(sys.argv[1])

torch.manual_seed(1)
points = torch.randn(403, 20, generator=torch.Generator().manual_seed(0))
classes = points[:, :4].argmax(1)
samples = torch.utils.data.TensorDataset(points, classes)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(),
                            torch.nn.Dropout(0.1), torch.nn.Linear(64, 4))
accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4)
confusion = torchmetrics.ConfusionMatrix(task="multiclass", num_classes=4)
loss = torchmetrics.MeanMetric()
trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=3e-2), samples,
                  global_batch=32, microbatches=8, seed=3, until="400 steps",
                  lr=cosine(warmup_steps=5, total_steps=400), checkpoint_every=25, keep_last=1,
                  best=keep_best("accuracy", mode="max", patience=3),
                  listeners=injected.listeners, run_dir=None if injector
                  else folder / "run", loggers=[Csv(folder / "metrics.csv")] if not injector
                  else [Csv(folder / "metrics.csv"), TensorBoard(folder / "tensorboard"),
                        MLflow(str(folder / "mlruns")), WandB(offline=True, folder=folder)])
for step in trainer:
    for x, y in step:
        step.backward(torch.nn.functional.cross_entropy(model(x), y))
        step.log(norm=(x.square().sum(), len(x)))
    if step.number % 10 == 9:
        def measure(model: torch.nn.Module, batch: list[torch.Tensor],
                    number: int = step.number) -> None:
            """Update the metrics, where a fault may happen."""
            if injector:
                injector("evaluate", {"step": number})
            scores = model(batch[0])
            accuracy.update(scores, batch[1])
            confusion.update(scores, batch[1])
            loss.update(torch.nn.functional.cross_entropy(scores, batch[1]), len(batch[1]))

        found = trainer.evaluate(
            samples, measure, batch_size=50,
            metrics={"accuracy": accuracy, "confusion": confusion, "loss": loss})
        assert found["confusion"].sum() == 403
        with torch.no_grad():
            model[0].bias.mul_(1 - found["accuracy"] / 100)
print("best", trainer.best.value, trainer.best.step)
print("steps", trainer.result.steps)
print("weights", trainer.result.weights_sha256)

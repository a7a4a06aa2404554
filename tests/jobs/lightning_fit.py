"""The job of the fault tests of the adapter for Lightning: dropout, torchmetrics, a scheduler that
follows a validation, attributes that hooks change, early stopping before the last epoch.

    python tests/jobs/lightning_fit.py       alone: the undisturbed twin
"""

import time

import injected
import lightning as L
import torch
from injected import hurry, injector
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from elastic_trainer.adapters.lightning import fit

if injector:
    injector.linger_at_the_end(36, 0.15)  # the early end comes after 36 steps


class Points(Dataset):
    """Random points in three classes."""

    def __init__(self, size, first):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        if injector and self.first == 0 and not hurry.exists():
            time.sleep(0.15)  # so that a newcomer enters in the middle of the run
        point = torch.randn(6, generator=torch.Generator().manual_seed(self.first + i))
        return point, int(point[:3].argmax())


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Points(90, 0), batch_size=2, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Points(30, 1000), batch_size=8)


class Net(L.LightningModule):
    def __init__(self, rate=0.02):
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16),
                                          torch.nn.ReLU(), torch.nn.Dropout(0.2),
                                          torch.nn.Linear(16, 3))
        self.hits, self.held_out = MulticlassAccuracy(3), MulticlassAccuracy(3)
        self.weight, self.history = 1.0, []

    def training_step(self, batch, batch_idx):
        output = self.layers(batch[0])
        loss = self.weight * torch.nn.functional.cross_entropy(output, batch[1])
        self.hits(output, batch[1])
        self.log("hits", self.hits, on_step=True, on_epoch=True)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        output = self.layers(batch[0])
        self.held_out(output, batch[1])
        self.log("held_out", self.held_out)
        self.log("val_loss", torch.nn.functional.cross_entropy(output, batch[1]))

    def on_train_epoch_end(self):
        metrics = self.trainer.callback_metrics
        self.weight = 1.0 + 0.1 * float(metrics["hits_epoch"])
        self.history.append([self.current_epoch, self.global_step, self.weight,
                             float(metrics["val_loss"]), float(metrics["held_out"]),
                             self.optimizers().param_groups[0]["lr"]])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0,
                                                               threshold=0.2, factor=0.7)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


class Counter(L.Callback):
    """Counts finished steps."""

    def __init__(self):
        self.count = 0

    def on_train_batch_end(self, trainer, *_):
        self.count += 1
        assert self.count == trainer.global_step


torch.manual_seed(1)
module, counter = Net(), Counter()
stopping = EarlyStopping("held_out", mode="max", patience=2)
result = fit(module, Data(), max_epochs=9, devices=8, seed=3,
             callbacks=[counter, stopping, ModelCheckpoint(monitor="val_loss")],
             checkpoint_every=3, listeners=injected.listeners,
             run_dir=None if injector else "alone")
assert counter.count == result.steps < 54, (counter.count, result.steps)
print("weights", result.weights_sha256)
print("history", result.steps, module.history, stopping.stopping_reason_message)

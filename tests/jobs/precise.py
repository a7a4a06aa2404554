"""A job in mixed precision, with activations that are computed again, dropout, BatchNorm, clipping
and an evaluation.

    python tests/jobs/precise.py --precision bf16                      alone: the undisturbed twin
    python tests/jobs/precise.py --precision fp16 --compress fp16      with --reduce ring

The faults come from outside (`ELASTIC_TEST_PLAN`, see tests/faults.py).
"""

import argparse
import time

import injected
import torch
from injected import hurry, injector
from torch.utils.checkpoint import checkpoint

from elastic_trainer import Trainer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--step-s", type=float, default=0.0, help="until there is a file named hurry")
parser.add_argument("--precision", default="bf16")
parser.add_argument("--compress", default=False)
parser.add_argument("--shard")
options = parser.parse_args()
if injector:
    injector.linger_at_the_end(options.steps, options.step_s)


class Samples(torch.utils.data.Dataset):
    """1003 random points with the class that their largest coordinate gives them."""

    def __init__(self) -> None:
        self.points = torch.randn(1003, 20, generator=torch.Generator().manual_seed(0))
        self.classes = self.points[:, :4].argmax(1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitems__(self, numbers: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not hurry.exists():
            time.sleep(options.step_s)
        return [(self.points[n], self.classes[n]) for n in numbers]


class Net(torch.nn.Module):
    """Two parts whose activations are computed again in the backward pass, in both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(20, 128), torch.nn.Linear(128, 4)
        self.parts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.BatchNorm1d(128),
                                torch.nn.ReLU(), torch.nn.Dropout(0.1)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, part in enumerate(self.parts):
            x = checkpoint(part, x, use_reentrant=number == 1)
        return self.last(x)


def hits(model: torch.nn.Module, batch: list[torch.Tensor]) -> dict[str, object]:
    found = model(batch[0])
    assert found.element_size() == 2
    return {"accuracy": ((found.argmax(1) == batch[1]).sum(), len(batch[1]))}


torch.manual_seed(1)
model = Net()
scaler = (torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=8)
          if options.precision == "fp16" else None)
trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), Samples(),
                  global_batch=64, microbatches=8, until=f"{options.steps} steps", seed=3,
                  clip_norm=1.0, shard=options.shard, scaler=scaler, precision=options.precision,
                  compress=options.compress, predivide=8.0 if options.compress
                  else 1.0, bucket_bytes=1 << 16 if options.compress else None,
                  checkpoint_every=20, listeners=injected.listeners)
for step in trainer:
    for x, y in step:
        step.backward(torch.nn.functional.cross_entropy(model(x), y))
    if step.number % 20 == 19:
        trainer.evaluate(Samples(), hits, batch_size=100)
print("weights", trainer.result.weights_sha256)

"""A hundredth of a model of 7 billion parameters, in layers of a transformer's shape; each worker
writes how much memory it has needed at most, beside what its imports take.

    python tests/bench/jobs/large.py SHARD STEPS FOLDER

SHARD: none, optimizer or gradients
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from elastic_trainer import Trainer

WIDTH, LAYERS = 420, 33  # 12 * 420^2 * 33 = 69.9 million


def memory(name: str) -> int:
    """Return a number of bytes of /proc/self/status."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines()
                if one.startswith(name))
    return int(line.split()[1]) << 10


class Layer(torch.nn.Module):
    """The matrices of one layer of a transformer, without the attention between tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.attend = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.joined = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.widened = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.narrowed = torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attend(self.norm(x)).chunk(3, -1)
        x = x + self.joined(torch.sigmoid(query * key) * value)
        return x + self.narrowed(torch.relu(self.widened(x)))


shard, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
before = memory("VmRSS")
torch.manual_seed(0)
model = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
dataset = torch.utils.data.TensorDataset(torch.randn(64, WIDTH))
trainer = Trainer(model, optimizer, dataset, global_batch=16, microbatches=8,
                  until=f"{steps} steps", checkpoint_every=None, precision="bf16-master",
                  shard=None if shard == "none" else shard, bucket_bytes=4 << 20)
built = memory("VmHWM") - before
for step in trainer:
    if step.number == 2:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for (x,) in step:
        step.backward(model(x).float().square().mean())
numbers = {"parameters": sum(p.numel() for p in model.parameters()), "built": built,
           "trained": memory("VmHWM") - before}
for name, count in numbers.items():
    (folder / f"{name}-{os.getpid()}").write_text(str(count))

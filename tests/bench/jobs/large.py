"""Some layers of a transformer's shape; each worker writes how much memory it has needed at most.

    python tests/bench/jobs/large.py LAYERS STEPS FOLDER

33 layers have a hundredth of 7 billion parameters.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch

from elastic_trainer import Trainer
from elastic_trainer.state.checkpoints.upload import SnapshotMemory

WIDTH = 420


def memory(name: str) -> int:
    """Return a number of bytes of /proc/self/status."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines()
                if one.startswith(name))
    return int(line.split()[1]) << 10


def room() -> int:
    """Return the bytes in which this worker copies its share of a checkpoint. On a GPU's worker
    they are pinned memory of the host."""
    (memory,) = [one for one in gc.get_objects() if isinstance(one, SnapshotMemory)]
    return memory.coming.result().bytes if memory.coming else memory.room.bytes


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


layers, steps, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Sequential(*(Layer() for _ in range(layers)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
dataset = torch.utils.data.TensorDataset(torch.randn(64, WIDTH))
trainer = Trainer(model, optimizer, dataset, global_batch=16, microbatches=8,
                  until=f"{steps} steps", checkpoint_every=None, precision="bf16-master",
                  shard="gradients", bucket_bytes=4 << 20)
built = memory("VmHWM")
for step in trainer:
    for (x,) in step:
        step.backward(model(x.bfloat16()).float().square().mean())
    if step.number == 1:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    elif step.number + 1 == steps:
        numbers = {"parameters": sum(p.numel() for p in model.parameters()), "built": built,
                   "process": memory("VmHWM"), "room": room()}
        for name, count in numbers.items():
            (folder / f"{name}.{os.getpid()}").write_text(str(count))

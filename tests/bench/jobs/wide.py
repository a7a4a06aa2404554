"""A job whose gradient is large and whose arithmetic is small, for bench/reduce.py and
test_netlab.py.

    python tests/bench/jobs/wide.py --steps N --mib SIZE --microbatches M [--folder FOLDER]

Each worker writes into the folder by how many bytes its memory has grown at most since the model
was there: peak-PID.
"""

import argparse
import os
import re
from pathlib import Path

import torch

from elastic_trainer import train

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--mib", type=int, required=True, help="of the gradient")
parser.add_argument("--microbatches", type=int, required=True)
parser.add_argument("--folder", type=Path)
options = parser.parse_args()

PIECES = 64


def memory_bytes(key: str) -> int:
    """Return a figure of this process: what it has (VmRSS), or had at most (VmHWM)."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


class Wide(torch.nn.Module):
    """Many numbers, each used once."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = torch.nn.ParameterList(
            torch.ones((options.mib << 18) // PIECES) for _ in range(PIECES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(piece * x).mean() for piece in self.pieces]).sum()


def after_step(step: int) -> None:
    if options.folder:
        (options.folder / f"peak-{os.getpid()}").write_text(str(memory_bytes("VmHWM") - before))


model = Wide()
before = memory_bytes("VmRSS")
train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(256, 1),
      loss=lambda model, batch: model(batch.mean()), global_batch=64,
      microbatches=options.microbatches, until=f"{options.steps} steps",
      checkpoint_every=10**9, bucket_bytes=1 << 20, after_step=after_step)

"""The benchmarks' job under our trainer: a 10-million-parameter MLP with Adam (122 MB of state), as
in the peer's arm.

    python tests/bench/jobs/mlp.py --steps N
"""

import argparse

import torch
from model import build, loss, samples

from elastic_trainer import train

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--reduce")
parser.add_argument("--checkpoint-every", type=int, default=10**9)
options = parser.parse_args()

torch.manual_seed(0)
model = build()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
train(model, optimizer, samples(), loss=loss, global_batch=64, microbatches=4,
      until=f"{options.steps} steps", checkpoint_every=options.checkpoint_every,
      reduce=options.reduce)

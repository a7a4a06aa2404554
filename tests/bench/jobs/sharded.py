"""The demo's model, trained with or without a sharded optimizer; each worker writes how many bytes
of the weights and of the optimizer's state it keeps.

    python tests/bench/jobs/sharded.py SHARD STEPS FOLDER [PRECISION]

SHARD: optimizer or none
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from elastic_trainer import Trainer
from elastic_trainer.examples.gpt import GPT, SourceWindows, next_byte_loss, standard_library

shard, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
precision = sys.argv[4] if len(sys.argv) > 4 else "fp32"
torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
trainer = Trainer(model, optimizer, SourceWindows(standard_library(), model.context),
                  global_batch=32, microbatches=8, until=f"{steps} steps", clip_norm=1.0,
                  checkpoint_every=None, shard=None if shard == "none" else shard,
                  precision=precision)
for step in trainer:
    for batch in step:
        step.backward(next_byte_loss(model, batch))
held = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())
for name, count in (("held", held), ("weights", sum(p.nbytes for p in model.parameters()))):
    (folder / f"{name}-{os.getpid()}").write_text(str(count))
print("weights", trainer.result.weights_sha256)

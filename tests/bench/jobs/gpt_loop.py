"""The demo's training as a loop of one's own: `elastic_trainer.examples.gpt` with the iterator."""

from __future__ import annotations

import torch

from elastic_trainer import Trainer, cosine
from elastic_trainer.examples.gpt import (
    GPT,
    SourceWindows,
    next_byte_loss,
    parse_options,
    standard_library,
)

options = parse_options()
torch.manual_seed(options.seed)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95),
                              weight_decay=0.1)
trainer = Trainer(model, optimizer, SourceWindows(standard_library(), model.context),
                  global_batch=options.global_batch, microbatches=options.microbatches,
                  until=f"{options.steps} steps", seed=options.seed, clip_norm=1.0,
                  lr=cosine(warmup_steps=options.steps // 10, total_steps=options.steps, floor=0.1),
                  checkpoint_every=options.checkpoint_every)
for step in trainer:
    for batch in step:
        step.backward(next_byte_loss(model, batch))

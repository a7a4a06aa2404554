"""The peer's arm of overhead.py: the demo model in a plain DistributedDataParallel loop, as in
PyTorch's tutorial.

    MASTER_ADDR=127.0.0.1 MASTER_PORT=… RANK=0 WORLD_SIZE=2 python tests/bench/jobs/ddp_gpt.py STEPS
    GLOBAL_BATCH

Rank 0 prints the seconds of each step as one JSON list.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from elastic_trainer.examples.gpt import GPT, SourceWindows, next_byte_loss, standard_library

steps, global_batch = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
dataset = SourceWindows(standard_library(), 128)
sampler = DistributedSampler(dataset, shuffle=True, seed=0)
loader = iter(DataLoader(dataset, batch_size=global_batch // dist.get_world_size(),
                         sampler=sampler))
seconds = []
for _ in range(steps):
    started = time.monotonic()
    optimizer.zero_grad()
    loss = next_byte_loss(model, next(loader))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    loss.item()
    seconds.append(time.monotonic() - started)
if dist.get_rank() == 0:
    print(json.dumps(seconds))
dist.destroy_process_group()

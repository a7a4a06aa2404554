"""The job of both arms of loader.py: samples that take 20 ms to read, a model of 10 million
parameters.

    python tests/bench/jobs/slow_data.py --steps N [--workers N] [--microbatches N]      ours
    MASTER_ADDR=… RANK=0 WORLD_SIZE=2 python tests/bench/jobs/slow_data.py --ddp …  the peer

The peer prints a JSON object with the seconds of each step, on rank 0, as examples/ddp.py does.
"""

import argparse
import json
import time

import torch
from model import build, loss, samples

READ_S = 0.02


class SlowSamples(torch.utils.data.Dataset):
    """Samples that a slow disk or a decoder delays."""

    def __init__(self) -> None:
        self.samples = samples()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, ...]:
        time.sleep(READ_S)
        return self.samples[number]


def train_ours(options: argparse.Namespace) -> None:
    """Train with our loop."""
    from elastic_trainer import Loader, Trainer

    model = build()
    loader = Loader(workers=options.workers) if options.workers else None
    trainer = Trainer(model, torch.optim.Adam(model.parameters(), lr=1e-3), SlowSamples(),
                      global_batch=options.global_batch, microbatches=options.microbatches,
                      until=f"{options.steps} steps", checkpoint_every=options.checkpoint_every,
                      loader=loader)
    for step in trainer:
        for batch in step:
            step.backward(loss(model, batch))


def train_ddp(options: argparse.Namespace) -> None:
    """Train with DistributedDataParallel and DataLoader, as in PyTorch's tutorial."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    dist.init_process_group("gloo")
    model = DistributedDataParallel(build())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dataset = SlowSamples()
    loader = iter(DataLoader(dataset, batch_size=options.global_batch // dist.get_world_size(),
                             sampler=DistributedSampler(dataset), num_workers=options.workers))
    seconds = []
    for _ in range(options.steps):
        started = time.monotonic()
        optimizer.zero_grad()
        found = loss(model, next(loader))
        found.backward()
        optimizer.step()
        found.item()
        seconds.append(time.monotonic() - started)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds}), flush=True)
    dist.destroy_process_group()


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--workers", type=int, default=0, help="loader processes of each worker")
parser.add_argument("--global-batch", type=int, default=16)
parser.add_argument("--microbatches", type=int, default=2)
parser.add_argument("--checkpoint-every", type=int, default=10**9)
parser.add_argument("--ddp", action="store_true")
torch.manual_seed(0)
torch.set_num_threads(1)
given = parser.parse_args()
if given.ddp:
    train_ddp(given)
else:
    train_ours(given)

"""The peer of `elastic-trainer scaling`: the demos in a plain DistributedDataParallel loop, as in
PyTorch's tutorial.

    MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 RANK=0 WORLD_SIZE=2 GLOO_SOCKET_IFNAME=lo \
        python -m elastic_trainer.examples.ddp images --steps 20 --global-batch 32

Rank 0 prints one JSON object: the seconds of each step, and of the parts of all steps. Model,
optimizer, data and number of threads are those of `examples/gpt.py` and `examples/images.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from elastic_trainer import decay_groups
from elastic_trainer.examples.gpt import GPT, SourceWindows, next_byte_loss, standard_library
from elastic_trainer.examples.pictures import load
from elastic_trainer.examples.resnet import resnet18


@dataclass(frozen=True)
class Demo:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any
    loss: Callable[[nn.Module, Any], Tensor]
    clip_norm: float | None


def gpt() -> Demo:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return Demo(model, optimizer, SourceWindows(standard_library(), model.context), next_byte_loss,
                1.0)


def images() -> Demo:
    dataset, _, classes, _ = load("", None)
    model = resnet18(classes, stem="cifar")
    optimizer = torch.optim.SGD(decay_groups(model, weight_decay=5e-4), lr=0.1, momentum=0.9,
                                nesterov=True)
    return Demo(model, optimizer, dataset, image_loss, None)


def image_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


DEMOS = {"gpt": gpt, "images": images}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a demo with DistributedDataParallel.")
    parser.add_argument("demo", choices=DEMOS)
    parser.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--global-batch", type=int, default=32, help="(%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    seconds, parts = train(DEMOS[options.demo](), options.steps, options.global_batch)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "parts": parts}))
    dist.destroy_process_group()


def train(demo: Demo, steps: int, global_batch: int) -> tuple[list[float], dict[str, float]]:
    """Return the seconds of each step, and of each part in all steps."""
    model = DistributedDataParallel(demo.model)
    batches = endless(demo.dataset, global_batch // dist.get_world_size())
    seconds: list[float] = []
    parts: dict[str, float] = defaultdict(float)
    for _ in range(steps):
        marks = [time.monotonic()]
        batch = next(batches)
        marks.append(time.monotonic())
        demo.optimizer.zero_grad()
        loss = demo.loss(model, batch)
        marks.append(time.monotonic())
        torch.autograd.backward(loss)
        marks.append(time.monotonic())
        if demo.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), demo.clip_norm)
        demo.optimizer.step()
        loss.item()
        marks.append(time.monotonic())
        seconds.append(marks[-1] - marks[0])
        for name, start, end in zip(("load", "forward", "backward", "apply"), marks, marks[1:],
                                    strict=False):
            parts[name] += end - start
    return seconds, dict(parts)


def endless(dataset: Any, batch_size: int) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=True, seed=0)
    while True:
        yield from DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=True)


if __name__ == "__main__":
    main()

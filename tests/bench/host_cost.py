"""What our own work on the host costs in a step, in a world of one: `exact` and `ring` against a
plain loop of gradient accumulation.

    .venv/bin/python tests/bench/host_cost.py [--rounds 10] [--steps 24]

The kernels of the two models take next to no time. So a step takes what Python and the starts of
operations take, as it does on a GPU that waits for its host. `convolutions` has the parameters and
buffers of ResNet-50 (161 and 159), `transformer` has 12 blocks (148 parameters, no buffers). Four
micro-batches a step, one thread. The arms take turns, and a figure is the least of the medians of
all rounds: other processes make a median longer, and none makes it shorter.

The last line is one JSON object. convolutions_exact is the time of a step of `exact` by that of the
plain loop, and convolutions_exact_ms the difference in a micro-batch, in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from elastic_trainer import Trainer

MICROBATCHES, MICROBATCH_SAMPLES = 4, 4
BATCH = MICROBATCHES * MICROBATCH_SAMPLES
SAMPLES = 8 * BATCH
WARM_UP_STEPS = 6
MOST_RATIO = 1.12


class Convolutions(nn.Module):
    """As many convolutions and BatchNorms as ResNet-50 has, of two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(2, 2, 3, padding=1, bias=False) for _ in range(53))
        self.norms = nn.ModuleList(nn.BatchNorm2d(2) for _ in range(53))
        self.head = nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> Any:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + F.relu(norm(convolution(x)))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.norms[0](x)).chunk(3, dim=2)
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class Transformer(nn.Module):
    """12 blocks of width 8."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.Sequential(*(Block(8, 2) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.norm(self.blocks(self.embedding(tokens))).mean(1))


def built(kind: str) -> tuple[nn.Module, TensorDataset]:
    """Return a model and its dataset."""
    torch.manual_seed(0)
    labels = torch.arange(SAMPLES) % 4
    if kind == "convolutions":
        return Convolutions(), TensorDataset(torch.randn(SAMPLES, 2, 4, 4), labels)
    return Transformer(), TensorDataset(torch.randint(16, (SAMPLES, 6)), labels)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all arms."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain(kind: str, steps: int) -> Iterator[None]:
    """Train in plain PyTorch, and yield after each step."""
    model, dataset = built(kind)
    optimizer = adamw(model)
    for step in range(steps):
        for number in range(MICROBATCHES):
            first = (step * BATCH + number * MICROBATCH_SAMPLES) % SAMPLES
            inputs, labels = default_collate(
                [dataset[first + place] for place in range(MICROBATCH_SAMPLES)])
            (F.cross_entropy(model(inputs), labels) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def ours(kind: str, reduce: str, steps: int) -> Iterator[None]:
    """Train with the Trainer, and yield after each step."""
    model, dataset = built(kind)
    for step in Trainer(model, adamw(model), dataset, global_batch=BATCH,
                        microbatches=MICROBATCHES, until=f"{steps} steps", reduce=reduce,
                        progress=False):
        for inputs, labels in step:
            step.backward(F.cross_entropy(model(inputs), labels))
        yield


def step_seconds(arm: str, kind: str, steps: int) -> float:
    """Return the median time of the steps of one run, after the first ones."""
    run = plain(kind, steps) if arm == "plain" else ours(kind, arm, steps)
    ends = [time.perf_counter() for _ in run]
    return statistics.median(end - begin for begin, end in pairwise(ends[WARM_UP_STEPS:]))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios, and the milliseconds of a micro-batch."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for kind in ("convolutions", "transformer"):
        seconds: dict[str, list[float]] = defaultdict(list)
        for _ in range(options.rounds):
            for arm in ("plain", "exact", "ring"):
                seconds[arm].append(step_seconds(arm, kind, options.steps))
        least = {arm: min(times) for arm, times in seconds.items()}
        found[f"{kind}_plain_ms"] = round(1000 * least["plain"], 2)
        for arm in ("exact", "ring"):
            found[f"{kind}_{arm}"] = round(least[arm] / least["plain"], 3)
            found[f"{kind}_{arm}_ms"] = round(
                1000 * (least[arm] - least["plain"]) / MICROBATCHES, 3)
        print(found, flush=True)
    return found | {"met": all(
        found[f"{kind}_{arm}"] <= MOST_RATIO for kind in ("convolutions", "transformer")
        for arm in ("exact", "ring"))}


if __name__ == "__main__":
    bench.run(measure, rounds=10, steps=24)

"""What the memory of activations costs: checkpointing, offload to the CPU, torch.compile.

    .venv/bin/python tests/bench/activations.py [--steps 6] [--device cpu]

One worker trains 12 blocks (LayerNorm, a layer of 4 x 256, GELU, dropout) under `exact`, with 4
micro-batches of 8 sequences of 256 tokens. Each variant has a process of its own. `peak_bytes` is
what the process held at most (VmHWM) beyond what it held before the first step, with the gradients,
the optimizer and the trainer; on a GPU it is what torch held there at most. `step_s` is the median
of the steps after the first two: on a CPU the processor's time, which other load changes little.
On a CPU the offload saves nothing: the copies are in the same memory.

The last line is one JSON object: for each variant [peak_bytes, step_s], and whether the weights of
checkpointing and of the offload have the bits of the plain variant (`bits_equal`).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from elastic_trainer import Trainer

VARIANTS = ("plain", "checkpoint", "offload", "compile")
WIDTH, TOKENS, SEQUENCES, BLOCKS = 256, 256, 8, 12


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(),
            torch.nn.Linear(4 * WIDTH, WIDTH), torch.nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.layers(x))


def held_bytes(name: str, device: str) -> int:
    """Return VmRSS or VmHWM of this process; on a GPU what torch holds, or has held at most."""
    if device != "cpu":
        return (torch.cuda.memory_allocated() if name == "VmRSS"
                else torch.cuda.max_memory_allocated())
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def train(variant: str, steps: int, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    blocks = [Block().to(device) for _ in range(BLOCKS)]
    model: Any = torch.nn.Sequential(*blocks)
    data = torch.utils.data.TensorDataset(torch.randn(4 * SEQUENCES * 4, TOKENS, WIDTH))
    if variant == "compile":
        model = torch.compile(model)
    trainer = Trainer(model, torch.optim.AdamW(model.parameters()), data, microbatches=4,
                      global_batch=4 * SEQUENCES, until=f"{steps} steps", progress=False)
    before, ends = held_bytes("VmRSS", device), []
    for step in trainer:
        for (x,) in step:
            if variant == "checkpoint":
                for block in blocks:
                    x = checkpoint(block, x, use_reentrant=False)
                loss = x.square().mean()
            elif variant == "offload":
                with save_on_cpu(pin_memory=device != "cpu"):
                    loss = model(x).square().mean()
            else:
                loss = model(x).square().mean()
            step.backward(loss)
        ends.append(time.process_time() if device == "cpu" else time.monotonic())
    seconds = [end - start for start, end in zip(ends[1:], ends[2:], strict=False)]
    return {"peak_bytes": held_bytes("VmHWM", device) - before,
            "step_s": round(statistics.median(seconds), 3),
            "weights": trainer.result.weights_sha256}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--variant", choices=VARIANTS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(train(options.variant, options.steps, options.device)))
        return
    found = {}
    for variant in VARIANTS:
        done = subprocess.run([sys.executable, __file__, "--variant", variant, "--steps",
                               str(options.steps), "--device", options.device],
                              check=True, stdout=subprocess.PIPE, text=True, timeout=900)
        found[variant] = json.loads(done.stdout.splitlines()[-1])
    weights = {found[variant].pop("weights") for variant in ("plain", "checkpoint", "offload")}
    del found["compile"]["weights"]
    print(json.dumps({**{variant: [one["peak_bytes"], one["step_s"]]
                         for variant, one in found.items()}, "bits_equal": len(weights) == 1}))


if __name__ == "__main__":
    main()

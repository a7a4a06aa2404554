"""The job of the proof: small, and on whichever device there is. Alone it is the undisturbed twin.

    python tests/gpu/job.py [--model convnet] [--precision fp16] [--steps 60]

It prints "weights HASH", and with --evaluate "accuracy NUMBER". The test's word to hurry ends the
pauses of --step-s. `--memory FILE` gets one JSON line for each generation that this process enters:
the memory that it holds then, in MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "jobs"))
# Workers that share one GPU: NCCL takes each for a host of its own (docs/guide/gpu.md). A user's
# choice wins. Before torch loads NCCL.
os.environ.setdefault("NCCL_HOSTID", f"{os.environ.get('HOROVOD_HOSTNAME', '')}-{os.getpid()}")

import injected  # noqa: E402

if "cpu" in sys.argv:
    import quick_boot  # noqa: F401
import torch  # noqa: E402
from injected import hurry, injector  # noqa: E402

from elastic_trainer import Trainer  # noqa: E402
from elastic_trainer.examples.gpt import GPT, next_byte_loss  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("gpt", "convnet"), default="gpt")
parser.add_argument("--precision", default="fp32")
parser.add_argument("--reduce", default="exact")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--width", type=int, default=64, help="of the model gpt")
parser.add_argument("--step-s", type=float, default=0.0, help="pause after each step")
parser.add_argument("--checkpoint-every", type=int, default=0)
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--memory", type=Path)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
options = parser.parse_args()
device = torch.device(options.device)
if injector:
    injector.linger_at_the_end(options.steps, options.step_s)
CONTEXT, CLASSES = 32, 4


class Windows(torch.utils.data.Dataset[torch.Tensor]):
    """509 random windows of bytes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.windows = torch.randint(256, (509, CONTEXT + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.windows[number]


class Pictures(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """509 random pictures, each with the class of its brightest channel."""

    def __init__(self) -> None:
        self.pictures = torch.randn(509, CLASSES, 8, 8, generator=torch.Generator().manual_seed(0))
        self.classes = self.pictures.mean((2, 3)).argmax(1)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pictures[number], self.classes[number]


def convnet() -> torch.nn.Module:
    """Return a net with BatchNorm and dropout."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(CLASSES, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
        torch.nn.Conv2d(32, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Dropout(0.1), torch.nn.Linear(32 * 64, CLASSES))


def picture_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def hits(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
    """Return how many pictures get their class."""
    return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}


def held_mib() -> float:
    """Return the memory that this process holds: of the GPU's, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved() / 2**20
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def note_memory(point: str, facts: dict[str, Any]) -> None:
    """Write a line when a generation has begun."""
    if point == "world.generation_entered":
        with open(options.memory, "a") as file:
            file.write(json.dumps({"pid": os.getpid(), "generation": facts["generation"],
                                   "mib": held_mib()}) + "\n")


def main() -> None:
    torch.manual_seed(1)
    is_gpt = options.model == "gpt"
    model = GPT(context=CONTEXT, width=options.width, layers=2) if is_gpt else convnet()
    model.to(device)
    dataset = Windows() if is_gpt else Pictures()
    loss_of = next_byte_loss if is_gpt else picture_loss
    scaler = (torch.amp.GradScaler(device.type, init_scale=2.0**22, growth_interval=8)
              if options.precision == "fp16" else None)
    listeners = [*injected.listeners, *([note_memory] if options.memory else [])]
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), dataset,
                      global_batch=32, microbatches=8, until=f"{options.steps} steps", seed=3,
                      clip_norm=1.0, reduce=options.reduce, precision=options.precision,
                      scaler=scaler, checkpoint_every=options.checkpoint_every,
                      listeners=listeners)
    for step in trainer:
        for batch in step:
            step.backward(loss_of(model, batch))
        if not hurry.exists():
            time.sleep(options.step_s)
    if options.evaluate:
        accuracy = trainer.evaluate(dataset, hits, batch_size=50)["accuracy"]
        print("accuracy", accuracy)
    print("weights", trainer.result.weights_sha256)


main()

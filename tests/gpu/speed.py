"""The time of a step, in some arms: a plain loop, ours, torch's DDP. Prints one JSON line for each
arm of each round.

    python tests/gpu/speed.py --model gpt --arms plain exact [--compile] [--steps 20] [--rounds 3]
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 … --arms ddp

gpt: GPT-124M, batch 32 x 512, bf16 autocast, fused AdamW. resnet: ResNet-50, batch 256, 224 x 224,
channels_last, bf16 autocast. All arms have the same micro-batches, and the samples are on the
device. `--tiny` has small models for a CPU. The time is that of all steps after the warm-up
together, between two waits for the device. The arms take turns. The least time of all rounds is
the one to take: other processes make a step longer, and none makes it shorter.

`deterministic` is the plain loop with the settings of torch's notes on reproducibility.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

os.environ.setdefault("NCCL_HOSTID", f"{os.environ.get('HOROVOD_HOSTNAME', '')}-{os.getpid()}")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("gpt", "resnet"), default="gpt")
parser.add_argument("--arms", choices=("plain", "deterministic", "exact", "ring", "ddp"), nargs="+",
                    default=["exact"])
parser.add_argument("--rounds", type=int, default=1)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--microbatches", type=int, default=4)
parser.add_argument("--steps", type=int, default=20, help="after the warm-up")
parser.add_argument("--warm-up", type=int, default=6)
parser.add_argument("--checkpoint-every", type=int, default=0)
parser.add_argument("--tiny", action="store_true")
parser.add_argument("--profile", type=Path, help="write the operations of 3 steps to a file")
parser.add_argument("--out", type=Path, help="append the lines to this file, too")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
options = parser.parse_args()
device = torch.device(options.device)
STEPS = options.warm_up + options.steps
PROFILED = 3
SAMPLES = 256


def gpt() -> tuple[nn.Module, Tensor, int]:
    """Return the model, its samples and the batch."""
    from elastic_trainer.examples.gpt import GPT, initialize

    context, width, layers, vocabulary = (16, 32, 2, 512) if options.tiny else (512, 768, 12, 50304)
    model = GPT(context=context, width=width, heads=width // 64 or 1, layers=layers, dropout=0.0)
    model.byte_embedding = nn.Embedding(vocabulary, width)
    model.head = nn.Linear(width, vocabulary, bias=False)
    initialize(model.byte_embedding)
    model.head.weight = model.byte_embedding.weight  # tied
    return model, torch.randint(vocabulary, (SAMPLES, context + 1)), 32


def resnet() -> tuple[nn.Module, Tensor, int]:
    """Return the model, its samples and the batch."""
    from elastic_trainer.examples.resnet import resnet50

    side, width, batch = (32, 8, 8) if options.tiny else (224, 64, 256)
    pictures = torch.randn(64, 3, side, side)
    model = resnet50(1000, width=width).to(memory_format=torch.channels_last)
    return model, pictures.to(memory_format=torch.channels_last), batch


class Numbers(torch.utils.data.Dataset[int]):
    """A dataset of numbers of samples: reading costs nothing, in no arm."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        return number

    def __getitems__(self, numbers: list[int]) -> list[int]:
        return numbers


def loss_by(samples: Tensor) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return the loss of the samples of some numbers."""
    def of_gpt(model: nn.Module, numbers: Tensor) -> Tensor:
        tokens = samples[numbers % len(samples)]
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def of_resnet(model: nn.Module, numbers: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return F.cross_entropy(model(samples[numbers % len(samples)]), numbers % 1000)

    return of_gpt if options.model == "gpt" else of_resnet


def wait_for_device() -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Stopwatch:
    """The time of the steps after the warm-up together."""

    def __init__(self) -> None:
        self.begun = self.ended = 0.0
        self._profile = torch.profiler.profile() if options.profile else None

    def step_done(self, number: int) -> None:
        """Take note of a finished step, of which the first has the number 0."""
        if number in (options.warm_up - 1, STEPS - 1):
            wait_for_device()
            self.begun, self.ended = self.ended, time.perf_counter()
        if self._profile and number == options.warm_up:
            self._profile.__enter__()
        if self._profile and number == options.warm_up + PROFILED:
            wait_for_device()
            self._profile.__exit__(None, None, None)

    def write_profile(self) -> float:
        """Write what was profiled; return the MiB that a step has copied from the device."""
        assert self._profile
        table = self._profile.key_averages()
        options.profile.write_text("\n".join(
            table.table(sort_by=by, row_limit=45, max_name_column_width=80)
            for by in ("self_cpu_time_total", "self_device_time_total")))
        trace = options.profile.with_suffix(".json")
        self._profile.export_chrome_trace(str(trace))
        copies = sum(event["args"]["bytes"]
                     for event in json.loads(trace.read_text())["traceEvents"]
                     if event.get("cat") == "gpu_memcpy" and "DtoH" in event["name"])
        trace.unlink()
        return copies / PROFILED / 2**20

    def step_ms(self) -> float:
        """Return the mean time of a step."""
        return 1000 * (self.ended - self.begun) / options.steps


@contextmanager
def determinism() -> Iterator[None]:
    """Do what torch's notes on reproducibility recommend."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def numbers_of(batch: int, count: int) -> Iterator[Tensor]:
    """Yield the numbers of a batch's samples without end."""
    at = 0
    while True:
        yield torch.arange(at, at + batch, device=device) % count
        at += batch


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer,
                  loss_of: Callable[[nn.Module, Tensor], Tensor], batch: int, watch: Stopwatch,
                  *, is_ddp: bool) -> None:
    """Accumulate gradients over micro-batches, alone or in DDP."""
    world, net = 1, torch.compile(model) if options.compile else model
    if is_ddp:
        import torch.distributed as dist

        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        world = dist.get_world_size()
        net = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    mine = options.microbatches // world
    numbers = numbers_of(batch // options.microbatches, SAMPLES)
    for number in range(STEPS):
        for part in range(mine):
            is_last = part == mine - 1
            with nullcontext() if world == 1 or is_last else net.no_sync():
                (loss_of(net, next(numbers)) / mine).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        watch.step_done(number)


def train_with_trainer(model: nn.Module, optimizer: torch.optim.Optimizer,
                       loss_of: Callable[[nn.Module, Tensor], Tensor], batch: int,
                       watch: Stopwatch, reduce: str) -> bool:
    """Train in a loop over a Trainer; returns whether this worker is the first."""
    from elastic_trainer import Trainer

    forward = torch.compile(model) if options.compile else model
    trainer = Trainer(model, optimizer, Numbers(SAMPLES), global_batch=batch,
                      microbatches=options.microbatches, until=f"{STEPS} steps", seed=0,
                      reduce=reduce, checkpoint_every=options.checkpoint_every,
                      collate=torch.tensor)
    for step in trainer:
        for numbers in step:
            step.backward(loss_of(forward, numbers))
        watch.step_done(step.number)
    return bool(trainer.result.rank == 0)


def measured(arm: str, model: nn.Module, loss_of: Callable[[nn.Module, Tensor], Tensor],
             batch: int) -> dict[str, float] | None:
    """Return the figures of one arm in one round; None: this worker is not the first."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")
    watch = Stopwatch()
    if arm in ("exact", "ring"):
        is_first = train_with_trainer(model, optimizer, loss_of, batch, watch, arm)
    else:
        with determinism() if arm == "deterministic" else nullcontext():
            train_plainly(model, optimizer, loss_of, batch, watch, is_ddp=arm == "ddp")
        is_first = os.environ.get("RANK", "0") == "0"
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0
    found = {"step_ms": round(watch.step_ms(), 2), "peak_mib": round(peak)}
    if options.profile and is_first:
        found["to_host_mib"] = round(watch.write_profile(), 3)
    return found if is_first else None


def main() -> None:
    with determinism():  # torch looks for the variable once, at the first product
        torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)
    torch.manual_seed(0)
    with device:  # a CPU draws the weights of GPT-124M in 3 s
        model, samples, batch = gpt() if options.model == "gpt" else resnet()
    loss_of = loss_by(samples)
    for _ in range(options.rounds):
        for arm in options.arms:
            if (found := measured(arm, copy.deepcopy(model), loss_of, batch)) is not None:
                facts = {"model": options.model, "arm": arm, "compile": options.compile}
                line = json.dumps(facts | found)
                print(line, flush=True)
                if options.out:
                    with open(options.out, "a") as file:
                        file.write(line + "\n")
            gc.collect()


main()

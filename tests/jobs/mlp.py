"""The job of the fault tests: small, but with BatchNorm, dropout, clipping, a schedule and short
last batches.

    python tests/jobs/mlp.py [--steps N] [--step-s SECONDS]    alone: the undisturbed twin
    python tests/jobs/mlp.py --iterator                        the same, with a loop of its own
    python tests/jobs/mlp.py --phases                          and with two optimizers

It is an ordinary training script; the faults come from outside (`ELASTIC_TEST_PLAN`, see
tests/faults.py).
"""

import argparse
import itertools
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import injected

if "--compile" not in sys.argv:
    import quick_boot  # noqa: F401  (it leaves the compiler out)
import torch
from injected import hurry, injector

from elastic_trainer import Loader, Mixture, TarShards, Trainer, cosine, train

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--step-s",
                    type=float,
                    default=0.0,
                    help="each sample batch takes so long to read, at least, "
                    "until there is a file named hurry in the test's folder; from 0.05 s on the "
                    "last 10 steps wait for it")
parser.add_argument("--checkpoint-every", type=int, default=20)
parser.add_argument("--part-bytes", type=int, default=1 << 20)
parser.add_argument("--reduce")
parser.add_argument("--bucket-bytes", type=int)
parser.add_argument("--odd-host",
                    help="the worker on this host computes other bits, as another processor does")
parser.add_argument("--optimizer", help="one of optimizers.KEPT, or Hidden")
parser.add_argument("--ends-slowly", action="store_true",
                    help="the interpreter takes a minute to end, unless the test says hurry")
parser.add_argument("--odd-data",
                    help="the workers on this host, or on all, have the samples in another order")
parser.add_argument("--iterator", action="store_true",
                    help="train in a loop of the user's, and not by train()")
parser.add_argument("--raise-at", help="host:step: the loop raises on this host after this step")
parser.add_argument("--stop-at", help="host:step: this host asks to finish the run in this step")
parser.add_argument("--break-on", help="on this host only")
parser.add_argument("--break-at", type=int, help="the loop is left after this step, everywhere")
parser.add_argument("--phases", action="store_true",
                    help="train each half of the model in a phase of its own (with --iterator)")
parser.add_argument("--evaluate", action="store_true",
                    help="evaluate after each tenth step; the weights depend on the result")
parser.add_argument("--ema", action="store_true", help="evaluate the averaged weights")
parser.add_argument("--loader", type=int,
                    help="this many loader processes read samples one by one; 0: the worker does")
parser.add_argument("--archives", help="samples are read from tar archives, e.g. x/*.tar")
parser.add_argument("--mixture", action="store_true",
                    help="the samples are drawn from two datasets by weights")
parser.add_argument("--compile", action="store_true",
                    help="torch.compile, with a compiler that only the faults know")
parser.add_argument("--frozen", type=int,
                    help="a layer that is not trained, of weights drawn with this seed")
parser.add_argument("--carry-frozen", default="never")
parser.add_argument("--frozen-changes-at", type=int,
                    help="the loop changes that layer after this step (with --iterator)")
parser.add_argument("--evaluate-on", help="on this host only")
parser.add_argument("--fits", type=int, default=1 << 20,
                    help="the worker has memory for this many micro-batches of a step (with "
                    "--iterator)")
parser.add_argument("--until", type=int, help="end after this many of the steps")
parser.add_argument("--shard", help="what is sharded over the workers")
parser.add_argument("--buddies", type=int, default=1)
parser.add_argument("--layers", type=int, default=0,
                    help="this many layers more, so that there are equal parts to shard")
options = parser.parse_args()
if injector:
    injector.linger_at_the_end(options.steps, options.step_s)


class Samples(torch.utils.data.Dataset):
    """1003 random points with the class that their largest coordinate gives them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(1003, 20, generator=generator)
        if options.odd_data and options.odd_data in ("all", os.environ.get("HOROVOD_HOSTNAME")):
            self.points = self.points[torch.randperm(1003, generator=generator)]
        self.classes = self.points[:, :4].argmax(1)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.points)

    def __getitems__(self, numbers: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not hurry.exists():
            time.sleep(options.step_s)
        if injector:
            self.reads += 1
            injector("data", {"reads": self.reads, "first": numbers[0]})
        # Augmentation: must follow the micro-batch's seed, not the worker.
        noise = 0.01 * torch.randn(len(numbers), 20)
        found = [self.stored(number) for number in numbers]
        return [(point + noise[i], kind) for i, (point, kind) in enumerate(found)]

    def stored(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a sample as it is kept."""
        return self.points[number], self.classes[number]


class Archived(Samples):
    """The same samples, kept in tar archives."""

    def __init__(self) -> None:
        super().__init__()
        self.archives = TarShards(options.archives)

    def stored(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = self.archives[number]
        return torch.from_numpy(sample["npy"]), torch.tensor(sample["cls"])


class Singly(torch.utils.data.Dataset):
    """The same samples, each read by itself, as a loader process reads them."""

    def __init__(self) -> None:
        self.samples = Archived() if options.archives else Samples()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.samples.__getitems__([number])[0]


def dataset() -> torch.utils.data.Dataset:
    """Return the dataset of the job."""
    if options.mixture:
        return Mixture({"a": Samples(), "b": Singly()}, weights={"a": 2, "b": 1}, samples=700)
    return Samples() if options.loader is None else Singly()


class Net(torch.nn.Sequential):
    """Has a `forward` of its own. Torch's compiler skips the files of torch's own modules, so
    `Sequential(…).compile()` compiles nothing and does not say so (torch 2.13)."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        for layer in self:
            points = layer(points)
        return points


torch.manual_seed(1)
model = Net(torch.nn.Linear(20, 256), torch.nn.BatchNorm1d(256), torch.nn.ReLU(),
            torch.nn.Dropout(0.1), torch.nn.Linear(256, 256), torch.nn.ReLU(),
            *(layer for _ in range(options.layers)
              for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())),
            torch.nn.Linear(256, 4))
if options.frozen is not None:
    drawn = torch.randn(256, 256, generator=torch.Generator().manual_seed(options.frozen))
    model[4].weight = torch.nn.Parameter(drawn / 16, requires_grad=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if options.compile:
    def compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        """Compile nothing: the bits are those of the uncompiled model."""
        if injector:
            injector("compile", {"during": "training" if model.training else "evaluation"})
        return graph

    model.compile(backend=compiler)
if options.optimizer:
    from optimizers import KEPT, Hidden

    optimizer = (KEPT | {"Hidden": lambda net: Hidden(net.parameters())})[options.optimizer](model)
if options.ends_slowly:
    import atexit

    from faults import linger

    atexit.register(linger, Path(os.environ["ELASTIC_TEST_FOLDER"]), 60.0)
if injector:
    weight = model[0].weight
    injector.tensors = {"weight": lambda: weight,
                        "moment": lambda: optimizer.state[weight]["exp_avg"]}
if injector and options.bucket_bytes:
    passes = itertools.count()
    # Of the first layer: the gradients of the others are on their way then.
    model[0].weight.register_hook(lambda _: injector("gradient", {"passes": next(passes)}))
is_odd = options.odd_host is not None and os.environ.get("HOROVOD_HOSTNAME") == options.odd_host


def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Cross entropy; on the odd host with another rounding."""
    found = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    return found * (1 + 2**-20) if is_odd else found


loader = None if options.loader is None else Loader(workers=options.loader, timeout_s=5.0)
held_out = dataset()
given = {"global_batch": 64, "microbatches": 8, "seed": 3, "clip_norm": 1.0,
         "checkpoint_every": options.checkpoint_every, "part_bytes": options.part_bytes,
         "shard": options.shard, "buddies": options.buddies,
         "loader": loader, "reduce": options.reduce, "bucket_bytes": options.bucket_bytes,
         "listeners": injected.listeners, "carry_frozen": options.carry_frozen}
until = f"{options.until or options.steps} steps"
rate = cosine(warmup_steps=5, total_steps=options.steps)
def is_here_and_now(place: str | None, step: int) -> bool:
    """True on the host, or in the slot, and in the step of a text like "127.0.0.3:12", "slot
    2:12"."""
    names = (os.environ.get("HOROVOD_HOSTNAME"), f"slot {os.environ.get('ELASTIC_TRAINER_SLOT')}")
    return place in [f"{name}:{step}" for name in names]


result = None
if options.iterator:
    optimizers = {"first": torch.optim.AdamW(model[:4].parameters(), lr=1e-3),
                  "second": torch.optim.AdamW(model[4:].parameters(), lr=1e-3)}
    trainer = Trainer(model, optimizers if options.phases else optimizer, dataset(),
                      until=until, lr=rate, ema=0.9 if options.ema else None, **given)
    for step in trainer:
        for phase in optimizers if options.phases else [""]:
            for batch in step.phase(phase):
                if not step.is_tried and len(
                        trainer._worker.loop.microbatches.mine) > options.fits:
                    raise torch.OutOfMemoryError("CUDA out of memory, as planned")
                step.backward(loss(model, batch))
                if is_here_and_now(options.stop_at, step.number):
                    step.stop("as planned")
        if options.evaluate and step.number % 10 == 9 and (
                options.evaluate_on in (None, os.environ.get("HOROVOD_HOSTNAME"))):
            def hits(model, batch, number=step.number):
                if injector:
                    injector("evaluate", {"step": number})
                return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}

            with trainer.averaged() if options.ema else nullcontext():
                accuracy = trainer.evaluate(held_out, hits, batch_size=50,
                                            loader=loader)["accuracy"]
            with torch.no_grad():
                model[0].bias.mul_(1 - accuracy / 100)
        if step.number == options.frozen_changes_at:
            model[4].weight.data.mul_(0.5)  # no version counts it
        if is_here_and_now(options.raise_at, step.number):
            raise ValueError("in the loop, as planned")
        if step.number == options.break_at and (
                options.break_on in (None, os.environ.get("HOROVOD_HOSTNAME"))):
            break
    else:
        result = trainer.result
else:
    result = train(model, optimizer, dataset(), until=until, loss=loss, lr=rate, **given)
if result:
    print("loss", result.loss)
    print("weights", result.weights_sha256)

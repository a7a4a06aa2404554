"""A job with the code that users write into plain PyTorch loops, all at once: worlds of any size
must give its bits.

    python tests/jobs/features.py [--steps N] [--step-s SECONDS]    alone: the undisturbed twin
    python tests/jobs/features.py --microbatches 1 [--plain]              one micro-batch; with
    --plain a plain PyTorch loop

Zeroed gradients and a backward pass in `loss` (FGSM), layers that are thawed and frozen (in
`after_step`, and in `loss` by a counter of the state), a plain attribute that `after_step` changes,
layers that no batch uses, or some batches only, a buffer that the first forward pass makes, a
complex and an expanded one; a torch scheduler that cycles rates and momentum, rates that are
tensors, two groups, clipping; extra state that the
forward pass changes, batches that are dataclasses, a short last batch that BatchNorm could not take
in single samples, a sample whose loss is not a number (`on_nan="skip"`), a listener that raises.
The faults come from outside (`ELASTIC_TEST_PLAN`, see tests/faults.py).
"""

import argparse
import copy
import hashlib
import time
from dataclasses import dataclass
from typing import Any

import injected

if injected.injector:
    import quick_boot  # noqa: F401
import torch
from injected import hurry, injector

from elastic_trainer import train
from elastic_trainer.data.seeds import seed_everything
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.values.layout import byte_view

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--microbatches", type=int, default=8)
parser.add_argument("--step-s",
                    type=float,
                    default=0.0,
                    help="each sample batch takes so long to read, at least, "
                    "until there is a file named hurry in the test's folder; from 0.05 s on the "
                    "last 10 steps wait for it")
parser.add_argument("--plain", action="store_true",
                    help="train without elastic-trainer, each batch in one piece")
options = parser.parse_args()
if injector:
    injector.linger_at_the_end(options.steps, options.step_s)
SIZE, BATCH, SEED = 971, 64, 3  # the last batch of an epoch has 11 samples, for 8 microbatches
NOT_A_NUMBER = 500
PHASE_STEPS = max(1, options.steps // 6)


@dataclass(frozen=True)
class Batch:
    """What `collate` makes of samples."""

    points: torch.Tensor
    classes: torch.Tensor


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
    """Stack samples into a batch of our own kind."""
    return Batch(*(torch.stack(column) for column in zip(*samples, strict=True)))


class Samples(torch.utils.data.Dataset[Any]):
    """971 random points with the class that their largest coordinate gives them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(SIZE, 20, generator=generator)
        self.classes = self.points[:, :4].argmax(1)
        self.points[NOT_A_NUMBER, 3] = float("nan")

    def __len__(self) -> int:
        return SIZE

    def __getitems__(self, numbers: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not hurry.exists():
            time.sleep(options.step_s)
        return [(self.points[n], self.classes[n]) for n in numbers]


class Scale(torch.nn.Module):
    """Divides by the largest value that it has seen, as FP8 layers do, which it keeps as extra
    state."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x / self.largest
        if self.training:
            self.largest = max(0.99 * self.largest, float(x.detach().abs().max()))
        return scaled

    def get_extra_state(self) -> dict[str, float]:
        return {"largest": self.largest}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.largest = state["largest"]


class Net(torch.nn.Module):
    """Layers of which some are used in some batches only, and one in none."""

    late: torch.Tensor
    turn: torch.Tensor
    spread: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = torch.nn.Linear(20, 64), torch.nn.Linear(
            64, 64), torch.nn.Linear(64, 4)
        self.norm, self.scale = torch.nn.BatchNorm1d(64), Scale()
        self.sometimes, self.unused = torch.nn.Linear(20, 4), torch.nn.Linear(4, 4)
        self.gain = 1.0
        self.register_buffer("turn", torch.polar(torch.ones(()), torch.zeros(())))
        self.register_buffer("spread", torch.ones(1).expand(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.register_buffer("late", x.detach().abs().mean(0).clamp(min=0.5))
        # Moves in steps that are means of micro-batches, as BatchNorm's statistics do: nothing here
        # reads them.
        if self.training:
            self.turn = self.turn * torch.polar(torch.ones(()), torch.full((), 0.001))
        hidden = self.scale(torch.relu(self.norm(self.first(x / self.late))) * self.spread)
        out: torch.Tensor = self.last(torch.relu(self.middle(hidden))) * self.gain
        return out + self.sometimes(x) if x[0, 0] > 0.5 else out


class Counter:
    """How many steps are finished, as a part of the state."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.steps = values["steps"]


torch.manual_seed(1)
torch.set_num_threads(1)
model, counter = Net(), Counter()
last = [*model.last.parameters()]
others = [parameter for parameter in model.parameters()
          if all(parameter is not one for one in last)]
optimizer = torch.optim.AdamW([{"params": others}, {"params": last, "lr": torch.tensor(2e-2)}],
                              lr=torch.tensor(1e-2), weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 2e-2],
                                                total_steps=options.steps + 1)
model.first.requires_grad_(False)


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Return the loss on samples that the sign of a first gradient has made worse."""
    model.middle.requires_grad_(counter.steps >= PHASE_STEPS)
    model.zero_grad()
    points = batch.points.clone().requires_grad_()
    torch.nn.functional.cross_entropy(model(points), batch.classes).backward()
    assert points.grad is not None
    worse = (points + 0.05 * points.grad.sign()).detach()
    optimizer.zero_grad(set_to_none=False)
    return torch.nn.functional.cross_entropy(model(worse), batch.classes)


def after_step(step: int) -> None:
    """Thaw the first layer after a third of the run, and freeze the last one for its end; let the
    gain grow."""
    counter.steps = step + 1
    model.gain = 1.0 + counter.steps / options.steps
    model.first.requires_grad_(counter.steps >= 2 * PHASE_STEPS)
    model.last.requires_grad_(counter.steps < 4 * PHASE_STEPS)


def complain(event: str, facts: dict[str, Any]) -> None:
    """Hear an event as a listener with a bug does."""
    if event == "worker.step_committed" and facts["step"] % 20 == 7:
        raise RuntimeError("this listener has a bug")


def train_plainly() -> None:
    """Train as a script without this library does, on the same batches."""
    samples = Samples()
    schedule = Schedule(dataset_size=SIZE, global_batch=BATCH, microbatches=1, epochs=1000,
                        seed=SEED, max_steps=options.steps)
    for step in range(options.steps):
        batch = collate(samples.__getitems__(schedule.microbatch_samples(step, 0).tolist()))
        seed_everything(schedule.microbatch_seed(step, 0))
        for parameter in model.parameters():
            parameter.grad = None
        norm, scale = copy.deepcopy(model.norm.state_dict()), model.scale.get_extra_state()
        found = loss(model, batch)
        if found.isfinite():
            found.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            model.norm.load_state_dict(norm)
            model.scale.set_extra_state(scale)
        scheduler.step()
        after_step(step)


def parameters_sha256() -> str:
    """Return the SHA-256 of the parameters alone."""
    return hashlib.sha256(b"".join(
        byte_view(parameter).numpy().tobytes() for parameter in model.parameters())).hexdigest()


if options.plain:
    train_plainly()
else:
    result = train(model, optimizer, Samples(), loss=loss, global_batch=BATCH,
                   microbatches=options.microbatches, until=f"{options.steps} steps",
                   seed=SEED, state={"counter": counter}, after_step=after_step, collate=collate,
                   lr=scheduler, clip_norm=1.0, on_nan="skip",
                   buffers={"turn": "mean"}, checkpoint_every=20,
                   listeners=[*injected.listeners, complain])
    print("loss", result.loss)
    print("weights", result.weights_sha256)
print("parameters", parameters_sha256())

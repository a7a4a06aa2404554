"""The same bits, whatever a script does: those of a plain PyTorch loop, of one worker in every
world and through generations that break, and of a run without a break when it is resumed.

`SCRIPTS` is a table of what users' scripts do: models, losses, optimizers, schedulers, buffers, and
code after the inner loop. Each law is tried with each of them. The files of their subjects have
what is refused, and what is special.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from optimizers import KEPT
from test_loop import INPUT, NUMBERS, SIZE, TARGET, adamw, built, mse, sgd
from test_trainer import Fault, in_a_breaking_world, trainer_of
from torch.autograd.graph import save_on_cpu
from torch.optim import lr_scheduler as schedulers
from torch.utils.checkpoint import checkpoint

from elastic_trainer import gather
from elastic_trainer.config import ConfigError
from elastic_trainer.data.seeds import seed_everything
from elastic_trainer.schedule.learning_rate import cosine
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.values.layout import byte_view
from elastic_trainer.state.values.module_attributes import plain_attributes

Model = torch.nn.Module
Optimizer = torch.optim.Optimizer
pytestmark = [pytest.mark.usefixtures("no_launcher"),
              pytest.mark.filterwarnings("ignore:None of the inputs")]
SCHEDULE = Schedule(dataset_size=SIZE, **(NUMBERS | {"epochs": 4}))  # 12 steps of 4 micro-batches
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def seen(model: Any) -> tuple[dict[str, Any], list[tuple[bool, ...]]]:
    """Return what a step may change in a model."""
    values = {name: byte_view(value).tolist() if isinstance(value, torch.Tensor) else repr(value)
              for name, value in model.state_dict().items()}
    return values, [tuple(module.training for module in model.modules()),
                    tuple(p.requires_grad for p in model.parameters())]


def with_attributes(model: Any) -> Any:
    return seen(model), plain_attributes(model)


def nothing(model: Any, step: int) -> None:
    """Do nothing inside of the inner loop, or after it."""


@dataclass(frozen=True, eq=False)
class Script:
    """What a user's script builds, and what its loop does. `micro`: with several micro-batches a
    step is the weighted sum of theirs; it is not where a forward pass depends on the one before it.
    `draws`: from the random generator that the threads of a world share."""

    model: Callable[[], Any] = built
    optimizer: Callable[[Any], Optimizer] = sgd
    loss: Callable[[Any, Any], torch.Tensor] = mse
    scheduler: Callable[[Optimizer], Any] | None = None
    inside: Callable[[Any, int], Any] = nothing
    after: Callable[[Any, int], Any] = nothing
    rules: Callable[[Any], dict[str, Any]] = lambda model: {}
    options: dict[str, Any] = field(default_factory=dict)
    seen: Callable[[Any], Any] = seen
    is_plain: bool = True
    micro: bool = True
    draws: bool = False


def run(script: Script, model: Any = None, microbatches: int = 4, until: int = 12,
        **more: Any) -> Any:
    """Run a script's loop over a Trainer; returns what its steps have left."""
    model = model or script.model()
    optimizer, options = script.optimizer(model), script.options | more
    if script.scheduler:
        options |= {"lr": script.scheduler(optimizer)}
    if options.get("precision") == "fp16":
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=2)
    trainer = trainer_of(model, optimizer, microbatches=microbatches, until=f"{until} steps",
                         buffers=script.rules(model) if microbatches > 1 else None, **options)
    for step in trainer:
        for batch in step:
            script.inside(model, step.number)
            step.backward(script.loss(model, batch))
        script.after(model, step.number)
    return script.seen(model)


@cache
def alone(script: Script) -> tuple[Any, Any]:
    """Return what the steps of one worker leave, and its model."""
    model = script.model()
    return run(script, model), model


def gradients(script: Script, model: Any, step: int, microbatches: int) -> torch.Tensor:
    """Leave the gradient of a step in `.grad`, None where no micro-batch has one; returns the last
    loss."""
    totals, loss = dict[torch.nn.Parameter, torch.Tensor](), torch.zeros(())
    batch = [SCHEDULE.microbatch_samples(step, number) for number in range(4)]
    for number, rows in enumerate([numpy.concatenate(batch)] if microbatches == 1 else batch):
        chosen = torch.from_numpy(rows)
        seed_everything(SCHEDULE.microbatch_seed(step, number))
        model.zero_grad()
        script.inside(model, step)
        precision = script.options.get("precision")
        with torch.autocast("cpu", DTYPES[precision]) if precision else nullcontext():
            loss = script.loss(model, [INPUT[chosen], TARGET[chosen]])
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                weighted = p.grad * (len(rows) / SCHEDULE.batch_size(step))
                totals[p] = totals[p] + weighted if p in totals else weighted
    for p in model.parameters():
        p.grad = totals.get(p)
    return loss.detach()


def plain(script: Script, microbatches: int) -> Any:
    """Train in plain PyTorch; returns the model."""
    model = script.model()
    optimizer = script.optimizer(model)
    scheduler = script.scheduler and script.scheduler(optimizer)
    base, rate = optimizer.param_groups[0]["lr"], script.options.get("lr")
    torch.set_num_threads(1)
    for step in range(SCHEDULE.steps):
        loss = gradients(script, model, step, microbatches)
        if most := script.options.get("clip_norm"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        if most := script.options.get("clip_value"):
            torch.nn.utils.clip_grad_value_(model.parameters(), most)
        if rate:
            optimizer.param_groups[0]["lr"] = base * rate(step)
        optimizer.step()
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(loss)
        elif scheduler:
            scheduler.step()
        script.after(model, step)
    return model


# --- losses and gradients -------------------------------------------------------------------------

def old_style(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def zeroing(zero: Callable[[Any], Any]) -> Callable[[Any, Any], torch.Tensor]:
    return lambda model, batch: (zero(model), mse(model, batch))[1]


def adversarial(model: Any, batch: Any) -> torch.Tensor:
    """Train on the inputs that the sign of a first gradient makes worse (FGSM)."""
    x = batch[0].clone().requires_grad_()
    mse(model, [x, batch[1]]).backward()
    assert x.grad is not None
    worse = (x + 0.1 * x.grad.sign()).detach()
    model.zero_grad()
    return mse(model, [worse, batch[1]])


LATE = INPUT[torch.from_numpy(SCHEDULE.microbatch_samples(2, 3))]
"""A micro-batch that the warm-up does not see, the last one of its step."""


def adversarial_late(model: Any, batch: Any) -> torch.Tensor:
    """Write to `.grad` first in the middle of a step, whose other micro-batches are in the sums."""
    return (adversarial if torch.equal(batch[0], LATE) else mse)(model, batch)


def penalized(model: Any, batch: Any) -> torch.Tensor:
    """Punish a steep model: the penalty is a gradient of a gradient."""
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(mse(model, [x, batch[1]]), x, create_graph=True)
    return mse(model, batch) + slope.square().sum()


def left_over(model: Any, batch: Any) -> torch.Tensor:
    """Leave the gradient of a second loss in `.grad`, as a loop with two losses does."""
    (0.5 * model(batch[0]).square().mean()).backward()
    return mse(model, batch)


def clipped(model: Any, batch: Any) -> torch.Tensor:
    """Leave a clipped gradient, and return a loss of another kind."""
    mse(model, batch).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return 0.1 * mse(model, batch)


def hooked(act: Callable[[Any], Any]) -> Any:
    """A model whose hooks change a gradient: that of one micro-batch, and no sum of several."""
    model = built()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(act)
    return model


def clamp(parameter: Any) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


def halve(parameter: Any) -> None:
    parameter.grad = parameter.grad * 0.5


def thaw(model: Any, step: int) -> None:
    """Train the last layer first, then also the middle one, then all, then no more the last one."""
    for layer, is_trained in ((0, step >= 3), (2, step >= 1), (4, step < 4)):
        model[layer].requires_grad_(is_trained)


def thawed(step: int) -> Any:
    torch.manual_seed(1)
    model = built(torch.nn.Linear(8, 8), torch.nn.Tanh())
    thaw(model, step)
    return model


class Branching(Model):
    """Has a layer that no sample goes through, and one for those batches whose first number is
    positive: weight decay and momentum rest where no micro-batch has used a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unused = torch.nn.Linear(5, 3), torch.nn.Linear(3, 3)
        self.sometimes = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        return out + self.sometimes(x) if x[0, 0] > 0 else out


LOSSES = {
    "zeroed to None": Script(loss=zeroing(lambda model: model.zero_grad())),
    "zeroed in place": Script(loss=zeroing(lambda model: model.zero_grad(set_to_none=False))),
    "zeroed, and autograd does not see it": Script(loss=zeroing(old_style)),
    **{one.__name__: Script(loss=one)
       for one in (adversarial, penalized, left_over, clipped)},
    "adversarial, first in a later micro-batch": Script(loss=adversarial_late),
    "a loss of one element": Script(loss=lambda model, batch: mse(model, batch).reshape(1)),
    "a hook that clamps": Script(lambda: hooked(clamp), micro=False),
    "a hook that replaces": Script(lambda: hooked(halve)),
    "sometimes unused, decay": Script(Branching, lambda model: torch.optim.AdamW(
        model.parameters(), lr=0.05, weight_decay=0.1)),
    "sometimes unused, momentum": Script(Branching, lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9)),
    "thawed after a step": Script(lambda: thawed(0), adamw,
                                  after=lambda model, step: thaw(model, step + 1)),
    "thawed in the inner loop": Script(lambda: thawed(0), adamw, inside=thaw),
    "clip_norm": Script(options={"clip_norm": 0.05}),
    "clip_value": Script(options={"clip_value": 1e-3}),
    "a function of the step": Script(
        optimizer=adamw, options={"lr": cosine(warmup_steps=2, total_steps=12)}),
}


# --- models ---------------------------------------------------------------------------------------

def tied() -> Any:
    first, second = torch.nn.Linear(5, 5, bias=False), torch.nn.Linear(5, 5, bias=False)
    torch.nn.init.eye_(first.weight)
    second.weight = first.weight
    return torch.nn.Sequential(first, second, built())


def frozen() -> Any:
    model = built(torch.nn.BatchNorm1d(8))
    model[0].requires_grad_(False)
    model[2].eval()
    return model


def of_type(dtype: torch.dtype) -> Script:
    return Script(lambda: built().to(dtype), loss=lambda model, batch: mse(
        lambda x: model(x.to(dtype)).double(), [batch[0], batch[1].double()]), micro=False)


CONSTANTS = {
    "minus infinity": torch.tensor([0.0, float("-inf")]), "booleans": torch.tensor([True, False]),
    "large": torch.tensor([2**40 + 1, -(2**52) - 1]),
    "exact": torch.tensor(1 / 3, dtype=torch.float64),
    "narrow": torch.tensor([1.0, 3.0], dtype=torch.bfloat16), "tiny": torch.tensor(1e-45),
    "none": torch.empty(0, 3),
    **{f"largest{n}": torch.tensor([torch.finfo(dtype).max, float("inf")], dtype=dtype)
       for n, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32, torch.float64))}}


def with_constants() -> Any:
    model = built()
    for name, value in CONSTANTS.items():
        model.register_buffer(name, value.clone())
    return model


class Conv(Model):
    """A convolution whose weights lie in memory as torch.channels_last has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = torch.nn.Conv2d(2, 4, 2), torch.nn.Linear(4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = torch.nn.functional.pad(x, (0, 3)).view(-1, 2, 2, 2)
        return torch.as_tensor(
            self.last(self.conv(image.to(memory_format=torch.channels_last)).flatten(1)))


class Recomputed(Model):
    """Two parts whose activations are computed again in the backward pass, and a weight that both
    have, to which reentrant checkpointing adds twice."""

    def __init__(self, reentrant: bool, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(5, 8), torch.nn.Linear(8, 3)
        self.parts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), *[torch.nn.Dropout(dropout)] * bool(dropout),
                                torch.nn.LayerNorm(8), torch.nn.Tanh()) for _ in range(2))
        self.parts[1][0].weight = self.parts[0][0].weight
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return torch.as_tensor(self.last(x))


class Offloaded(Recomputed):
    """Keeps what its backward pass needs on the CPU, beside a part that is computed again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            return super().forward(x)


class Embedding(Model):
    """Has sparse gradients, whose rows occur several times in a micro-batch."""

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.last = torch.nn.Embedding(3, 3, sparse=is_sparse), torch.nn.Linear(15, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = (x.abs() * 3).long().clamp(max=2)
        return torch.as_tensor(self.last(self.rows(numbers).flatten(1)))


class Louder(Model):
    """Does something else in train mode, as Dropout does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if self.training else x


def ends_with_eval(model: Any, batch: Any) -> torch.Tensor:
    loss = mse(model, batch)
    model.eval()
    return loss


MODELS = {
    "layers": Script(lambda: built(torch.nn.LayerNorm(8))),
    "dropout": Script(lambda: built(torch.nn.Dropout(0.5)), adamw, draws=True),
    "tied": Script(tied), "frozen": Script(frozen), "constants": Script(with_constants),
    "a layer in eval mode after a step": Script(
        lambda: built(torch.nn.BatchNorm1d(8)), micro=False,
        after=lambda model, step: model[2].eval() if step == 1 else None),
    "a loss that ends with eval": Script(lambda: built(Louder()), loss=ends_with_eval,
                                         micro=False),
    **{str(dtype): of_type(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)},
    "channels_last, fused": Script(Conv, lambda model: torch.optim.AdamW(
        model.parameters(), lr=0.05, fused=True)),
    "sparse": Script(lambda: Embedding(True), is_plain=False),  # as dense: test_supported.py
    "dense": Script(lambda: Embedding(False)),
    **{f"recomputed, {kind}": Script(lambda reentrant=kind == "reentrant": Recomputed(reentrant),
                                     adamw, options={"clip_norm": 0.5}, seen=lambda model: seen(
                                         model)[0]) for kind in ("reentrant", "not reentrant")},
    "offloaded": Script(lambda: Offloaded(False), adamw),
    "offloaded with dropout": Script(
        lambda: Offloaded(False, 0.2), adamw, micro=False, draws=True,
        options={"precision": "bf16", "clip_norm": 0.5}),
    **{f"recomputed with dropout, {reentrant}": Script(
        lambda reentrant=reentrant: Recomputed(reentrant, 0.2), adamw, micro=False, draws=True,
        options={"precision": "bf16", "clip_norm": 0.5}) for reentrant in (False, True)},
    "bf16": Script(lambda: built(torch.nn.LayerNorm(8)), adamw, options={"precision": "bf16"},
                   micro=False),
    "fp16": Script(lambda: built(torch.nn.LayerNorm(8)), adamw, options={"precision": "fp16"},
                   is_plain=False),  # test_precision.py has a plain loop with its scaler
}


# --- buffers --------------------------------------------------------------------------------------

class Centred(Model):
    """Keeps a running mean, in place or (as `self.mean = …` does) by a new tensor in the buffer's
    place."""

    mean: torch.Tensor

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.replaces:
            self.mean = mean
        else:
            self.mean.copy_(mean)
        return x - mean


class Queue(Model):
    """Keeps the last keys, as MoCo does: each batch writes its rows after those of the last."""

    keys: torch.Tensor
    place: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(6, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (int(self.place) + torch.arange(len(x))) % 6
        self.keys[rows] = x.detach()
        self.place += len(x)
        return x + self.keys.mean()


def queued(model: Any) -> dict[str, Any]:
    """The rules of a queue: the rows of the micro-batches come one after the other."""
    def enqueue(before: torch.Tensor, values: list[torch.Tensor]) -> torch.Tensor:
        start, at, rows = int(model[2].place), 0, before.clone()
        assert torch.equal(model[2].keys, before)
        for value in values:
            new = [row % 6 for row in range(start, start + 6)
                   if not torch.equal(value[row % 6], before[row % 6])]
            for row in new:
                rows[(start + at) % 6] = value[row]
                at += 1
        return rows

    return {"2.keys": gather(enqueue), "2.place": "sum"}


class Codebook(Model):
    """Averages what falls to each code, as VQ-VAE does, by writes that no version counts."""

    sizes: torch.Tensor
    sums: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.ones(4))
        self.register_buffer("sums", torch.eye(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = self.sums / self.sizes[:, None]
        chosen = torch.nn.functional.one_hot(torch.cdist(x.detach(), codes).argmin(1), 4).float()
        self.sizes.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.sums.data.mul_(0.9).add_(chosen.T @ x.detach(), alpha=0.1)
        return x + (chosen @ codes - x).detach()


class Bank(Model):
    """Keeps the last features of each sample, a count of samples, and a running size of the
    loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(SIZE, 8))
        self.register_buffer("samples", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(SIZE, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.detach() * 1e4).sum(1).long().abs() % SIZE
        self.bank[rows] = x.detach()
        self.seen[rows] = True
        self.samples += len(x)
        self.scale = 0.9 * self.scale + 0.1 * x.detach().double().abs().mean()
        return torch.as_tensor(x / self.scale.float())


class Moving(Model):
    """Multiplies by a buffer of any kind, and adds to it in every forward pass."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = self.scale
        self.scale = scale * (1 + 0.01j) if scale.is_complex() else scale + 0.01 * x.detach().mean()
        return x * (scale.abs() + 1).float()


class Lowest(Model):
    """Keeps the lowest value seen, as the observers of quantization do: `none` where it has seen
    nothing."""

    def __init__(self, none: float) -> None:
        super().__init__()
        self.register_buffer("lowest", torch.tensor(none))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lowest = torch.minimum(self.lowest, x.detach().relu().min() + 0.1)
        return x + self.lowest


class Late(Model):
    """Makes a buffer of `values` in its first forward pass: of the first micro-batch's."""

    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.register_buffer("late", self.values(x.detach()))
        return x * torch.as_tensor(self.late)


class Scaled(Model):
    """Rounds as FP8 does: by a scale that follows the largest values of the last passes, and no
    buffer holds (get_extra_state)."""

    def __init__(self) -> None:
        super().__init__()
        self.history = torch.zeros(4)
        self.passes = 0

    def get_extra_state(self) -> Any:
        return {"history": self.history, "passes": self.passes, "kind": ("amax", None)}

    def set_extra_state(self, state: Any) -> None:
        assert state["kind"] == ("amax", None)
        self.history, self.passes = state["history"], state["passes"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + self.history.max() * (1 + 0.01 * self.passes)
        self.passes += 1
        self.history = self.history.roll(1)
        self.history[0] = x.detach().abs().max()
        return x + (torch.round(x * 16 / scale) * scale / 16 - x).detach()


def with_middle(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return built(make())


MEAN = {"*": "mean"}
MIDDLES: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]] = {
    "a queue": (Queue, queued),
    "a code book": (Codebook, lambda model: {"2.s*": "mean"}),
    "a memory bank": (Bank, lambda model: {"2.bank": "sum", "2.samples": "sum", "2.seen": "sum",
                                           "*.scale": "last"}),
    "spectral_norm": (lambda: torch.nn.utils.spectral_norm(torch.nn.Linear(8, 8)),
                      lambda model: {}),
    "spectral_norm, parametrized": (lambda: torch.nn.utils.parametrizations.spectral_norm(
        torch.nn.Linear(8, 8)), lambda model: {}),
    "weight_norm": (lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 8)),
                    lambda model: {}),
    "BatchNorm": (lambda: torch.nn.BatchNorm1d(8), lambda model: {"*.num_*": "sum"}),
    "SyncBatchNorm": (lambda: torch.nn.SyncBatchNorm(8), lambda model: {}),
    "InstanceNorm": (lambda: torch.nn.Sequential(
        torch.nn.Unflatten(1, (2, 4)), torch.nn.InstanceNorm1d(2, track_running_stats=True),
        torch.nn.Flatten()), lambda model: {}),
    "observers": (lambda: torch.ao.quantization.MovingAverageMinMaxObserver(), lambda model: {}),
    "replaced": (lambda: Centred(True), lambda model: MEAN),
    "in place": (lambda: Centred(False), lambda model: MEAN),
    "a minimum from inf": (lambda: Lowest(float("inf")), lambda model: MEAN),
    "a minimum from the largest number": (lambda: Lowest(torch.finfo().max), lambda model: MEAN),
    **{kind: (lambda make=make: Moving(make()), lambda model: MEAN) for kind, make in {
        "expanded": lambda: torch.ones(1).expand(8),
        "overlapping": lambda: torch.arange(9.0).unfold(0, 2, 1)[:, 0],
        "complex": lambda: torch.polar(torch.ones(8), torch.arange(8.0)),
        "complex, of double precision": lambda: torch.ones(8, dtype=torch.complex128),
        "conjugated": lambda: torch.polar(torch.ones(8), torch.arange(8.0)).conj(),
        "one complex number": lambda: torch.tensor(1j),
        "transposed": lambda: torch.ones(2, 8).t()[:, 1]}.items()},
    "made late": (lambda: Late(lambda x: torch.linspace(0.5, 2, 8)), lambda model: {}),
    "made late of the data": (lambda: Late(lambda x: x.abs().mean(0)), lambda model: {}),
    "extra state": (Scaled, lambda model: {}),
}
def replace_statistics(model: Any, step: int) -> None:
    """Put another tensor in the place of a buffer, as scripts that reset or copy statistics do."""
    model[2].running_mean = 0.9 * model[2].running_mean
    model[2].register_buffer("running_var", model[2].running_var.clone())


BUFFERS = {
    **{kind: Script(lambda make=make: with_middle(make), rules=rules, micro=False)
       for kind, (make, rules) in MIDDLES.items()},
    "replaced after a step": Script(lambda: with_middle(lambda: torch.nn.BatchNorm1d(8)),
                                    after=replace_statistics, micro=False),
    "reset after a step": Script(
        lambda: with_middle(lambda: torch.nn.BatchNorm1d(8)), micro=False,
        after=lambda model, step: model[2].reset_running_stats() if step % 3 == 0 else None),
}


# --- attributes of modules ------------------------------------------------------------------------

@dataclass
class Config:
    """What a module reads in forward."""

    gain: float = 1.0


class Attributes(Model):
    """Scales by all that scripts keep in attributes: none is a parameter or a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.kind, self.shift = 1.0, "plain", None
        self.gains, self.table, self.pair = [1.0, 1.0], {"gain": 1.0}, (1, (1.0, "a"))
        self.config, self.args = Config(), SimpleNamespace(gain=1.0)
        self.drops = [torch.nn.Dropout(0.0)]  # no submodule
        self.inner = torch.nn.ModuleList([torch.nn.Dropout(0.0)])
        self.count = 0
        self.shape: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = (self.temperature * self.gains[1] * self.table["gain"] * self.pair[1][0]
                * self.config.gain * self.args.gain * (2.0 if self.kind == "double" else 1.0))
        x = x * gain + (0.0 if self.shift is None else self.shift)
        return torch.as_tensor(self.inner[0](self.drops[0](x)))


class Lengths(Model):
    """Keeps sizes of its batches, and the tensors beside them, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.longest, self.length = 0, None
        self.by_length: dict[int, int] = {}
        self.places: Any = None
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shape, self.length, self.width = tuple(x.shape), len(x), x.shape[1]
        if len(x) > self.longest:
            self.longest, self.places = len(x), torch.arange(len(x)).cos()
        self.by_length.setdefault(len(x), len(x) // 2)
        assert len(self.places) == self.longest
        return x * self.places[:len(x), None] * self.gain + self.by_length[len(x)]


def later(step: int) -> float:
    return 1.0 + 0.05 * step


def setting(name: str, value: Callable[[int], Any]) -> Callable[[Any, int], None]:
    return lambda model, step: setattr(model[2], name, value(step))


CHANGES: dict[str, Callable[[Any, int], Any]] = {
    "a temperature": setting("temperature", later),
    "a number of numpy": setting("temperature", lambda step: numpy.float64(later(step))),
    "a narrow number of numpy": setting("shift", lambda step: numpy.float32(later(step))),
    "an element of numpy": lambda m, step: m[2].gains.__setitem__(
        1, numpy.linspace(1, 2, 20)[step]),
    "a text, once": setting("kind", lambda step: "double" if step > 1 else "plain"),
    "None": setting("shift", lambda step: later(step) if step % 2 else None),
    "a list in place": lambda m, step: m[2].gains.__setitem__(1, later(step)),
    "a dict in place": lambda m, step: m[2].table.update(gain=later(step)),
    "another dict": setting("table", lambda step: {"gain": later(step), 3: [step]}),
    "a nested tuple": setting("pair", lambda step: (1, (later(step), "b"))),
    "a dataclass": lambda m, step: setattr(m[2].config, "gain", later(step)),
    "a namespace that is replaced": setting("args", lambda step: SimpleNamespace(gain=later(step))),
    "a number that is not finite": setting("limit", lambda step: math.inf),
}
DROPS: dict[str, Callable[[Any, int], Any]] = {
    "p of a dropout": lambda m, step: setattr(m[2].inner[0], "p", 0.05 * (step + 1)),
    "a module in a list": lambda m, step: setattr(m[2].drops[0], "p", 0.05 * (step + 1))}


def attributes() -> Any:
    return built(Attributes())


ATTRIBUTES = {
    **{name: Script(attributes, after=change, seen=with_attributes, draws=name in DROPS)
       for name, change in (CHANGES | DROPS).items()},
    "set in the inner loop": Script(attributes, inside=CHANGES["a temperature"],
                                    seen=with_attributes),
    "a cache that is set in the inner loop": Script(
        attributes, inside=setting("shape", lambda step: (None, 8)), seen=with_attributes),
    "sizes of batches": Script(lambda: built(Lengths()), after=setting("gain", later)),
}


# --- optimizers and schedulers --------------------------------------------------------------------

def momentum(model: Any) -> Optimizer:
    """Two groups with rates of their own, and a momentum that OneCycleLR and CyclicLR turn."""
    parameters = list(model.parameters())
    return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}],
                           lr=0.1, momentum=0.9)


class Warmup:
    """A multiplier that is an object, with values of its own, as LambdaLR keeps it."""

    def __init__(self) -> None:
        self.steps = 4

    def __call__(self, step: int) -> float:
        return min(1.0, step / self.steps)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 3, gamma=0.3),
    "LambdaLR from 0": lambda o: schedulers.LambdaLR(o, lambda step: min(1.0, step / 4)),
    "LambdaLR of an object": lambda o: schedulers.LambdaLR(o, Warmup()),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 5, 9], gamma=0.5),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=12),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(
        o, T_0=3, T_mult=2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.3, total_steps=12),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.2, step_size_up=3),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3),
            schedulers.MultiStepLR(o, [2, 4, 4], gamma=0.5), schedulers.ExponentialLR(o, 0.9)],
        milestones=[3, 9]),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, total_iters=4), schedulers.ExponentialLR(o, 0.8)]),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0,
                                                                threshold=0.1),
}


def tensor_adam(model: Any, **changes: Any) -> Optimizer:
    return torch.optim.Adam(model.parameters(), **({"lr": torch.tensor(0.01)} | changes))


TENSORS: dict[str, Callable[[Any], Optimizer]] = {
    "lr": tensor_adam,
    "lr of 64 bits": lambda model: tensor_adam(model, lr=torch.tensor(0.01, dtype=torch.float64)),
    "betas": lambda model: tensor_adam(model, betas=(torch.tensor(0.9), torch.tensor(0.99))),
    "one of two groups": lambda model: torch.optim.Adam(
        [{"params": list(model.parameters())[:2], "lr": torch.tensor(0.02)},
         {"params": list(model.parameters())[2:], "lr": 0.01}], lr=1.0),
}
OPTIMIZERS = {
    **{f"{kind} that keeps values": Script(optimizer=make) for kind, make in KEPT.items()},
    # A plateau follows the loss of the whole batch, which `gradients` does not have.
    **{kind: Script(optimizer=momentum, scheduler=make, micro=kind != "ReduceLROnPlateau")
       for kind, make in SCHEDULERS.items()},
    **{f"a tensor as {which}": Script(optimizer=make) for which, make in TENSORS.items()},
    **{f"a tensor as {which}, {kind}": Script(optimizer=TENSORS[which], scheduler=SCHEDULERS[kind])
       for which in ("lr", "lr of 64 bits", "one of two groups")
       for kind in ("OneCycleLR", "LambdaLR from 0")},
}

SCRIPTS = LOSSES | MODELS | BUFFERS | ATTRIBUTES | OPTIMIZERS
POINTS = {0: [("step.voted", 1)], 1: [("step.computed", 3), ("step.voted", 8)]}


def of(*, draws: bool = True, **wanted: Any) -> Any:
    """Return a mark: once for each script that has these attributes."""
    return pytest.mark.parametrize("script", [
        pytest.param(script, id=name) for name, script in SCRIPTS.items()
        if all(getattr(script, key) == value for key, value in wanted.items())
        and (draws or not script.draws)])


# --- the laws -------------------------------------------------------------------------------------

@of(is_plain=True)
def test_the_bits_are_plain_pytorchs_when_a_batch_is_one_microbatch(
        script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no sum whose order could differ. Buffers need no rule, and a second worker, which
    has not run the micro-batch, has the same."""
    expected = script.seen(plain(script, 1))
    assert run(script, microbatches=1) == expected
    if not script.draws:
        models = [script.model() for _ in range(2)]
        assert in_a_breaking_world(monkeypatch, 2, lambda rank: run(
            script, models[rank], microbatches=1)) == [expected] * 2


def world_of(script: Script, law: int) -> int:
    """Return the size of the world in which a script is tried: of two laws one has the other
    size."""
    place = next(place for place, one in enumerate(SCRIPTS.values()) if one is script)
    return (3, 5)[(place + law) % 2]


@of(is_plain=True, micro=True)
def test_a_step_is_the_weighted_sum_of_its_microbatches(script: Script) -> None:
    """Every sample weighs the same, also in the short last step of an epoch."""
    _, model = alone(script)
    for mine, theirs in zip(model.parameters(), plain(script, 4).parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@of(draws=False)
def test_the_bits_are_those_of_one_worker_in_every_world(
        script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of workers with two micro-batches, one or none, and through generations that break in the
    micro-batches and after the vote."""
    (expected, _), models = alone(script), [
        script.model() for _ in range(world_of(script, 0))]
    assert in_a_breaking_world(monkeypatch, len(models), lambda rank: run(
        script, models[rank], listeners=[Fault(*POINTS.get(rank, []))])) == (
            [expected] * len(models))


@of(draws=False)
def test_sharded_gradients_have_the_bits_of_a_run_without_shards(
        script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of workers with two micro-batches, one or none, and through generations that break, also
    before the new parameters come. What cannot be sharded is refused."""
    points, (expected, _) = POINTS | {2: [("step.applied", 5)]}, alone(script)
    models = [script.model() for _ in range(world_of(script, 1))]
    try:
        found = in_a_breaking_world(monkeypatch, len(models), lambda rank: run(
            script, models[rank], shard="gradients", listeners=[Fault(*points.get(rank, []))]))
    except (ConfigError, RuntimeError) as error:
        assert "shard" in str(error) and "gradients" in str(error)
    else:
        assert found == [expected] * len(models)


@of(draws=False)
def test_ring_has_the_same_bits_on_all_workers_and_nearly_those_of_exact(
        script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the order of sums differs."""
    (_, whole), models = alone(script), [script.model() for _ in range(3)]
    first, *others = in_a_breaking_world(monkeypatch, 3, lambda rank: run(
        script, models[rank], reduce="ring", bucket_bytes=1024,
        listeners=[Fault(*POINTS.get(rank, []))]))
    assert others == [first] * 2
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in whole.parameters())
    tolerance = 3e-2 if narrow or "precision" in script.options else 1e-3
    for mine, theirs in zip(whole.parameters(), models[0].parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance)


@of()
def test_a_resumed_run_has_the_bits_of_one_that_went_through(script: Script,
                                                             tmp_path: Path) -> None:
    """All that a step can change is in the checkpoint; it goes on in the middle of an epoch, with
    objects that a new process has built."""
    straight, _ = alone(script)
    run(script, until=4, run_dir=tmp_path)
    run(script, until=7, run_dir=tmp_path)
    assert run(script, run_dir=tmp_path) == straight

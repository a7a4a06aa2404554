"""Activation checkpointing (torch.utils.checkpoint): the bits of a plain loop with the same calls,
in every world."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from test_loop import SCHEDULE, adamw, mse
from test_precision import plain, same
from test_trainer import Fault, Model, in_a_breaking_world, loop, trainer_of
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.usefixtures("no_launcher"),
              pytest.mark.filterwarnings("ignore:None of the inputs")]
ONE_AT_A_TIME = threading.Lock()
"""Threads share torch's random generator, which a recomputed dropout puts back. So here the code of
a batch seeds it, and runs alone."""


class Net(torch.nn.Module):
    """Two parts with dropout, whose activations are computed again in the backward pass, and a
    weight that both have."""

    def __init__(self, reentrant: bool | None, norm: Model | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(5, 8), torch.nn.Linear(8, 3)
        self.parts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2),
                                norm or torch.nn.LayerNorm(8), torch.nn.Tanh()) for _ in range(2))
        self.parts[1][0].weight = self.parts[0][0].weight
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for part in self.parts:
            x = part(x) if self.reentrant is None else checkpoint(
                part, x, use_reentrant=self.reentrant)
        found: torch.Tensor = self.last(x)
        return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reduce", ["exact", "ring"])
def test_the_bits_are_those_of_a_plain_loop(reduce: str, reentrant: bool, precision: str) -> None:
    """With dropout and a tied weight, to which reentrant checkpointing adds twice."""
    theirs, ours = Net(reentrant), Net(reentrant)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) if precision == "fp16" else None
               for _ in range(2)]
    plain(theirs, precision, 1, scalers[0])
    loop(trainer_of(ours, adamw(ours), microbatches=1, clip_norm=0.5, precision=precision,
                    reduce=reduce,
                    scaler=scalers[1]), ours)
    assert same(theirs, ours)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_the_bits_are_the_same_in_every_world(reentrant: bool, size: int,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, autocast, clipping, BatchNorm, and a generation that breaks."""
    def run(model: Model, **more: Any) -> str:
        trainer = trainer_of(model, adamw(model), precision="bf16", clip_norm=0.5, **more)
        for step in trainer:
            for batch in step:
                with ONE_AT_A_TIME:
                    torch.manual_seed(int(1e6 * batch[0].abs().sum()))
                    step.backward(mse(model, batch))
        return trainer.result.weights_sha256

    for module in ("data.loader", "training.apply"):
        monkeypatch.setattr(f"elastic_trainer.{module}.seed_everything", lambda seed: None)
    monkeypatch.setattr("elastic_trainer.data.loader.seed_cpu", lambda seed: None)  # the proof's
    made = [Net(reentrant, torch.nn.BatchNorm1d(8)) for _ in range(size + 1)]
    for model in made:
        model.parts[1][2] = torch.nn.BatchNorm1d(8)
    alone, points = run(made[0]), {1: [("step.voted", 1), ("step.computed", 4)]}
    assert in_a_breaking_world(monkeypatch, size, lambda rank: run(
        made[rank + 1], listeners=[Fault(*points.get(rank, []))])) == [alone] * size


@pytest.mark.parametrize("reentrant", [False, True])
def test_ring_sends_complete_gradients(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reentrant checkpointing runs a backward pass in the backward pass. The buckets are sent there
    while it runs."""
    def run(model: Net, **more: Any) -> torch.Tensor:
        for part in model.parts:
            part[1].p = 0.0
        model.parts[1][0].weight = torch.nn.Parameter(model.parts[0][0].weight.detach().clone())
        loop(trainer_of(model, **more), model)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    made = [Net(reentrant) for _ in range(3)]
    alone = run(made[0])
    ended = in_a_breaking_world(
        monkeypatch, 2, lambda rank: run(made[rank + 1], reduce="ring", bucket_bytes=1024))
    assert torch.equal(*ended) and torch.allclose(ended[0], alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reentrant", [False, True])
def test_batch_norm_counts_a_recomputed_batch_once(reentrant: bool) -> None:
    """As without checkpointing. In plain PyTorch the running statistics move twice for a batch."""
    made = [Net(kind, torch.nn.BatchNorm1d(8)) for kind in (None, reentrant)]
    for model in made:
        loop(trainer_of(model, adamw(model), microbatches=1), model)
    assert all(torch.equal(*both) for both in zip(*(m.buffers() for m in made), strict=True))
    assert int(made[1].parts[0][2].num_batches_tracked) == 2 * SCHEDULE.steps  # both parts have it

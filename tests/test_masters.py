"""Weights in 16 bits with masters in 32: the bits of a plain PyTorch loop that has them by hand, in
every world, through resumes and restarts, with a sharded optimizer, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_loop import INPUT, SCHEDULE, TARGET, adamw, built, mse
from test_precision import parts_of
from test_trainer import Model, loop, trainer_of

from elastic_trainer.data.seeds import seed_everything
from elastic_trainer.reduce.tree import node_sum
from elastic_trainer.training.job.masters import MASTER

pytestmark = pytest.mark.usefixtures("no_launcher")
Make = Callable[[Any], torch.optim.Optimizer]
PRECISION: dict[str, Any] = {"precision": "bf16-master"}


class ByHand:
    """A model in 16 bits, and the masters that its optimizer has, as people write it."""

    def __init__(self, model: Model, make: Make, microbatches: int = 4):
        self.model, self.microbatches = model, microbatches
        stay = {id(p) for module in model.modules() if hasattr(module, "running_mean")
                for p in module.parameters()}
        self.masters = {p: p if id(p) in stay else torch.nn.Parameter(p.detach().float().clone())
                        for p in model.parameters()}
        for p in self.masters:
            p.data = p.data if id(p) in stay else p.data.bfloat16()
        self.optimizer = make(list(self.masters.values()))
        self.scale: torch.amp.GradScaler | None = None

    def gradients(self, step: int) -> None:
        """Let the masters have the sum over the micro-batches, in 32 bits."""
        found: dict[Any, dict[range, torch.Tensor]] = {p: {} for p in self.masters}
        for chosen, weight, microbatch in parts_of(step, self.microbatches):
            seed_everything(SCHEDULE.microbatch_seed(step, microbatch))
            with torch.autocast("cpu", torch.bfloat16):
                loss = mse(self.model, [INPUT[chosen], TARGET[chosen]]) * weight
            (self.scale.scale(loss) if self.scale else loss).backward()
            for p, pieces in found.items():
                if p.grad is not None:
                    pieces[range(microbatch, microbatch + 1)], p.grad = p.grad.float(), None
        for p, pieces in found.items():
            self.masters[p].grad = (
                node_sum(pieces, range(self.microbatches), self.microbatches) if pieces else None)

    @torch.no_grad()
    def round(self) -> None:
        for p, master in self.masters.items():
            p.copy_(master)

    def step(self, step: int, clip: Callable[[Any], Any] = lambda masters: None) -> None:
        self.gradients(step)
        if self.scale:
            self.scale.unscale_(self.optimizer)
        clip(list(self.masters.values()))
        if self.scale:
            self.scale.step(self.optimizer)
            self.scale.update()
        else:
            self.optimizer.step()
        self.round()


def same(one: Model, other: Model) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype
               for a, b in zip(one.parameters(), other.parameters(), strict=True))


def masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [optimizer.state[p][MASTER] for group in optimizer.param_groups for p in group["params"]]


KINDS: dict[str, Make] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, centered=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "groups": lambda ps: torch.optim.AdamW([
        {"params": ps[:1], "weight_decay": 0.5}, {"params": ps[1:], "lr": 0.1}], lr=0.01)}


# --- the bits of a plain loop ---------------------------------------------------------------------

@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_masters_by_hand(kind: str, microbatches: int) -> None:
    """The optimizer was built before the weights were rounded. The masters have these bits, too,
    and a loop without masters has others."""
    model, hand = built(), ByHand(built(), KINDS[kind], microbatches)
    optimizer = KINDS[kind](list(model.parameters()))
    loop(trainer_of(model, optimizer, microbatches=microbatches, **PRECISION), model)
    for step in range(SCHEDULE.steps):
        hand.step(step)
    assert same(model, hand.model)
    assert all(map(torch.equal, masters(optimizer), hand.masters.values()))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    without = built().bfloat16()
    loop(trainer_of(without, KINDS[kind](list(without.parameters())), precision="bf16",
                    microbatches=microbatches), without)
    assert not same(model, without)


@pytest.mark.parametrize("options", [
    {"clip_norm": 0.3}, {"clip_value": 0.01}, {"lr": lambda step: 0.5 ** step}], ids=str)
def test_clipping_and_rates_are_those_of_masters_by_hand(options: dict[str, Any]) -> None:
    """They see gradients in 32 bits."""
    def clip(parameters: Any) -> None:
        if "clip_norm" in options:
            torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        if "clip_value" in options:
            torch.nn.utils.clip_grad_value_(parameters, 0.01)

    model, hand = built(), ByHand(built(), KINDS["adamw"])
    loop(trainer_of(model, adamw(model), **PRECISION, **options), model)
    for step in range(SCHEDULE.steps):
        hand.optimizer.param_groups[0]["lr"] = 0.01 * options.get("lr", lambda step: 1)(step)
        hand.step(step, clip)
    assert same(model, hand.model)


def test_a_scaler_skips_and_grows_as_beside_masters_by_hand() -> None:
    model, hand = built(), ByHand(built(), KINDS["adamw"])
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    hand.scale = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    loop(trainer_of(model, adamw(model), scaler=scale, clip_norm=0.3, **PRECISION), model)
    for step in range(SCHEDULE.steps):
        hand.step(step, lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.3))
    assert same(model, hand.model) and scale.state_dict() == hand.scale.state_dict()
    assert scale.get_scale() != 2.0**127


def test_batch_norm_stays_in_32_bits() -> None:
    """torch refuses its weights in 16 beside running statistics in 32."""
    model, hand = built(torch.nn.BatchNorm1d(8)), ByHand(built(torch.nn.BatchNorm1d(8)),
                                                         KINDS["adamw"], 1)
    optimizer = adamw(model)
    loop(trainer_of(model, optimizer, microbatches=1, **PRECISION), model)
    for step in range(SCHEDULE.steps):
        hand.step(step)
    assert same(model, hand.model)
    kinds = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert {kinds[f"2.{name}"] for name in ("weight", "bias", "running_mean")} == {torch.float32}
    assert MASTER not in optimizer.state[model[2].weight]


class Tied(torch.nn.Module):
    """A weight that two layers share, one that no batch uses, a frozen one outside of the
    optimizer, and one that is frozen until step 2."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.one, self.two = built(), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.unused, self.frozen = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.late = torch.nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(self.frozen(self.two(self.one(self.base(x)))))

    def own(self) -> list[torch.nn.Parameter]:
        return [p for name, p in self.named_parameters() if "frozen" not in name]


def test_tied_unused_and_frozen_parameters_are_as_beside_masters_by_hand() -> None:
    """What the optimizer does not have is rounded, and has no master."""
    def thaw(model: Tied, step: int) -> None:
        if step == 2:
            model.late.requires_grad_(True)
            model.base[0].requires_grad_(False)

    model, other = Tied(), Tied()
    optimizer = torch.optim.AdamW(model.own(), lr=0.01)
    loop(trainer_of(model, optimizer, **PRECISION), model,
         after=lambda step: thaw(model, step.number))
    hand = ByHand(other, lambda ps: torch.optim.AdamW(
        [p for p, (name, _) in zip(ps, other.named_parameters(), strict=True)
         if "frozen" not in name], lr=0.01))
    for step in range(SCHEDULE.steps):
        hand.step(step)
        thaw(other, step)
    assert same(model, other)
    assert model.frozen.weight.dtype == torch.bfloat16
    assert model.frozen.weight not in optimizer.state
    assert list(optimizer.state[model.unused.weight]) == [MASTER]
    assert torch.equal(masters(optimizer)[0].bfloat16(), model.base[0].weight)


def test_a_model_in_16_bits_gets_masters_of_its_values() -> None:
    """And what its optimizer has made already is kept in 32 bits."""
    model, hand = built().bfloat16(), ByHand(built().bfloat16(), KINDS["adagrad"])
    optimizer = KINDS["adagrad"](list(model.parameters()))
    assert optimizer.state[model[0].weight]["sum"].dtype == torch.bfloat16
    loop(trainer_of(model, optimizer, **PRECISION), model)
    for step in range(SCHEDULE.steps):
        hand.step(step)
    for entry, its in zip(hand.optimizer.state.values(), optimizer.state.values(), strict=True):
        assert its["sum"].dtype == torch.float32
        assert entry["step"] == its["step"]
    assert hand.masters.keys() and {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_second_trainer_goes_on_with_the_masters() -> None:
    model, straight = built(), built()
    optimizer, other = adamw(model), adamw(straight)
    loop(trainer_of(model, optimizer, until="3 steps", **PRECISION), model)
    before = [master.clone() for master in masters(optimizer)]
    trainer_of(model, optimizer, **PRECISION)
    assert all(map(torch.equal, before, masters(optimizer)))
    loop(trainer_of(straight, other, until="3 steps", **PRECISION), straight)
    assert all(map(torch.equal, before, masters(other)))

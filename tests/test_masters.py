"""Weights in 16 bits with masters in 32: the bits of a plain PyTorch loop that has them by hand, in
every world, through resumes and restarts, with a sharded optimizer, too."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster, weights_alone
from optimizers import Together
from test_loop import INPUT, SCHEDULE, TARGET, adamw, built, mse
from test_precision import JOB, parts_of, through_faults
from test_trainer import Fault, Model, in_a_breaking_world, loop, trainer_of

from elastic_trainer import ConfigError
from elastic_trainer.data.seeds import seed_everything
from elastic_trainer.reduce.tree import node_sum
from elastic_trainer.training.job.masters import MASTER
from elastic_trainer.views.verify import verify

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
        self.loss = mse

    def gradients(self, step: int) -> None:
        """Let the masters have the sum over the micro-batches, in 32 bits."""
        found: dict[Any, dict[range, torch.Tensor]] = {p: {} for p in self.masters}
        self.model.zero_grad()
        for chosen, weight, microbatch in parts_of(step, self.microbatches):
            seed_everything(SCHEDULE.microbatch_seed(step, microbatch))
            with torch.autocast("cpu", torch.bfloat16):
                loss = self.loss(self.model, [INPUT[chosen], TARGET[chosen]]) * weight
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
    {"clip_norm": 0.3}, {"clip_value": 0.01}, {"lr": lambda step: 0.5 ** step}], ids=" ".join)
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
    def large(model: Model, batch: Any) -> torch.Tensor:
        return 64 * mse(model, batch)

    model, hand = built(), ByHand(built(), KINDS["adamw"])
    scale, hand.scale = (torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
                         for _ in range(2))
    hand.loss = large
    loop(trainer_of(model, adamw(model), scaler=scale, clip_norm=0.3, **PRECISION), model, large)
    for step in range(SCHEDULE.steps):
        hand.step(step, lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.3))
    assert same(model, hand.model) and scale.state_dict() == hand.scale.state_dict()
    assert scale.get_scale() < 2.0**126


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


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_stands_twice_in_the_groups_moves_twice() -> None:
    """As torch does: it warns."""
    def twice(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*parameters, list(parameters)[0]], lr=0.05, momentum=0.9,
                               foreach=False)

    model, hand = built(), ByHand(built(), twice)
    loop(trainer_of(model, twice(list(model.parameters())), **PRECISION), model)
    for step in range(SCHEDULE.steps):
        hand.step(step)
    assert same(model, hand.model)


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


def test_each_phase_moves_the_masters_of_its_optimizer() -> None:
    model, hand = built(), ByHand(built(), KINDS["sgd"])
    halves = {"a": slice(0, 2), "b": slice(2, 4)}
    trainer = trainer_of(model, {name: KINDS["adamw"](list(model.parameters())[half])
                                 for name, half in halves.items()}, clip_norm=0.3, **PRECISION)
    for step in trainer:
        for name in halves:
            for batch in step.phase(name):
                step.backward(mse(model, batch))
    ours = [list(hand.masters.values())[half] for half in halves.values()]
    optimizers = list(map(KINDS["adamw"], ours))
    for number in range(SCHEDULE.steps):
        for optimizer, its in zip(optimizers, ours, strict=True):
            hand.gradients(number)
            torch.nn.utils.clip_grad_norm_(its, 0.3)
            optimizer.step()
            hand.round()
    assert same(model, hand.model)


def test_hooks_that_the_script_has_registered_before_see_the_gradients() -> None:
    model, seen = built(), set[torch.dtype]()
    model[0].weight.register_hook(lambda gradient: seen.add(gradient.dtype))
    loop(trainer_of(model, adamw(model), **PRECISION), model)
    assert seen == {torch.bfloat16}


# --- what the user's code sees --------------------------------------------------------------------

def test_code_after_the_inner_loop_sees_gradients_and_groups_of_the_model() -> None:
    """In `.grad`, what the optimizer has got, rounded: then a clip there is an error as without
    masters. `optimizer.state_dict()` has the masters."""
    model, hand = built(), ByHand(built(), KINDS["adamw"])
    optimizer, seen = adamw(model), []

    def after(step: Any) -> None:
        hand.step(step.number, lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.3))
        seen.append(step.number)
        for p, master in zip(model.parameters(), hand.masters.values(), strict=True):
            assert torch.equal(p.grad, master.grad.bfloat16())
        assert list(map(id, optimizer.param_groups[0]["params"])) == [*map(id, model.parameters())]

    loop(trainer_of(model, optimizer, clip_norm=0.3, **PRECISION), model, after=after)
    entries = optimizer.state_dict()["state"].values()
    assert [list(entry) for entry in entries] == 4 * [["step", "exp_avg", "exp_avg_sq", MASTER]]
    assert len(seen) == SCHEDULE.steps and len(optimizer.state) == 4
    wide = torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.Linear(64, 3))
    with pytest.raises(RuntimeError, match="clipped or scaled after the inner loop"):
        loop(trainer_of(wide, **PRECISION), wide, after=lambda step: (
            torch.nn.utils.clip_grad_norm_(wide.parameters(), 1e-3)))


def test_weights_that_code_after_the_inner_loop_changes_are_the_new_masters() -> None:
    """Also through `.data`, which no version counts; elements that stay keep their masters."""
    def cut(p: torch.Tensor) -> None:
        p.data.clamp_(-0.2, 0.2)

    model, hand = built(), ByHand(built(), KINDS["adamw"])
    optimizer = adamw(model)
    loop(trainer_of(model, optimizer, **PRECISION), model, after=lambda step: cut(model[0].weight))
    weight, master = next(iter(hand.masters.items()))
    for step in range(SCHEDULE.steps):
        hand.step(step)
        before = weight.detach().clone()
        cut(weight)
        with torch.no_grad():
            master.copy_(torch.where(weight == before, master, weight.float()))
    assert same(model, hand.model) and not torch.equal(weight, before)
    assert all(map(torch.equal, masters(optimizer)[1:], [*hand.masters.values()][1:]))


def test_a_state_that_was_rounded_is_an_error() -> None:
    """torch gives each tensor that it loads the type of the parameter."""
    model = built()
    optimizer = adamw(model)
    with pytest.raises(RuntimeError, match="was rounded to torch.bfloat16"):
        loop(trainer_of(model, optimizer, **PRECISION), model,
             after=lambda step: optimizer.load_state_dict(optimizer.state_dict()))


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_a_state_of_an_optimizer_without_masters_is_an_error_after_the_trainer(kind: str) -> None:
    """It is rounded, too, and these optimizers would go on in 16 bits."""
    other = built()
    source = KINDS[kind](list(other.parameters()))
    mse(other, [INPUT, TARGET]).backward()
    source.step()
    model = built()
    optimizer = KINDS[kind](list(model.parameters()))
    trainer = trainer_of(model, optimizer, **PRECISION)
    optimizer.load_state_dict(source.state_dict())
    with pytest.raises(RuntimeError, match="was rounded to torch.bfloat16"):
        loop(trainer, model)


def test_a_script_that_loads_model_and_optimizer_by_itself_keeps_the_masters() -> None:
    """Into a model in 32 bits. One in 16 rounds them, which is an error."""
    def loaded(model: Model) -> torch.optim.Optimizer:
        model.load_state_dict(source.state_dict())
        optimizer = adamw(model)
        optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
        return optimizer

    source, model, narrow = built(), built(), built().bfloat16()
    its = adamw(source)
    loop(trainer_of(source, its, until="3 steps", **PRECISION), source)
    optimizer = loaded(model)
    loop(trainer_of(model, optimizer, until="3 steps", **PRECISION), model)
    loop(trainer_of(source, its, until="3 steps", **PRECISION), source)
    assert same(model, source) and all(map(torch.equal, masters(optimizer), masters(its)))
    with pytest.raises(RuntimeError, match="before the trainer is built"):
        trainer_of(narrow, loaded(narrow), **PRECISION)


def test_weights_may_lie_anywhere_in_a_memory() -> None:
    """As views of a flat tensor do, whose place no whole word divides."""
    def flat(model: Model) -> Model:
        memory = torch.empty(1 + sum(p.numel() for p in model.parameters()), dtype=torch.bfloat16)
        at = 1
        for p in model.parameters():
            view = memory[at : at + p.numel()].view(p.shape).copy_(p.data)
            p.data, at = view, at + p.numel()
        return model

    model, other = flat(built().bfloat16()), built().bfloat16()
    assert loop(trainer_of(model, adamw(model), **PRECISION), model) == loop(
        trainer_of(other, adamw(other), **PRECISION), other)


def test_weights_of_another_type_after_a_step_are_an_error() -> None:
    """They would be the new masters, rounded."""
    model = built()
    with pytest.raises(RuntimeError, match=r"shape \(8, 5\) has the type torch.float32"):
        loop(trainer_of(model, adamw(model), **PRECISION), model, after=lambda step: model.float())


class OneMemory(torch.nn.Module):
    """A frozen weight, or a buffer, that follows a trained one."""

    def __init__(self, follower: str) -> None:
        super().__init__()
        self.base, self.frozen = built(), torch.nn.Linear(5, 8)
        if follower == "frozen.weight":
            self.frozen.weight.data = self.base[0].weight.data
        else:
            self.register_buffer("seen", self.base[0].weight.data)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x)


@pytest.mark.parametrize("follower", ["frozen.weight", "seen"])
def test_a_tensor_that_would_not_follow_a_rounded_weight_is_refused(follower: str) -> None:
    model = OneMemory(follower)
    with pytest.raises(ConfigError, match=rf"base\.0\.weight and {follower} lie in one memory"):
        trainer_of(model, adamw(model.base), **PRECISION)


def test_masters_that_the_user_drops_are_made_anew_of_the_weights() -> None:
    model, hand = built(), ByHand(built(), KINDS["sgd"])
    optimizer = KINDS["sgd"](list(model.parameters()))
    loop(trainer_of(model, optimizer, **PRECISION), model,
         after=lambda step: optimizer.state.clear())
    for step in range(SCHEDULE.steps):
        hand.step(step)
        hand.optimizer.state.clear()
        for p, master in hand.masters.items():
            master.data = p.data.float()
    assert same(model, hand.model)


@pytest.mark.parametrize(("make", "says"), [
    (lambda model: adamw(model.double()), "0.weight, 0.bias, 2.weight, 2.bias have 64"),
    (lambda model: Together(model.parameters()), "precision='bf16-master': the optimizer Together "
     "has the attribute parts, which is no number or text")])
def test_what_cannot_have_masters_is_refused(make: Callable[[Model], torch.optim.Optimizer],
                                             says: str) -> None:
    model = built()
    with pytest.raises(ConfigError, match=says):
        trainer_of(model, make(model), **PRECISION)


def test_a_first_layer_of_normalization_that_torch_refuses_is_an_error_at_once() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), built())
    with pytest.raises(RuntimeError, match="mixed dtype"):
        loop(trainer_of(model, **PRECISION), model)


def test_an_average_is_kept_in_32_bits() -> None:
    """Of the weights in 16; 0.001 of a difference would be lost in 16. It is shown in 16."""
    model, weights = built(), list[torch.Tensor]()
    trainer = trainer_of(model, adamw(model), ema=0.99, **PRECISION)
    loop(trainer, model, after=lambda step: weights.append(model[0].weight.detach().clone()))
    average = weights[0].float()
    for one in weights[1:]:
        average.lerp_(one.float(), 1 - 0.99)
    with trainer.averaged():
        assert torch.equal(model[0].weight, average.bfloat16())
    assert torch.equal(model[0].weight, weights[-1])


# --- a run goes on --------------------------------------------------------------------------------

@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_run_has_the_bits_of_a_straight_one(stop: int, tmp_path: Path) -> None:
    def run(until: int, folder: Path | None = tmp_path) -> tuple[str, list[torch.Tensor]]:
        model = built(torch.nn.BatchNorm1d(8))
        optimizer = adamw(model)
        sha256 = loop(trainer_of(model, optimizer, until=f"{until} steps", checkpoint_every=1,
                                 ema=0.9, run_dir=folder, **PRECISION), model)
        return sha256, [value for entry in optimizer.state.values() for value in entry.values()]

    run(stop)
    (sha256, kept), (its_sha256, its) = run(6), run(6, None)
    assert sha256 == its_sha256 and all(map(torch.equal, kept, its))


@pytest.mark.parametrize("precisions", [("bf16-master", "bf16"), ("bf16", "bf16-master")])
def test_masters_on_one_side_of_a_resume_are_refused(precisions: tuple[str, str],
                                                     tmp_path: Path) -> None:
    """Also where the model itself has 16 bits, so that all tensors of it fit."""
    def run(precision: str, until: int) -> None:
        model = built().bfloat16()
        loop(trainer_of(model, adamw(model), until=f"{until} steps", run_dir=tmp_path,
                        precision=precision), model)

    run(precisions[0], 2)
    with pytest.raises(Exception, match="only 'bf16-master' keeps masters of the weights. Use "
                                        f"precision='{precisions[0]}'"):
        run(precisions[1], 4)


# --- worlds ---------------------------------------------------------------------------------------

FAULTS: dict[int, list[tuple[str, int]]] = {
    0: [("step.voted", 1), ("step.voted", 5)], 1: [("step.prepared", 4)],
    2: [("step.computed", 3), ("step.applied", 4)]}


@pytest.mark.parametrize("options", [
    {}, {"shard": "optimizer"}, {"shard": "optimizer", "buddies": 0, "ema": 0.9},
    {"shard": "optimizer", "buddies": 2}], ids=str)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_bits_are_the_same_in_every_world_when_generations_break(
        size: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """More workers than micro-batches, too, and where the loop changes weights. A worker has the
    masters of the blocks that it holds alone, and all weights in 16 bits."""
    def run(rank: int, **more: Any) -> tuple[str, set[str], Model]:
        model = models[rank]
        optimizer = adamw(model)
        sha256 = loop(trainer_of(model, optimizer, clip_norm=0.3, **PRECISION, **more), model,
                      after=lambda step: model[0].weight.data.clamp_(-0.3, 0.3))
        names = {id(p): name for name, p in model.named_parameters()}
        return sha256, {names[id(p)] for p, entry in optimizer.state.items() if MASTER in entry
                        }, model

    models = [built(torch.nn.Tanh(), torch.nn.BatchNorm1d(8)) for _ in range(6)]
    alone, every, _ = run(5)
    ended = in_a_breaking_world(monkeypatch, size, lambda rank: run(
        rank, listeners=[Fault(*FAULTS.get(rank, []))], **options))
    assert {sha256 for sha256, _, _ in ended} == {alone}
    if "shard" in options:
        holders = [sum(name in held for _, held, _ in ended) for name in every]
        assert set(holders) == {min(options.get("buddies", 1) + 1, size)}
    assert all(p.dtype == torch.bfloat16 for _, _, model in ended for p in model[0].parameters())


# --- for real -------------------------------------------------------------------------------------

MASTERS = ("--precision", "bf16-master")
SHARD = ("--shard", "optimizer")


def test_no_bit_is_another_in_a_sharded_run_when_workers_die_and_one_joins(tmp_path: Path) -> None:
    """The masters of a worker that is killed come from its buddies, and a newcomer gets its own."""
    twin = weights_alone([*JOB, *MASTERS], tmp_path)
    cluster = through_faults(tmp_path, [*MASTERS, *SHARD])
    cluster.assert_nothing_lost(twin, victims=2)
    assert not cluster.events("worker.shards_lost")
    assert any(e["received"] for e in cluster.events("worker.shards_moved") if e["step"])


@pytest.mark.parametrize("shards", [(SHARD, ()), ((), SHARD)], ids=("to-whole", "from-whole"))
def test_a_checkpoint_of_masters_resumes_sharded_and_whole(
        shards: tuple[tuple[str, ...], tuple[str, ...]], tmp_path: Path) -> None:
    """With another number of workers."""
    twin = weights_alone([*JOB, *MASTERS, "--steps", "24"], tmp_path)
    for shard, hosts, steps in zip(shards, (4, 3), ("10", "24"), strict=True):
        with Cluster(tmp_path, hosts=hosts, command=[*JOB, *MASTERS, *shard, "--steps", steps]
                     ) as cluster:
            assert cluster.finish() == 0
    assert verify(cluster.run_dir).is_proved
    result = json.loads((cluster.run_dir / "result.json").read_text())
    assert (result["weights_sha256"], result["steps"]) == (twin, 24)


@pytest.mark.parametrize("options", [{}, PRECISION, {"shard": "optimizer"},
                                     {**PRECISION, "shard": "gradients"}], ids=str)
def test_no_tensor_waits_for_a_search_for_cycles(monkeypatch: pytest.MonkeyPatch,
                                                 options: dict[str, Any]) -> None:
    """Its memory would stay until Python searches, also after a generation that broke."""
    left = list[Any]()

    def collect(step: Any) -> None:
        if step.number == 4:
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(0)
            left.extend(one for one in gc.garbage if isinstance(one, torch.Tensor))
            gc.garbage.clear()

    def run(rank: int) -> str:
        model = models[rank]
        return loop(trainer_of(model, adamw(model), listeners=[Fault(("step.voted", 2))]
                               if rank == 1 else [], **options), model,
                    after=collect if rank == 1 else lambda step: None)

    models = [built() for _ in range(3)]
    gc.collect()
    gc.disable()
    try:
        assert len({*in_a_breaking_world(monkeypatch, 3, run)}) == 1
    finally:
        gc.enable()
    assert left == []

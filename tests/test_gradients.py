"""Which gradient a step has, whatever the user's code does with `.grad` and `requires_grad`.

The yardstick is `plain`: each micro-batch's gradient as plain PyTorch leaves it in `.grad`,
weighted and added by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import (
    INPUT,
    NUMBERS,
    SIZE,
    TARGET,
    Trainer,
    built,
    in_a_world,
    job,
    mse,
    sgd,
    trained,
)

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.reduce.sending import Sending
from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.training.job import Result
from elastic_trainer.world.alone import Alone

Model = torch.nn.Module
Loss = Callable[[Model, Any], torch.Tensor]
LATE = INPUT[torch.from_numpy(Schedule(dataset_size=SIZE, **NUMBERS).microbatch_samples(2, 3))]
"""A micro-batch that the warm-up does not see, the last one of its step."""


pytestmark = pytest.mark.usefixtures("no_launcher")


def adamw(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def plain(model: Model,
          optimizer: torch.optim.Optimizer,
          loss: Loss,
          *,
          microbatches: int = NUMBERS["microbatches"],
          after_step: Callable[[int], None] = lambda step: None) -> Model:
    """Train in plain PyTorch, micro-batch after micro-batch; a step's gradient is the weighted sum
    of theirs, None where all are."""
    schedule = Schedule(dataset_size=SIZE, **(NUMBERS | {"microbatches": microbatches}))
    for step in range(schedule.steps):
        totals: dict[torch.nn.Parameter, torch.Tensor] = {}
        for microbatch in range(microbatches):
            chosen = torch.from_numpy(schedule.microbatch_samples(step, microbatch))
            if not len(chosen):
                continue
            model.zero_grad()
            loss(model, [INPUT[chosen], TARGET[chosen]]).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    weighted = parameter.grad * schedule.microbatch_weight(step, microbatch)
                    totals[parameter] = totals[
                        parameter] + weighted if parameter in totals else weighted
        for parameter in model.parameters():
            parameter.grad = totals.get(parameter)
        optimizer.step()
        after_step(step)
    return model


def assert_close(model: Model, other: Model) -> None:
    for (name, mine), theirs in zip(model.state_dict().items(),
                                    other.state_dict().values(),
                                    strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4,
                              atol=1e-6), f"{name} is off by {(mine - theirs).abs().max()}"


def everywhere(make: Callable[[], dict[str, Any]], reduce: str = "exact") -> Model:
    """Train alone and in worlds of several sizes, and return the model; under `exact` the bits are
    the same in all.

    Under `ring` they are the same on all workers of a world. Six workers share four micro-batches:
    two have none.
    """
    results: list[list[Result]] = []
    for size in (1, 2, 3, 4, 6):
        results.append(in_a_world(size, lambda rank: job(**make()), reduce))
        assert len({result.weights_sha256 for result in results[-1]}) == 1, size
        assert_close(results[-1][0].model, results[0][0].model)
    if reduce == "exact":
        assert len({result.weights_sha256 for world in results for result in world}) == 1
    return results[0][0].model


def job_of(model: Model,
           optimizer: Callable[[Model], torch.optim.Optimizer] = sgd,
           **changes: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer(model)} | changes


# --- code that writes to .grad --------------------------------------------------------------------

def old_style(model: Model) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


ZEROED: dict[str, Callable[[Model], None]] = {
    "to None": lambda model: model.zero_grad(),
    "in place": lambda model: model.zero_grad(set_to_none=False),
    "behind autograd's back": old_style,
}


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize("way", ZEROED)
def test_no_bit_is_another_when_loss_zeroes_the_gradients(way: str, reduce: str) -> None:
    """Many do so by habit; the micro-batches that this worker did before keep their part of the
    sum."""
    def loss(model: Model, batch: Any) -> torch.Tensor:
        ZEROED[way](model)
        return mse(model, batch)

    with_it, without = (everywhere(lambda loss=one: job_of(built(), loss=loss), reduce)
                        for one in (loss, mse))
    assert all(
        torch.equal(a, b) for a, b in zip(with_it.parameters(), without.parameters(), strict=True))
    assert_close(with_it, plain(built_ := built(), sgd(built_), mse))


def adversarial(model: Model, batch: Any) -> torch.Tensor:
    """Train on the inputs that the sign of a first gradient makes worse (FGSM)."""
    x = batch[0].clone().requires_grad_()
    mse(model, [x, batch[1]]).backward()
    assert x.grad is not None
    worse = (x + 0.1 * x.grad.sign()).detach()
    model.zero_grad()
    return mse(model, [worse, batch[1]])


def penalized(model: Model, batch: Any) -> torch.Tensor:
    """Punish a steep model: the penalty is a gradient of a gradient."""
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(mse(model, [x, batch[1]]), x, create_graph=True)
    return mse(model, batch) + slope.square().sum()


def left_over(model: Model, batch: Any) -> torch.Tensor:
    """Leave the gradient of a second loss in `.grad`, as a loop with two losses does."""
    (0.5 * model(batch[0]).square().mean()).backward()
    return mse(model, batch)


def clipped(model: Model, batch: Any) -> torch.Tensor:
    """Leave a clipped gradient, and return a loss of another kind."""
    mse(model, batch).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return 0.1 * mse(model, batch)


LOSSES = [adversarial, penalized, left_over, clipped]


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_plain_pytorchs_when_loss_runs_backward_passes_of_its_own(
        loss: Loss, reduce: str) -> None:
    """What a micro-batch leaves in `.grad` is its gradient; in a world of any size."""
    reference = built()
    assert_close(everywhere(lambda: job_of(built(), loss=loss), reduce),
                 plain(reference, sgd(reference), loss))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_bits_are_plain_pytorchs_when_a_batch_is_one_microbatch(loss: Loss) -> None:
    """One worker, one micro-batch: there is no sum whose order could differ."""
    model, reference = built(), built()
    trained(model, loss=loss, microbatches=1)
    plain(reference, sgd(reference), loss, microbatches=1)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("reduce", ["exact", "ring"])
def test_the_step_is_run_again_when_loss_first_writes_to_a_gradient_in_its_middle(
        reduce: str) -> None:
    """The warm-up has not seen it, and other micro-batches of the step are in the sums already."""
    def loss(model: Model, batch: Any) -> torch.Tensor:
        return (adversarial if torch.equal(batch[0], LATE) else mse)(model, batch)

    reference = built()
    assert_close(everywhere(lambda: job_of(built(), loss=loss), reduce),
                 plain(reference, sgd(reference), loss))


def with_hooks(act: Callable[[torch.nn.Parameter], None]) -> Model:
    model = built()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(act)
    return model


def clamp(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def replace(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize("act", [clamp, replace])
def test_a_hook_sees_the_gradient_of_one_microbatch_when_it_changes_it(act: Any,
                                                                       reduce: str) -> None:
    """And not the sum of several, which other worlds would cut in other places."""
    model = everywhere(lambda: job_of(with_hooks(act)), reduce)
    alone, reference = with_hooks(act), with_hooks(act)
    assert not torch.equal(next(model.parameters()), next(built().parameters()))
    trained(alone, microbatches=1, reduce=reduce)
    plain(reference, sgd(reference), mse, microbatches=1)
    assert all(
        torch.equal(a, b) for a, b in zip(alone.parameters(), reference.parameters(), strict=True))


def test_a_hook_that_changes_a_gradient_on_its_way_is_an_error(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `ring` a hook that the warm-up has not seen comes after the network has begun."""
    # The last gradients wait for the pass to end.
    monkeypatch.setattr("elastic_trainer.reduce.ring.BUCKET_BYTES", 64)

    def make() -> dict[str, Any]:
        is_late = [False]

        def loss(model: Model, batch: Any) -> torch.Tensor:
            is_late[0] = torch.equal(batch[0], LATE)
            return mse(model, batch)

        return job_of(with_hooks(lambda parameter: clamp(parameter) if is_late[0] else None),
                      loss=loss)

    with pytest.raises(RuntimeError,
                       match='a hook, or code behind.*has changed .grad.*reduce="exact"'):
        in_a_world(2, lambda rank: job(**make()), "ring")
    everywhere(make)


def test_a_16_bit_gradient_is_that_of_its_microbatch_when_loss_zeroes_the_gradients() -> None:
    """Those gradients are no views, and never were."""
    def loss(model: Model, batch: Any) -> torch.Tensor:
        model.zero_grad()
        return torch.nn.functional.mse_loss(model(batch[0].bfloat16()).float(), batch[1])

    def silent(model: Model, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0].bfloat16()).float(), batch[1])

    models = [
        everywhere(lambda loss=one: job_of(built().bfloat16(), loss=loss)) for one in (loss, silent)
    ]
    assert all(
        torch.equal(a, b)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


# --- parameters without a gradient ----------------------------------------------------------------

class Branching(Model):
    """Has a layer that no sample goes through, and one for those batches whose first number is
    positive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unused = torch.nn.Linear(5, 3), torch.nn.Linear(3, 3)
        self.sometimes = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        return out + self.sometimes(x) if x[0, 0] > 0 else out


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize(
    "optimizer", [adamw, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])
def test_weight_decay_and_momentum_rest_when_no_microbatch_has_used_a_parameter(
        optimizer: Any, reduce: str) -> None:
    """Its gradient is None then, as in plain PyTorch; a gradient of some micro-batches only is
    their sum."""
    model, reference = everywhere(lambda: job_of(Branching(), optimizer), reduce), Branching()
    assert_close(model, plain(reference, optimizer(reference), mse))
    assert isinstance(model, Branching)
    assert torch.equal(model.unused.weight, Branching().unused.weight)
    assert not torch.equal(model.sometimes.weight, Branching().sometimes.weight)


def test_the_bits_are_plain_pytorchs_when_a_parameter_is_used_in_some_steps_only() -> None:
    """One worker, one micro-batch."""
    model, reference = Branching(), Branching()
    trained(model, adamw(model), microbatches=1)
    plain(reference, adamw(reference), mse, microbatches=1)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


# --- requires_grad that changes -------------------------------------------------------------------

class Counter:
    """Counts finished steps, as an extra of the state."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.step = values["step"]


def deep() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return built(torch.nn.Linear(8, 8), torch.nn.Tanh())


def thaw(model: Any, step: int) -> None:
    """Train the last layer first, then also the middle one, then all, then no more the last one."""
    for layer, is_trained in ((0, step >= 3), (2, step >= 1), (4, step < 4)):
        model[layer].requires_grad_(is_trained)


def thawed_after(step: int) -> dict[str, Any]:
    model = deep()
    thaw(model, step)
    return job_of(model, adamw, after_step=lambda step: thaw(model, step + 1))


def thawed_within() -> dict[str, Any]:
    model, counter = deep(), Counter()

    def loss(model: Model, batch: Any) -> torch.Tensor:
        thaw(model, counter.step)
        return mse(model, batch)

    def after_step(step: int) -> None:
        counter.step = step + 1

    return job_of(model, adamw, loss=loss, after_step=after_step, state={"counter": counter})


THAWED: dict[str,
             Callable[[],
                      dict[str,
                           Any]]] = {"after_step": lambda: thawed_after(0), "loss": thawed_within}


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize("where", THAWED)
def test_layers_train_as_in_plain_pytorch_when_they_are_thawed_and_frozen(where: str,
                                                                          reduce: str) -> None:
    """In a world of any size, also on a worker that runs no micro-batch and so never hears of it in
    `loss`."""
    reference = deep()
    thaw(reference, 0)
    plain(reference, adamw(reference), mse, after_step=lambda step: thaw(reference, step + 1))
    model: Any = everywhere(THAWED[where], reduce)
    assert_close(model, reference)
    assert not torch.equal(model[0].weight, deep()[0].weight)


@pytest.mark.parametrize("where", THAWED)
def test_the_bits_are_plain_pytorchs_when_layers_are_thawed(where: str) -> None:
    """One worker, one micro-batch."""
    reference, made = deep(), THAWED[where]()
    thaw(reference, 0)
    plain(reference,
          adamw(reference),
          mse,
          microbatches=1,
          after_step=lambda step: thaw(reference, step + 1))
    model = made.pop("model")
    trained(model, made.pop("optimizer"), microbatches=1, **made)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("where", THAWED)
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_the_set_of_trained_parameters_goes_on_when_a_run_is_resumed(where: str, stop: int,
                                                                     tmp_path: Path) -> None:
    """It is part of the state: a script builds its model as for step 0."""
    def run(**changes: Any) -> str:
        made = THAWED[where]()
        model = made.pop("model")
        return trained(model, made.pop("optimizer"), **made, **changes).weights_sha256

    run(run_dir=tmp_path / "run", until=f"{stop} steps", checkpoint_every=1)
    assert run(run_dir=tmp_path / "run", checkpoint_every=1) == run()


def test_a_newcomer_trains_what_the_others_train_when_it_has_received_the_state() -> None:
    """Whatever it was built with."""
    giver, taker = deep(), deep()
    thaw(giver, 3)
    thaw(taker, 0)
    states = [LiveState(model, sgd(model)) for model in (giver, taker)]
    states[1].load(states[0].values())
    assert [p.requires_grad
            for p in taker.parameters()] == [p.requires_grad for p in giver.parameters()]


def test_a_prepared_step_is_applied_alike_when_the_process_has_revived_itself_after_a_thaw(
) -> None:
    """The reduced gradient has the layout of that step, and the counts say which parameters had
    none."""
    def until_the_vote(made: dict[str, Any]) -> Trainer:
        trainer = Trainer(job(**made), Launch(), Alone(), Events(None, attempt=1), "exact",
                          Sending())
        trainer.do(trainer.warm_up.run(is_exact=True))
        trainer.state.has_state = True
        for step in range(2):
            samples, digest = trainer.do(trainer.microbatches.run(step, trainer.world, None))
            trainer.microbatches.reduce(trainer.world)
            trainer.state.prepare()
            if step == 0:
                trainer.end.apply(samples, digest)
        return trainer

    first = until_the_vote(thawed_after(0))
    path = first.successor.leave()
    made = thawed_after(0)
    launch = Launch(revived_from=path)
    second = Trainer(job(**made), launch, Alone(), Events(None, attempt=1), "exact", Sending())
    second.do(second.warm_up.run(is_exact=True))
    assert second.successor.take_up(path)
    for trainer in (first, second):
        trainer.end.apply(8, 0)
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.job.model.parameters(), second.job.model.parameters(), strict=True))


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize("layers", [(0, 2), (2, 4), (4, 4)],
                         ids=["other lengths", "other lengths behind", "same length"])
def test_all_workers_raise_when_their_parameters_differ(
        layers: tuple[int, int], reduce: str) -> None:
    """An error with names, and no collective that waits for ever."""
    def make(rank: int) -> dict[str, Any]:
        model = deep()

        def after_step(step: int) -> None:
            if step == 1 and rank == 1:
                model[layers[0]].requires_grad_(False)
            if step == 1 and rank != 1 and layers[0] == layers[1]:
                model[2].requires_grad_(False)

        return job_of(model, after_step=after_step)

    with pytest.raises(RuntimeError, match="requires_grad of .*differs between workers in step 2"):
        in_a_world(3, lambda rank: job(**make(rank)), reduce)


def test_two_microbatches_of_a_step_that_train_different_parameters_are_an_error() -> None:
    """Whoever runs both would have another gradient than those who share them."""
    calls = [0]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        calls[0] += 1
        model[0].requires_grad_(calls[0] < 7)  # four of the warm-up, and two of step 0
        return mse(model, batch)

    with pytest.raises(
            RuntimeError,
            match=r"requires_grad of 0\.weight, 0\.bias differs between two micro-batches of "
                  r"step 0"):
        trained(built(), loss=loss)


@pytest.mark.parametrize("where", ["after_step", "loss"])
def test_a_group_that_is_added_to_the_optimizer_during_training_is_an_error(where: str) -> None:
    """A newcomer builds its optimizer as the script does at the start, so no worker could join or
    resume."""
    model = deep()
    optimizer = torch.optim.SGD(list(model.parameters())[2:], lr=0.1)
    calls = [0]

    def add(*arguments: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 4:
            optimizer.add_param_group({"params": list(model[0].parameters())})
        return mse(*arguments) if where == "loss" else torch.zeros(())

    with pytest.raises(
            RuntimeError,
            match=r"groups of \[4, 2\] parameters .*groups of \[4\] at the start\. Build it with"):
        trained(model, optimizer, **{where: add})

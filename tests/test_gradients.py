"""Which gradient a step has, whatever the user's code does with `.grad` and `requires_grad`.
That it is plain PyTorch's: test_same_bits.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_loop import (
    Trainer,
    adamw,
    built,
    in_a_world,
    job,
    mse,
    sgd,
    trained,
)
from test_same_bits import LATE, clamp, thaw, thawed

from elastic_trainer.config import Launch
from elastic_trainer.events.log import Events
from elastic_trainer.reduce.ring import Sending
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.training.job.job import Result
from elastic_trainer.world.place import Driver

Model = torch.nn.Module
pytestmark = pytest.mark.usefixtures("no_launcher")


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
    if reduce == "exact":
        assert len({result.weights_sha256 for world in results for result in world}) == 1
    return results[0][0].model


def job_of(model: Model, optimizer: Callable[[Model], torch.optim.Optimizer] = sgd,
           **changes: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer(model)} | changes


# --- code that writes to .grad --------------------------------------------------------------------

def with_hooks(act: Callable[[torch.nn.Parameter], None], parameters: slice) -> Model:
    model = built()
    for parameter in list(model.parameters())[parameters]:
        parameter.register_post_accumulate_grad_hook(act)
    return model


@pytest.mark.parametrize("parameters", [slice(None), slice(0, 1), slice(1, None)],
                         ids=["all", "last in the pass", "all but the last"])
def test_a_hook_that_changes_a_gradient_on_its_way_changes_that_of_its_microbatch(
        parameters: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up has not seen it, and the network may have begun: the micro-batches of that worker
    are run again, with the bits that it has sent. `ring` sums in place, so there it is an error
    once a part was sent."""
    # The last gradients wait for the pass to end.
    for reducer in ("ring", "exact"):
        monkeypatch.setattr(f"elastic_trainer.reduce.{reducer}.BUCKET_BYTES", 64)

    def make() -> dict[str, Any]:
        is_late = [False]

        def loss(model: Model, batch: Any) -> torch.Tensor:
            is_late[0] = torch.equal(batch[0], LATE)
            return mse(model, batch)

        return job_of(with_hooks(lambda parameter: clamp(parameter) if is_late[0] else None,
                                 parameters), loss=loss)

    everywhere(make)
    if parameters == slice(0, 1):
        with pytest.raises(RuntimeError,
                           match='a hook, or code after.*has changed .grad.*reduce="exact"'):
            in_a_world(2, lambda rank: job(**make()), "ring")
    else:  # nothing was sent: the first bucket was not as autograd left it
        in_a_world(2, lambda rank: job(**make()), "ring")


@pytest.mark.parametrize("reduce", ["exact", "ring"])
def test_a_gradient_that_changes_after_it_was_sent_is_an_error(
        reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that comes after ours would change what others have already: it may not come."""
    monkeypatch.setattr(f"elastic_trainer.reduce.{reduce}.BUCKET_BYTES", 64)

    def make() -> dict[str, Any]:
        model, is_late = built(), [False]

        def loss(model: Model, batch: Any) -> torch.Tensor:
            is_late[0] = torch.equal(batch[0], LATE)
            return mse(model, batch)

        def after_step(step: int) -> None:
            if step == 0:
                first = next(model.parameters())  # the last one in the pass
                first.register_post_accumulate_grad_hook(
                    lambda parameter: clamp(parameter) if is_late[0] else None)

        return job_of(model, after_step=after_step, loss=loss)

    with pytest.raises(RuntimeError, match=r"hook of 0\.weight .* was added, removed or replaced"):
        in_a_world(2, lambda rank: job(**make()), reduce)


# --- as on a GPU ----------------------------------------------------------------------------------

def zeroing(model: Model, batch: Any) -> torch.Tensor:
    model.zero_grad(set_to_none=False)
    return mse(model, batch)


def in_bfloat16(model: Model, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0].bfloat16()).float(), batch[1])


def only_the_last(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model[2](torch.tanh(model[0](batch[0]).detach())), batch[1])


def embedded() -> Model:
    """An embedding whose rows occur several times in a micro-batch."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(3, 3, sparse=True), torch.nn.Flatten(),
                               torch.nn.Linear(15, 3))


def by_numbers(model: Model, batch: Any) -> torch.Tensor:
    return mse(model, [(batch[0].abs() * 3).long().clamp(max=2), batch[1]])


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "sparse": lambda: job_of(embedded(), loss=by_numbers),
    "as it is": lambda: job_of(built()),
    "a hook": lambda: job_of(with_hooks(clamp, slice(None))),
    "zero_grad": lambda: job_of(built(), loss=zeroing),
    "unused": lambda: job_of(built(), loss=only_the_last),
    "thawed": lambda: thawed_after(0),
    "16 bits": lambda: job_of(built().bfloat16(), loss=in_bfloat16)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_bits_are_the_same_when_new_gradients_are_taken_as_on_a_gpu(
        case: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where buckets leave during the backward pass."""
    def weights() -> list[str]:
        worlds = [(1, "exact"), (3, "exact"), (2, "ring")]
        return [in_a_world(size, lambda rank: job(**case()), reduce)[0].weights_sha256
                for size, reduce in worlds]

    added = weights()
    monkeypatch.setattr("elastic_trainer.reduce.gradient_sums.TAKEN_ON", ("cpu",))
    for reducer in ("ring", "exact"):
        monkeypatch.setattr(f"elastic_trainer.reduce.{reducer}.BUCKET_BYTES", 64)
    assert weights() == added


@pytest.mark.parametrize("parameters", [slice(None), slice(0, 1), slice(1, None)],
                         ids=["all", "last in the pass", "all but the last"])
def test_a_late_hook_changes_the_gradient_or_is_an_error_when_new_gradients_are_taken(
        parameters: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """It acts from a later step on: never another result than that of one worker."""
    monkeypatch.setattr("elastic_trainer.reduce.gradient_sums.TAKEN_ON", ("cpu",))
    monkeypatch.setattr("elastic_trainer.reduce.exact.BUCKET_BYTES", 64)

    def make() -> dict[str, Any]:
        model, is_late = built(), [False]

        def loss(model: Model, batch: Any) -> torch.Tensor:
            is_late[0] = torch.equal(batch[0], LATE)
            return mse(model, batch)

        for parameter in list(model.parameters())[parameters]:
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: clamp(parameter) if is_late[0] else None)
        return job_of(model, loss=loss)

    alone = in_a_world(1, lambda rank: job(**make()))[0].weights_sha256
    try:
        found = {result.weights_sha256 for result in in_a_world(2, lambda rank: job(**make()))}
    except RuntimeError as error:
        assert "has changed .grad in step 2, after a part of it was" in str(error)
    else:
        assert found == {alone}


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
    assert all(torch.equal(a, b) for a,
               b in zip(models[0].parameters(), models[1].parameters(), strict=True))


# --- requires_grad that changes -------------------------------------------------------------------

def thawed_after(step: int) -> dict[str, Any]:
    model = thawed(step)
    return job_of(model, adamw, after_step=lambda step: thaw(model, step + 1))


def test_a_newcomer_trains_what_the_others_train_when_it_has_received_the_state() -> None:
    """Whatever it was built with."""
    giver, taker = thawed(3), thawed(0)
    states = [LiveState(model, sgd(model)) for model in (giver, taker)]
    states[1].load(states[0].values())
    assert [p.requires_grad
            for p in taker.parameters()] == [p.requires_grad for p in giver.parameters()]


def test_a_prepared_step_is_applied_alike_when_the_process_has_revived_itself_after_a_thaw(
) -> None:
    """The reduced gradient has the layout of that step, and the counts say which parameters had
    none."""
    def until_the_vote(made: dict[str, Any]) -> Trainer:
        trainer = Trainer(job(**made), Launch(), Driver(), Events(None, attempt=1), "exact",
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
    path = first.after_step.leave()
    made = thawed_after(0)
    launch = Launch(revived_from=path)
    second = Trainer(job(**made), launch, Driver(), Events(None, attempt=1), "exact", Sending())
    second.do(second.warm_up.run(is_exact=True))
    assert second.after_step.take_up(path)
    for trainer in (first, second):
        trainer.end.apply(8, 0)
    assert all(torch.equal(a, b) for a,
               b in zip(first.job.model.parameters(), second.job.model.parameters(), strict=True))


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize("layers", [(0, 2), (2, 4), (4, 4)],
                         ids=["other lengths", "other lengths after", "same length"])
def test_all_workers_raise_when_their_parameters_differ(
        layers: tuple[int, int], reduce: str) -> None:
    """An error with names, and no collective that waits for ever."""
    def make(rank: int) -> dict[str, Any]:
        model = thawed(3)

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
    model = thawed(3)
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

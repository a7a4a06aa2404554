"""The modes (train or eval) of a model's modules: the same on every worker, whatever sets them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import INPUT, SIZE, built, mse
from test_trainer import Fault, in_a_breaking_world, trainer_of

from elastic_trainer.schedule.schedule import Schedule
from elastic_trainer.state.forward import Modes
from elastic_trainer.training.differing import sentence

SCHEDULE = Schedule(dataset_size=SIZE, global_batch=8, microbatches=4, epochs=2, seed=3,
                    min_microbatch_samples=2)
pytestmark = pytest.mark.usefixtures("no_launcher")


def normed() -> Any:
    """A model whose bits depend on a mode, without random numbers."""
    return built(torch.nn.BatchNorm1d(8))


@pytest.mark.parametrize("where", ["before", "behind"])
def test_modes_that_differ_between_workers_end_the_run(where: str,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a step is applied, on all workers, with the module and the rank. Else the weights
    would depend on the world, in silence."""
    models, steps = [normed() for _ in range(3)], list[int]()

    def run(rank: int) -> str:
        model, trainer, seen = models[rank], trainer_of(models[rank]), list[int]()
        with pytest.raises(RuntimeError) as raised:
            for step in trainer:
                if where == "before" and rank == 0 and len(seen) == 2:
                    model[2].eval()
                for batch in step:
                    step.backward(mse(model, batch))
                if where == "behind" and trainer.is_first and step.number == 1:
                    model[2].eval()
                seen.append(step.number)
        steps.extend(seen)
        return str(raised.value)

    told = in_a_breaking_world(monkeypatch, 3, run)
    assert len(set(told)) == 1 and max(steps) == 1
    assert "the mode (train or eval) of 2 differs between the workers in step 2: 2 is in eval " \
           "mode on rank 0 alone" in told[0]


def test_modules_whose_modes_differ_are_named_with_the_workers() -> None:
    """The first ones of many, and the model itself by what it is."""
    told = sentence(7, [["", "a"], ["a"], ["", "a", "b"]])
    assert told.startswith("the mode (train or eval) of the model, b differs between the workers "
                           "in step 7: the model is in eval mode on rank 0, 2 alone.")
    assert "if trainer.is_first" in told and "model.train()" in told


@pytest.mark.parametrize("reduce", ["exact", "ring"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_modes_that_the_inner_loop_sets_are_those_of_every_worker(
        size: int, reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that has no micro-batch, and of one that rolls a step forward. The micro-batches
    leave other modes, and those of the first one hold. The same in every world."""
    def run(model: Any, *listeners: Any) -> tuple[str, list[list[bool]]]:
        trainer = trainer_of(model, listeners=listeners, reduce=reduce)
        seen = list[list[bool]]()
        for step in trainer:
            for batch in step:
                step.backward(mse(model, batch))
                microbatches = [SCHEDULE.microbatch_samples(step.number, microbatch)
                                for microbatch in range(4)]
                first, _, third, *_ = (INPUT[microbatch[0]] for microbatch in microbatches
                                       if len(microbatch))
                if step.number % 2 and torch.equal(batch[0][0], first):
                    model[2].train(not model[2].training)
                if torch.equal(batch[0][0], third):
                    model[1].eval()
            seen.append([module.training for module in model])
        return trainer.result.weights_sha256, seen

    models = [normed() for _ in range(size)]
    alone = run(normed())
    assert [modes[2] for modes in alone[1]] == [True, False, False, True, True, False]
    assert all(modes[1] for modes in alone[1])
    for ended in in_a_breaking_world(
            monkeypatch, size,
            lambda rank: run(models[rank], *[Fault(("step.voted", 1))] * (rank == 1))):
        assert ended[1] == alone[1] and (reduce == "ring" or ended[0] == alone[0])


@pytest.mark.parametrize(("until", "leaves_at", "fails_at"),
                         [(6, -1, -1), (12, 5, -1), (12, -1, 6)],
                         ids=["finished", "left", "failed"])
def test_modes_that_are_set_before_the_inner_loop_hold_when_a_run_goes_on(
        until: int, leaves_at: int, fails_at: int, tmp_path: Path) -> None:
    """model.train() stands before the inner loop, and model.eval() behind it. A resumed worker has
    run the first one before it had the checkpoint. The run was finished and gets more steps, or was
    left by return, or an exception has ended it."""
    def run(until: int, folder: Path | None = None, leaves_at: int = -1,
            fails_at: int = -1) -> tuple[str, list[int]]:
        model, steps = normed(), list[int]()
        trainer = trainer_of(model, until=f"{until} steps", checkpoint_every=3, run_dir=folder)
        for step in trainer:
            model.train()
            for batch in step:
                step.backward(mse(model, batch))
                if step.number == fails_at:
                    raise ZeroDivisionError
            steps.append(step.number)
            if step.every("1 epoch"):
                model.eval()
            if folder and trainer._worker.loop:
                checkpoints = trainer._worker.loop.checkpointing.checkpoints
                assert checkpoints
                checkpoints.wait()
            if step.number == leaves_at:
                return "", steps
        assert not model.training  # as the last evaluation has left it
        return trainer.result.weights_sha256, steps

    straight, _ = run(12)
    with suppress(ZeroDivisionError):
        run(until, tmp_path, leaves_at, fails_at)
    weights, steps = run(12, tmp_path)
    assert weights == straight and steps[0] == (3 if fails_at >= 0 else 6)  # an evaluation precedes


def test_a_compiled_module_has_the_mode_of_the_one_that_it_wraps() -> None:
    """So a world may have both kinds of workers: they have the same number of modules."""
    plain = normed()
    compiled: Any = torch.compile(normed())
    both = [Modes(plain), Modes(compiled)]
    for model in (plain, compiled):
        model.eval()
    assert both[0].evaluating() == both[1].evaluating() == ["", "0", "1", "2", "3"]
    for modes in both:
        modes.load(["2"])
    assert compiled.training and not compiled._orig_mod[2].training
    assert both[1].evaluating() == ["2"]
    for modes in both:
        modes.begin()
    assert both[0].checksum() == both[1].checksum() != 0

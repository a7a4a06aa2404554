"""Loader processes and the training: the same bits in every world, in train(), and with phases."""

from __future__ import annotations

import random
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import DATA, Ears, adamw, built, mse, trained
from test_settings import differences
from test_trainer import Model, Pair, in_a_breaking_world, loop, optimizers, trainer_of
from test_trainer import adversarial as rounds

from elastic_trainer import ConfigError, Loader

pytestmark = pytest.mark.usefixtures("no_launcher")
ONE = Loader(workers=1)


class Noisy:
    """The samples of the tests with noise from each generator."""

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = DATA[i]
        return inputs + 0.1 * torch.randn(5) + random.random(), target


@pytest.mark.parametrize("size", [2, 4])
def test_the_bits_are_those_of_one_worker_in_every_world(
        size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a generation that breaks. The one worker reads each sample by itself."""
    alone = loop(trainer_of(model := built(), dataset=Noisy(), loader=Loader(workers=0)), model)
    models = [built() for _ in range(size)]
    ended = in_a_breaking_world(monkeypatch, size, lambda rank: loop(
        trainer_of(models[rank], dataset=Noisy(), loader=ONE), models[rank]))
    assert ended == [alone] * size


def test_train_has_the_same_bits() -> None:
    """Its loss is a function, and nothing else differs."""
    alone = loop(trainer_of(model := built(), dataset=Noisy(), loader=ONE), model)
    assert trained(built(), dataset=Noisy(), loader=ONE).weights_sha256 == alone


def test_each_phase_has_the_batches_that_it_would_read_itself() -> None:
    """A phase reads its samples anew, with a seed of its own."""
    def run(workers: int) -> Any:
        pair = Pair()
        return rounds(pair, trainer_of(pair, optimizers(pair), dataset=Noisy(), clip_norm=0.5,
                                       microbatches=2, loader=Loader(workers=workers)))[0]

    assert run(0) == run(2)


def test_what_a_loss_draws_does_not_depend_on_the_loader() -> None:
    """Dropout has the seed of the micro-batch, with a loader and without one."""
    def dropped(model: Model, batch: Any) -> torch.Tensor:
        return mse(model, batch) * torch.rand(())

    ends = {loop(trainer_of(model := built(), loader=loader), model, dropped)
            for loader in (None, Loader(workers=0), ONE)}
    assert len(ends) == 1


def test_an_error_of_the_dataset_ends_the_run_with_its_sample() -> None:
    """The same exception as without loader processes."""
    class Bad(Noisy):
        def __getitem__(self, i: int) -> Any:
            if i == 17:
                raise KeyError("no such label")
            return super().__getitem__(i)

    with pytest.raises(KeyError, match="no such label") as raised:
        loop(trainer_of(model := built(), dataset=Bad(), loader=ONE), model)
    assert "sample 17" in "".join(traceback.format_exception(raised.value))


def test_other_seeds_of_samples_are_reported_when_a_run_is_resumed_with_a_loader(
        run_dir: Path) -> None:
    """Augmentation draws other numbers from there on."""
    ears = Ears()
    trained(model := built(), adamw(model), until="2 steps")
    trained(again := built(), adamw(again), loader=ONE, listeners=[ears])
    assert differences(ears) == {"loader": (False, True, "given")}


def test_a_batch_is_made_in_one_way() -> None:
    """Two functions that make batches contradict."""
    with pytest.raises(ConfigError, match="Loader has a collate of its own"):
        trainer_of(built(), collate=list, loader=Loader(collate=tuple))

"""The laws of `elastic-trainer tune`: what it overrides, which sizes it tries, and that a script
without enough memory does no harm."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from elastic_trainer import train
from elastic_trainer.config import ConfigError
from elastic_trainer.events.log import read_events
from elastic_trainer.measure import trial, tune
from elastic_trainer.measure.trial import Trial
from elastic_trainer.state.configuration import VARIABLE, Configuration, overridden

GIB = 2**30
SCRIPT = """
import torch
from elastic_trainer import train

def loss(model, batch):
    held = torch.ones(len(batch[0]), 160 * 2**18)  # 160 MiB a sample
    return (model(batch[0]) * held[:, :1]).mean()

model = torch.nn.Linear(4, 1)
train(model, torch.optim.SGD(model.parameters(), lr=0.1),
      torch.utils.data.TensorDataset(torch.ones(64, 4)), loss=loss, global_batch=8, microbatches=4,
      until="9 epochs", store="%s")
"""


def whole(microbatches: int, step_s: float = 1.0, gib: float = 1.0, batch: int = 64) -> Trial:
    return Trial(microbatches=microbatches, global_batch=batch, ending="whole", step_s=step_s,
                 host_bytes=int(gib * GIB))


def test_an_override_holds_instead_of_the_numbers_of_the_script(
        run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Length, micro-batches and batch are the measurement's. The script's store stays empty."""
    options = {"until": "3 steps", "microbatches": 4, "global_batch": 16, "store": ""}
    monkeypatch.setenv(VARIABLE, Configuration({}, "--override", overrides=options).to_text())
    model = torch.nn.Linear(4, 1)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1),
          torch.utils.data.TensorDataset(torch.ones(64, 4)), global_batch=8, microbatches=8,
          loss=lambda model, batch: model(batch[0]).mean(), store=str(tmp_path / "store"))
    events = read_events(run_dir)
    assert [e["samples"] for e in events if e["event"] == "worker.step_committed"] == [16] * 3
    said, = (e for e in events if e["event"] == "job.overridden")
    assert (said["steps"], said["microbatches"], said["global_batch"]) == (3, 4, 16)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("text", "told"), [
    ("microbatch=4", "--override microbatch is no option. Did you mean microbatches?"),
    ("microbatches=four", "--override microbatches=four has no TOML value"),
    ("microbatches", "--override microbatches= has no TOML value"),
    ("microbatches=0", "--override microbatches is 0. Use a whole number from 1"),
    ("loader=4", "--override loader is 4, but this option is an object"),
])
def test_an_override_that_no_option_takes_is_an_error(text: str, told: str) -> None:
    """A typing mistake never measures something else."""
    with pytest.raises(ConfigError, match=re.escape(told)):
        overridden(Configuration({}, "--set"), [text])


def test_candidates_are_shared_evenly_and_have_a_sample_each() -> None:
    """The script's own number is one of them, if the workers share it evenly."""
    assert tune.candidates_of(64, 4, own=12) == [4, 8, 12, 16, 32, 64]
    assert tune.candidates_of(64, 4, own=6) == [4, 8, 16, 32, 64]
    assert tune.candidates_of(3, 4, own=3) == []


def test_larger_microbatches_are_tried_until_the_next_would_not_fit() -> None:
    """Its memory is on the line through two sizes that have run. Then smaller micro-batches are
    tried, while they are faster."""
    sizes = [4, 8, 16, 32, 64]
    trials = [whole(16, gib=2.0)]
    assert tune.next_microbatches(trials, sizes, 5 * GIB) == 8
    trials.append(whole(8, gib=3.0))
    assert tune.predicted(trials, 4) == 5 * GIB
    assert tune.next_microbatches(trials, sizes, 5 * GIB) == 4
    assert tune.next_microbatches(trials, sizes, 5 * GIB - 1) is None  # 16 is not faster than 8
    trials[0] = whole(16, step_s=0.5, gib=2.0)
    assert tune.next_microbatches(trials, sizes, 5 * GIB - 1) == 32
    trials.append(Trial(microbatches=4, global_batch=64, ending="memory"))
    trials.append(whole(32, step_s=0.6))
    assert tune.next_microbatches(trials, sizes, 9 * GIB) is None


def test_the_largest_microbatch_that_fits_is_found_by_halving() -> None:
    """Between the largest that has run and the smallest that has not, of numbers that workers share
    evenly; without one that has failed, up to one micro-batch for each worker."""
    def found(most_samples: int, workers: int) -> tuple[int, list[int]]:
        trials, tried = [whole(32)], []
        while number := tune.next_larger(trials, workers):
            assert number % workers == 0 and number not in tried
            tried.append(number)
            trials.append(whole(number) if -(-64 // number) <= most_samples else
                          Trial(microbatches=number, global_batch=64, ending="memory"))
        return min(one.microbatches for one in trials if one.is_whole), tried

    assert found(7, 2)[0] == 10  # 7 samples; 8 micro-batches would have 8
    assert found(64, 1)[0] == 1 and found(64, 4)[0] == 4
    assert found(2, 2) == (32, found(2, 2)[1]) and len(found(7, 1)[1]) <= 5
    assert tune.next_larger([Trial(microbatches=4, global_batch=64, ending="memory")], 1) is None


def test_the_fastest_number_is_recommended_and_of_those_alike_the_larger_one() -> None:
    """One that the workers do not share evenly is not."""
    trials = [whole(8, 1.0), whole(16, 1.02), whole(32, 1.2), whole(2, 0.5)]
    best = tune.best_of(trials, 4)
    assert best is not None and best.microbatches == 16
    assert tune.best_of([Trial(microbatches=4, global_batch=16, ending="memory")], 4) is None


def test_a_script_that_needs_more_memory_than_there_is_ends_alone(
        tmp_path: Path, no_launcher: None, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """tune finds the size that fits. A size that would not fit by prediction is not tried, and one
    that is tried is ended by the limit."""
    store, script = tmp_path / "store", tmp_path / "my_train.py"
    script.write_text(SCRIPT % store)
    command = [sys.executable, str(script)]
    monkeypatch.chdir(tmp_path)
    # With the worker's own settings a freed block is split, so what a size needs is less certain.
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "65536")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert tune.main(["--workers", "1", "--steps", "4", "--memory", "1.2", "--", *command]) == 0
    shown = capsys.readouterr().out
    assert "microbatches=4: " in shown and "microbatches=2: " in shown
    assert "microbatches=1: not enough memory" in shown  # 8 samples of 160 MiB
    assert "Recommended for 1 workers: microbatches=" in shown
    assert "BatchNorm" in shown and not store.exists()
    found = trial.measure(command, {"until": "4 steps", "microbatches": 1}, tmp_path / "large",
                          int(1.2 * GIB))
    assert found.ending == "memory"

"""What earlier versions have written is read as they read it: event logs and a checkpoint.

    python tests/test_stored.py     writes the expected files of the logs anew: only if a change of
                                    what `report` or `verify` say is wanted

`told`, a run on this machine, has a loss, a join, a step that stood still, everybody lost, a stop
by a person, a supervisor and a driver that were killed, and two starts from a checkpoint. The
others are those of version 0.1 and of two replays (test_plan.py).
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer import train
from elastic_trainer.events.segments import EVENTS_FILE
from elastic_trainer.events.summary import json_of, summarize_log
from elastic_trainer.views.verify import verify

DATA = Path(__file__).resolve().parent / "data"
STORED = DATA / "stored"
LOGS = {"told": STORED / "told.jsonl.gz", "version-0.1": DATA / "events-0.1.jsonl",
        "zeros": DATA / "replays" / "zeros.jsonl.gz",
        "blind3": DATA / "replays" / "blind3.jsonl.gz"}


def said_of(name: str, folder: Path) -> str:
    """Return what `report --json` and `verify` say of a stored log, in JSON."""
    run_dir = folder / name
    run_dir.mkdir()
    packed = LOGS[name].read_bytes()
    text = gzip.decompress(packed) if LOGS[name].suffix == ".gz" else packed
    (run_dir / EVENTS_FILE).write_bytes(text)
    return json_of({"report": summarize_log(run_dir),
                    "verify": verify(run_dir).sentences()}) + "\n"


@pytest.mark.parametrize("name", LOGS)
def test_a_stored_log_has_the_report_and_the_verdict_that_it_had(name: str,
                                                                 tmp_path: Path) -> None:
    """To the last digit."""
    assert said_of(name, tmp_path) == (STORED / f"{name}.json").read_text()


def resumed(run_dir: Path, steps: int) -> str:
    """Train the stored run's job in its folder up to `steps`; return the hash of its weights."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4),
                                torch.nn.Linear(4, 4))
    points = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(points, points[:, :4].argmax(1))

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), data, loss=loss,
                 until=f"{steps} steps", global_batch=16, microbatches=4, seed=3,
                 checkpoint_every=3, run_dir=run_dir).weights_sha256


def test_a_checkpoint_that_names_shards_is_resumed(tmp_path: Path) -> None:
    """It is of a run of 6 steps with `shards=4`. Its weights are those that this version restores,
    and the run that goes on from it is the one that was never interrupted."""
    run_dir = tmp_path / "run"
    shutil.copytree(STORED / "checkpoint", run_dir)
    assert resumed(run_dir, 6) == (
        "2737a583cfbbbe6383e139f0cb4be90ddac5d1e5689e5af6ed8de7b762123335")
    before = set(run_dir.glob("checkpoints/log/*"))
    whole = resumed(run_dir, 12)
    assert verify(run_dir).is_proved, verify(run_dir).sentences()
    assert len(set(run_dir.glob("checkpoints/log/*")) - before) >= 2
    if torch.__version__.startswith("2.13."):  # the stored run's: another one computes other bits
        assert whole == resumed(tmp_path / "whole", 12)


if __name__ == "__main__":
    for log in LOGS:
        with tempfile.TemporaryDirectory() as temporary:
            (STORED / f"{log}.json").write_text(said_of(log, Path(temporary)))

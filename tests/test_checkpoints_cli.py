"""`elastic-trainer checkpoints`: what it shows, proves, deletes and takes out of a store."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import horovod
import numpy
import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint import Fleet, begun

from elastic_trainer.__main__ import main
from elastic_trainer.commands import checkpoint_actions
from elastic_trainer.commands.run_options import store_of_run
from elastic_trainer.state.checkpoints import restore
from elastic_trainer.state.checkpoints.checkpoint import PARTS, Plan
from elastic_trainer.state.live_state import LiveState
from elastic_trainer.state.stores.store import FolderStore
from elastic_trainer.training.trainer import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, torch.nn.Module]:
    """A store with four checkpoints, of which three are kept; returns it and the model of the
    newest."""
    folder = tmp_path_factory.mktemp("runs") / "checkpoints"
    fleet = begun(folder, 2, steps=0)
    for _ in range(4):
        fleet.train(10)
        fleet.checkpoint()
    return str(folder), fleet.states[0].model


def test_lists_the_checkpoints_that_can_be_restored(run: tuple[str, torch.nn.Module],
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """Step, time, size, parts."""
    assert main(["checkpoints", "ls", run[0]]) == 0
    heads, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heads[0] == "step" and [row[0] for row in rows] == ["20", "30", "40"]


def test_shows_what_a_checkpoint_is_made_of(run: tuple[str, torch.nn.Module],
                                            capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON, the newest or the one that is asked for."""
    for arguments, step in (([], 40), (["--step", "30"], 30)):
        assert main(["checkpoints", "show", run[0], *arguments]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["step"] == step
        starts = [sum(part["bytes"] for part in shown["parts"][:n])
                  for n in range(len(shown["parts"]) + 1)]
        assert [part["start"] for part in shown["parts"]] + [shown["bytes"]] == starts
        assert {"name": "parameters/0.weight", "dtype": "float32", "shape": [8,
                                                                             4]} in shown["tensors"]
        assert {"name": "buffers/1.num_batches_tracked", "dtype": "int64",
                "shape": []} in shown["tensors"]


def test_a_checkpoint_names_its_job(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """Which samples, which optimizer, with which versions: for whoever finds it in a year."""
    monkeypatch.setenv("ELASTIC_TRAINER_RUN_DIR", str(tmp_path))
    model, data = torch.nn.Linear(2, 1), torch.utils.data.TensorDataset(torch.ones(10, 2))
    train(model,
          torch.optim.SGD(model.parameters(), lr=0.1),
          data,
          loss=lambda m, batch: m(batch[0]).square().mean(),
          global_batch=4,
          microbatches=2,
          seed=5,
          clip_norm=0.5,
          until="2 steps")
    assert main(["checkpoints", "show", str(tmp_path / "checkpoints")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["schedule"] == {
        "dataset_size": 10, "global_batch": 4, "microbatches": 2, "epochs": None, "seed": 5,
        "max_steps": 2,
        "drop_last": False, "min_microbatch_samples": 1, "steps": 2
    }
    assert shown["config"] == {"optimizer": "SGD", "clip_norm": 0.5, "clip_value": None,
                               "model": "Linear", "precision": "fp32"}
    assert shown["versions"] == {"python": platform.python_version(), "torch": torch.__version__,
                                 "horovod": horovod.__version__, "numpy": numpy.__version__}


def test_verify_fails_when_a_byte_is_wrong(run: tuple[str, torch.nn.Module],
                                           capsys: pytest.CaptureFixture[str]) -> None:
    """And proves all of them when none is."""
    assert main(["checkpoints", "verify", run[0]]) == 0
    assert capsys.readouterr().out.count("whole: step") == 3
    part = next(Path(run[0], PARTS).rglob("*-000000000030/*.bin"))
    right = part.read_bytes()
    part.write_bytes(bytes([right[0] ^ 1]) + right[1:])
    try:
        assert main(["checkpoints", "verify", run[0]]) == 1
        assert "DAMAGED: step 30" in capsys.readouterr().out
    finally:
        part.write_bytes(right)


def training_on(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the run publish once more, and let its oldest go, when somebody begins to read a
    checkpoint."""
    def read_part(*arguments: Any) -> Any:
        monkeypatch.setattr(checkpoint_actions, "read_part", restore.read_part)
        fleet.publish()
        return restore.read_part(*arguments)

    monkeypatch.setattr(checkpoint_actions, "read_part", read_part)


def test_what_a_run_lets_go_while_it_is_read_is_not_damaged(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is being trained: verify says that it is no longer kept, export what to do."""
    fleet = begun(tmp_path / "run",
                  plan=Plan(part_bytes=100, keep_last=2),
                  steps=0,
                  optimizer="SGD")
    for _ in range(2):
        fleet.publish()
    training_on(fleet, monkeypatch)
    assert main(["checkpoints", "verify", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "step 1: no longer kept" in said and "whole: step 2" in said and "DAMAGED" not in said
    training_on(fleet, monkeypatch)
    assert main(
        ["checkpoints", "export",
         str(tmp_path / "run"),
         str(tmp_path / "model"), "--step", "2"]) == 2
    assert "no longer kept" in (said := capsys.readouterr().err) and "Run it again" in said
    assert main(["checkpoints", "export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0


def test_prune_deletes_only_objects_without_use(
        run: tuple[str, torch.nn.Module], capsys: pytest.CaptureFixture[str]) -> None:
    """Left over from a dead writer, yes; what may be in flight, no."""
    store = FolderStore(Path(run[0]))
    old, young = (f"{PARTS}/000000000001-{step:012d}/000000-x.bin" for step in (35, 41))
    store.put(old, b"x")
    store.put(young, b"x")
    assert main(["checkpoints", "prune", run[0]]) == 0
    assert "deleted 1 parts" in capsys.readouterr().out
    assert old not in store.list(PARTS) and young in store.list(PARTS)
    assert main(["checkpoints", "verify", run[0]]) == 0


def test_export_is_a_file_that_is_loaded_without_us(run: tuple[str, torch.nn.Module],
                                                    tmp_path: Path) -> None:
    """Parameters and buffers by name, with the bits of the trained model."""
    output = tmp_path / "model.safetensors"
    assert main(["checkpoints", "export", run[0], str(output)]) == 0
    fresh = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8),
                                torch.nn.Linear(8, 2))
    fresh.load_state_dict(load_file(output))
    assert all(
        torch.equal(a, b)
        for a, b in zip(run[1].state_dict().values(), fresh.state_dict().values(), strict=True))


@pytest.mark.parametrize("output", ["/dev/null/model", "nosuch://bucket/model"])
def test_export_names_the_output_when_it_cannot_be_written(
        run: tuple[str, torch.nn.Module], output: str,
        capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is none, a protocol that fsspec does not know: one sentence, no traceback."""
    assert main(["checkpoints", "export", run[0], output]) == 2
    assert f"{output} cannot be written: " in capsys.readouterr().err


class Tied(torch.nn.Module):
    """A model whose two layers share a weight, with a buffer that its state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


@pytest.mark.parametrize("is_old", [False, True])
def test_export_has_what_the_models_state_dict_has(tmp_path: Path, is_old: bool) -> None:
    """Both names of a tied weight, no buffer that is not persistent; a record of before these were
    kept has what it has."""
    fleet = Fleet(tmp_path / "run")
    model = Tied()
    fleet.states = [LiveState(model, torch.optim.SGD(model.parameters(), lr=1.0))]
    if is_old:
        values = fleet.states[0].values
        fleet.states[0].values = lambda absent=None: {  # type: ignore[method-assign]
            k: v for k, v in values().items() if k not in ("aliases", "left_out")}
    fleet.restore()
    fleet.publish()
    output = tmp_path / "model.safetensors"
    assert main(["checkpoints", "export", str(tmp_path / "run"), str(output)]) == 0
    fresh, tensors = Tied(), load_file(output)
    if is_old:
        assert "scratch" in tensors and "head.weight" not in tensors
        return
    fresh.load_state_dict(tensors)  # strict
    assert all(
        torch.equal(mine,
                    fresh.state_dict()[name]) for name, mine in model.state_dict().items())


@pytest.mark.parametrize(("arguments", "said"),
                         [(["ls", "nowhere"], "has no checkpoint"),
                          (["show", "URL", "--step", "7"], "[20, 30, 40]"),
                          (["ls", "gcs://bucket/x"], "names no store"),
                          (["ls", "s3:/bucket/x"], "names no store")])
def test_an_error_is_printed_when_there_is_no_checkpoint_to_show(
        run: tuple[str, torch.nn.Module], arguments: list[str], said: str,
        capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and what to name instead."""
    assert main(["checkpoints", *(run[0] if a == "URL" else a for a in arguments)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("store", "url"),
                         [("", ""), ("/data", "/data/run"),
                          ("s3://bucket/prefix/", "s3://bucket/prefix/run"),
                          ("s3://bucket?ACL=private", "s3://bucket/run?ACL=private"),
                          ("s3", "s3://elastic-trainer/checkpoints/run")])
def test_each_run_has_a_place_of_its_own_in_the_store(store: str, url: str) -> None:
    """What --store says, and the run's name."""
    assert store_of_run(store, "run") == url

"""The laws of `elastic-trainer scaling`: what is compared with what, which cost is named, and that
real worlds are measured."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from elastic_trainer.config import ConfigError
from elastic_trainer.measure import cases, plot, scaling, worlds
from elastic_trainer.measure.cases import PARTS, Case

SCRIPT = """
import torch
from elastic_trainer import train

model = torch.nn.Linear(64, 64)
train(model, torch.optim.SGD(model.parameters(), lr=0.1),
      torch.utils.data.TensorDataset(torch.ones(512, 64)), global_batch=16, shards=4, epochs=1,
      loss=lambda model, batch: model(batch[0]).square().mean())
"""


def test_strong_cases_keep_the_batch_and_weak_ones_grow_it() -> None:
    """One worker is measured once for both, and the arms take turns."""
    found = cases.cases_of(["ddp", "exact"], [2, 1, 4], ["strong", "weak"])
    assert found == [Case(arm, number, scale)
                     for number, scale in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 4))
                     for arm in ("ddp", "exact")]
    assert cases.cases_of(["ring"], [2], ["weak"]) == [Case("ring", 1), Case("ring", 2, 2)]


def test_a_rate_is_compared_with_one_worker_and_with_ddp() -> None:
    """The median counts, and DDP with as many workers and the same batch."""
    rows = {row.case: row for row in cases.rows_of({
        Case("ddp", 1): [1.0], Case("exact", 1): [1.0, 9.0, 1.0],
        Case("ddp", 2, 2): [1.0], Case("exact", 2, 2): [1.25]}, batch=10)}
    weak = rows[Case("exact", 2, 2)]
    assert (weak.batch, weak.rate, weak.speedup, weak.efficiency) == (20, 16.0, 1.6, 0.8)
    assert weak.to_peer == 0.8 and weak.costs and not rows[Case("exact", 1)].costs
    assert rows[Case("ddp", 2, 2)].to_peer is None


def test_the_part_that_takes_most_longer_is_named() -> None:
    """Not the longest one. DDP reduces in its backward pass, so both are one part."""
    ours = cases.parts_of({"forward": 30.0, "backward": 50.0, "reduce": 10.0, "vote": 4.0,
                           "apply": 2.0, "step": 99.0})
    peer = cases.parts_of({"load": 1.0, "forward": 30.0, "backward": 58.0, "apply": 2.0})
    assert set(ours) == set(PARTS) and ours["other"] == 3.0 and peer["other"] == 0.0
    assert cases.costliest(ours, peer) == ("vote", 4.0, 8.0)
    half = cases.shared(peer, Case("ring", 2))
    assert (half["forward"], half["apply"]) == (15.0, 2.0)
    assert cases.shared(peer, Case("ring", 2, 2)) == peer


@pytest.mark.parametrize(("argv", "message"), [
    (["--arms", "ddp", "--", "python", "my_train.py"], "the demos only"),
    (["--arms", "nccl"], "'nccl'"),
    (["--workers", "two"], "--workers is 'two'"),
    (["--batch", "8", "--", "python", "my_train.py"], "--batch are options of the demo"),
    (["--plot", "picture.pdf"], "NAME.png")])
def test_what_cannot_be_measured_is_an_error_before_any_run(argv: list[str], message: str) -> None:
    """The error names the option."""
    with pytest.raises(ConfigError, match=message):
        scaling.run(argv)


def test_a_picture_without_matplotlib_is_an_error_that_names_the_extra(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"elastic-trainer\[plots\]"):
        plot.require_plot(tmp_path / "scaling.png")


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    """With one panel for each kind of scaling."""
    pytest.importorskip("matplotlib")
    rows = cases.rows_of({Case("ring", 1): [1.0], Case("ring", 2): [0.6],
                          Case("ring", 2, 2): [1.1]}, batch=8)
    plot.draw(rows, ["strong", "weak"], tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_ddp_trains_the_demo_with_two_workers(tmp_path: Path, turn: None) -> None:
    """The seconds of the steps that count, and the parts of a step."""
    ran = worlds.peer("gpt", Case("ddp", 2), 2, 4, tmp_path)
    assert len(ran.seconds) == 2 and set(ran.phases) == {"load", "forward", "backward", "apply"}


def test_a_script_is_measured_with_real_workers(
        tmp_path: Path, no_launcher: None, turn: None, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """The part that costs the most is named, also where a busy machine makes nothing of it."""
    monkeypatch.setattr(cases, "LITTLE", math.inf)
    (tmp_path / "my_train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, str(tmp_path / "my_train.py")]
    assert scaling.run(["--arms", "exact", "--mode", "strong", "--steps", "4", "--rounds", "1",
                        "--", *command]) == 0
    file, = (tmp_path / "runs").glob("scaling-*/scaling.json")
    found = json.loads(file.read_text())
    assert [row["case"]["workers"] for row in found["rows"]] == [1, 2]
    assert {(row["batch"], len(row["seconds"])) for row in found["rows"]} == {(16, 4)}
    assert "The largest cost is " in capsys.readouterr().out
    assert any(f"The largest cost is {part}: " in found["costs"][0] for part in PARTS)

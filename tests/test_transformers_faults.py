"""The adapter for transformers, and the example that fine-tunes, on a real cluster whose workers
die."""

from __future__ import annotations

import json
import runpy
import signal
import sys
from pathlib import Path

import pytest
from cluster import TESTS, Cluster

from elastic_trainer.views.verify import verify

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_launcher")
JOB = TESTS / "jobs" / "finetuning.py"
EXAMPLE = ["--steps", "20", "--global-batch", "8", "--evaluate-every", "5",
           "--checkpoint-every", "4"]


def test_a_transformers_trainer_loses_nothing_when_a_worker_dies_and_another_joins(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
        ) -> None:
    """The weights, the best evaluation and the whole log are those of one undisturbed process, on
    every worker, also on the one that joins."""
    monkeypatch.chdir(tmp_path)
    alone = runpy.run_path(str(JOB))
    best = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("best"))
    with Cluster(tmp_path, command=[sys.executable, str(JOB)]) as cluster:
        cluster.wait_for_step(3)
        cluster.signal_worker("127.0.0.1", signal.SIGKILL)
        lost = cluster.wait_for_world(3)
        cluster.wait_for_world(4, after=lost)
        assert cluster.finish() == 0, cluster.story()
        cluster.assert_nothing_lost(alone["trainer"].elastic.result.weights_sha256, victims=1)
        assert (tmp_path / "output.log").read_text().count(best) == 4, cluster.story()


def test_the_example_that_finetunes_loses_nothing_when_all_workers_are_killed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
        ) -> None:
    """It is resumed, and ends with the weights and the evaluation of one undisturbed process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["finetune", *EXAMPLE])
    monkeypatch.setenv("ELASTIC_TRAINER_RUN_DIR", str(tmp_path / "twin"))
    runpy.run_module("elastic_trainer.examples.finetune", run_name="__main__")
    evaluations = [line for line in capsys.readouterr().out.splitlines() if "held out" in line]
    twin = json.loads((tmp_path / "twin" / "result.json").read_text())["weights_sha256"]
    monkeypatch.delenv("ELASTIC_TRAINER_RUN_DIR")
    command = [sys.executable, "-m", "elastic_trainer.examples.finetune", *EXAMPLE]
    with Cluster(tmp_path, command=command) as cluster:
        cluster.wait_for_step(5)
        cluster.signal_worker("127.0.0.3", signal.SIGKILL)
        cluster.wait_for_step(9)
        cluster.kill_everyone()
        cluster.start()
        assert cluster.wait() == 0, cluster.story()
        assert evaluations[-1] in (tmp_path / "output.log").read_text(), cluster.story()
        (finished,) = cluster.events("run.finished")
        assert (finished["attempt"], finished["weights_sha256"]) == (2, twin), cluster.story()
        assert verify(cluster.run_dir).is_proved, cluster.story()

"""One job with all that follows an evaluation, on a cluster that loses its first worker, gets a
newcomer, and loses everyone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cluster import TESTS, Cluster, run_alone
from faults import Plan
from logged import Series, of_csv, of_mlflow, of_tensorboard, of_wandb
from test_best import kept_of
from test_faults import host

JOB = [sys.executable, str(TESTS / "jobs" / "logged.py")]
SAME = ("train/loss", "train/lr", "train/norm", "eval/accuracy", "eval/loss")
"""The numbers that do not depend on the world."""


def twin(folder: Path) -> dict[str, str]:
    """Do the job alone; returns what it printed."""
    printed = run_alone([*JOB, str(folder)], folder.parent)
    return {name: text for name, text in (line.split(maxsplit=1) for line in printed.splitlines())}


def assert_each_step_once(series: Series, wanted: Series, lacking: int = 0) -> None:
    """With the twin's numbers; TensorBoard keeps floats of 32 bits."""
    for name in SAME:
        assert len(dict(series[name])) == len(series[name]), name
        assert len(series[name]) >= len(wanted[name]) - lacking, name
        values = dict(wanted[name])
        for step, value in series[name]:
            assert value == pytest.approx(values[step], rel=1e-6), (name, step)


def test_nothing_that_follows_an_evaluation_is_another_when_the_first_worker_and_then_all_die(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 dies in an evaluation, a newcomer enters, and all die in a later evaluation. The run
    ends after the same step as its twin, keeps the same best checkpoint, and each logger has each
    step once."""
    for package in ("torchmetrics", "tensorboard", "mlflow", "wandb"):
        pytest.importorskip(package)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # to read
    alone = twin(tmp_path / "twin")
    plan = Plan().kill(host=host(0), at="evaluate", step=19).add(
        "hold", host=host(1), at="evaluate", step=29).add(
        "hang", host=host(2), at="evaluate", step=79)
    logs = tmp_path / "logs"
    with Cluster(tmp_path, hosts=5, start_with=4, command=[*JOB, str(logs)], plan=plan) as cluster:
        cluster.wait_until_fired(2)
        cluster.set_hosts(cluster.all_hosts[1:])
        cluster.wait_until_ready(host(4))
        cluster.release()
        cluster.wait_for_world(4, after=1)
        cluster.wait_until_fired(3)
        cluster.kill_everyone()
        cluster.start()
        assert cluster.finish() == 0
        result = cluster.assert_nothing_lost(alone["weights"], victims=1)
        opened = {(e["attempt"], e["worker"].split("/")[0])
                  for e in cluster.events("worker.logger_opened") if e["logger"] == "Csv"}
        failed = [e["error"] for e in cluster.events("worker.logger_failed")]
        assert not failed, "\n".join(failed)
    assert result["steps"] == int(alone["steps"]) and result["attempts"] == 2
    best = int(alone["best"].split()[1]) + 1
    kept = kept_of(cluster.run_dir / "checkpoints")  # and one that was compared before
    assert [step for step in kept if kept[step]] == [best] and result["steps"] in kept
    assert len(opened) == 3 and {attempt for attempt, _ in opened} == {1, 2}, opened
    wanted = of_csv(tmp_path / "twin" / "metrics.csv")
    mine = of_csv(logs / "metrics.csv")
    assert {name: mine[name] for name in SAME} == {name: wanted[name] for name in SAME}
    assert {value for _, value in mine["train/world_size"]} == {3.0, 4.0}
    assert_each_step_once(of_tensorboard(logs / "tensorboard"), wanted)
    assert_each_step_once(of_mlflow(logs / "mlruns"), wanted)
    assert_each_step_once(of_wandb(logs), wanted)

"""The adapter for Lightning on a real cluster whose workers die."""

from __future__ import annotations

import runpy
import signal
import sys
from pathlib import Path

import pytest
from cluster import TESTS, Cluster

from elastic_trainer.views.verify import verify

pytest.importorskip("lightning")
pytestmark = pytest.mark.usefixtures("no_launcher")
JOB = TESTS / "jobs" / "lightning_fit.py"


def test_a_lightning_module_loses_nothing_when_workers_die_join_and_resume(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
        ) -> None:
    """A worker dies, another one joins, all are killed, and a new attempt resumes. Weights,
    metrics, attributes, the rate and the step of the early end are those of one undisturbed
    process, on every worker."""
    monkeypatch.chdir(tmp_path)
    alone = runpy.run_path(str(JOB))
    history = next(line for line in capsys.readouterr().out.splitlines()
                   if line.startswith("history"))
    with Cluster(tmp_path, command=[sys.executable, str(JOB)]) as cluster:
        cluster.wait_for_step(3)
        cluster.signal_worker("127.0.0.1", signal.SIGKILL)
        lost = cluster.wait_for_world(3)
        cluster.wait_for_world(4, after=lost)
        cluster.wait_for_step(cluster.events("worker.step_committed")[-1]["step"] + 4)
        cluster.kill_everyone()
        cluster.start()
        assert cluster.finish() == 0, cluster.story()
        (finished,) = cluster.events("run.finished")
        assert finished["attempt"] == 2, cluster.story()
        assert finished["weights_sha256"] == alone["result"].weights_sha256, cluster.story()
        assert (tmp_path / "output.log").read_text().count(history) == 4, cluster.story()
        assert verify(cluster.run_dir).is_proved, cluster.story()

"""A real Slurm in namespaces: deploy/slurm submits a run, and Slurm preempts, ends, loses and
requeues its tasks. Each run ends proved, with the bits of its undisturbed twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import slurm_lab
from netlab import Lab
from s3_servers import Unavailable
from slurm_lab import Slurm, SlurmFleet
from waiting import wait_for

Twin = Callable[..., str]
JOB = ("--steps", "200", "--step-s", "0.35", "--checkpoint-every", "5")
THREE = ["h1", "h2", "h3"]


@pytest.fixture(autouse=True)
def installed() -> None:
    """Slurm of the distribution."""
    try:
        slurm_lab.prepare()
    except Unavailable as error:
        pytest.skip(str(error))


def reasons(fleet: SlurmFleet) -> list[str]:
    """Return why hosts have left the list."""
    return [e["why"] for e in fleet.events("discovery.host_out")]


def test_slurm_preempts_requeues_and_loses_a_node(lab: Lab, tmp_path: Path,
                                                  twin_of: Twin) -> None:
    """A preempted task leaves in its grace with nothing lost, is requeued, and joins again. A node
    without power costs the step in flight. The coordinator is a job, and its end ends the tasks."""
    cluster = {"spot": THREE, "cpu": ["h9"]}
    with Slurm(lab, tmp_path / "slurm", cluster) as slurm, SlurmFleet(
            slurm, tmp_path / "fleet", tasks=["--array=0-2", "--partition=spot"], job=JOB) as fleet:
        generation = fleet.wait_for_world(3)
        first = fleet.hosts()
        fleet.wait_for_step(3)
        taken = slurm.preempt("h1")
        generation = fleet.wait_for_world(2, after=generation)
        generation = fleet.wait_for_world(3, after=generation)
        assert slurm.state_of(taken) == "COMPLETED 0:0"
        assert len(set(fleet.hosts()) - set(first)) == 1, fleet.hosts()
        assert not fleet.lost() and not fleet.events("worker.step_redone"), fleet.story()
        fleet.wait_for_step(fleet.newest_step() + 2)
        lab.power_cut("h3")
        fleet.wait_for_world(2, after=generation)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=1)
        wait_for("end of all tasks", lambda: not slurm.call("squeue", "-h", "-n", "train"))
        print(reasons(fleet), fleet.story())
    assert result["attempts"] == 1
    assert result["steps_redone"] <= 1

"""A run on a real Ray of several nodes: its drains are planned leaves, and what Ray restarts goes
on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import netlab
import pytest
import ray_lab
from netlab import COORDINATOR
from ray_lab import RayFleet, RayLab
from s3_servers import Unavailable
from waiting import wait_for

JOB = ("--steps", "60", "--step-s", "0.3", "--checkpoint-every", "10")
SLOW = ("--steps", "400", "--step-s", "0.3", "--checkpoint-every", "50")
"""It ends when the test lets it hurry."""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RayLab]:
    """A lab without hosts."""
    try:
        netlab.prepare()
        ray_lab.prepare()
    except Unavailable as error:
        pytest.skip(str(error))
    with RayLab(tmp_path / "lab") as lab:
        yield lab


def key_file_of(lab: RayLab) -> str:
    """Return the file of the run's key on the coordinator's node."""
    commands = lab.inside(COORDINATOR, "pgrep", "-af", "elastic_trainer run")
    return re.findall(r"--agent-key-file (\S+)", commands)[0]


def test_a_drain_of_ray_costs_no_step_and_a_new_node_joins(
        lab: RayLab, tmp_path: Path, twin_of: Callable[..., str]) -> None:
    """A world of two forms, and the run's key is in no log and no process's view. Ray drains one's
    node: its worker leaves after the step in flight. A node that comes later gets the agent that
    Ray has no room for."""
    with RayFleet(lab, tmp_path, ["h1", "h2"], job=JOB) as fleet:
        generation = fleet.wait_for_world(2)
        drained = fleet.host_at("h1")
        assert not lab.seen_in(key_file_of(lab)), "the run's key"
        lab.drain_node("h1", 60)
        generation = fleet.wait_for_world(1, generation)
        lab.add_nodes("h3")
        fleet.wait_for_world(2, generation)
        assert fleet.finish() == 0, fleet.story()
    left = [event for event in fleet.events("discovery.host_out") if event["host"] == drained]
    assert "Ray drains its node" in left[0]["why"]
    fleet.assert_nothing_lost(twin_of(*JOB), victims=0)
    assert not fleet.events("worker.step_redone")


@pytest.mark.long
def test_a_run_goes_on_when_ray_loses_nodes_and_its_coordinator(
        lab: RayLab, tmp_path: Path, twin_of: Callable[..., str]) -> None:
    """A node whose power is cut costs the step in flight. A node that is stopped (`ray stop`) costs
    none, although Ray ends its actors at once. Ray restarts the coordinator's actor: the workers
    have written a checkpoint, and the next attempt begins there."""
    job = ("--steps", "120", "--step-s", "0.3", "--checkpoint-every", "1000")
    with RayFleet(lab, tmp_path, ["h1", "h2", "h3"], job=job) as fleet:
        generation = fleet.wait_for_world(3)
        lab.power_cut("h1")
        generation = fleet.wait_for_world(2, generation)
        redone = len(fleet.events("worker.step_redone"))
        lab.ray("h2", "stop")
        generation = fleet.wait_for_world(1, generation)
        lab.start_nodes("h2")
        fleet.wait_for_world(2, generation)
        assert len(fleet.events("worker.step_redone")) == redone <= 1
        pid = lab.inside(COORDINATOR, "pgrep", "-f", "ray::Coordinator").split()[0]
        lab.inside(COORDINATOR, "kill", "-9", pid)
        fleet.wait_for("second attempt", lambda: any(
            event["attempt"] == 2 for event in fleet.events("attempt.started")))
        newest = max(event["step"] for event in fleet.events("worker.step_committed"))
        fleet.wait_for("world of the second attempt", lambda: any(
            event["attempt"] == 2 for event in fleet.events("worker.generation_started")))
        assert fleet.finish() == 0, fleet.story()
    (first, *_) = [event for event in fleet.events("worker.generation_started")
                   if event["attempt"] == 2]
    assert first["step"] == newest + 1, "the workers have written a last checkpoint"
    fleet.assert_nothing_lost(twin_of(*job), victims=1)


@pytest.mark.long
def test_the_same_submission_goes_on_when_the_head_was_restarted(
        lab: RayLab, tmp_path: Path, twin_of: Callable[..., str]) -> None:
    """A head without a store loses all of Ray. With the head and a node back, the process that has
    submitted the run finds them, and the run resumes from its last checkpoint."""
    lab.seen["RAY_gcs_rpc_server_reconnect_timeout_s"] = "10"
    with RayFleet(lab, tmp_path, ["h1", "h2"], job=JOB) as fleet:
        fleet.wait_for_world(2)
        fleet.wait_for_step(5)
        lab.ray(COORDINATOR, "stop", "--force")
        fleet.wait_for("end of the first attempt", lambda: fleet.events("attempt.ended"))
        for name in ("h1", "h2"):
            lab.ray(name, "stop", "--force")
        lab.start_head()
        lab.start_nodes("h1", "h2")
        fleet.wait_for("second attempt", lambda: any(
            event["attempt"] == 2 for event in fleet.events("worker.generation_started")), 300)
        assert fleet.finish() == 0, fleet.story()
    fleet.assert_nothing_lost(twin_of(*JOB), victims=0)


@pytest.mark.long
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_ray_s_autoscaler_makes_nodes_for_a_run_and_takes_only_idle_ones(
        lab: RayLab, tmp_path: Path, twin_of: Callable[..., str], version: str) -> None:
    """The cluster is a head without processors. Agents that wait are the autoscaler's demand: it
    makes the one node that it may have, and the run starts; it may have more, and the run grows.
    The autoscaler takes the node of another job when it is idle, and no node of the run. With the
    end of the run the demand is gone, and so are the nodes."""
    lab.autoscale(1, is_v2=version == "v2")
    fleet = RayFleet(lab, tmp_path, ["n1", "n2", "n3"], job=SLOW)
    lab.start_head()
    with fleet:
        generation = fleet.wait_for_world(1)
        assert len(lab.living()) == 1
        lab.autoscale(4)
        generation = fleet.wait_for_world(3, generation)
        ours = lab.living()
        other = lab.node_of_a_task()
        assert other not in ours and len(ours) == 3
        fleet.wait_for("end of the idle node", lambda: other not in lab.living(), 300)
        assert lab.living() == ours
        assert len(fleet.events("worker.generation_started")) == generation, fleet.story()
        assert fleet.finish() == 0, fleet.story()
    wait_for("end of all nodes", lambda: not lab.living(), 300, lab.log)
    fleet.assert_nothing_lost(twin_of(*SLOW), victims=0)
    assert not fleet.events("worker.step_redone")


@pytest.mark.long
def test_a_run_goes_on_when_the_head_is_away_and_ray_keeps_its_gcs_in_redis(
        lab: RayLab, tmp_path: Path, twin_of: Callable[..., str]) -> None:
    """While the GCS is away the run trains on, and the list of hosts holds. When the whole head is
    stopped, so is the coordinator on it: the workers write a last checkpoint, the nodes live on,
    and the new head starts the coordinator, which takes the agents over. Redis has no key."""
    try:
        ray_lab.prepare_redis()
    except Unavailable as error:
        pytest.skip(str(error))
    lab.start_redis("h9")
    with RayFleet(lab, tmp_path, ["h1", "h2", "h3"], job=SLOW) as fleet:
        generation = fleet.wait_for_world(3)
        nodes = lab.living()
        assert not lab.is_kept_in_redis("h9", key_file_of(lab)), "the run's key"
        gcs = lab.kill_gcs()
        # A node ends itself after 60 s without a GCS (gcs_rpc_server_reconnect_timeout_s), and 40
        # steps took that long on a slow machine.
        fleet.wait_for_step(fleet.newest_step() + 10)
        lab.start_gcs(gcs)
        lab.drain_node("h1", 60)
        generation = fleet.wait_for_world(2, generation)
        fleet.wait_for_step(fleet.newest_step() + 2)
        assert not fleet.events("worker.step_redone") and not fleet.lost(), fleet.story()
        lab.ray(COORDINATOR, "stop", "--force")
        fleet.wait_for("end of the first attempt", lambda: fleet.events("attempt.ended"))
        newest = fleet.newest_step()
        lab.start_head()
        fleet.wait_for("second attempt", lambda: any(
            event["attempt"] == 2 for event in fleet.events("worker.generation_started")), 300)
        assert lab.living() <= nodes
        assert fleet.finish() == 0, fleet.story()
    (first, *_) = [event for event in fleet.events("worker.generation_started")
                   if event["attempt"] == 2]
    assert first["step"] == newest + 1, "the workers have written a last checkpoint"
    fleet.assert_nothing_lost(twin_of(*SLOW), victims=0)
    assert not fleet.events("worker.step_redone")

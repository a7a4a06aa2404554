"""Whole runs on a real API server with its controllers: the manifests of deploy/kubernetes, and
pods that are evicted, deleted, tainted and scaled while they train.

Each ends proved, with the undisturbed twin's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from kubernetes_servers import NAME
from netlab import Lab
from pod_fleet import PodFleet, started
from s3_servers import Unavailable

Twin = Callable[..., str]
JOB = ("--steps", "220", "--step-s", "0.35", "--checkpoint-every", "10")
LONG_JOB = ("--steps", "800", "--step-s", "0.35", "--checkpoint-every", "10")
"""More than the story needs, unless the machine is slow: `finish` ends it."""
DELETED = ("notice: pod deleted", "the pod is being deleted")
"""By the API server, or by the pod's own agent: what the poller hears first."""


@contextmanager
def pods(lab: Lab, folder: Path, job: Sequence[str], **numbers: int) -> Iterator[PodFleet]:
    """A run of the manifests, or the test is skipped."""
    try:
        with started(lab, folder, job, **numbers) as fleet:
            yield fleet
    except Unavailable as error:
        pytest.skip(str(error))


def test_an_evicted_pod_loses_nothing_and_a_deleted_one_the_step_in_flight(
        lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """The Job replaces both, and the run goes on with the pods that it has. When it is finished,
    both Jobs are complete, and no pod is left."""
    with pods(lab, tmp_path, JOB, workers=4, nodes=7) as fleet:
        fleet.forms(4)
        fleet.wait_for_step(3)
        evicted, deleted, *_ = fleet.workers()
        fleet.evict(evicted)
        fleet.forms(3)
        assert fleet.lost() == [], fleet.story()
        (out,) = fleet.host_events("discovery.host_out", evicted)
        assert out["why"].startswith(DELETED), out
        fleet.forms(4)
        fleet.delete_at_once(deleted)
        fleet.forms(3)
        fleet.forms(4)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=1)
        fleet.wait_for_no_pod()
        print(fleet.story())
    assert result["attempts"] == 1
    assert result["steps_redone"] <= 1


@pytest.mark.long
def test_a_run_lives_through_what_kubernetes_does_to_its_pods(lab: Lab, tmp_path: Path,
                                                              twin_of: Twin) -> None:
    """A node is tainted, and its pod is evicted as Karpenter does it. The fleet grows to 6 and
    shrinks to 2. The API server is away for a minute: the last good list holds. The poller's token
    is replaced, and the former one revoked. The coordinator's pod is killed, and the next one
    resumes. All pods are evicted at once, and the only pod of a fleet of one. No step is lost but
    those in flight when a pod or the coordinator was killed."""
    with pods(lab, tmp_path, LONG_JOB, workers=4, nodes=9) as fleet:
        fleet.forms(4)
        fleet.wait_for_step(3)
        tainted = fleet.workers()[0]
        fleet.taint(tainted, "karpenter.sh/disrupted")
        fleet.forms(3)
        (out,) = fleet.host_events("discovery.host_out", tainted)
        assert out["why"].endswith("tainted karpenter.sh/disrupted"), out
        fleet.evict(tainted)
        fleet.forms(4)
        fleet.scale(6)
        fleet.forms(6)
        fleet.scale(2)
        fleet.forms(2)
        assert fleet.lost() == [], fleet.story()
        lab.unplug(NAME)
        step, formed = fleet.newest_step(), len(fleet.events("driver.generation_formed"))
        fleet.wait_for("minute without the API server", lambda: [
            e for e in fleet.events("discovery.cloud_unavailable") if e["failures"] >= 5])
        fleet.wait_for_step(step + 20)
        assert len(fleet.events("driver.generation_formed")) == formed
        lab.plug_in(NAME)
        fleet.scale(3)
        fleet.forms(3)
        assert fleet.kubelet
        fleet.kubelet.rotate(fleet.coordinator())
        fleet.scale(4)
        fleet.forms(4)
        assert fleet.lost() == [], fleet.story()
        fleet.delete_at_once(fleet.coordinator())
        fleet.wait_for_attempt(2)
        fleet.forms(4)
        fleet.wait_for_step(fleet.newest_step() + 3)
        every = fleet.workers()
        for name in every:
            fleet.evict(name)
        fleet.forms(4)
        fleet.scale(1)
        fleet.forms(1)
        (only,) = fleet.workers()
        fleet.evict(only)
        fleet.forms(1)
        assert fleet.finish() == 0
        # Workers that have left all at once wait for a new host, until their pods end.
        waiting = {f"{name}-" for name in (*every, only)}
        lost = [e["host"] for e in fleet.lost()]
        assert all(host.startswith(tuple(waiting)) for host in lost), fleet.story()
        result = fleet.assert_nothing_lost(twin_of(*LONG_JOB), victims=len(lost))
        fleet.wait_for_no_pod()
        print(fleet.story())
    assert result["steps_redone"] <= 1

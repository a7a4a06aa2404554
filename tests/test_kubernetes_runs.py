"""Whole runs on a real API server with its controllers: the manifests of deploy/kubernetes, and
pods that are evicted, deleted, tainted and scaled while they train.

Each ends proved, with the undisturbed twin's bits.
"""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kubernetes_servers import NAME
from netlab import Lab, store_on
from pod_fleet import NODES, PodFleet, started
from s3_servers import Unavailable
from waiting import wait_for

Twin = Callable[..., str]
SHORT_JOB = ("--steps", "110", "--step-s", "0.5", "--checkpoint-every", "10")
JOB = ("--steps", "150", "--step-s", "0.5", "--checkpoint-every", "10")
LONG_JOB = ("--steps", "800", "--step-s", "0.35", "--checkpoint-every", "10")
"""More than the story needs, unless the machine is slow: `finish` ends it."""
LARGE = ("torch", "numpy")
QUEUE = """
apiVersion: kueue.x-k8s.io/v1beta1
kind: ResourceFlavor
metadata: {name: any}
---
apiVersion: kueue.x-k8s.io/v1beta1
kind: ClusterQueue
metadata: {name: training}
spec:
  namespaceSelector: {}
  resourceGroups:
    - coveredResources: [cpu, memory]
      flavors:
        - name: any
          resources:
            - {name: cpu, nominalQuota: 2}
            - {name: memory, nominalQuota: 64Gi}
---
apiVersion: kueue.x-k8s.io/v1beta1
kind: LocalQueue
metadata: {name: training}
spec: {clusterQueue: training}
"""
"""With room for two workers."""
OUTSIDE = "h9"
"""A machine that is no pod."""
DELETED = ("notice: pod deleted", "the pod is being deleted")
"""By the API server, or by the pod's own agent: what the poller hears first."""


@contextmanager
def pods(lab: Lab, folder: Path, job: Sequence[str], **given: Any) -> Iterator[PodFleet]:
    """A run of the manifests, or the test is skipped."""
    try:
        with started(lab, folder, job, **given) as fleet:
            yield fleet
    except Unavailable as error:
        pytest.skip(str(error))


def test_an_evicted_pod_loses_nothing_and_a_deleted_one_the_step_in_flight(
        lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """The Job replaces both, and the run goes on with the pods that it has. When it is finished,
    both Jobs are complete, and no pod is left. The run's events are lines of JSON on the stdout of
    a container, and those that an operator must see are Events of Kubernetes. No process of the
    coordinator has a large library in memory."""
    with pods(lab, tmp_path, SHORT_JOB, workers=4, nodes=7) as fleet:
        fleet.forms(4)
        fleet.wait_for_step(3)
        evicted, deleted, *_ = fleet.workers()
        fleet.evict(evicted)
        fleet.forms(3)
        assert fleet.lost() == [], fleet.story()
        (out,) = fleet.host_events("discovery.host_out", evicted)
        assert out["why"].startswith(DELETED), out
        fleet.delete_at_once(deleted)
        fleet.wait_for("its end", fleet.lost)
        fleet.forms(4)
        assert fleet.libraries(("orjson", *LARGE)) == {"orjson"}
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*SHORT_JOB), victims=1)
        fleet.wait_for_no_pod()
        assert {"run.started", "run.finished"} <= {event["event"] for event in fleet.printed()}
        print(fleet.story(), fleet.told())
        assert {"RunStarted", "RunFinished"} <= fleet.told().keys()
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
        for name in fleet.workers():
            fleet.evict(name)
        fleet.forms(4)
        fleet.scale(1)
        fleet.forms(1)
        (only,) = fleet.workers()
        fleet.evict(only)
        fleet.forms(1)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*LONG_JOB), victims=0)
        fleet.wait_for_no_pod()
        print(fleet.story())
    assert result["steps_redone"] <= 1


@pytest.mark.long
@pytest.mark.parametrize("variant", ["base", "deployment"])
def test_a_node_that_loses_its_power_costs_the_step_in_flight_and_comes_back_under_its_name(
        lab: Lab, tmp_path: Path, twin_of: Twin, variant: str) -> None:
    """Nobody tells. The driver notices it before Kubernetes does, and the others go on. Kubernetes
    then marks the node, which is no reason to touch another pod. When the node is back, its Job
    replaces the pod. A Deployment's pod starts again instead, with the same uid and another
    address. The pod of a node that is deleted, as a cloud does it, is replaced elsewhere."""
    with pods(lab, tmp_path, LONG_JOB, workers=4, nodes=5, variant=variant) as fleet:
        fleet.forms(4)
        fleet.wait_for_step(3)
        name, kubelet = fleet.workers()[0], fleet.kubelet
        assert kubelet
        node = kubelet.lose(name)
        fleet.forms(3)
        assert fleet.is_ready(node), "Kubernetes was faster"
        fleet.wait_for("mark of the node", lambda: not fleet.is_ready(node))
        fleet.wait_for("taint of the node", lambda: [
            taint for taint in fleet.kubernetes("GET", f"{NODES}/{node}")["spec"].get("taints", ())
            if taint["key"] == "node.kubernetes.io/unreachable"])
        fleet.wait_for_step(fleet.newest_step() + 3)
        kubelet.boot(node)
        fleet.forms(4)
        assert (name in fleet.workers()) == (variant == "deployment"), fleet.story()
        fleet.wait_for_step(fleet.newest_step() + 3)
        kubelet.add("spare")
        gone = fleet.workers()[1]
        node = kubelet.lose(gone)
        fleet.forms(3)
        kubelet.remove(node)
        # The garbage collector of Kubernetes takes the pod after 40 s to 80 s.
        fleet.wait_for("end of the lost pod", lambda: gone not in fleet.kubectl(
            "get", "pods", "--output=name"))
        fleet.forms(4)
        assert fleet.finish() == 0
        # The driver starts a worker there again, in vain, until the host is out.
        lost = fleet.lost()
        frozen = [one["host"] for one in lost if one["reason"] == "frozen"]
        assert [host[:len(of)] for host, of in zip(frozen, (name, gone), strict=True)] == [
            name, gone], fleet.story()
        assert {one["host"] for one in lost if one["reason"] == "boot_failed"} <= {*frozen}
        result = fleet.assert_nothing_lost(twin_of(*LONG_JOB), victims=len(lost))
        if variant == "deployment":
            fleet.kubectl("delete", "deployment", "workers", "--wait=false")
        fleet.wait_for_no_pod()
        print(fleet.story())
    assert (result["attempts"], result["steps_redone"] <= 2) == (1, True)


@pytest.mark.long
def test_checkpoints_in_a_bucket_carry_a_run_over_the_loss_of_its_coordinator(
        lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """`s3`: the keys are in a Secret, and a worker's pod has no volume that another one has."""
    lab.has_agents = lab.has_sshd = False
    lab.boot(OUTSIDE)
    try:
        with store_on(lab, OUTSIDE, tmp_path / "s3") as variables, pods(
                lab, tmp_path, JOB, workers=3, nodes=5, variant="s3",
                secrets={"elastic-trainer-s3": variables}) as fleet:
            fleet.forms(3)
            fleet.wait_for_step(12)
            fleet.evict(fleet.workers()[0])
            fleet.forms(2)
            fleet.forms(3)
            fleet.delete_at_once(fleet.coordinator())
            fleet.wait_for_attempt(2)
            fleet.forms(3)
            assert fleet.finish() == 0
            result = fleet.assert_nothing_lost(twin_of(*JOB), victims=0)
            assert not (fleet.folder / "store" / "checkpoints").exists()
            fleet.wait_for_no_pod()
            print(fleet.story())
    except Unavailable as error:
        pytest.skip(str(error))
    assert (result["attempts"], result["steps_redone"] <= 1) == (2, True)


@pytest.mark.long
def test_the_metrics_are_where_the_pod_monitor_points_and_need_its_token(lab: Lab, tmp_path: Path,
                                                              twin_of: Twin) -> None:
    """`monitor`: at the port and the path of the PodMonitor, with the key of the Secret that it
    names. Without the token the answer is 403."""
    lab.has_agents = lab.has_sshd = False
    lab.boot(OUTSIDE)
    with pods(lab, tmp_path, JOB, workers=3, nodes=4, variant="monitor",
              secrets={"elastic-trainer": {"metrics": "t" * 64}}) as fleet:
        fleet.forms(3)
        fleet.wait_for_step(3)
        (monitor,) = (one["spec"] for one in fleet.objects if one["kind"] == "PodMonitor")
        (endpoint,) = monitor["podMetricsEndpoints"]
        selector = ",".join(f"{name}={value}"
                            for name, value in monitor["selector"]["matchLabels"].items())
        (pod,) = json.loads(fleet.kubectl("get", "pods", f"--selector={selector}",
                                          "--output=json"))["items"]
        (port,) = (port["containerPort"] for container in pod["spec"]["initContainers"]
                   for port in container.get("ports", ()) if port["name"] == endpoint["port"])
        key = endpoint["authorization"]["credentials"]
        secret = json.loads(fleet.kubectl("get", "secret", key["name"], "--output=json"))["data"]
        token = base64.b64decode(secret[key["key"]]).decode()

        def answer(**headers: str) -> tuple[int, str]:
            with lab.network_of(OUTSIDE):
                connection = http.client.HTTPConnection(pod["status"]["podIP"], port, timeout=30)
                try:
                    connection.request("GET", endpoint["path"], headers=headers)
                    said = connection.getresponse()
                    return said.status, said.read().decode()
                finally:
                    connection.close()

        assert answer()[0] == 403
        status, text = answer(Authorization=f"{endpoint['authorization']['type']} {token}")
        assert status == 200 and "elastic_trainer_" in text, text
        assert fleet.finish() == 0
        fleet.assert_nothing_lost(twin_of(*JOB), victims=0)
        fleet.wait_for_no_pod()


@pytest.mark.long
def test_a_jobset_replaces_an_evicted_pod_and_is_complete_when_its_coordinator_is(
        lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """With the controller of JobSet and its webhooks: no step is lost, and nothing restarts."""
    with pods(lab, tmp_path, JOB, workers=3, nodes=5, variant="jobset") as fleet:
        fleet.forms(3)
        fleet.wait_for_step(3)
        fleet.evict(fleet.workers()[0])
        fleet.forms(2)
        fleet.forms(3)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*JOB), victims=0)

        def status() -> Any:
            return json.loads(fleet.kubectl("get", "jobset", "elastic-trainer",
                                            "--output=json"))["status"]

        wait_for("end of the JobSet", lambda: status().get("terminalState"), story=fleet.story)
        assert status()["terminalState"] == "Completed" and not status().get("restarts")
        wait_for("end of the pods", lambda: not fleet.pods("worker"), story=fleet.story)
        print(fleet.story())
    assert (result["attempts"], result["steps_redone"]) == (1, 0)


@pytest.mark.long
def test_an_autoscaler_that_adds_a_node_and_takes_it_needs_nothing_of_ours(
        lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """A fleet that grows beyond the nodes goes on with the pods that it has, and an Event has the
    scheduler's reason. A new node gets the pod. The node is then taken as the cluster autoscaler
    takes it: tainted, drained, deleted."""
    with pods(lab, tmp_path, LONG_JOB, workers=3, nodes=4) as fleet:
        fleet.forms(3)
        fleet.scale(4)
        (refused, *_) = fleet.wait_for("refusal", lambda: [
            e for e in fleet.events("discovery.launch_refused") if e["code"] == "Unschedulable"])
        assert "0/4 nodes are available" in refused["says"]
        fleet.wait_for("its Event", lambda: "DiscoveryLaunchRefused" in fleet.told())
        step = fleet.newest_step()
        fleet.wait_for_step(step + 3)
        before = set(fleet.workers())
        assert fleet.kubelet
        fleet.kubelet.add("new")
        fleet.forms(4)
        (name,) = set(fleet.workers()) - before
        fleet.taint(name, "ToBeDeletedByClusterAutoscaler")
        fleet.forms(3)
        fleet.kubectl("drain", "new", "--ignore-daemonsets", "--delete-emptydir-data", "--force")
        fleet.kubelet.remove("new")
        fleet.scale(3)
        fleet.wait_for_step(fleet.newest_step() + 3)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*LONG_JOB), victims=0)
        fleet.wait_for_no_pod()
        print(fleet.story(), fleet.told())
    assert (result["attempts"], result["steps_redone"]) == (1, 0)


@pytest.mark.long
def test_kueue_admits_a_part_of_the_workers_and_may_take_all_of_them_back(
        lab: Lab, tmp_path: Path, twin_of: Twin) -> None:
    """With the controller of Kueue and its webhooks. The quota has room for two of four workers.
    The queue then drains: all workers leave, and the coordinator waits. When the queue admits them
    again, the run goes on, and no step was lost."""
    with pods(lab, tmp_path, LONG_JOB, workers=4, nodes=5, variant="kueue") as fleet:
        assert not fleet.workers()
        fleet.kubectl("apply", "-f", "-", given=QUEUE)
        fleet.forms(2)
        spec = fleet.get_job("workers")["spec"]
        assert (spec["parallelism"], spec["completions"]) == (2, 2)
        fleet.wait_for_step(3)
        stop = ("patch", "clusterqueue", "training", "--type=merge", "--patch")
        fleet.kubectl(*stop, '{"spec":{"stopPolicy":"HoldAndDrain"}}')
        fleet.wait_for("end of all workers", lambda: not fleet.workers())
        fleet.kubectl(*stop, '{"spec":{"stopPolicy":"None"}}')
        fleet.forms(2)
        assert fleet.finish() == 0
        result = fleet.assert_nothing_lost(twin_of(*LONG_JOB), victims=0)
        fleet.wait_for_no_pod()
        print(fleet.story())
    assert result["steps_redone"] == 0

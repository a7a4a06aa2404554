"""Pods as hosts: what pods and nodes mean for a run. The answers in tests/data/kubernetes are those
of Kubernetes 1.36."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.discovery.hosts import History, Policy, decide
from elastic_trainer.discovery.place_protocol import Instance, Notice
from elastic_trainer.discovery.places.kubernetes_pods import (
    ENDING_TAINTS,
    Node,
    Pod,
    Taint,
    host_name,
    instance_of,
    node_in,
    notice_of,
    pod_in,
    supply_of,
)

DATA = Path(__file__).parent / "data" / "kubernetes"
ANY = Policy(lifecycle="any")
GRACE_ENDS = 1795803286.0
"""2026-11-27T18:14:46Z"""


def items(kind: str) -> dict[str, Any]:
    """Return the objects of a recorded list, by name."""
    return {item["metadata"]["name"]: item
            for item in json.loads((DATA / f"{kind}.json").read_text())["items"]}


@pytest.fixture
def nodes() -> dict[str, Node]:
    return {name: node_in(item) for name, item in items("nodes").items()}


@pytest.fixture
def pods() -> dict[str, Pod]:
    return {name: pod_in(item) for name, item in items("pods").items()}


def hosts_of(pods: dict[str, Pod], nodes: dict[str, Node]) -> dict[str, Instance]:
    return {name: instance_of(pod, nodes.get(pod.node), True, 1) for name, pod in pods.items()
            if not pod.has_ended}


def taint(key: str, effect: str = "NoSchedule", since: float = 0.0) -> Taint:
    return Taint(key=key, value="", effect=effect, since=since)


def test_each_pod_that_has_not_ended_is_one_host(pods: dict[str, Pod],
                                                 nodes: dict[str, Node]) -> None:
    """It has the address of the pod and the slots of its GPUs; kind, zone and lifecycle are those
    of its node. A pod that cannot work has a reason, as Kubernetes tells it."""
    hosts = hosts_of(pods, nodes)
    assert hosts.keys() == pods.keys() - {"ended"}
    ready = hosts["ready"]
    assert (ready.address, ready.slots, ready.gpus) == ("10.1.1.1", 4, 4)
    assert (ready.type, ready.zone, ready.lifecycle) == ("g6.xlarge", "eu-1a", "spot")
    assert (ready.state, ready.notice) == ("running", None)
    assert (hosts["deleted"].slots, hosts["deleted"].gpus) == (1, 0)
    assert {name: host.says for name, host in hosts.items() if host.says} == {
        "pulling": 'the pod is not ready: agent: ImagePullBackOff: Back-off pulling image "x"',
        "unscheduled": "the pod has no node: Unschedulable: 0/2 nodes are available: 2 Insufficient"
                       " nvidia.com/gpu.",
        "no-driver": "node plain offers 0 nvidia.com/gpu, and the pod has 4: the driver or the "
                     "device plugin has not started yet"}
    listed = decide(list(hosts.values()), {}, History(), 0.0, ANY).hosts
    assert [name.partition("-")[0] for name, _ in listed] == ["ready"]


def test_a_deleted_pod_has_a_notice_with_the_end_of_its_grace(pods: dict[str, Pod],
                                                              nodes: dict[str, Node]) -> None:
    """Also an evicted one, with the reason of its eviction."""
    assert notice_of(pods["deleted"], nodes["plain"]) == Notice("pod deleted", GRACE_ENDS)
    assert notice_of(pods["evicted"], nodes["spot"]) == Notice(
        "pod deleted (EvictionByEvictionAPI)", GRACE_ENDS)
    doomed = replace(pods["ready"], disruption="PreemptionByScheduler")
    assert notice_of(doomed, nodes["spot"]) == Notice("pod to be deleted (PreemptionByScheduler)")


def test_all_pods_evicted_at_once_are_believed_at_once(pods: dict[str, Pod],
                                                       nodes: dict[str, Node]) -> None:
    """The list is empty then: it is no odd answer."""
    ready = [replace(pods["ready"], uid=f"uid-{number}", name=f"w-{number}") for number in range(4)]
    formed = decide([instance_of(pod, nodes["spot"], True, 1) for pod in ready], {}, History(), 0.0,
                    ANY)
    assert len(formed.hosts) == 4
    evicted = [replace(pod, deleted=GRACE_ENDS) for pod in ready]
    after = decide([instance_of(pod, nodes["spot"], True, 1) for pod in evicted], {},
                   formed.history, 1.0, ANY)
    assert after.hosts == () and not after.history.doubted


@pytest.mark.parametrize("key", ENDING_TAINTS)
def test_a_taint_that_announces_the_end_of_a_node_is_a_notice_while_it_stays(
        key: str, pods: dict[str, Pod], nodes: dict[str, Node]) -> None:
    """Karpenter takes its taint back when there is no replacement for the node."""
    tainted = replace(nodes["spot"], taints=(taint(key),))
    assert notice_of(pods["ready"], tainted) == Notice(f"node spot tainted {key}", for_good=False)
    assert notice_of(pods["ready"], nodes["spot"]) is None


def test_a_cordon_a_candidate_and_a_kubelet_that_restarts_are_no_notices(
        pods: dict[str, Pod], nodes: dict[str, Node]) -> None:
    """Workers go on where their pods stay."""
    for harmless in (taint("node.kubernetes.io/unschedulable"),
                     taint("DeletionCandidateOfClusterAutoscaler", "PreferNoSchedule"),
                     taint("aws-node-termination-handler/rebalance-recommendation"),
                     taint("kubernetes.azure.com/scalesetpriority"),
                     taint("node.kubernetes.io/not-ready", "NoExecute"),
                     taint("node.kubernetes.io/unreachable", "NoExecute")):
        assert notice_of(pods["ready"], replace(nodes["spot"], taints=(harmless,))) is None
    silent = replace(nodes["spot"], is_ready=False)
    unready = replace(pods["ready"], is_ready=False)
    assert instance_of(unready, silent, True, 1).state == "running"
    assert instance_of(replace(unready, runs=False), silent, True, 1).state == "pending"
    assert instance_of(unready, nodes["spot"], True, 1).state == "pending"


def test_a_taint_that_a_pod_tolerates_for_a_time_takes_it_at_the_end_of_that_time(
        pods: dict[str, Pod], nodes: dict[str, Node]) -> None:
    """One that it tolerates without a limit does not take it."""
    tainted = replace(nodes["spot"], taints=(taint("maintenance", "NoExecute", 1000.0),))
    pod, says = pods["ready"], "node spot tainted maintenance"

    def tolerating(**toleration: Any) -> Pod:
        return replace(pod, tolerations=({"key": "maintenance", **toleration},))

    assert notice_of(pod, tainted) == Notice(says, 1000.0, for_good=False)
    for_a_time = tolerating(operator="Exists", tolerationSeconds=300)
    assert notice_of(for_a_time, tainted) == Notice(says, 1300.0, for_good=False)
    assert notice_of(tolerating(operator="Exists"), tainted) is None
    assert notice_of(tolerating(operator="Equal", value="other"), tainted) is not None


def test_azures_scheduled_events_are_notices(pods: dict[str, Pod]) -> None:
    """AKS tells them as conditions of the node."""
    item = items("nodes")["spot"]
    item["status"]["conditions"].append({"type": "PreemptScheduled", "status": "True"})
    assert notice_of(pods["ready"], node_in(item)) == Notice(
        "node spot reports PreemptScheduled", for_good=False)


def test_a_name_that_comes_back_is_another_host(pods: dict[str, Pod]) -> None:
    """An Indexed Job, a JobSet and a StatefulSet give names again. A long name stays one part of a
    host name of RFC 1123."""
    again = replace(pods["ready"], uid="0a1b2c3d-0000")
    assert host_name(again) == "ready-0a1b2c3d" != host_name(pods["ready"])
    assert len(host_name(replace(again, name="n" * 63))) == 63


def test_without_nodes_a_pods_own_end_is_a_notice(pods: dict[str, Pod]) -> None:
    """For an account that may not read nodes."""
    assert instance_of(pods["ready"], None, False, 1).state == "running"
    assert instance_of(pods["evicted"], None, False, 1).notice is not None
    assert instance_of(pods["ready"], None, True, 1).says == "its node spot is not known yet"


def test_pods_without_a_node_are_lacking_machines(pods: dict[str, Pod]) -> None:
    """With the scheduler's reason."""
    supply = supply_of([pods["ready"], pods["unscheduled"], pods["deleted"]])
    assert (supply.there, supply.wanted) == (1, 2)
    assert supply.refusal and supply.refusal.code == "Unschedulable"
    assert "2 Insufficient nvidia.com/gpu" in supply.refusal.says
    assert supply_of([pods["ready"]]).refusal is None


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another group")
@pytest.mark.parametrize(("mode", "is_read"), [(0o440, True), (0o400, False), (0o444, False),
                                               (0o460, False)])
def test_a_secret_reaches_a_container_by_the_group_of_its_pod(mode: int, is_read: bool) -> None:
    """A kubelet gives it to root and to fsGroup. A file that others may read is refused."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        key = Path(folder, "key")
        key.write_text("k" * 64)
        os.chown(key, 0, 10001)
        key.chmod(mode)
        program = ("import os, sys; from pathlib import Path; "
                   "from elastic_trainer.discovery.client import read_key; "
                   "os.setgroups([10001]); os.setgid(10001); os.setuid(10001); "
                   "read_key(Path(sys.argv[1]))")
        done = subprocess.run([sys.executable, "-c", program, key], capture_output=True, text=True)
    assert (done.returncode == 0) is is_read, done.stderr

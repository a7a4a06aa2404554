"""What a pod and its node mean for a run: pure functions of what the API server tells.

kubernetes.py → here → Instance (place_protocol.py)

What always holds:
1. A host is one incarnation of a pod. Its id is the pod's uid, and a part of the uid is in its
   name: StatefulSets, JobSets and a user's own pods give a name again.
2. A pod that is deleted has a notice with the end of its grace period. An eviction, a preemption
   and a drain delete it, too, and DisruptionTarget tells which.
3. A taint that announces the end of a node is a notice as long as it stays. A cordon is none: the
   pods of a cordoned node stay.
4. A node that is not ready is no reason: its kubelet may just restart. The agent of each host tells
   whether the host is well. Such a node gets a taint of NoExecute, which pods tolerate for 300 s.
5. A node that offers fewer GPUs than the pod has been given has no driver yet: it has come back
   before its device plugin (kubeflow/trainer 999).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from elastic_trainer.discovery.place_protocol import Instance, Notice, Refusal, Supply

GPU = "nvidia.com/gpu"
ENDING_TAINTS = (
    "karpenter.sh/disrupted", "karpenter.sh/disruption",
    "ToBeDeletedByClusterAutoscaler",
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/scheduled-maintenance",
    "aws-node-termination-handler/asg-lifecycle-termination",
    "cloud.google.com/impending-node-termination",
    "remediator.kubernetes.azure.com/unschedulable", "remediator.aks.microsoft.com/unschedulable",
    "cloudprovider.azure.microsoft.com/draining",
    "node.kubernetes.io/out-of-service")
"""Of any effect: the node is to be taken. The first two are of Karpenter 1 and before."""
KUBELET_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
ENDING_CONDITIONS = ("PreemptScheduled", "TerminateScheduled", "RedeployScheduled")
"""Of a node of AKS: what Azure's scheduled events announce."""
SPOT_LABELS = {"karpenter.sh/capacity-type": "spot", "eks.amazonaws.com/capacityType": "SPOT",
               "cloud.google.com/gke-spot": "true", "cloud.google.com/gke-preemptible": "true",
               "kubernetes.azure.com/scalesetpriority": "spot"}
UID_LETTERS, NAME_LETTERS = 8, 54
"""A part of a host's name has at most 63 letters."""
MOST_WORDS = 200
Conditions = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Taint:
    """A taint of a node; `since` in seconds since 1970, 0.0: unknown."""

    key: str
    value: str
    effect: str
    since: float


@dataclass(frozen=True, kw_only=True)
class Node:
    """What is kept of a node: 5,000 whole ones have 100 MB."""

    name: str
    taints: tuple[Taint, ...]
    ending: str
    """The condition that announces its end; "": none."""
    is_ready: bool
    type: str
    zone: str
    is_spot: bool
    gpus: int


@dataclass(frozen=True, kw_only=True)
class Pod:
    """What is kept of a pod."""

    uid: str
    name: str
    node: str
    address: str
    created: float
    deleted: float | None
    """The end of its grace period; None: it is not deleted."""
    has_ended: bool
    disruption: str
    """Why Kubernetes ends it ("EvictionByEvictionAPI"); "": it does not, or the reason is unknown.
    """
    waits_for_node: str
    """Why the scheduler has no node for it; "": it has one, or was not tried yet."""
    is_ready: bool
    runs: bool
    """Its containers are ready, by the last word of its kubelet."""
    unready: str
    gpus: int
    tolerations: tuple[Mapping[str, Any], ...]


def node_in(item: Any) -> Node:
    """Read a node. Raises LookupError, TypeError, ValueError, AttributeError."""
    labels = item["metadata"].get("labels") or {}
    conditions = _conditions(item)
    return Node(
        name=item["metadata"]["name"],
        taints=tuple(Taint(key=taint["key"], value=taint.get("value") or "",
                           effect=taint["effect"], since=_seconds(taint.get("timeAdded")) or 0.0)
                     for taint in item.get("spec", {}).get("taints") or ()),
        ending=next((kind for kind in ENDING_CONDITIONS if _is(conditions, kind)), ""),
        is_ready=_is(conditions, "Ready"),
        type=labels.get("node.kubernetes.io/instance-type", ""),
        zone=labels.get("topology.kubernetes.io/zone", ""),
        is_spot=any(labels.get(label) == value for label, value in SPOT_LABELS.items()),
        gpus=int(item.get("status", {}).get("allocatable", {}).get(GPU, 0)))


def pod_in(item: Any) -> Pod:
    """Read a pod. Raises LookupError, TypeError, ValueError, AttributeError."""
    meta, spec, status = item["metadata"], item["spec"], item.get("status", {})
    conditions = _conditions(item)
    disruption, scheduled = (conditions.get(kind, {})
                             for kind in ("DisruptionTarget", "PodScheduled"))
    return Pod(
        uid=meta["uid"], name=meta["name"], node=spec.get("nodeName") or "",
        address=status.get("podIP") or "", created=_seconds(meta["creationTimestamp"]) or 0.0,
        deleted=_seconds(meta.get("deletionTimestamp")),
        has_ended=status.get("phase") in ("Succeeded", "Failed"),
        disruption=str(disruption.get("reason", "")) if disruption.get("status") == "True" else "",
        waits_for_node=_words(scheduled) if scheduled.get("status") == "False" else "",
        is_ready=_is(conditions, "Ready"), runs=_is(conditions, "ContainersReady"),
        unready=_unready(status, conditions.get("Ready", {})),
        gpus=sum(int(((container.get("resources") or {}).get("limits") or {}).get(GPU, 0))
                 for container in spec.get("containers") or ()),
        tolerations=tuple(spec.get("tolerations") or ()))


def instance_of(pod: Pod, node: Node | None, knows_nodes: bool, cpu_slots: int) -> Instance:
    """Return a pod that has not ended as a host."""
    says = _why_not(pod, node, knows_nodes)
    return Instance(
        id=pod.uid, name=host_name(pod), address=pod.address, type=node.type if node else "",
        zone=node.zone if node else "", launched=pod.created,
        lifecycle="spot" if node and node.is_spot else "on-demand",
        state="pending" if says else "running", says=says, notice=notice_of(pod, node),
        slots=pod.gpus or cpu_slots, gpus=pod.gpus)


def host_name(pod: Pod) -> str:
    """Return a name that no other incarnation has: RFC 1123, with a part of the uid."""
    return f"{pod.name[:NAME_LETTERS].rstrip('-.')}-{pod.uid[:UID_LETTERS]}"


def notice_of(pod: Pod, node: Node | None) -> Notice | None:
    """Return the notice of a pod, or of its node."""
    why = f" ({pod.disruption})" if pod.disruption else ""
    if pod.deleted is not None:
        return Notice(f"pod deleted{why}", pod.deleted)
    if why:
        return Notice(f"pod to be deleted{why}")
    if node is None:
        return None
    for taint in node.taints:
        if taint.key in ENDING_TAINTS:
            return Notice(f"node {node.name} tainted {taint.key}", for_good=False)
        if taint.effect == "NoExecute" and taint.key not in KUBELET_TAINTS:
            tolerated_s = _tolerated_s(taint, pod.tolerations)
            if tolerated_s is not None:
                return Notice(f"node {node.name} tainted {taint.key}",
                              taint.since + tolerated_s if taint.since else None, for_good=False)
    if node.ending:
        return Notice(f"node {node.name} reports {node.ending}", for_good=False)
    return None


def supply_of(pods: Iterable[Pod]) -> Supply:
    """Return how many of the pods have a node, and the scheduler's reason for the others."""
    pods = [pod for pod in pods if pod.deleted is None]
    there = sum(bool(pod.node) for pod in pods)
    says = next((pod.waits_for_node for pod in pods if pod.waits_for_node), "")
    refusal = Refusal(
        code="Unschedulable", says=says,
        remedy="The run goes on with the pods that have a node. Add nodes, or lower the workers' "
               "resources: kubectl describe pods --selector SELECTOR") if says else None
    return Supply(there=there, wanted=len(pods), refusal=refusal)


def _why_not(pod: Pod, node: Node | None, knows_nodes: bool) -> str:
    """Return why a pod cannot work now; "" if it can."""
    if not pod.node:
        return f"the pod has no node{f': {pod.waits_for_node}' if pod.waits_for_node else ''}"
    if not pod.address or not (pod.is_ready or pod.runs and node and not node.is_ready):
        return f"the pod is not ready{f': {pod.unready}' if pod.unready else ''}"
    if not knows_nodes:
        return ""
    if node is None:
        return f"its node {pod.node} is not known yet"
    if node.gpus < pod.gpus:
        return (f"node {node.name} offers {node.gpus} {GPU}, and the pod has {pod.gpus}: the "
                f"driver or the device plugin has not started yet")
    return ""


def _unready(status: Mapping[str, Any], ready: Mapping[str, Any]) -> str:
    """Return why the containers of a pod are not ready, as its kubelet tells it."""
    for container in status.get("containerStatuses") or ():
        if waiting := (container.get("state") or {}).get("waiting"):
            return f"{container['name']}: {_words(waiting)}"
    return _words(ready) if ready.get("status") != "True" else ""


def _tolerated_s(taint: Taint, tolerations: Iterable[Mapping[str, Any]]) -> float | None:
    """Return for how long a pod stays on a node with this taint; None: without a limit."""
    matching = [it for it in tolerations
                if it.get("effect") in (None, "", taint.effect)
                and it.get("key") in (None, "", taint.key)
                and (it.get("operator") == "Exists" or (it.get("value") or "") == taint.value)]
    if not matching:
        return 0.0
    limits = [float(it["tolerationSeconds"]) for it in matching
              if it.get("tolerationSeconds") is not None]
    return min(limits) if limits else None


def _conditions(item: Any) -> Conditions:
    return {one["type"]: one for one in item.get("status", {}).get("conditions") or ()}


def _is(conditions: Conditions, kind: str) -> bool:
    return conditions.get(kind, {}).get("status") == "True"


def _words(said: Mapping[str, Any]) -> str:
    """Return a reason and its message."""
    words = [str(said[name]) for name in ("reason", "message") if said.get(name)]
    return ": ".join(words)[:MOST_WORDS]


def _seconds(text: Any) -> float | None:
    """Return seconds since 1970; None: there is no time."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else None

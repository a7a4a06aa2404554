"""A small kubelet for tests: a pod is a host of the lab, and its containers are
processes there.

    with Kubelet(kubernetes, lab, ["n1", "n2"], namespace, environment, folder) as kubelet:
        node = kubelet.lose(pod)            its node is gone without notice
        kubelet.boot(node)                  and comes back under its name
        kubelet.add("n3")                   a new node
        kubelet.remove("n3")

What always holds:
1. A node has room for one pod. The containers run the commands of the pod's own specification, with
   its volumes and its environment, as uid 0. An image is this machine; a claim is a folder that all
   pods share.
2. A deleted pod gets SIGTERM, and SIGKILL at the end of its grace period. It is Failed or Succeeded
   by the exit codes of its containers, and is then removed. With restartPolicy Always a container
   that has ended starts again.
3. A sidecar (restartPolicy Always) starts before the containers, starts again when it ends, and is
   ended after them.
4. A node renews its lease. One that has lost its power renews nothing. When it boots again, a pod
   that ran on it has Failed, or starts again under the same uid if its restartPolicy is Always.
"""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from kubernetes_servers import MERGE, ControlPlane
from netlab import Lab

LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
ROOM = {"cpu": "8", "memory": "64Gi", "pods": "1"}
TURN_S = 0.1
HEARTBEAT_S = 5.0
ROOTS = ("/mnt", "/run", "/var/run")
"""Each host has its own: the kubelet mounts volumes there, and no others."""


@dataclass
class Running:
    """A pod that has been started."""

    name: str
    uid: str
    node: str
    containers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    sidecars: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    killed_at: float | None = None
    """When the grace period of a deleted pod ends, by time.monotonic; None: it is not deleted."""


class Kubelet(threading.Thread):
    """All nodes; use as a context manager. `environment` is that of the image; `cwd` its folder."""

    def __init__(self, kubernetes: ControlPlane, lab: Lab, nodes: Sequence[str], namespace: str,
                 environment: Mapping[str, str], folder: Path, cwd: Path):
        super().__init__(daemon=True)
        self.kubernetes, self.lab, self._first = kubernetes, lab, list(nodes)
        self.nodes: set[str] = set()
        self.path = f"/api/v1/namespaces/{namespace}/pods"
        self.environment = dict(environment)
        self.folder, self.cwd = folder, cwd
        self.running: dict[str, Running] = {}
        self.lost: set[str] = set()
        self.log: list[str] = []
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self.volumes = Volumes(kubernetes, namespace, folder)
        self._beat_at = 0.0

    def __enter__(self) -> Kubelet:
        for node in self._first:
            self.add(node)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.join()

    def run(self) -> None:
        """Do what is due, turn after turn; an error is logged, and the next turn tries again."""
        while not self.stopping.wait(TURN_S):
            try:
                with self.lock:
                    self._turn()
            except Exception as error:
                self.tell(f"{error!r}")

    def tell(self, text: str) -> None:
        """Keep a line of what happened."""
        self.log.append(f"{time.strftime('%T')} {text}"[:400])

    def lose(self, name: str) -> str:
        """Take the power of a pod's node: nothing of it is heard again. Returns the node."""
        with self.lock:
            pod = next(pod for pod in self.running.values() if pod.name == name)
            self.lost.add(pod.node)
            self.lab.power_cut(name)
            del self.running[pod.uid]
            self.tell(f"node {pod.node} with {name} has lost its power")
            return pod.node

    def add(self, node: str) -> None:
        """Join a node to the cluster."""
        with self.lock:
            self.kubernetes("POST", "/api/v1/nodes", {"metadata": {"name": node, "labels": {
                "node.kubernetes.io/instance-type": "lab", "topology.kubernetes.io/zone": "z1"}}})
            self._report_ready(node)
            # The controller never takes a renewal for one if it has seen the lease without a time
            # (node_lifecycle_controller.go, updateNodeHealth): the node is lost after 50 s.
            self.kubernetes("POST", LEASES, {"metadata": {"name": node}, "spec": lease(node)})
            self.nodes.add(node)

    def remove(self, node: str) -> None:
        """Take a node out of the cluster."""
        with self.lock:
            self.nodes.remove(node)
            self.kubernetes("DELETE", f"/api/v1/nodes/{node}")

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the processes of a pod."""
        with self.lock:
            pod = next(pod for pod in self.running.values() if pod.name == name)
            return [one for process in (*pod.containers.values(), *pod.sidecars.values())
                    for one in psutil.Process(process.pid).children(recursive=True)]

    def boot(self, node: str) -> None:
        """Give a node its power back."""
        with self.lock:
            self._report_ready(node)
            self.lost.remove(node)
            self.tell(f"node {node} is back")

    def rotate(self, name: str) -> None:
        """Write new tokens of a pod's account, and revoke the old ones."""
        with self.lock:
            pod = next(pod for pod in self.running.values() if pod.name == name)
            self.volumes.write_token(self.kubernetes("GET", f"{self.path}/{name}"), pod.uid)

    # --- turns ------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if time.monotonic() - self._beat_at > HEARTBEAT_S:
            self._beat_at = time.monotonic()
            for node in self.nodes - self.lost:
                self.kubernetes("PATCH", f"{LEASES}/{node}", {"spec": lease(node)}, MERGE)
        pods = self.kubernetes("GET", self.path)["items"]
        for pod in pods:
            self._serve(pod)
        there = {pod["metadata"]["uid"] for pod in pods}
        for running in [pod for uid, pod in self.running.items() if uid not in there]:
            self.lab.hosts[running.name].end()  # deleted without grace
            del self.running[running.uid]
            self.tell(f"{running.name} has been deleted, and is killed")

    def _report_ready(self, node: str) -> None:
        now = utc()
        ready = {"type": "Ready", "status": "True", "reason": "Lab", "lastHeartbeatTime": now,
                 "lastTransitionTime": now}
        self.kubernetes("PATCH", f"/api/v1/nodes/{node}/status",
                        {"status": {"conditions": [ready], "allocatable": ROOM,
                                    "capacity": ROOM}}, MERGE)

    def _serve(self, pod: Any) -> None:
        meta, node = pod["metadata"], pod["spec"].get("nodeName")
        running, leaving = self.running.get(meta["uid"]), "deletionTimestamp" in meta
        if not node or node in self.lost:
            if leaving and not node:
                self._remove(meta)
            return
        has_ended = pod["status"].get("phase") in ("Failed", "Succeeded")
        if running is None:
            if leaving:
                self._remove(meta)
            elif not has_ended and (pod["status"].get("podIP") is None or restarts(pod)):
                self._start(pod)
            elif not has_ended:  # it ran when its node lost its power
                self._report(meta["name"], "Failed", {
                    container["name"]: 137 for container in pod["spec"]["containers"]})
            return
        if leaving and running.killed_at is None:
            grace_s = int(meta["deletionGracePeriodSeconds"])
            running.killed_at = time.monotonic() + grace_s
            self.tell(f"SIGTERM to {running.name}, grace {grace_s} s")
            for process in running.containers.values():
                self._signal(process, signal.SIGTERM)
        if restarts(pod) and not leaving:
            for container in pod["spec"]["containers"]:
                ended = running.containers[container["name"]].poll()
                if ended is not None:
                    self.tell(f"{running.name}: {container['name']} has ended with {ended}, and "
                              f"starts again")
                    running.containers[container["name"]] = self._process(pod, container)
        is_late = running.killed_at is not None and time.monotonic() > running.killed_at
        codes = {name: process.poll() for name, process in running.containers.items()}
        if is_late or all(code is not None for code in codes.values()):
            self._end(running, {name: 137 if code is None else code if code >= 0 else 128 - code
                                for name, code in codes.items()})
            if leaving:
                self._remove(meta)
        else:
            self._keep_sidecars(pod, running)

    def _start(self, pod: Any) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        number = len(self.lab.addresses) + 10
        address = self.lab.addresses[name] = f"172.31.1.{number}"
        self.lab.boot(name)
        self.volumes.mount(self.lab, pod)
        running = self.running[uid] = Running(name, uid, pod["spec"]["nodeName"])
        # The pod's own view of itself has its address.
        pod["status"]["podIP"] = address
        for container in pod["spec"].get("initContainers", ()):
            if not is_sidecar(container):
                code = self._process(pod, container).wait()
                assert code == 0, f"{name}: {container['name']} has ended with {code}"
        self._keep_sidecars(pod, running)
        for container in pod["spec"]["containers"]:
            running.containers[container["name"]] = self._process(pod, container)
        self._report(name, "Running", {}, podIP=address, podIPs=[
            {"ip": address}, {"$patch": "replace"}])
        self.tell(f"{name} runs on {running.node}")

    def _keep_sidecars(self, pod: Any, running: Running) -> None:
        for container in filter(is_sidecar, pod["spec"].get("initContainers", ())):
            process = running.sidecars.get(container["name"])
            if process is None or process.poll() is not None:
                if process is not None:
                    self.tell(f"{running.name}: {container['name']} has ended with "
                              f"{process.returncode}, and starts again")
                running.sidecars[container["name"]] = self._process(pod, container)

    def _end(self, running: Running, codes: Mapping[str, int]) -> None:
        for process in running.sidecars.values():
            self._signal(process, signal.SIGTERM)
        for process in running.sidecars.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                pass
        self.lab.hosts[running.name].end()
        del self.running[running.uid]
        phase = "Failed" if any(codes.values()) else "Succeeded"
        self._report(running.name, phase, codes)
        self.tell(f"{running.name} has {phase}: {dict(codes)}")

    def _remove(self, meta: Any) -> None:
        self.kubernetes.ask("DELETE", f"{self.path}/{meta['name']}", {
            "gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}})

    def _report(self, name: str, phase: str, codes: Mapping[str, int], **more: Any) -> None:
        ready, now = str(phase == "Running"), utc()
        ended = [{"name": container, "image": "x", "imageID": "", "ready": False, "restartCount": 0,
                  "state": {"terminated": {"exitCode": code, "finishedAt": now,
                                           "reason": "Error" if code else "Completed"}}}
                 for container, code in codes.items()]
        status = {"phase": phase, "conditions": [
            {"type": kind, "status": ready, "lastTransitionTime": now}
            for kind in ("Ready", "ContainersReady")], "containerStatuses": ended, **more}
        answer, said = self.kubernetes.ask("PATCH", f"{self.path}/{name}/status",
                                           {"status": status},
                                           "application/strategic-merge-patch+json")
        assert answer in (200, 404), said

    # --- processes and volumes --------------------------------------------------------------------

    def _process(self, pod: Any, container: Any) -> subprocess.Popen[bytes]:
        known = self.volumes.variables(pod, container)
        words = [re.sub(r"\$\((\w+)\)", lambda found: known.get(found[1], found[0]), word)
                 for word in (*container.get("command", ()), *container.get("args", ()))]
        log = self.folder / "logs" / f"{pod['metadata']['name']}.{container['name']}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        return self.lab.start(pod["metadata"]["name"], words, env=self.environment | known,
                              cwd=self.cwd, stdout=open(log, "ab"), stderr=subprocess.STDOUT)

    def _signal(self, process: subprocess.Popen[bytes], number: int) -> None:
        """Signal the process that nsenter has started."""
        try:
            inner = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(inner[0]) if inner else process.pid, number)
        except (OSError, IndexError):
            pass  # it has ended


class Volumes:
    """What pods of a namespace mount, and the variables of their containers."""

    def __init__(self, kubernetes: ControlPlane, namespace: str, folder: Path):
        self.kubernetes, self.namespace, self.folder = kubernetes, namespace, folder

    def variables(self, pod: Any, container: Any) -> dict[str, str]:
        """Return the variables of a container: values, fields of the pod, and keys of Secrets."""
        found = dict[str, str]()
        for source in container.get("envFrom", ()):
            found |= {key: value.decode() for key, value in
                      self._secret(source["secretRef"]["name"]).items()}
        for entry in container.get("env", ()):
            source = entry.get("valueFrom", {})
            if "secretKeyRef" in source:
                key = source["secretKeyRef"]
                found[entry["name"]] = self._secret(key["name"])[key["key"]].decode()
            else:
                found[entry["name"]] = entry["value"] if "value" in entry else field_of(
                    pod, source["fieldRef"]["fieldPath"])
        return found

    def mount(self, lab: Lab, pod: Any) -> None:
        """Bind each volume where one of the containers mounts it, on a host's own file system."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        places = {(mount["name"], mount["mountPath"]) for container in (
            *pod["spec"]["containers"], *pod["spec"].get("initContainers", ()))
                  for mount in container.get("volumeMounts", ())}
        lab.inside(name, "mount", "-t", "tmpfs", "tmpfs", "/mnt")
        for volume in pod["spec"].get("volumes", ()):
            for place in sorted(there for given, there in places if given == volume["name"]):
                if place.startswith(ROOTS):
                    source = self._volume(pod, volume, uid)
                    lab.inside(name, "mkdir", "-p", place)
                    lab.inside(name, "mount", "--bind", str(source), place)

    def _volume(self, pod: Any, volume: Any, uid: str) -> Path:
        """Return the folder of a volume, with what belongs into it."""
        if "persistentVolumeClaim" in volume:
            there = self.folder / volume["persistentVolumeClaim"]["claimName"]
            there.mkdir(exist_ok=True)
            return there
        there = self.folder / "volumes" / uid / volume["name"]
        there.mkdir(parents=True, exist_ok=True)
        if "secret" in volume:
            for key, value in self._secret(volume["secret"]["secretName"]).items():
                (there / key).touch(mode=0o600)
                (there / key).write_bytes(value)
        elif "projected" in volume:
            self.write_token(pod, uid)
            (there / "ca.crt").write_bytes(self.kubernetes.ca_file.read_bytes())
            (there / "namespace").write_text(self.namespace)
        return there

    def _secret(self, name: str) -> dict[str, bytes]:
        found = self.kubernetes("GET", f"/api/v1/namespaces/{self.namespace}/secrets/{name}")
        return {key: base64.b64decode(value) for key, value in found["data"].items()}

    def write_token(self, pod: Any, uid: str) -> None:
        """Write a token that ends when its Secret is deleted; delete that of the one before."""
        volume = next(one["name"] for one in pod["spec"]["volumes"] if "projected" in one)
        there = self.folder / "volumes" / uid / volume
        secrets = f"/api/v1/namespaces/{self.namespace}/secrets"
        made = self.kubernetes("POST", secrets,
                               {"metadata": {"generateName": "token-"}})["metadata"]
        self.kubernetes.account(
            self.namespace, pod["spec"].get("serviceAccountName", "default"), there / "token",
            boundObjectRef={"kind": "Secret", "apiVersion": "v1", "name": made["name"],
                            "uid": made["uid"]})
        former = there.parent / "bound-to"
        if former.exists():
            self.kubernetes("DELETE", f"{secrets}/{former.read_text()}")
        former.write_text(made["name"])


def restarts(pod: Any) -> bool:
    """True if the containers of a pod start again when they have ended."""
    return pod["spec"].get("restartPolicy") == "Always"


def is_sidecar(container: Any) -> bool:
    """True for a container that runs beside those of the pod's work."""
    return container.get("restartPolicy") == "Always"


def field_of(pod: Any, path: str) -> str:
    """Return a field of a pod as the downward API names it."""
    value = pod
    if keyed := re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path):
        return str(pod["metadata"][keyed[1]][keyed[2]])
    for name in path.split("."):
        value = value[name]
    return str(value)


def lease(node: str) -> dict[str, Any]:
    """Return the specification of a node's lease, renewed now."""
    return {"holderIdentity": node, "leaseDurationSeconds": 40,
            "renewTime": utc().replace("Z", ".000000Z")}


def utc() -> str:
    """Return the present time as Kubernetes writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def image_environment(lab: Lab) -> dict[str, str]:
    """Return the environment that an image would have."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"HOME": os.environ["HOME"], "PATH": path, "PYTHONPATH": lab.python_path(),
            "PYTHONUNBUFFERED": "1"}

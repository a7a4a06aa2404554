"""A small scheduler and kubelet for tests: a pod is a host of the lab, and its containers are
processes there.

    with Kubelet(kubernetes, lab, ["n1", "n2"], namespace, environment, folder) as kubelet:
        kubelet.lose(pod)                   its node is gone without notice

What always holds:
1. The containers run the commands of the pod's own specification, with its volumes and its
   environment, as uid 0. An image is this machine; a claim is a folder that all pods share.
2. A deleted pod gets SIGTERM, and SIGKILL at the end of its grace period. It is Failed or Succeeded
   by the exit codes of its containers, and is then removed.
3. A sidecar (restartPolicy Always) starts before the containers, starts again when it ends, and is
   ended after them.
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

from kubernetes_servers import MERGE, ControlPlane
from netlab import Lab

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
        self.kubernetes, self.lab, self.nodes = kubernetes, lab, list(nodes)
        self.path = f"/api/v1/namespaces/{namespace}/pods"
        self.namespace, self.environment = namespace, dict(environment)
        self.folder, self.cwd = folder, cwd
        self.running: dict[str, Running] = {}
        self.lost: set[str] = set()
        self.log: list[str] = []
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self._beat_at = 0.0

    def __enter__(self) -> Kubelet:
        for node in self.nodes:
            self.kubernetes("POST", "/api/v1/nodes", {"metadata": {"name": node, "labels": {
                "node.kubernetes.io/instance-type": "lab", "topology.kubernetes.io/zone": "z1"}}})
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

    def lose(self, name: str) -> None:
        """Take the power of a pod's node: nothing of it is heard again."""
        with self.lock:
            pod = next(pod for pod in self.running.values() if pod.name == name)
            self.lost.add(pod.node)
            self.lab.power_cut(name)
            del self.running[pod.uid]
            self.tell(f"node {pod.node} with {name} has lost its power")

    def rotate(self, name: str) -> None:
        """Write new tokens of a pod's account, and revoke the old ones."""
        with self.lock:
            pod = next(pod for pod in self.running.values() if pod.name == name)
            self._write_token(self.kubernetes("GET", f"{self.path}/{name}"), pod.uid)

    # --- turns ------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if time.monotonic() - self._beat_at > HEARTBEAT_S:
            self._beat_at, now = time.monotonic(), utc()
            ready = {"type": "Ready", "status": "True", "reason": "Lab", "lastHeartbeatTime": now,
                     "lastTransitionTime": now}
            for node in self.nodes:
                if node not in self.lost:
                    self.kubernetes("PATCH", f"/api/v1/nodes/{node}/status",
                                    {"status": {"conditions": [ready]}}, MERGE)
        pods = self.kubernetes("GET", self.path)["items"]
        self._schedule(pods)
        for pod in pods:
            self._serve(pod)
        there = {pod["metadata"]["uid"] for pod in pods}
        for running in [pod for uid, pod in self.running.items() if uid not in there]:
            self.lab.hosts[running.name].end()  # deleted without grace
            del self.running[running.uid]
            self.tell(f"{running.name} has been deleted, and is killed")

    def _schedule(self, pods: Sequence[Any]) -> None:
        """Bind each new pod to a node without a pod."""
        new = [pod for pod in pods if not pod["spec"].get("nodeName")
               and "deletionTimestamp" not in pod["metadata"]]
        if not new:
            return
        used = {pod["spec"].get("nodeName") for pod in pods
                if pod["status"].get("phase") not in ("Failed", "Succeeded")}
        nodes = self.kubernetes("GET", "/api/v1/nodes")["items"]
        free = [node["metadata"]["name"] for node in nodes
                if node["metadata"]["name"] not in used | self.lost
                and not node["spec"].get("unschedulable")
                and not [taint for taint in node["spec"].get("taints", ())
                         if not taint["key"].startswith("node.kubernetes.io/not-ready")]]
        for pod, node in zip(new, sorted(free), strict=False):
            name = pod["metadata"]["name"]
            self.kubernetes("POST", f"{self.path}/{name}/binding", {
                "metadata": {"name": name}, "target": {"kind": "Node", "name": node}})

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
            elif not has_ended:
                self._start(pod)
            return
        if leaving and running.killed_at is None:
            grace_s = int(meta["deletionGracePeriodSeconds"])
            running.killed_at = time.monotonic() + grace_s
            self.tell(f"SIGTERM to {running.name}, grace {grace_s} s")
            for process in running.containers.values():
                self._signal(process, signal.SIGTERM)
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
        self._mount(pod)
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
        self._report(name, "Running", {}, podIP=address, podIPs=[{"ip": address}])
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
        known = {entry["name"]: entry["value"] if "value" in entry
                 else field_of(pod, entry["valueFrom"]["fieldRef"]["fieldPath"])
                 for entry in container.get("env", ())}
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

    def _mount(self, pod: Any) -> None:
        """Bind each volume where one of the containers mounts it, on a host's own file system."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        places = {(mount["name"], mount["mountPath"]) for container in (
            *pod["spec"]["containers"], *pod["spec"].get("initContainers", ()))
                  for mount in container.get("volumeMounts", ())}
        self.lab.inside(name, "mount", "-t", "tmpfs", "tmpfs", "/mnt")
        for volume in pod["spec"].get("volumes", ()):
            for place in sorted(there for given, there in places if given == volume["name"]):
                if place.startswith(ROOTS):
                    source = self._volume(pod, volume, uid)
                    self.lab.inside(name, "mkdir", "-p", place)
                    self.lab.inside(name, "mount", "--bind", str(source), place)

    def _volume(self, pod: Any, volume: Any, uid: str) -> Path:
        """Return the folder of a volume, with what belongs into it."""
        if "persistentVolumeClaim" in volume:
            there = self.folder / volume["persistentVolumeClaim"]["claimName"]
            there.mkdir(exist_ok=True)
            return there
        there = self.folder / "volumes" / uid / volume["name"]
        there.mkdir(parents=True, exist_ok=True)
        if "secret" in volume:
            secret = self.kubernetes("GET", f"/api/v1/namespaces/{self.namespace}/secrets/"
                                            f"{volume['secret']['secretName']}")
            for key, value in secret["data"].items():
                (there / key).touch(mode=0o600)
                (there / key).write_bytes(base64.b64decode(value))
        elif "projected" in volume:
            self._write_token(pod, uid)
            (there / "ca.crt").write_bytes(self.kubernetes.ca_file.read_bytes())
            (there / "namespace").write_text(self.namespace)
        return there

    def _write_token(self, pod: Any, uid: str) -> None:
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


def utc() -> str:
    """Return the present time as Kubernetes writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def image_environment(lab: Lab) -> dict[str, str]:
    """Return the environment that an image would have."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"HOME": os.environ["HOME"], "PATH": path, "PYTHONPATH": lab.python_path(),
            "PYTHONUNBUFFERED": "1"}

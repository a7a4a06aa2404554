"""A run whose coordinator and workers are pods: the manifests of deploy/kubernetes, on a real API
server, with the pods as hosts of a lab.

    with started(lab, folder, job) as fleet:
        fleet.wait_for_world(4)
        fleet.evict(fleet.workers()[0])
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from cluster import DEADLINE_S, JOB, Cluster
from kubelet import Kubelet, image_environment
from kubernetes_servers import MERGE, NAME, ControlPlane, kustomized
from netlab import Lab
from waiting import wait_for

NAMESPACE = "elastic-trainer"
WORKER = "app.kubernetes.io/component=worker"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
KEY_COMMAND = "openssl rand -hex 32 | kubectl create secret generic elastic-trainer"
"""As the guide has it."""


class PodFleet(Cluster):
    """The run of the manifests, with a job of the tests in place of the demo."""

    def __init__(self, lab: Lab, folder: Path, kubernetes: ControlPlane, workers: int,
                 job: Sequence[str]):
        super().__init__(folder, run="demo")
        self.run_dir = folder / "store" / "runs" / "demo"
        self.lab, self.kubernetes, self.workers_wanted, self.job = lab, kubernetes, workers, job
        self.kubelet: Kubelet | None = None
        self._formed_at = 0.0
        """When the last world was formed that `forms` has seen."""

    def start(self) -> None:
        """Apply the manifests."""
        kubectl = functools.partial(self.kubernetes.kubectl, "--namespace", NAMESPACE)
        self.kubernetes.kubectl("create", "namespace", NAMESPACE)
        key = (self.lab.folder / "agent.key").read_text()
        kubectl("create", "secret", "generic", "elastic-trainer", "--from-file=key=/dev/stdin",
                given=key)
        objects = kustomized()
        for one in objects:
            if (one["kind"], one["metadata"]["name"]) == ("Job", "workers"):
                one["spec"] |= {"parallelism": self.workers_wanted,
                                "completions": self.workers_wanted}
            elif (one["kind"], one["metadata"]["name"]) == ("Job", "coordinator"):
                (driver,) = one["spec"]["template"]["spec"]["containers"]
                ours = driver["args"][:driver["args"].index("--")]
                driver["args"] = [*with_value(ours, "-np", str(self.workers_wanted)), "--",
                                  *JOB, *self.job]
        kubectl("apply", "-f", "-", given=yaml.safe_dump_all(objects))

    def wait_for(self, what: str, seen: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """Wait until `seen()` is true and return it; not if the coordinator's Job has failed."""
        def seen_or_failed() -> Any:
            failed = [line for line in self.failures() if line]
            assert not failed, f"{failed} before {what}; {self.story()}"
            return seen()

        return wait_for(what, seen_or_failed, deadline_s, self.story)

    def failures(self) -> list[str]:
        """Return why Jobs have failed."""
        return [str(one.get("message")) for job in ("coordinator", "workers")
                for one in self.get_job(job)["status"].get("conditions", ())
                if one["type"] == "Failed"]

    def end(self) -> None:
        """End nothing: the pods end with the lab."""

    def wait(self, deadline_s: float = 300.0) -> int:
        """Wait until the coordinator's Job is complete; returns 0, or 1 if it has failed."""
        def verdict() -> Any:
            return {one["type"] for one in self.get_job("coordinator")["status"].get(
                "conditions", ())} & {"Complete", "Failed"}

        return int("Failed" in wait_for("end of the coordinator's Job", verdict, deadline_s,
                                        self.story))

    def story(self) -> str:
        """Return what a person needs to see when a test fails."""
        logs = "\n".join(f"--- {log.name}\n" + "\n".join(
            log.read_text(errors="replace").splitlines()[-8:])
                         for log in sorted((self.folder / "logs").glob("*.log")))
        assert self.kubelet
        return "\n".join([super().story(), "the kubelet:", *self.kubelet.log[-40:], logs])

    # --- what a test does and sees ----------------------------------------------------------------

    def get_job(self, name: str) -> Any:
        return self.kubernetes("GET", f"{JOBS}/{name}")

    def pods(self, component: str) -> list[Any]:
        """Return the pods of a component that run and are not deleted."""
        found = self.kubernetes(
            "GET", f"{PODS}?labelSelector=app.kubernetes.io/component%3D{component}")["items"]
        return [pod for pod in found if pod["status"].get("phase") == "Running"
                and "deletionTimestamp" not in pod["metadata"]]

    def workers(self) -> list[str]:
        """Return the names of the workers' pods that run."""
        return sorted(pod["metadata"]["name"] for pod in self.pods("worker"))

    def coordinator(self) -> str:
        """Return the name of the coordinator's pod."""
        (pod,) = self.pods("coordinator")
        return str(pod["metadata"]["name"])

    def evict(self, name: str) -> None:
        """Evict a pod, as `kubectl drain` does."""
        self.kubernetes("POST", f"{PODS}/{name}/eviction", {
            "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name},
            "deleteOptions": {"gracePeriodSeconds": 30}})

    def delete_at_once(self, name: str) -> None:
        """Delete a pod without grace, as `kubectl delete --force` does."""
        self.kubernetes("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})

    def wait_for_no_pod(self) -> None:
        """Wait until both Jobs are complete, and no pod runs."""
        def are_complete() -> bool:
            return not self.pods("worker") and not self.pods("coordinator") and all(
                "Complete" in {one["type"] for one in self.get_job(name)["status"].get(
                    "conditions", ())} for name in ("coordinator", "workers"))

        wait_for("end of both Jobs", are_complete, story=self.story)

    def scale(self, workers: int) -> None:
        """Change the number of workers, as the guide does."""
        self.kubernetes("PATCH", f"{JOBS}/workers",
                        {"spec": {"parallelism": workers, "completions": workers}}, MERGE)

    def forms(self, size: int) -> None:
        """Wait until a world of this size has formed since the last one, in any attempt."""
        self._formed_at = self.wait_for(f"world of {size}", lambda: [
            e["time"] for e in self.events("worker.generation_started")
            if e["size"] == size and e["time"] > self._formed_at])[-1]

    def taint(self, name: str, key: str) -> None:
        """Taint the node of a pod."""
        node = self.kubernetes("GET", f"{PODS}/{name}")["spec"]["nodeName"]
        self.kubernetes("PATCH", f"/api/v1/nodes/{node}",
                        {"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}}, MERGE)

    def wait_for_attempt(self, number: int) -> None:
        """Wait until an attempt has read a checkpoint."""
        self.wait_for(f"attempt {number}", lambda: [
            e for e in self.events("state.checkpoint_restored") if e["attempt"] == number])

    def newest_step(self) -> int:
        """Return the number of the newest finished step."""
        return int(self.events("worker.step_committed")[-1]["step"])

    def host_events(self, event: str, pod: str) -> list[dict[str, Any]]:
        """Return the events of one pod's host."""
        return [e for e in self.events(event) if str(e.get("host")).startswith(pod)]


def with_value(arguments: Sequence[str], option: str, value: str) -> list[str]:
    """Return arguments with another value of an option."""
    at = list(arguments).index(option)
    return [*arguments[:at + 1], value, *arguments[at + 2:]]


@contextmanager
def started(lab: Lab, folder: Path, job: Sequence[str], *, workers: int,
            nodes: int) -> Iterator[PodFleet]:
    """Run the manifests on a control plane of its own. Raises Unavailable."""
    lab.has_agents = lab.has_sshd = False
    lab.addresses[NAME] = "172.31.2.1"
    lab.boot(NAME)
    with ExitStack() as stack:
        kubernetes = stack.enter_context(ControlPlane(
            folder / "kubernetes", lab.address(NAME), 443, lab.hosts[NAME].enter(),
            functools.partial(lab.network_of, NAME)))
        fleet = PodFleet(lab, folder, kubernetes, workers, job)
        environment = image_environment(lab) | {
            name: fleet.env[name] for name in ("ELASTIC_TEST_PLAN", "ELASTIC_TEST_FOLDER",
                                               "ELASTIC_TRAINER_LIMITS") if name in fleet.env}
        fleet.kubelet = stack.enter_context(Kubelet(
            kubernetes, lab, [f"n{number}" for number in range(nodes)], NAMESPACE, environment,
            folder, folder))
        with fleet:
            yield fleet

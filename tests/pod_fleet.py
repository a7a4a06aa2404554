"""A run whose coordinator and workers are pods: the manifests of deploy/kubernetes, on a real API
server, with the pods as hosts of a lab.

    with started(lab, folder, job) as fleet:
        fleet.forms(4)
        fleet.evict(fleet.workers()[0])

    with started(lab, folder, job, variant="deployment", …)      another folder of deploy/kubernetes
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import kubernetes_controllers
import psutil
import s3_servers
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
NODES = "/api/v1/nodes"


class PodFleet(Cluster):
    """The run of the manifests, with a job of the tests in place of the demo."""

    unknown = frozenset({"PodMonitor"})
    """Kinds that no server here knows."""

    def __init__(self, lab: Lab, folder: Path, kubernetes: ControlPlane, workers: int,
                 job: Sequence[str], variant: str, secrets: Mapping[str, Mapping[str, str]]):
        super().__init__(folder, run="demo", forks=False)
        self.objects = kustomized(variant)
        self.secrets = secrets
        self.jobs = {name: name if one["kind"] == "Job" else f"{one['metadata']['name']}-{name}-0"
                     for one in self.objects if one["kind"] in ("Job", "JobSet")
                     for name in specs_in([one])}
        """The names of the Jobs, as the cluster has them."""
        self.run_dir = folder / "store" / "runs" / "demo"
        self.lab, self.kubernetes, self.workers_wanted, self.job = lab, kubernetes, workers, job
        self.kubelet: Kubelet | None = None
        self._formed_at = 0.0
        """When the last world was formed that `forms` has seen."""

    def start(self) -> None:
        """Apply the manifests."""
        self.kubernetes.kubectl("create", "namespace", NAMESPACE)
        key = (self.lab.folder / "agent.key").read_text()
        for name, values in ({"elastic-trainer": {}} | dict(self.secrets)).items():
            own = {"key": f"{key}\n"} if name == "elastic-trainer" else {}
            self.kubernetes("POST", f"/api/v1/namespaces/{NAMESPACE}/secrets", {
                "metadata": {"name": name}, "stringData": own | dict(values)})
        self.kubernetes("POST", "/api/v1/persistentvolumes", {
            "metadata": {"name": "store"}, "spec": {
                "capacity": {"storage": "10Gi"}, "accessModes": ["ReadWriteOnce"],
                "hostPath": {"path": "/store"}}})
        specs = specs_in(self.objects)
        workers, pod = specs["workers"], specs["coordinator"]["template"]["spec"]
        for name in ("replicas", "parallelism", "completions"):
            if name in workers:
                workers[name] = self.workers_wanted
        (driver,) = pod["containers"]
        ours = with_value(driver["args"][:driver["args"].index("--")], "-np",
                          str(self.workers_wanted))
        driver["args"] = [
            *(word.replace("s3://BUCKET/", f"s3://{s3_servers.BUCKET}/") for word in ours), "--",
            *JOB, *self.job]
        self.kubectl("apply", "-f", "-", given=yaml.safe_dump_all(
            [one for one in self.objects if one["kind"] not in self.unknown]))

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        """Run kubectl in the run's namespace; returns what it printed."""
        return self.kubernetes.kubectl("--namespace", NAMESPACE, *arguments, given=given)

    def wait_for(self, what: str, seen: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """Wait until `seen()` is true and return it; not if the coordinator's Job has failed."""
        def seen_or_failed() -> Any:
            failed = [line for line in self.failures() if line]
            assert not failed, f"{failed} before {what}; {self.story()}"
            return seen()

        return wait_for(what, seen_or_failed, deadline_s, self.story)

    def failures(self) -> list[str]:
        """Return why Jobs have failed."""
        return [str(one.get("message")) for job in self.jobs
                for one in self.get_job(job).get("status", {}).get("conditions", ())
                if one["type"] == "Failed"]

    def end(self) -> None:
        """End nothing: the pods end with the lab."""

    def wait(self, deadline_s: float = 600.0) -> int:
        """Wait until the coordinator's Job is complete; returns 0, or 1 if it has failed."""
        def verdict() -> Any:
            return {one["type"] for one in self.get_job("coordinator").get("status", {}).get(
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
        """Return the Job of a component; {}: there is none yet."""
        status, job = self.kubernetes.ask("GET", f"{JOBS}/{self.jobs[name]}")
        return job if status == 200 else {}

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
        """Wait until the run's Jobs are complete, and no pod runs."""
        def are_complete() -> bool:
            return not self.pods("worker") and not self.pods("coordinator") and all(
                "Complete" in {one["type"] for one in self.get_job(name).get("status", {}).get(
                    "conditions", ())} for name in self.jobs)

        wait_for("end of the Jobs", are_complete, story=self.story)

    def scale(self, workers: int) -> None:
        """Change the number of workers, as the guide does."""
        if "workers" not in self.jobs:
            self.kubectl("scale", "deployment", "workers", f"--replicas={workers}")
            return
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
        self.kubernetes("PATCH", f"{NODES}/{node}",
                        {"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}}, MERGE)

    def is_ready(self, node: str) -> bool:
        """True if Kubernetes takes a node for ready."""
        return any(one["type"] == "Ready" and one["status"] == "True" for one in self.kubernetes(
            "GET", f"{NODES}/{node}")["status"]["conditions"])

    def told(self) -> dict[str, str]:
        """Return the reasons of the Events on pods of the coordinator, with their types."""
        found = json.loads(self.kubectl("get", "events", "--output=json"))["items"]
        return {one["reason"]: one["type"] for one in found
                if one.get("source", {}).get("component") == "elastic-trainer"
                and one["involvedObject"]["name"].startswith("coordinator-")}

    def printed(self) -> list[dict[str, Any]]:
        """Return the events that the coordinator's pods have printed as lines of JSON."""
        return [json.loads(line) for log in (self.folder / "logs").glob("coordinator-*.log.log")
                for line in log.read_text().splitlines()]

    def libraries(self, names: Collection[str]) -> set[str]:
        """Return which of these packages the coordinator's processes have in memory."""
        assert self.kubelet
        paths = set[str]()
        for process in self.kubelet.processes(self.coordinator()):
            with suppress(psutil.NoSuchProcess):  # the discovery script lives for a moment
                paths |= {mapped.path for mapped in process.memory_maps()}
        return {name for name in names if any(f"/site-packages/{name}/" in it for it in paths)}

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


def specs_in(objects: Sequence[Any]) -> dict[str, Any]:
    """Return the specifications of the coordinator and of the workers."""
    found = {one["metadata"]["name"]: one["spec"] for one in objects
             if one["kind"] in ("Job", "Deployment")}
    return found | {job["name"]: job["template"]["spec"] for one in objects
                    if one["kind"] == "JobSet" for job in one["spec"]["replicatedJobs"]}


def with_value(arguments: Sequence[str], option: str, value: str) -> list[str]:
    """Return arguments with another value of an option."""
    at = list(arguments).index(option)
    return [*arguments[:at + 1], value, *arguments[at + 2:]]


NO_SECRETS: Mapping[str, Mapping[str, str]] = {}


@contextmanager
def started(lab: Lab, folder: Path, job: Sequence[str], *, workers: int, nodes: int,
            variant: str = "base",
            secrets: Mapping[str, Mapping[str, str]] = NO_SECRETS) -> Iterator[PodFleet]:
    """Run the manifests on a control plane of its own. Raises Unavailable."""
    lab.has_agents = lab.has_sshd = False
    lab.addresses[NAME] = "172.31.2.1"
    lab.boot(NAME)
    with ExitStack() as stack:
        kubernetes = stack.enter_context(ControlPlane(
            folder / "kubernetes", lab.address(NAME), 443, lab.hosts[NAME].enter(),
            functools.partial(lab.network_of, NAME)))
        if variant in kubernetes_controllers.VERSIONS:
            kubernetes_controllers.add(kubernetes, variant)
        fleet = PodFleet(lab, folder, kubernetes, workers, job, variant, secrets)
        environment = image_environment(lab) | {
            name: fleet.env[name] for name in ("ELASTIC_TEST_PLAN", "ELASTIC_TEST_FOLDER",
                                               "ELASTIC_TRAINER_LIMITS") if name in fleet.env}
        fleet.kubelet = stack.enter_context(Kubelet(
            kubernetes, lab, [f"n{number}" for number in range(nodes)], NAMESPACE, environment,
            folder, folder))
        with fleet:
            yield fleet

"""deploy/kubernetes: valid for Kubernetes 1.31 to 1.37 and for a real API server, and with the
settings on which the promises rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_servers import ControlPlane, kustomized
from s3_servers import Unavailable
from size import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = [f"1.{minor}" for minor in range(31, 38)]
FOLDERS = ["base", "deployment", "jobset", "kueue", "monitor", "s3", "trainer"]
SCHEMAS = ("kubernetes-validate==1.37.0",)
MODELS = ("kubeflow-trainer-api==2.3.0", "cloudcoil-models-prometheus-operator==0.80.1.0")
OTHERS = {"JobSet", "ClusterTrainingRuntime", "TrainJob", "PodMonitor"}
"""Kinds that are not Kubernetes' own."""
VALIDATE = """
import json, sys, kubernetes_validate
for version in sys.argv[1].split(","):
    for one in json.load(open(sys.argv[2])):
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except Exception as error:
            print(version, one["kind"], one["metadata"]["name"], type(error).__name__, str(error))
"""
READ = """
import json, sys
from cloudcoil.models.prometheus_operator.v1 import PodMonitor
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_cluster_training_runtime import (
    TrainerV1alpha1ClusterTrainingRuntime)
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
kinds = {"JobSet": JobsetV1alpha2JobSet, "TrainJob": TrainerV1alpha1TrainJob,
         "ClusterTrainingRuntime": TrainerV1alpha1ClusterTrainingRuntime}
read = []
for one in json.load(open(sys.argv[1])):
    if one["kind"] == "PodMonitor":
        read.append(PodMonitor.model_validate(one).model_dump(mode="json", by_alias=True,
                                                              exclude_none=True))
    else:
        read.append(kinds[one["kind"]].from_dict(one).to_dict())
print(json.dumps(read))
"""


def objects(folder: str = "base") -> list[Any]:
    """Return a folder's objects, or skip the test."""
    try:
        return kustomized(folder)
    except Unavailable as error:
        pytest.skip(str(error))


def job(name: str, folder: str = "base") -> Any:
    return next(one for one in objects(folder) if one["kind"] in ("Job", "Deployment")
                and one["metadata"]["name"] == name)


def pod_of(name: str) -> Any:
    return job(name)["spec"]["template"]["spec"]


def installed(*packages: str) -> str:
    """Return a cache folder with packages that only these tests need, or skip the test."""
    name = "-".join([*packages, str(sys.implementation.cache_tag)]).replace("==", "_")
    there = Path(tempfile.gettempdir(), f"elastic-trainer-{os.getuid()}-{name}")
    if not there.exists():
        part = tempfile.mkdtemp(dir=there.parent)
        done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", part,
                               *packages], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{' and '.join(packages)} cannot be installed: {done.stderr[-200:]}")
        try:
            os.rename(part, there)
        except OSError:
            pass  # another process was faster
    return str(there)


def python(program: str, path: str, *arguments: str) -> str:
    """Run a program with packages of its own; returns what it printed."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": path}, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def saved(folder: Path, ones: list[Any]) -> str:
    """Save objects as JSON; returns the file."""
    (folder / "objects.json").write_text(json.dumps(ones))
    return str(folder / "objects.json")


def test_every_object_is_valid_from_1_31_to_1_37(tmp_path: Path) -> None:
    """By the schemas of Kubernetes, without unknown fields. A misspelled field is found."""
    path = installed(*SCHEMAS)
    ones = [one for folder in FOLDERS for one in objects(folder) if one["kind"] not in OTHERS]
    assert len(ones) > 40
    assert python(VALIDATE, path, ",".join(VERSIONS), saved(tmp_path, ones)) == ""
    wrong = job("workers")
    wrong["spec"]["podReplacementPolice"] = "Failed"
    assert "podReplacementPolice" in python(VALIDATE, path, "1.31", saved(tmp_path, [wrong]))


def test_jobset_runtime_and_monitor_are_valid_by_their_own_schemas(tmp_path: Path) -> None:
    """Read by the models of their projects, and written again: nothing is unknown or lost."""
    path = installed(*MODELS)
    ones = [one for folder in FOLDERS for one in objects(folder) if one["kind"] in OTHERS]
    ones.append(yaml.safe_load((FOLDER / "trainer" / "trainjob.yaml").read_text()))
    assert {one["kind"] for one in ones} == OTHERS
    read = json.loads(python(READ, path, saved(tmp_path, ones)))
    assert [without_defaults(one) for one in read] == ones


def without_defaults(one: Any) -> Any:
    """Return an object without the protocol of a port, which the models add."""
    if isinstance(one, dict):
        return {name: without_defaults(value) for name, value in one.items()
                if (name, value) != ("protocol", "TCP")}
    return [without_defaults(value) for value in one] if isinstance(one, list) else one


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    try:
        with ControlPlane(tmp_path_factory.mktemp("kubernetes") / "plane") as server:
            server.kubectl("create", "namespace", "elastic-trainer")
            yield server
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_real_api_server_takes_every_object(server: ControlPlane, folder: str) -> None:
    """With all of its checks, and with an error for each field that it does not know."""
    ours = [one for one in objects(folder) if one["kind"] not in OTHERS]
    said = server.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-",
                          given=yaml.safe_dump_all(ours))
    assert said.count("(server dry run)") == len(ours)


def test_the_coordinator_may_read_pods_and_nodes_and_nothing_else() -> None:
    """And write its own Events. The workers' pods have no account at all."""
    rules = [rule for one in objects() if one["kind"] in ("Role", "ClusterRole")
             for rule in one["rules"]]
    assert sorted((rule["resources"], rule["verbs"]) for rule in rules) == [
        (["events"], ["create"]), (["nodes"], ["get", "list", "watch"]),
        (["pods"], ["get", "list", "watch"])]
    assert pod_of("workers")["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod_of("workers")


def test_a_drain_has_the_grace_of_its_pod() -> None:
    """The agent promises as much time as the kubelet gives."""
    pod = pod_of("workers")
    arguments = pod["containers"][0]["args"]
    assert f"--grace={pod['terminationGracePeriodSeconds']}" in arguments


def test_workers_wait_for_another_pod_only_where_one_comes_before_their_own_has_ended() -> None:
    """A Job replaces a pod when it has ended, a Deployment while it drains."""
    assert "--replaced-after-end" in pod_of("workers")["containers"][0]["args"]
    deployment = job("workers", "deployment")["spec"]["template"]["spec"]
    assert "--replaced-after-end" not in deployment["containers"][0]["args"]


def test_an_index_that_lost_its_pod_runs_again_until_the_run_is_finished() -> None:
    """A pod that succeeds is never replaced, so an agent that is stopped fails. One that saw the
    end of the run ends the Job."""
    spec = job("workers")["spec"]
    arguments = spec["template"]["spec"]["containers"][0]["args"]
    assert (spec["completionMode"], spec["podReplacementPolicy"]) == ("Indexed", "Failed")
    assert spec["parallelism"] == spec["completions"]
    assert spec["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    assert {"--stopped-exit-code=75", "--end-with-run"} <= set(arguments)
    deployment = job("workers", "deployment")["spec"]["template"]["spec"]
    assert deployment["restartPolicy"] == "Always"
    assert "--end-with-run" not in deployment["containers"][0]["args"]


@pytest.mark.parametrize("name", ["coordinator", "workers"])
def test_no_pod_is_moved_to_save_nodes_and_none_has_rights_on_its_node(name: str) -> None:
    """Both autoscalers are asked to let it stay. No container is root, or may become root."""
    template = job(name)["spec"]["template"]
    assert template["metadata"]["annotations"] == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true"}
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    for container in (*template["spec"]["containers"], *template["spec"].get("initContainers", ())):
        assert container["securityContext"] == {"allowPrivilegeEscalation": False,
                                                "capabilities": {"drop": ["ALL"]}}
        assert "requests" in container["resources"]
        assert not any("SECRET" in str(entry).upper() for entry in container.get("env", ()))


@pytest.mark.parametrize("folder", FOLDERS)
def test_all_containers_have_the_image_that_the_base_names(folder: str) -> None:
    """Also those that a variant adds. A kubelet pulls the tag `latest`, or none, from a registry,
    and does not take the image that kind has loaded onto its node."""
    (image,) = images(objects(folder))
    assert image.partition(":")[2] not in ("", "latest")


def images(one: Any) -> set[str]:
    """Return all images of objects."""
    if isinstance(one, dict):
        return {it for name, value in one.items()
                for it in ({value} if name == "image" else images(value))}
    return {it for value in one for it in images(value)} if isinstance(one, list) else set()


def test_the_pods_of_a_jobset_and_a_runtime_are_those_of_the_jobs() -> None:
    """They are copied by kustomize, not by hand."""
    jobs = {name: job(name)["spec"] for name in ("coordinator", "workers")}
    jobset = next(one for one in objects("jobset") if one["kind"] == "JobSet")["spec"]
    runtime = next(one for one in objects("trainer")
                   if one["kind"] == "ClusterTrainingRuntime")["spec"]["template"]["spec"]
    for spec in (jobset, runtime):
        assert {one["name"]: one["template"]["spec"] for one in spec["replicatedJobs"]} == jobs
        assert spec["successPolicy"]["targetReplicatedJobs"] == ["coordinator"]

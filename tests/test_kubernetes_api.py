"""Discovery and Events against a real API server with its controllers (kubernetes_servers.py)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kubernetes_servers import MERGE, ControlPlane
from s3_servers import Unavailable
from waiting import until, wait_for

from elastic_trainer.discovery.hosts import Policy
from elastic_trainer.discovery.place_protocol import PlaceUnavailable
from elastic_trainer.discovery.places.kubernetes import Kubernetes
from elastic_trainer.discovery.places.kubernetes_pods import GPU
from elastic_trainer.discovery.poll import Poller
from elastic_trainer.views.kubernetes_events import AGAIN_S, MAY_NOT, Subject, Teller
from elastic_trainer.wire import kubernetes as api
from elastic_trainer.wire.kubernetes import Account, ApiUnavailable

PODS = "/api/v1/namespaces/default/pods"
SECRETS = "/api/v1/namespaces/default/secrets"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with one node, and an account that may read pods and nodes."""
    try:
        with ControlPlane(tmp_path_factory.mktemp("kubernetes") / "plane", controllers=[
                "--node-monitor-grace-period=10s"]) as server:
            server("POST", "/api/v1/nodes", {"metadata": {"name": "n1"}})
            for name in ("reader", "nobody", "pods-only"):
                server.kubectl("create", "serviceaccount", name)
            server.kubectl("create", "clusterrole", "nodes", "--verb=get,list,watch",
                           "--resource=nodes")
            server.kubectl("create", "clusterrolebinding", "nodes", "--clusterrole=nodes",
                           "--serviceaccount=default:reader")
            server.kubectl("create", "role", "pods", "--verb=get,list,watch", "--resource=pods")
            for name in ("reader", "pods-only"):
                server.kubectl("create", "rolebinding", name, "--role=pods",
                               f"--serviceaccount=default:{name}")
            yield server
    except Unavailable as error:
        pytest.skip(str(error))


def account(server: ControlPlane, name: str, folder: Path, **more: Any) -> Account:
    """Return an account with a token of its own."""
    server.account("default", name, folder / "token", **more)
    return Account(server.server, server.ca_file, folder / "token")


def pod(server: ControlPlane, name: str, label: str, address: str, node: str = "n1",
        gpus: int = 0) -> None:
    """Make a pod that runs."""
    server("POST", PODS, {"metadata": {"name": name, "labels": {"app": label}}, "spec": {
        "nodeName": node, "automountServiceAccountToken": False, "containers": [{
            "name": "c", "image": "x",
            "resources": {"limits": {GPU: str(gpus)}} if gpus else {}}]}})
    runs(server, name, address)


def runs(server: ControlPlane, name: str, address: str) -> None:
    """Report a pod as its kubelet does."""
    server("PATCH", f"{PODS}/{name}/status", {"status": {
        "phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": [
            {"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")]}}, MERGE)


def test_an_answer_has_what_has_changed_since_the_one_before(server: ControlPlane,
                                                             tmp_path: Path) -> None:
    """New pods, notices, taints and pods that are gone; pods of other labels are left out."""
    place = Kubernetes(account(server, "reader", tmp_path), "default", "app=a")
    pod(server, "a1", "a", "10.0.0.1")
    assert [host.address for host in place.instances()] == ["10.0.0.1"]
    pod(server, "a2", "a", "10.0.0.2")
    pod(server, "b1", "b", "10.0.0.3")
    assert sorted(host.address for host in place.instances()) == ["10.0.0.1", "10.0.0.2"]
    server("DELETE", f"{PODS}/a1")
    server("PATCH", "/api/v1/nodes/n1", {"spec": {"taints": [
        {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}}, MERGE)
    notices = {host.address: host.notice.action for host in place.instances() if host.notice}
    assert notices == {"10.0.0.1": "pod deleted",
                       "10.0.0.2": "node n1 tainted karpenter.sh/disrupted"}
    server("PATCH", "/api/v1/nodes/n1", {"spec": {"taints": None}}, MERGE)
    server("DELETE", f"{PODS}/a1", {"gracePeriodSeconds": 0})
    assert [(host.address, host.notice) for host in place.instances()] == [("10.0.0.2", None)]


def test_a_version_that_the_server_has_forgotten_is_read_anew(server: ControlPlane,
                                                              tmp_path: Path) -> None:
    """A watch from too old a version ends with 410."""
    pod(server, "c1", "c", "10.0.1.1")
    place = Kubernetes(account(server, "reader", tmp_path), "default", "app=c")
    assert len(place.instances()) == 1
    place.pods.version = "1"
    pod(server, "c2", "c", "10.0.1.2")
    assert len(place.instances()) == 2
    assert int(place.pods.version) > 1


def test_a_node_that_falls_silent_keeps_its_pods_and_waits_for_its_gpus_when_it_is_back(
        server: ControlPlane, tmp_path: Path) -> None:
    """The real controller marks the node and its pods: their agents tell more. A node that is back
    starts its pods before the driver of its GPUs is there (kubeflow/trainer 999)."""
    def report(gpus: int) -> None:
        server("PATCH", "/api/v1/nodes/gpus/status", {"status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "capacity": {GPU: str(gpus)}, "allocatable": {GPU: str(gpus)}}}, MERGE)

    server("POST", "/api/v1/nodes", {"metadata": {"name": "gpus"}})
    report(4)
    pod(server, "g1", "g", "10.0.5.1", node="gpus", gpus=4)
    place = Kubernetes(account(server, "reader", tmp_path), "default", "app=g")
    assert [(host.state, host.gpus) for host in place.instances()] == [("running", 4)]
    wait_for("mark of the pod", lambda: "False" in [
        one["status"] for one in server("GET", f"{PODS}/g1")["status"]["conditions"]])
    (node,) = (node for node in server("GET", "/api/v1/nodes")["items"]
               if node["metadata"]["name"] == "gpus")
    assert "Unknown" in [one["status"] for one in node["status"]["conditions"]]
    assert [(host.state, host.notice) for host in place.instances()] == [("running", None)]
    report(0)
    runs(server, "g1", "10.0.5.2")
    (host,) = place.instances()
    assert (host.state, host.address) == ("pending", "10.0.5.2")
    assert host.says == (f"node gpus offers 0 {GPU}, and the pod has 4: the driver or the device "
                         f"plugin has not started yet")
    report(4)
    assert [host.state for host in place.instances()] == ["running"]


def test_a_list_of_several_pages_is_read_whole(server: ControlPlane, tmp_path: Path) -> None:
    """The server gives at most as many as it is asked for."""
    for number in range(5):
        pod(server, f"p{number}", "p", f"10.0.2.{number + 1}")
    place = Kubernetes(account(server, "reader", tmp_path), "default", "app=p", page=2)
    assert len(place.instances()) == 5


def test_a_token_is_read_at_each_request(server: ControlPlane, tmp_path: Path) -> None:
    """The kubelet replaces it; the one before is refused then, and its text is in no error."""
    bound = server("POST", SECRETS, {"metadata": {"generateName": "token-"}})["metadata"]
    place = Kubernetes(account(server, "reader", tmp_path, boundObjectRef={
        "kind": "Secret", "apiVersion": "v1", "name": bound["name"], "uid": bound["uid"]}),
        "default", "app=t")
    assert place.instances() == []
    server("DELETE", f"{SECRETS}/{bound['name']}")

    def refusal() -> str:
        try:
            place.instances()
            return ""
        except PlaceUnavailable as error:
            return str(error)

    said = until(refusal)  # the server remembers a token for 10 s
    assert "refuses the token" in said
    assert (tmp_path / "token").read_text() not in said
    server.account("default", "reader", tmp_path / "token")
    assert place.instances() == []


def test_a_server_that_is_away_has_no_answer_and_then_a_whole_one(
        server: ControlPlane, tmp_path: Path) -> None:
    """Unknown is never empty: also where the server accepts a connection and says nothing."""
    pod(server, "d1", "d", "10.0.3.1")
    place = Kubernetes(account(server, "reader", tmp_path), "default", "app=d")
    assert len(place.instances()) == 1
    process = server.processes["kube-apiserver"]
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(PlaceUnavailable, match="does not answer"):
            place.instances()
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert len(until(lambda: answered(place))) == 1


def test_the_last_good_list_holds_while_a_token_is_refused(server: ControlPlane,
                                                           tmp_path: Path) -> None:
    """Each failure is an event with the command that mends it, and the next list is taken. Where
    there has been no pod at all, the selector is named."""
    place = Kubernetes(account(server, "reader", tmp_path), "default", "app=e")
    assert place.instances() == []
    refusal = place.supply().refusal
    assert refusal and refusal.says == "No pod of the namespace default has the label app=e"
    pod(server, "e1", "e", "10.0.5.1")
    times = iter(range(0, 10**6, 100))
    poller = Poller(place, tmp_path / "hosts", Policy(lifecycle="any", settle_s=0), patience_s=60,
                    events_file=tmp_path / "events.jsonl", clock=lambda: next(times))
    with ThreadPoolExecutor(1) as pool:
        poller.poll(pool)
        listed = (tmp_path / "hosts").read_text()
        assert listed.startswith("e1-") and place.supply().refusal is None
        token = (tmp_path / "token").read_text()
        (tmp_path / "token").write_text("expired")
        poller.poll(pool)
        assert (tmp_path / "hosts").read_text() == listed
        assert "kubectl create token elastic-trainer" in (tmp_path / "events.jsonl").read_text()
        (tmp_path / "token").write_text(token)
        pod(server, "e2", "e", "10.0.5.2")
        poller.poll(pool)
    assert len((tmp_path / "hosts").read_text().splitlines()) == 2


def answered(place: Kubernetes) -> list[Any]:
    """Return the answer, when there is one."""
    try:
        return place.instances()
    except PlaceUnavailable:
        return []


def test_bad_input_is_one_sentence_with_the_command_that_mends_it(
        server: ControlPlane, tmp_path: Path) -> None:
    """No permission for pods or nodes, a namespace that is not there, a token that is refused, no
    token at all. A server that does not answer is none: the poller asks again."""
    def refusal(account: Account, namespace: str = "default", **more: Any) -> str:
        with pytest.raises(ValueError) as raised:
            Kubernetes(account, namespace, "app=x", **more).require_welcome()
        assert "\n" not in str(raised.value)
        return str(raised.value)

    nobody = refusal(account(server, "nobody", tmp_path))
    assert 'User "system:serviceaccount:default:nobody" cannot list resource "pods"' in nobody
    for command in (nobody.partition("run: ")[2].split(" && ")):
        server.kubectl(*command.split()[1:])
    Kubernetes(account(server, "nobody", tmp_path), "default", "app=x",
               has_nodes=False).require_welcome()
    nodes = refusal(account(server, "pods-only", tmp_path))
    assert "add --no-nodes" in nodes and "kubectl create clusterrole" in nodes
    assert "Correct --namespace" in refusal(account(server, "reader", tmp_path), "elsewhere")
    admin = Account(server.server, server.ca_file, tmp_path / "admin")
    admin.token_file.write_text(server.token)
    assert refusal(admin, "elsewhere") == (
        "There is no namespace elsewhere. Correct --namespace, or: kubectl create namespace "
        "elsewhere")
    admin.token_file.write_text("expired\n")
    assert f"kubectl create token elastic-trainer --namespace default >{admin.token_file}" in (
        refusal(admin))
    admin.token_file.unlink()
    assert "Elsewhere set --token-file." in refusal(admin)
    admin.token_file.write_text(server.token)
    Kubernetes(Account("https://127.0.0.1:9", admin.ca_file, admin.token_file), "default",
               "app=x").require_welcome()


def test_an_answer_without_an_end_or_of_another_form_is_refused(
        server: ControlPlane, tmp_path: Path) -> None:
    """So is an endpoint that is no API server."""
    admin = Account(server.server, server.ca_file, tmp_path / "admin")
    admin.token_file.write_text(server.token)
    with pytest.raises(ApiUnavailable, match="no JSON"):
        admin.get("/healthz")
    place = Kubernetes(admin, "default", "app=x")
    place.pods.path = "/version"
    with pytest.raises(PlaceUnavailable, match="unknown form"):
        place.instances()


def test_warnings_become_events_of_the_pod_and_a_flood_does_not(
        server: ControlPlane, tmp_path: Path) -> None:
    """One of a kind in a minute, with the number of the others; what is no warning is not told."""
    server.kubectl("create", "role", "events", "--verb=create", "--resource=events")
    server.kubectl("create", "rolebinding", "events", "--role=events",
                   "--serviceaccount=default:reader")
    pod(server, "coordinator", "e", "10.0.4.1")
    uid = server("GET", f"{PODS}/coordinator")["metadata"]["uid"]
    now = [0.0]
    teller = Teller(Subject(namespace="default", name="coordinator", uid=uid),
                    account(server, "reader", tmp_path), lambda: now[0])
    evicted = {"time": 1795803286.0, "event": "driver.worker_evicted", "worker": "w/0/1",
               "host": "w", "reason": "frozen", "pid": 7, "size": 3, "attempt": 1}
    for number in range(5):
        now[0] = AGAIN_S if number == 4 else 0.0
        teller.take(evicted)
    teller.take({"time": 1.0, "event": "worker.step_committed", "worker": "w/0/1", "step": 1})
    teller.send()
    assert not teller.waiting
    told = server.kubectl("describe", "pod", "coordinator").partition("Events:")[2]
    assert told.count("DriverWorkerEvicted") == 2 and "elastic-trainer" in told
    assert "3 more since the last Event of this kind" in told


def test_a_run_goes_on_without_the_permission_to_create_events(
        server: ControlPlane, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal is printed once, and Events do not pile up; a server that is away gets them
    later."""
    subject = Subject(namespace="default", name="coordinator", uid="x")
    started = {"time": 1.0, "event": "attempt.started", "attempt": 1}
    silent = Teller(subject, account(server, "pods-only", tmp_path), lambda: 0.0)
    silent.take(started)
    silent.take({**started, "event": "run.started", "run": "r", "options": {}})
    silent.send()
    assert not silent.waiting
    assert capsys.readouterr().err.count(MAY_NOT) == 1
    away = Teller(subject, Account("https://127.0.0.1:9", server.ca_file, tmp_path / "token"),
                  lambda: 0.0)
    away.take(started)
    away.send()
    assert len(away.waiting) == 1


def test_the_account_of_a_pod_is_the_default() -> None:
    """As a kubelet mounts it."""
    assert Account().token_file == api.ACCOUNT / "token"

"""A real Kubernetes control plane for tests: etcd, API server, controllers and scheduler.

    with ControlPlane(folder) as kubernetes:
        kubernetes("POST", "/api/v1/nodes", {"metadata": {"name": "n1"}})
        kubernetes.kubectl("get", "nodes")

The binaries come from KUBEBUILDER_ASSETS, or from shared/places/bin beside the clone, where they
are packed; these are unpacked once into a cache folder. etcd comes from Debian (etcd-server).
kubernetes_controllers.py adds those of other projects.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import yaml
from packages import install
from ports import free_port
from s3_servers import Unavailable
from size import ROOT
from waiting import wait_for

API, CONTROLLERS, SCHEDULER = "kube-apiserver", "kube-controller-manager", "kube-scheduler"
SERVERS = (API, CONTROLLERS, SCHEDULER)
PACKED = ROOT.parent / "shared" / "places" / "bin"
NAME = "kubernetes.default.svc"
MERGE = "application/merge-patch+json"


def binaries() -> Path:
    """Return the folder with the servers. Raises Unavailable."""
    if given := os.environ.get("KUBEBUILDER_ASSETS"):
        if missing := [name for name in SERVERS if not Path(given, name).exists()]:
            raise Unavailable(f"KUBEBUILDER_ASSETS is {given}, and has no {missing[0]}")
        return Path(given)
    if not shutil.which("xz") or not all((PACKED / f"{name}.xz").exists() for name in SERVERS):
        raise Unavailable(f"the tests of Kubernetes need {', '.join(SERVERS)}: set "
                          f"KUBEBUILDER_ASSETS to the folder with them")
    cache = Path(tempfile.gettempdir(), f"elastic-trainer-kubernetes-{os.getuid()}")
    cache.mkdir(mode=0o700, exist_ok=True)
    for name in SERVERS:
        if not (cache / name).exists():
            part = cache / f"{name}.{os.getpid()}"
            with open(part, "wb") as file:
                subprocess.run(["xz", "-dc", PACKED / f"{name}.xz"], stdout=file, check=True)
            part.chmod(0o755)
            part.replace(cache / name)
    return cache


def etcd() -> str:
    """Return the path of etcd, installed if need be. Raises Unavailable."""
    if not shutil.which("etcd"):
        install("etcd-server")
    found = shutil.which("etcd") or shutil.which("etcd", path=os.environ.get("KUBEBUILDER_ASSETS"))
    if not found:
        raise Unavailable("the tests of Kubernetes need etcd, and it could not be installed: "
                          "apt-get install etcd-server")
    return found


class ControlPlane:
    """The servers; use as a context manager. `enter` begins a command line in another network, and
    `dials` lets this thread open its sockets there. `controllers`: options of the controllers."""

    def __init__(self, folder: Path, address: str = "127.0.0.1", port: int = 0,
                 enter: Sequence[str] = (),
                 dials: Callable[[], AbstractContextManager[None]] = nullcontext,
                 controllers: Sequence[str] = ()):
        self.controllers = controllers
        self.folder, self.address, self.enter, self.dials = folder, address, list(enter), dials
        self.port = port or free_port()
        self.binaries, self.etcd = binaries(), etcd()
        self.token = secrets.token_hex(16)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True)

    def __enter__(self) -> ControlPlane:
        try:
            self._make_keys()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes.values()):
            process.kill()
        for process in self.processes.values():
            process.wait()

    def __call__(self, method: str, path: str, body: Any = None,
                 kind: str = "application/json") -> Any:
        """Ask as an administrator; returns the answer."""
        status, answer = self.ask(method, path, body, kind)
        assert status < 300, (method, path, status, answer)
        return answer

    def ask(self, method: str, path: str, body: Any = None,
            kind: str = "application/json") -> tuple[int, Any]:
        """Ask as an administrator; returns status and answer. Raises OSError, HTTPException."""
        with self.dials():
            context = ssl.create_default_context(cafile=str(self.ca_file))
            connection = http.client.HTTPSConnection(self.address, self.port, timeout=30,
                                                     context=context)
            try:
                connection.request(method, path, None if body is None else json.dumps(body),
                                   {"Authorization": f"Bearer {self.token}", "Content-Type": kind})
                answer = connection.getresponse()
                text = answer.read().decode()
                return answer.status, json.loads(text) if text.startswith("{") else text
            finally:
                connection.close()

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        """Run kubectl as an administrator; returns what it printed. Raises CalledProcessError."""
        command = [*self.enter, "kubectl", "--kubeconfig", str(self.folder / "kubeconfig"),
                   *arguments]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"kubectl {arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    @property
    def ca_file(self) -> Path:
        return self.folder / "api.crt"

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.port}"

    def account(self, namespace: str, name: str, token_file: Path, seconds: int = 3600,
                **more: Any) -> None:
        """Write a token of a service account, as a kubelet does."""
        made = self("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token",
                    {"spec": {"expirationSeconds": seconds, **more}})
        new = token_file.with_name(token_file.name + ".new")
        new.write_text(made["status"]["token"])
        new.replace(token_file)

    def accepts(self, port: int) -> bool:
        """True if a server of the control plane's machine listens at a port."""
        with self.dials(), socket.socket() as probe:
            return probe.connect_ex((self.address, port)) == 0

    def _make_keys(self) -> None:
        names = f"IP:127.0.0.1,IP:{self.address},DNS:{NAME}"
        for command in ("openssl genrsa -out sa.key 2048",
                        "openssl rsa -in sa.key -pubout -out sa.pub",
                        "openssl req -x509 -newkey rsa:2048 -nodes -keyout api.key -out api.crt "
                        f"-days 2 -subj /CN=api -addext subjectAltName={names}"):
            subprocess.run(command.split(), check=True, cwd=self.folder, capture_output=True)
        (self.folder / "tokens.csv").touch(mode=0o600)
        (self.folder / "tokens.csv").write_text(f"{self.token},admin,admin,system:masters\n")
        (self.folder / "kubeconfig").touch(mode=0o600)
        (self.folder / "kubeconfig").write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": self.server,
                                                   "certificate-authority": str(self.ca_file)}}],
            "users": [{"name": "u", "user": {"token": self.token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}))

    def _start(self) -> None:
        folder, client = self.folder, f"http://127.0.0.1:{free_port()}"
        peer = f"http://127.0.0.1:{free_port()}"
        self.run(self.etcd, "--data-dir", folder / "etcd", "--listen-client-urls", client,
                  "--advertise-client-urls", client, "--listen-peer-urls", peer,
                  "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}")
        self.run(self.binaries / API, f"--etcd-servers={client}", f"--secure-port={self.port}",
                  f"--bind-address={self.address}", "--advertise-address=10.255.255.1",
                  "--service-cluster-ip-range=10.96.0.0/24", f"--tls-cert-file={folder}/api.crt",
                  f"--tls-private-key-file={folder}/api.key",
                  f"--service-account-issuer=https://{NAME}",
                  f"--service-account-key-file={folder}/sa.pub",
                  f"--service-account-signing-key-file={folder}/sa.key",
                  f"--token-auth-file={folder}/tokens.csv", "--authorization-mode=RBAC",
                  "--endpoint-reconciler-type=none")
        self.wait("/readyz")
        self.run(self.binaries / CONTROLLERS, f"--kubeconfig={folder}/kubeconfig",
                  f"--service-account-private-key-file={folder}/sa.key", "--leader-elect=false",
                  f"--cert-dir={folder}", "--bind-address=127.0.0.1",
                  f"--secure-port={free_port()}", *self.controllers)
        self.run(self.binaries / SCHEDULER, f"--kubeconfig={folder}/kubeconfig",
                  "--leader-elect=false", f"--cert-dir={folder}", "--bind-address=127.0.0.1",
                  f"--secure-port={free_port()}")
        self.wait("/api/v1/namespaces/default/serviceaccounts/default")

    def run(self, *command: str | Path) -> None:
        """Start a server, which ends with the others."""
        name = Path(command[0]).name
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self.enter, *map(str, command)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True)

    def wait(self, path: str) -> None:
        """Wait until the API server answers a path."""
        def answers() -> bool:
            ended = [name for name, process in self.processes.items()
                     if process.poll() is not None]
            assert not ended, f"{ended} ended: see {self.folder}"
            with suppress(http.client.HTTPException):
                return bool(self.ask("GET", path)[0] == 200)
            return False

        wait_for(path, answers, story=lambda: f"see {self.folder}")


def kustomized(folder: str = "base") -> list[Any]:
    """Return the objects of a folder of deploy/kubernetes, as `kubectl apply -k` reads them. Raises
    Unavailable."""
    if not shutil.which("kubectl"):
        raise Unavailable("the tests of the manifests need kubectl, and it is not on the PATH")
    made = subprocess.run(["kubectl", "kustomize", ROOT / "deploy" / "kubernetes" / folder],
                          capture_output=True, text=True, check=True).stdout
    return list(yaml.safe_load_all(made))

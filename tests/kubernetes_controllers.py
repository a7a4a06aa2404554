"""The controllers of JobSet and Kueue for tests, with their webhooks, on a real control plane.

    add(kubernetes, "jobset")

Each comes from a folder that JOBSET_ASSETS or KUEUE_ASSETS names: NAME-manager, built from the
project's sources (`go build`), and the project's config/components as config.
"""

from __future__ import annotations

import base64
import os
import shutil
from pathlib import Path
from typing import Any

import yaml
from kubernetes_servers import ControlPlane
from ports import free_port
from s3_servers import Unavailable
from waiting import wait_for

VERSIONS = {"jobset": "v1alpha1", "kueue": "v1beta1"}
"""Of the form of their configuration."""
MORE: dict[str, dict[str, Any]] = {"jobset": {}, "kueue": {
    "integrations": {"frameworks": ["batch/job"]}}}
OPTIONS = {"jobset": (), "kueue": ("--feature-gates=VisibilityOnDemand=false",)}
KINDS = ("kueue", "batch-v1-job")
"""What Kueue's webhooks are for here; those of other kinds have no handler."""
OWN_ETC = ('mount -t tmpfs tmpfs /etc && mkdir -p /etc/kueue/metrics && '
           'ln -s "$1" /etc/kueue/metrics/certs && shift && exec "$@"')
"""Kueue reads the certificate of its metrics there, whatever its configuration says."""
HOOKS = "/apis/admissionregistration.k8s.io/v1"


def add(plane: ControlPlane, name: str) -> None:
    """Start a controller. Raises Unavailable."""
    assets = Path(os.environ.get(f"{name.upper()}_ASSETS", "/nowhere"))
    manager, bases, hooks = (assets / f"{name}-manager", assets / "config" / "crd" / "bases",
                             assets / "config" / "webhook" / "manifests.yaml")
    for part in (manager, bases, hooks):
        if not part.exists():
            raise Unavailable(f"the test of {name} needs its controller: set {name.upper()}_ASSETS "
                              f"to a folder with {name}-manager, built from its sources, and with "
                              f"their config/components as config. There is no {part}")
    plane.kubectl("apply", "--server-side", "-f", str(bases))
    group = f"{name}.x-k8s.io"
    for made in sorted(bases.glob("*.yaml")):
        crd = yaml.safe_load(made.read_text())
        for version in crd["spec"]["versions"]:
            plane.wait(f"/apis/{group}/{version['name']}/{crd['spec']['names']['plural']}")
    port = _start(plane, name, manager)
    wait_for(f"the webhooks of {name}", lambda: plane.accepts(port))
    authority = base64.b64encode(plane.ca_file.read_bytes()).decode()
    for one in yaml.safe_load_all(hooks.read_text()):
        paths = {hook["name"]: hook["clientConfig"]["service"]["path"] for hook in one["webhooks"]}
        one["webhooks"] = [hook | {"clientConfig": {
            "url": f"https://{plane.address}:{port}{paths[hook['name']]}", "caBundle": authority}}
                           for hook in one["webhooks"]
                           if name != "kueue" or any(kind in paths[hook["name"]]
                                                     for kind in KINDS)]
        plane("POST", f"{HOOKS}/{one['kind'].lower()}s", one)


def _start(plane: ControlPlane, name: str, manager: Path) -> int:
    """Start the process; returns the port of its webhooks."""
    certificates = plane.folder / f"{name}-webhooks"
    certificates.mkdir()
    for file, copy in (("api.crt", "tls.crt"), ("api.key", "tls.key")):
        shutil.copy(plane.folder / file, certificates / copy)
    port, configuration = free_port(), plane.folder / f"{name}.yaml"
    configuration.write_text(yaml.safe_dump({
        "apiVersion": f"config.{name}.x-k8s.io/{VERSIONS[name]}", "kind": "Configuration",
        "leaderElection": {"leaderElect": False}, "internalCertManagement": {"enable": False},
        "webhook": {"host": plane.address, "port": port, "certDir": str(certificates)},
        "metrics": {"bindAddress": "0"}, "health": {"healthProbeBindAddress": "0"}} | MORE[name]))
    plane.run("unshare", "--mount", "sh", "-c", OWN_ETC, manager.name, certificates, manager,
              "--config", configuration, "--kubeconfig",
              plane.folder / "kubeconfig", *OPTIONS[name])
    return port

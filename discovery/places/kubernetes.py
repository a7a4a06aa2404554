"""Kubernetes' answer to "who is here": the pods of one label, and the nodes on which they run.

API server → here → poll (who lives), kubernetes_pods.py (what a pod and its node mean)

What always holds:
1. An answer is complete, or PlaceUnavailable is raised. The account is asked again for each answer,
   so an answer is not older than its question.
2. The pods and nodes are read whole once. Later the server sends what has changed (a watch of
   WATCH_S). Rejected: a whole list every few seconds. It is simpler, but 1,000 pods have 6 MB, and
   a notice would wait for the next list. Rejected: a watch that stays open. A server that goes
   without a FIN would look like one at which nothing happens.
3. The watches of pods and of nodes wait at the same time.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from elastic_trainer.discovery.place_protocol import Instance, PlaceUnavailable, Refusal, Supply
from elastic_trainer.discovery.places.kubernetes_pods import (
    Node,
    Pod,
    instance_of,
    node_in,
    pod_in,
    supply_of,
)
from elastic_trainer.wire.kubernetes import (
    ACCOUNT,
    GONE,
    SERVER,
    Account,
    Answer,
    ApiRefused,
    ApiUnavailable,
)

WATCH_S = 1
PAGE = 500
Kept = TypeVar("Kept")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose pods."""
    add = parser.add_argument
    parser.set_defaults(lifecycle="any")
    add("--selector", required=True, metavar="LABEL=VALUE",
        help="the label of the workers' pods, e.g. job-name=elastic-trainer-workers")
    add("--namespace", help="the pods' namespace (this pod's own)")
    add("--no-nodes", action="store_true",
        help="for an account that may not read nodes: taints of nodes are no notices then")
    add("--cpu-slots", type=int, default=1, help="slots of a pod without GPUs (%(default)s)")
    add("--api", default=SERVER, metavar="URL", help="the API server (%(default)s)")
    add("--ca", type=Path, default=ACCOUNT / "ca.crt", help="its certificate (%(default)s)")
    add("--token-file", type=Path, default=ACCOUNT / "token",
        help="the account's token, read at each request (%(default)s)")


def place_of(options: argparse.Namespace) -> Kubernetes:
    """Return the place that these options choose. Raises ValueError if it refuses this account."""
    namespace = options.namespace
    if namespace is None:
        try:
            namespace = (ACCOUNT / "namespace").read_text().strip()
        except OSError:
            raise ValueError("This process is in no pod, so it has no namespace of its own. Set "
                             "--namespace, --api, --ca and --token-file.") from None
    place = Kubernetes(Account(options.api, options.ca, options.token_file), namespace,
                       options.selector, has_nodes=not options.no_nodes,
                       cpu_slots=options.cpu_slots)
    place.require_welcome()
    return place


class Watched(Generic[Kept]):
    """The objects of one list, by uid: read whole once, and then what has changed."""

    def __init__(self, account: Account, path: str, keep: Callable[[Any], Kept], page: int,
                 **query: str):
        self.account, self.path, self.keep, self.query = account, path, keep, query
        self.page = page
        self.kept: dict[str, Kept] = {}
        self.version = ""
        """The version of the list that `kept` has; "": it has none."""

    def read(self) -> None:
        """Read the whole list, page by page. Raises ApiUnavailable."""
        kept, token = dict[str, Kept](), ""
        while True:
            page = self.account.get(self.path, limit=str(self.page), **self.query,
                                    **({"continue": token} if token else {}))
            kept |= {item["metadata"]["uid"]: self.keep(item) for item in page["items"]}
            token = page["metadata"].get("continue", "")
            if not token:
                self.kept, self.version = kept, page["metadata"]["resourceVersion"]
                return

    def ask(self) -> Answer | None:
        """Begin to watch; None: the list has to be read. Raises ApiUnavailable."""
        if not self.version:
            return None
        try:
            return self.account.open("GET", self.path, wait_s=WATCH_S, query=self.query | {
                "watch": "1", "resourceVersion": self.version, "timeoutSeconds": str(WATCH_S),
                "allowWatchBookmarks": "true"})
        except ApiRefused as error:
            if error.status != GONE:
                raise
            return None

    def follow(self, answer: Answer | None) -> None:
        """Take what has changed since the last time. Raises ApiUnavailable."""
        changes = [json.loads(line) for line in answer.lines(self.path)] if answer else []
        if answer is None or any(change["type"] == "ERROR" for change in changes):
            return self.read()  # the server has forgotten the version, as it does after minutes
        for change in changes:
            item = change["object"]
            if change["type"] == "DELETED":
                self.kept.pop(item["metadata"]["uid"], None)
            elif change["type"] != "BOOKMARK":
                self.kept[item["metadata"]["uid"]] = self.keep(item)
            self.version = item["metadata"]["resourceVersion"]


class Kubernetes:
    """The pods of one label in one namespace: a Place."""

    def __init__(self, account: Account, namespace: str, selector: str, *, has_nodes: bool = True,
                 cpu_slots: int = 1, page: int = PAGE):
        self.account, self.namespace = account, namespace
        self.selector, self.cpu_slots = selector, cpu_slots
        self._has_seen_pods = False
        self.pods: Watched[Pod] = Watched(account, f"/api/v1/namespaces/{namespace}/pods", pod_in,
                                          page, labelSelector=selector)
        self.nodes: Watched[Node] | None = (Watched(account, "/api/v1/nodes", node_in, page)
                                            if has_nodes else None)

    def instances(self) -> list[Instance]:
        """Return the pods that have not ended. Raises PlaceUnavailable."""
        try:
            asked = self.pods.ask(), self.nodes.ask() if self.nodes else None
            self.pods.follow(asked[0])
            if self.nodes:
                self.nodes.follow(asked[1])
        except ApiUnavailable as error:
            remedy = self._remedy(error) if isinstance(error, ApiRefused) else ""
            raise PlaceUnavailable(remedy or f"Kubernetes did not answer: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            self.pods.version = ""  # a change may have been lost
            raise PlaceUnavailable(f"Kubernetes gave an answer in an unknown form: {error!r}"
                                   ) from error
        self._has_seen_pods = self._has_seen_pods or bool(self.pods.kept)
        nodes = {node.name: node for node in self.nodes.kept.values()} if self.nodes else {}
        return [instance_of(pod, nodes.get(pod.node), self.nodes is not None, self.cpu_slots)
                for pod in self.pods.kept.values() if not pod.has_ended]

    def supply(self) -> Supply:
        """Return how many pods have a node, and why others have none."""
        if not self._has_seen_pods:
            return Supply(there=0, wanted=0, refusal=Refusal(
                code="NoPods", says=f"No pod of the namespace {self.namespace} has the label "
                                    f"{self.selector}",
                remedy=f"Correct --selector, or see why no pods are made (the Job is suspended, "
                       f"waits in a queue of Kueue, or exceeds a quota): kubectl describe jobs "
                       f"--namespace {self.namespace}"))
        return supply_of([pod for pod in self.pods.kept.values() if not pod.has_ended])

    def require_welcome(self) -> None:
        """Raise ValueError, with the remedy, if the API server refuses this account."""
        for file, option in ((self.account.token_file, "--token-file"),
                             (self.account.ca_file, "--ca")):
            if not file.is_file():
                raise ValueError(f"There is no {file}. In a pod the kubelet writes it, unless "
                                 f"automountServiceAccountToken is false. Elsewhere set {option}.")
        try:
            self.pods.read()
            if self.nodes:
                self.nodes.read()
            if not self.pods.kept:  # the list of a namespace that is not there is empty
                self.account.get(f"/api/v1/namespaces/{self.namespace}")
        except ApiRefused as error:
            if why := self._remedy(error):
                raise ValueError(why) from error
        except ApiUnavailable:
            pass  # the poller asks again

    def _remedy(self, error: ApiRefused) -> str:
        """Return the fact and the remedy of a refusal; "" if it is none of the user's."""
        found = re.search(r'"system:serviceaccount:([^:"]+):([^"]+)"', error.says)
        home, account = (found[1], found[2]) if found else (self.namespace, "elastic-trainer")
        if error.status == 401:
            return (f"The API server refuses the token in {self.account.token_file}: it has "
                    f"expired, or it is of another cluster. Write a new one: kubectl create token "
                    f"{account} --namespace {home} >{self.account.token_file}")
        if error.status == 404:
            return (f"There is no namespace {self.namespace}. Correct --namespace, or: kubectl "
                    f"create namespace {self.namespace}")
        if error.status != 403 or f'"{self.namespace}" is forbidden' in error.says:
            return ""  # the pods were read; whether their namespace exists is not for this account
        role = f"--serviceaccount={home}:{account}"
        if '"nodes"' in error.says:
            return (f"{error.says}. Run: kubectl create clusterrole elastic-trainer-nodes "
                    f"--verb=get,list,watch --resource=nodes && kubectl create clusterrolebinding "
                    f"elastic-trainer-nodes --clusterrole=elastic-trainer-nodes {role} (or add "
                    f"--no-nodes: then taints of nodes are no notices)")
        return (f"{error.says}. Correct --namespace, or run: kubectl create role elastic-trainer "
                f"--namespace {self.namespace} --verb=get,list,watch --resource=pods && kubectl "
                f"create rolebinding elastic-trainer --namespace {self.namespace} "
                f"--role=elastic-trainer {role}")

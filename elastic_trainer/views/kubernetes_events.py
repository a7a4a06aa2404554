"""The warnings and errors of a run as Events of Kubernetes, on the coordinator's pod.

    kubectl describe pod COORDINATOR          kubectl get events

event log → log_lines.py → here → API server

What always holds:
1. It is best effort. An Event that the API server does not take is dropped, and the event log has
   it. The first refusal is printed with its remedy.
2. It is bounded: a kind of event is told once in AGAIN_S, with the number of those that were left
   out, and at most MOST Events wait.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.config import ConfigError
from elastic_trainer.events.event_kind import Level
from elastic_trainer.events.event_table import KINDS
from elastic_trainer.events.schema import UNREADABLE
from elastic_trainer.events.told import Told
from elastic_trainer.wire.kubernetes import ACCOUNT, Account, ApiRefused, ApiUnavailable
from elastic_trainer.wire.plain import plain_text

TYPES = {Level.INFO.value: "Normal", Level.WARNING.value: "Warning", Level.ERROR.value: "Warning"}
INFOS = {"run.started", "run.finished", "attempt.started"}
"""The events without a fault that an operator looks for."""
AGAIN_S = 60.0
MOST = 50
MOST_LETTERS = 1024
"""The API server refuses a longer message."""
POD_NAME, POD_UID = "POD_NAME", "POD_UID"
MAY_NOT = ("The coordinator's account may not create events, so warnings are in the event log "
           "alone. Its Role needs events: create (deploy/kubernetes/base/account.yaml).")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The pod on which the Events are."""

    namespace: str
    name: str
    uid: str


def subject_in(environment: Mapping[str, str]) -> Subject:
    """Return the pod of this process. Raises ConfigError."""
    try:
        namespace = (ACCOUNT / "namespace").read_text().strip()
        return Subject(namespace=namespace, name=environment[POD_NAME], uid=environment[POD_UID])
    except (OSError, KeyError) as error:
        raise ConfigError(f"--kubernetes-events is for a pod with an account, and this process "
                          f"lacks {error}. Set {POD_NAME} and {POD_UID} by the downward API, as "
                          f"deploy/kubernetes/base/coordinator.yaml does.") from error


@dataclass
class Teller:
    """Turns a run's events into Events, and sends them."""

    subject: Subject
    account: Account = field(default_factory=Account)
    clock: Callable[[], float] = time.monotonic
    waiting: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST))
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Host and pid of each worker."""
    _told_at: dict[str, float] = field(default_factory=dict)
    _left_out: Counter[str] = field(default_factory=Counter)
    _has_complained: bool = False

    def take(self, event: Mapping[str, Any]) -> None:
        """Keep what an operator must see of an event."""
        name, told = event["event"], Told(most_first=1)
        if worker := event.get("worker"):
            known = self._known.setdefault(str(worker), {})
            known |= {key: event[key] for key in ("host", "pid") if event.get(key) is not None}
        kind = KINDS.get(name)
        if kind is None or kind.level not in (Level.WARNING, Level.ERROR) and name not in INFOS:
            return
        try:
            told.take(event, self._known)
        except UNREADABLE:
            return
        if not told.first:
            return
        now = self.clock()
        if now - self._told_at.get(name, -AGAIN_S) < AGAIN_S:
            self._left_out[name] += 1
            return
        self._told_at[name] = now
        more = self._left_out.pop(name, 0)
        also = f" ({more} more since the last Event of this kind)" if more else ""
        message = f"{told.first[0].text}{also}{f' {kind.remedy}' if kind.remedy else ''}"
        self.waiting.append(body(self.subject, name, TYPES[kind.level.value], message,
                                 event["time"]))

    def send(self) -> None:
        """Send what waits; stop at the first one for which the API server does not answer."""
        path = f"/api/v1/namespaces/{self.subject.namespace}/events"
        while self.waiting:
            try:
                self.account.post(path, self.waiting[0])
            except ApiRefused as error:
                if not self._has_complained:
                    self._has_complained = True
                    says = MAY_NOT if error.status == 403 else str(error)
                    sys.stderr.write(f"elastic-trainer: {plain_text(says)}\n")
            except ApiUnavailable:
                return
            self.waiting.popleft()


def body(subject: Subject, event: str, kind: str, message: str, at: float) -> dict[str, Any]:
    """Return an Event of the core API."""
    reason = "".join(word.capitalize() for word in event.replace(".", "_").split("_"))
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    return {
        "metadata": {"generateName": f"{subject.name[:200]}.", "namespace": subject.namespace},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "name": subject.name,
                           "namespace": subject.namespace, "uid": subject.uid},
        "reason": reason, "message": message[:MOST_LETTERS], "type": kind, "count": 1,
        "firstTimestamp": when, "lastTimestamp": when,
        "source": {"component": "elastic-trainer"}}

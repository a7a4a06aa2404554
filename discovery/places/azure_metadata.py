"""Notices of a machine of Azure, and its identity's token, from its own metadata service.

http://169.254.169.254/metadata → here → agent (notices), azure (token, subscription, …)

The scheduled events of a scale set are shown to all of its machines, so an event counts if it names
this machine. Preempt comes at least 30 s before, Terminate 5 to 15 minutes (the scale set's
setting): the machine does not come back. Reboot and Redeploy come 10 to 15 minutes before, and the
machine comes back: it leaves when LEAVE_S are left, and its next agent brings it back. Freeze is a
pause of seconds: no notice.

No event is approved (StartRequests): that would make Azure take the machine at once, also while its
workers still leave, and it would save seconds.

Paths, headers and times: Azure's documentation of scheduled events. Its first answer may take two
minutes; until then the notice is unknown. Never tried on Azure (docs/guide/azure.md).
"""

from __future__ import annotations

import calendar
import json
import time
from collections.abc import Mapping
from email.utils import parsedate
from typing import Any
from urllib.parse import urlencode

from elastic_trainer.discovery.place_protocol import Notice, PlaceUnavailable
from elastic_trainer.discovery.places.rest import ApiRefused, Token, asked, token_in

ENDPOINT = "http://169.254.169.254"
NOTICE_S = 30.0
LEAVE_S = 120.0
TIMEOUT_S = 1.0
TOKEN_TIMEOUT_S = 5.0
EVENTS, INSTANCE, TOKENS = "2020-07-01", "2021-02-01", "2018-02-01"
"""The versions of the three interfaces."""
TAKING = {"Preempt": "preempted", "Terminate": "deleted by its scale set"}
RETURNING = {"Reboot": "rebooted by Azure", "Redeploy": "moved to another host by Azure"}
NO_IDENTITY = ("Give the machine an identity: az vm identity assign --resource-group GROUP --name "
               "NAME")


class Metadata:
    """One machine's metadata service."""

    def __init__(self, endpoint: str = ENDPOINT, timeout_s: float = TIMEOUT_S):
        self._base, self._timeout_s = f"{endpoint.rstrip('/')}/metadata/", timeout_s
        self._name = ""
        self._deadlines: dict[str, float] = {}

    def notice(self) -> Notice | None:
        """Return the notice, if there is one. Raises PlaceUnavailable."""
        self._name = self._name or str(self.about().get("name") or "")
        if not self._name:
            raise PlaceUnavailable(f"{self._base} does not know this machine's name")
        answer = self._get("scheduledevents", EVENTS, self._timeout_s)
        if not isinstance(answer.get("Events"), list):
            raise PlaceUnavailable(f"{self._base} shows events that are no list")
        notices = [found for event in answer["Events"] if isinstance(event, dict)
                   and self._name in (event.get("Resources") or [])
                   if (found := self._noticed(event))]
        return min(notices, key=lambda one: (not one.for_good, one.deadline), default=None)

    def rebalance(self) -> bool:
        """Return False: Azure recommends nothing."""
        return False

    def about(self) -> dict[str, Any]:
        """Return what Azure knows of this machine: name, subscriptionId, resourceGroupName.
        Raises PlaceUnavailable."""
        return self._get("instance/compute", INSTANCE, self._timeout_s)

    def token(self, resource: str) -> Token:
        """Return a token of the machine's identity. Raises PlaceUnavailable, ApiRefused."""
        found = self._get("identity/oauth2/token", TOKENS, TOKEN_TIMEOUT_S, resource=resource)
        return token_in(found)

    def _noticed(self, event: Mapping[str, Any]) -> Notice | None:
        """Return what an event of this machine means now."""
        kind = str(event.get("EventType"))
        at = _seconds(event.get("NotBefore"))
        if at is None:  # it has started, or has an unknown form
            started = kind in RETURNING or str(event.get("EventStatus")) == "Started"
            at = self._deadlines.setdefault(str(event.get("EventId")),
                                            time.time() + (0.0 if started else NOTICE_S))
        if kind in TAKING:
            return Notice(TAKING[kind], at)
        if kind in RETURNING and at - time.time() <= LEAVE_S:
            return Notice(RETURNING[kind], at, for_good=False)
        return None

    def _get(self, path: str, version: str, timeout_s: float, **query: str) -> dict[str, Any]:
        query = {"api-version": version, **query}
        answer = asked("GET", f"{self._base}{path}?{urlencode(query)}", {"Metadata": "true"},
                       timeout_s=timeout_s)
        try:
            found = json.loads(answer.body)
        except ValueError:
            found = None
        if answer.status == 400 and isinstance(found, dict) and path.startswith("identity"):
            raise ApiRefused(f"This machine has no managed identity. {NO_IDENTITY}.")
        if answer.status != 200 or not isinstance(found, dict):
            raise PlaceUnavailable(f"{self._base} answered {answer.status} to {path}, or is not "
                                   f"Azure's metadata service")
        return found


def _seconds(text: Any) -> float | None:
    """Return the time of "Mon, 19 Sep 2016 18:29:47 GMT"; None: it is another text."""
    parsed = parsedate(text) if isinstance(text, str) and text else None
    return float(calendar.timegm(parsed)) if parsed else None

"""Notices of a machine of Google Cloud, and its account's token, from its own metadata service.

http://metadata.google.internal → here → agent (notices), gcp (token, project, zone)

- `instance/preempted` is TRUE from the start of a preemption. The machine is shut down then (ACPI
  G2 soft off), and has NOTICE_S until it is stopped. A longer `preemptionNoticeDuration` of the
  machine comes on top: the metadata service does not show it, so the deadline is early, never late.
- `instance/maintenance-event` is TERMINATE_ON_HOST_MAINTENANCE 60 s before a stop, and an hour
  before that of a machine with GPUs. MIGRATE_ON_HOST_MAINTENANCE is a live migration: no notice.

Paths, headers and times: Google's documentation of Spot VMs and of the metadata server. Never tried
on Google Cloud (docs/guide/gcp.md).
"""

from __future__ import annotations

import json
import time
from urllib.parse import urlencode

from elastic_trainer.discovery.place_protocol import Notice, PlaceUnavailable
from elastic_trainer.discovery.places.rest import (
    Answer,
    ApiRefused,
    Token,
    asked,
    known_form,
    token_in,
)

ENDPOINT = "http://169.254.169.254"
NOTICE_S = 30.0
MAINTENANCE_S = 60.0
WAIT_S = 1
"""How long a question for `preempted` waits for its change. The agent asks every second."""
TIMEOUT_S = 1.0
FLAVOR = {"Metadata-Flavor": "Google"}
"""The service refuses a request without it, and so a browser's. Its answers have it, too."""
NO_ACCOUNT = ("Give the machine a service account: gcloud compute instances set-service-account "
              "NAME --service-account ADDRESS --scopes cloud-platform")


class Metadata:
    """One machine's metadata service."""

    def __init__(self, endpoint: str = ENDPOINT, timeout_s: float = TIMEOUT_S):
        self._base, self._timeout_s = f"{endpoint.rstrip('/')}/computeMetadata/v1/", timeout_s
        self._etag = ""
        self._deadlines: dict[str, float] = {}

    def notice(self) -> Notice | None:
        """Return the notice, if there is one. Raises PlaceUnavailable."""
        if self._preempted() == "TRUE":
            return self._within("preempted", NOTICE_S)
        event = self.get("instance/maintenance-event")
        if event == "TERMINATE_ON_HOST_MAINTENANCE":
            return self._within("stopped for the maintenance of its host", MAINTENANCE_S)
        return None

    def rebalance(self) -> bool:
        """Return False: Google Cloud recommends nothing."""
        return False

    def token(self) -> Token:
        """Return a token of the machine's service account. Raises PlaceUnavailable, ApiRefused."""
        text = self.get("instance/service-accounts/default/token")
        if text is None:
            raise ApiRefused(f"This machine has no service account. {NO_ACCOUNT}.")
        with known_form("the metadata service"):
            return token_in(json.loads(text))

    def get(self, path: str) -> str | None:
        """Return a text; None: there is none. Raises PlaceUnavailable."""
        return self._text(path, self._asked(path))

    def _preempted(self) -> str | None:
        """Return the text of `preempted`: at once at first, and then as soon as it changes."""
        path = "instance/preempted"
        waits = {"wait_for_change": "true", "last_etag": self._etag, "timeout_sec": str(WAIT_S)}
        answer = self._asked(path, **(waits if self._etag else {}))
        self._etag = answer.headers.get("etag", "")
        return self._text(path, answer)

    def _asked(self, path: str, **query: str) -> Answer:
        url = f"{self._base}{path}" + (f"?{urlencode(query)}" if query else "")
        wait_s = WAIT_S if query else 0
        return asked("GET", url, FLAVOR, timeout_s=self._timeout_s + wait_s)

    def _text(self, path: str, answer: Answer) -> str | None:
        if answer.status == 404:
            return None
        if answer.status != 200 or answer.headers.get("metadata-flavor") != "Google":
            raise PlaceUnavailable(f"{self._base} answered {answer.status} to {path}, or is not "
                                   f"Google's metadata service")
        return answer.body.decode(errors="replace").strip()

    def _within(self, action: str, seconds: float) -> Notice:
        """Return a notice whose time has begun when it was first seen."""
        return Notice(action, self._deadlines.setdefault(action, time.time() + seconds))

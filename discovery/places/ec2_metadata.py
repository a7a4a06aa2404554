"""Notices of a machine of EC2, from its own metadata service (IMDSv2).

http://169.254.169.254 → here → agent

Paths and bodies: AWS's documentation of instance metadata, and aws-node-termination-handler
62a8761.
"""

from __future__ import annotations

import calendar
import http.client
import json
import time
from urllib.parse import urlsplit

from elastic_trainer.discovery.place_protocol import Notice, PlaceUnavailable

ENDPOINT = "http://169.254.169.254"
TOKEN_S = 21600
TIMEOUT_S = 1.0


class Metadata:
    """One machine's metadata service. The token is renewed when it is refused. Without an answer it
    is unknown whether there is a notice."""

    def __init__(self, endpoint: str = ENDPOINT, timeout_s: float = TIMEOUT_S):
        self._address = urlsplit(endpoint).netloc
        self._token, self._timeout_s = "", timeout_s

    def notice(self) -> Notice | None:
        """Return the notice, if there is one. Raises PlaceUnavailable."""
        text = self.get("spot/instance-action")
        if text is None:
            return None
        try:
            body = json.loads(text)
            at = calendar.timegm(time.strptime(body["time"], "%Y-%m-%dT%H:%M:%SZ"))
            return Notice(str(body["action"]), float(at))
        except (ValueError, KeyError, TypeError):
            # A notice in an unknown form is still a notice.
            return Notice("unknown", time.time() + 120.0)

    def rebalance(self) -> bool:
        """Return whether the cloud recommends to leave. Raises PlaceUnavailable."""
        return self.get("events/recommendations/rebalance") is not None

    def get(self, path: str) -> str | None:
        """Return a text below latest/meta-data; None: there is none. Raises PlaceUnavailable."""
        for _ in range(2):
            if not self._token:
                status, self._token = self._ask(
                    "PUT", "/latest/api/token",
                    {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)})
                if status != 200:
                    self._token = ""
                    raise PlaceUnavailable(f"{self._address} gave no token: {status}")
            status, text = self._ask("GET", f"/latest/meta-data/{path}",
                                     {"X-aws-ec2-metadata-token": self._token})
            if status == 200:
                return text
            if status == 404:
                return None
            if status != 401:
                raise PlaceUnavailable(f"{self._address} answered {status} to {path}")
            self._token = ""  # it has expired
        raise PlaceUnavailable(f"{self._address} refuses its own tokens")

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self._address, timeout=self._timeout_s)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(65536).decode(errors="replace").strip()
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a bad token
            raise PlaceUnavailable(f"{self._address} did not answer: {error!r}") from error
        finally:
            connection.close()

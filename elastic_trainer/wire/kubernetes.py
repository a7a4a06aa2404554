"""Kubernetes' API, with the account of this pod or one that a user names.

discovery/places/kubernetes.py (who is here), views/kubernetes_events.py (what to tell) → here → the
API server

What always holds:
1. The token is read at each request: the kubelet replaces a projected token every hour.
2. A request has a time limit for each read and one for the whole answer, and a limit of bytes.
3. No token is in an error's text.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a kubelet puts a pod's account: token, ca.crt, namespace."""
SERVER = "https://kubernetes.default.svc"
READ_S = 5.0
"""The time limit of a connection, and of each read beyond the time that the server may wait."""
WHOLE_S = 30.0
"""The time limit of an answer."""
MAX_BYTES = 256 << 20
"""A list of 5,000 nodes has about 100 MB."""
MOST_WORDS = 300
"""The characters of the server's own sentence that are kept."""
GONE = 410
"""The server does not know the version any more from which a watch is to go on."""


class ApiUnavailable(OSError):
    """The API server gave no complete answer."""


class ApiRefused(ApiUnavailable):
    """The API server has answered, and refused the request."""

    def __init__(self, path: str, status: int, says: str):
        super().__init__(f"{path}: status {status}: {says}")
        self.status, self.says = status, says


@dataclass(frozen=True)
class Account:
    """How the API server is reached, and as whom."""

    server: str = SERVER
    ca_file: Path = ACCOUNT / "ca.crt"
    token_file: Path = ACCOUNT / "token"

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """Return one object. Raises ApiUnavailable."""
        return _object(path, self.open("GET", path, query).lines(path))

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        """Create an object. Raises ApiUnavailable."""
        for _ in self.open("POST", path, {}, json.dumps(body).encode()).lines(path):
            pass

    def open(self, method: str, path: str, query: Mapping[str, str], body: bytes | None = None,
             wait_s: float = 0.0) -> Answer:
        """Send a request, and return the answer that begins. Raises ApiUnavailable.

        `wait_s`: the time for which the server may wait between two pieces of its answer.
        """
        address = urlsplit(self.server)
        target = quote(path) + (f"?{urlencode(query)}" if query else "")
        try:
            token = self.token_file.read_text().strip()
            context = ssl.create_default_context(cafile=str(self.ca_file))
            connection = http.client.HTTPSConnection(
                address.hostname or "", address.port or 443, timeout=READ_S + wait_s,
                context=context)
        except (OSError, ValueError) as error:
            raise ApiUnavailable(f"The account cannot be read: {error}") from error
        try:
            connection.request(method, target, body, {
                "Authorization": f"Bearer {token}", "Accept": "application/json",
                "Content-Type": "application/json"})
            answer = Answer(connection, connection.getresponse())
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            # The ValueError of a token with a line end has the token in its text.
            told = type(error).__name__ if isinstance(error, ValueError) else repr(error)
            raise ApiUnavailable(f"{self.server} does not answer: {told}") from None
        answer.require_well(path)
        return answer


class Answer:
    """An answer that has begun."""

    def __init__(self, connection: http.client.HTTPSConnection, response: http.client.HTTPResponse):
        self._connection, self._response = connection, response
        self._ends_at = time.monotonic() + WHOLE_S

    def require_well(self, path: str) -> None:
        """Raise ApiRefused for any status but those of success."""
        if self._response.status < 300:
            return
        told = b"".join(self.lines(path))
        try:
            says = str(json.loads(told)["message"])
        except (ValueError, LookupError, TypeError):
            says = told.decode(errors="replace")
        raise ApiRefused(path, self._response.status, says[:MOST_WORDS])

    def lines(self, path: str) -> list[bytes]:
        """Return the lines of the whole answer. Raises ApiUnavailable."""
        lines, size = [], 0
        try:
            while line := self._response.readline(MAX_BYTES):
                lines.append(line)
                size += len(line)
                if size >= MAX_BYTES or time.monotonic() > self._ends_at:
                    raise ApiUnavailable(f"{path}: the answer has not ended after {WHOLE_S:.0f} s "
                                         f"or {MAX_BYTES >> 20} MiB.")
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, ApiUnavailable):
                raise
            raise ApiUnavailable(f"{path}: the answer broke off: {error!r}") from error
        finally:
            self._connection.close()
        return lines


def _object(path: str, lines: list[bytes]) -> dict[str, Any]:
    try:
        parsed = json.loads(b"".join(lines))
    except ValueError as error:
        raise ApiUnavailable(f"{path}: an answer that is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ApiUnavailable(f"{path}: an answer that is no object.")
    return parsed

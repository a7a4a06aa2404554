"""Words between worker and driver: signed JSON over HTTP, and nothing else is understood.

liveness (worker) → here → driver

What always holds:
1. A body is JSON under an HMAC-SHA256 of the run's key, checked before it is parsed; no pickle on either side (F10).
2. A reply is signed together with the asker's nonce, so an old reply cannot be played back.
3. A word counts once, and one that comes again from another address is refused.
4. Bodies are at most MAX_BODY_BYTES; a connection that does not speak is dropped after SOCKET_TIMEOUT_S, and one from an
   address that holds MAX_FROM_ONE already at once.

What it does not do: hide the words (they hold no secret: ranks, steps, ports), or protect Gloo's own traffic.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_BODY_BYTES = 1 << 20
SOCKET_TIMEOUT_S = 30.0
MAX_FROM_ONE = 512
"""Each worker of a host holds three."""
SIGNATURE = "X-Elastic-Signature"
NONCE = "X-Elastic-Nonce"


class DriverUnreachable(ConnectionError):
    """The driver did not answer, or what answered does not have the run's key."""


class WordRefused(Exception):
    """A word that is signed and still not its sender's; the text says why."""


def sign(key: bytes, nonce: str, body: bytes) -> str:
    """Return the hex HMAC-SHA256 of nonce and body."""
    return hmac.new(key, nonce.encode(errors="replace") + b"\n" + body, hashlib.sha256).hexdigest()


def _is_signed(signature: str, key: bytes, nonce: str, body: bytes) -> bool:
    return hmac.compare_digest(signature.encode(errors="replace"), sign(key, nonce, body).encode())


class DriverClient:
    """One kept-open connection to the driver. Not for use by two threads."""

    def __init__(self, address: str, key: bytes, timeout_s: float):
        host, _, port = address.rpartition(":")
        self.address, self.key = address, key
        self._connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)

    def ask(self, words: dict[str, Any]) -> dict[str, Any]:
        """Send words and return the driver's. Raises DriverUnreachable.

        A connection that was kept open may have been closed at the other end since: then the words go once more, over
        a new one. That is safe, since every word has a number and counts once.
        """
        if self._connection.sock is not None:
            try:
                return self._ask(words)
            except DriverUnreachable as error:
                if isinstance(error.__cause__, TimeoutError):
                    raise
        return self._ask(words)

    def _ask(self, words: dict[str, Any]) -> dict[str, Any]:
        body, nonce = json.dumps(words).encode(), secrets.token_hex(8)
        headers = {NONCE: nonce, SIGNATURE: sign(self.key, nonce, body)}
        try:
            if self._connection.sock is None:
                self._connection.connect()
                assert self._connection.sock is not None
                self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection.request("POST", "/word", body, headers)
            response = self._connection.getresponse()
            answer = response.read(MAX_BODY_BYTES)
            if response.status != 200:
                raise DriverUnreachable(f"the driver at {self.address} answered {response.status}")
            if not _is_signed(response.headers.get(SIGNATURE, ""), self.key, nonce, answer):
                raise DriverUnreachable(f"what answers at {self.address} does not have this run's key")
            return dict(json.loads(answer))
        except (OSError, http.client.HTTPException, ValueError) as error:
            with suppress(OSError):  # Gloo, when its init breaks, has been seen to close a descriptor of ours
                self._connection.close()
            if isinstance(error, DriverUnreachable):
                raise
            raise DriverUnreachable(f"the driver at {self.address} cannot be reached: {error!r}") from error

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class WordServer(ThreadingHTTPServer):
    """The driver's end: hands each signed word to `answer(words, address)` in a thread of its own."""

    daemon_threads = True
    request_queue_size = 1024  # F5: the default of 5 costs a second for each dropped SYN

    def __init__(self, bind: str, key: bytes, answer: Callable[[dict[str, Any], str], dict[str, Any]],
                 refused: Callable[[str, str], None]):
        self.key, self.answer, self.refused = key, answer, refused
        self.open: Counter[str] = Counter()
        """How many connections each address holds."""
        self._lock = threading.Lock()
        super().__init__((bind, 0), _WordHandler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take a connection, unless its address holds too many: descriptors that strangers have, workers lack."""
        with self._lock:
            is_taken = self.open[client_address[0]] < MAX_FROM_ONE
            self.open[client_address[0]] += is_taken
        if not is_taken:
            self.refused(client_address[0], "too many connections")
        return is_taken

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin to serve a connection."""
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread to be had: it will not end there
            with self._lock:
                self.open[client_address[0]] -= 1
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self.open[client_address[0]] -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that dies in mid-word is its own death's business, not a traceback of ours."""


class _WordHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_TIMEOUT_S
    disable_nagle_algorithm = True
    server: WordServer

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length) > MAX_BODY_BYTES:
            return self._refuse("no body, or one that is too long")
        body, nonce = self.rfile.read(int(length)), self.headers.get(NONCE, "")
        if len(body) < int(length):
            self.close_connection = True  # it has died in the middle of its word
            return None
        if not _is_signed(self.headers.get(SIGNATURE, ""), self.server.key, nonce, body):
            return self._refuse("signature does not match")
        try:
            answer = json.dumps(self.server.answer(json.loads(body), self.client_address[0])).encode()
        except WordRefused as refused:
            return self._refuse(str(refused))
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.send_header(SIGNATURE, sign(self.server.key, nonce, answer))
        self.end_headers()
        self.wfile.write(answer)

    def _refuse(self, why: str) -> None:
        self.server.refused(self.client_address[0], why)
        self.close_connection = True
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request at all."""
        self.server.refused(self.client_address[0], "bytes that are no word")
        super().send_error(code, "", "")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is the base class's)
        """Stay silent: what matters is an event."""

"""Messages between worker and driver: signed JSON over HTTP.

worker → here → gate.py → here → driver

What always holds:
1. A body is JSON under an HMAC-SHA256 of its worker's key. The signature is checked before the
   body is parsed. Neither side uses pickle (F10).
2. An answer's signature covers its kind and the nonce of its request (seal.py). The client refuses
   an older answer, an answer to another worker, and its own request sent back.
3. A worker can send messages in its own name only: its key is its own, its name is signed, and the
   server refuses a message with another name.
4. A message is accepted once: a repeated nonce is refused before a thread starts.
5. An unauthenticated client costs a descriptor and a few KiB for at most FIRST_MESSAGE_S, and no
   thread (gate.py). Its first message has at most MAX_FIRST_BYTES. A client with a longer message
   sends an empty message first.
6. The number of connections, authenticated or not, is limited by what the run expects. When the
   limit is exceeded, the server takes the address with the most connections and closes the one of
   them that has been silent the longest.
7. A body has at most MAX_BODY_BYTES. A request has one deadline, not one for each packet.

What it does not do: hide the messages (they hold no secret: ranks, steps, ports), or protect Gloo's
own traffic.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from elastic_trainer.wire.gate import (
    SPARE,
    BadRequest,
    Gate,
    OpenConnections,
    Request,
    head,
    refuse,
    request_in,
)
from elastic_trainer.wire.seal import (
    NONCE,
    SIGNATURE,
    Kind,
    Seen,
    Session,
    is_sealed,
    seal,
    worker_key,
)

MAX_BODY_BYTES = 1 << 20
MAX_FIRST_BYTES = 4096
"""A heartbeat has some 400 bytes."""
FIRST_MESSAGE_S = 5.0
"""The time that a new connection has for its first whole message."""
IDLE_S = 30.0
"""The longest silence of a connection between two messages. A message has twice this time to
arrive."""
CONNECTIONS_EACH = 4
"""A worker holds three (heartbeats, its main thread, its log shipper). It opens one more when it
restarts in place."""
WORKER = "X-Elastic-Worker"


class DriverUnreachable(ConnectionError):
    """The driver did not answer, or the server that answered does not have this worker's key."""


class MessageRefused(Exception):
    """A message with a valid signature that is refused; the text is the reason."""


class DriverClient:
    """A worker's open connection to the driver, with the worker's own key. For one thread."""

    def __init__(self, address: str, worker: str, key: bytes, timeout_s: float):
        host, _, port = address.rpartition(":")
        self.address, self.worker, self.key, self.session = address, worker, key, Session()
        self._connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message with the worker's name and return the answer. Raises DriverUnreachable.

        The driver may have closed a connection that was kept open. Then the client sends the
        message once more over a new connection. Each message has a number and counts once.
        """
        if self._connection.sock is not None:
            try:
                return self._ask(message)
            except DriverUnreachable as error:
                if isinstance(error.__cause__, TimeoutError):
                    raise
        return self._ask(message)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps({"worker": self.worker, **message}).encode()
        try:
            if self._connection.sock is None:
                self._connection.connect()
                assert self._connection.sock is not None
                self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if len(body) > MAX_FIRST_BYTES:
                    self._exchange(b"")
            return dict(json.loads(self._exchange(body)))
        except (OSError, http.client.HTTPException, ValueError) as error:
            with suppress(OSError):  # a failed Gloo init may have closed our descriptor
                self._connection.close()
            if isinstance(error, DriverUnreachable):
                raise
            raise DriverUnreachable(
                f"the driver at {self.address} cannot be reached: {error!r}") from error

    def _exchange(self, body: bytes) -> bytes:
        nonce = self.session.nonce()
        signed = self.worker.encode(), nonce.encode()
        headers = {WORKER: self.worker, NONCE: nonce,
                   SIGNATURE: seal(self.key, Kind.REQUEST, *signed, body)}
        self._connection.request("POST", "/message", body, headers)
        response = self._connection.getresponse()
        answer = response.read(MAX_BODY_BYTES)
        if response.status != 200:
            why = "another attempt's key, or another version?" if response.status == 403 else ""
            raise DriverUnreachable(
                f"the driver at {self.address} answered {response.status} {why}".rstrip())
        signature = response.headers.get(SIGNATURE, "")
        if not is_sealed(signature, self.key, Kind.ANSWER, *signed, answer):
            raise DriverUnreachable(f"the server at {self.address} does not have this run's key")
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class MessageServer(Gate):
    """The driver's end, with the run's key. Authenticated connections are served to their end, also
    after `shutdown`.

    It passes each signed message to `answer(message, address)`, in one thread for each
    authenticated connection. It calls `refused(address, why)` for each refused one. `expected`
    returns the number of connections that the workers of the run may have now.
    """

    def __init__(self, bind: str, key: bytes,
                 answer: Callable[[dict[str, Any], str], dict[str, Any]],
                 refused: Callable[[str, str], None],
                 expected: Callable[[], int] = lambda: SPARE):
        self.key, self.answer, self.expected = key, answer, expected
        self.seen = Seen()
        self.served = OpenConnections()
        """The authenticated connections by address, the one that was silent the longest first."""
        self._lock = threading.Lock()
        super().__init__(bind, 0, self._begin, refused, request_s=FIRST_MESSAGE_S,
                         most_body=MAX_FIRST_BYTES, most=lambda: SPARE + self.expected())

    def _begin(self, connection: socket.socket, address: str, request: Request,
               rest: bytes) -> None:
        """Give a connection a thread if its first message is signed."""
        worker = request.headers.get(WORKER.lower(), "")
        key = worker_key(self.key, worker)
        if why := self._why_refused(request, worker, key):
            self.refused(address, why)
            return refuse(connection, 403)
        with self._lock:
            self.served.add(address, connection)
            if self.served.size > SPARE + self.expected():
                self._drop_longest_silent()
        try:
            served = connection, address, worker, key
            threading.Thread(target=self._serve, args=(*served, request, rest), daemon=True).start()
        except RuntimeError:  # no thread is free
            self._end(connection, address)

    def _why_refused(self, request: Request, worker: str, key: bytes) -> str:
        if request.method != "POST":
            return "not a request"
        nonce = request.headers.get(NONCE.lower(), "")
        signature = request.headers.get(SIGNATURE.lower(), "")
        signed = worker.encode(), nonce.encode(), request.body
        if not is_sealed(signature, key, Kind.REQUEST, *signed):
            return "signature does not match"
        with self._lock:
            return "" if self.seen.is_new(worker, nonce) else "a repeated message"

    def _drop_longest_silent(self) -> None:
        address, connection = self.served.oldest_of_most()
        self.served.remove(address, connection)
        with suppress(OSError):  # its thread reads the end and closes it
            connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket, address: str, worker: str, key: bytes,
               request: Request | None, rest: bytes) -> None:
        """Answer the messages of one worker's connection until it ends."""
        received = bytearray(rest)
        try:
            connection.settimeout(IDLE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while request:
                message = own_message(request.body, worker) if request.body else None
                answer = json.dumps(self.answer(message, address) if message else {}).encode()
                nonce = request.headers.get(NONCE.lower(), "")
                signature = seal(key, Kind.ANSWER, worker.encode(), nonce.encode(), answer)
                first = head(200, "OK", len(answer), f"{SIGNATURE}: {signature}")
                connection.sendall(first + answer)
                with self._lock:
                    self.served.touch(address, connection)
                request = next_request(connection, received)
                if request and (why := self._why_refused(request, worker, key)):
                    raise MessageRefused(why)
        except (MessageRefused, BadRequest) as error:
            self.refused(address, str(error))
            refuse(connection, 403)
        except Exception:
            pass  # the sender died within its message, or the message could not be answered
        finally:
            self._end(connection, address)

    def _end(self, connection: socket.socket, address: str) -> None:
        with self._lock:
            self.served.remove(address, connection)
        connection.close()


def own_message(body: bytes, worker: str) -> dict[str, Any]:
    """Parse a message of this worker. Raises MessageRefused for another name, and ValueError."""
    message = json.loads(body)
    if not isinstance(message, dict) or message.get("worker") != worker:
        raise MessageRefused(f"a message of {worker} without its name")
    return message


def next_request(connection: socket.socket, received: bytearray) -> Request | None:
    """Read the next request of a connection with a timeout of IDLE_S; None: the connection ended.

    Raises OSError, BadRequest.
    """
    deadline = time.monotonic() + 2 * IDLE_S
    while not (found := request_in(received, MAX_BODY_BYTES)):
        if time.monotonic() > deadline or not (data := connection.recv(1 << 16)):
            return None
        received += data
    request, length = found
    del received[:length]
    return request

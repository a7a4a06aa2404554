"""Messages between worker and driver: signed JSON over HTTP, and nothing else is understood.

worker → here → gate.py → here → driver

What always holds:
1. A body is JSON under an HMAC-SHA256 of its worker's key, which is checked before the body is
   parsed. No pickle on either side (F10).
2. An answer is signed as an answer, together with the nonce of its question (seal.py). An older
   answer, another worker's, and the question itself sent back are refused.
3. A worker speaks for itself alone: its key is its own, its name is signed, and a message in
   another name is refused.
4. A message is taken once: a nonce that comes again is refused, before a thread begins.
5. A client that has not shown the key costs a descriptor and some KiB until FIRST_WORD_S, and no
   thread (gate.py). Its first message has at most MOST_FIRST_BYTES: a client with a longer one
   sends an empty message before it.
6. The number of connections is bounded, with the key and without, by what the run expects. One more
   closes the one that has been silent for the longest time, of the address that has the most.
7. A body has at most MAX_BODY_BYTES. A request has one deadline, not one for each of its packets.

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

from elastic_trainer.wire.gate import SPARE, Asked, Crowd, Gate, NoRequest, head, refuse, request_in
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
MOST_FIRST_BYTES = 4096
"""A heartbeat has some 400 bytes."""
FIRST_WORD_S = 5.0
"""How long a new connection has for its first whole message."""
IDLE_S = 30.0
"""How long a connection may be silent between two messages, and how long one may take to arrive."""
CONNECTIONS_EACH = 4
"""A worker holds three (heartbeats, its main thread, its courier), and opens one more when it
starts anew in place."""
WORKER = "X-Elastic-Worker"


class DriverUnreachable(ConnectionError):
    """The driver did not answer, or what answered does not have this worker's key."""


class WordRefused(Exception):
    """A message that is signed and still refused; the text says why."""


class DriverClient:
    """A worker's open connection to the driver, with the worker's own key. For one thread."""

    def __init__(self, address: str, worker: str, key: bytes, timeout_s: float):
        host, _, port = address.rpartition(":")
        self.address, self.worker, self.key, self.session = address, worker, key, Session()
        self._connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)

    def ask(self, words: dict[str, Any]) -> dict[str, Any]:
        """Send a message, with the worker's name; return the answer. Raises DriverUnreachable.

        The other end may have closed a connection that was kept open. Then the message is sent once
        more, over a new one. That is safe, since each message has a number and counts once.
        """
        if self._connection.sock is not None:
            try:
                return self._ask(words)
            except DriverUnreachable as error:
                if isinstance(error.__cause__, TimeoutError):
                    raise
        return self._ask(words)

    def _ask(self, words: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps({"worker": self.worker, **words}).encode()
        try:
            if self._connection.sock is None:
                self._connection.connect()
                assert self._connection.sock is not None
                self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if len(body) > MOST_FIRST_BYTES:
                    self._exchange(b"")
            return dict(json.loads(self._exchange(body)))
        except (OSError, http.client.HTTPException, ValueError) as error:
            with suppress(OSError):  # a Gloo whose init broke has closed descriptors of ours
                self._connection.close()
            if isinstance(error, DriverUnreachable):
                raise
            raise DriverUnreachable(
                f"the driver at {self.address} cannot be reached: {error!r}") from error

    def _exchange(self, body: bytes) -> bytes:
        nonce = self.session.nonce()
        signed = self.worker.encode(), nonce.encode()
        headers = {WORKER: self.worker, NONCE: nonce,
                   SIGNATURE: seal(self.key, Kind.WORD, *signed, body)}
        self._connection.request("POST", "/word", body, headers)
        response = self._connection.getresponse()
        answer = response.read(MAX_BODY_BYTES)
        if response.status != 200:
            raise DriverUnreachable(f"the driver at {self.address} answered {response.status}")
        signature = response.headers.get(SIGNATURE, "")
        if not is_sealed(signature, self.key, Kind.ANSWER, *signed, answer):
            raise DriverUnreachable(f"what answers at {self.address} does not have this run's key")
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class WordServer:
    """The driver's end, with the run's key.

    It hands each signed message to `answer(words, address)`, in a thread for each connection with a
    worker's key. `refused(address, why)` hears of the others. `expected` returns how many
    connections the workers of the run may have now.
    """

    def __init__(self, bind: str, key: bytes,
                 answer: Callable[[dict[str, Any], str], dict[str, Any]],
                 refused: Callable[[str, str], None],
                 expected: Callable[[], int] = lambda: SPARE):
        self.key, self.answer, self.refused, self.expected = key, answer, refused, expected
        self.seen = Seen()
        self.served = Crowd()
        """The connections with the key, by address, the one that was silent the longest first."""
        self._lock = threading.Lock()
        self.gate = Gate(bind, 0, self._begin, refused, request_s=FIRST_WORD_S,
                         most_body=MOST_FIRST_BYTES, most=lambda: SPARE + self.expected())
        self.server_address = self.gate.address
        self.server_port = self.gate.address[1]

    def serve_forever(self) -> None:
        """Take connections until `shutdown`."""
        self.gate.serve_forever()

    def shutdown(self) -> None:
        """Take no more connections; those that have shown the key are served to their end."""
        self.gate.shutdown()

    def server_close(self) -> None:
        """Close the listening socket."""
        self.gate.close()

    def _begin(self, connection: socket.socket, address: str, asked: Asked, rest: bytes) -> None:
        """Give a connection a thread if its first message is signed."""
        worker = asked.headers.get(WORKER.lower(), "")
        key = worker_key(self.key, worker)
        if why := self._why_refused(asked, worker, key):
            self.refused(address, why)
            return refuse(connection, 403)
        with self._lock:
            self.served.add(address, connection)
            if self.served.size > SPARE + self.expected():
                self._drop_longest_silent()
        try:
            served = connection, address, worker, key
            threading.Thread(target=self._serve, args=(*served, asked, rest), daemon=True).start()
        except RuntimeError:  # no thread is free
            self._end(connection, address)

    def _why_refused(self, asked: Asked, worker: str, key: bytes) -> str:
        if asked.method != "POST":
            return "bytes that are no word"
        nonce = asked.headers.get(NONCE.lower(), "")
        signature = asked.headers.get(SIGNATURE.lower(), "")
        if not is_sealed(signature, key, Kind.WORD, worker.encode(), nonce.encode(), asked.body):
            return "signature does not match"
        with self._lock:
            return "" if self.seen.is_new(worker, nonce) else "a word that was said before"

    def _drop_longest_silent(self) -> None:
        address, connection = self.served.oldest_of_most()
        self.served.remove(address, connection)
        with suppress(OSError):  # its thread reads the end, and closes it
            connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket, address: str, worker: str, key: bytes,
               asked: Asked | None, rest: bytes) -> None:
        """Answer the messages of one connection, which is one worker's, to its end."""
        received = bytearray(rest)
        try:
            connection.settimeout(IDLE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while asked:
                words = own_words(asked.body, worker) if asked.body else None
                answer = json.dumps(self.answer(words, address) if words else {}).encode()
                nonce = asked.headers.get(NONCE.lower(), "")
                signature = seal(key, Kind.ANSWER, worker.encode(), nonce.encode(), answer)
                first = head(200, "OK", len(answer), f"{SIGNATURE}: {signature}")
                connection.sendall(first + answer)
                with self._lock:
                    self.served.touch(address, connection)
                asked = next_word(connection, received)
                if asked and (why := self._why_refused(asked, worker, key)):
                    raise WordRefused(why)
        except (WordRefused, NoRequest) as error:
            self.refused(address, str(error))
            refuse(connection, 403)
        except Exception:
            pass  # a sender that dies within its message, or a message that cannot be answered
        finally:
            self._end(connection, address)

    def _end(self, connection: socket.socket, address: str) -> None:
        with self._lock:
            self.served.remove(address, connection)
        connection.close()


def own_words(body: bytes, worker: str) -> dict[str, Any]:
    """Return a message of this worker's. Raises WordRefused for another name, and ValueError."""
    words = json.loads(body)
    if not isinstance(words, dict) or words.get("worker") != worker:
        raise WordRefused(f"a word of {worker}'s in another name")
    return words


def next_word(connection: socket.socket, received: bytearray) -> Asked | None:
    """Read the next request of a connection with a timeout of IDLE_S; None: it has ended.

    Raises OSError, NoRequest.
    """
    deadline = time.monotonic() + 2 * IDLE_S
    while not (found := request_in(received, MAX_BODY_BYTES)):
        if time.monotonic() > deadline or not (data := connection.recv(1 << 16)):
            return None
        received += data
    asked, length = found
    del received[:length]
    return asked

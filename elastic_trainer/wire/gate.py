"""Unauthenticated connections: one thread reads one request from each, within fixed bounds.

a listening socket → here → whole requests → discovery/agent.py, messages.py

What always holds:
1. A connection that has not sent a whole request costs a descriptor and the bytes received so far
   (at most MAX_HEAD_BYTES + `most_body`). It costs no thread.
2. A request has one deadline, from the connection to its last byte. A client that sends single
   bytes does not extend it.
3. At most min(`most()`, MOST_CONNECTIONS) such connections are open, and they hold at most
   `most_bytes` in all. When a limit is exceeded, the oldest connection of the address with the most
   connections is closed. A worker sends its request at once and it is read within milliseconds, so
   the oldest connection is not a worker's.
4. When the process has no free descriptor, the thread closes the oldest connection and accepts
   none for FULL_S.

What it does not do: check a signature, or parse a body.

Source: accept(2) for EMFILE, ENFILE, ENOBUFS and ENOMEM; RFC 9112 for the head of a request.
"""

from __future__ import annotations

import errno
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

MAX_HEAD_BYTES = 4096
"""The head of a worker's or poller's request has about 300 bytes."""
SPARE = 64
"""The number of connections that are allowed beyond those that a run expects."""
MOST_CONNECTIONS = 2048
"""The limit for any number of workers. With it and MOST_BYTES the process grew by 5.2 MiB under
6,000 connections of 8 KB each."""
MOST_BYTES = 4 << 20
"""The limit for all incomplete requests together. A worker's request is complete with its first
packet."""
BACKLOG = 1024
ACCEPTED_AT_ONCE = 64
FULL_S = 0.2
SWEEP_S = 0.25
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FIRST_LINE = re.compile(r"([A-Z]{1,16}) ([!-~]{1,1024}) HTTP/1\.[01]")


@dataclass(frozen=True)
class Request:
    """One whole request."""

    method: str
    path: str
    headers: dict[str, str]
    """The keys are in lower case."""
    body: bytes


class BadRequest(ValueError):
    """Bytes that cannot become a request; `code` is the HTTP status of the answer."""

    def __init__(self, code: int, why: str):
        super().__init__(why)
        self.code, self.why = code, why


def request_in(received: bytes | bytearray, most_body: int) -> tuple[Request, int] | None:
    """Return the first request in these bytes and its length; None: more bytes are needed.

    Raises BadRequest.
    """
    end = received.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if end < 0:
        if len(received) >= MAX_HEAD_BYTES:
            raise BadRequest(400, "not a request")
        return None
    first, *lines = received[:end].decode("latin-1").split("\r\n")
    first_line = FIRST_LINE.fullmatch(first)
    if not first_line:
        raise BadRequest(400, "not a request")
    fields = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in fields}
    length = headers.get("content-length", "" if first_line[1] in ("POST", "PUT") else "0")
    is_number = length.isascii() and length.isdigit() and len(length) < 10
    if not is_number or int(length) > most_body:
        raise BadRequest(403, "no body, or too long a body")
    whole = end + 4 + int(length)
    if len(received) < whole:
        return None
    return Request(first_line[1], first_line[2], headers, bytes(received[end + 4:whole])), whole


def head(code: int, reason: str, length: int, *lines: str) -> bytes:
    """Return the head of an answer."""
    first = f"HTTP/1.1 {code} {reason}", f"Content-Length: {length}"
    return "\r\n".join([*first, *lines, "", ""]).encode("latin-1")


class OpenConnections:
    """Connections, by address, oldest first."""

    def __init__(self) -> None:
        self.of: dict[str, dict[int, socket.socket]] = {}
        self.size = 0

    def add(self, address: str, connection: socket.socket) -> None:
        """Add a connection as the newest of its address."""
        self.of.setdefault(address, {})[id(connection)] = connection
        self.size += 1

    def remove(self, address: str, connection: socket.socket) -> bool:
        """Remove a connection; return False if it is not known."""
        known = self.of.get(address, {})
        if known.pop(id(connection), None) is None:
            return False
        if not known:
            del self.of[address]
        self.size -= 1
        return True

    def touch(self, address: str, connection: socket.socket) -> None:
        """Make a connection the newest of its address."""
        if self.remove(address, connection):
            self.add(address, connection)

    def oldest_of_most(self) -> tuple[str, socket.socket]:
        """Return the oldest connection of the address that has the most."""
        address, known = max(self.of.items(), key=lambda one: len(one[1]))
        return address, next(iter(known.values()))


@dataclass(eq=False)
class Pending:
    """A connection that has not sent a whole request."""

    connection: socket.socket
    address: str
    until: float
    received: bytearray = field(default_factory=bytearray)


class Gate:
    """Reads requests in the thread that calls `serve_forever`.

    `whole(connection, address, request, rest)` takes over a connection; `rest` are the bytes after
    its first request. `refused(address, why)` is called for each refused connection. Both are
    called in this thread.
    """

    def __init__(self, bind: str, port: int,
                 whole: Callable[[socket.socket, str, Request, bytes], None],
                 refused: Callable[[str, str], None], *, request_s: float, most_body: int = 0,
                 most: Callable[[], int] = lambda: SPARE, most_bytes: int = MOST_BYTES):
        self.whole, self.refused, self.request_s = whole, refused, request_s
        self.most_body, self.most = most_body, most
        self.most_bytes, self.held_bytes = most_bytes, 0
        self.most_connections = MOST_CONNECTIONS
        self.pending: dict[socket.socket, Pending] = {}
        self.connections = OpenConnections()
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self.listener = socket.create_server((bind, port), family=family, backlog=BACKLOG)  # F5
        self.listener.setblocking(False)
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.is_listening, self.listens_at = True, 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.listener, selectors.EVENT_READ)
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._stops, self._has_ended = False, threading.Event()
        self._has_ended.set()

    def serve_forever(self) -> None:
        """Read requests until `shutdown`."""
        self._has_ended.clear()
        swept_at = 0.0
        try:
            while not self._stops:
                for key, _ in self._selector.select(SWEEP_S):
                    if key.fileobj is self.listener:
                        self._accept()
                    elif key.fileobj in self.pending:  # still open
                        self._read(key.data)
                now = time.monotonic()
                if now - swept_at >= SWEEP_S:
                    swept_at = now
                    self._sweep(now)
        finally:
            self._has_ended.set()

    def shutdown(self) -> None:
        """Stop reading. `close` closes the connections without a whole request."""
        self._stops = True
        with suppress(OSError):  # closed already
            self._waker.send(b"x")
        self._has_ended.wait()

    def close(self) -> None:
        """Close the listening socket and all connections of this object. Call `shutdown` first."""
        for client in list(self.pending.values()):
            self._drop(client)
        self._selector.close()
        for end in (self.listener, self._wake, self._waker):
            end.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, (address, *_) = self.listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR:
                    raise
                return self._pause()
            if self.connections.size >= min(self.most(), self.most_connections):
                self._drop_oldest("too many connections")
            connection.setblocking(False)
            client = Pending(connection, address, time.monotonic() + self.request_s)
            self.pending[connection] = client
            self.connections.add(address, connection)
            self._selector.register(connection, selectors.EVENT_READ, client)
            self._read(client)  # the request has often arrived already

    def _pause(self) -> None:
        """Make room, and accept no connection for FULL_S."""
        if self.connections.size:
            self._drop_oldest("no free descriptor")
        self._selector.unregister(self.listener)
        self.is_listening, self.listens_at = False, time.monotonic() + FULL_S

    def _drop_oldest(self, why: str) -> None:
        address, connection = self.connections.oldest_of_most()
        self._drop(self.pending[connection])
        self.refused(address, why)

    def _sweep(self, now: float) -> None:
        """Close connections whose deadline has passed."""
        if not self.is_listening and now >= self.listens_at:
            self._selector.register(self.listener, selectors.EVENT_READ)
            self.is_listening = True
        for client in list(self.pending.values()):  # oldest first: all have the same time limit
            if client.until > now:
                break
            self._drop(client)
            if client.received:
                self.refused(client.address, "an incomplete request")

    def _drop(self, client: Pending, closes: bool = True) -> None:
        del self.pending[client.connection]
        self.held_bytes -= len(client.received)
        self.connections.remove(client.address, client.connection)
        self._selector.unregister(client.connection)
        if closes:
            client.connection.close()

    def _read(self, client: Pending) -> None:
        try:
            data = client.connection.recv(MAX_HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            return self._drop(client)
        client.received += data
        self.held_bytes += len(data)
        try:
            found = request_in(client.received, self.most_body)
            if not data and not found:
                return self._ended(client)
        except BadRequest as error:
            return self._refuse(client, error.code, error.why)
        if found:
            request, length = found
            self._drop(client, closes=False)
            rest = bytes(client.received[length:])
            return self.whole(client.connection, client.address, request, rest)
        while self.held_bytes > self.most_bytes:
            self._drop_oldest("too many bytes")

    def _ended(self, client: Pending) -> None:
        """Drop a connection that the client has closed.

        A worker may die within a body, so only a client without a whole head counts as refused.
        """
        if client.received and b"\r\n\r\n" not in client.received:
            self._refuse(client, 400, "not a request")
        else:
            self._drop(client)

    def _refuse(self, client: Pending, code: int, why: str) -> None:
        self._drop(client, closes=False)
        self.refused(client.address, why)
        refuse(client.connection, code)


def refuse(connection: socket.socket, code: int) -> None:
    """Answer with a status and close the connection. Does not block."""
    with suppress(OSError):
        connection.setblocking(False)
        connection.send(head(code, "Refused", 0, "Connection: close"))
    connection.close()

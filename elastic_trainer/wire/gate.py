"""Unauthenticated connections: one thread reads one request from each, within fixed bounds.

a listening socket → here → whole requests (the agent answers them; messages.py gives a thread to a
client that has the key)

What always holds:
1. A connection that has not sent a whole request costs a descriptor, its request so far
   (MAX_HEAD_BYTES and `most_body`), and no thread.
2. A request has one deadline, from the connection to its last byte. A client that sends a byte now
   and then does not extend it.
3. At most `most()` such connections are open, and MOST_CONNECTIONS in any case. They hold at most
   `most_bytes` in all. One more closes the oldest of the address that has the most: a request that
   is sent at once is read within milliseconds, so the oldest is not a worker's.
4. Without free descriptors the thread closes the oldest connection, and waits FULL_S before it
   accepts again.

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
"""How many connections are allowed beyond those that a run expects."""
MOST_CONNECTIONS = 2048
"""For any number of workers. With MOST_BYTES the process grew by 5.2 MiB (6,000 connections with
8 KB each)."""
MOST_BYTES = 4 << 20
"""Of all requests that are not whole yet. A worker's is whole when its first packet is read."""
BACKLOG = 1024
ACCEPTED_AT_ONCE = 64
FULL_S = 0.2
SWEEP_S = 0.25
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FIRST_LINE = re.compile(r"([A-Z]{1,16}) ([!-~]{1,1024}) HTTP/1\.[01]")


@dataclass(frozen=True)
class Asked:
    """One whole request."""

    method: str
    path: str
    headers: dict[str, str]
    """By their names in small letters."""
    body: bytes


class NoRequest(ValueError):
    """Bytes that cannot become a request; `code` is the HTTP status of the answer."""

    def __init__(self, code: int, why: str):
        super().__init__(why)
        self.code, self.why = code, why


def request_in(received: bytes | bytearray, most_body: int) -> tuple[Asked, int] | None:
    """Return the first request in these bytes and its length; None: more bytes are needed.

    Raises NoRequest.
    """
    end = received.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if end < 0:
        if len(received) >= MAX_HEAD_BYTES:
            raise NoRequest(400, "bytes that are no word")
        return None
    first, *lines = received[:end].decode("latin-1").split("\r\n")
    said = FIRST_LINE.fullmatch(first)
    if not said:
        raise NoRequest(400, "bytes that are no word")
    fields = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in fields}
    length = headers.get("content-length", "" if said[1] in ("POST", "PUT") else "0")
    is_number = length.isascii() and length.isdigit() and len(length) < 10
    if not is_number or int(length) > most_body:
        raise NoRequest(403, "no body, or one that is too long")
    whole = end + 4 + int(length)
    if len(received) < whole:
        return None
    return Asked(said[1], said[2], headers, bytes(received[end + 4:whole])), whole


def head(code: int, reason: str, length: int, *lines: str) -> bytes:
    """Return the head of an answer."""
    first = f"HTTP/1.1 {code} {reason}", f"Content-Length: {length}"
    return "\r\n".join([*first, *lines, "", ""]).encode("latin-1")


class Crowd:
    """Connections, by address, oldest first."""

    def __init__(self) -> None:
        self.of: dict[str, dict[int, socket.socket]] = {}
        self.size = 0

    def add(self, address: str, connection: socket.socket) -> None:
        """Note a connection as the newest of its address."""
        self.of.setdefault(address, {})[id(connection)] = connection
        self.size += 1

    def remove(self, address: str, connection: socket.socket) -> bool:
        """Forget a connection; False if it is not known."""
        known = self.of.get(address, {})
        if known.pop(id(connection), None) is None:
            return False
        if not known:
            del self.of[address]
        self.size -= 1
        return True

    def touch(self, address: str, connection: socket.socket) -> None:
        """Note that a connection was used now."""
        if self.remove(address, connection):
            self.add(address, connection)

    def oldest_of_most(self) -> tuple[str, socket.socket]:
        """Return the oldest connection of the address that has the most."""
        address, known = max(self.of.items(), key=lambda one: len(one[1]))
        return address, next(iter(known.values()))


@dataclass(eq=False)
class Caller:
    """A connection that has not sent a whole request."""

    connection: socket.socket
    address: str
    until: float
    received: bytearray = field(default_factory=bytearray)


class Gate:
    """The thread that reads requests; give `serve_forever` one.

    `whole(connection, address, asked, rest)` takes over a connection with its first request and the
    bytes that came behind it, in this thread. `refused(address, why)` hears of every connection
    that was refused.
    """

    def __init__(self, bind: str, port: int,
                 whole: Callable[[socket.socket, str, Asked, bytes], None],
                 refused: Callable[[str, str], None], *, request_s: float, most_body: int = 0,
                 most: Callable[[], int] = lambda: SPARE, most_bytes: int = MOST_BYTES):
        self.whole, self.refused, self.request_s = whole, refused, request_s
        self.most_body, self.most = most_body, most
        self.most_bytes, self.held_bytes = most_bytes, 0
        self.callers: dict[socket.socket, Caller] = {}
        self.crowd = Crowd()
        self.listener = socket.create_server((bind, port), backlog=BACKLOG)  # F5
        self.listener.setblocking(False)
        self.address: tuple[str, int] = self.listener.getsockname()
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
                    elif key.fileobj in self.callers:  # not closed since by what came before it
                        self._read(key.data)
                now = time.monotonic()
                if now - swept_at >= SWEEP_S:
                    swept_at = now
                    self._sweep(now)
        finally:
            self._has_ended.set()

    def shutdown(self) -> None:
        """Stop reading; connections that have sent no whole request are closed."""
        self._stops = True
        with suppress(OSError):  # closed already
            self._waker.send(b"x")
        self._has_ended.wait()

    def close(self) -> None:
        """Close the listening socket and what is not read yet. After `shutdown`."""
        for caller in list(self.callers.values()):
            self._drop(caller)
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
            if self.crowd.size >= min(self.most(), MOST_CONNECTIONS):
                self._drop_oldest("too many connections")
            connection.setblocking(False)
            caller = Caller(connection, address, time.monotonic() + self.request_s)
            self.callers[connection] = caller
            self.crowd.add(address, connection)
            self._selector.register(connection, selectors.EVENT_READ, caller)
            self._read(caller)  # its request has often come with it

    def _pause(self) -> None:
        """Make room, and accept no connection for FULL_S."""
        if self.crowd.size:
            self._drop_oldest("no free descriptor")
        self._selector.unregister(self.listener)
        self.is_listening, self.listens_at = False, time.monotonic() + FULL_S

    def _drop_oldest(self, why: str) -> None:
        address, connection = self.crowd.oldest_of_most()
        self._drop(self.callers[connection])
        self.refused(address, why)

    def _sweep(self, now: float) -> None:
        """Close connections whose time is over."""
        if not self.is_listening and now >= self.listens_at:
            self._selector.register(self.listener, selectors.EVENT_READ)
            self.is_listening = True
        for caller in list(self.callers.values()):  # by their age: all have the same time
            if caller.until > now:
                break
            self._drop(caller)
            if caller.received:
                self.refused(caller.address, "a request that did not end in time")

    def _drop(self, caller: Caller, closes: bool = True) -> None:
        del self.callers[caller.connection]
        self.held_bytes -= len(caller.received)
        self.crowd.remove(caller.address, caller.connection)
        self._selector.unregister(caller.connection)
        if closes:
            caller.connection.close()

    def _read(self, caller: Caller) -> None:
        try:
            data = caller.connection.recv(MAX_HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            return self._drop(caller)
        caller.received += data
        self.held_bytes += len(data)
        try:
            found = request_in(caller.received, self.most_body)
            if not data and not found:
                return self._ended(caller)
        except NoRequest as error:
            return self._refuse(caller, error.code, error.why)
        if found:
            asked, length = found
            self._drop(caller, closes=False)
            rest = bytes(caller.received[length:])
            return self.whole(caller.connection, caller.address, asked, rest)
        while self.held_bytes > self.most_bytes:
            self._drop_oldest("too many bytes")

    def _ended(self, caller: Caller) -> None:
        """Take a closed connection. A client may die within a body; one without a head is refused.
        """
        if caller.received and b"\r\n\r\n" not in caller.received:
            self._refuse(caller, 400, "bytes that are no word")
        else:
            self._drop(caller)

    def _refuse(self, caller: Caller, code: int, why: str) -> None:
        self._drop(caller, closes=False)
        self.refused(caller.address, why)
        refuse(caller.connection, code)


def refuse(connection: socket.socket, code: int) -> None:
    """Answer with a status and close, without waiting for the client."""
    with suppress(OSError):
        connection.setblocking(False)
        connection.send(head(code, "Refused", 0, "Connection: close"))
    connection.close()

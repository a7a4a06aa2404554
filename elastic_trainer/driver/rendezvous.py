"""The store in which the Gloo ends of one generation's members find each other.

generation formed → here ← `hvd.init()` of each member: a PUT, and a GET that is held back

What always holds:
1. Values are plain bytes, and small; nothing is unpickled (F10: Horovod's own server unpickles,
   rendezvous.py:44-47).
2. Only members' addresses are answered.
3. One thread serves all. A request has REQUEST_S to arrive, and its answer REQUEST_S to be read, so
   no client can block the store.
4. The first value of a name stays: another one is refused, and a DELETE deletes nothing, since a
   store serves one generation. Where all members meet at once, a name belongs to one rank and is
   accepted from that member's address only, so no other host can take it. Horovod's client sends no
   key, so another process on the member's own host could be first.
5. Names, bytes and connections are limited by the number of members. When an address exceeds its
   limit, its oldest connection is closed, first of those without a whole request.

All members wait for these requests whenever the world changes. Horovod's server takes 1 ms of a
core for each (a thread, the date, an e-mail parser for three headers), and its client asks again
every 10 ms for a value that is not there (http_store.cc:57-74). This one takes 0.3 ms, and answers
when the value is there. Without 08-meet-at-once.patch N members send about 5 N² requests (5 members
190; 48 members 11,500). With the patch each member puts its addresses, one for each peer, under
`SCOPE/at-once-SIZE-RANK`, and gets under the same name what all others have put for it: 2 N
requests, and 136 bytes for each pair in all answers together. A single byte as the
answer means that a member is gone.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence

VALUE_BYTES_EACH = 256
"""A member's value is 136 bytes for each other member (gloo, tcp/address.h)."""
SPARE_VALUE_BYTES = 4096
NAMES_EACH = 16
"""Without 08-meet-at-once.patch Gloo puts two names for each member into each of three scopes
(context.cc, connectFullMesh)."""
MESHES = 4
"""The most values for all peers that a member puts: global, local, cross, and a process set's."""
MAX_HEAD_BYTES = 4096
CONNECTIONS_EACH = 4
"""A member sends one request after the other."""
SPARE_CONNECTIONS = 4
MAX_NON_MEMBERS = 64
"""The most open connections of addresses that are no member's. One more closes the oldest."""
REQUEST_S = 3.0
"""The time in which a request must arrive."""
HOLD_S = 0.5
"""The time for which the answer to a GET is held back when the value is not there yet."""
BACKLOG = 1024  # F5
ACCEPTED_AT_ONCE = 16
"""How many accepts asyncio tries in a row, also when no descriptor is free."""
NOT_A_MEMBER = "not a member of this generation"
TOO_MANY = "too many connections"
NOT_ITS_NAME = "a name that is another member's, or none"
NOT_THE_FIRST = "another value for a name that has one"
TOO_MUCH = "more names or bytes than a generation of this size has"
AT_ONCE = re.compile(r"(/[^/]+/at-once-([1-9][0-9]{0,4})-)([0-9]{1,5})")
GONE = b"x"
REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found",
           413: "Content Too Large"}


class Rendezvous:
    """One generation's store, for members at these addresses, by rank.

    `refused(address, why)` is called, in the store's thread, for each refused request.
    """

    def __init__(self, bind: str, members: Sequence[str], refused: Callable[[str, str], None], *,
                 at_once: bool = False, request_s: float = REQUEST_S, hold_s: float = HOLD_S):
        self.members, self.refused = Counter(members), refused
        self.request_s, self.hold_s = request_s, hold_s
        self.owners = tuple(members) if at_once else ()
        """The address of each rank, where all members meet at once."""
        self.most_value_bytes = VALUE_BYTES_EACH * len(members) + SPARE_VALUE_BYTES
        self.most_bytes = MESHES * len(members) * self.most_value_bytes
        self.kept_bytes = 0
        self.values: dict[str, bytes] = {}
        self.waiting: dict[str, set[_Request]] = {}
        self.open: dict[str, dict[_Request, None]] = {}
        """The connections of each member's address, oldest first; all others are under ""."""
        self.is_abandoned = False
        self.loop = asyncio.new_event_loop()
        listener = socket.create_server((bind, 0), backlog=BACKLOG)
        self.port: int = listener.getsockname()[1]
        self._server = self.loop.run_until_complete(self.loop.create_server(
            lambda: _Request(self), sock=listener, backlog=ACCEPTED_AT_ONCE))
        listener.listen(BACKLOG)  # asyncio has set its own
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self.loop.run_forever()
        self._server.close()
        for request in [one for those in self.open.values() for one in those]:
            request.transport.abort()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    def abandon(self) -> None:
        """Answer the members that wait for all others: one will not come. From any thread."""
        self.loop.call_soon_threadsafe(self._abandon)

    def _abandon(self) -> None:
        self.is_abandoned = True
        self._answer_complete([key for key in self.waiting if AT_ONCE.fullmatch(key)])

    def why_not(self, address: str, key: str, value: bytes) -> str:
        """Return why this address may not put this value; "" if it may."""
        if self.owners and not self._owns(address, key):
            return NOT_ITS_NAME
        if key in self.values:  # a client whose answer was lost sends the same value again
            return "" if self.values[key] == value else NOT_THE_FIRST
        has_room = self.kept_bytes + len(key) + len(value) <= self.most_bytes
        has_name = len(self.values) < NAMES_EACH * self.members.total()
        return "" if has_room and has_name else TOO_MUCH

    def _owns(self, address: str, key: str) -> bool:
        """True if a name is that of the rank at this address, where all members meet at once."""
        meeting = AT_ONCE.fullmatch(key)
        if not meeting or int(meeting[2]) != len(self.owners):
            return False
        rank = int(meeting[3])
        return rank < len(self.owners) and self.owners[rank] == address

    def put(self, key: str, value: bytes) -> None:
        """Keep a value, and answer the members that wait for it, or for it as their last peer's."""
        self.kept_bytes += 0 if key in self.values else len(key) + len(value)
        self.values[key] = value
        meeting = AT_ONCE.fullmatch(key)
        if not meeting:
            self._answer_complete([key])
        elif all(peer in self.values for peer in _members(meeting)):
            self._answer_complete(_members(meeting))

    def _answer_complete(self, keys: list[str]) -> None:
        for key in keys:
            if (value := self.found(key)) is not None:
                for waiting in self.waiting.pop(key, ()):
                    waiting.answer(200, value)

    def found(self, key: str) -> bytes | None:
        """Return the value of a key; None: it is not there yet."""
        meeting = AT_ONCE.fullmatch(key)
        if not meeting:
            return self.values.get(key)
        if self.is_abandoned:
            return GONE
        rank = int(meeting[3])
        found = [self.values.get(peer) for peer in _members(meeting)]
        if None in found:
            return None
        return b"".join(_share(value, rank - (rank > peer), len(found) - 1)
                        for peer, value in enumerate(found) if value is not None and peer != rank)

    def close(self) -> None:
        """Stop serving; open connections are dropped."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


def _members(meeting: re.Match[str]) -> list[str]:
    return [f"{meeting[1]}{rank}" for rank in range(int(meeting[2]))]


def _share(value: bytes, index: int, count: int) -> bytes:
    """Return one of the equal parts of a value."""
    size = len(value) // count
    return value[index * size : (index + 1) * size]


class _Request(asyncio.Protocol):
    """One connection: one request, one answer."""

    transport: asyncio.Transport

    def __init__(self, store: Rendezvous):
        self.store, self.received, self.key = store, b"", ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.address = transport, transport.get_extra_info("peername")[0]
        self.timer = self.store.loop.call_later(self.store.request_s, self._give_up)
        members = self.store.members[self.address]
        self.group = self.address if members else ""
        those = self.store.open.setdefault(self.group, {})
        those[self] = None
        most = CONNECTIONS_EACH * members + SPARE_CONNECTIONS if members else MAX_NON_MEMBERS
        if len(those) > most:
            oldest = next((one for one in those if not one.key), next(iter(those)))
            del those[oldest]  # connection_lost follows later
            self.store.refused(oldest.address, TOO_MANY)
            oldest.transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self.timer.cancel()
        self.store.open[self.group].pop(self, None)
        waiting = self.store.waiting.get(self.key, set())
        waiting.discard(self)
        if not waiting:
            self.store.waiting.pop(self.key, None)

    def eof_received(self) -> bool:
        if not self.key and not self.transport.is_closing():
            self._give_up()
        return True  # a client may shut its half and read on

    def _give_up(self) -> None:
        """End an incomplete request. A member may have died while it sent it."""
        if self.received and self.address not in self.store.members:
            self._refuse(403, NOT_A_MEMBER)
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.key or self.transport.is_closing():
            return  # answered, or waiting for its answer
        self.received += data
        head, end, body = self.received.partition(b"\r\n\r\n")
        if not end and len(self.received) <= MAX_HEAD_BYTES:
            return
        line, *headers = head.decode("latin-1").split("\r\n")
        method, _, path = line.rpartition(" HTTP/")[0].partition(" ")
        lengths = (value.strip() for name, _, value in (line.partition(":") for line in headers)
                   if name.lower() == "content-length")
        length = next(lengths, "" if method == "PUT" else "0")
        if self.address not in self.store.members:
            self._refuse(403, NOT_A_MEMBER)
        elif not end or method not in ("GET", "PUT", "DELETE") or path.count("/") != 2:
            self._refuse(400, "not a request")
        elif not (length.isascii() and length.isdigit() and len(length) < 8
                  and int(length) <= self.store.most_value_bytes):
            self.answer(413)
        elif len(body) >= int(length):
            self._do(method, path, body[: int(length)])

    def _do(self, method: str, key: str, value: bytes) -> None:
        store = self.store
        if method == "PUT":
            if why := store.why_not(self.address, key, value):
                return self._refuse(403, why)
            store.put(key, value)
        elif method == "DELETE":
            pass
        elif (found := store.found(key)) is not None:
            self.answer(200, found)
            return
        else:
            self.key = key
            store.waiting.setdefault(key, set()).add(self)
            self.timer.cancel()
            self.timer = store.loop.call_later(store.hold_s, self.answer, 404)
            return
        self.answer(200)

    def _refuse(self, code: int, why: str) -> None:
        self.store.refused(self.address, why)
        self.answer(code)

    def answer(self, code: int, value: bytes = b"") -> None:
        """Send the answer, and close when it is read, or after `request_s`."""
        self.timer.cancel()
        self.timer = self.store.loop.call_later(self.store.request_s, self.transport.abort)
        head = f"HTTP/1.0 {code} {REASONS[code]}\r\nContent-Length: {len(value)}\r\n\r\n"
        self.transport.write(head.encode() + value)
        self.transport.close()

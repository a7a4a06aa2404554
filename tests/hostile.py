"""A hostile client: attacks the ports that a file names, from many addresses, until it is killed.

    python tests/hostile.py PLAN.json    (on a host of the lab; tests/besieged.py writes the plan)

The plan: {"targets": FILE, "heard": FILE, "report": FILE, "sources": [ADDRESS], "turn_s": S,
"rate": PER_S, "most_open": N}. `targets` is read again when it changes: [[address, port, role]].
`heard` holds what was overheard on the wire: pairs of a request and its answer. Each way of
attacking has a turn of `turn_s`; then all ways have a turn together; then it begins again.

The report, written each second: {"attacks": {"ROLE WAY": {"tried", "connected", "consents"}},
"errors": {}}. A consent is an answer with status 200.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import pickle
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOLD_S = 20.0
"""How long a connection is held that the other end does not close."""
CONNECT_S = 5.0
OVERSIZED_BYTES = 8 << 20
PIECE = bytes(65536)
TICK_S = 0.02
Heard = list[tuple[bytes, bytes]]
"""Requests, each with its answer."""


@dataclass
class Line:
    """One connection to a victim, and what the attacker knows."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    heard: Heard
    """Messages of one kind that honest ends have sent."""
    chance: random.Random

    async def send(self, data: bytes) -> None:
        """Send all of it. Raises OSError."""
        self.writer.write(data)
        await self.writer.drain()

    async def answers(self, limit_s: float = HOLD_S) -> bytes:
        """Return what the other end sends until it closes, or until the time is over."""
        received = b""
        with suppress(OSError, asyncio.TimeoutError):
            async def listen() -> None:
                nonlocal received
                while data := await self.reader.read(4096):
                    received = (received + data)[:65536]
            await asyncio.wait_for(listen(), limit_s)
        return received


async def idle(line: Line) -> bytes:
    """Say nothing."""
    return await line.answers()


async def trickling(line: Line) -> bytes:
    """Send a request that never ends, a byte now and then."""
    listening = asyncio.create_task(line.answers())
    beginning = b"POST /message HTTP/1.1\r\nContent-Length: 300\r\nX-"
    for byte in itertools.chain(beginning, itertools.repeat(97)):
        if listening.done():
            break
        await line.send(bytes([byte]))
        await asyncio.wait([listening], timeout=0.3)
    return await listening


async def oversized(line: Line) -> bytes:
    """Send bodies and heads that are too long, for as long as they are taken."""
    length = line.chance.choice([4097, 1 << 20, (1 << 20) + 1, 10**9, 10**18])
    request = line.chance.choice([b"POST /message", b"PUT /global/0", b"GET /health"])
    head = line.chance.choice([b"%s HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (request, length),
                               b"%s HTTP/1.1\r\nX-Long: " % request, b"A"])
    listening = asyncio.create_task(line.answers())
    await line.send(head)
    for _ in range(OVERSIZED_BYTES // len(PIECE)):
        if listening.done():
            break
        await line.send(PIECE)
        await asyncio.sleep(0)
    return await listening


async def replayed(line: Line) -> bytes:
    """Repeat what an honest client has sent."""
    if line.heard:
        await line.send(line.chance.choice(line.heard)[0])
    return await line.answers()


async def mirrored(line: Line) -> bytes:
    """Say what an honest server has answered, with its own signature, as a request."""
    answered = [pair for pair in line.heard if b"X-Elastic-Signature" in pair[1]]
    if answered:
        request, answer = line.chance.choice(answered)
        _, _, body = answer.partition(b"\r\n\r\n")
        signature = field(answer, b"X-Elastic-Signature")
        kept = [row for row in request.partition(b"\r\n\r\n")[0].split(b"\r\n")
                if not row.lower().startswith((b"x-elastic-signature:", b"content-length:"))]
        rows = [*kept, b"X-Elastic-Signature: " + signature, b"Content-Length: %d" % len(body)]
        await line.send(b"\r\n".join(rows) + b"\r\n\r\n" + body)
    return await line.answers()


async def rubbish(line: Line) -> bytes:
    """Say random bytes, which may begin as a request does."""
    beginning = line.chance.choice([b"", b"POST ", b"\x16\x03\x01", b"GET /health HTTP/1.1\r\n"])
    await line.send(beginning + line.chance.randbytes(line.chance.randrange(1, 5000)) + b"\r\n\r\n")
    return await line.answers()


async def pickled(line: Line) -> bytes:
    """Say what ends the process that unpickles it."""
    body = pickle.dumps(Deadly())
    request = line.chance.choice(
        [b"PUT /worker_addresses/h1:0", b"POST /message", b"PUT /global/0"])
    await line.send(b"%s HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (request, len(body), body))
    return await line.answers()


async def forged(line: Line) -> bytes:
    """Say what a worker might, with a signature of no key."""
    body = json.dumps({"worker": "h1/0", "count": 10**9, "phase": "finished", "generation": 1,
                       "step": 10**9, "hold_s": 1e9, "seen": ""}).encode()
    request = line.chance.choice([b"POST /message", b"PUT /global/at-once-4-0",
                               b"DELETE /global/at-once-4-0", b"GET /health"])
    rows = (b"%s HTTP/1.1" % request, b"Content-Length: %d" % len(body), b"X-Elastic-Worker: h1/0",
            b"X-Elastic-Nonce: 0000000000000000-1", b"X-Elastic-Signature: " + b"0" * 64)
    await line.send(b"\r\n".join(rows) + b"\r\n\r\n" + body)
    return await line.answers()


async def deaf(line: Line) -> bytes:
    """Say honest requests one after the other, and read no answer."""
    for request, _ in line.chance.choices(line.heard, k=200) if line.heard else ():
        await line.send(request)
    await asyncio.sleep(HOLD_S)
    return b""


async def slamming(line: Line) -> bytes:
    """Reset the connection at once, in the middle of a request."""
    await line.send(b"POST /message HTTP/1.1\r\nContent-Le")
    connection = line.writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return b""


async def half_closed(line: Line) -> bytes:
    """Shut the sending half in the middle of a body, and wait."""
    await line.send(b"POST /message HTTP/1.1\r\nContent-Length: 300\r\n\r\n{")
    line.writer.write_eof()
    return await line.answers()


class Deadly:
    """Kills the process that unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (66,)


WAYS: dict[str, Callable[[Line], Awaitable[bytes]]] = {
    way.__name__: way for way in (idle, trickling, oversized, replayed, mirrored, rubbish, pickled,
                                  forged, deaf, slamming, half_closed)}


def field(message: bytes, name: bytes) -> bytes:
    """Return a header's value."""
    rows = message.partition(b"\r\n\r\n")[0].split(b"\r\n")
    return next(row.partition(b":")[2].strip() for row in rows
                if row.lower().startswith(name.lower() + b":"))


UNDERSTOOD = {"driver": (b"POST",), "agent": (b"GET",), "rendezvous": (b"PUT", b"GET", b"DELETE")}
"""Which of the methods that were overheard belong to a role; who has none hears them all."""


def by_kind(heard: Iterable[tuple[bytes, bytes]], methods: tuple[bytes, ...]) -> list[Heard]:
    """Return what was overheard with these methods (b"": all), by its kinds: each is as likely."""
    kinds: dict[tuple[bytes, bool, bool], Heard] = {}
    for pair in heard:
        head, _, body = pair[0].partition(b"\r\n\r\n")
        if head.startswith(methods):
            kinds.setdefault((head.split()[0], not body, b'"line":' in body), []).append(pair)
    return list(kinds.values()) or [[]]


class Attacker:
    """Starts `rate` attacks a second, as long as fewer than `most_open` are open."""

    def __init__(self, plan: dict[str, Any]):
        self.plan, self.chance = plan, random.Random(plan.get("seed", 0))
        heard = [(base64.b64decode(request), base64.b64decode(answer))
                 for request, answer in json.loads(Path(plan["heard"]).read_text())]
        self.kinds = {role: by_kind(heard, methods) for role, methods in UNDERSTOOD.items()}
        self.all_kinds = by_kind(heard, (b"",))
        self.targets: list[tuple[str, int, str]] = []
        self.read_at = 0
        self.open: set[asyncio.Task[None]] = set()
        self.tried, self.connected, self.consents = Counter[str](), Counter[str](), Counter[str]()
        self.errors = Counter[str]()
        """Why no connection came about."""

    async def run(self) -> None:
        """Attack until we are killed."""
        began, due, told_at = time.monotonic(), 0.0, 0.0
        turns = [[way] for way in WAYS] + [list(WAYS)]
        while True:
            now = time.monotonic() - began
            self._look()
            ways = turns[int(now / self.plan["turn_s"]) % len(turns)]
            while due < now * self.plan["rate"]:
                due += 1
                if self.targets and len(self.open) < self.plan["most_open"]:
                    self._start(self.chance.choice(ways))
            if now - told_at > 1.0:
                told_at = now
                self.report()
            await asyncio.sleep(TICK_S)

    def _look(self) -> None:
        changed_at = os.stat(self.plan["targets"]).st_mtime_ns
        if changed_at != self.read_at:
            self.read_at = changed_at
            targets = json.loads(Path(self.plan["targets"]).read_text())
            self.targets = [(address, port, role) for address, port, role in targets]

    def _start(self, way: str) -> None:
        role = self.chance.choice(sorted({role for _, _, role in self.targets}))
        address, port, _ = self.chance.choice([one for one in self.targets if one[2] == role])
        task = asyncio.create_task(self._attack(way, address, port, role))
        self.open.add(task)
        task.add_done_callback(self.open.discard)

    async def _attack(self, way: str, address: str, port: int, role: str) -> None:
        name = f"{role} {way}"
        self.tried[name] += 1
        writer = None
        try:
            source = self.chance.choice(self.plan["sources"])
            opening = asyncio.open_connection(address, port, local_addr=(source, 0))
            reader, writer = await asyncio.wait_for(opening, CONNECT_S)
            self.connected[name] += 1
            kinds = self.kinds.get(role, self.all_kinds)
            line = Line(reader, writer, self.chance.choice(kinds), self.chance)
            received = await asyncio.wait_for(WAYS[way](line), 2 * HOLD_S)
            self.consents[name] += received.startswith((b"HTTP/1.0 200", b"HTTP/1.1 200"))
        except (OSError, asyncio.TimeoutError) as error:
            if not writer:  # else it was refused later, which is what is to be
                self.errors[f"{name} {error!r}"] += 1
        finally:
            if writer:
                writer.transport.abort()

    def report(self) -> None:
        """Write what was done so far."""
        attacks = {name: {"tried": tried, "connected": self.connected[name],
                          "consents": self.consents[name]}
                   for name, tried in sorted(self.tried.items())}
        path = Path(self.plan["report"])
        path.with_suffix(".new").write_text(
            json.dumps({"attacks": attacks, "errors": dict(self.errors.most_common(30))}))
        path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    os.nice(19)  # a real attacker has its own cores; this one shares those of its victims
    asyncio.run(Attacker(json.loads(Path(sys.argv[1]).read_text())).run())

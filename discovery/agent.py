"""The agent on each host: watches it (health.py), answers the poller (client.py), and may start
workers for the driver (starts.py).

health → here → poller (signed JSON over HTTP)
driver (wire/tunnel.py) → here → starts.py

What always holds:
1. An answer is signed with the fleet's key, together with the nonce of its request (wire/seal.py).
   A request without a valid signature, with a used nonce, or for another agent's address is refused
   and counted. No request is parsed before its signature is checked. There is no pickle.
2. Connections are limited in number, bytes and time (wire/gate.py).
3. A host that is being stopped reports that it drains until its workers have left.
4. Only an agent with --starts-workers starts any, and only for a signed request that is new. The
   request has no secret and names no command: those follow when both ends have proved the key.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from elastic_trainer.discovery.client import signed_parts
from elastic_trainer.discovery.health import EXAMINE_S, HUNG_S, Agent
from elastic_trainer.discovery.starts import Starts
from elastic_trainer.wire.gate import Gate, Request, head, refuse
from elastic_trainer.wire.seal import NONCE, SIGNATURE, Kind, is_sealed, seal
from elastic_trainer.wire.tunnel import REQUEST, STARTS_NONE, request_parts

WATCH_S = 1.0
NONCES = 1 << 16
"""The nonces that are remembered (18 hours of one poller's). A repeated older request receives only
the host's health."""
REQUEST_S = 5.0
"""The time limit of a request, and of its answer."""
ANSWERS_AT_ONCE = 16
"""The limit of requests that are answered at a time; there is one poller."""


class StartOptions(NamedTuple):
    """How an agent starts workers."""

    workers_end_with_agent: bool
    ends_with_run: bool


class AgentServer(Gate):
    """Answers each authenticated `GET /health` in a thread; with `starts`, `POST /run`, too."""

    def __init__(self, bind: str, port: int, key: bytes, agent: Agent, nonces: int = NONCES):
        self.key, self.agent = key, agent
        self.starts: Starts | None = None
        self._nonces: deque[str] = deque(maxlen=nonces)
        self._known: set[str] = set()
        self._answering = threading.Semaphore(ANSWERS_AT_ONCE)
        super().__init__(bind, port, self._begin, lambda *_: agent.refuse(), request_s=REQUEST_S)

    def is_new(self, nonce: str) -> bool:
        """Accept a nonce; False if it was used before."""
        if nonce in self._known:
            return False
        if len(self._nonces) == self._nonces.maxlen:
            self._known.discard(self._nonces[0])
        self._nonces.append(nonce)
        self._known.add(nonce)
        return True

    def _begin(self, connection: socket.socket, _: str, request: Request, rest: bytes) -> None:
        """Answer a request if it is signed and new."""
        nonce = request.headers.get(NONCE.lower(), "")
        given = request.headers.get(SIGNATURE.lower(), "")
        here, what = connection.getsockname()[0], f"{request.method} {request.path}"
        if what == "GET /health":
            is_signed = is_sealed(given, self.key, Kind.QUESTION, *signed_parts(nonce, here))
        else:
            is_start = what == REQUEST.decode() and not rest
            is_signed = is_start and is_sealed(given, self.key, Kind.START,
                                               *request_parts(nonce, here))
        if not (is_signed and self.is_new(nonce)):
            self.agent.refuse()
            return refuse(connection, 403)
        if what == "GET /health":
            return self._in_thread(self._answer, connection, nonce)
        if self.starts is None:
            return refuse(connection, STARTS_NONE)
        return self._in_thread(self.starts.start, connection, nonce)

    def _in_thread(self, act: Callable[[socket.socket, str], None], connection: socket.socket,
                   nonce: str) -> None:
        try:
            threading.Thread(target=act, args=(connection, nonce), daemon=True).start()
        except RuntimeError:  # no thread is free
            connection.close()

    def _answer(self, connection: socket.socket, nonce: str) -> None:
        if not self._answering.acquire(blocking=False):
            return connection.close()
        try:
            connection.settimeout(REQUEST_S)
            body = json.dumps(self.agent.health()).encode()
            signature = f"{SIGNATURE}: {seal(self.key, Kind.HEALTH, nonce.encode(), body)}"
            answer = head(200, "OK", len(body), signature, "Connection: close") + body
            connection.sendall(answer)
        except OSError:
            pass  # the poller has gone, or no descriptor is free: it asks again
        finally:
            connection.close()
            self._answering.release()


def serve(bind: str, port: int, key: bytes, agent: Agent,
          announce: Callable[[int], None], *, grace_s: Mapping[int, float], stopped: str,
          starts: StartOptions | None = None) -> bool:
    """Run the agent until a signal of `grace_s`, which drains the host first, for at most its time.

    A machine that shuts down stops its services first. `stopped` is the reason that users read.
    Returns True if the agent has ended with its run (`starts.ends_with_run`).
    """
    server = AgentServer(bind, port, key, agent)
    if starts:
        address = f"{bind}:{server.address[1]}"
        server.starts = Starts(key, address, end_with_agent=starts.workers_end_with_agent)
        agent.count_only_own(address)
    stopping, examined = threading.Event(), threading.Event()

    def stop(number: int) -> None:
        agent.drain(stopped, time.time() + grace_s[number], for_good=False)
        stopping.set()

    def examine() -> None:
        while not stopping.is_set():
            agent.examine()
            examined.set()
            stopping.wait(EXAMINE_S)

    # In a thread: the handler may interrupt this one where it holds a lock that `stop` needs.
    for each in grace_s:
        signal.signal(each, lambda number, _: threading.Thread(
            target=stop, args=(number,), daemon=True).start())
    threading.Thread(target=examine, daemon=True).start()
    examined.wait(HUNG_S)  # no answer is "ready" before the first examination
    threading.Thread(target=server.serve_forever, daemon=True).start()
    announce(server.address[1])
    while not stopping.wait(WATCH_S):
        agent.read_notices()
        agent.last_call()
        if starts and starts.ends_with_run and server.starts and server.starts.is_run_over():
            return True
    while time.time() < agent.deadline() and agent.has_workers():
        agent.last_call()
        time.sleep(WATCH_S)  # until the poller has read it and the workers have left
    if server.starts:
        server.starts.wait()
    server.shutdown()
    return False

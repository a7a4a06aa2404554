"""The poller's request to an agent, and the agent's signed answer.

poller → here → agent.py on a host → here → Health (hosts.py)
"""

from __future__ import annotations

import http.client
import io
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_trainer.discovery.hosts import Health
from elastic_trainer.wire.seal import NONCE, SIGNATURE, Kind, is_sealed, seal

CLOCK_S = 60.0
"""A host whose clock differs by more is sick: S3 refuses its requests from 15 minutes on, and its
event log misleads."""
MAX_BYTES = 1 << 16
MAX_TEXT = 300
"""The characters of an agent's text that the poller keeps."""


class AgentUnreachable(ConnectionError):
    """The agent did not answer, or the server that answered does not have the run's key."""


def ask(address: str, key: bytes, timeout_s: float,
        clock: Callable[[], float] = time.time) -> Health:
    """Return the health of the host whose agent is at host:port. Raises AgentUnreachable."""
    nonce = secrets.token_hex(8)
    try:
        sent_at = clock()
        status, fields, body = get_health(address, key, nonce, timeout_s)
        signature = fields.get(SIGNATURE) or ""
        if status != 200 or not is_sealed(signature, key, Kind.HEALTH, nonce.encode(), body):
            raise AgentUnreachable(f"The server at {address} does not have the run's key, or has "
                                   f"another address behind NAT (status {status}).")
        return health_in(json.loads(body), (sent_at + clock()) / 2)
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, ArithmeticError,
            RecursionError) as error:
        if isinstance(error, AgentUnreachable):
            raise
        raise AgentUnreachable(f"The agent at {address} cannot be reached: {error!r}") from error


def health_in(answer: Any, now: float) -> Health:
    """Read an answer. Raises ValueError, LookupError, TypeError, ArithmeticError."""
    off_s = float(answer["time"]) - now
    is_off = abs(off_s) > CLOCK_S and answer["state"] == "ready"
    return Health(
        state="sick" if is_off else str(answer["state"])[:MAX_TEXT],
        why=f"its clock is {off_s:+.0f} s off" if is_off else str(answer["why"])[:MAX_TEXT],
        deadline=None if answer["deadline"] is None else _checked_time(answer["deadline"]),
        for_good=bool(answer["for_good"]), life=str(answer["life"]), is_clock_off=is_off,
        rebalance=bool(answer["rebalance"]), refused=int(answer["refused"]),
        gpus=None if answer.get("gpus") is None else int(answer["gpus"]),
        facts={"workers": [str(worker["doing"])[:MAX_TEXT] for worker in answer["workers"]],
               "standby": int(answer["standby"])})


def _checked_time(seconds: Any) -> float:
    """Return seconds since 1970. Raises ValueError, TypeError."""
    if not 0 <= float(seconds) < 2.0**33:
        raise ValueError(f"{seconds!r} is no time")
    return float(seconds)


def signed_parts(nonce: str, agent: str) -> tuple[bytes, ...]:
    """Return the parts that a request's signature covers: nonce, agent's IP address, request.

    Without the address other agents would answer a copy of the request: each agent knows only the
    nonces that it has seen itself.
    """
    return nonce.encode(), agent.encode(), b"GET /health"


def get_health(address: str, key: bytes, nonce: str,
               timeout_s: float) -> tuple[int, http.client.HTTPMessage, bytes]:
    """GET /health of host:port: status, header fields and body.

    The timeout is for the whole answer; that of http.client is for each read. Raises OSError,
    HTTPException, ValueError, IndexError.
    """
    host, _, port = address.rpartition(":")
    deadline, received = time.monotonic() + timeout_s, b""
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        parts = signed_parts(nonce, connection.getpeername()[0])
        lines = ["GET /health HTTP/1.0", f"{NONCE}: {nonce}",
                 f"{SIGNATURE}: {seal(key, Kind.QUESTION, *parts)}", "", ""]
        connection.sendall("\r\n".join(lines).encode())
        while len(received) < MAX_BYTES and (piece := connection.recv(MAX_BYTES)):
            received += piece
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"its answer had not ended after {timeout_s} s")
            connection.settimeout(left)
    head, _, body = received.partition(b"\r\n\r\n")
    first, _, fields = head.partition(b"\r\n")
    parsed = http.client.parse_headers(io.BytesIO(fields + b"\r\n\r\n"))
    return int(first.split()[1]), parsed, body


def read_key(path: Path) -> bytes:
    """Return the run's key. Raises ValueError when other users of the machine can read it.

    A kubelet gives a Secret to root and to the pod's own group (fsGroup), with mode 0440.
    """
    seen = os.stat(path)
    is_of_pod = seen.st_uid == 0 and seen.st_gid in os.getgroups()
    if seen.st_mode & (0o037 if is_of_pod else 0o077):
        raise ValueError(f"Other users can read {path}. Run: chmod 600 {path}")
    key = path.read_bytes().strip()
    if len(key) < 32:
        raise ValueError(f"{path} has {len(key)} bytes. Write 64 random hex digits into it: "
                         f"(umask 077; openssl rand -hex 32 > {path})")
    return key

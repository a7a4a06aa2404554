"""Signatures of messages. They cover a message's kind, its two ends and the request it answers.

messages.py (worker ⇄ driver), discovery/client.py and agent.py (poller ⇄ agent), tunnel.py (driver
⇄ agent) → here

What always holds:
1. A signature covers the kind of the message (`Kind`). A request that is sent back to its sender is
   not valid as an answer.
2. An answer's signature covers the nonce of its request. It is not valid for another request.
3. Each worker has its own key, derived from the run's key and the worker's name. The driver has the
   run's key and derives a worker's key from the name in the message. A worker can derive neither
   the run's key nor another worker's key.
4. Each part is signed with its length, so no byte can move from one part to the next.
5. A worker's nonce is accepted once (`Seen`).

What it does not do: encrypt a message, or separate the workers of one user on one machine. They can
read each other's memory (ptrace(2)).

Source: RFC 2104 (HMAC). RFC 5869, 2.3: for one block of output HKDF-Expand is one HMAC of the info
and a byte 1, and the run's key is uniformly random. RFC 4303, 3.4.3: the window of an anti-replay
service.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections import OrderedDict
from enum import Enum

SIGNATURE = "X-Elastic-Signature"
NONCE = "X-Elastic-Nonce"
"""The header fields of all signed messages."""
WINDOW = 64
"""The most messages of one session by which a message may overtake another. Two threads may read
two connections of one session."""
MOST_SESSIONS = 1 << 14
"""The most sessions that are remembered. A worker's process has four."""
FORM_OF_NONCE = re.compile("([0-9a-f]{16})-([0-9]{1,15})")


class Kind(bytes, Enum):
    """A message's sender and receiver. The same bytes have another signature in each kind."""

    REQUEST = b"elastic-trainer 1 worker to driver"
    ANSWER = b"elastic-trainer 1 driver to worker"
    QUESTION = b"elastic-trainer 1 poller to agent"
    HEALTH = b"elastic-trainer 1 agent to poller"
    START = b"elastic-trainer 1 driver to agent"
    DRIVER_END = b"elastic-trainer 1 a channel's end at the driver"
    HOST_END = b"elastic-trainer 1 a channel's end at a host"


def worker_key(run_key: bytes, worker: str) -> bytes:
    """Return the key of one worker."""
    info = b"elastic-trainer 1 key of worker " + worker.encode()
    return hmac.digest(run_key, info + b"\x01", "sha256")


def seal(key: bytes, kind: Kind, *parts: bytes) -> str:
    """Return the signature of a message as hex digits."""
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in (kind.value, *parts))
    return hmac.digest(key, framed, "sha256").hex()


def is_sealed(signature: str, key: bytes, kind: Kind, *parts: bytes) -> bool:
    """True if this is the signature of that message."""
    return hmac.compare_digest(signature.encode(errors="replace"), seal(key, kind, *parts).encode())


class Session:
    """The nonces of one sender: a random name and a counter."""

    def __init__(self) -> None:
        self.name, self.count = secrets.token_hex(8), 0

    def nonce(self) -> str:
        """Return a nonce that was not used before."""
        self.count += 1
        return f"{self.name}-{self.count}"


class Seen:
    """The accepted nonces of messages with a valid signature. For one thread at a time."""

    def __init__(self, most_sessions: int = MOST_SESSIONS):
        self.most_sessions = most_sessions
        self.sessions: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        """(worker, session) → the highest counter, and a bit for each of WINDOW up to it."""

    def is_new(self, worker: str, nonce: str) -> bool:
        """Accept a nonce; False if this worker has used it before."""
        parts = FORM_OF_NONCE.fullmatch(nonce)
        if not parts:
            return False
        session, count = (worker, parts[1]), int(parts[2])
        highest, bits = self.sessions.pop(session, (0, 0))
        behind = highest - count
        is_new = behind < 0 or (behind < WINDOW and not bits >> behind & 1)
        if behind < 0:
            bits = bits << -behind & (1 << WINDOW) - 1 if -behind < WINDOW else 0
            highest, behind = count, 0
        self.sessions[session] = highest, bits | (1 << behind if behind < WINDOW else 0)
        if len(self.sessions) > self.most_sessions:
            self.sessions.popitem(last=False)
        return is_new

"""A port for the doctor of another host, and the attempt to reach one: the way of Gloo's
connections.

doctor on a host (listens) ← here → doctor on another host (reaches)

What always holds:
1. A listener answers with a word of its own and its clock, so another service at the same address
   is not taken for it.
2. A listener ends after LISTEN_S, whatever happens to who started it.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from dataclasses import dataclass

LISTEN_S = 300.0
REACH_S = 5.0
ANSWER_BYTES = 1000


class Listener:
    """Listens on a free port of all interfaces, in a thread."""

    def __init__(self) -> None:
        self.word = secrets.token_hex(8)
        self._socket = socket.create_server(("0.0.0.0", 0))
        self._socket.settimeout(LISTEN_S)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        until = time.monotonic() + LISTEN_S
        while time.monotonic() < until:
            try:
                client, _ = self._socket.accept()
                with client:
                    client.settimeout(REACH_S)
                    client.sendall(json.dumps({"word": self.word, "clock": time.time()}).encode())
            except TimeoutError:
                return
            except OSError:
                if self._socket.fileno() < 0:
                    return  # closed

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True)
class Reached:
    """What came of an attempt: an error, or how far the other clock is from ours."""

    error: str = ""
    offset_s: float | None = None


def reach(address: str, port: int, word: str) -> Reached:
    """Connect to a listener. Network: one connection, at most REACH_S for each of its parts."""
    try:
        with socket.create_connection((address, port), timeout=REACH_S) as connection:
            asked = time.time()
            answer, until = b"", time.monotonic() + REACH_S
            while len(answer) < ANSWER_BYTES and time.monotonic() < until and (
                    piece := connection.recv(ANSWER_BYTES)):  # single bytes do not extend it
                answer += piece
            heard = time.time()
        found = json.loads(answer)
        if found["word"] != word:
            return Reached("another program answers there")
        return Reached("", float(found["clock"]) - (asked + heard) / 2)
    except OSError as error:
        return Reached(error.strerror or str(error) or type(error).__name__)
    except (ValueError, LookupError, TypeError):
        return Reached("another program answers there")

"""What an agent starts for the driver: one process for each signed request (far_side.py).

agent.py (a connection whose request was signed and new) → here → far_side.py → a worker

What always holds:
1. The key reaches that process on its stdin. No secret is on a command line.
2. These processes are in sessions of their own: a signal for the agent's group does not end them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from elastic_trainer.discovery.far_side import FINISHED
from elastic_trainer.host import own
from elastic_trainer.wire.tunnel import SWITCHING

AT_ONCE = 256
"""The most processes of this kind. A host has a worker for each slot, and its orphans' ends."""
REST_S = 3.0
"""The time that they have after the last worker's end, to report its exit to the driver."""
IDLE_S = 5.0
"""A run is over if none of its workers starts for this time after one has ended with exit code 0:
the driver may have begun to start another one."""


class Starts:
    """The processes that this agent has started and that live."""

    def __init__(self, key: bytes, address: str, *, end_with_agent: bool):
        """`address` is this agent's, with its port."""
        self.key, self.address = key, address
        self.life: tuple[int, int] | None = os.pipe() if end_with_agent else None
        """The processes read the end of the one, when this process no longer holds the other."""
        self._lock = threading.Lock()
        self._living: set[subprocess.Popen[bytes]] = set()
        self._finished_at: float | None = None

    def start(self, connection: socket.socket, nonce: str) -> None:
        """Give a connection to a process of its own, and wait for that one's end."""
        process = None
        settings = {"key": self.key.hex(), "nonce": nonce, "agent": self.address}
        with connection, suppress(OSError):  # the driver has gone, or no descriptor is free
            connection.settimeout(REST_S)
            connection.sendall(SWITCHING)
            connection.setblocking(True)
            if process := self._process([connection.fileno(), *(self.life or ())[:1]]):
                assert process.stdin
                process.stdin.write(json.dumps(settings).encode() + b"\n")
                process.stdin.close()
        if process:
            self._await_end(process)

    def _process(self, descriptors: list[int]) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if len(self._living) >= AT_ONCE:
                return None
            process = subprocess.Popen(
                [sys.executable, "-S", "-I", own.HERE, "elastic_trainer.discovery.far_side",
                 *map(str, descriptors)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                pass_fds=descriptors, start_new_session=True)
            self._living.add(process)
            self._finished_at = None
            return process

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._lock:
            self._living.discard(process)
            if code == FINISHED:
                self._finished_at = time.monotonic()

    def is_run_over(self) -> bool:
        """True if a worker has ended with exit code 0, and no other one lives or starts."""
        with self._lock:
            return (self._finished_at is not None and not self._living
                    and time.monotonic() - self._finished_at > IDLE_S)

    def wait(self) -> None:
        """Wait until all have reported their ends, for at most REST_S."""
        deadline = time.monotonic() + REST_S
        for process in list(self._living):
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

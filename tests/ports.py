"""Ports for servers that tests ask before they listen, and after they are gone."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

FIRST, LAST = 20000, 32000
"""Below those that the kernel gives to who asks for any (from 32768 on)."""


def free_port() -> int:
    """Return a port that is free, and that the kernel gives to no process that asks for any port.

    Else a listener of Gloo's, in a cluster beside this test, may be given the port that we ask: it
    takes whoever connects first for its peer, and that cluster's init fails (seen about once in 600
    inits).
    """
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", secrets.randbelow(LAST - FIRST) + FIRST))
            return int(probe.getsockname()[1])

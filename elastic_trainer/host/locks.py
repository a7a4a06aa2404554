"""Locks between the processes of a machine, on open files: they end with their process, also when
it is killed (flock(2)).

supervisor, event log, set-up, index, cache, local S3 server → here → the kernel

The package filelock is not used: drivers inherit the descriptor of the supervisor's lock, `private`
decides the mode of a lock's file in a shared folder, and the set-up runs before it has checked what
is installed.
"""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Callable

POLL_S = 0.05


def take(descriptor: int, limit_s: float = math.inf) -> bool:
    """Wait for the lock of an open file, for `limit_s` at most; return whether it was taken."""
    if limit_s == math.inf:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return True
    latest = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= latest:
                return False
            time.sleep(POLL_S)


def take_or_tell(descriptor: int, patience_s: float, tell: Callable[[], None]) -> None:
    """Wait for the lock of an open file; call `tell` once after `patience_s`."""
    if not take(descriptor, patience_s):
        tell()
        take(descriptor)

"""The processor priority of a thread. Linux: each thread has a niceness of its own."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

LEAST, LESS = 19, 10
"""Weights of 1.5 % and 11 % of a normal thread's (sched(7))."""


def yield_processor(niceness: int = LEAST) -> None:
    """Give the calling thread less processor time than others; LEAST: only what others leave.

    Where the kernel groups threads by session (sched(7), "autogroup"), the niceness holds among
    the threads of this process. It does not hold against the other workers of the host.
    """
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)

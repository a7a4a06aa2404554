"""The processor priority of a thread. Linux: each thread has a niceness of its own."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


def yield_processor() -> None:
    """Give the calling thread only the processor time that other threads leave.

    Where the kernel groups threads by session (sched(7), "autogroup"), the niceness holds among
    the threads of this process. It does not hold against the other workers of the host.
    """
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)

"""The terminal of a run: that from which the launcher was started, by its path.

launcher's stdin → here → the environment of local workers → training/debugger.py

A worker has a session of its own, so it has no /dev/tty, and its stdin is /dev/null. It opens the
launcher's terminal by the path. The kernel lets a process of another session read it: the rules of
job control hold for a process's own controlling terminal (drivers/tty/tty_jobctrl.c,
__tty_check_change).
"""

from __future__ import annotations

import os
from contextlib import suppress

VARIABLE = "ELASTIC_TRAINER_TERMINAL"


def terminal_of(descriptor: int) -> str:
    """Return the path of the terminal behind a descriptor; "": it is none, or this process runs in
    the background, where a shell reads the terminal."""
    with suppress(OSError):
        if os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp():
            return os.ttyname(descriptor)
    return ""

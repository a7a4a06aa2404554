"""Wait for what a test has begun: with a deadline, and without a sleep that hopes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

START_S = 180.0


def wait_for(what: str, seen: Callable[[], Any], deadline_s: float = START_S,
             story: Callable[[], object] = lambda: "") -> Any:
    """Wait until `seen()` is true, and return it. An error of a file or a command means not yet.
    `story()` is told when the time is over."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            if found := seen():
                return found
        except (OSError, subprocess.CalledProcessError):
            pass
        assert time.monotonic() < deadline, f"no {what} in {deadline_s:.0f} s; {story()}"
        time.sleep(0.01)


def until(seen: Callable[[], Any]) -> Any:
    """Wait until `seen()` is true, and return it."""
    return wait_for("sign of it", seen)

"""What every bench runs in: it has a time limit, and all that it has started ends with it.

    if __name__ == "__main__":
        sys.exit(bounded(main))

The bench is a child of this process, which adopts whatever a child of the bench leaves behind
(PR_SET_CHILD_SUBREAPER). So a driver or a server in a session of its own is found, too.

What always holds:
1. When the bench ends, by itself, by SIGTERM or SIGINT, or at its limit, its `finally` blocks have
   GRACE_S; then all processes below are killed.
2. When this process is killed by SIGKILL, the kernel sends the bench a SIGTERM (PR_SET_PDEATHSIG),
   and its `finally` blocks end what it has started.

A bench with an option on its command line (`--faults 300`) has no limit: who gives one knows why.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

LIMIT_S, GRACE_S = 600.0, 20.0
TIMED_OUT = 124
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36


class Ended(BaseException):
    """A signal has come."""


def bounded(main: Callable[[], Any], limit_s: float = LIMIT_S) -> int:
    """Run a bench in a process of its own; returns its exit code, 124 at the limit."""
    parent = os.getpid()
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    if not (bench := os.fork()):
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        _run(main)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, _end)
    if not any(word.startswith("--") for word in sys.argv[1:]):
        signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(bench, 0)[1])
    except Ended as ended:
        code = TIMED_OUT if ended.args[0] == signal.SIGALRM else 128 + int(ended.args[0])
        print(f"the bench is ended by {signal.Signals(ended.args[0]).name}"
              + f" after its limit of {limit_s:.0f} s" * (code == TIMED_OUT), file=sys.stderr)
        _let_end(bench)
    while below := _below(parent):
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
    return code


def _run(main: Callable[[], Any]) -> None:
    """Be the bench."""
    signal.signal(signal.SIGTERM, _end)
    code = 1
    try:
        main()
        code = 0
    except Ended:
        code = 128 + signal.SIGTERM
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise Ended(number)


def _let_end(bench: int) -> None:
    """Let the bench run its `finally` blocks."""
    with suppress(ProcessLookupError):
        os.kill(bench, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and bench in _below(os.getpid()):
        _reap()
        time.sleep(0.05)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _below(pid: int) -> list[int]:
    """Return the processes that a process, or one of these, has started."""
    found = list[int]()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_below(child)]
    return found

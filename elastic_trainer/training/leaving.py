"""How the user's loop is left before its end: by an exception, or by `break` or `return`.

the user's `for step in trainer` → here → driver, event log, exit code

What always holds:
1. An exception that nothing catches ends the run on all workers with its traceback. The interpreter
   hands it to `sys.excepthook` (in a thread: `threading.excepthook`) after it has left the loop,
   within milliseconds.
2. An exception that the script catches and does not raise again, and sys.exit() in the loop, end
   the run too: after CAUGHT_S, or at the end of the process. The other workers cannot go on without
   this one.
3. After `break` or `return` the run ends on all workers, is not finished, and can be resumed. A
   line on stderr reports it at once.

How an exception is distinguished from `break` and `return`: `for` drops its iterator in all cases.
For `break` and `return` the instruction that drops it is POP_TOP (POP_ITER since Python 3.14). An
exception drops it at the instruction that raised. The exception itself cannot be seen at that
moment: CPython hides it while a generator is closed (Objects/genobject.c, _PyGen_Finalize).

What it does not do: catch anything. Under pytest, or in a notebook, an exception goes where it
always goes.
"""

from __future__ import annotations

import atexit
import dis
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from elastic_trainer.config import EXIT_USER_ERROR
from elastic_trainer.training.worker import Worker

CAUGHT_S = 2.0
"""The number of seconds in which an exception that has left the loop must leave the script."""
DROPS = ("POP_TOP", "POP_ITER")
"""The instructions with which `break` and `return` drop the iterator of a `for`."""


class Leaving:
    """Watches one pass of the user's loop, and ends the run if the loop is left early."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._state = (
            "outside"  # outside, inside, left (by an exception that is not yet known), over
        )
        self._shows = sys.excepthook
        self._shows_in_thread = threading.excepthook
        self._timer: threading.Timer | None = None

    def __repr__(self) -> str:
        return f"Leaving({self._state})"

    def enter(self) -> None:
        """Begin to watch: the loop begins."""
        before = getattr(sys.excepthook, "__self__", None)
        if isinstance(before, Leaving) and before._state == "left":
            before.settle()  # the script has caught what left that loop
        self._state = "inside"
        self._shows, sys.excepthook = sys.excepthook, self._hear
        self._shows_in_thread, threading.excepthook = threading.excepthook, self._hear_in_thread
        atexit.register(self.settle)

    def finish(self) -> None:
        """Stop watching: the loop has ended by itself, or the worker has reported its own
        failure."""
        self._state = "over"
        if self._timer:
            self._timer.cancel()
        atexit.unregister(self.settle)
        if sys.excepthook == self._hear:
            sys.excepthook = self._shows
        if threading.excepthook == self._hear_in_thread:
            threading.excepthook = self._shows_in_thread

    def leave(self, frame: FrameType | None) -> None:
        """Note that the loop, in this frame, has dropped its iterator before the end."""
        if self._state != "inside":
            return
        self._worker.drop_step()
        if frame is None or not is_broken_off(frame):
            self._state = "left"
            if self._worker.launch.driver:
                self._timer = threading.Timer(CAUGHT_S, self.settle)
                self._timer.daemon = True
                self._timer.start()
            return
        self.finish()
        self._worker.leave("by break or return")

    def settle(self) -> None:
        """End the run: the loop was left, and no exception has come out of the script."""
        if self._state in ("inside", "left"):
            self.finish()
            if self._worker.has_run:
                self._worker.leave("by an exception that the script has caught, or by sys.exit()")

    def _hear(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._fail(error)
        self._shows(kind, error, trace)
        if self._worker.launch.driver and not isinstance(error, KeyboardInterrupt):
            raise SystemExit(EXIT_USER_ERROR)

    def _hear_in_thread(self, arguments: Any) -> None:
        if arguments.exc_value is not None:
            self._fail(arguments.exc_value)
        self._shows_in_thread(arguments)

    def _fail(self, error: BaseException) -> None:
        is_ours = self._state in ("inside", "left") and not isinstance(error, KeyboardInterrupt)
        self.finish()
        if is_ours:
            self._worker.report(error)


def is_broken_off(frame: FrameType) -> bool:
    """Return whether a frame that drops the iterator of its loop does so by `break` or `return`."""
    return 0 <= frame.f_lasti and dis.opname[frame.f_code.co_code[frame.f_lasti]] in DROPS

"""How the user's loop is left before its end: by an exception, or by `break` or `return`.

the user's `for step in trainer` → here → checkpoint, driver, event log, exit code

What always holds:
1. An exception that nothing catches ends the run on all workers with its traceback. The interpreter
   hands it to `sys.excepthook` (in a thread: `threading.excepthook`) after it has left the loop,
   within milliseconds.
2. An exception that the script catches and does not raise again, and sys.exit() in the loop, end
   the run too: after CAUGHT_S, or at the end of the process. The other workers cannot go on without
   this one.
3. After `break` or `return` the run stops on all workers, with a checkpoint of the last finished
   step. The same command goes on with it. A line on stderr reports it at once.
4. What the worker itself has raised was reported by the worker, and is not reported here.

How an exception is distinguished from `break` and `return`: `for` drops its iterator in all cases.
For `break` and `return` the instruction that drops it is POP_TOP (POP_ITER since Python 3.14). An
exception drops it at the instruction that raised. The exception itself cannot be seen at that
moment: CPython hides it while a generator is closed (Objects/genobject.c, _PyGen_Finalize). The
loop may have iterators around the trainer. A generator, such as tqdm, is looked through. Where
islice or zip ends, no loop is left, so this counts as (2).

What it does not do: catch anything. Under pytest, or in a notebook, an exception goes where it
always goes.
"""

from __future__ import annotations

import atexit
import dis
import inspect
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from elastic_trainer.config import EXIT_USER_ERROR
from elastic_trainer.training.worker import Worker

CAUGHT_S = 2.0
"""The number of seconds in which an exception that has left the loop must leave the script."""
DROPS = ("POP_TOP", "POP_ITER")
"""The instructions with which `break` and `return` drop the iterator of a `for`."""
BREAK = "by break or return"
CAUGHT = ("by an exception that the script has caught, by sys.exit(), or by the end of an iterator "
          "around it, such as islice() or zip(),")


class LoopExit:
    """Watches one pass of the user's loop, and ends the run if the loop is left early.

    `end_with` ends the run on all workers with an exception of the user's code.
    """

    def __init__(self, worker: Worker, end_with: Callable[[BaseException], None]):
        self._worker, self._end_with = worker, end_with
        # outside, inside, left (by an exception that is not yet known), over
        self._state = "outside"
        self._pid, self._thread = os.getpid(), threading.current_thread()
        """Those of the loop. A forked child has copies of the hooks, and no part in the run."""
        self._shows = sys.excepthook
        self._shows_in_thread = threading.excepthook
        self._timer: threading.Timer | None = None

    def __repr__(self) -> str:
        return f"LoopExit({self._state})"

    def enter(self) -> None:
        before = getattr(sys.excepthook, "__self__", None)
        if isinstance(before, LoopExit) and before._state == "left":
            before.settle()  # the script has caught what left that loop
        self._state = "inside"
        self._pid, self._thread = os.getpid(), threading.current_thread()
        self._shows, sys.excepthook = sys.excepthook, self._take
        self._shows_in_thread, threading.excepthook = threading.excepthook, self._take_in_thread
        atexit.register(self.settle)

    def finish(self) -> None:
        """Stop watching: the loop has ended by itself, or the worker has reported its own
        failure."""
        self._state = "over"
        if self._timer:
            self._timer.cancel()
        atexit.unregister(self.settle)
        if sys.excepthook == self._take:
            sys.excepthook = self._shows
        if threading.excepthook == self._take_in_thread:
            threading.excepthook = self._shows_in_thread

    def leave(self, frame: FrameType | None) -> None:
        """Note that the loop, in this frame, has dropped its iterator before the end."""
        if not self._is_open():
            return
        is_break = is_broken_off(frame)
        if is_break or not self._worker.must_vote:  # there the vote follows, with this step
            self._worker.drop_step()
        if is_break:
            self.finish()
            self._worker.leave(BREAK, saves=True)
            return
        self._state = "left"
        if self._worker.launch.driver:
            self._timer = threading.Timer(CAUGHT_S, self.settle)
            self._timer.daemon = True
            self._timer.start()

    def settle(self) -> None:
        """End the run: the loop was left, and no exception has come out of the script."""
        if not self._is_open():
            return
        self.finish()
        if error := raised_in(self._thread):
            self._end_with(error)  # it is on its way: a `finally` of the script takes its time
        elif self._worker.has_run:
            self._worker.leave(CAUGHT)

    def _is_open(self) -> bool:
        return self._state in ("inside", "left") and os.getpid() == self._pid

    def _take(self, kind: type[BaseException], error: BaseException,
              trace: TracebackType | None) -> None:
        self._fail(error)
        self._shows(kind, error, trace)
        if self._worker.launch.driver and not isinstance(error, KeyboardInterrupt):
            raise SystemExit(EXIT_USER_ERROR)

    def _take_in_thread(self, arguments: Any) -> None:
        if arguments.exc_value is not None and arguments.thread is self._thread:
            self._fail(arguments.exc_value)
        self._shows_in_thread(arguments)

    def _fail(self, error: BaseException) -> None:
        is_ours = self._is_open() and not isinstance(error, KeyboardInterrupt)
        self.finish()
        if is_ours:
            self._end_with(error)


def is_broken_off(frame: FrameType | None) -> bool:
    """Return whether a frame that drops the iterator of its loop does so by `break` or `return`.

    A generator between the loop and the trainer drops it where it was itself dropped.
    """
    while frame is not None:
        if dis.opname[frame.f_code.co_code[max(0, frame.f_lasti)]] in DROPS:
            return True
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return False
        frame = frame.f_back
    return False


def raised_in(thread: threading.Thread) -> BaseException | None:
    """Return the exception that a thread handles now, in an `except` or a `finally`."""
    found: Any = sys._current_exceptions().get(thread.ident or 0)
    error = found[1] if isinstance(found, tuple) else found  # a tuple until Python 3.11
    return error if isinstance(error, BaseException) else None

"""What ends a worker of a script in Horovod's own style before the run has ended.

exception of the script, or of our membership → here → driver, event log, exit code

What always holds:
1. The script's own exception ends the run on all workers, at once, with its traceback: one that
   leaves the decorated function, and one that nothing catches outside of it.
2. It is reported once.
3. A collective that Horovod refuses is a mistake of the script. Horovod raises the same error for
   it as for a lost worker, and its own loop resets for ever.
"""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from horovod.common.exceptions import HorovodInternalError

from elastic_trainer.config import EXIT_USER_ERROR, Launch
from elastic_trainer.events.log import Events
from elastic_trainer.training.failures import (
    fault_of_machine,
    leave_as_dead,
    leave_if_sent,
    leave_unsaved,
)
from elastic_trainer.world.place import MAX_ERROR_CHARACTERS, Driver

REFUSALS = ("Mismatched ", "Invalid ", "No Adasum operation", "Requested to allreduce, allgather",
            "Duplicate tensor name", "Reducescatter is not supported")
"""How Horovod's errors begin that are of the script: horovod/common/controller.cc, operations.cc
and common.h, 0.28.1. All others are of the network."""


def mistake_of(error: BaseException) -> str:
    """Return what is wrong with a collective of the script; "" if an error is of the world."""
    text = str(error)
    if not isinstance(error, HorovodInternalError) or not text.startswith(REFUSALS):
        return ""
    return (f"Horovod refuses a collective of the script: {text} Call the same collectives on all "
            f"workers, with the same names, shapes and types.")


class Watch:
    """Watches the script from hvd.init() to the end of the run."""

    def __init__(self, launch: Launch, driver: Driver, events: Events):
        self._launch, self._driver, self._events = launch, driver, events
        self._is_on = True
        self._shows, sys.excepthook = sys.excepthook, self._handle_exception

    def end(self) -> None:
        self._is_on = False
        sys.excepthook = self._shows

    def fail(self, error: BaseException, commits: int, size: int) -> None:
        """End this worker by SystemExit, or as a dead one, or report the script's exception, which
        the caller raises."""
        if isinstance(error, KeyboardInterrupt) or not self._is_on:
            return
        self._is_on = False
        leave_if_sent(error, self._events)
        if leave_unsaved(error, self._driver, self._launch, self._events):
            return
        text = "".join(traceback.format_exception(error))
        if kind := fault_of_machine(error, self._driver, size):
            leave_as_dead(kind, text, commits, 0, launch=self._launch, driver=self._driver,
                          events=self._events)
        self._events.emit("worker.failed", error=text[-MAX_ERROR_CHARACTERS:])
        self._driver.report(error=text)
        self._events.flush()

    def _handle_exception(self, kind: type[BaseException], error: BaseException,
              trace: TracebackType | None) -> None:
        self.fail(error, 0, 1)  # outside of the training no fault of the machine is looked for
        self._shows(kind, error, trace)
        if not isinstance(error, KeyboardInterrupt):
            raise SystemExit(EXIT_USER_ERROR)

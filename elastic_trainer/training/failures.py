"""How a worker ends: by the user's exception, by a peer's, or by a fault of its machine.

exception → here → the vote, the driver, the exit code

A worker whose replica differs leaves at once, too.

The user's own exception ends the run on all ranks, with its traceback, and is never retried. After
a fault of the machine only this worker leaves: the others do its part of the step again.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from elastic_trainer.config import EXIT_DIFFERS, EXIT_MACHINE, EXIT_USER_ERROR, ConfigError, Launch
from elastic_trainer.events.log import Events
from elastic_trainer.host.tracebacks import frames_of_user
from elastic_trainer.training.machine_fault import machine_fault
from elastic_trainer.wire.heartbeat import MachineFault
from elastic_trainer.world.place import MAX_ERROR_CHARACTERS, Driver

FRAMES = (" ", "Traceback (most recent call last)", "The above exception was the direct cause of",
          "During handling of the above exception")
"""How the lines of a traceback begin that are not its exception's."""


class PeerFailed(RuntimeError):
    """The user's code raised on another rank; the text is that rank's traceback."""


class UserExited(RuntimeError):
    """The user's code called sys.exit() (the cause), which would end one worker as if its host had
    died."""


def fault_of_machine(error: BaseException, driver: Driver, size: int) -> str:
    """Return which part of this machine has failed, if an exception shows that and other workers
    can go on; else ""."""
    is_others = isinstance(error, (PeerFailed, ConfigError))
    if is_others or size == 1 or not driver.is_mended:
        return ""
    return machine_fault(error)


def leave_as_dead(
    kind: str, text: str, step: int, microbatch: int, *, launch: Launch, driver: Driver,
    events: Events
) -> NoReturn:
    """Report that this machine has failed, and end this process as a death would: nothing of the
    step was applied.

    Nothing else is tried on this machine: a disk that fails may delay an orderly end by minutes.
    """
    with suppress(OSError):
        print(
            f"elastic-trainer: {kind} on {launch.host} in step {step}: this worker leaves, and "
            f"the others do the step again.\n{text}",
            file=sys.stderr,
            flush=True,
        )
    events.emit(
        "worker.machine_failed",
        host=launch.host,
        error=kind,
        step=step,
        microbatch=microbatch,
        text=text[-MAX_ERROR_CHARACTERS:],
    )
    events.flush()
    driver.report(machine=MachineFault(step=step, microbatch=microbatch, kind=kind, text=text))
    os._exit(EXIT_MACHINE)


def leave_as_odd(error: Exception, driver: Driver, events: Events) -> NoReturn:
    """End this process, which holds other bits than most of its world, at once.

    The driver learns it by a message: the others stand still until this worker is gone, and an
    interpreter may end slowly. No code of the user's runs any more: it would save wrong weights.
    """
    with suppress(OSError):
        print(f"elastic-trainer: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    events.flush()
    driver.report(differs=True)  # it kills this process
    os._exit(EXIT_DIFFERS)


def text_of(error: BaseException) -> str:
    """Return an error with its traceback: of a mistake of the user, with the user's frames."""
    if not isinstance(error, ConfigError):
        return "".join(traceback.format_exception(error))
    shown = traceback.TracebackException(type(error), error, frames_of_user(error))
    shown.__cause__ = shown.__context__ = None
    return "".join(shown.format())


def without_frames(text: str) -> str:
    """Return another worker's error without its traceback, which that worker has printed."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(FRAMES)]
    return "\n".join(lines) or text


def end_as_user_error() -> None:
    """Let an uncaught exception end this process with the exit code of a user's error, after its
    traceback."""
    show = sys.excepthook

    def show_and_exit(*exception: Any) -> None:
        show(*exception)
        raise SystemExit(EXIT_USER_ERROR)

    sys.excepthook = show_and_exit

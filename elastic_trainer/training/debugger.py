"""`breakpoint()` in a launched worker: pdb on the launcher's terminal, one worker at a time.

the user's breakpoint() → here → the terminal of the run (host/terminal.py)

What always holds:
1. A worker that stands in pdb holds the terminal until `c` or `q`. Others that come to a breakpoint
   wait for it (flock on the terminal's device).
2. Without a terminal breakpoint() raises, with the remedy. Its usual debugger would read the end of
   stdin, and end the run with bdb.BdbQuit.
3. A standby that rehearses does not stop.
4. PYTHONBREAKPOINT and a hook of the user's own stay as they are.
"""

from __future__ import annotations

import fcntl
import os
import sys
from bdb import BdbQuit
from types import FrameType
from typing import Any

from elastic_trainer.config import Launch
from elastic_trainer.data.batches import add_note
from elastic_trainer.world.standby import is_standby

REMEDY = ("Start the run from a terminal on this host, debug `python train.py` without the "
          "launcher, or use a debugger that listens on a port "
          "(PYTHONBREAKPOINT=remote_pdb.set_trace, or debugpy.listen).")


def offer() -> None:
    """Let breakpoint() of a launched worker use the launcher's terminal."""
    is_usual = sys.breakpointhook is sys.__breakpointhook__ and not os.environ.get(
        "PYTHONBREAKPOINT")
    if is_usual and (is_standby() or Launch.from_environment().horovod):
        sys.breakpointhook = _break


def advise(error: BaseException) -> None:
    if isinstance(error, BdbQuit):
        add_note(error, "pdb was quit, or has read the end of stdin, which a launched worker has "
                        "from the beginning. breakpoint() there opens the launcher's terminal; "
                        "pdb.set_trace() does not.")


def _break(*_: Any, **__: Any) -> None:
    if is_standby():
        return
    launch = Launch.from_environment()
    if not launch.terminal:
        raise RuntimeError(f"breakpoint() needs a terminal, and this worker has none. {REMEDY}")
    from pdb import Pdb  # here: a run without a breakpoint does not load it

    class Debugger(Pdb):
        """pdb that holds a terminal while a person uses it."""

        def interaction(self, frame: FrameType | None, traceback: Any) -> None:
            fcntl.flock(reads, fcntl.LOCK_EX)  # again has no effect
            super().interaction(frame, traceback)

        def set_continue(self) -> None:
            super().set_continue()
            fcntl.flock(reads, fcntl.LOCK_UN)

        def set_quit(self) -> None:
            super().set_quit()
            fcntl.flock(reads, fcntl.LOCK_UN)

    try:
        reads, writes = (open(launch.terminal, mode, opener=_without_control) for mode in "rw")
    except OSError as error:
        raise RuntimeError(f"breakpoint() cannot open the terminal {launch.terminal}: {error}. "
                           f"{REMEDY}") from error
    fcntl.flock(reads, fcntl.LOCK_EX)
    print(f"elastic-trainer: breakpoint() in the worker {launch.worker or launch.host}. The other "
          f"workers wait for it. `c` continues, `q` ends the run.", file=writes, flush=True)
    Debugger(stdin=reads, stdout=writes, nosigint=True).set_trace(sys._getframe().f_back)


def _without_control(path: str, flags: int) -> int:
    """Open a terminal that does not become this session's own."""
    return os.open(path, flags | os.O_NOCTTY)

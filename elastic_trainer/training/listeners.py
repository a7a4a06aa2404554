"""Call the user's listeners with a worker's events, and let no exception of theirs end the run.

events → here → the user's listener (train(listeners=…))

What always holds:
1. A listener that raises is called again at the next event.
2. Its exception is logged with its traceback, on stderr and as `worker.listener_failed`: the 1st,
   10th, 100th … time. So a listener that always fails does not fill the event log.
3. These exceptions pass: those of a broken world (a listener may use Horovod's
   collectives), and what is no `Exception` (sys.exit(), Ctrl-C).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from horovod.common.exceptions import HorovodInternalError

from elastic_trainer.events.log import Events
from elastic_trainer.world.collectives import PeersLost

Listener = Callable[[str, dict[str, Any]], None]


class Guarded:
    """A listener of the user's, and how often it has raised."""

    def __init__(self, listener: Listener, events: Events):
        self.listener, self.events = listener, events
        self.failures = 0

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        try:
            self.listener(event, facts)
        except (HorovodInternalError, PeersLost):
            raise
        except Exception:
            self.failures += 1
            if str(self.failures).rstrip("0") == "1":
                self._log(event, traceback.format_exc())

    def _log(self, event: str, error: str) -> None:
        name = getattr(self.listener, "__qualname__", type(self.listener).__qualname__)
        print(
            f"elastic-trainer: the listener {name} raised at {event} (failure {self.failures}). "
            f"The run goes on, and the listener is called again.\n{error}",
            file=sys.stderr)
        self.events.emit("worker.listener_failed",
                         listener=name,
                         heard=event,
                         failures=self.failures,
                         error=error)

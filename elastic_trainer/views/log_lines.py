"""The event log of a run as JSON lines on stdout, as log collectors read the output of a container.

    elastic-trainer watch runs/NAME --json
    elastic-trainer watch runs/NAME --json --kubernetes-events

event log → here → stdout, and kubernetes_events.py

It begins with the first event after the start of this process, because the events before were
printed by the process before it. On a busy machine Python takes seconds until it is here, and the
run, whose container starts right after this one, may have begun meanwhile. It goes on until SIGTERM
or Ctrl-C, because a run that has ended can be resumed. Then it still prints what is in the log.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import IO

import psutil

from elastic_trainer.events.schema import parse
from elastic_trainer.events.segments import Reader
from elastic_trainer.views.kubernetes_events import Teller

POLL_S = 0.5


def print_lines(run_dir: Path, output: IO[bytes], teller: Teller | None = None) -> None:
    """Print each event since this process began as its line, and tell Kubernetes what an operator
    must see."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # In a thread: the handler may interrupt `wait` where that holds a lock that `set` needs.
        signal.signal(number, lambda *_: threading.Thread(target=stopping.set).start())
    log, is_last = Reader.since(run_dir, psutil.Process().create_time()), False
    while True:
        for line in log.lines():
            if event := parse(line):
                output.write(line)
                if teller:
                    teller.take(event)
        output.flush()
        if teller:
            teller.send()
        if is_last:
            return
        is_last = stopping.wait(POLL_S)

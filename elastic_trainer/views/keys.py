"""The keys of the terminal view: `q` quits, `k` lists the workers of a local run and kills one.

keyboard → here → watch

What always holds:
1. The terminal is as it was before, however the view ends.
2. A worker is killed only after a question, and only if the process is provably a worker of this
   run. The kernel's handle of the process is taken before the proof, so the pid cannot be reused
   between the proof and the signal.
3. A view in the background, or one whose input is no terminal, takes no keys.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastic_trainer.host.processes import is_worker
from elastic_trainer.views.status import LiveWorker

PAGE = 9
"""Workers that are listed at a time: one for each digit."""
HELP = "k: kill a worker    q: quit"

Choice = tuple[str, LiveWorker]


@dataclass(frozen=True)
class Dialog:
    """What the keys have asked for so far."""

    choices: tuple[Choice, ...] = ()
    """The workers that are listed."""
    page: int = 0
    chosen: Choice | None = None
    """The worker that the question is about."""
    said: str = ""
    kills: Choice | None = None
    """The worker to be killed now: the question was answered with yes."""
    quits: bool = False

    def lines(self) -> list[str]:
        """Return what is shown below the view."""
        if self.chosen:
            name, worker = self.chosen
            return [f"Kill worker {worker.pid} ({name}) on host {worker.host}?    y: yes    "
                    f"other keys: no"]
        if self.choices:
            shown = [f"{digit}: worker {worker.pid} on host {worker.host}"
                     for digit, (_, worker) in enumerate(self.listed(), 1)]
            more = "    m: more" if len(self.choices) > PAGE else ""
            return [*shown, f"1-{len(shown)}: choose{more}    other keys: back"]
        return [*([self.said] if self.said else []), HELP]

    def listed(self) -> tuple[Choice, ...]:
        """Return the workers of the present page."""
        return self.choices[self.page * PAGE:(self.page + 1) * PAGE]


def pressed(dialog: Dialog, key: str, workers: Mapping[str, LiveWorker]) -> Dialog:
    """Return the dialog after a key."""
    if dialog.chosen:
        return Dialog(kills=dialog.chosen) if key == "y" else Dialog(said="Nothing was killed.")
    if dialog.choices:
        if key == "m":
            pages = -(-len(dialog.choices) // PAGE)
            return Dialog(choices=dialog.choices, page=(dialog.page + 1) % pages)
        if key in "123456789" and int(key) <= len(dialog.listed()):
            return Dialog(chosen=dialog.listed()[int(key) - 1])
        return Dialog(quits=key == "q")
    if key == "k":
        local = tuple((name, it) for name, it in workers.items() if not it.over_ssh)
        return Dialog(choices=local) if local else Dialog(said="No worker runs on this machine.")
    return Dialog(quits=True) if key == "q" else dialog


def kill(choice: Choice, run_dir: Path) -> str:
    """Kill a worker of a run on this machine, and return what was done in a sentence."""
    name, worker = choice
    try:
        handle = os.pidfd_open(worker.pid)
    except OSError as error:
        return f"Process {worker.pid} was not killed: {error.strerror}."
    try:
        folders = {run_dir.absolute(), run_dir.resolve()}
        if not any(is_worker(worker.pid, name, folder) for folder in folders):
            return f"Process {worker.pid} was not killed: it is not a worker of this run."
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError as error:
        return f"Process {worker.pid} was not killed: {error.strerror}."
    finally:
        os.close(handle)
    return f"Worker {worker.pid} was killed."


def can_read() -> bool:
    """True if the input is a terminal, and this process is in its foreground."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


@contextmanager
def single_keys() -> Iterator[int]:
    """Take keys without Enter and without an echo, within the block. Yields the descriptor."""
    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor, termios.TCSANOW)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)


def read(descriptor: int, timeout_s: float) -> str:
    """Return the keys that are pressed within a time. Raises EOFError."""
    if not select.select([descriptor], [], [], timeout_s)[0]:
        return ""
    keys = os.read(descriptor, 64)
    if not keys:
        raise EOFError
    return keys.decode("ascii", "ignore")

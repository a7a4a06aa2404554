"""Where a worker died of a signal: read from what faulthandler has written to its stderr.

worker's stderr → here → driver, membership (if all workers die in one place, no machine is faulty)

Source: Python's `faulthandler` (Python/traceback.c, `_Py_DumpTracebackThreads`): a line that names
the signal, then a block for each thread, newest frame first. The block of the thread that died
begins with "Current thread"; there is none when a thread without Python died, as Horovod's and
Gloo's are. The main thread is the last block: it is the oldest.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field

FAULTHANDLER = {"PYTHONFAULTHANDLER": "1"}
"""The default of a worker's environment: faulthandler is on from the first import."""
LINES = 400
"""The number of its last lines that are read: a process may have many threads."""
FRAMES = 3
SAME_CRASHES = 2
"""The run is over when this many workers have died in each slot before the first step, all of one
signal in one place."""
FATAL = "Fatal Python error: "
FAULTS = frozenset({signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL})
"""The signals that faulthandler reports (Modules/faulthandler.c)."""


def place_of(stderr: Iterable[str]) -> str:
    """Return the newest frames of the thread that died, from the end of stderr; "": unknown."""
    lines = list(stderr)
    # Not only at a begin: an unfinished progress bar, or a prompt, may stand before it.
    begins = [number for number, line in enumerate(lines) if FATAL in line]
    if not begins:
        return ""
    threads: list[tuple[bool, list[str]]] = []
    for line in lines[begins[-1] :]:
        if re.match(r"(Current t|T)hread 0x[0-9a-f]+ ", line):
            threads.append((line.startswith("Current"), []))
        elif threads and (frame := re.match(r'  File "(.*)", line (\d+) in (.*)', line)):
            threads[-1][1].append(f"{frame[3]} ({frame[1]}:{frame[2]})")
    frames = next((stack for is_current, stack in threads if is_current),
                  threads[-1][1] if threads else [])
    return ", called by ".join(frames[:FRAMES])


@dataclass
class SameCrashes:
    """The newest deaths, while all are of one signal in one place."""

    signal: int = 0
    place: str = ""
    times: Counter[Hashable] = field(default_factory=Counter)
    """Slot → number of deaths."""

    def note(self, slot: Hashable, code: int, place: str) -> None:
        """Add a death: its exit code (negative: a signal's number) and its place ("": unknown)."""
        if (-code, place) != (self.signal, self.place) or not place:
            self.signal, self.place, self.times = -code, place, Counter()
        self.times[slot] += 1

    def are_everywhere(self, slots: Collection[Hashable]) -> bool:
        """True if SAME_CRASHES or more workers have died in each of the slots."""
        return bool(self.place and slots) and all(self.times[slot] >= SAME_CRASHES
                                                  for slot in slots)

    def __str__(self) -> str:
        return f"{name_of(self.signal)} in {self.place}"


def name_of(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

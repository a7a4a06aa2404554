"""Where a worker died of a signal: what faulthandler has written to its stderr, read back.

worker's stderr → here → driver, membership: workers that all die in one place are no fault of a
machine

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
"""What a worker's environment says to Python, from its first import on, unless the user's own
does."""
LINES = 400
"""How many of its last lines are looked at: so many threads' stacks there may be."""
FRAMES = 3
SAME_CRASHES = 2
"""When workers have died so often in each slot, all of one signal in one place, before the first
step, the run is over."""
FATAL = "Fatal Python error: "
FAULTS = frozenset({signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL})
"""The signals of which faulthandler tells anything (Modules/faulthandler.c)."""


def place_of(stderr: Iterable[str]) -> str:
    """Return the place where a process died, as its stderr's last lines tell it: the newest frames,
    or "" if unknown."""
    lines = list(stderr)
    begins = [number for number, line in enumerate(lines) if line.startswith(FATAL)]
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
    """The newest deaths, as long as all are of one signal in one place."""

    signal: int = 0
    place: str = ""
    times: Counter[Hashable] = field(default_factory=Counter)
    """How often in each slot."""

    def note(self, slot: Hashable, code: int, place: str) -> None:
        """Take a death: the exit code of a process (negative: a signal's number), and the place, or
        "" if unknown."""
        if (-code, place) != (self.signal, self.place) or not place:
            self.signal, self.place, self.times = -code, place, Counter()
        self.times[slot] += 1

    def are_everywhere(self, slots: Collection[Hashable]) -> bool:
        """True if in each of the slots workers have died so often that it is no accident."""
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

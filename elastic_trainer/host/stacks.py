"""What Python's faulthandler writes to a worker's stderr: the stacks of a process that does not
answer, and the place in which a process died of a signal.

driver, or the far end of its ssh (host/remote.py) → SIGURG → faulthandler, in the worker → stderr
→ driver → `Answer` (which lines, which phase), `place_of` (where it died) → stalls, ends

What always holds:
1. faulthandler's handler is C and takes no lock: it writes while another thread holds the GIL.
2. SIGURG and SIGWINCH are ignored where no handler is. A process that has not registered survives
   them.
3. The worker opens nothing and starts nothing. Its stderr leads to the driver on every host.
4. A line of the user's is passed on, also one that is blank or that has no end before the answer.

faulthandler writes at most 100 threads, and the main thread is the last: it is the oldest. So a
process with more of them is asked twice: by SIGWINCH, sent to its main thread, for the stack of
this thread; then by SIGURG for the stacks of the 100 newest threads. A process with a terminal
answers SIGURG alone: a terminal sends SIGWINCH when its window changes.

Source: faulthandler (Python/traceback.c, `_Py_DumpTracebackThreads`): a block for each thread,
newest frame first, a blank line between two, and `...` where it stops after 100. After a signal a
line names it first, and the block of the thread that died begins with "Current thread"; there is
none when a thread without Python died, as Horovod's and Gloo's are.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

ASK, ASK_MAIN = signal.SIGURG, signal.SIGWINCH
"""The question for all threads, and the one for the main thread."""
ASKED_S = 5.0
"""The time after a question in which lines of stacks are its answer."""
MOST = 100
"""faulthandler writes this number of threads, and of frames of each."""
LONGEST, LINE_CHARACTERS = 11_000, 1000
"""The characters of faulthandler's longest line, and those that are kept of a line."""
HEADER_CHARACTERS = 200
"""No header has more. It is looked for at a line's end: a line may have 65,536 characters."""
MOST_CHARACTERS = 200_000
"""The characters that are kept of an answer, besides the newest block."""
_HEADER = re.compile(r"(?:(Current t|T)hread 0x[0-9a-f]+.*|Stack) \(most recent call first\):$")
_FRAME = re.compile(r'  File (".*"|\?\?\?), line (\d+|\?\?\?) in ')
_NO_FRAME = re.compile("  (Garbage-collecting|<[a-zA-Z ]+>)$")
_CUT = "  ..."
"""After MOST frames."""
_PHASES = (("training/microbatches.py", "_open", "load"),
           ("training/microbatches.py", "_backward", "backward"),
           ("training/microbatches.py", "reduce", "reduce"),
           ("training/loop.py", "_reduce", "reduce"),
           ("training/loop.py", "_vote", "vote"), ("training/commit_step.py", "_update", "apply"),
           ("training/commit_step.py", "apply", "after"),
           ("evaluate/evaluation.py", "found", "evaluate"),
           ("training/checkpointing.py", "obey", "upload"))
"""The functions of ours in which a phase passes."""


def answer() -> None:
    """Let this process answer the questions, on the stderr that it has now. A handler of the user's
    own for a signal stays."""
    try:
        if signal.getsignal(ASK) == signal.SIG_DFL:
            faulthandler.register(ASK, file=2, all_threads=True)
        if signal.getsignal(ASK_MAIN) == signal.SIG_DFL and not _has_terminal():
            faulthandler.register(ASK_MAIN, file=2, all_threads=False)
    except (OSError, ValueError, RuntimeError) as error:  # no stderr
        print(f"elastic-trainer: no stacks of this worker can be asked for: {error}",
              file=sys.stderr)


def _has_terminal() -> bool:
    with suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
        return True
    return False


class Answer:
    """The lines of a process's stderr that answer the newest question."""

    def __init__(self) -> None:
        self._main: list[str] = []
        """The block of the main thread, where it was asked alone."""
        self._blocks: list[list[str]] = []
        """The newest blocks of the answer of all threads."""
        self._open: list[str] = []
        """The block whose lines come."""
        self._threads = self._characters = 0
        self._is_cut = self._is_held = False
        """It has not all threads; the last line was blank, and may be within the answer."""
        self._until = 0.0
        self._lock = threading.Lock()

    def expect(self) -> None:
        """Begin a new answer."""
        with self._lock:
            self._main, self._blocks, self._open = [], [], []
            self._threads, self._characters, self._is_cut = 0, 0, False
            self._until = time.monotonic() + ASKED_S

    def take(self, line: str) -> list[str]:
        """Take what a line of stderr has of the answer; return the lines of the user's."""
        with self._lock:
            return self._take(line)

    def _take(self, line: str) -> list[str]:
        blank = self.rest()
        if time.monotonic() > self._until:
            return [*blank, line]
        header = _HEADER.search(line[-HEADER_CHARACTERS:])
        if header and self._begin(header[0]):
            before = line[:-len(header[0])]  # a progress bar, which has no line end
            return [*(blank if self._open is self._main else []), *([before] if before else [])]
        if blank and line == "..." and self._threads == MOST:
            self._open, self._is_cut = [], True
            return []
        if blank or not self._goes_on(line):
            return [*blank, line]
        if line:
            self._open.append(line[:LINE_CHARACTERS])
        else:
            self._is_held = True
        return []

    def rest(self) -> list[str]:
        """Return the line of the user's that was held back."""
        blank, self._is_held = [""] * self._is_held, False
        return blank

    def _begin(self, header: str) -> bool:
        """Begin a block; False if the answer cannot have one more."""
        is_alone = header.startswith("Stack")
        if self._main if is_alone else self._threads == MOST:
            return False
        self._open = [header[:LINE_CHARACTERS]]
        if is_alone:
            self._main = self._open
            return True
        self._threads += 1
        self._blocks.append(self._open)
        self._characters += sum(map(len, self._blocks[-2])) if self._threads > 1 else 0
        while self._characters > MOST_CHARACTERS:
            self._characters -= sum(map(len, self._blocks.pop(0)))
        return True

    def _goes_on(self, line: str) -> bool:
        """True if the line may be the next one of the block."""
        block = self._open
        if not block or not line:
            return bool(block) and block is not self._main
        if block[-1] == _CUT or len(line) > LONGEST:
            return False
        if len(block) > MOST and line == _CUT:
            return True
        return bool((len(block) <= MOST + 1 and _FRAME.match(line))
                    or (len(block) <= 2 and _NO_FRAME.match(line)))

    @property
    def lines(self) -> list[str]:
        """The lines of the main thread, as far as they are known."""
        if self._main or self._is_cut or not self._blocks:
            return self._main
        return self._blocks[-1]

    def text(self) -> str:
        """Return the stacks, the main thread's first."""
        main = self.lines
        others = [block for block in self._blocks if block[1:] != main[1:]]
        return "\n".join(line for block in (main, *others) for line in block)

    def waits(self) -> bool:
        """True if the main thread's stack is in a collective."""
        return any('world/collectives.py"' in line and line.endswith(" in wait")
                   for line in self.lines)

    def phase(self) -> str:
        """Return the phase that the main thread's stack shows; "": none of our functions is there,
        or there is no answer."""
        for line in self.lines:
            for file, function, phase in _PHASES:
                if f'{file}"' in line and line.endswith(f" in {function}"):
                    return phase
        return ""


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

"""The Python stacks of all threads of a process that does not answer: asked for by a signal.

driver, or the far end of its ssh → SIGURG → here (faulthandler, in the worker) → stderr → driver →
here (which lines, which phase)

What always holds:
1. faulthandler's handler is C and takes no lock: it writes while another thread holds the GIL.
2. SIGURG is ignored where nobody handles it. A process that has not registered survives it.
3. The worker opens nothing and starts nothing. Its stderr leads to the driver on every host.

Source: faulthandler (Python/traceback.c, `_Py_DumpTracebackThreads`): a block for each thread,
newest frame first. The main thread is the last block.
"""

from __future__ import annotations

import faulthandler
import re
import signal
import sys
import time

ASK = signal.SIGURG
ASKED_S = 5.0
"""The time after a question in which lines of stacks are its answer."""
MAX_LINES = 10_000
"""Of one answer: faulthandler writes at most 100 threads of 100 frames."""
_LINE = re.compile(r'(Current t|T)hread 0x[0-9a-f]+|  File ".*", line \d+ in |  <no Python frame>'
                   r"|  \.\.\.$")
_BLOCK = re.compile(r"(Current t|T)hread 0x[0-9a-f]+")
_PHASES = (("training/shards.py", "_open", "load"), ("training/shards.py", "_backward", "backward"),
           ("training/shards.py", "reduce", "reduce"), ("training/loop.py", "_reduce", "reduce"),
           ("training/loop.py", "_vote", "vote"), ("training/apply.py", "_update", "apply"),
           ("training/apply.py", "apply", "behind"),
           ("training/evaluation.py", "found", "evaluate"),
           ("training/checkpointing.py", "obey", "upload"))
"""The functions of ours in which a phase passes."""


def answer() -> None:
    """Let this process answer the question, on the stderr that it has now. A handler of the user's
    own for the signal stays."""
    if signal.getsignal(ASK) != signal.SIG_DFL:
        return
    try:
        faulthandler.register(ASK, file=2, all_threads=True)
    except (OSError, ValueError, RuntimeError) as error:  # no stderr
        print(f"elastic-trainer: no stacks of this worker can be asked for: {error}",
              file=sys.stderr)


class Answer:
    """The lines of a process's stderr that answer the newest question."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._until = 0.0

    def expect(self) -> None:
        """Begin a new answer."""
        self.lines, self._until = [], time.monotonic() + ASKED_S

    def take(self, line: str) -> bool:
        """Take a line of stderr; False if it is none of the answer."""
        if time.monotonic() > self._until or not (_LINE.match(line) or (self.lines and not line)):
            return False
        if len(self.lines) < MAX_LINES:
            self.lines.append(line)
        return True

    def main(self) -> list[str]:
        """Return the lines of the main thread."""
        begins = [number for number, line in enumerate(self.lines) if _BLOCK.match(line)]
        return self.lines[begins[-1]:] if begins else []

    def text(self) -> str:
        """Return the stacks, the main thread's first."""
        main = self.main()
        return "\n".join(filter(None, main + self.lines[:len(self.lines) - len(main)]))

    def phase(self) -> str:
        """Return the phase that the main thread's stack shows; "": none of our functions is there,
        or there is no answer."""
        for line in self.main():
            for file, function, phase in _PHASES:
                if f'{file}"' in line and line.endswith(f" in {function}"):
                    return phase
        return ""

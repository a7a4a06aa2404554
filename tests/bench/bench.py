"""What every bench runs in: it has a time limit, and all that it has started ends with it.

    def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]: ...

    if __name__ == "__main__":
        bench.run(measure, steps=40, reducer=("exact", "ring"))

The bench is a child of this process, which adopts whatever a child of the bench leaves behind
(PR_SET_CHILD_SUBREAPER). So a driver or a server in a session of its own is found, too.

What always holds:
1. When the bench ends, by itself, by SIGTERM or SIGINT, or at its limit, its `finally` blocks have
   GRACE_S; then all processes below are killed.
2. When this process is killed by SIGKILL, the kernel sends the bench a SIGTERM (PR_SET_PDEATHSIG),
   and its `finally` blocks end what it has started.
3. The figures are one JSON object in the last line.

A bench with an option on its command line (`--faults 300`) has no limit: who gives one knows why.

A bench imports this module first. Then it finds what the tests share, too.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(1, str(HERE.parent))
LIMIT_S, GRACE_S = 600.0, 20.0
TIMED_OUT = 124
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36


class Ended(BaseException):
    """A signal has come."""


def run(measure: Callable[[Path, argparse.Namespace], Mapping[str, Any]],
        **options: Any) -> NoReturn:
    """Measure in an empty folder, print the figures, and end the process.

    `options` are those of the command line with their defaults: of a tuple the first choice, of a
    type none. `...` stands for a file that must be named.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in options.items():
        word = f"--{name.replace('_', '-')}"
        if default is ...:
            parser.add_argument(name, type=Path)
        elif isinstance(default, bool):
            parser.add_argument(word, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(word, choices=default, default=default[0])
        elif isinstance(default, type):
            parser.add_argument(word, type=default)
        else:
            parser.add_argument(word, type=type(default), default=default)
    given = parser.parse_args()

    def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(Path(folder), given)))

    sys.exit(bounded(main))


def job(file: str, *options: str) -> list[str]:
    """Return the command of a job in the folder jobs."""
    return [sys.executable, str(HERE / "jobs" / file), *options]


ENDLESS = job("mlp.py", "--steps", "1000000")


@contextmanager
def empty(folder: Path) -> Iterator[Path]:
    """Give an empty folder in another one for as long as the block."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        yield Path(name)


def rounded(seconds: Iterable[float]) -> list[float | None]:
    """Return seconds for the JSON object; None for infinite ones."""
    return [round(one, 3) if math.isfinite(one) else None for one in seconds]


def longest_pause(times: Sequence[float], since: float, until: float) -> float:
    """Return the longest gap between steps that overlaps [since, until], less the median of the 60
    gaps before it."""
    gaps = list(pairwise(times))
    usual = statistics.median([b - a for a, b in gaps if b <= since][-60:])
    return max(b - a for a, b in gaps if b > since and a < until) - usual


def bounded(main: Callable[[], Any], limit_s: float = LIMIT_S) -> int:
    """Run a bench in a process of its own; returns its exit code, 124 at the limit."""
    parent = os.getpid()
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    if not (bench := os.fork()):
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        _run(main)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, _end)
    if not any(word.startswith("--") for word in sys.argv[1:]):
        signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(bench, 0)[1])
    except Ended as ended:
        code = TIMED_OUT if ended.args[0] == signal.SIGALRM else 128 + int(ended.args[0])
        print(f"the bench is ended by {signal.Signals(ended.args[0]).name}"
              + f" after its limit of {limit_s:.0f} s" * (code == TIMED_OUT), file=sys.stderr)
        _let_end(bench)
    while below := _below(parent):
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
    return code


def _run(main: Callable[[], Any]) -> None:
    """Be the bench."""
    signal.signal(signal.SIGTERM, _end)
    code = 1
    try:
        main()
        code = 0
    except Ended:
        code = 128 + signal.SIGTERM
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise Ended(number)


def _let_end(bench: int) -> None:
    """Let the bench run its `finally` blocks."""
    with suppress(ProcessLookupError):
        os.kill(bench, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and bench in _below(os.getpid()):
        _reap()
        time.sleep(0.05)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _below(pid: int) -> list[int]:
    """Return the processes that a process, or one of these, has started."""
    found = list[int]()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_below(child)]
    return found

"""Event lines of a worker whose host does not share the folder of runs: the driver writes them.

events → LogShipper (worker) → wire → LineHandler (driver) → `runs/<name>/events.jsonl`

What always holds:
1. The vote on a step waits until the line of the step before is in the driver's event log (the
   loop flushes). If a host vanishes, at most the line of its newest step is lost, and the next
   rank 0 writes that line again.
2. A line is written once, also if it is sent again: lines are numbered, and each shipper has a
   name of its own.
3. A worker can write events about itself only, of its own attempt, and none of the driver's or the
   supervisor's. An evicted worker can write none: its late lines would come after its successor's.
4. The driver refuses and counts a line that is no well-formed event (schema.py). The shipper
   reports it on stderr and continues with the next line.
5. A worker may send LINES_PER_S lines and BYTES_PER_S bytes a second, and BURST_S times as much at
   once. The shipper sends a line later if it exceeds this rate.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tenacity import Retrying, retry_if_exception_type, retry_if_result, wait_fixed

from elastic_trainer.config import Launch
from elastic_trainer.events.schema import MAX_LINE_BYTES, flaw, parse_object
from elastic_trainer.host.modes import write_text
from elastic_trainer.wire.messages import DriverClient, DriverUnreachable, MessageRefused

RUN_ID_FILE = ".run-id"
RETRY_S = 0.02
MAX_SHOWN = 500
"""Characters of a refused line that stderr gets."""
LINES_PER_S = 500.0
"""A worker writes one line a step, and 10,000 lines a day for the changes of its world. Waiting for
each answer, a shipper sends 500 lines a second."""
BYTES_PER_S = 256.0 * 1024
BURST_S = 20.0
"""The seconds of both rates that may come at once: the tracebacks of a broken generation."""
SHIPPERS = 16
"""The shippers of one worker whose line numbers are kept. A worker that restarts in place has a new
one."""
WORKERS_EVENTS = ("worker.", "state.", "job.", "run.finished")


def shares_runs(launch: Launch) -> bool:
    """True if the run's folder on this host is the one that the supervisor made.

    Also true if the launcher named no folder or no run.
    """
    if not launch.run_id or launch.run_dir is None:
        return True
    try:
        return (launch.run_dir / RUN_ID_FILE).read_text() == launch.run_id
    except OSError:
        return False


class LogShipper:
    """Sends a worker's lines to the driver, in order, by a thread and a connection of its own."""

    def __init__(self, launch: Launch):
        assert launch.driver is not None
        self.patience_s = launch.limits.driver_lost_s
        self._client = DriverClient(launch.driver, launch.worker, launch.key, self.patience_s / 2)
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, str]] = deque()
        self._name, self._number = secrets.token_hex(8), 0  # restarted in place: another name
        threading.Thread(target=self._carry, name="log shipper", daemon=True).start()

    def take(self, line: str) -> None:
        """Take a line to be sent, when the lines before it have arrived."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, self.patience_s)
            self._number += 1
            self._waiting.append((self._number, line))
            self._changed.notify_all()

    def flush(self) -> bool:
        """Wait until all lines have arrived; False if they have not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, self.patience_s)

    def _carry(self) -> None:
        until_taken = Retrying(wait=wait_fixed(RETRY_S), retry=retry_if_exception_type(
            DriverUnreachable) | retry_if_result(lambda answer: bool(answer.get("early"))))
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                number, line = self._waiting[0]
            answer = until_taken(self._client.ask, {"shipper": self._name, "number": number,
                                                    "line": line})
            if why := answer.get("refused"):
                print(f"elastic-trainer: the driver refused a line of the event log ({why}): "
                      f"{line[:MAX_SHOWN]}", file=sys.stderr, flush=True)
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()


class LineRefused(MessageRefused):
    """A line that is no event of its worker. The text has the reason, and no part of the line."""


class TooEarly(MessageRefused):
    """A line that exceeds what its worker may send now."""


class Allowance:
    """A token bucket: `per_s` a second, and BURST_S times as much at once."""

    def __init__(self, per_s: float, now: float):
        self.per_s, self.most = per_s, BURST_S * per_s
        self._left, self._since = self.most, now

    def left(self, now: float) -> float:
        """Return the amount that may come now."""
        return min(self.most, self._left + self.per_s * max(0.0, now - self._since))

    def take(self, amount: float, now: float) -> None:
        """Note that `amount` has come."""
        self._left, self._since = self.left(now) - amount, now


class _Writer:
    """One worker, as the handler knows it."""

    def __init__(self, now: float):
        self.lines, self.bytes = Allowance(LINES_PER_S, now), Allowance(BYTES_PER_S, now)
        self.written: dict[str, int] = {}
        """The number of each shipper's newest line that is written."""


class LineHandler:
    """The driver's end: it writes each line once, and refuses what a worker may not write.

    Only one thread at a time may use it.
    """

    def __init__(self, write: Callable[[str], None], attempt: int,
                 clock: Callable[[], float] = time.monotonic):
        self._write, self._attempt, self._clock = write, attempt, clock
        self._writers: dict[str, _Writer] = {}
        self.refused: Counter[str] = Counter()
        """The number of refused lines of each living worker."""

    def take(self, words: dict[str, Any]) -> None:
        """Write a worker's line, once. Raises LineRefused, TooEarly."""
        worker, line = str(words["worker"]), str(words["line"])
        shipper, number = str(words["shipper"]), int(words["number"])
        now = self._clock()
        writer = self._writers.setdefault(worker, _Writer(now))
        if number <= writer.written.get(shipper, 0):
            return
        if writer.lines.left(now) < 1 or writer.bytes.left(now) < len(line):
            raise TooEarly("more lines than a worker may send")
        writer.lines.take(1, now)
        writer.bytes.take(len(line), now)
        if wrong := flaw_of_line(line, worker, self._attempt):
            self.refused[worker] += 1
            raise LineRefused(f"a line that is no event of its worker: {wrong}")
        self._write(line)
        writer.written.pop(shipper, None)
        writer.written[shipper] = number
        while len(writer.written) > SHIPPERS:
            del writer.written[next(iter(writer.written))]

    def forget(self, worker: str) -> int:
        """Forget a worker that is gone. Returns the number of its lines that were refused."""
        self._writers.pop(worker, None)
        return self.refused.pop(worker, 0)


def flaw_of_line(line: str, worker: str, attempt: int) -> str:
    """Describe what is wrong with a worker's line; "" if it is an event that this worker may write.

    The supervisor acts on the events of driver and supervisor, so no worker may write one.
    """
    if len(line) > MAX_LINE_BYTES or not line.isascii() or "\n" in line:
        return "it is too long, or not a line of ASCII"
    event = parse_object(line)
    if event is None:
        return "it is no JSON object"
    if wrong := flaw(event):
        return wrong
    if not event["event"].startswith(WORKERS_EVENTS):
        return "no worker may write this event"
    is_own = event.get("worker") == worker and event.get("attempt") == attempt
    return "" if is_own else "it is another worker's or attempt's"


def new_run_id(run_dir: Path, run_id: str) -> None:
    """Write the id by which workers recognize the run's folder."""
    write_text(run_dir / RUN_ID_FILE, run_id)

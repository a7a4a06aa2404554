"""The timeline of one worker: a file of spans for each generation, for Perfetto or
chrome://tracing.

points and events, spans of micro-batches, reducer and checkpoints → here → runs/NAME/timeline →
phases

What always holds:
1. A file is a JSON array in the format of trace events, one event a line. A file that was not
   closed lacks the last bracket, which both viewers tolerate. Each write ends with a whole event.
2. The spans of a step are written at its end, in one write. A worker that is killed loses the step
   in flight. A step that broke has `broken`.
3. A file has about MAX_BYTES at most, with its older half (`.old.json`): the newest spans stay. A
   folder has about FOLDER_BYTES at most: each new generation removes the oldest files.
4. All times are those of the monotonic clock, which the processes of a host share
   (clock_gettime(2)), plus its distance to the time of day, read once for each generation. So hosts
   are comparable as far as their clocks are synchronized.
5. A trace without a folder writes and keeps nothing but its mark (mark.py).

What it does not do: time the kernels of a GPU. A span has the time of the worker's Python code.

Source: "Trace Event Format" (Google, 2016), sections JSON Array Format, Complete and Async Events.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from elastic_trainer.events.event_table import KINDS
from elastic_trainer.events.mark import BEGINS, Mark
from elastic_trainer.host.modes import make_folder, private

FOLDER = "timeline"
MAX_BYTES = 32 << 20
"""Of a file with its older half: about 20,000 steps of 8 micro-batches."""
FOLDER_BYTES = 1 << 30
OLD = ".old.json"
LOOP, NETWORK = 1, 2
"""The rows of a worker: what its loop does, and what is on the network."""
POINTS = dict(zip(BEGINS, ("", *BEGINS.values()), strict=False))
"""The points of a step in the order of the loop, and the span that ends there: the phase that began
at the point before."""
_UNSEEN = ("worker.step_committed",)
"""Events that the step's own span shows."""
_NOTHING = nullcontext()


class Trace:
    """Spans of this worker, and the file of its generation."""

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_BYTES):
        self.folder, self.max_bytes = folder, max_bytes
        self.mark = Mark()
        """What the loop does now. It is kept without a folder, too: heartbeats carry it."""
        self._lock = threading.Lock()
        self._pending: list[str] = []
        self._head: list[str] = []
        """The first events of each file of the generation: names and clock."""
        self._file: Path | None = None
        self._fd: int | None = None
        self._bytes = self._pid = self._async = 0
        self._clock_ns = 0
        """The time of day less the monotonic clock."""
        self._step: tuple[int, dict[str, Any]] | None = None
        """The begin of the step in flight, and its facts."""
        self._left_ns = self._point_ns = 0
        """The end of the last step, for the pause between two generations."""

    def now(self) -> int:
        """Return the time at which a span begins; 0 if nothing is written."""
        return time.monotonic_ns() if self.folder else 0

    # --- spans ------------------------------------------------------------------------------------

    def span(self, name: str, **facts: Any) -> AbstractContextManager[None]:
        """Write how long a block of code takes; also if it raises."""
        return self._span(name, facts) if self.folder else _NOTHING

    @contextmanager
    def _span(self, name: str, facts: dict[str, Any]) -> Iterator[None]:
        began = self.now()
        try:
            yield
        finally:
            self.add(name, began, **facts)

    def add(self, name: str, began: int, ended: int = 0, **facts: Any) -> None:
        """Write a span from `began` until `ended` (0: now), within the step in flight."""
        if self.folder is None:
            return
        ended = ended or self.now()
        step = {"step": self._step[1]["step"]} if self._step else {}
        self._put({"name": name, "ph": "X", "ts": self._us(began), "tid": LOOP,
                   "dur": self._us(ended) - self._us(began), "args": step | facts})

    def add_transfer(self, name: str, began: int, **facts: Any) -> None:
        """Write what was on the network from `began` until now. Such spans may overlap."""
        if self.folder is None:
            return
        self._async += 1
        both = {"name": name, "cat": "network", "id": self._async, "tid": NETWORK}
        step = {"step": self._step[1]["step"]} if self._step else {}
        self._put({**both, "ph": "b", "ts": self._us(began), "args": step | facts})
        self._put({**both, "ph": "e", "ts": self._us(self.now())})

    def begin_step(self, step: int, phase: int) -> None:
        """Begin a step, or a phase of it."""
        self.mark.begin(step, phase)
        if self.folder:
            self._step = self.now(), {"step": step, "phase": phase}

    def end_step(self, **facts: Any) -> None:
        """Write the step in flight, and all of its spans."""
        if self.folder is None or self._step is None:
            return
        began, of_step = self._step
        self.add("step", began, **of_step, **facts)
        self._step, self._left_ns = None, self.now()
        self._write()

    def note(self, event: str, facts: dict[str, Any]) -> None:
        """Take an event or a point of the protocol: a listener of Events. The way from one point to
        the next is a span, and an event of the event log is a moment."""
        if event == "world.generation_entered":
            self.open(**facts)
        elif event in POINTS:
            if span := POINTS[event]:
                self.add(span, self._point_ns)
            self._point_ns = self.now()
        elif event == "step.ended":
            self.end_step()
        elif event in KINDS and event not in _UNSEEN:
            self._put({"name": event, "ph": "i", "s": "t", "ts": self._us(self.now()), "tid": LOOP,
                       "args": {name: value for name, value in facts.items() if name == "step"}})

    # --- the file ---------------------------------------------------------------------------------

    def open(self, **facts: Any) -> None:
        """Begin the file of a generation. `facts`: attempt, generation, rank, size, worker."""
        if self.folder is None:
            return
        self.close()
        worker = str(facts.get("worker", ""))
        self._clock_ns = time.time_ns() - time.monotonic_ns()
        self._pid = zlib.crc32(worker.encode()) & 0x7FFFFFFF  # two hosts have the same pids
        rank = facts.get("rank", 0)
        self._head = [self._line(fact) for fact in (
            {"name": "process_name", "ph": "M", "args": {"name": f"rank {rank}: {worker}"}},
            {"name": "process_sort_index", "ph": "M", "args": {"sort_index": rank}},
            {"name": "thread_name", "ph": "M", "tid": LOOP, "args": {"name": "loop"}},
            {"name": "thread_name", "ph": "M", "tid": NETWORK, "args": {"name": "network"}},
            {"name": "generation", "ph": "i", "s": "p", "tid": LOOP,
             "ts": self._us(self.now()),
             "args": {**facts, "pid": os.getpid(), "clock_ns": self._clock_ns}})]
        name = "-".join([f"a{facts.get('attempt', 1)}", f"g{facts.get('generation', 0)}",
                         worker.replace("/", "-"), str(time.time_ns() // 1_000_000)])
        self._file = self.folder / f"{name}.json"
        try:
            make_folder(self.folder)
            remove_oldest(self.folder, FOLDER_BYTES)
            self._begin_file()
        except OSError as error:
            self._give_up(error)
        if self._left_ns:
            self.add("pause", self._left_ns)

    def close(self) -> None:
        """End the file: with the step that broke, and the last bracket."""
        self.end_step(broken=True)
        self._write()
        with self._lock:
            if self._fd is not None:
                self._end_file()
            self._fd = None

    def _us(self, at_ns: int) -> float:
        return (at_ns + self._clock_ns) / 1000

    def _line(self, event: dict[str, Any]) -> str:
        return json.dumps({"pid": self._pid, "tid": LOOP, **event}, default=str)

    def _put(self, event: dict[str, Any]) -> None:
        if self._fd is not None:
            with self._lock:
                self._pending.append(self._line(event))

    def _write(self) -> None:
        """Write what is pending. Disk: one write."""
        with self._lock:
            lines, self._pending = self._pending, []
            if self._fd is None or not lines:
                return
            try:
                if self._bytes > self.max_bytes // 2:
                    self._turn_over()
                self._append("".join(f",\n{line}" for line in lines))
            except OSError as error:
                self._give_up(error)

    def _begin_file(self) -> None:
        self._fd = private(str(self._file), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        self._bytes = 0
        self._append("[\n" + ",\n".join(self._head))

    def _turn_over(self) -> None:
        """Keep the full half as the older one, and begin a new half."""
        assert self._file
        self._end_file()
        self._file.replace(self._file.with_suffix(OLD))
        self._begin_file()

    def _end_file(self) -> None:
        with suppress(OSError):
            self._append("\n]\n")
        os.close(self._fd or 0)

    def _append(self, text: str) -> None:
        assert self._fd is not None
        data = text.encode()
        if os.write(self._fd, data) < len(data):
            raise OSError("the disk took a part of a write")
        self._bytes += len(data)

    def _give_up(self, error: OSError) -> None:
        """Say that this generation has no timeline from here on. The training goes on."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._pending = None, []
        print(f"elastic-trainer: the timeline {self._file} cannot be written: {error}. Free some "
              f"disk space; the next generation tries again.", file=sys.stderr)


def remove_oldest(folder: Path, most_bytes: int) -> None:
    """Remove the oldest files of a folder of timelines until the others have at most this size."""
    found = []
    for file in folder.glob("*.json"):
        with suppress(FileNotFoundError):  # another worker has removed it
            seen = file.stat()
            found.append((seen.st_mtime, seen.st_size, file))
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= most_bytes:
            return
        file.unlink(missing_ok=True)
        total -= size

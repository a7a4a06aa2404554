"""What this worker's loop does now: its phase, micro-batch, batch or bucket, and since when.

micro-batches, points of the loop (trace.POINTS), World.wait → here → heartbeats → the driver
(launch/stalls)

What always holds:
1. Marking is a store of a few values: no lock, no file, no message. The heartbeats' thread reads
   them.
2. The timeline has the same points (trace.py).
3. A worker waits for others only in a collective (World.wait). The phases around collectives have
   local work too.
4. From its place in a generation until its first step there a worker is in the phase "forming":
   it connects, receives the state, and may run the user's code after the step before. Without a
   place `at` returns None.

What it does not do: time a GPU's kernels. A phase lasts as long as its Python code, and a worker
waits in a collective while its own GPU computes what it sends.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Any

from elastic_trainer.wire.heartbeat import At

WINDOW = 16
"""The usual time of a step, and a worker's own time for a micro-batch, are medians of this many
steps."""
FIRST_STEPS = 3
"""The steps of a process that may take long: it compiles, and fills its caches."""
FORMING = "forming"
PHASES = (FORMING, "load", "forward", "backward", "reduce", "vote", "apply", "after", "evaluate",
          "gather", "upload")
"""In the order of a step. "after": the user's code between two inner loops. "evaluate" and
"gather": trainer.evaluate(), which computes a batch, or meets the others."""
USERS_CODE = ("load", "forward", "backward", "apply", "after", "evaluate")
BEGINS = {"step.computed": "reduce", "step.prepared": "vote", "step.voted": "apply",
          "step.applied": "after", "step.handed_over": "upload"}
"""The points of a step in the order of the loop, and the phase that begins there."""
BETWEEN_S = 0.5
"""Two collectives with less local work between them are one wait."""


class Mark:
    """The mark of one worker. Its loop writes it."""

    def __init__(self) -> None:
        self.now: tuple[str, str, Any, float] = "", "", None, 0.0
        """The phase, the micro-batch or batch, its samples, and since when."""
        self.bucket = ""
        """The collective that the loop waits for."""
        self.step, self.begun, self.steps = -1, 0.0, 0
        """The step in flight, when it began (0: none), and how many this process did before it."""
        self._done_s = 0.0
        """How long the step in flight took until its newest phase was applied."""
        self._waits_since = self._waited_at = 0.0
        self._is_waiting = False
        self._computes_since, self._own_s, self._microbatches = 0.0, 0.0, 0
        """Of the step in flight: the begin of its phase, and the forward and backward passes' time
        for so many micro-batches."""
        self._took: deque[float] = deque(maxlen=WINDOW)
        self._own: deque[float] = deque(maxlen=WINDOW)

    def begin(self, step: int, phase: int = 0) -> None:
        """Begin a step, or with a number above 0 a further phase of it."""
        self._computes_since = time.monotonic()
        self.now = "load", "", None, self._computes_since  # of its first micro-batch, soon
        if phase and self._done_s:
            return
        if self._done_s and step > self.step:  # not a step that is done again
            self._took.append(self._done_s)
            self.steps += 1
            if self._microbatches:
                self._own.append(self._own_s / self._microbatches)
        self._done_s, self._own_s, self._microbatches = 0.0, 0.0, 0
        self.step, self.begun = step, self._computes_since

    def enter(self, phase: str, what: str = "", samples: Any = None) -> None:
        """Begin a phase, with local work: a wait ends."""
        self._waited_at, now = 0.0, time.monotonic()
        if self.now[0] == "load":  # a loader is ahead on a worker that waits for others
            self._own_s -= now - self.now[-1]
        self._microbatches += phase == "load"
        self.now = phase, what, samples, now

    def wait(self) -> None:
        now = time.monotonic()
        if now - self._waited_at > BETWEEN_S or self._waits_since < self.begun:
            self._waits_since = now
        self._is_waiting = True

    def waited(self) -> None:
        self._is_waiting, self._waited_at = False, time.monotonic()

    def reach(self, point: str) -> None:
        """Take a point of the protocol."""
        if phase := BEGINS.get(point):
            now = time.monotonic()
            self.now, self.bucket = (phase, "", None, now), ""
            if point == "step.computed":
                self._own_s += now - self._computes_since
            elif point == "step.applied":
                self._done_s = now - self.begun
        elif point == "world.place_taken":
            self.enter(FORMING)
            self.begun = self.now[-1]

    def leave(self) -> None:
        """End with the world. Steps take another time in the next one, and this worker may have no
        micro-batches there."""
        self.begun = self._done_s = 0.0
        self._took.clear()
        self._own.clear()

    def at(self) -> At | None:
        """Return all of it for a heartbeat; None outside of generations."""
        (phase, what, samples, since), begun, now = self.now, self.begun, time.monotonic()
        if not begun or since < begun:
            return None
        if samples is not None and len(samples):
            what = f"{what}, {len(samples)} samples from {int(samples[0])}"
        return At(phase=phase, what=what or self.bucket, for_s=round(now - since, 3),
                  step=self.step, waits_s=round(self._waits_s(begun, now), 3),
                  usual_s=round(_median(self._took), 5), own_s=round(_median(self._own), 6),
                  steps=self.steps)

    def _waits_s(self, begun: float, now: float) -> float:
        since = self._waits_since
        is_in_one = self._is_waiting or now - self._waited_at < BETWEEN_S
        return max(now - since, 0.001) if is_in_one and since >= begun else 0.0


def _median(times: deque[float]) -> float:
    try:
        return median(times.copy() or (0.0,))
    except RuntimeError:  # the loop has added one meanwhile
        return 0.0

"""What this worker's loop does now: its phase, shard, batch or bucket, and since when.

shards, points of the loop (trace.POINTS), buckets → here → heartbeats → the driver (launch/stalls)

What always holds:
1. Marking is a store of one tuple: no lock, no file, no message. The heartbeats' thread reads it.
2. The timeline has the same points (trace.py).
3. A worker that forms a generation is in no step: `at` returns None until its next step.

What it does not do: time a GPU's kernels. A phase lasts as long as its Python code.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Any

from elastic_trainer.wire.heartbeat import At

WINDOW = 16
"""The usual time of a step is the median of this many."""
PHASES = ("load", "forward", "backward", "reduce", "vote", "apply", "behind", "evaluate", "gather",
          "upload")
"""In the order of a step. "behind": the user's code between two inner loops. "evaluate" and
"gather": trainer.evaluate(), which computes a batch, or waits for the others."""
USERS_CODE = ("load", "forward", "backward", "apply", "behind", "evaluate")
COLLECTIVES = ("reduce", "vote", "gather")
"""In these a worker waits for all others."""
BEGINS = {"step.computed": "reduce", "step.prepared": "vote", "step.voted": "apply",
          "step.applied": "behind", "step.handed_over": "upload"}
"""The points of a step in the order of the loop, and the phase that begins there."""


class Mark:
    """The mark of one worker. Its loop writes it."""

    def __init__(self) -> None:
        self.now: tuple[str, str, Any, float] = "", "", None, 0.0
        """The phase, the shard or batch, its samples, and since when."""
        self.bucket = ""
        """The collective that the loop waits for."""
        self.step, self.begun, self.steps, self._shards = -1, 0.0, 0, 0
        """The step in flight, when it began (0: none), and how many this process has done."""
        self._took: deque[float] = deque(maxlen=WINDOW)
        self._own: deque[float] = deque(maxlen=4 * WINDOW)

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.step, self.begun, self._shards = step, time.monotonic(), 0

    def enter(self, phase: str, what: str = "", samples: Any = None) -> None:
        """Begin a phase."""
        self._shards += phase == "load"
        self.now = phase, what, samples, time.monotonic()

    def reach(self, point: str) -> None:
        """Take a point of the protocol."""
        if phase := BEGINS.get(point):
            now = time.monotonic()
            self.now, self.bucket = (phase, "", None, now), ""
            if point == "step.computed" and self._shards:
                self._own.append((now - self.begun) / self._shards)
            elif point == "step.applied":
                self._took.append(now - self.begun)
                self.steps += 1
        elif point == "world.place_taken":
            self.begun = 0.0
            self._own.clear()  # it may have no shards in the next world

    def at(self) -> At | None:
        """Return all of it for a heartbeat; None outside of steps."""
        (phase, what, samples, since), begun, now = self.now, self.begun, time.monotonic()
        if not begun or since < begun:
            return None
        if samples is not None and len(samples):
            what = f"{what}, {len(samples)} samples from {int(samples[0])}"
        return At(phase=phase, what=what or self.bucket, for_s=round(now - since, 3),
                  step=self.step, step_for_s=round(now - begun, 3),
                  usual_s=round(_median(self._took), 5), own_s=round(_median(self._own), 6),
                  steps=self.steps)


def _median(times: deque[float]) -> float:
    try:
        return median(times.copy() or (0.0,))
    except RuntimeError:  # the loop has added one meanwhile
        return 0.0

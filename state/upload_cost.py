"""What the upload of a checkpoint adds to the steps beside it.

the time of each step → here → training/timing.py (`auto`), rehearse/costs.py (the same of a log)

What always holds:
1. Steps are compared within one world: the steps of another one take another time.
2. The cost is the lower median over the last uploads, and over a zero at first. So one upload alone
   is not believed: it has two or three steps beside it, and one of them is often twice as long for
   another reason, e.g. a worker that boots.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

UPLOADS = 5


class UploadCost:
    """Measured by one worker."""

    def __init__(self) -> None:
        self.alone_s = 0.0
        """A step's time without an upload, a moving average; 0.0: this world has had none."""
        self._beside: list[float] | None = None
        """The steps beside the upload that was begun in this world; None: there is none."""
        self._added = deque([0.0], maxlen=UPLOADS)

    @property
    def added_s(self) -> float:
        """What an upload adds to the steps of the training."""
        return max(0.0, median_low(self._added))

    def enter(self) -> None:
        """Begin a world. It has dropped the upload on its way."""
        self.alone_s, self._beside = 0.0, None

    def begin(self) -> None:
        """Begin an upload."""
        self._end()
        self._beside = []

    def step(self, seconds: float, is_uploading: bool) -> None:
        """Note a step's time, without the pause at its end."""
        if not is_uploading:
            self.alone_s = 0.9 * self.alone_s + 0.1 * seconds if self.alone_s else seconds
            self._end()
        elif self._beside is not None:
            self._beside.append(seconds)

    def _end(self) -> None:
        if self._beside is not None and self.alone_s:
            self._added.append(sum(self._beside) - self.alone_s * len(self._beside))
        self._beside = None

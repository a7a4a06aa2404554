"""The finished steps of a run in packed columns: 48 bytes a step, for a run of any length.

lines of steps → here → run, accounts → charts, pictures, traces

What always holds:
1. A step stands in the columns once for each line that reports it, in the order of the log. A line
   that repeats a step which is kept is left out.
2. `kept` has the place of each step of the kept history, in the order of the steps: a step that a
   start from a checkpoint dropped is not in it, and a step that was done twice is in it once.
3. numpy, 13 MB of memory, is imported by what draws a run: the supervisor counts steps, too.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CHUNK_STEPS = 2**16


class Step(NamedTuple):
    """One finished step."""

    number: int
    end: float
    seconds: float
    samples: int
    loss: float


class Steps:
    """The lines about finished steps."""

    def __init__(self) -> None:
        self.numbers, self.samples = array("q"), array("q")
        self.ends, self.seconds, self.losses = array("d"), array("d"), array("d")
        self.kept = array("q")
        self._last = -1
        """The number of the last step of the kept history."""
        self.counts_samples = True
        """False for a script in Horovod's own style: it logs commits, and no samples."""

    @property
    def unit(self) -> str:
        """What rates count: samples or steps."""
        return "samples" if self.counts_samples else "steps"

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, number: int, end: float, seconds: float, samples: int, loss: float, *,
            is_repeated: bool = False) -> bool:
        """Add a line; return whether it is the first of its step in the kept history."""
        kept, line = self.kept, len(self.numbers)
        if number > self._last:  # nearly all lines
            kept.append(line)
            self._last, is_first = number, True
        else:
            place = bisect_left(kept, number, key=self.numbers.__getitem__)
            is_first = self.numbers[kept[place]] != number
            if is_repeated and not is_first:
                return False
            if is_first:
                kept.insert(place, line)
        self.numbers.append(number)
        self.ends.append(end)
        self.seconds.append(seconds)
        self.samples.append(samples)
        self.losses.append(loss)
        return is_first

    def drop(self, first: int) -> list[Step]:
        """Take the steps from `first` on out of the kept history, and return them."""
        place = bisect_left(self.kept, first, key=self.numbers.__getitem__)
        dropped = [self.at(line) for line in self.kept[place:]]
        del self.kept[place:]
        self._last = self.numbers[self.kept[-1]] if self.kept else -1
        return dropped

    def at(self, line: int) -> Step:
        return Step(self.numbers[line], self.ends[line], self.seconds[line], self.samples[line],
                    self.losses[line])

    @property
    def newest(self) -> Step | None:
        """The newest step of the kept history."""
        return self.at(self.kept[-1]) if self.kept else None

    def kept_losses(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        import numpy as np

        kept = np.asarray(self.kept)  # no copy: a column of 10^6 steps has 8 MB
        return np.asarray(self.numbers)[kept], np.asarray(self.losses)[kept]

    def done_by(self, moments: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return how many samples (or steps, without samples) were done at each moment; the moments
        rise.

        The samples of a step are spread over its time: otherwise slow steps would look like pauses.
        """
        import numpy as np

        edges, totals = np.asarray(moments), np.zeros(len(moments))
        for low in range(0, len(self), CHUNK_STEPS):
            ends, seconds, samples = (
                np.array(column[low : low + CHUNK_STEPS], dtype=np.float64)
                for column in (self.ends, self.seconds, self.samples))
            if not self.counts_samples:
                samples[:] = 1.0
            seconds = np.maximum(seconds, 1e-9)
            at, last = edges.searchsorted(ends - seconds, side="right"), edges.searchsorted(ends)
            totals += np.bincount(last, samples, len(edges) + 1)[:-1].cumsum()
            while len(within := np.flatnonzero(at < last)):  # few steps have a moment within
                done = 1.0 - (ends[within] - edges[at[within]]) / seconds[within]
                totals += np.bincount(at[within], done * samples[within], len(edges))
                at[within] += 1
        return totals

    def rates(self, moments: Sequence[float], width_s: float) -> list[float]:
        """Return the samples a second between each two neighbours of the moments, which are
        `width_s` apart without the time in which the run was stopped."""
        import numpy as np

        rates = np.diff(self.done_by(moments)).clip(min=0.0) / max(width_s, 1e-9)
        return [float(rate) for rate in rates]

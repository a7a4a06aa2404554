"""When a checkpoint is due: after a number of steps or of seconds, or as often as it pays.

the time of each step → what an upload adds to it (UploadCost) → the interval (Cadence) →
training/timing.py; rehearse/ does the same with the steps of an event log

What always holds:
1. All but UploadCost are pure functions of values. It compares steps within one world: the steps of
   another one take another time.
2. The cost is the lower median over the last uploads, and over a zero at first. So one upload alone
   is not believed: it has two or three steps beside it, and one of them is often twice as long for
   another reason, e.g. a worker that boots.

Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9),
1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
FGCS 22(3), 2006.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass
from statistics import median_low

SHARE = 0.01
"""The most that checkpoints may cost by default, as a share of the training's time."""
PRIOR_LOSS_EVERY_S = 3600.0
"""The assumed time between two losses of all workers, before any was observed."""
SHORTEST_S = 2.0
"""The shortest interval between two checkpoints that is chosen."""
MEASURED_UPLOADS = 5


@dataclass(frozen=True)
class Cadence:
    """Every `steps` steps (0: none but the last), every `seconds` seconds, or (both None) as
    measured, for at most a `share` of the time."""

    steps: int | None = None
    seconds: float | None = None
    share: float = SHARE

    @property
    def is_last_only(self) -> bool:
        """True if only the last step of a run, or of an attempt, gets a checkpoint."""
        return self.steps == 0

    @staticmethod
    def parse(text: int | str | None) -> Cadence:
        """Read 50 (steps), "30s", "auto", "0.5%" (auto with another share of the time), or 0 and
        None (none but the last). Raises ValueError."""
        if text == "auto":
            return Cadence()
        if text is None or str(text) == "0":  # False and 0.0 are no numbers of steps
            return Cadence(steps=0)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)%", str(text))
        if found and 0 < float(found[1]) <= 100:
            return Cadence(share=float(found[1]) / 100)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)s", str(text))
        if found and float(found[1]) > 0:
            return Cadence(seconds=float(found[1]))
        if re.fullmatch(r"\d+", str(text)) and int(text) > 0:
            return Cadence(steps=int(text))
        raise ValueError(
            f'checkpoint_every is {text!r}. Use a number of steps (50), seconds ("30s"), "auto", '
            'the largest share of the time that checkpoints may cost ("0.5%"), or 0: none but the '
            'last.')

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        if self.steps is not None:
            return str(self.steps)
        if self.seconds is not None:
            return f"{self.seconds:g}s"
        return "auto" if self.share == SHARE else f"{100 * self.share:g}%"

    def interval_s(self, *, cost_s: float, losses: int, observed_s: float, step_s: float) -> float:
        """Return the seconds between checkpoints, from the cost of one to the training and the
        losses of all workers so far."""
        if self.steps is not None:
            return self.steps * step_s if self.steps else math.inf
        if self.seconds is not None:
            return self.seconds
        return max(SHORTEST_S, best_interval_s(cost_s, loss_every_s(losses, observed_s)),
                   cost_s / self.share)


def best_interval_s(cost_s: float, loss_every_s: float) -> float:
    """Return the interval that loses the least time: Young's sqrt(2 C M) with Daly's first two
    corrections, less C."""
    if cost_s >= 2.0 * loss_every_s:
        return loss_every_s
    ratio = math.sqrt(cost_s / (2.0 * loss_every_s))
    correction = 1.0 + ratio / 3.0 + ratio * ratio / 9.0
    return math.sqrt(2.0 * cost_s * loss_every_s) * correction - cost_s


def loss_every_s(losses: int, observed_s: float) -> float:
    """Return the mean time between losses of all workers, the assumed one included."""
    return (PRIOR_LOSS_EVERY_S + observed_s) / (1.0 + losses)


def retained(steps: list[int], keep_last: int, keep_every: int,
             compared_after: int = 0) -> set[int]:
    """Return the steps whose checkpoints stay: the last ones, and the first at or after each
    multiple of `keep_every`.

    With `compared_after` two more stay: the newest one that is at least this number of steps older
    than the last one, and the oldest one that is not. So a checkpoint of before the difference is
    there when replicas differ. It is at most twice as old.
    """
    ordered = sorted(steps)
    kept = set(ordered[-keep_last:])
    if keep_every:
        kept |= {step for before, step in zip([0, *ordered], ordered, strict=False)
                 if step // keep_every > before // keep_every}
    if compared_after and ordered:
        old = [step for step in ordered if step <= ordered[-1] - compared_after]
        kept |= {*old[-1:], ordered[len(old)]}
    return kept


class UploadCost:
    """Measured by one worker."""

    def __init__(self) -> None:
        self.alone_s = 0.0
        """A step's time without an upload, a moving average; 0.0: this world has had none."""
        self._beside: list[float] | None = None
        """The steps beside the upload that was begun in this world; None: there is none."""
        self._added = deque([0.0], maxlen=MEASURED_UPLOADS)

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

"""When a checkpoint is due: every so many steps or seconds, or as often as it pays. Pure.

Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9),
1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
FGCS 22(3), 2006.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

SHARE = 0.01
"""The most that checkpoints may cost, as a share of the training's time, where nothing else is
asked for."""
PRIOR_LOSS_EVERY_S = 3600.0
"""What is believed of the fleet before it is known: one loss of everybody an hour."""
SHORTEST_S = 2.0


@dataclass(frozen=True)
class Cadence:
    """Every `steps` steps, every `seconds` seconds, or (both None) as measured, for at most a
    `share` of the time."""

    steps: int | None = None
    seconds: float | None = None
    share: float = SHARE

    @staticmethod
    def parse(text: int | str) -> Cadence:
        """Read 50 (steps), "30s", "auto", or "0.5%": auto with another share of the time. Raises
        ValueError."""
        if text == "auto":
            return Cadence()
        found = re.fullmatch(r"(\d+(?:\.\d+)?)%", str(text))
        if found and 0 < float(found[1]) <= 100:
            return Cadence(share=float(found[1]) / 100)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)s", str(text))
        if found and float(found[1]) > 0:
            return Cadence(seconds=float(found[1]))
        if re.fullmatch(r"\d+", str(text)) and int(text) > 0:
            return Cadence(steps=int(text))
        raise ValueError(
            f"checkpoint_every is {text!r}. Use a number of steps (50), seconds (\"30s\"), "
            f"\"auto\", "
            f"or the most of the time that they may cost (\"0.5%\").")

    def interval_s(self, *, cost_s: float, losses: int, observed_s: float, step_s: float) -> float:
        """Return the seconds between checkpoints, for what one costs the training and what was lost
        so far."""
        if self.steps is not None:
            return self.steps * step_s
        if self.seconds is not None:
            return self.seconds
        return max(SHORTEST_S, best_interval_s(cost_s, loss_every_s(losses, observed_s)),
                   cost_s / self.share)


def best_interval_s(cost_s: float, loss_every_s: float) -> float:
    """Return the interval that loses least: Daly's first two corrections to Young's sqrt(2 C M),
    less C."""
    if cost_s >= 2.0 * loss_every_s:
        return loss_every_s
    ratio = math.sqrt(cost_s / (2.0 * loss_every_s))
    return math.sqrt(
        2.0 * cost_s * loss_every_s) * (1.0 + ratio / 3.0 + ratio * ratio / 9.0) - cost_s


def loss_every_s(losses: int, observed_s: float) -> float:
    """Return the mean time between losses: what was seen, with the prior as if it had been seen
    before."""
    return (PRIOR_LOSS_EVERY_S + observed_s) / (1.0 + losses)


def retained(steps: list[int],
             keep_last: int,
             keep_every: int,
             compared_after: int = 0) -> set[int]:
    """Return the steps whose checkpoints stay: the last ones, and the first at or after each
    multiple of `keep_every`.

    With `compared_after` also the newest that is so many steps older than the last one, and the
    oldest that is not: the next one to be so old. So there is always one to go back to when
    replicas differ, at most twice so old.
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

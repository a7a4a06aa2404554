"""The checkpoints of a life of a run: which one is the last that everybody's loss leaves.

costs, cadence, changes of the world → here → model

What always holds:
1. Checkpoints follow each other as in training/timing.py: the interval counts from the beginning of
   the last one, and none begins while another one is on its way.
2. A leave under notice begins one at once. A loss drops the one that is on its way, and RETRY_S
   after its beginning the next one begins.
3. A life that is longer than REACH intervals is followed only through the last ones, from a random
   phase.

What it does not do: let an upload fail.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

RETRY_S = 2.0
"""From the beginning of a checkpoint that was dropped to the next one."""
REACH = 20


def last_published_s(whole_s: float, leaves: Sequence[float], losses: Sequence[float],
                     next_s: Callable[[float], float], publish_s: Callable[[], float], *,
                     first_s: float, usual_s: float) -> float:
    """Return when the last checkpoint was begun that was published within `whole_s`; 0: none.

    All are times since the first step of a life. `leaves`, `losses`: the times of hosts that left
    under notice, and that were lost, in order. `next_s` returns the time of the next checkpoint
    after one at a time, `publish_s` how long one is on its way. `first_s` is the time of the
    first, `usual_s` the usual interval.
    """
    found, due_s, free_s, since_s = 0.0, first_s, 0.0, 0.0
    if whole_s > REACH * usual_s:
        found = since_s = whole_s - REACH * usual_s
        due_s = next_s(since_s)
    while True:
        begun_s = max(free_s, min(due_s, _after(leaves, since_s)))
        if begun_s >= whole_s:
            return found
        up_s = begun_s + publish_s()
        lost_s = _after(losses, begun_s)
        if lost_s < min(up_s, whole_s):
            due_s, free_s = begun_s + RETRY_S, lost_s
        elif up_s > whole_s:
            return found
        else:
            found, due_s, free_s = begun_s, next_s(begun_s), up_s
        since_s = max(begun_s, math.nextafter(since_s, math.inf))


def _after(times: Sequence[float], moment: float) -> float:
    """Return the first of the times after a moment; infinite: none."""
    at = bisect_right(times, moment)
    return times[at] if at < len(times) else math.inf


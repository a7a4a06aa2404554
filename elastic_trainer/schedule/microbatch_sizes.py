"""The numbers with which no micro-batch is too small for the user's code.

schedule, the size that fails → here → the remedy of an error (warm_up.py)

What always holds: each value that is named was tried on the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule.schedule import Schedule

MOST_TRIED = 1000
"""The largest number of values that are tried for one option."""


def fact_of(schedule: Schedule) -> str:
    """Return where the smallest micro-batch of a run comes from."""
    samples = schedule.smallest_microbatch
    if samples == schedule.global_batch // schedule.microbatches:
        return (f"global_batch {schedule.global_batch} in {schedule.microbatches} micro-batches "
                f"gives micro-batches of {_counted(samples)}")
    left = schedule.dataset_size % schedule.global_batch
    return f"The last step of each epoch has {_counted(left)}, its smallest micro-batch {samples}"


def _counted(samples: int) -> str:
    return "1 sample" if samples == 1 else f"{samples} samples"


def remedy_for(schedule: Schedule, needed: int) -> str:
    """Return what to change, so that the smallest micro-batch of the run has as many samples as
    needed."""
    batch, microbatches = schedule.global_batch, schedule.microbatches
    tried: list[tuple[str, Iterable[Any]]] = [
        ("drop_last", [True]), ("min_microbatch_samples", [needed]),
        ("microbatches", range(min(microbatches, MOST_TRIED) - 1, 0, -1)),
        ("global_batch", (*range(batch + 1, batch + MOST_TRIED), needed * microbatches))]
    found = (_first(schedule, needed, name, values) for name, values in tried)
    *others, last = [one for one in found if one] or ["another dataset"]
    return f"Use {', '.join(others)}{' or ' if others else ''}{last}."


def _first(schedule: Schedule, needed: int, name: str, values: Iterable[Any]) -> str:
    """Return the first value of an option with which all micro-batches are large enough; "":
    none."""
    # With other numbers, min_microbatch_samples of a model with BatchNorm is 2 again (job.py).
    is_too_small = schedule.global_batch < needed * schedule.microbatches
    more = {"min_microbatch_samples": needed} if is_too_small else {}
    for value in values:
        try:
            if replace(schedule, **(more | {name: value})).smallest_microbatch >= needed:
                return f"{name}={value}"
        except ConfigError:
            pass
    return ""

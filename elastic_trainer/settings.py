"""What a person is told at the start, because otherwise an option would be ignored in silence.

train()'s options → here → one line on stderr and one event each, by rank 0 (loop.py)

What always holds:
1. Each remark names the key, the values, and which of them holds.
2. Everything here is a pure function of values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.schedule import Schedule


@dataclass(frozen=True)
class Remark:
    """A sentence for a person, and the event that tells a program the same."""

    event: str
    sentence: str
    facts: dict[str, Any] = field(default_factory=dict)


def remarks_on_length(schedule: Schedule) -> list[Remark]:
    """Say which of `epochs` and `max_steps` ends the run, where `max_steps` cannot be reached."""
    if schedule.max_steps is None or schedule.max_steps <= schedule.steps:
        return []
    facts = {"max_steps": schedule.max_steps, "epochs": schedule.epochs, "steps": schedule.steps}
    return [Remark("job.steps_capped",
                   f"max_steps is {schedule.max_steps}, but epochs={schedule.epochs} has only "
                   f"{schedule.steps} steps, so the run ends after {schedule.steps}. Leave epochs out "
                   f"to train for max_steps.", facts)]


def remarks_on_last_batch(schedule: Schedule) -> list[Remark]:
    """Say how many samples `drop_last` leaves out."""
    if not (dropped := schedule.dropped_samples):
        return []
    return [Remark("job.samples_dropped",
                   f"drop_last leaves {dropped} of {schedule.dataset_size} samples out of each epoch, others each time.",
                   {"samples": dropped, "dataset_size": schedule.dataset_size})]

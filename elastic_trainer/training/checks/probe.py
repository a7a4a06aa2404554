"""See whether a script has changed what its dataset, or its collate function, reads: one sample is
read again.

warm-up (the batch of one sample, twice) → here, now and then → an error

What always holds:
1. It finds a change wherever it is: in a class, a closure, a global name, an array, a file, the
   environment. data/changes.py finds those of attributes at once, in every sample.
2. The sample is the same in each process: the first one of the run. It is read again after the
   steps 1, 2, 4, 8, …, after each epoch, before the world changes, and at the end.
3. A batch that is random by intent, one that cannot be made of a single sample, and a dataset that
   is registered in the option state are left out. With loader processes nothing is read: they have
   the dataset of their start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from elastic_trainer.data.changes import ALONE
from elastic_trainer.data.seeds import random_numbers_put_back
from elastic_trainer.training.job.job import Job
from elastic_trainer.world.replicas import fingerprint

MOST_INSIDE = 100
"""The objects in a dataset of which one may be registered."""


class Probe:
    """One sample of a job, as the warm-up has read it."""

    def __init__(self, job: Job, registered: Callable[[], Iterable[Any]]):
        self._job, self._registered = job, registered
        self._sum: int | None = None
        """Of the batch of one sample; None: it is not looked at."""

    def settle(self) -> None:
        """Read the sample as it is now."""
        try:
            self._sum = None if self._is_left_out() else self._read()
            if self._sum is not None and self._read() != self._sum:
                self._sum = None
        except Exception:  # a batch of one sample may be none
            self._sum = None

    def check(self) -> None:
        """Read it again. Raises RuntimeError if it has other bits."""
        try:
            now = None if self._sum is None else self._read()
        except Exception:
            return  # the next read raises it, where a fault of the machine is known
        if now != self._sum:
            number = int(self._indices()[0])
            raise RuntimeError(
                f"sample {number} of the dataset, or the batch that collate makes of it, has other "
                f"bits than at the start of this worker. So the script has changed what they read "
                f"(a global name, a closure, a class, an array, a file). {ALONE}")

    def _indices(self) -> Any:
        schedule = self._job.schedule
        return schedule.microbatch_samples(0, schedule.first_microbatch(0))[:1]

    def _read(self) -> int:
        schedule, reader = self._job.schedule, self._job.readers.training
        place = 0, schedule.first_microbatch(0)
        with random_numbers_put_back(self._job.device):
            return fingerprint(reader.batch(schedule.microbatch_seed(*place),
                                            (0, 0, place[1], 1), indices=self._indices()))

    def _is_left_out(self) -> bool:
        """Return whether loader processes read, or something that is read with may change."""
        if self._job.readers.training.loader:
            return True
        kept = set(map(id, self._registered()))
        waiting: list[Any] = [self._job.dataset, self._job.collate]
        for one in waiting if kept else ():
            if id(one) in kept:
                return True
            if len(waiting) < MOST_INSIDE:
                inner = vars(one).values() if hasattr(one, "__dict__") else ()
                waiting += [part for value in inner for part in (
                    value if isinstance(value, (list, tuple)) and len(value) < 10 else [value])
                    if hasattr(part, "__dict__")]
        return False

"""Read the batches of a dataset: in the worker itself, or ahead in loader processes.

option `loader` → here → micro-batches, warm-up, evaluation: one batch after the other

What always holds:
1. A batch follows from its key alone. Neither the number of loader processes nor what was read
   before changes a bit of it.
2. With a loader each sample has a seed of its own, so its augmentation does not depend on the other
   samples of its micro-batch. Without one, samples draw from the generators of their micro-batch in
   turn.
3. The processes hold the dataset as it was when they started. If the script changes it in the
   worker, that is an error; also without a loader, where a worker that joins would not have the
   change (changes.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.utils.data._utils.pin_memory as torch_pin

from elastic_trainer.config import ConfigError
from elastic_trainer.data.batches import fetch, to_device
from elastic_trainer.data.changes import Watch
from elastic_trainer.data.leaves import drawn_twice
from elastic_trainer.data.loader_pool import Pool
from elastic_trainer.data.loader_process import DRAWN, Key, Recipe, Work
from elastic_trainer.data.seeds import seed_cpu, seed_everything, seed_of
from elastic_trainer.schedule.schedule import Schedule, sample_seed
from elastic_trainer.wire.proof import Values

pin: Any = torch_pin  # as DataLoader does; it has no types
MOST_WRAPPED = 4
"""The depth up to which an index is searched in datasets of datasets (torch's Subset)."""


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Processes that read samples ahead of the training, on each worker: `Loader(workers=4)`.

    They start before the worker joins, hold the dataset and `collate` as they are then, and end
    with the worker. One that dies or hangs is replaced (`worker.loader_restarted`).

    Raises ConfigError.
    """

    workers: int = 2
    """The number of processes of each worker; 0: the worker reads by itself, with the same
    bits."""
    prefetch: int = 2
    """The number of batches that each process reads ahead."""
    pin: bool = False
    """Copy the batches into pinned memory, for a model on a GPU."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; None: the option `collate`."""
    timeout_s: float = 300.0
    """A process that reads one sample for longer than this is replaced. In seconds."""

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("prefetch", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"Loader has {name}={value!r}. Use a whole number of {least} or "
                                  f"more.")
        if not self.timeout_s > 0:
            raise ConfigError(f"Loader has timeout_s={self.timeout_s!r}. Use a number of seconds "
                              f"above 0.")


def require_loader(given: Any) -> None:
    """Raise ConfigError for an option `loader` that is none."""
    if given is not None and not isinstance(given, Loader):
        raise ConfigError(f"loader is {str(given)[:200]}. Use Loader(workers=4), with the dataset "
                          f"itself as the dataset, or None.")


def not_reported(**facts: Any) -> None:
    """Keep no record of a restart: this worker has no event log yet."""


class Reader:
    """Reads the batches of one dataset."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], recipe: Recipe,
                 loader: Loader | None, device: torch.device, watch: Watch | None = None):
        self.dataset, self.collate, self.recipe = dataset, collate, recipe
        self.loader, self.device = loader, device
        self.report = not_reported
        """Called with the facts of each restart of a process."""
        self._pool: Pool | None = None
        self._of_process = 0
        self._own = Watch(dataset, collate)
        self.watch = watch or self._own
        """That of the dataset of the training, also where another one is read."""

    @property
    def seeds_samples(self) -> bool:
        """True if each sample has a seed of its own: then a micro-batch is seeded again after
        it."""
        return self.loader is not None

    @property
    def pids(self) -> list[int]:
        """The loader processes that run now."""
        return self._pool.pids if self._pool else []

    def start(self) -> None:
        """Start the loader processes, if there are to be any and they do not run."""
        if self._pool or not self.loader or not self.loader.workers:
            return
        work = Work(self.dataset, self.collate, self.recipe, self.loader.workers)
        self._own.start_processes()
        self._pool = Pool(work, self.loader.prefetch, self.loader.timeout_s,
                          lambda facts: self.report(**facts))
        self._of_process = os.getpid()

    def close(self) -> None:
        """End the loader processes."""
        if self._pool and self._of_process == os.getpid():
            self._pool.close()
        self._pool = None

    def batch(self, seed: int, key: Key, ahead: Iterable[Key] = (),
              check: Callable[[], None] = lambda: None,
              indices: numpy.ndarray | None = None) -> Any:
        """Return the batch of a key on the device, as `take` has it. The code that computes it then
        draws from generators with this seed."""
        seed_everything(seed)
        found = to_device(self.take(key, ahead, check, indices), self.device)
        if self.seeds_samples:
            seed_everything(seed)
        return found

    def drawn(self, number: int, following: Sequence[int] = ()) -> Values:
        """Return the digests of a sample, drawn twice with its own random state. Loader processes
        draw the following ones meanwhile."""
        key = DRAWN, number
        self.start()
        if self._pool:
            ahead = ((DRAWN, one) for one in following)
            found: Values = self._pool.take(key, ahead, lambda: None)
            return found
        _, seed = self.recipe(key)
        with one_thread(), self.watch.reading():
            return drawn_twice(self.dataset, number, lambda: seed_cpu(sample_seed(seed, 0)))

    def take(self, key: Key, ahead: Iterable[Key] = (),
             check: Callable[[], None] = lambda: None,
             indices: numpy.ndarray | None = None) -> Any:
        """Return the batch of a key, whose samples are `indices` if the caller knows them.

        Loader processes read those of `ahead` after it. `check` is called while they are waited
        for, and may raise. Raises what dataset and collate raise, RuntimeError for a dataset that
        was changed, and LoaderKilled.
        """
        self.start()
        if self._pool:
            self._own.check()
            return self._pinned(self._pool.take(key, ahead, check))
        with self.watch.reading():
            if self.watch is self._own:
                self.watch.require_unchanged()
            return self._fetched(key, indices)

    def _fetched(self, key: Key, indices: numpy.ndarray | None) -> Any:
        if indices is None or self.seeds_samples:
            indices, seed = self.recipe(key)
        if not self.seeds_samples:
            return fetch(self.dataset, indices, self.collate)
        with one_thread():
            return self._pinned(fetch(self.dataset, indices, self.collate,
                                      lambda place, _: seed_cpu(sample_seed(seed, place))))

    def _pinned(self, batch: Any) -> Any:
        if not (self.loader and self.loader.pin and self.device.type == "cuda"):
            return batch
        return pin.pin_memory(batch)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread, as in a loader process: a sum over several has other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Readers:
    """All that a worker reads with: for its training, and for the datasets of its evaluations."""

    def __init__(self, training: Reader):
        self.training = training
        self._others: dict[tuple[int, Recipe, Loader], Reader] = {}
        self._report: Callable[..., None] = not_reported

    def of(self, dataset: Any, collate: Callable[[list[Any]], Any], recipe: Recipe,
           loader: Loader | None) -> Reader:
        """Return the reader of a dataset. Its processes stay from one evaluation to the next."""
        anew = Reader(dataset, collate, recipe, loader, self.training.device, self.training.watch)
        if loader is None:
            return anew
        key = id(dataset), recipe, loader
        known = self._others.get(key)
        if known and known.collate is collate:
            return known
        if known:
            known.close()
        anew.report = self._report
        self._others[key] = anew
        return anew

    def report_to(self, report: Callable[..., None]) -> None:
        """Report the restarts of processes to an event log."""
        self._report = report
        for reader in (self.training, *self._others.values()):
            reader.report = report

    def close(self) -> None:
        """End all loader processes."""
        for reader in (self.training, *self._others.values()):
            reader.close()


# --- keys -----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class MicrobatchRecipe:
    """The samples and the seed of (step, phase, micro-batch), or of the first `most` samples of
    it."""

    schedule: Schedule

    def __call__(self, key: Key) -> tuple[numpy.ndarray, int]:
        if key[0] == DRAWN:
            return numpy.array(key[1:]), seed_of(self.schedule, 0, 0, 0)
        step, phase, microbatch, *most = key
        indices = self.schedule.microbatch_samples(step, microbatch)
        return indices[:most[0]] if most else indices, seed_of(self.schedule, step, microbatch,
                                                               phase)


@dataclass(frozen=True)
class BatchRecipe:
    """The samples and the seed of a batch of an evaluation, by its number."""

    schedule: Schedule
    samples: int
    batch_size: int

    def __call__(self, key: Key) -> tuple[numpy.ndarray, int]:
        start = key[0] * self.batch_size
        indices = numpy.arange(start, min(start + self.batch_size, self.samples))
        return indices, self.schedule.microbatch_seed(0, key[0])


def keys_after(key: Key, schedule: Schedule, mine: Iterable[int], phases: int) -> Iterator[Key]:
    """Yield the keys of a worker's micro-batches after one of them, to the end of the run."""
    (step, first), microbatches = key[:2], list(mine)
    for now in range(step, schedule.steps):
        for phase in range(first if now == step else 0, phases):
            for microbatch in microbatches:
                if (now, phase,
                    microbatch) > key and schedule.microbatch_positions(now, microbatch):
                    yield now, phase, microbatch

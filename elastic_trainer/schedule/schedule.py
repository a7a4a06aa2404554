"""The schedule: samples, micro-batches, random seeds and learning rate of each step.

config, order (samples of positions) → here → loop (what to compute), vote (what it must total),
verify (what was computed)

What always holds:
1. Everything follows from the job's numbers and `step`. Nothing is remembered, so nothing has to be
   saved.
2. Batch, micro-batches, seeds and learning rate do not depend on the fleet. The fleet only decides
   which worker owns which micro-batch.
3. Every position of an epoch is in exactly one micro-batch of one step. The last batch of an epoch
   has the positions that are left. With `drop_last` it is not trained. The order gives each
   position its sample.
4. Memory is O(1) in the dataset and O(micro-batch) in the answer. The end of an epoch costs as much
   as its start.
5. The bits are the same on every machine: seeds and digests use only integer operations on 64 bits.
   A change to one of them breaks every run that has a checkpoint, so the tests pin literal values.

What it does not do: read data, know the history of a rank, balance micro-batches of unequal cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule.order import SHUFFLED, Epochs, Order
from elastic_trainer.schedule.permutation import MASK, Words, mix, mixed

MAX_GLOBAL_BATCH = 2**22
"""With more samples a batch's digest (a sum of 40-bit numbers) may not fit the vote's int64."""
MAX_DATASET_SIZE = 2**48
"""Up to here the 40-bit draws of a round are even to 2^-16 over the rows, sqrt(2^48) of them."""
_MICROBATCH_SEED, _SAMPLE_SEED = 2, 3
"""The first number of each key, so that two purposes never have the same key. 1 is an epoch's
(order.py)."""
_24 = np.array(24, dtype=np.uint64)
AHEAD = 1024
"""Positions that are looked up at once: numpy takes nearly as long for the 4 of a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The numbers of a job from which all steps follow. Raises ConfigError if they do not fit."""

    dataset_size: int
    """Positions in one epoch: the samples of the dataset, unless the order repeats some."""
    global_batch: int
    """Samples per step, over all workers together. The same for every world size."""
    microbatches: int
    """Parts of the global batch. A worker computes whole micro-batches, so this is the largest
    useful world size."""
    epochs: int | None = None
    """Passes over the dataset; None: as many as `max_steps` needs, or one without `max_steps`."""
    seed: int
    """Root of the permutations and of the micro-batches' random seeds."""
    max_steps: int | None = None
    """End earlier, after this many steps."""
    drop_last: bool = False
    """Leave out the samples at the end of each epoch that are too few for a whole batch."""
    order: Order = SHUFFLED
    """Which sample stands at each position."""
    min_microbatch_samples: int = 1
    """The fewest samples of a micro-batch in an epoch's short last batch: then fewer micro-batches
    have samples."""

    def __post_init__(self) -> None:
        for key in ("dataset_size", "global_batch", "microbatches"):
            require_whole(key, getattr(self, key), 1)
        require_whole("seed", self.seed, 0)
        for key in ("epochs", "max_steps"):
            if getattr(self, key) is not None:
                require_whole(key, getattr(self, key), 1)
        if self.dataset_size > MAX_DATASET_SIZE:
            raise ConfigError(
                f"dataset_size is {self.dataset_size}. Use at most {MAX_DATASET_SIZE}.")
        if self.global_batch > MAX_GLOBAL_BATCH:
            raise ConfigError(
                f"global_batch is {self.global_batch}. Use at most {MAX_GLOBAL_BATCH}.")
        if self.microbatches > self.global_batch:
            raise ConfigError(
                f"microbatches is {self.microbatches}, more than global_batch "
                f"{self.global_batch}, so some would be empty at every step. Use at most "
                f"{self.global_batch} micro-batches.")
        require_whole("min_microbatch_samples", self.min_microbatch_samples, 1)
        if self.min_microbatch_samples > self.global_batch // self.microbatches:
            raise ConfigError(
                f"min_microbatch_samples is {self.min_microbatch_samples}, but global_batch "
                f"{self.global_batch} in {self.microbatches} micro-batches gives some of them "
                f"{self.global_batch // self.microbatches}. Use at most that, or fewer "
                "micro-batches.")
        if self.drop_last and self.dataset_size < self.global_batch:
            raise ConfigError(
                f"drop_last is True and dataset_size {self.dataset_size} is less than global_batch "
                f"{self.global_batch}, so no step would be left. Use a global_batch of at most "
                f"{self.dataset_size}.")
        if self.seed > MASK:
            raise ConfigError(
                f"seed is {self.seed}, which does not fit 64 bits. Use at most {MASK}.")

    @cached_property
    def steps_per_epoch(self) -> int:
        """Count the steps of one epoch, a short last one included."""
        return -(-(self.dataset_size - self.dropped_samples) // self.global_batch)

    @cached_property
    def dropped_samples(self) -> int:
        """Count the samples that each epoch leaves out."""
        return self.dataset_size % self.global_batch if self.drop_last else 0

    @property
    def merges(self) -> bool:
        """True if `min_microbatch_samples` gives the short last batch fewer micro-batches than it
        would have without it."""
        left = self.dataset_size % self.global_batch
        return not self.drop_last and 0 < left and self._parts(left) < min(self.microbatches, left)

    @property
    def smallest_microbatch(self) -> int:
        """Count the samples of the smallest micro-batch of all steps (one without samples is not
        computed)."""
        steps = (0, self.steps_per_epoch - 1)
        sizes = [len(self._batch_positions(step)) for step in steps if step < self.steps]
        return min(size // self._parts(size) for size in sizes)

    @property
    def microbatch_sizes(self) -> set[int]:
        """Return the numbers of samples that the micro-batches of all steps have, without 0."""
        steps = [step for step in (0, self.steps_per_epoch - 1) if step < self.steps]
        return {len(self.microbatch_positions(step, microbatch)) for step in steps
                for microbatch in range(self.microbatches)} - {0}

    @property
    def steps(self) -> int:
        """Count the steps of the whole run. They are numbered from 0."""
        if self.epochs is None and self.max_steps is not None:
            return self.max_steps
        whole = (self.epochs or 1) * self.steps_per_epoch
        return whole if self.max_steps is None else min(whole, self.max_steps)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def batch_size(self, step: int) -> int:
        """Count the samples of a step: `global_batch`, or fewer in the epoch's last step."""
        return len(self._batch_positions(step))

    def microbatch_positions(self, step: int, microbatch: int) -> range:
        """Return the micro-batch's positions in its epoch's order: the batch, split as evenly as
        possible.

        A short batch has fewer parts than micro-batches if the parts would be too small. The
        micro-batches with a part are spread over all micro-batches, so that all workers have some.
        """
        assert 0 <= microbatch < self.microbatches, (microbatch, self.microbatches)
        batch = self._batch_positions(step)
        parts = self._parts(len(batch))
        # The micro-batch has one part, or none.
        first, end = (microbatch * parts // self.microbatches,
                      (microbatch + 1) * parts // self.microbatches)
        return batch[first * len(batch) // parts : end * len(batch) // parts]

    def parts(self, step: int) -> int:
        """Count the micro-batches of a step that have samples."""
        return self._parts(self.batch_size(step))

    def first_microbatch(self, step: int) -> int:
        """Return the first micro-batch of a step that has samples."""
        return next(microbatch for microbatch in range(self.microbatches)
                    if self.microbatch_positions(step, microbatch))

    def microbatch_samples(self, step: int, microbatch: int) -> npt.NDArray[np.int64]:
        """Return the micro-batch's dataset indices, shape (samples,). May be empty in a short last
        batch."""
        return self._samples(step, self.microbatch_positions(step, microbatch))

    def samples_of(self, step: int, microbatches: range) -> list[npt.NDArray[np.int64]]:
        """Return the samples of some micro-batches that follow each other, each by itself."""
        parts = [self.microbatch_positions(step, microbatch) for microbatch in microbatches]
        if not parts:
            return []
        start = parts[0].start
        samples = self._samples(step, range(start, parts[-1].stop))
        return [samples[part.start - start : part.stop - start] for part in parts]

    def microbatch_weight(self, step: int, microbatch: int) -> float:
        """Return the micro-batch's share of the batch: the weight of its mean in the mean of the
        batch."""
        return len(self.microbatch_positions(step, microbatch)) / self.batch_size(step)

    def microbatch_seed(self, step: int, microbatch: int) -> int:
        """Return the 63-bit seed of the random generators (dropout, augmentation) in one
        micro-batch of one step."""
        return mix(_MICROBATCH_SEED, self.seed, step, microbatch) >> 1

    def batch_digest(self, step: int) -> int:
        """Return the sum that the micro-batches' digests have if every sample of the step counts
        exactly once."""
        return samples_digest(self._counted(step, self._batch_positions(step)))

    def digest(self, step: int, done: Mapping[int, npt.NDArray[np.int64]]) -> int:
        """Return the digest of some micro-batches, by their samples: what a worker votes."""
        found = [_numbers(self.microbatch_positions(step, microbatch)) for microbatch in done
                 ] if self.order.counts_positions else list(done.values())
        return samples_digest(np.concatenate(found)) if found else 0

    def batch_digests(self, steps: range) -> list[int]:
        """Return `batch_digest` of consecutive steps of one epoch, in a few microseconds each."""
        assert self.epoch(steps[0]) == self.epoch(steps[-1]), f"steps {steps} are of two epochs"
        first, last = (self._batch_positions(step) for step in (steps[0], steps[-1]))
        bits = _digested(self._counted(steps[0], range(first.start, last.stop)))
        starts = np.arange(0, len(bits), self.global_batch)
        digests: list[int] = np.add.reduceat(bits, starts).tolist()
        return digests

    def dropped_digest(self, epoch: int) -> int:
        """Return the digest of the samples that an epoch leaves out."""
        end = self.dataset_size
        return samples_digest(
            self._counted(epoch * self.steps_per_epoch, range(end - self.dropped_samples, end)))

    def _parts(self, samples: int) -> int:
        """Return the number of micro-batches into which a batch of this size is cut.

        It is the largest number that leaves no micro-batch under `min_microbatch_samples`. No
        micro-batch is larger than in a full batch, because a larger one may not fit the memory.
        This decides if no number fits both, for example if one sample is left.
        """
        largest = -(-self.global_batch // self.microbatches)
        return max(min(self.microbatches, samples // self.min_microbatch_samples),
                   -(-samples // largest))

    def _batch_positions(self, step: int) -> range:
        assert step >= 0, f"step {step}"
        start = step % self.steps_per_epoch * self.global_batch
        return range(start, min(start + self.global_batch, self.dataset_size))

    def _samples(self, step: int, positions: range) -> npt.NDArray[np.int64]:
        if len(positions) >= AHEAD:
            return self._ordered(self.epoch(step), positions)
        blocks = range(positions.start // AHEAD, -(-positions.stop // AHEAD))
        around = np.concatenate([_block(self, self.epoch(step), number) for number in blocks]
                                or [_numbers(positions)])
        start = blocks.start * AHEAD
        found: npt.NDArray[np.int64] = around[positions.start - start :][: len(positions)].copy()
        return found

    def _ordered(self, epoch: int, positions: range) -> npt.NDArray[np.int64]:
        epochs = Epochs(self.dataset_size, self.dataset_size - self.dropped_samples,
                        self.global_batch, self.seed)
        return self.order.samples(epochs, epoch, _numbers(positions))

    def _counted(self, step: int, positions: range) -> npt.NDArray[np.int64]:
        """Return what the digests count: samples; or positions, where the order repeats samples or
        has a table that the event log has not."""
        if self.order.counts_positions:
            return _numbers(positions)
        return self._samples(step, positions)


@lru_cache(maxsize=8)
def _block(schedule: Schedule, epoch: int, number: int) -> npt.NDArray[np.int64]:
    """Return the samples at some positions of an epoch that follow each other, for all steps that
    take some of them."""
    start = number * AHEAD
    return schedule._ordered(epoch, range(start, min(start + AHEAD, schedule.dataset_size)))


def _numbers(positions: range) -> npt.NDArray[np.int64]:
    return np.arange(positions.start, positions.stop, dtype=np.int64)


def sample_seed(seed: int, place: int) -> int:
    """Return the 63-bit seed of the sample at a place of a micro-batch with this seed."""
    return mix(_SAMPLE_SEED, seed, place) >> 1


def samples_digest(samples: npt.NDArray[np.int64]) -> int:
    """Return a digest of a multiset of samples: the sum of 40 well mixed bits of each.

    The order does not matter. The digests of parts add up to that of the whole, so an allreduce can
    sum them.
    """
    assert samples.size <= MAX_GLOBAL_BATCH, f"a digest of {samples.size} samples may not fit int64"
    return int(_digested(samples).sum(dtype=np.uint64))


def _digested(samples: npt.NDArray[np.int64]) -> Words:
    bits = mixed(samples)
    bits >>= _24
    return bits


def owned_microbatches(rank: int, size: int, microbatches: int) -> range:
    """Return the micro-batches of one rank: ceil(micro-batches / size) neighbours; fewer or none
    for the last ranks."""
    assert 0 <= rank < size, f"rank {rank} of {size}"
    each = -(-microbatches // size)
    return range(min(rank * each, microbatches), min((rank + 1) * each, microbatches))


def dealt_microbatches(rank: int, size: int, microbatches: int) -> range:
    """Return the micro-batches of one rank where they are dealt one by one: each round of all ranks
    has neighbours, so their sums join in the fixed tree as soon as the round is over."""
    assert 0 <= rank < size, f"rank {rank} of {size}"
    return range(rank, microbatches, size)


def aligned_subtrees(owned: range, microbatches: int) -> list[range]:
    """Cut `owned` into the fewest nodes of the fixed binary tree over range(micro-batches), left to
    right.

    A node is range(k * 2**j, min((k + 1) * 2**j, micro-batches)): the tree over the next power of
    two, without the leaves that are missing.
    """
    is_within = owned.step == 1 and 0 <= owned.start and owned.stop <= microbatches
    assert not owned or is_within, f"{owned}, {microbatches}"
    nodes: list[range] = []
    start = owned.start
    while start < owned.stop:
        width = 1
        while (start % (2 * width) == 0 and width < microbatches
               and min(start + 2 * width, microbatches) <= owned.stop):
            width *= 2
        nodes.append(range(start, min(start + width, microbatches)))
        start = nodes[-1].stop
    return nodes


def require_whole(key: str, value: object, least: int) -> None:
    """Raise ConfigError unless a value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key} is {value!r}. Use a whole number from {least}.")


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

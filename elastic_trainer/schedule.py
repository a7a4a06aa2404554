"""The schedule: samples, shards, random seeds and learning rate of each step.

config → here → loop (what to compute), vote (what it must total), verify (what was computed)

What always holds:
1. Everything follows from the job's numbers and `step`. Nothing is remembered, so nothing has to be
   saved.
2. Batch, shards, seeds and learning rate do not depend on the fleet. The fleet only decides which
   worker owns which shard.
3. Every sample of an epoch is in exactly one shard of one step. The last batch of an epoch has the
   samples that are left. With `drop_last` it is not trained, and each epoch leaves out other
   samples.
4. Memory is O(1) in the dataset and O(shard) in the answer. The end of an epoch costs as much as
   its start.
5. The bits are the same on every machine: permutation, seeds and digests use only integer
   operations on 64 bits. A change to one of them breaks every run that has a checkpoint, so the
   tests pin literal values.

What it does not do: read data, know the history of a rank, balance shards of unequal cost.

Dear to undo: the permutation is a Feistel network on a rectangle that just covers range(size), with
both sides about sqrt(size). The usual choice is the next power of four. The rectangle exceeds
`size` by less than a row, so almost no position has to walk the cycle again. On the power of four
up to 3/4 of all positions would. A test of randomness that this permutation fails, and a true
shuffle passes, would change our mind.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), generalized Feistel and
cycle walking; splitmix64, https://prng.di.unimi.it/splitmix64.c, for the constants of the mix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic_trainer.config import ConfigError

MAX_GLOBAL_BATCH = 2**22
"""With more samples a batch's digest (a sum of 40-bit numbers) may not fit the vote's int64."""
MAX_DATASET_SIZE = 2**48
"""Up to here the 40-bit draws of a round are even to 2^-16 over the rows, sqrt(2^48) of them."""
_SMALL = 2**12
"""A smaller dataset takes more rounds. With 6 rounds a chi-square test fails up to 12 samples."""
_ROUNDS_SMALL, _ROUNDS = 12, 6
_MASK = 2**64 - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_EPOCH_KEY, _SHARD_SEED, _SAMPLE_SEED = 1, 2, 3
"""The first number of each key, so that two purposes never have the same key."""
_Words = npt.NDArray[np.uint64]


def _u64(value: int) -> _Words:
    # An array without dimensions is faster beside a short array than a scalar.
    return np.array(value, dtype=np.uint64)


_GOLDEN_U64, _MIX_1_U64, _MIX_2_U64 = _u64(_GOLDEN), _u64(_MIX_1), _u64(_MIX_2)
_24, _27, _30, _31, _32 = (_u64(bits) for bits in (24, 27, 30, 31, 32))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The numbers of a job from which all steps follow. Raises ConfigError if they do not fit."""

    dataset_size: int
    """Samples in one epoch."""
    global_batch: int
    """Samples per step, over all workers together. The same for every world size."""
    shards: int
    """Parts of the global batch. A worker computes whole shards, so this is the largest useful
    world size."""
    epochs: int | None = None
    """Passes over the dataset; None: as many as `max_steps` needs, or one without `max_steps`."""
    seed: int
    """Root of the permutations and of the shards' random seeds."""
    max_steps: int | None = None
    """End earlier, after this many steps."""
    drop_last: bool = False
    """Leave out the samples at the end of each epoch that are too few for a whole batch."""
    min_shard_samples: int = 1
    """The fewest samples of a shard in an epoch's short last batch: then fewer shards have
    samples."""

    def __post_init__(self) -> None:
        for key in ("dataset_size", "global_batch", "shards"):
            _require_whole(key, getattr(self, key), 1)
        _require_whole("seed", self.seed, 0)
        for key in ("epochs", "max_steps"):
            if getattr(self, key) is not None:
                _require_whole(key, getattr(self, key), 1)
        if self.dataset_size > MAX_DATASET_SIZE:
            raise ConfigError(
                f"dataset_size is {self.dataset_size}. Use at most {MAX_DATASET_SIZE}.")
        if self.global_batch > MAX_GLOBAL_BATCH:
            raise ConfigError(
                f"global_batch is {self.global_batch}. Use at most {MAX_GLOBAL_BATCH}.")
        if self.shards > self.global_batch:
            raise ConfigError(
                f"shards is {self.shards}, more than global_batch {self.global_batch}, so some "
                f"would be empty at every step. Use at most {self.global_batch} shards.")
        _require_whole("min_shard_samples", self.min_shard_samples, 1)
        if self.min_shard_samples > self.global_batch // self.shards:
            raise ConfigError(
                f"min_shard_samples is {self.min_shard_samples}, but global_batch "
                f"{self.global_batch} in {self.shards} shards gives some of them "
                f"{self.global_batch // self.shards}. Use at most that, or fewer shards.")
        if self.drop_last and self.dataset_size < self.global_batch:
            raise ConfigError(
                f"drop_last is True and dataset_size {self.dataset_size} is less than global_batch "
                f"{self.global_batch}, so no step would be left. Use a global_batch of at most "
                f"{self.dataset_size}.")
        if self.seed > _MASK:
            raise ConfigError(
                f"seed is {self.seed}, which does not fit 64 bits. Use at most {_MASK}.")

    @property
    def steps_per_epoch(self) -> int:
        """Count the steps of one epoch, a short last one included."""
        return -(-(self.dataset_size - self.dropped_samples) // self.global_batch)

    @property
    def dropped_samples(self) -> int:
        """Count the samples that each epoch leaves out."""
        return self.dataset_size % self.global_batch if self.drop_last else 0

    @property
    def merges(self) -> bool:
        """True if `min_shard_samples` gives the short last batch fewer shards than it would have
        without it."""
        left = self.dataset_size % self.global_batch
        return not self.drop_last and 0 < left and self._parts(left) < min(self.shards, left)

    @property
    def smallest_shard(self) -> int:
        """Count the samples of the smallest shard of all steps (one without samples is not
        computed)."""
        steps = (0, self.steps_per_epoch - 1)
        sizes = [len(self._batch_positions(step)) for step in steps if step < self.steps]
        return min(size // self._parts(size) for size in sizes)

    @property
    def shard_sizes(self) -> set[int]:
        """Return the numbers of samples that the shards of all steps have, without 0."""
        steps = [step for step in (0, self.steps_per_epoch - 1) if step < self.steps]
        return {len(self.shard_positions(step, shard)) for step in steps
                for shard in range(self.shards)} - {0}

    @property
    def steps(self) -> int:
        """Count the steps of the whole run. They are numbered from 0."""
        if self.epochs is None and self.max_steps is not None:
            return self.max_steps
        whole = (self.epochs or 1) * self.steps_per_epoch
        return whole if self.max_steps is None else min(whole, self.max_steps)

    def epoch(self, step: int) -> int:
        """Return the epoch of a step, from 0."""
        return step // self.steps_per_epoch

    def batch_size(self, step: int) -> int:
        """Count the samples of a step: `global_batch`, or fewer in the epoch's last step."""
        return len(self._batch_positions(step))

    def shard_positions(self, step: int, shard: int) -> range:
        """Return the shard's positions in its epoch's order: the batch, split as evenly as
        possible.

        A short batch has fewer parts than shards if the parts would be too small. The shards with a
        part are spread over all shards, so that all workers have some.
        """
        assert 0 <= shard < self.shards, f"shard {shard} of {self.shards}"
        batch = self._batch_positions(step)
        parts = self._parts(len(batch))
        # The shard has one part, or none.
        first, end = (edge * parts // self.shards for edge in (shard, shard + 1))
        return batch[first * len(batch) // parts : end * len(batch) // parts]

    def first_shard(self, step: int) -> int:
        """Return the first shard of a step that has samples."""
        return next(shard for shard in range(self.shards) if self.shard_positions(step, shard))

    def shard_samples(self, step: int, shard: int) -> npt.NDArray[np.int64]:
        """Return the shard's dataset indices, shape (samples,). May be empty in a short last
        batch."""
        return self._samples(step, self.shard_positions(step, shard))

    def shard_weight(self, step: int, shard: int) -> float:
        """Return the shard's share of the batch: the weight of its mean in the mean of the
        batch."""
        return len(self.shard_positions(step, shard)) / self.batch_size(step)

    def shard_seed(self, step: int, shard: int) -> int:
        """Return the 63-bit seed of the random generators (dropout, augmentation) in one shard of
        one step."""
        return _mix(_SHARD_SEED, self.seed, step, shard) >> 1

    def batch_digest(self, step: int) -> int:
        """Return the sum that the shards' digests have if every sample of the step counts exactly
        once."""
        return samples_digest(self._samples(step, self._batch_positions(step)))

    def batch_digests(self, steps: range) -> list[int]:
        """Return `batch_digest` of consecutive steps of one epoch, in a few microseconds each."""
        assert self.epoch(steps[0]) == self.epoch(steps[-1]), f"steps {steps} are of two epochs"
        first, last = (self._batch_positions(step) for step in (steps[0], steps[-1]))
        mixed = _mixed_samples(self._samples(steps[0], range(first.start, last.stop)))
        starts = np.arange(0, len(mixed), self.global_batch)
        digests: list[int] = np.add.reduceat(mixed, starts).tolist()
        return digests

    def dropped_digest(self, epoch: int) -> int:
        """Return the digest of the samples that an epoch leaves out."""
        end = self.dataset_size
        return samples_digest(
            self._samples(epoch * self.steps_per_epoch, range(end - self.dropped_samples, end)))

    def _parts(self, samples: int) -> int:
        """Return the number of shards into which a batch of this size is cut.

        It is the largest number that leaves no shard under `min_shard_samples`. No shard is larger
        than in a full batch, because a larger one may not fit the memory. This decides if no number
        fits both, for example if one sample is left.
        """
        largest = -(-self.global_batch // self.shards)
        return max(min(self.shards, samples // self.min_shard_samples), -(-samples // largest))

    def _batch_positions(self, step: int) -> range:
        assert step >= 0, f"step {step}"
        start = step % self.steps_per_epoch * self.global_batch
        return range(start, min(start + self.global_batch, self.dataset_size))

    def _samples(self, step: int, positions: range) -> npt.NDArray[np.int64]:
        key = _mix(_EPOCH_KEY, self.seed, self.epoch(step))
        return permute(np.arange(positions.start, positions.stop, dtype=np.int64),
                       self.dataset_size, key)


def permute(positions: npt.NDArray[np.int64], size: int, key: int) -> npt.NDArray[np.int64]:
    """Map positions, shape (n,), to their places in the permutation of range(size) that a 64-bit
    key names.

    Memory is O(n), whatever the size.
    """
    if not positions.size:
        return positions.astype(np.int64)
    assert 0 <= positions.min() and positions.max() < size, f"a position outside range({size})"
    height = math.isqrt(size - 1) + 1
    rows, columns = _u64(height), _u64(-(-size // height))
    round_keys = [_u64(_mix(key, i)) for i in range(_ROUNDS_SMALL if size < _SMALL else _ROUNDS)]
    places = _shuffle_rectangle(positions.astype(np.uint64), rows, columns, round_keys)
    while places.max() >= size:
        outside = np.flatnonzero(places >= _u64(size))
        places[outside] = _shuffle_rectangle(places[outside], rows, columns, round_keys)  # walk on
    return places.astype(np.int64)


def sample_seed(seed: int, place: int) -> int:
    """Return the 63-bit seed of the sample at a place of a shard with this seed."""
    return _mix(_SAMPLE_SEED, seed, place) >> 1


def samples_digest(samples: npt.NDArray[np.int64]) -> int:
    """Return a digest of a multiset of samples: the sum of 40 well mixed bits of each.

    The order does not matter. The digests of parts add up to that of the whole, so an allreduce can
    sum them.
    """
    assert samples.size <= MAX_GLOBAL_BATCH, f"a digest of {samples.size} samples may not fit int64"
    return int(_mixed_samples(samples).sum(dtype=np.uint64))


def _mixed_samples(samples: npt.NDArray[np.int64]) -> _Words:
    """Return 40 well mixed bits of each sample."""
    x = samples.astype(np.uint64)
    x += _GOLDEN_U64
    x ^= x >> _30
    x *= _MIX_1_U64
    x ^= x >> _27
    x *= _MIX_2_U64
    x ^= x >> _31
    x >>= _24
    return x


def owned_shards(rank: int, size: int, shards: int) -> range:
    """Return the shards of one rank: ceil(shards / size) neighbours; fewer or none for the last
    ranks."""
    assert 0 <= rank < size, f"rank {rank} of {size}"
    each = -(-shards // size)
    return range(min(rank * each, shards), min((rank + 1) * each, shards))


def owner_of(shard: int, size: int, shards: int) -> int:
    """Return the rank that owns a shard."""
    return shard // -(-shards // size)


def aligned_subtrees(owned: range, shards: int) -> list[range]:
    """Cut `owned` into the fewest nodes of the fixed binary tree over range(shards), left to right.

    A node is range(k * 2**j, min((k + 1) * 2**j, shards)): the tree over the next power of two,
    without the leaves that are missing.
    """
    is_within = owned.step == 1 and 0 <= owned.start and owned.stop <= shards
    assert not owned or is_within, f"{owned}, {shards}"
    nodes: list[range] = []
    start = owned.start
    while start < owned.stop:
        width = 1
        while (start % (2 * width) == 0 and width < shards
               and min(start + 2 * width, shards) <= owned.stop):
            width *= 2
        nodes.append(range(start, min(start + width, shards)))
        start = nodes[-1].stop
    return nodes


def _shuffle_rectangle(places: _Words, rows: _Words, columns: _Words,
                       round_keys: list[_Words]) -> _Words:
    row, column = np.divmod(places, columns)
    for i, round_key in enumerate(round_keys):
        if i % 2 == 0:
            row += _draw(column, round_key)
            row %= rows
        else:
            column += _draw(row, round_key)
            column %= columns
    row *= columns
    row += column
    return row


def _draw(half: _Words, round_key: _Words) -> _Words:
    """Mix one half into 40 bits, to which the modulo of the other half is applied."""
    x = half ^ round_key
    x *= _MIX_1_U64
    x ^= x >> _32
    x *= _MIX_2_U64
    x >>= _24
    return x


def _mix(*numbers: int) -> int:
    """Hash whole numbers into 64 bits. Their order matters."""
    x = 0
    for number in numbers:
        x = ((x ^ number) + _GOLDEN) & _MASK
        x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
        x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
        x ^= x >> 31
    return x


def _require_whole(key: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key} is {value!r}. Use a whole number from {least}.")

"""The order of an epoch: which sample stands at each position.

option `order`, weights or lengths → here → schedule (samples of a micro-batch), identity of the run

    "shuffled"              each sample once, in a keyed permutation of its epoch
    "sequential"            each sample once, in the order of the dataset
    Weighted(weights)       drawn with replacement, with the weights of the samples
    LikeLength(lengths)     each sample once; the samples of a batch have like lengths
    Mixed                   several datasets by weights (data/mixture.py makes it)

What always holds:
1. The sample of a position follows from the order's numbers, the seed and the position alone. No
   draw depends on the fleet, or on earlier draws.
2. The bits are the same on every machine: integers only, but for the scale of weights. That takes
   one rounded sum (math.fsum is exact), one division and one product for each weight.
3. A table (weights, lengths) is built by each worker from what the user gives. Its SHA-256 belongs
   to the identity of the run: a worker or a resumed run with another table is refused.
4. With `drop_last` no part of a mixture is lost: its positions go on where the last epoch ended.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic_trainer.config import ConfigError
from elastic_trainer.schedule.permutation import Indices, mix, mixed, permute

_EPOCH_KEY, _DRAW_KEY, _WINDOW_KEY, _BLOCK_KEY, _PART_KEY = 1, 4, 5, 6, 7
"""The first number of each key; 2 and 3 are those of seeds (schedule.py)."""
SCALE = 2**44
"""The sum of scaled weights. A draw of 63 bits modulo it is even to 2^-19."""
BLOCK = 10_000
"""The positions of a mixture in which its parts have their exact shares."""
LEAST_BLOCK = 1_000
KEPT_WINDOWS = 4
OTHERS_EACH_TIME, THE_SAME_EACH_TIME = "others each time", "the same each time"
_1 = np.array(1, dtype=np.uint64)


@dataclass(frozen=True)
class Epochs:
    """The numbers of a schedule that an order needs."""

    size: int
    """Positions of an epoch."""
    kept: int
    """Those that are trained: fewer with `drop_last`."""
    global_batch: int
    seed: int


class Order:
    """What gives each position of an epoch its sample."""

    name: str
    """The name in the event log and in the identity of the run."""
    sha256: str = ""
    """The hash of its table; "": it has none."""
    counts_positions: bool = True
    """True if digests count positions: samples repeat, or follow from a table."""
    drops: str = ""
    """Which samples `drop_last` leaves out; "": none is lost by it."""

    def epoch_size(self, dataset_size: int) -> int:
        """Return the number of positions of an epoch. Raises ConfigError if the dataset does not
        fit."""
        return dataset_size

    def samples(self, epochs: Epochs, epoch: int, positions: Indices) -> Indices:
        """Return the samples at positions of an epoch, shape (n,)."""
        raise AssertionError(f"the samples of {self.name} follow from a table that is not here")


@dataclass(frozen=True)
class Plain(Order):
    """An order without a table: "shuffled" or "sequential"."""

    name: str
    drops: str
    counts_positions: bool = False

    def samples(self, epochs: Epochs, epoch: int, positions: Indices) -> Indices:
        if self.name == "sequential":
            return positions
        return permute(positions, epochs.size, mix(_EPOCH_KEY, epochs.seed, epoch))


SHUFFLED = Plain("shuffled", OTHERS_EACH_TIME)
SEQUENTIAL = Plain("sequential", THE_SAME_EACH_TIME)
PLAIN = {one.name: one for one in (SHUFFLED, SEQUENTIAL)}


@dataclass(frozen=True)
class Named(Order):
    """An order of which only the event log is known: its positions are, and its samples are not."""

    name: str
    sha256: str
    drops: str


class Weighted(Order):
    """Draw samples with replacement: `order=Weighted(weights)`.

    `weights` has one number of 0 or more for each sample of the dataset. `samples` is the number of
    draws in an epoch; by default as many as the dataset has samples. A weight is rounded to a part
    of 2^-44 of their sum, and one above 0 stays above 0.

    Raises ConfigError.
    """

    name = "weighted"

    def __init__(self, weights: Any, samples: int | None = None):
        shares = scaled("weights", weights)
        if samples is not None and (type(samples) is not int or samples < 1):
            raise ConfigError(f"Weighted has samples={samples!r}. Use the number of draws in an "
                              f"epoch, 1 or more, or None.")
        self.size = len(shares)
        self._samples = self.size if samples is None else samples
        self._ends: Indices = np.cumsum(shares)
        self.sha256 = sha256_of(shares)

    def epoch_size(self, dataset_size: int) -> int:
        require_size("Weighted", "weights", self.size, dataset_size)
        return self._samples

    def samples(self, epochs: Epochs, epoch: int, positions: Indices) -> Indices:
        bits = mixed(positions, mix(_DRAW_KEY, epochs.seed, epoch)) >> _1
        draws = bits.astype(np.int64) % self._ends[-1]
        found: Indices = np.searchsorted(self._ends, draws, side="right").astype(np.int64)
        return found


class LikeLength(Order):
    """Let the samples of a batch have like lengths: `order=LikeLength(lengths)`.

    `lengths` has a whole number for each sample of the dataset. Each epoch is shuffled and cut into
    windows of `window` batches. A window is sorted by length and cut into batches, and its batches
    are shuffled. Each sample comes once in an epoch. The short last batch has samples of all
    lengths.

    Raises ConfigError.
    """

    name, drops = "like_length", OTHERS_EACH_TIME

    def __init__(self, lengths: Any, window: int = 50):
        found = np.asarray(lengths)
        if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
            raise ConfigError(f"LikeLength has lengths of shape {found.shape} and type "
                              f"{found.dtype}. Give one whole number for each sample.")
        if type(window) is not int or window < 1:
            raise ConfigError(f"LikeLength has window={window!r}. Use a number of batches, 1 or "
                              f"more.")
        self.window = window
        self._lengths: Indices = found.astype(np.int64)
        self.sha256 = sha256_of(self._lengths, window)
        self._known: dict[tuple[int, int, int], Indices] = {}
        """The samples of the newest windows."""

    def epoch_size(self, dataset_size: int) -> int:
        require_size("LikeLength", "lengths", len(self._lengths), dataset_size)
        return dataset_size

    def samples(self, epochs: Epochs, epoch: int, positions: Indices) -> Indices:
        width = self.window * epochs.global_batch
        windows = positions // width
        found = np.empty_like(positions)
        for number in np.unique(windows).tolist():
            here = windows == number
            found[here] = self._window(epochs, epoch, number)[positions[here] - number * width]
        return found

    def _window(self, epochs: Epochs, epoch: int, number: int) -> Indices:
        key = epochs.seed, epoch, number
        if key not in self._known:
            while len(self._known) >= KEPT_WINDOWS:
                self._known.pop(next(iter(self._known)), None)
            self._known[key] = self._sorted(epochs, epoch, number)
        return self._known[key]

    def _sorted(self, epochs: Epochs, epoch: int, number: int) -> Indices:
        batch, width = epochs.global_batch, self.window * epochs.global_batch
        positions = np.arange(number * width, min((number + 1) * width, epochs.size))
        members = permute(positions, epochs.size, mix(_EPOCH_KEY, epochs.seed, epoch))
        whole = len(members) // batch
        last = members[whole * batch:]
        members = members[:whole * batch]
        members = members[np.argsort(self._lengths[members], kind="stable")].reshape(whole, batch)
        turn = permute(np.arange(whole), whole, mix(_WINDOW_KEY, epochs.seed, epoch, number))
        return np.concatenate([members[turn].reshape(-1), last])


class Mixed(Order):
    """The order of a mixture: the parts by their weights, and each part in epochs of its own.

    In each block of positions each part has its exact share, in an order drawn for the block. The
    samples of a part repeat only after all of it.
    """

    name = "mixed"

    def __init__(self, sizes: Sequence[int], shares: Sequence[int], samples: int):
        self._sizes, self._shares = list(sizes), np.array(shares, dtype=np.int64)
        self._ends: Indices = np.cumsum(self._shares)
        self._starts: Indices = self._ends - self._shares
        self._first: Indices = np.cumsum([0, *self._sizes[:-1]])
        self._samples = samples
        self.sha256 = sha256_of(np.array([self._sizes, self._shares], dtype=np.int64))

    def epoch_size(self, dataset_size: int) -> int:
        return self._samples

    def samples(self, epochs: Epochs, epoch: int, positions: Indices) -> Indices:
        """Return the samples at positions of an epoch: numbers in the concatenation of all
        parts."""
        places, size = epoch * epochs.kept + positions, int(self._ends[-1])
        blocks, slots = places // size, places % size
        for block in np.unique(blocks).tolist():
            here = blocks == block
            slots[here] = permute(slots[here], size, mix(_BLOCK_KEY, epochs.seed, block))
        parts = np.searchsorted(self._ends, slots, side="right")
        turns = blocks * self._shares[parts] + slots - self._starts[parts]
        found = np.empty_like(places)
        for part in np.unique(parts).tolist():
            here = parts == part
            found[here] = self._first[part] + self._of_part(part, turns[here], epochs.seed)
        return found

    def _of_part(self, part: int, turns: Indices, seed: int) -> Indices:
        size = self._sizes[part]
        rounds, places = turns // size, turns % size
        for number in np.unique(rounds).tolist():
            here = rounds == number
            places[here] = permute(places[here], size, mix(_PART_KEY, seed, part, number))
        return places


def block_shares(weights: Sequence[float]) -> list[int]:
    """Return how many positions of a block each part has: exact for whole numbers of a small sum,
    else to 1 in 10,000."""
    if all(float(weight).is_integer() for weight in weights) and sum(weights) <= BLOCK:
        whole = [int(weight) for weight in weights]
        return [weight * -(-LEAST_BLOCK // sum(whole)) for weight in whole]
    total = math.fsum(weights)
    exact = [weight / total * BLOCK for weight in weights]
    shares = [math.floor(share) for share in exact]
    nearest = sorted(range(len(exact)), key=lambda part: (shares[part] - exact[part], part))
    for part in nearest[:BLOCK - sum(shares)]:
        shares[part] += 1
    return shares


def scaled(name: str, weights: Any) -> Indices:
    """Return weights as whole numbers with a sum of about SCALE. Raises ConfigError."""
    found = np.asarray(weights, dtype=np.float64)
    if found.ndim != 1 or not found.size:
        raise ConfigError(f"{name} have the shape {found.shape}. Give one number for each sample.")
    if not np.isfinite(found).all() or (found < 0).any():
        wrong = int(np.flatnonzero(~(np.isfinite(found) & (found >= 0)))[0])
        raise ConfigError(f"{name}[{wrong}] is {found[wrong]}. Use numbers of 0 or more.")
    if not (total := math.fsum(found)):
        raise ConfigError(f"all {found.size} {name} are 0, so no sample could be drawn. Use a "
                          f"number above 0 for at least one.")
    shares = np.floor(found / total * SCALE).astype(np.int64)
    return np.where(found > 0, np.maximum(shares, 1), 0)


def require_size(order: str, table: str, size: int, dataset_size: int) -> None:
    if size != dataset_size:
        raise ConfigError(f"{order} has {size} {table}, but the dataset has {dataset_size} "
                          f"samples. Give one number for each sample.")


def sha256_of(table: Indices, *more: int) -> str:
    """Return the hash of a table, as little-endian 64-bit integers."""
    return hashlib.sha256(table.astype("<i8").tobytes() + repr((table.shape, more)).encode()
                          ).hexdigest()


def named(given: Any) -> Order:
    if isinstance(given, str) and given in PLAIN:
        return PLAIN[given]
    if isinstance(given, (Weighted, LikeLength)):
        return given
    raise ConfigError(f"order is {given!r}. Use {' or '.join(map(repr, PLAIN))}, "
                      f"Weighted(weights) or LikeLength(lengths).")


def facts_of(order: Order) -> dict[str, str]:
    """Return what identity and event log have of an order: nothing for that of version 0.1."""
    if order is SHUFFLED:
        return {}
    return {"order": order.name} | ({"order_sha256": order.sha256} if order.sha256 else {})


def known_by(facts: Mapping[str, Any]) -> Order:
    """Return the order of an event log."""
    name = facts.get("order") or SHUFFLED.name
    drops = LikeLength.drops if name == LikeLength.name else ""
    return PLAIN.get(name) or Named(name, facts.get("order_sha256") or "", drops)

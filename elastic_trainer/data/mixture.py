"""Several datasets as one, mixed by weights.

datasets, weights → here → the samples of all (a dataset), and their order (order.py, Mixed)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from elastic_trainer.config import ConfigError
from elastic_trainer.data.batches import MOST_NAMED, add_note
from elastic_trainer.schedule.order import (
    BLOCK,
    SHUFFLED,
    Mixed,
    Order,
    block_shares,
    named,
    scaled,
)


def order_of(dataset: Any, given: Any) -> Order:
    """Return the order of a dataset: that of the option, or of a mixture. Raises ConfigError."""
    order = named(given)
    if not isinstance(dataset, Mixture):
        return order
    if order is not SHUFFLED:
        raise ConfigError(f"order is {given!r}, but the dataset is a Mixture, which has an order "
                          f"of its own. Leave order out.")
    return dataset.order


class Mixture:
    """Mix datasets by weights: `Mixture({"a": first, "b": second}, weights={"a": 7, "b": 3})`.

    Of 10 samples, 7 are of `first` and 3 of `second`, in an order that is drawn. Each dataset has
    epochs of its own: its samples repeat only after all of it, however often that is in an epoch of
    the mixture. `samples` is the number of samples of such an epoch; by default as many as all
    datasets have together. A weight is kept to 1 in 10,000 of their sum, or exactly if the weights
    are whole numbers with a sum of at most 10,000.

    Raises ConfigError.
    """

    def __init__(self, datasets: Mapping[str, Any], weights: Mapping[str, float] | None = None,
                 samples: int | None = None):
        if not datasets:
            raise ConfigError("a Mixture has no dataset. Give at least one, by name.")
        given = {name: len(one) for name, one in datasets.items()} if weights is None else weights
        if set(given) != set(datasets):
            raise ConfigError(f"a Mixture has the datasets {sorted(datasets)} and weights for "
                              f"{sorted(given)}. Give each dataset a weight.")
        if empty := [name for name, one in datasets.items() if not len(one)]:
            raise ConfigError(f"the datasets {empty} of a Mixture have no sample. Leave them out.")
        if samples is not None and (type(samples) is not int or samples < 1):
            raise ConfigError(f"a Mixture has samples={samples!r}. Use the number of samples of an "
                              f"epoch, 1 or more, or None.")
        self.datasets = dict(datasets)
        sizes = [len(one) for one in self.datasets.values()]
        numbers = [float(given[name]) for name in self.datasets]
        scaled("the weights of a Mixture", numbers)
        shares = block_shares(numbers)
        if lost := [name for name, share in zip(self.datasets, shares, strict=True) if not share]:
            raise ConfigError(f"the weights of {lost} in a Mixture are less than 1 in {BLOCK} of "
                              f"their sum. Leave these datasets out, or use larger weights.")
        self.order = Mixed(sizes, shares, samples or sum(sizes))
        self._parts = list(self.datasets.values())
        self._ends = np.cumsum(sizes)
        if any(hasattr(one, "__getitems__") for one in self._parts):
            self.__getitems__ = self._many

    def __len__(self) -> int:
        """The samples of all datasets."""
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of a Mixture of {len(self)}")
        part, place = self._place(number)
        with self._naming(part, [place]):
            return self._parts[part][place]

    def _place(self, number: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._ends, number, side="right"))
        return part, number - (int(self._ends[part - 1]) if part else 0)

    @contextmanager
    def _naming(self, part: int, places: list[int]) -> Iterator[None]:
        """Name the dataset in an error of its samples."""
        try:
            yield
        except Exception as error:
            add_note(error, f"elastic-trainer read {', '.join(map(str, places[:MOST_NAMED]))} of "
                            f"the dataset {list(self.datasets)[part]!r} of a Mixture.")
            raise

    def _many(self, numbers: list[int]) -> list[Any]:
        """Read samples with one call of each dataset that reads many at once."""
        places = [self._place(number) for number in numbers]
        found: list[Any] = [None] * len(numbers)
        for part, dataset in enumerate(self._parts):
            mine = [at for at, (owner, _) in enumerate(places) if owner == part]
            wanted = [places[at][1] for at in mine]
            many = getattr(dataset, "__getitems__", None)
            with self._naming(part, wanted):
                read = many(wanted) if many and wanted else [dataset[one] for one in wanted]
            for at, sample in zip(mine, read, strict=True):
                found[at] = sample
        return found

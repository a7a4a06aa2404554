"""Batches: every tensor reaches the device, in whatever it comes, and what a dataset raises names
the sample.

The device "meta" is one that every machine has and that is not the CPU.
"""

from __future__ import annotations

import collections
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Subset, default_collate

from elastic_trainer.config import ConfigError
from elastic_trainer.data.batches import fetch, to_device

META = torch.device("meta")
CPU = torch.device("cpu")


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """Shaped as transformers' BatchEncoding: a UserDict that moves its tensors itself, and returns
    itself."""

    def __init__(self, data: dict[str, Any], encodings: str):
        super().__init__(data)
        self.encodings = encodings

    def to(self, device: torch.device) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Labelled(collections.UserDict):  # type: ignore[type-arg]
    """One without."""


class Movable:
    """Moves itself in place and returns nothing."""

    def __init__(self) -> None:
        self.x = torch.ones(2)

    def to(self, device: torch.device) -> None:
        self.x = self.x.to(device)


class Attributed(dict):  # type: ignore[type-arg]
    """A dict with attributes, which raises KeyError for one that is not there."""

    __getattr__ = dict.__getitem__


class Frozen(Mapping):  # type: ignore[type-arg]
    """A mapping that cannot be changed."""

    def __init__(self, values: dict[str, Any]):
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass
class Example:
    x: torch.Tensor
    names: list[str]
    scale: InitVar[float]
    y: torch.Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.y = scale * self.x
        self.hidden = [self.x + 1]  # no field


@dataclass(frozen=True, slots=True)
class Point:
    x: torch.Tensor
    name: str


class Pair(collections.namedtuple("Pair", ["x", "y"])):
    """A named tuple with a constructor of its own."""

    __slots__ = ()

    def __new__(cls, both: torch.Tensor) -> Pair:
        return super().__new__(cls, both, both)


def x() -> torch.Tensor:
    return torch.ones(2)


BATCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], list[torch.Tensor]]]] = {
    "BatchEncoding": (lambda: Encoding({"x": x()}, "kept"), lambda b: [b["x"]]),
    "UserDict": (lambda: Labelled(x=x(), y=[x()]), lambda b: [b["x"], *b["y"]]),
    "OrderedDict": (lambda: collections.OrderedDict(a=x(), b=x()), lambda b: [*b.values()]),
    "defaultdict": (lambda: collections.defaultdict(list, a=[x()]), lambda b: [*b["a"], *b["b"]]),
    "attributes": (lambda: Attributed(x=x(), y=Attributed(z=x())), lambda b: [b.x, b.y.z]),
    "mapping proxy": (lambda: types.MappingProxyType({"x": x()}), lambda b: [b["x"]]),
    "frozen mapping": (lambda: Frozen({"x": x()}), lambda b: [b["x"]]),
    "dataclass": (lambda: Example(x(), ["a"], 2.0), lambda b: [b.x, b.y, *b.hidden]),
    "frozen dataclass with slots": (lambda: Point(x(), "a"), lambda b: [b.x]),
    "named tuple": (lambda: Pair(x()), lambda b: [*b]),
    "deque": (lambda: collections.deque([x()], maxlen=3), lambda b: [*b]),
    "moves itself in place": (Movable, lambda b: [b.x]),
    "PackedSequence": (lambda: pack_sequence([x()]), lambda b: [b.data]),
    "nested": (lambda: {"a": [(Point(x(), "a"), Labelled(x=x()))]},
               lambda b: [b["a"][0][0].x, b["a"][0][1]["x"]]),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_every_tensor_is_on_the_device_in_a_batch_of_the_same_type(kind: str) -> None:
    """The fields that need no move keep their values."""
    if kind == "attributes" and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 cannot copy such a dict: its attribute __getstate__ is a KeyError")
    make, tensors = BATCHES[kind]
    moved = to_device(make(), META)
    assert type(moved) is type(make()) and tensors(moved) and {t.device
                                                               for t in tensors(moved)} == {META}
    if isinstance(moved, Example):
        assert moved.names == ["a"]
    if isinstance(moved, Encoding):
        assert moved.encodings == "kept"
    if isinstance(moved, collections.deque):
        assert moved.maxlen == 3
    if isinstance(moved, PackedSequence):
        assert moved.batch_sizes.device == CPU  # as torch has it


def test_the_datasets_own_objects_are_not_changed_when_a_batch_is_moved() -> None:
    """A dataset may keep what it hands out."""
    for kind in ("UserDict", "dataclass", "nested", "deque"):
        make, tensors = BATCHES[kind]
        mine = make()
        to_device(mine, META)
        assert {t.device for t in tensors(mine)} == {CPU}, kind


def test_a_batch_is_handed_on_as_it_is_when_nothing_has_to_move() -> None:
    """Types without a rule pass, with what the user keeps in them."""
    batch = {"a": [x(), "name", None], "b": object(), "c": numpy.ones(2), "d": Stuck(numpy.ones(2)),
             "e": torch.Size([1])}
    assert to_device(batch, CPU) is batch
    assert to_device({k: v
                      for k, v in batch.items() if k != "a"}, META).keys() == {"b", "c", "d", "e"}


class Stuck:
    """An object without a way to move it to a device."""

    def __init__(self, x: Any):
        self.x = x


class StuckSlots:
    __slots__ = ("x",)

    def __init__(self, x: Any):
        self.x = x


@pytest.mark.parametrize("make", [Stuck, StuckSlots, lambda x: Stuck([{"a": x}]), lambda x: {x}])
def test_the_type_is_named_when_its_tensors_cannot_be_moved(make: Callable[[Any], Any]) -> None:
    """It is an error here, not a device mismatch deep in the model, or a tensor left behind in
    silence."""
    kind = type(make(x())).__name__
    with pytest.raises(ConfigError,
                       match=rf"holds a {kind} with tensors that are not on meta.*to\(device\)"):
        to_device([make(x())], META)


class Picky:
    """Cannot give one of its samples; `many`: gives all at once."""

    def __init__(self, many: bool = False):
        if many:
            self.__getitems__ = lambda numbers: [self[number] for number in numbers]

    def __getitem__(self, number: int) -> torch.Tensor:
        if number == 17:
            try:
                raise OSError("torn file")
            except OSError as error:
                raise KeyError("as planned") from error
        return torch.tensor(float(number))


def message_of(*arguments: Any) -> str:
    with pytest.raises(KeyError, match="as planned") as raised:
        fetch(*arguments)
    assert isinstance(raised.value.__cause__, OSError)
    return "".join(traceback.format_exception(raised.value))


def test_the_sample_is_named_when_a_dataset_raises() -> None:
    """The exception keeps its type, cause and traceback; of samples that were read at once all are
    named."""
    numbers = numpy.array([3, 17, 5])
    assert "sample 17 of the dataset: dataset[17] raised this" in message_of(
        Picky(), numbers, default_collate)
    assert "read the samples 3, 17, 5 of the dataset" in message_of(Picky(many=True), numbers,
                                                              default_collate)
    subset = Subset(Picky(), range(100))  # type: ignore[arg-type]
    assert "the samples 10, 11, " in message_of(subset, numpy.arange(10, 60), default_collate)
    assert "29 and 30 more of the dataset" in message_of(subset, numpy.arange(10, 60),
                                                         default_collate)


def test_the_samples_are_named_when_collate_raises() -> None:
    """Samples of different sizes, most of the time."""
    def collate(samples: list[Any]) -> Any:
        raise ValueError("sizes differ")

    with pytest.raises(ValueError) as raised:
        fetch(range(9), numpy.array([3, 5]), collate)
    assert "collated the samples 3, 5 of the dataset" in "".join(
        traceback.format_exception(raised.value))

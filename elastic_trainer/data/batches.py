"""Read samples, make a batch of them, and move it to the model's device.

the user's dataset and collate → here → the user's loss (loop.py)

What always holds:
1. A container keeps its type. One in which nothing has to move is handed on as it is.
2. A tensor is never left on another device in silence: an object that cannot be moved is a
   ConfigError that names its type.
3. An exception of the dataset keeps its type and traceback, and gets the number of the sample.

What it does not do: read ahead (loader.py does), or look into types that no rule below knows (they
may have a method `to(device)`).
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy
import torch
from torch.utils.data import TensorDataset, default_collate

from elastic_trainer.config import ConfigError

MOST_NAMED = 20
"""The largest number of samples that an error names. It counts the others."""
DEEPEST = 4
"""The depth of nested objects up to which tensors that cannot be moved are searched."""
_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), numpy.ndarray, numpy.generic,
          type)


def fetch(dataset: Any, indices: numpy.ndarray, collate: Callable[[list[Any]], Any],
          before: Callable[[int, int], None] | None = None) -> Any:
    """Read samples and make a batch of them.

    `before(place, number)` is called before each call of the dataset: for the sample that it reads,
    or for the first one where `__getitems__` reads all.
    """
    if type(dataset) is TensorDataset and collate is default_collate:  # the same, in one go
        chosen = torch.from_numpy(indices)
        return [tensor[chosen] for tensor in dataset.tensors]
    numbers = indices.tolist()
    many = getattr(dataset, "__getitems__", None)
    if many:
        if before:
            before(0, numbers[0])
        with _naming("read", numbers):
            samples = many(numbers)
    else:
        samples = []
        for place, number in enumerate(numbers):
            if before:
                before(place, number)
            samples.append(_sample(dataset, number))
    with _naming("collated", numbers):
        return collate(samples)


def _sample(dataset: Any, number: int) -> Any:
    try:
        return dataset[number]
    except Exception as error:
        add_note(
            error,
            f"elastic-trainer read sample {number} of the dataset: dataset[{number}] raised this.")
        raise


@contextmanager
def _naming(done: str, numbers: list[int]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        named = ", ".join(map(str, numbers[:MOST_NAMED]))
        more = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
        add_note(error, f"elastic-trainer {done} the samples {named}{more} of the dataset.")
        raise


class Note(Exception):
    """The note of an exception, where exceptions have no notes (Python 3.10)."""


def add_note(error: BaseException, note: str) -> None:
    """Add a sentence to what a traceback prints (PEP 678).

    Python 3.10 has no notes. There the sentence becomes the cause of the exception that began the
    chain.
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
        return
    while before := error.__cause__ or error.__context__:
        error = before
    error.__cause__ = Note(note)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device: those in containers, in dataclasses, and where
    there is a `to(device)`.

    Raises ConfigError for an object of another type that holds tensors elsewhere.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, _PLAIN):
        return batch
    # BatchEncoding, PackedSequence, a graph, the user's own.
    if callable(move := _found(batch, "to")):
        moved = move(device)
        return batch if moved is None else moved
    if isinstance(batch, Mapping):
        return _mapping_on(batch, device)
    if isinstance(batch, (list, tuple, deque)):
        return _sequence_on(batch, device)
    if is_dataclass(batch):
        return _dataclass_on(batch, device)
    if device.type != "cpu" and _is_elsewhere(batch, device):
        raise _stuck(batch, device)
    return batch


def _found(value: Any, name: str) -> Any:
    """Return an attribute; None: there is none. A dict with attributes may raise a KeyError."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _mapping_on(batch: Mapping[Any, Any], device: torch.device) -> Any:
    moved = {key: now for key, value in batch.items()
             if (now := to_device(value, device)) is not value}
    if not moved:
        return batch
    if isinstance(batch, MutableMapping):
        clone = copy.copy(batch)
        for key, value in moved.items():  # not update(): transformers' ModelOutput refuses it
            clone[key] = value
        return clone
    return _rebuilt(type(batch), {**batch, **moved}, batch, device)


def _sequence_on(batch: Any, device: torch.device) -> Any:
    moved = [to_device(value, device) for value in batch]
    if all(now is value for now, value in zip(moved, batch, strict=True)):
        return batch
    if isinstance(batch, tuple):
        # _make: a named tuple.
        return _rebuilt(getattr(type(batch), "_make", type(batch)), moved, batch, device)
    clone = copy.copy(batch)
    for number, value in enumerate(moved):
        clone[number] = value
    return clone


def _dataclass_on(batch: Any, device: torch.device) -> Any:
    names = {field.name for field in fields(batch)} | getattr(batch, "__dict__", {}).keys()
    values = {name: getattr(batch, name) for name in sorted(names) if hasattr(batch, name)}
    moved = {name: now for name, value in values.items()
             if (now := to_device(value, device)) is not value}
    if not moved:
        return batch
    # Not replace(): it would need InitVars again, and refuses fields with init=False.
    clone = copy.copy(batch)
    for name, value in moved.items():
        object.__setattr__(clone, name, value)  # frozen ones too
    return clone


def _rebuilt(make: Callable[[Any], Any], values: Any, batch: Any, device: torch.device) -> Any:
    try:
        return make(values)
    except TypeError as error:
        raise _stuck(batch, device) from error


def _stuck(batch: Any, device: torch.device) -> ConfigError:
    kind = type(batch).__qualname__
    return ConfigError(
        f"a batch holds a {kind} with tensors that are not on {device}, and it has no method to "
        f"move them. Give {kind} a method to(device), or let collate return tensors in dicts, "
        f"lists or dataclasses.")


def _is_elsewhere(value: Any, device: torch.device, deepest: int = DEEPEST) -> bool:
    """Return True if an object holds a tensor on another device."""
    if isinstance(value, torch.Tensor):
        return value.device != device
    if deepest == 0 or isinstance(value, _PLAIN):
        return False
    return any(_is_elsewhere(part, device, deepest - 1) for part in _parts(value))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return value
    return attributes(value).values()


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those that it has in slots."""
    slots = (name for kind in type(value).__mro__
             for name in _names(kind.__dict__.get("__slots__") or ()))
    return {name: getattr(value, name) for name in slots
            if not name.startswith("__") and hasattr(value, name)} | getattr(value, "__dict__", {})


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots

"""See whether a script has changed a dataset between two reads.

dataset, collate → here → an error at the next read (loader.py)

What always holds:
1. Followed are the attributes of the dataset, of datasets and transforms in it, and of collate:
   numbers, texts and truth values by their value, tensors by their version, others as objects.
2. What changes while a sample is read (a cache, an open file, a counter) is the dataset's own: it
   is no change. Nor is an object in the place of None, or a new entry.
3. What the option `state` has is part of the state, so it may change.

What it does not do: follow containers of more than MOST_ENTRIES entries, arrays, what slots hold,
and code. Cost: 1 µs for each attribute, twice a micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

MOST_ENTRIES, MOST_SEEN, DEEPEST = 64, 200, 5
ALONE = (
    "A worker that joins, and a resumed run, would read with the value of the start. Compute it "
    "from the number of the sample, or give the dataset a state_dict and a load_state_dict that "
    'have it, change it after the inner loop only, and register it: state={"dataset": dataset}.')
WITH_LOADER = (
    "The loader processes hold the dataset of the start of this worker. Compute it from the number "
    "of the sample, or leave the option loader out and register the dataset in state.")
"""Why a change is an error, and what to do."""
PLAIN = (bool, int, float, str, bytes, complex)
OURS = ("datasets", "transform", "target_transform")
"""The attributes of our own datasets that a script may change."""
CONTAINERS = (dict, list, tuple)
Look = dict[str, tuple[Any, ...]]
"""What the attributes are, by their paths: (plain value,), or (object, version)."""


class Watch:
    """The attributes of a dataset and of collate as they were after the last read."""

    def __init__(self, dataset: Any, collate: Any):
        self._roots = {"the dataset": dataset, "collate": collate}
        self._seen: Look | None = None
        self.changed = ""
        """What the script has changed since the first read."""
        self.registered: Callable[[], Iterable[Any]] = tuple
        """Returns the objects of the option state."""
        self._why = ALONE

    def start_processes(self) -> None:
        """Take the attributes as loader processes have them from now on."""
        self.registered, self._why = tuple, WITH_LOADER
        self._seen = self.look()

    def look(self) -> Look:
        """Return the attributes as they are now."""
        found: Look = {}
        left_out = set(map(id, self.registered()))
        for root, value in self._roots.items():
            _note(found, value, "", f" of {root}", DEEPEST, left_out)
        return found

    def notice(self) -> None:
        """Notice what has changed since the last read."""
        if self._seen is not None and not self.changed:
            self.changed = difference(self._seen, self.look())

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Take the attributes as a read leaves them."""
        self.notice()
        try:
            yield
        finally:
            self._seen = self.look()

    def check(self) -> None:
        """Look, and raise RuntimeError if the script has changed something."""
        self.notice()
        self.require_unchanged()

    def require_unchanged(self) -> None:
        """Raise RuntimeError if the script has changed something, as far as it was noticed."""
        if self.changed:
            raise RuntimeError(f"{self.changed} between two reads. {self._why}")


def difference(before: Look, now: Look) -> str:
    """Return the first attribute that has changed, as the beginning of a sentence; "": none has."""
    for path, was in before.items():
        one = now.get(path, was)
        if len(one) != len(was) or one[0] is not was[0] and (len(was) == 2 or one != was):
            if was[0] is None and len(one) == 2:
                continue  # it was opened, or made, when it was needed first
            return f"the attribute {path} was changed from {_text(was[0])} to {_text(one[0])}"
        if len(was) == 2 and one[1] != was[1]:
            return f"the attribute {path}, a tensor, was changed in place"
    return ""


def _text(value: Any) -> str:
    return repr(value)[:80] if value is None or isinstance(value, PLAIN) else (
        f"a {type(value).__name__}")


def _note(found: Look, value: Any, path: str, of: str, depth: int,
          left_out: Container[int]) -> None:
    """Add what an attribute is, and what is in it."""
    if id(value) in left_out or len(found) == MOST_SEEN:
        return
    if value is None or isinstance(value, PLAIN):
        found[path[1:] + of] = (value if value == value else None,)
        return
    if isinstance(value, torch.Tensor):
        if not (value.requires_grad or value.is_inference()):
            found[path[1:] + of] = (value, value._version)
        return
    if path:
        found[path[1:] + of] = (value, 0)
    for name, one in _parts(value) if depth else ():
        _note(found, one, f"{path}.{name}", of, depth - 1, left_out)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, CONTAINERS):
        if len(value) > MOST_ENTRIES:
            return ()
        return value.items() if isinstance(value, dict) else enumerate(value)
    kind: type = type(value)
    root = _package_of(kind)
    if not root:
        return ()
    own: dict[str, Any] = getattr(value, "__dict__", {})
    if root == "elastic_trainer":
        return [(name, own[name]) for name in OURS if name in own]
    if isinstance(value, torch.nn.Module):
        return [(name, one) for name, one in own.items()
                if name not in ("_parameters", "_buffers", "training")]
    return own.items()


@cache
def _package_of(kind: type) -> str:
    """Return the package of a class whose objects are looked into; "": they are not."""
    root = kind.__module__.partition(".")[0]
    is_tool = root == "numpy" or issubclass(kind, type) or (
        root in sys.stdlib_module_names and root != "__main__")
    return "" if is_tool else root

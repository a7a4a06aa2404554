"""Plain attributes that the code of a batch has changed: one value for all micro-batches of a step,
or the user's error.

attributes behind each micro-batch (state/module_attributes.py) → here → what the step ends with, on
all workers

What always holds:
1. What a step's first micro-batch has left is what each other micro-batch has left, on every
   worker. A micro-batch begins with the attributes that the worker's last one has left, so a
   counter is found.
2. All workers hold these values before the vote. So a worker that rolls the step forward has them.
3. A size that follows from the batch is found in the warm-up: the same batch leaves it again, and
   another batch leaves another one. It is not followed, and no error: many models keep the length
   or the shape of their last batch, or of their longest one. What a loss makes of it is seen when
   a batch is computed again behind another one (carried.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from elastic_trainer.config import ConfigError
from elastic_trainer.state.layout import byte_ranges, decode, pack
from elastic_trainer.state.module_attributes import ModuleAttributes, is_same, is_size
from elastic_trainer.state.supported import some

NOT_RUN, SAME, MOVED = range(3)
"""What the step's first micro-batch has done to attributes; it may not have ended."""
REMEDY = (
    "Workers compute different batches, so they would hold different values, and a worker that "
    "joins would have none. Change attributes behind the inner loop (with train(): in after_step), "
    "on every worker alike; in the code of a batch use a local variable. What forward counts or "
    "averages belongs into a buffer with a rule (the option buffers), and a number to look at into "
    "step.log.")


class Moved:
    """What the micro-batches of a step have changed in attributes, on this worker."""

    def __init__(self, attributes: ModuleAttributes):
        self._attributes = attributes
        self._left: dict[str, Any] | None = None
        """What the micro-batches of this step have left; None: none has ended."""
        self.mark = NOT_RUN
        """What the step's first micro-batch has done, if this worker has run it."""

    def clear(self) -> None:
        """Begin a step, or begin it again."""
        self._attributes.reset()
        self._left, self.mark = None, NOT_RUN

    def keep(self, microbatch: str, is_first: bool) -> None:
        """Note what a micro-batch has left. Raises RuntimeError if it is not what the others have
        left."""
        moved = self._attributes.moved()
        if self._left is None:
            self._left = moved
        elif moved or self._left:
            require_same(self._left, moved, f"in {microbatch}", RuntimeError)
        if is_first:
            self.mark = MOVED if moved else SAME

    def share(self, mark: int, from_first: Callable[[str], str]) -> None:
        """Give all workers what the step's first micro-batch has left, by its mark. Raises
        RuntimeError if micro-batches of this worker have left something else.

        Network, if it has changed attributes: one allgather of these values.
        """
        moved = dict[str, Any]()
        if mark == MOVED:
            moved = _read(from_first(_text(self._left) if self.mark == MOVED else ""))
        self._attributes.after = moved
        if self._left is not None and mark != NOT_RUN:
            require_same(moved, self._left, "on this worker and on another one", RuntimeError)


def require_same(one: Mapping[str, Any], other: Mapping[str, Any], where: str,
                 kind: type[RuntimeError] | type[ConfigError]) -> None:
    """Raise the user's error if two micro-batches have left different attributes."""
    if not (odd := _differing(one, other)):
        return
    values = " and ".join(_shown(side[odd[0]]) if odd[0] in side else "its former value"
                          for side in (one, other))
    raise kind(
        f"the code of a batch (forward, or the inner loop) has changed the attributes {some(odd)} "
        f"of the model, and two micro-batches have left different values {where}: {values} of "
        f"{odd[0]}. {REMEDY}")


def sizes_of_batches(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the attributes of which two different micro-batches have left different sizes."""
    return [path for path in _differing(one, other)
            if path in one and path in other and is_size(one[path]) and is_size(other[path])]


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [path for path in sorted(one.keys() | other.keys())
            if not (path in one and path in other and is_same(one[path], other[path]))]


def _text(values: Any) -> str:
    packed = pack(values)
    content = b"".join(part.numpy().tobytes()
                       for part in byte_ranges(packed, 0, packed.payload_bytes))
    return f"{packed.header.decode()}\n{content.hex()}"


def _read(text: str) -> dict[str, Any]:
    header, content = text.split("\n")
    return dict(decode(header.encode(), torch.tensor(list(bytes.fromhex(content)),
                                                     dtype=torch.uint8)))


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 40 else f"{text[:40]}…"

"""The modes (train or eval) of a model's modules: kept at a step's begin, put back before each
micro-batch.

model → here → each micro-batch's begin, vote (a checksum), flat buffer, checkpoint, newcomer

What always holds:
1. All workers begin a step with the same modes. The vote compares a checksum of them.
2. Each micro-batch starts with the modes of the step's begin. The step ends with the modes that its
   first micro-batch has left, in every world. What that micro-batch has changed travels with the
   gradients, so a worker that has run no micro-batch has it too, and so has one that rolls the step
   forward.
3. The checkpoint of a finished run, or of one that was left behind a step, has the modes with which
   its last step ended, and not those that the user's code behind that step has left. When such a
   run goes on, no worker has run the code before the next inner loop, where model.train() may
   stand.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from elastic_trainer.state.names import plain


class Modes:
    """The modes of one model's modules, by their plain names."""

    def __init__(self, model: torch.nn.Module):
        self._modules: dict[str, list[torch.nn.Module]] = {}
        """By plain name. A compiled module and the one that it wraps have the same name."""
        for name, module in model.named_modules():
            self._modules.setdefault(plain(name), []).append(module)
        self._last = [modules[-1] for modules in self._modules.values()]
        self._before: list[bool] = []
        """The modes of the step's begin; empty if no step is in flight."""
        self._ended: list[bool] = []
        """The modes with which the last step ended."""
        self.changed: list[int] = []
        """The numbers of the modules whose modes the step's first micro-batch has changed, if this
        worker has run that micro-batch."""

    def __len__(self) -> int:
        return len(self._last)

    def _now(self) -> list[bool]:
        return [module.training for module in self._last]

    def begin(self) -> None:
        """Keep the modes of the step's begin."""
        self._before, self.changed = self._now(), []

    def reset(self) -> None:
        """Put the modes of the step's begin back."""
        if self._before:
            self._set(self._before)

    def forget(self) -> None:
        """Forget the step's begin."""
        self._before = []

    def end(self) -> None:
        """Note that the step is finished."""
        self._ended, self._before = self._now(), []

    @contextmanager
    def to_copy(self, is_last: bool) -> Iterator[None]:
        """Have the modes that a copy of the state should have, for a while: behind the last step of
        a run those with which it ended."""
        now = self._now() if is_last else []
        self._set(self._ended if is_last else [])
        try:
            yield
        finally:
            self._set(now)

    def keep(self) -> None:
        """Keep what the step's first micro-batch has changed."""
        self.changed = [number for number, (was, now)
                        in enumerate(zip(self._before, self._now(), strict=False)) if was != now]

    def apply(self, changed: Iterable[int]) -> None:
        """End a step: its first micro-batch has changed the modes of these modules."""
        modes = list(self._before)
        for number in changed if modes else ():
            modes[number] = not modes[number]
        self._set(modes)

    def _set(self, modes: list[bool]) -> None:
        for modules, mode in zip(self._modules.values(), modes, strict=False):
            for module in modules:
                if module.training != mode:  # setting it takes longer than this comparison
                    module.training = mode

    def checksum(self) -> int:
        """Return 32 bits of the modes of the step's begin. Measured: 2 µs for 200 modules."""
        return zlib.crc32(bytes(map(bool, self._before)))

    # --- as values --------------------------------------------------------------------------------

    def evaluating(self) -> list[str]:
        """Return the names of the modules that are not in training mode."""
        return self._named(self._now())

    def evaluating_before(self) -> list[str]:
        """Return the names of those that were not in training mode when the step began."""
        return self._named(self._before or self._now())

    def _named(self, modes: list[bool]) -> list[str]:
        return sorted(name for name, is_training in zip(self._modules, modes, strict=True)
                      if not is_training)

    def load(self, evaluating: list[str]) -> None:
        """Take over modes."""
        self._set([name not in evaluating for name in self._modules])

    def take_up(self, evaluating: list[str]) -> None:
        """Go on with a step in flight that began with these modes."""
        self._before = [name not in evaluating for name in self._modules]
        self.reset()

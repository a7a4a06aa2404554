"""Gradients that leave `.grad` as soon as the backward pass has made them (shard="gradients").

the user's forward and backward pass → here: each gradient, once → scattered.py (its bucket)

What always holds:
1. A backward pass of a step hands each gradient over, and `.grad` is empty then. So no worker has
   all gradients of a micro-batch at once.
2. After the pass `.grad` has a stand-in: NaN, and one element of memory. Code that reads it there
   gets NaN, and torch refuses to write to it (clip_grad_norm_). So no such code is silently without
   effect.
3. What gradient_sums.py watches otherwise is refused here: backward passes of the user's own before
   that of the step, and a gradient that comes in two parts (reentrant checkpointing).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from elastic_trainer.reduce.gradient_sums import SUM_BYTES, WRITTEN_AFTER, Gradients

Take = Callable[[int, torch.Tensor], None]
"""Takes the number of a parameter of the model, and its gradient."""
OWN_PASS = (
    'a backward pass of your own has left gradients in .grad, and with shard="gradients" a step '
    'keeps none there. Add the losses: step.backward(first + second), or use shard="optimizer".')
TWICE = (
    'the gradient of {name} came in two parts, and with shard="gradients" the first one has left '
    'already. Use checkpoint(..., use_reentrant=False), or shard="optimizer".')
NOT_LAST = (
    'a hook of {name} runs after the gradient has left (shard="gradients"). Register it before the '
    'first step.')


class LeavingGradients(Gradients):
    """The parameters of the model, whose gradients leave one by one."""

    def __init__(self, parameters: Any):
        super().__init__(parameters)
        self.takes, self.isolates = True, False
        self._take: Take = _drop
        self._is_in_pass = False
        self._arrived = set[int]()
        self._error: Exception | None = None
        self._stand_ins = dict[int, tuple[torch.Tensor, int, int]]()
        """Those of the newest pass, with their versions and places, by the numbers of the
        parameters."""
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}

    def leave_to(self, take: Take) -> None:
        """Let this have each gradient of a step's backward pass, from now on."""
        self._take = take

    def lay_out(self, members: Sequence[int], views: list[torch.Tensor]) -> None:
        self.members = members
        self.parameters = [self.everyone[number] for number in members]
        self.narrow = [False] * len(members)
        self.by_size = []  # nothing of them is kept after a step

    def add_into(self, views: list[torch.Tensor]) -> None:
        return None

    @contextmanager
    def adding_in_place(self) -> Iterator[None]:
        yield

    def open(self) -> None:
        self._is_in_pass, self._error, self._stand_ins = False, None, {}
        self._arrived.clear()
        self.clear()

    def check_untouched(self) -> None:
        """Begin the backward pass of the step. Raises RuntimeError if another one came before."""
        if any(p.grad is not None for p in self.everyone):
            raise RuntimeError(OWN_PASS)
        for number, p in enumerate(self.everyone):
            if p.requires_grad:
                self._require_last(number, p)
        self._is_in_pass = True

    def _require_last(self, number: int, parameter: Any) -> None:
        """Have a hook of a parameter that runs after all others. Raises RuntimeError if one was
        added later."""
        if (hook := self._hooks.get(number)) is None:
            def arrive(parameter: torch.Tensor) -> None:  # no partial: Program knows ours by module
                self._arrive(number, parameter)

            self._hooks[number] = parameter.register_post_accumulate_grad_hook(arrive)
        elif next(reversed(parameter._post_accumulate_grad_hooks)) != hook.id:
            raise RuntimeError(NOT_LAST.format(name=self.names[number]))

    def note_left(self) -> None:
        """End the backward pass of the step."""
        self._is_in_pass = False
        if self._error:
            raise self._error
        self._stand_in(self._arrived)

    def _arrive(self, number: int, parameter: torch.Tensor) -> None:
        """Take the gradient of a parameter. A backward pass calls this."""
        if not self._is_in_pass or (gradient := parameter.grad) is None:
            return
        parameter.grad = None
        if number in self._arrived:
            self._error = self._error or RuntimeError(TWICE.format(name=self.names[number]))
            return
        self._arrived.add(number)
        if gradient.is_sparse:
            self.sparse[self.names[number]] = gradient.numel() * max(
                SUM_BYTES, gradient.element_size())
            gradient = gradient.to_dense()
        self._take(number, gradient)

    @contextmanager
    def without_sparse(self) -> Iterator[None]:
        yield

    def weigh_rest(self, weight: float) -> None:
        return None

    def close(self) -> list[int]:
        self.check_parameters()
        for number, p in enumerate(self.everyone):
            stand_in, version, place = self._stand_ins.get(number, (None, 0, 0))
            if p.grad is not stand_in or stand_in is not None and (
                    stand_in._version != version or stand_in.data_ptr() != place):
                raise RuntimeError(WRITTEN_AFTER)
        self.clear()
        return [int(number in self._arrived) for number in self.members]

    def clear(self) -> None:
        for p in self.everyone:
            if p.grad is not None:
                p.grad = None

    def hand_out(self, used: Sequence[float]) -> None:
        """Let `.grad` of the parameters that an applied step has used be what it is after a pass
        (rule 2)."""
        self.clear()
        self._stand_in([number for number, is_used in enumerate(used) if is_used])

    def _stand_in(self, numbers: Iterable[int]) -> None:
        """Give these parameters new stand-ins: code may have written to those of a step before."""
        values = dict[tuple[torch.dtype, torch.device], torch.Tensor]()
        self._stand_ins = {}
        for number in numbers:
            p = self.everyone[number]
            if (kind := (p.dtype, p.device)) not in values:
                values[kind] = torch.full((), math.nan, dtype=p.dtype, device=p.device)
            one = values[kind].expand(p.shape).data
            self._stand_ins[number] = one, one._version, one.data_ptr()
            p.grad = one

    def are_as_left(self) -> bool:
        """True if no stand-in was written to, also where no version counts it. Waits for a
        GPU."""
        return all(bool(one.isnan().all()) for one, _, _ in self._stand_ins.values())


def _drop(number: int, gradient: torch.Tensor) -> None:
    """Take a gradient that nobody needs."""

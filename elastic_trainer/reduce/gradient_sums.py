"""`.grad` of the parameters: views of the flat buffers, watched for what the user's code writes.

flat buffers → here → the user's forward and backward pass → here → flat buffers → … → optimizer

What always holds:
1. On a CPU `.grad` of every trained parameter is a view of a flat buffer: autograd adds into it in
   place, so nothing is copied before the network. The gradient of a 16-bit parameter is summed in
   32 bits and copied. On a GPU each micro-batch `takes` what autograd leaves in an empty `.grad`,
   and a few kernels add all of it to the sums: an addition for each parameter took the host 12 us
   (H100, torch 2.11), more than all other work of ours. Both ways give the same bits.
2. The gradient of a micro-batch is what plain PyTorch leaves in `.grad` for that micro-batch alone.
   If the user's code writes to `.grad` (`zero_grad()`, a backward pass of its own, a hook), the
   views cannot hold it. Then `isolates` is set: each micro-batch starts with `.grad = None`, and
   what it leaves is added to the sums. Both ways give the same bits, so one worker may isolate and
   another not. A sparse gradient is isolated, too: autograd would add each of its rows to the sum
   of the micro-batch before.
3. Between a micro-batch's backward pass and its end nothing may write to `.grad`: it would change a
   part of the step's gradient (`clip_grad_norm_`), or drop it (`zero_grad`). After a step the
   gradient is applied, so clipping it there has no effect. Both raise.
4. The optimizer gets None for a parameter that no micro-batch has used, as in plain PyTorch.
5. A parameter that is changed in place while a micro-batch is computed is an error at the end of
   that micro-batch. Versions only grow, so one look at the end finds each change.

Each operation in place increments the version of a view. So the version of its view tells that
`.grad` was written (`.data` has a version of its own). One backward pass adds once to a gradient;
more additions come from a hook, or from reentrant checkpointing.

Versions and gradients are read with `map`, one call for all parameters: these checks run for each
micro-batch, and a loop in Python over 150 parameters took as long as the kernels of a small model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import attrgetter, is_, is_not, sub
from typing import TypeVar

import torch

from elastic_trainer.state.values.supported import parameters_stay

T = TypeVar("T")


class GradientsWritten(Exception):
    """The user's code has written to `.grad` of flat buffers that several micro-batches share. Run
    the step isolated."""


class ParametersWritten(RuntimeError):
    """The user's code has changed parameters while a micro-batch was computed."""


SUM_BYTES = 4
"""The bytes of an element of a sum: gradients of fewer bits are summed in 32."""
TAKEN_ON = ("cuda",)
"""The devices on which a kernel for many tensors is cheaper than one for each (rule 1)."""
PROBED = 64
"""The number of elements of a gradient that are kept while the user's code runs after a step."""
CLIP = ("To clip the gradient of the step, give the trainer clip_norm=…; it calls zero_grad(), "
        "unscale_() and step() itself.")
SHRUNK = 16
"""The number of elements that must have become smaller, and none larger, to count as clipped."""
WRITTEN_AFTER = (
    "something has changed .grad after the backward pass of a batch (clip_grad_norm_, zero_grad, "
    "unscale_, another backward pass). A batch is one micro-batch of the step, so its gradient is "
    f"only a part. {CLIP} Run other backward passes before it, or add the losses.")
CLIPPED_AFTER = (
    "the gradient was clipped or scaled after the inner loop, where it has no effect: the step is "
    f"applied already. {CLIP} For backward passes of your own there, use torch.autograd.grad.")

VERSION, GRADIENT = attrgetter("_version"), attrgetter("grad")
TRAINED, PLACE = attrgetter("requires_grad"), torch.Tensor.data_ptr


class Gradients:
    """The parameters of the model, and their `.grad`."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]):
        self.names, self.everyone = list(parameters), list(parameters.values())
        self.receivers = self.everyone  # of a step's gradients: what the optimizer sees
        self.isolates = False
        """Each micro-batch has gradients of its own, which are added to the sums after it (rule
        2)."""
        self.takes = any(parameter.device.type in TAKEN_ON for parameter in self.everyone)
        """Each micro-batch has gradients of its own, which are added to the sums as soon as the
        backward pass has made them (rule 1)."""
        self.sparse: dict[str, int] = {}
        """The parameters with a sparse gradient in the warm-up, and the bytes of their sums."""
        self._left = list[tuple[torch.Tensor | None, int]]()
        """What the backward pass of a micro-batch has left in `.grad`, with the versions, where a
        later write would not be seen otherwise."""
        self._is_open = False
        """A micro-batch is in the hands of the user's code."""
        self._taken = dict[int, tuple[torch.Tensor, int]]()
        """The gradients of this micro-batch that were added to the sums during its backward pass,
        with their versions, by the place among the trained parameters."""
        self.begin()

    def lay_out(self, members: Sequence[int], views: list[torch.Tensor]) -> None:
        """Train these parameters (by number), whose sums are these views. No `.grad` is set yet."""
        self.members = members
        self.parameters = [self.everyone[number] for number in members]
        self.narrow = [parameter.dtype != view.dtype
                       for parameter, view in zip(self.parameters, views, strict=True)]
        """Which of the trained parameters have fewer bits than their sum: then `.grad` is no view
        of it."""
        self.by_size = sorted(self.parameters, key=torch.Tensor.numel, reverse=True)
        self._has_narrow = any(self.narrow)
        self._with_view = self._wide(self.parameters)
        own = set(map(id, self._with_view))
        self._without_view = [p for p in self.everyone if id(p) not in own]
        self._views, self._counted = views, [0] * len(members)
        if not self.isolates:
            for parameter in self.everyone:
                parameter.grad = None

    def add_into(self, views: list[torch.Tensor]) -> None:
        """Make autograd add into these views from now on."""
        self._views = views
        if self._are_new:
            return
        self._counted = list(map(VERSION, views))
        if not self._are_in_place():
            for parameter, view, is_narrow in zip(self.parameters, views, self.narrow, strict=True):
                parameter.grad = None if is_narrow else view

    def _wide(self, every: list[T]) -> list[T]:
        """Return what belongs to the trained parameters that are not narrow."""
        return [one for one, is_narrow in zip(every, self.narrow, strict=True) if not is_narrow
                ] if self._has_narrow else every

    def _are_in_place(self) -> bool:
        """True if each `.grad` that is to be a view of a sum is it."""
        return all(map(is_, map(GRADIENT, self._with_view), self._wide(self._views)))

    @property
    def _are_new(self) -> bool:
        """True if autograd makes new gradients, and does not add into the sums."""
        return self.isolates or self.takes

    @contextmanager
    def adding_in_place(self) -> Iterator[None]:
        """Let autograd add into the sums for a while, if it may. So a trial finds out what the
        user's code does with `.grad`."""
        takes, self.takes = self.takes, False
        try:
            yield
        finally:
            self.takes = takes

    def hand_out(self, used: Sequence[float]) -> None:
        if self._are_handed_out(used):
            return
        views = dict(zip(self.members, self._views, strict=True))
        for number, receiver in enumerate(self.receivers):
            gradient = views[number] if used[number] else None
            if receiver.grad is not gradient:  # setting it takes longer than this comparison
                receiver.grad = gradient if gradient is None else gradient.to(receiver.dtype)

    def _are_handed_out(self, used: Sequence[float]) -> bool:
        """True if each `.grad` is as `hand_out` sets it: the usual case."""
        return (not self._has_narrow and all(map(used.__getitem__, self.members))
                and self._are_in_place() and _are_none(map(GRADIENT, self._without_view)))

    def trained_now(self) -> list[bool]:
        return list(map(TRAINED, self.everyone))

    def adopt(self, trained: Sequence[bool]) -> None:
        for parameter, is_trained in zip(self.everyone, trained, strict=True):
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)

    # --- one micro-batch --------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: note where the parameters lie, and their versions."""
        self._places = list(map(PLACE, self.everyone))
        self._versions = list(map(VERSION, self.everyone))

    def open(self) -> None:
        self._is_open, self._left, self._taken = True, [], {}
        for parameter in self.everyone if self._are_new else self._without_view:
            if parameter.grad is not None:  # setting it takes longer than this comparison
                parameter.grad = None

    def check_parameters(self) -> None:
        """Raise ParametersWritten if a parameter was changed in place since the step began.

        No version counts a write to `.data`. The warm-up finds those by the values.
        """
        if (now := list(map(VERSION, self.everyone))) != self._versions:
            pairs = zip(self.names, self.everyone, self._versions, now, self._places, strict=True)
            # cuDNN's RNNs move their weights, which is no write.
            changed = [name for name, parameter, was, version, place in pairs
                       if version != was and parameter.data_ptr() == place]
            if changed:
                raise ParametersWritten(parameters_stay(changed))
            self.begin()

    def check_untouched(self) -> None:
        if self.isolates:
            return
        empty = self.everyone if self.takes else self._without_view
        if not _are_none(map(GRADIENT, empty)) or not self.takes and (
                list(map(VERSION, self._views)) != self._counted or not self._are_in_place()):
            raise GradientsWritten

    def _additions(self) -> list[int]:
        """Return how often the micro-batch has added to each gradient. Raises GradientsWritten if
        it has added twice, or another tensor is in the place of one."""
        now = list(map(VERSION, self._views))
        additions = list(map(sub, now, self._counted))
        if not (set(additions) <= {0, 1} and self._are_in_place()):
            raise GradientsWritten  # `are_added` tells whether what was sent is as it was
        self._counted = now
        return additions

    def are_added(self, members: Sequence[int]) -> bool:
        """True if the backward pass in flight has added to each of these trained parameters'
        gradients, once, and nothing else has."""
        if self.takes:
            return all(self._is_as_taken(member) if member in self._taken
                       else self.parameters[member].grad is not None for member in members)
        views = self._views
        return all(views[member]._version == self._counted[member] + 1
                   and self.parameters[member].grad is views[member] for member in members)

    def _is_as_taken(self, member: int) -> bool:
        gradient, version = self._taken[member]
        return self.parameters[member].grad is gradient and gradient._version == version

    def take(self, members: Sequence[int]) -> None:
        """Add what the backward pass in flight has left for these trained parameters to their sums,
        if `takes` is set and it was not added before."""
        if not (self.takes and self._is_open):
            return
        new = [(member, gradient) for member in members if member not in self._taken
               and (gradient := self.parameters[member].grad) is not None]
        self._taken |= {member: (gradient, gradient._version) for member, gradient in new}
        _add_all([self._views[member] for member, _ in new], [gradient for _, gradient in new])

    def note_left(self) -> None:
        """Note what the backward pass of a micro-batch has left in `.grad` (rule 3).

        Not in the views: there a later write counts as a second addition, after which the
        micro-batch is run again, isolated. So this costs the usual step nothing.
        """
        if self._are_new or self._has_narrow:
            self._left = [(gradient := parameter.grad, _version(gradient))
                          for parameter in self.parameters]

    def _check_left(self) -> None:
        left, self._left = self._left, []
        if left and not all(parameter.grad is gradient and _version(gradient) == version
                            for parameter, (gradient, version)
                            in zip(self.parameters, left, strict=True)):
            raise RuntimeError(WRITTEN_AFTER)

    @contextmanager
    def without_sparse(self) -> Iterator[None]:
        """Raise GradientsWritten after a backward pass that has added a sparse gradient to a
        sum."""
        sparse = dict[str, int]()

        def note(gradient: torch.Tensor, name: str) -> None:
            if gradient.is_sparse:
                sparse[name] = gradient.numel() * max(SUM_BYTES, gradient.element_size())

        hooks = [parameter.register_hook(partial(note, name=name))  # type: ignore[no-untyped-call]
                 for name, parameter in zip(self.names, self.everyone, strict=True)
                 if parameter.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.sparse |= sparse
        if sparse and not self.isolates:
            raise GradientsWritten

    def weigh_rest(self, weight: float) -> None:
        """Give what the user's own backward passes have left in `.grad` the weight of the
        micro-batch."""
        for parameter in self.parameters if self.isolates and weight != 1 else ():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach() * weight

    def close(self) -> list[int]:
        """End a micro-batch; returns which of the trained parameters have got a gradient.

        Raises ParametersWritten; GradientsWritten if its backward pass, or code after it, wrote
        more than one sum; RuntimeError if `.grad` of an isolated one was written to after that.
        """
        self._is_open = False
        self.check_parameters()  # a move in the next one would hide a write
        if not all(map(self._is_as_taken, self._taken)):
            raise GradientsWritten
        self._check_left()
        if self._are_new:
            return self._move_into(self._views)
        used = self._additions()
        if not self._has_narrow:
            return used
        moved = self._move_into([view if is_narrow else None
                                 for view, is_narrow in zip(self._views, self.narrow, strict=True)])
        self._counted = list(map(VERSION, self._views))
        return [got if is_narrow else added for added, got, is_narrow
                in zip(used, moved, self.narrow, strict=True)]

    def _move_into(self, sums: Sequence[torch.Tensor | None]) -> list[int]:
        """Add each `.grad` to its sum, where one is given, and drop it; returns which parameters
        had a gradient."""
        totals, gradients, used = list[torch.Tensor](), list[torch.Tensor](), []
        for member, (parameter, total) in enumerate(zip(self.parameters, sums, strict=True)):
            gradient = parameter.grad
            used.append(int(gradient is not None))
            if total is not None and gradient is not None:
                parameter.grad = None
                if member not in self._taken:
                    totals.append(total)
                    gradients.append(gradient)
        self._taken = {}
        _add_all(totals, gradients)
        return used


class AppliedGradient:
    """The largest gradient of the step that was applied, while the user's code runs after it."""

    def __init__(self) -> None:
        self._noted: tuple[torch.Tensor, int, torch.Tensor] | None = None
        """The gradient, its version, and its first elements."""

    def note(self, by_size: Iterable[torch.Tensor]) -> None:
        """Note the gradient of the largest parameter that has one."""
        gradients = (parameter.grad for parameter in by_size)
        largest = next((one for one in gradients if one is not None), None)
        self._noted = None if largest is None else (
            largest, largest._version, _first(largest).clone())

    def check(self) -> None:
        """Raise RuntimeError if the user's code has clipped the gradient of the step after it.

        A backward pass there adds to `.grad`, and zero_grad() clears it: neither does harm.
        Clipping makes no element larger, and keeps its sign. Where there are less than SHRUNK
        elements, a backward pass may do the same by chance, so nothing is raised.
        """
        noted, self._noted = self._noted, None
        if noted is None or noted[0]._version == noted[1]:
            return
        now, was = _first(noted[0]), noted[2]
        has_shrunk = (now * was > 0) & (now.abs() < was.abs())
        is_as_clipped = has_shrunk | (now == was)
        if int(has_shrunk.sum()) >= SHRUNK and bool(is_as_clipped.all()):
            raise RuntimeError(CLIPPED_AFTER)


def _add_all(sums: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Add each gradient to its sum: on a GPU in a few kernels. A sparse one is made dense: its rows
    would be added one by one, which gives other bits where one occurs several times."""
    if sums:
        with torch.no_grad():
            torch._foreach_add_(sums, [one.to_dense() if one.is_sparse else one
                                       for one in gradients])


def _are_none(gradients: Iterable[torch.Tensor | None]) -> bool:
    return not any(map(is_not, gradients, repeat(None)))


def _version(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else gradient._version


def _first(gradient: torch.Tensor) -> torch.Tensor:
    """Return the first elements of a gradient in memory. It has no gaps there."""
    return gradient.detach().as_strided((min(PROBED, gradient.numel()),), (1,))

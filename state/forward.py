"""What a forward pass changes in a model beside gradients: buffers, modes, extra state.

model → here (kept at a step's begin, put back before each micro-batch) → vote, checkpoint, newcomer

The three classes have one interface: begin, reset, forget; in_flight, take_up; load. What always
holds:
1. Each micro-batch starts with the values of the step's begin.
2. All workers begin a step with the same modes (the vote compares a checksum), and hold what the
   step ends with before the vote. So a worker that has run no micro-batch has it, and a worker that
   rolls the step forward.
3. Buffers stay the same tensors. One that a forward pass replaces (`self.mean = …`) is put back,
   and takes the values of its replacement at the micro-batch's end. Their rules are in
   reduce/buffers.py. One that the user's code replaces between two steps is put back, too, with
   the new values. Another shape or type is an error at the next step.
4. Modes (train or eval) and extra state (get_extra_state, set_extra_state: FP8 scales) have no mean
   over micro-batches. The step ends with what its first micro-batch has left, in every world. With
   one worker and one micro-batch this is what plain PyTorch does.
5. The checkpoint of a finished run, or of one whose loop was left after a step, has the modes with
   which its last step ended, and not those that the user's code after that step has left. When such
   a run goes on, no worker has run the code before the next inner loop, where model.train() may
   stand.
6. A model without such values costs nothing.

Source: torch 2.13, nn/modules/module.py, `_save_to_state_dict`: a module has extra state if its
class overrides get_extra_state.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Container, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol

import torch

from elastic_trainer.state.together import groups_of
from elastic_trainer.state.values.forms import as_built, mapped
from elastic_trainer.state.values.layout import pack
from elastic_trainer.state.values.names import Table, named_buffers, named_parameters, plain
from elastic_trainer.state.values.supported import BUFFERS_STAY, moved_buffers, some, span

SUFFIX = "_extra_state"
SHAPE, DTYPE, TRAINING = attrgetter("shape"), attrgetter("dtype"), attrgetter("training")


class InFlight(Protocol):
    """Values that a step in flight may have changed."""

    def begin(self) -> None:
        """Keep the values of the step's begin."""

    def reset(self) -> None:
        """Put them back, if a step is in flight."""

    def forget(self) -> None:
        """Forget the step in flight."""

    def in_flight(self) -> Any:
        """Return what a successor of this process needs of the step in flight."""

    def take_up(self, in_flight: Any) -> None:
        """Go on with a step in flight."""


class ModelBuffers:
    """The buffers of one model, by their plain names."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.named: dict[str, torch.Tensor] = {}
        self._all: list[torch.Tensor] = []
        self._outlined: list[Any] = []
        self._kept: dict[str, torch.Tensor] = {}
        """Memory for the values of a step's begin."""
        self._pairs: list[tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Size]]] = []
        """The buffers, that memory and its shapes, those of one type together."""
        self.before: dict[str, torch.Tensor] = {}
        """The values of the step's begin; empty if no step is in flight."""
        self.left: list[dict[str, torch.Tensor]] = []
        """Of the prepared step: what its micro-batches have left, in order, in buffers whose rule
        needs each value (reduce/buffers.py)."""
        self._ties: dict[str, str] = {}
        """The first name of each buffer, by all its names."""
        self.misfits: dict[str, str] = {}
        """What the user's code has put in the place of buffers, where it does not fit."""
        self.take()

    def take(self) -> None:
        """Keep the buffers that the model has now. One that cannot be written to in place gets
        memory of its own."""
        model = self._model
        own_memory: dict[int, torch.Tensor] = {}
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if buffer.numel() > span(buffer) or buffer.is_conj() or buffer.is_neg():
                copied = own_memory.setdefault(
                    id(buffer), buffer.detach().resolve_conj().resolve_neg().contiguous())
                self._set(name, copied)
        modules = list(model.modules())
        self._table, self._children = Table(modules, "_buffers"), Table(modules, "_modules")
        self._hold(named_buffers(model))
        firsts = {id(one): name for name, one in self.named.items()}
        self._ties = {plain(name): firsts[id(one)] for name, one
                      in model.named_buffers(remove_duplicate=False)}
        own = {id(tensor): name
               for name, tensor in [*named_parameters(model).items(), *self.named.items()]}
        exported = {plain(name): tensor for name, tensor
                    in torch.nn.Module.state_dict(model, keep_vars=True).items()}
        self.aliases = {name: own[id(tensor)] for name, tensor in exported.items()
                        if own.get(id(tensor), name) != name}
        """The other names that tied parameters and buffers have in `model.state_dict()`."""
        self.left_out = [name for name in own.values() if name not in exported]
        """What is not in it: buffers that are not persistent."""

    def _hold(self, named: dict[str, torch.Tensor]) -> None:
        if {name: id(one) for name, one in named.items()} == {
                name: id(one) for name, one in self.named.items()}:
            return
        self.named, self._all = named, list(named.values())
        self._kept = {name: torch.empty_like(b, requires_grad=False) for name, b in named.items()}
        self._outlined = self._outline()
        self._pairs = [([named[name] for name in group.names],
                        kept := [self._kept[name] for name in group.names], [*map(SHAPE, kept)])
                       for group in groups_of(named, named)]
        if self.before:
            self.begin()

    def _outline(self) -> list[Any]:
        return [*map(SHAPE, self._all), *map(DTYPE, self._all)]

    def now(self) -> dict[str, torch.Tensor]:
        """Return the buffers that the model has now, by name."""
        is_as_built = self._children.is_same() and self._table.is_same()
        return self.named if is_as_built else named_buffers(self._model)

    def moved(self, now: dict[str, torch.Tensor]) -> dict[str, str]:
        """Return the buffers that are not what they were at the step's begin, by name: new, gone,
        or of another shape or type."""
        if now is self.named and self._outline() == self._outlined:
            return {}
        return moved_buffers(self.before, now)

    def held(self) -> list[torch.Tensor]:
        """Return the tensors that are the model's buffers now."""
        return self._all if self._table.has_same() else list(named_buffers(self._model).values())

    def begin(self) -> None:
        self.settle()
        self.before = dict(self._kept)
        with torch.no_grad():
            for buffers, kept, _ in self._pairs:
                torch._foreach_copy_(kept, buffers)

    def settle(self) -> None:
        """Take the values of the buffers that the user's code has replaced between two steps."""
        if self.before or not self.named or self._table.has_same():
            return
        now = {plain(name): one for name, one
               in self._model.named_buffers(remove_duplicate=False)}
        held = {name: self.named[first] for name, first in self._ties.items()}
        self.misfits |= moved_buffers(held, now)
        for name, first in self._ties.items():
            if name in now and first in now and now[name] is not now[first]:
                self.misfits[name] = f"{name} (it was {first}, and now it is not)"
                self.misfits.setdefault(first, f"{first} (it was {name}, and now it is not)")
        self.adopt(left_out=self.misfits)

    def settled(self) -> ModelBuffers:
        """Return these buffers, with the values of what the user's code has put in their place."""
        self.settle()
        return self

    def check(self, step: int) -> None:
        """Raise RuntimeError if the user's code has replaced a buffer by another kind of one."""
        if self.misfits:
            raise RuntimeError(
                f"code between two steps has replaced the buffers {some(self.misfits.values())} "
                f"before step {step}. {BUFFERS_STAY}")

    def forget(self) -> None:
        self.before, self.left = {}, []

    def in_flight(self) -> list[Any]:
        return [self.before, self.left]

    def take_up(self, in_flight: list[Any]) -> None:
        before, self.left = in_flight
        self.before = dict(self._kept) if before else {}
        for name, value in before.items():
            self.before[name].copy_(value)
        self.reset()

    def adopt(self, left_out: Container[str] = ()) -> list[tuple[str, torch.Tensor]]:
        """Take the values of the buffers that the forward pass has replaced, and return them."""
        replaced = self._put_back_replaced()
        with torch.no_grad():
            for name, replacement in replaced:
                if name not in left_out:
                    self.named[name].copy_(replacement)
        return replaced

    def reset(self) -> None:
        self.settle()
        self._put_back_replaced()
        for buffers, kept, shapes in self._pairs if self.before else ():
            if [*map(SHAPE, buffers)] != shapes:
                # A forward pass has resized one. That is an error, which is raised after this.
                for buffer, shape in zip(buffers, shapes, strict=True):
                    buffer.resize_(shape)
            torch._foreach_copy_(buffers, kept)

    def _put_back_replaced(self) -> list[tuple[str, torch.Tensor]]:
        """Let the model have the kept buffers again; returns what a forward pass has put in their
        place, by name."""
        if not self.named or self._table.has_same():
            return []
        replaced = [(name, now) for name, now
                    in self._model.named_buffers(remove_duplicate=False)
                    if now is not self.named.get(self._ties.get(plain(name), ""), now)]
        for name, _ in replaced:
            self._set(name, self.named[self._ties[plain(name)]])
        return [(plain(name), now) for name, now in replaced if plain(name) in self.named]

    def _set(self, name: str, buffer: torch.Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        setattr(self._model.get_submodule(owner), leaf, buffer)

    def load(self, values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in values.items():
                self.named[name].copy_(tensor)


class Modes:
    """The modes of one model's modules, by their plain names."""

    def __init__(self, model: torch.nn.Module):
        self._modules: dict[str, list[torch.nn.Module]] = {}
        """By plain name. A compiled module and the one that it wraps have the same name."""
        for name, module in model.named_modules():
            self._modules.setdefault(plain(name), []).append(module)
        self._last = [modules[-1] for modules in self._modules.values()]
        self._are_single = len(self._last) == sum(map(len, self._modules.values()))
        self._before: list[bool] = []
        """The modes of the step's begin; empty if no step is in flight."""
        self._ended: list[bool] = []
        """The modes with which the last step ended."""
        self.after: list[int] = []
        """The numbers of the modules whose modes the step's first micro-batch has changed, on all
        workers before the vote."""

    def _now(self) -> list[bool]:
        return list(map(TRAINING, self._last))

    def begin(self) -> None:
        self._before, self.after = self._now(), []

    def reset(self) -> None:
        if self._before:
            self._set(self._before)

    def forget(self) -> None:
        self._before = []

    def end(self) -> None:
        self._ended, self._before = self._now(), []

    @contextmanager
    def to_copy(self, is_last: bool) -> Iterator[None]:
        """Have the modes that a copy of the state should have, for a while: after the last step of
        a run those with which it ended."""
        now = self._now() if is_last else []
        self._set(self._ended if is_last else [])
        try:
            yield
        finally:
            self._set(now)

    def keep(self) -> None:
        """Keep what the step's first micro-batch has changed."""
        self.after = [number for number, (was, now)
                      in enumerate(zip(self._before, self._now(), strict=False)) if was != now]

    def apply(self) -> None:
        """End a step with what its first micro-batch has changed."""
        modes = list(self._before)
        for number in self.after if modes else ():
            modes[number] = not modes[number]
        self._set(modes)

    def _set(self, modes: list[bool]) -> None:
        if not modes or self._are_single and self._now() == modes:
            return
        for modules, mode in zip(self._modules.values(), modes, strict=True):
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
        self._set([name not in evaluating for name in self._modules])

    def in_flight(self) -> list[Any]:
        return [self.evaluating_before(), self.after]

    def take_up(self, in_flight: list[Any]) -> None:
        evaluating, self.after = in_flight
        self._before = [name not in evaluating for name in self._modules]
        self.reset()


class ExtraState:
    """The extra state of one model's modules, named as in `state_dict()` before torch.compile."""

    def __init__(self, model: torch.nn.Module):
        bare = torch.nn.Module
        self.modules = {plain(f"{name}.{SUFFIX}".removeprefix(".")): module
                        for name, module in model.named_modules()
                        if type(module).get_extra_state is not bare.get_extra_state}
        self.lacking = [name for name, module in self.modules.items()
                        if type(module).set_extra_state is bare.set_extra_state]
        """The modules without set_extra_state: their values could not be put back."""
        self._before: dict[str, Any] | None = None
        self.after: dict[str, Any] | None = None
        """What the step's first micro-batch has left, on all workers before the vote."""

    def values(self) -> dict[str, Any]:
        """Return the values, by name (nothing is copied)."""
        return {name: module.get_extra_state() for name, module in self.modules.items()}

    def load(self, values: dict[str, Any]) -> None:
        """Give the modules values, which stay the caller's."""
        for name, module in self.modules.items():
            module.set_extra_state(as_built(module.get_extra_state(), _copied(values[name])))

    # --- a step's life ----------------------------------------------------------------------------

    def begin(self) -> None:
        if self.modules:
            self._before, self.after = _copied(self.values()), None

    def reset(self) -> None:
        if self._before is not None:
            self.load(self._before)

    def keep(self) -> None:
        """Keep what the step's first micro-batch has left. Raises TypeError if it cannot be
        sent."""
        if self.modules:
            self.after = _copied(self.values())
            pack(self.after)

    def apply(self) -> None:
        """End a step with the values that its first micro-batch has left."""
        if self.after is not None:
            self.load(self.after)
        self.forget()

    def forget(self) -> None:
        self._before = self.after = None

    def in_flight(self) -> list[Any]:
        return [self._before, self.after]

    def take_up(self, in_flight: list[Any]) -> None:
        self._before, self.after = in_flight
        self.reset()


def _copied(value: Any) -> Any:
    return mapped(value, lambda part, _: part.detach().clone() if isinstance(part, torch.Tensor)
                  else copy.copy(part))

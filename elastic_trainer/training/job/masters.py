"""Weights in 16 bits whose optimizer moves masters in 32 (precision="bf16-master").

model as the script built it → here → parameters in bf16, a master of each in the optimizer's state
reduced gradient (32 bits) → here: the optimizer's groups have the masters for a step → bf16 weights

What always holds:
1. A master is an entry of the optimizer's state, under MASTER. So it is sharded, moved to another
   worker, compared, and kept in checkpoints as all that the optimizer keeps of a parameter.
2. Outside of a step of the optimizer its groups and its state name the model's parameters. In it
   they name a stand-in of each, in 32 bits. A stand-in has the master's memory, or no memory if
   this worker does not hold the master, and its `.grad` is the sum of the gradients in 32 bits. So
   an optimizer gives the bits that it gives a model in 32 bits with these gradients.
3. A weight is its master, rounded. Where it is not, code after the inner loop has changed it: then
   the weight is the new master.
4. While stand-ins are in the groups, `is_applying` is set: no other thread reads them.

The parameters of a BatchNorm or InstanceNorm, and their masters, are one: they stay in 32 bits.
torch's kernels refuse 16 bits beside running statistics in 32 (2.13, "mixed dtype"). Types other
than float32, float16 and bfloat16 stay, too, but for float64, which is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from elastic_trainer.config import ConfigError
from elastic_trainer.state.live_state import MASTERS, LiveState
from elastic_trainer.state.together import copy_together
from elastic_trainer.state.values.names import named_buffers, named_parameters
from elastic_trainer.state.values.supported import some
from elastic_trainer.training.job.optimizers import parameters_of
from elastic_trainer.training.job.shardable import sharing_memory

MASTER = "bf16_master"
"""The key of a master in what the optimizer keeps of its parameter."""
ROUNDED = (torch.float32, torch.float16, torch.bfloat16)


class Masters:
    """What an optimizer moves in place of the model's parameters."""

    def __init__(self) -> None:
        self._stand_ins: dict[int, torch.nn.Parameter] = {}
        """By the ids of the parameters; empty: the optimizer moves the parameters themselves."""

    def of(self, parameter: Any) -> Any:
        """Return the tensor that the optimizer sees for a parameter of the model."""
        return self._stand_ins.get(id(parameter), parameter)

    @torch.no_grad()
    def begin(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Round the parameters of a model. Those of the optimizer get masters with the values that
        they had before. Raises ConfigError."""
        named, kept = named_parameters(model), optimizer.state
        if wrong := [name for name, p in named.items() if p.dtype == torch.float64]:
            raise ConfigError(f"precision is {MASTERS!r}, which keeps 32 bits of a weight, and the "
                              f"parameters {some(wrong)} have 64. Use model.float().")
        its = set(map(id, parameters_of(optimizer)))
        _require_apart(model, [p for p in named.values() if id(p) in its])
        stay = {id(p) for module in model.modules() if isinstance(module, _NormBase)
                for p in module.parameters(recurse=False) if p.dtype == torch.float32}
        for p in named.values():
            if p.dtype not in ROUNDED or id(p) in stay:
                continue
            if id(p) in its:  # what an optimizer keeps has the type of what it moves
                entry = dict(kept[p]) if p in kept else {}
                master = _taken_over(p, entry.pop(MASTER, None), keeps=True)
                kept[p] = {key: value.float() if isinstance(value, torch.Tensor)
                           and value.dtype in ROUNDED else value for key, value in entry.items()}
                kept[p][MASTER] = master
            p.grad, p.data = None, p.data.to(torch.bfloat16)
            one = torch.zeros((), device=p.device)
            self._stand_ins[id(p)] = torch.nn.Parameter(one.expand(p.shape))  # without memory
        for module in model.modules():
            if isinstance(module, torch.nn.RNNBase):
                module.flatten_parameters()  # a GPU needs them in one piece

    @contextmanager
    def in_groups(self, state: LiveState, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Let the groups of an optimizer have the stand-ins, with their gradients."""
        if not self._stand_ins:
            yield
            return
        was, lists = state.is_applying, [group["params"] for group in optimizer.param_groups]
        own = [list(one) for one in lists]
        state.is_applying = True
        try:
            for one in lists:
                one[:] = map(self.of, one)
            yield
        finally:
            for one, parameters in zip(lists, own, strict=True):
                one[:] = parameters
            state.is_applying = was

    def hand_back(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Let `.grad` of parameters have what the optimizer has got, as after a plain step."""
        for p in parameters if self._stand_ins else ():
            if (stand_in := self.of(p)) is not p:
                gradient, stand_in.grad = stand_in.grad, None
                p.grad = None if gradient is None else gradient.to(p.dtype)

    @contextmanager
    def moving(self, state: LiveState, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Let an optimizer move the masters of the parameters that have a gradient, and round these
        parameters from them afterwards."""
        if not self._stand_ins:
            yield
            return
        own = {id(p): p for p in parameters_of(optimizer)}  # one may stand in the groups twice
        pairs = [(p, stand_in) for p in own.values()
                 if (stand_in := self.of(p)) is not p and stand_in.grad is not None]
        kept: Any = optimizer.state
        masters = [_master_now(p, kept.get(p, {})) for p, _ in pairs]
        empty = [stand_in.data for _, stand_in in pairs]
        with self.in_groups(state, optimizer):
            try:
                for (p, stand_in), stand_in.data in zip(pairs, masters, strict=True):
                    entry = kept.pop(p, {})
                    entry.pop(MASTER, None)
                    if entry:  # an optimizer makes its own values where there are none
                        kept[stand_in] = entry
                yield
            finally:
                copy_together([p for p, _ in pairs], [stand_in for _, stand_in in pairs])
                for (p, stand_in), nothing in zip(pairs, empty, strict=True):
                    kept[p] = kept.pop(stand_in, {})
                    kept[p][MASTER] = stand_in.data  # always last: a layout names keys in order
                    stand_in.data = nothing


def _require_apart(model: torch.nn.Module, moved: Iterable[torch.nn.Parameter]) -> None:
    """Raise ConfigError if rounding would take a parameter that the optimizer moves out of a memory
    that another tensor of the model shares, and then does not follow any more."""
    leave = {p.untyped_storage().data_ptr() for p in moved if p.dtype != torch.bfloat16}
    every: dict[str, torch.Tensor] = {**named_parameters(model), **named_buffers(model)}
    if shared := sharing_memory({
            name: one for name, one in every.items()
            if one.layout == torch.strided and one.untyped_storage().data_ptr() in leave}):
        raise ConfigError(
            f"precision is {MASTERS!r}, and {' and '.join(shared)} lie in one memory, which a "
            f"rounded weight leaves. Tie them as one parameter (b.weight = a.weight), or call "
            f"model.bfloat16() first and tie them again.")


def _master_now(parameter: torch.Tensor, entry: dict[str, Any]) -> torch.Tensor:
    """Return the master with which a step begins. Raises RuntimeError if code between two steps has
    given the parameter, or what the optimizer keeps of it, another type."""
    if parameter.dtype != torch.bfloat16:
        raise RuntimeError(
            f"a weight of the shape {tuple(parameter.shape)} has the type {parameter.dtype}, and "
            f"precision={MASTERS!r} made it torch.bfloat16. Leave its type, and use a copy where "
            f"you need another: copy.deepcopy(model).float().")
    if MASTER not in entry and any(isinstance(value, torch.Tensor) and value.dtype in ROUNDED[1:]
                                   for value in entry.values()):
        raise _rounded(parameter.dtype)
    return _taken_over(parameter, entry.get(MASTER))


def _taken_over(parameter: torch.Tensor, master: torch.Tensor | None,
                keeps: bool = False) -> torch.Tensor:
    """Return the master of a parameter: the one that there is, but for elements whose weight was
    changed. The weight may be one that a script has loaded in 32 bits. `keeps`: the parameter
    leaves its memory, which may become the master's. Raises RuntimeError for a master that was
    rounded."""
    if master is None:
        fills = parameter.untyped_storage().nbytes() == parameter.nbytes
        return parameter.detach().to(torch.float32, copy=not (keeps and fills))
    if master.dtype != torch.float32:
        raise _rounded(master.dtype)
    pair = master.to(torch.bfloat16), parameter.detach()
    if all(one.is_cpu and one.is_contiguous() and one.dtype == torch.bfloat16
           and one.numel() % 4 == one.storage_offset() % 4 == 0 for one in pair) and torch.equal(
            *(one.view(-1).view(torch.int64) for one in pair)):
        return master  # the usual case: a CPU compares elements of bf16 at a fifth of this rate
    return torch.where(pair[0] == parameter, master, parameter.float(), out=master)


def _rounded(dtype: torch.dtype) -> RuntimeError:
    return RuntimeError(
        f"what the optimizer keeps was rounded to {dtype}: optimizer.load_state_dict() gives it "
        f"the type of the weights, and a master (precision={MASTERS!r}) has 32 bits. Load it while "
        f"the model is in 32 bits, before the trainer is built.")


def masters_of(name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Masters:
    """Return the masters of a job's precision: none, but for bf16-master. Raises ConfigError."""
    masters = Masters()
    if name == MASTERS:
        masters.begin(model, optimizer)
    return masters

"""What a step does to a buffer that its micro-batches have changed: the rule of each buffer.

model, option `buffers` → here → statistics.py (the rule "mean"), buffer_values.py (the others), an
error for a buffer without a rule

What always holds:
1. Each micro-batch begins with the buffers of the step's begin. In a step of one micro-batch a
   buffer takes the value that this one has left, as in plain PyTorch, whatever its rule is.
2. Running statistics of torch's own modules (BatchNorm, InstanceNorm, SyncBatchNorm, observers of
   quantization, and classes derived from them) have the rule "mean". The vectors of spectral_norm
   follow from the weight alone, so all micro-batches leave the same: "last".
3. Any other buffer that changes has the rule of the option `buffers`, or it is an error that names
   it.

Source: torch 2.13, nn/modules/batchnorm.py (`_NormBase`), ao/quantization, and in nn/utils
spectral_norm.py and parametrizations.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch.ao.quantization import FakeQuantizeBase, ObserverBase
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from elastic_trainer.config import ConfigError
from elastic_trainer.state.names import plain
from elastic_trainer.state.supported import some

RULES = ("mean", "sum", "last")
RUNNING = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Gather:
    """The rule `gather(fn)`."""

    fn: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]

    def __repr__(self) -> str:
        return "gather"


def gather(fn: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]) -> Gather:
    """Return the rule for a buffer whose next value a function computes: `fn(before, values)`.

    `before` is the value at the step's begin, `values` has those that the micro-batches have left,
    in their order. All workers call it in the same way, at the end of the step, under
    torch.no_grad(). The model's buffers then have the values of the step's begin.
    """
    return Gather(fn)


Rule = str | Gather


class BufferRules:
    """The rules of one model's buffers."""

    def __init__(self, model: torch.nn.Module, given: Mapping[str, Rule] | None = None,
                 microbatches: int = 1):
        self._model, self._given, self.microbatches = model, dict(given or {}), microbatches
        for name, rule in self._given.items():
            if rule not in RULES and not isinstance(rule, Gather):
                raise ConfigError(f"the rule of the buffers {name!r} is {rule!r}. Use one of "
                                  f"{RULES}, or gather(fn).")

    @property
    def settings(self) -> dict[str, str]:
        """The rules as given, as JSON values by key."""
        return {f"buffers.{name}": str(rule) for name, rule in self._given.items()}

    def of(self, names: Iterable[str]) -> dict[str, Rule | None]:
        """Return the rules of these buffers; None for one that has none."""
        of_torch = _of_torch(self._model)
        return {name: self._found(name) or of_torch.get(name) for name in names}

    def _found(self, name: str) -> Rule | None:
        return self._given.get(name) or next(
            (rule for pattern, rule in self._given.items() if fnmatchcase(name, pattern)), None)

    def require_used(self, names: Iterable[str]) -> None:
        """Raise ConfigError if a rule is that of no buffer."""
        known = list(names)
        if odd := [pattern for pattern in self._given
                   if not any(fnmatchcase(name, pattern) for name in known)]:
            raise ConfigError(f"buffers has rules for {some(odd)}, but the model has no such "
                              f"buffers. Its buffers are {some(known) or 'none'}.")

    def refusal(self, names: Iterable[str], behind: str) -> str:
        """Return the error for buffers that forward changes and that have no rule."""
        found = list(names)
        return (
            f"forward has changed the buffers {some(found)}, and a step has {self.microbatches} "
            f"micro-batches, each of which begins with the step's buffers. Say what the step ends "
            f"with: buffers={{{found[0]!r}: \"mean\"}} (the mean of their changes), \"sum\" (of "
            f"their changes), \"last\" (what the last one has left), or gather(fn), which gets all "
            f"their values in order. Or change the buffer {behind}.")


def _of_torch(model: torch.nn.Module) -> dict[str, Rule]:
    """Return the rules of buffers of torch's own modules, by name."""
    found = dict[str, Rule]()
    for name, module in model.named_modules():
        start = f"{plain(name)}." if plain(name) else ""
        rule = "mean"
        if isinstance(module, _NormBase):
            own: Iterable[str] = RUNNING
        elif isinstance(module, (ObserverBase, FakeQuantizeBase)):
            own = [one for one, _ in module.named_buffers(recurse=False)]
        else:
            rule = "last"
            own = [f"{hook.name}_{vector}" for hook in module._forward_pre_hooks.values()
                   if isinstance(hook, SpectralNorm) for vector in "uv"]
            if isinstance(module, _SpectralNorm):
                own = ["_u", "_v"]
        found |= {f"{start}{one}": rule for one in own}
    return found

"""Whether an optimizer can be sharded: it must treat each parameter by itself.

optimizer (its class and options) → here: tried on two small parameters → "" or why not

What always holds: an optimizer that passes gives a parameter the same bits, whatever other
parameters it moves in the same step. Nothing of the user's optimizer is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

SHAPES = ((7, 5), (11,))
STEPS = 4


def shard_refusal(optimizer: torch.optim.Optimizer) -> str:
    """Return why the optimizer's state cannot be sharded; "" if it can be."""
    kind = type(optimizer).__name__
    if any(isinstance(p, torch.Tensor) and p.is_sparse for g in optimizer.param_groups
           for p in g["params"]):
        return f"the optimizer {kind} has sparse parameters"
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if any(getattr(optimizer, name, None) for name in hooks):
        return (f"the optimizer {kind} has hooks of its steps, which would run several times in a "
                f"step. Remove them, or put the code after the inner loop")
    try:
        together, states, changed = _trained(optimizer, [0, 1])
        alone = [_trained(optimizer, [number])[0][0] for number in (0, 1)]
    except Exception as error:  # the class is the user's
        return (f"the optimizer {kind} could not be built and tried on a small model with its own "
                f"options ({type(error).__name__}: {error})"[:300] + ")")
    if changed:
        return f"the optimizer {kind} changes {changed} in a step, which all parameters share"
    if bad := [type(value).__name__ for entry in states for value in entry.values()
               if not isinstance(value, (torch.Tensor, int, float, type(None)))]:
        return f"the optimizer {kind} keeps a {bad[0]} of a parameter, and no tensor or number"
    if not all(map(torch.equal, together, alone)):
        return f"the optimizer {kind} gives a parameter other bits beside other parameters"
    return ""


def _trained(optimizer: torch.optim.Optimizer,
             numbers: list[int]) -> tuple[list[torch.Tensor], list[dict[str, Any]], str]:
    """Train some of the small parameters with an optimizer of the same class and options.

    Return their values, what it keeps of each, and which of its attributes or options it changes.
    """
    generator = torch.Generator().manual_seed(5)
    every = [torch.randn(shape, generator=generator) for shape in SHAPES]
    gradients = [[torch.randn(shape, generator=generator) for shape in SHAPES]
                 for _ in range(STEPS)]
    parameters = [torch.nn.Parameter(every[number].clone()) for number in numbers]
    make: Callable[..., torch.optim.Optimizer] = type(optimizer)
    options = {key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
               for key, value in optimizer.defaults.items() if key != "capturable"}
    takes = inspect.signature(make).parameters
    mine = make(parameters, **{key: value for key, value in options.items() if key in takes})
    for group in mine.param_groups:
        group.update(options)
    changed = ""
    for step in gradients:
        for parameter, number in zip(parameters, numbers, strict=True):
            parameter.grad = step[number].clone()
        before = _shared(mine)
        mine.step()
        after = _shared(mine)
        changed = changed or ", ".join(key for key in before | after
                                       if before.get(key) != after.get(key))
    kept: Any = mine.state
    return ([p.detach() for p in parameters], [dict(kept[p]) for p in parameters if p in kept],
            changed)


def _shared(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return what the optimizer has for all parameters together, as texts that can be compared."""
    groups = {f"{key} of group {number}": repr(value)
              for number, group in enumerate(optimizer.param_groups)
              for key, value in group.items() if key != "params"}
    own = {key: repr(value) for key, value in vars(optimizer).items()
           if key not in ("state", "param_groups", "defaults") and not key.startswith("_")
           and key != "step"}
    return groups | own

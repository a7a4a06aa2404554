"""Whether an optimizer treats each parameter by itself: else it cannot be sharded, or move masters.

optimizer (its class, attributes and groups) → here: tried on two small parameters → "" or why not

What always holds: an optimizer that passes gives a parameter the same bits, whatever other
parameters it moves in the same step, for each of its groups and each type of its parameters. It
leaves a parameter without a gradient as it is: a sharded step shows it no other gradients than
those of the parameters that it is to move. The trial has the optimizer's own attributes, and
nothing of the user's optimizer is changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import optimizer as of_all

from elastic_trainer.state.values.attributes import OF_TORCH
from elastic_trainer.state.values.plain_values import is_plain
from elastic_trainer.state.values.supported import span

SHAPES, MATRICES = ((7, 5), (11,)), ((7, 5), (4, 9))
"""Of the two parameters: some optimizers take matrices alone (Muon)."""
SCALES = 2 * (1.0, 1e-4, 1e3, 0.1)
"""Of the gradients of the trial's steps: an optimizer may clip them, or do something else from its
fifth or sixth step on."""
Shapes = Sequence[tuple[int, ...]]
OWN = OF_TORCH | {"state", "param_groups", "defaults", "step"}
"""What the trial has of its own. A scheduler puts its own `step` into the optimizer."""
HOOKS_OF_ALL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def shard_refusal(optimizer: torch.optim.Optimizer) -> str:
    """Return why the optimizer's state cannot be sharded; "" if it can be."""
    kind = type(optimizer).__name__
    if (any(getattr(optimizer, name, None) for name in HOOKS)
            or any(getattr(of_all, name, None) for name in HOOKS_OF_ALL)):
        return (f"the optimizer {kind} has hooks of its steps, which would run several times in a "
                f"step, or see other tensors than the model's. Remove them, or put the code after "
                f"the inner loop")
    if _is_replaced(optimizer):
        return (f"the step of the optimizer {kind} was replaced by a function, which would run "
                f"several times in a step. Put its code after the inner loop, or into a class")
    attributes = {key: value for key, value in vars(optimizer).items() if key not in OWN}
    if bad := [key for key, value in attributes.items() if not is_plain(value)]:
        return (f"the optimizer {kind} has the attribute {bad[0]}, which is no number or text, so "
                f"its step may depend on more than one parameter")
    for options, shapes, dtype, device in _kinds(optimizer):
        try:
            why = _tried(optimizer, attributes, options, shapes, dtype, device)
        except Exception as error:  # the class is the user's
            why = f"could not be tried on two small parameters ({type(error).__name__}: {error})"
        if why:
            return f"the optimizer {kind} {why[:300]}"
    return ""


def sharing_memory(parameters: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Return the names of two parameters that lie in one memory, as `b.data = a.data` leaves
    them."""
    ends = dict[int, tuple[int, str]]()
    for name, p in sorted(parameters.items(), key=lambda item: item[1].data_ptr()):
        end, other = ends.get(p.untyped_storage().data_ptr(), (0, ""))
        if p.numel() and p.data_ptr() < end:
            return other, name
        ends[p.untyped_storage().data_ptr()] = (
            p.data_ptr() + span(p) * p.element_size(), name)
    return None


def _is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """True if the script has given this optimizer another step than its class has. A scheduler
    only notes that the step ran (torch 2.13, optim/lr_scheduler.py, patch_track_step_called)."""
    own = vars(optimizer).get("step")
    return own is not None and not (hasattr(own, "_wrapped_by_lr_sched")
                                    and own.__wrapped__ is type(optimizer).step)


def _kinds(
        optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[dict[str, Any], Shapes, torch.dtype, torch.device]]:
    """Yield the options of each group and the shapes to try, with each type and device of its
    parameters."""
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        shapes = MATRICES if all(p.dim() == 2 for p in group["params"]) else SHAPES
        for dtype, device in {(p.dtype, p.device) for p in group["params"]}:
            yield options, shapes, dtype, device


def _tried(optimizer: torch.optim.Optimizer, attributes: Mapping[str, Any],
           options: Mapping[str, Any], shapes: Shapes, dtype: torch.dtype,
           device: torch.device) -> str:
    """Return what speaks against one group's options and one type of parameter."""
    generator = torch.Generator().manual_seed(5)

    def tensors(scale: float) -> list[torch.Tensor]:
        return [(scale * torch.randn(shape, generator=generator)).to(device, dtype)
                for shape in shapes]

    values, gradients = tensors(1.0), [tensors(scale) for scale in SCALES]
    both, *alone = [_Trial(optimizer, attributes, options, values, [
        [gradient if number in moved else None for number, gradient in enumerate(step)]
        for step in gradients]) for moved in ((0, 1), (0,), (1,))]
    if why := next((trial.why for trial in (both, *alone) if trial.why), ""):
        return why
    if not all(torch.equal(trial.values[number], both.values[number])
               for number, trial in enumerate(alone)):
        return "gives a parameter other bits beside other parameters"
    return ""


class _Trial:
    """A few steps of an optimizer of the same class, with the same attributes and options."""

    def __init__(self, optimizer: torch.optim.Optimizer, attributes: Mapping[str, Any],
                 options: Mapping[str, Any], values: list[torch.Tensor],
                 gradients: list[list[torch.Tensor | None]]):
        own: Any = object.__new__(type(optimizer))
        vars(own).update(vars(optimizer))
        for key in ("step", *HOOKS):
            vars(own).pop(key, None)
        vars(own).update(attributes, _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
        self.why, parameters = "", [torch.nn.Parameter(value.clone()) for value in values]
        copied = {key: value.clone() if isinstance(value, torch.Tensor) else value
                  for key, value in options.items()}
        own.state, own.param_groups = defaultdict(dict), [{**copied, "params": parameters}]
        before = self._shared(own)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            own.step()
            if not all(map(_are_same, (p.grad for p in parameters), step)):
                self.why = "changes .grad in its step"
        after = self._shared(own)
        if changed := [key for key in before | after if before.get(key) != after.get(key)]:
            self.why = f"changes {changed[0]} in a step, which all parameters share"
        entries = [own.state[parameter] for parameter in parameters if parameter in own.state]
        if bad := [value for entry in entries for value in entry.values()
                   if not isinstance(value, (torch.Tensor, int, float, type(None)))]:
            self.why = f"keeps a {type(bad[0]).__name__} of a parameter, and no tensor or number"
        if kept := [name for parameter in parameters for name in vars(parameter)]:
            self.why = f"keeps {kept[0]} in an attribute of a parameter, and not in its state"
        if any(own.state.get(p) or not torch.equal(p, value) for p, value, gradient
               in zip(parameters, values, gradients[0], strict=True) if gradient is None):
            self.why = "moves a parameter that has no gradient, or keeps values of it"
        self.values = [parameter.detach() for parameter in parameters]

    def _shared(self, own: torch.optim.Optimizer) -> dict[str, str]:
        """Return what is there for all parameters together, as texts that can be compared."""
        [group] = own.param_groups
        return {key: repr(value) for key, value in {**vars(own), **group}.items()
                if key not in OWN and key != "params"}


def _are_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return torch.equal(one, other) if one is not None and other is not None else one is other

"""What an optimizer keeps, as values that name parameters; rates.py has its learning rates.

optimizer → here → checkpoint, newcomer → here → optimizer

What always holds:
1. A parameter goes by its plain name, so values fit any optimizer with the same groups.
2. Values are compared with this optimizer before anything of it is changed.
"""

from __future__ import annotations

from typing import Any

import torch

from elastic_trainer.state.layout import LayoutError
from elastic_trainer.state.names import named_parameters
from elastic_trainer.state.rates import taken_in_place, tensor_kind


class OptimizerValues:
    """The groups and the state of one optimizer."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self._model, self._optimizer = model, optimizer
        self._group_sizes = self._sizes()

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def check_groups(self, step: int) -> None:
        """Raise RuntimeError if the optimizer has other groups than at the start: newcomers, and a
        resume, build those."""
        if (sizes := self._sizes()) != self._group_sizes:
            raise RuntimeError(
                f"the optimizer has groups of {sizes} parameters in step {step}, but it had groups "
                f"of {self._group_sizes} at the start. Build it with all parameters: one "
                "whose requires_grad is False is not moved until a step sets it True.")

    def _members(self, names: dict[int, str]) -> list[list[str]]:
        return [[names[id(p)] for p in group["params"]] for group in self._optimizer.param_groups]

    def values(self, names: dict[int, str]) -> dict[str, Any]:
        """Return the values (nothing is copied); `names` has the parameters' names by id."""
        groups, kept = self._optimizer.param_groups, self._optimizer.state
        return {
            "state": {names[id(p)]: kept[p] for g in groups for p in g["params"] if p in kept},
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in groups],
            "members": self._members(names),
            "shared": {key: value for key, value in kept.items()
                       if not isinstance(key, torch.Tensor)},
        }

    def require_fit(self, values: dict[str, Any]) -> None:
        """Raise LayoutError if values are not of this optimizer."""
        names = {id(p): name for name, p in named_parameters(self._model).items()}
        if values["members"] != self._members(names):
            raise LayoutError("the optimizer's parameter groups are not this optimizer's")
        pairs = zip(self._optimizer.param_groups, values["groups"], strict=True)
        for number, (group, theirs) in enumerate(pairs):
            for key in group.keys() & theirs.keys() - {"params"}:
                if tensor_kind(group[key]) != tensor_kind(theirs[key]):
                    raise LayoutError(
                        f"{key} of the optimizer's group {number} is {theirs[key]!r} there, but "
                        f"{group[key]!r} in this job: a tensor and a number, or tensors of other "
                        "types")

    def load(self, values: dict[str, Any]) -> None:
        """Take over values that fit."""
        parameters, kept = named_parameters(self._model), self._optimizer.state
        kept.clear()
        kept.update(values.get("shared", {}))
        entries = values["state"]
        for group, theirs, members in zip(self._optimizer.param_groups, values["groups"],
                                          values["members"], strict=True):
            group.update({key: taken_in_place(group.get(key), value)
                          for key, value in theirs.items()})
            moves_step = bool(group.get("fused") or group.get("capturable"))
            for name in members:
                if name in entries:
                    kept[parameters[name]] = _moved(entries[name], parameters[name], moves_step)


def _moved(value: Any, parameter: torch.Tensor, moves_step: bool, key: Any = None) -> Any:
    """Return what an optimizer keeps of a parameter with its tensors on the parameter's device, in
    its memory format.

    Its count of steps stays on the CPU unless it is fused or capturable, as in torch (2.13,
    optim/optimizer.py, _process_value_according_to_param_policy).
    """
    if isinstance(value, torch.Tensor):
        if value.shape == parameter.shape and value.stride() != parameter.stride():
            return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        return value.to(parameter.device) if key != "step" or moves_step else value
    if isinstance(value, dict):
        return {k: _moved(v, parameter, moves_step, k) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(v, parameter, moves_step) for v in value)
    return value

"""What an optimizer keeps, as values that name parameters: groups, state, attributes.

optimizer → here → checkpoint, newcomer → here → optimizer

What always holds:
1. A parameter goes by its plain name, so values fit any optimizer with the same groups.
2. Values are compared with this optimizer before anything of it is changed.
3. What an optimizer keeps beside `state` and `param_groups` is kept too (attributes.py): numbers
   that it counts, buffers of its own, optimizers inside of it, attributes of parameters. What
   cannot be kept is an error after the step that made it.
4. If such a value cannot be kept, and the optimizer has a state_dict and a load_state_dict of its
   own, then what they add to `state` and `param_groups` is kept instead.
5. Tensors of `state` that share a memory are refused: the attributes alone keep views as views.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from elastic_trainer.state.values.attributes import Attributes, Kept
from elastic_trainer.state.values.filling import Filling, own
from elastic_trainer.state.values.forms import CannotKeep, mapped
from elastic_trainer.state.values.layout import LayoutError
from elastic_trainer.state.values.names import named_buffers, named_parameters, plain
from elastic_trainer.state.values.nodes import Node, Walk, leaves


def taken_in_place(mine: Any, theirs: Any) -> Any:
    """Return a received value; a tensor that is there keeps its place and takes the value."""
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return mine.copy_(theirs)
    if (isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple))
            and len(mine) == len(theirs)):
        return type(mine)(taken_in_place(*pair) for pair in zip(mine, theirs, strict=True))
    return theirs


def tensor_kind(value: Any) -> Any:
    """Return the types and shapes of the tensors in a value. Two values must have the same."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape)
    return [tensor_kind(one) for one in value] if isinstance(value, (list, tuple)) else None


STANDARD = ("state", "param_groups")
"""What torch's own state_dict has."""


class OptimizerValues:
    """The groups, the state and the attributes of one optimizer, or of several as one
    (`members`)."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
                 members: Mapping[str, torch.optim.Optimizer] | None = None):
        self._model, self._optimizer = model, optimizer
        self._members_by_name = dict(members or {"": optimizer})
        self._group_sizes = self._sizes()
        parameters = {f"parameter {name}": parameter
                      for name, parameter in named_parameters(model).items()}
        self.attributes = Attributes(self._members_by_name | parameters, self._kept, STANDARD)

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def check(self, step: int) -> None:
        """Raise RuntimeError if the optimizer has changed in a step as it must not."""
        self.check_groups(step)
        if self.attributes.is_new():
            self.attributes.values()
        self._check_attributes(step)

    def check_groups(self, step: int | None = None) -> None:
        """Raise RuntimeError if the optimizer has other groups than at the start: newcomers, and a
        resume, build those."""
        if (sizes := self._sizes()) != self._group_sizes:
            raise RuntimeError(
                f"the optimizer has groups of {sizes} parameters"
                f"{'' if step is None else f' in step {step}'}, but it had groups of "
                f"{self._group_sizes} at the start. Build it with all parameters: one "
                "whose requires_grad is False is not moved until a step sets it True.")

    def _check_attributes(self, step: int) -> None:
        """Raise RuntimeError if the optimizer has changed what cannot be kept, as the last walk has
        found it."""
        if flaws := self._flaws():
            raise RuntimeError(
                f"the optimizer {type(self._optimizer).__name__} has changed by step {step} what "
                f"cannot be kept: {flaws}. A newcomer and a resumed run would lack it. Keep "
                f"tensors and numbers in self.state[parameter] or in attributes that __init__ "
                f"makes, or give the optimizer a state_dict and a load_state_dict that have this "
                f"value.")

    def _flaws(self) -> str:
        """Return what the last walk has found that cannot be kept; empty: all can."""
        flaws = {} if self._owns_dict() else self.attributes.flaws
        return "; ".join(f"{place} (now {what})" for place, what in list(flaws.items())[:4])

    def _owns_dict(self) -> bool:
        """True if each optimizer has a state_dict and a load_state_dict of its own."""
        bare = torch.optim.Optimizer
        return all(type(one).state_dict is not bare.state_dict
                   and type(one).load_state_dict is not bare.load_state_dict
                   for one in self._members_by_name.values())

    def _kept(self) -> Kept:
        """Return what the state has of the model and the optimizer by other names."""
        kept, names = Kept(), dict[int, str]()
        for name, parameter in named_parameters(self._model).items():
            kept.add(parameter, "parameter", name)
            names[id(parameter)] = name
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                kept.storages[parameter.grad.untyped_storage().data_ptr()] = "gradient"
        for name, buffer in named_buffers(self._model).items():
            kept.add(buffer, "buffer", name)
        for name, module in self._model.named_modules():
            kept.add(module, "module", plain(name))
        for name, member in self._members_by_name.items():
            kept.add(member, "optimizer", name)
            kept.add(member.state, "state", name)
            kept.add(member.param_groups, "groups", name)
        for number, group in enumerate(self._optimizer.param_groups):
            kept.add(group, "group", number)
            _add_tensors(kept, group, "group", number)
            for parameter in group["params"]:
                if parameter in self._optimizer.state:
                    entry = self._optimizer.state[parameter]
                    if isinstance(entry, (dict, list, torch.Tensor)):
                        kept.add(entry, "of", names[id(parameter)])
                    _add_tensors(kept, entry, "of", names[id(parameter)])
        return kept

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield the tensors and numbers that the attributes hold, with their places."""
        for name, (pairs, _) in self.attributes.values().items():
            for attribute, node in pairs:
                yield from leaves(node, f"optimizer{name and '.'}{name}.{attribute}")

    def _members(self, names: dict[int, str]) -> list[list[str]]:
        return [[names[id(p)] for p in group["params"]] for group in self._optimizer.param_groups]

    def values(self, names: dict[int, str]) -> dict[str, Any]:
        """Return the values (nothing is copied); `names` has the parameters' names by id.

        Raises CannotKeep for an attribute that changed and that cannot be kept: `check` walks an
        attribute again only when its type is another one, and a dict in it may have a new value.
        """
        self.check_groups()
        groups, kept = self._optimizer.param_groups, self._optimizer.state
        _require_keys(kept, names)
        self._require_apart(names)
        attributes = self.attributes.values()
        if flaws := self._flaws():
            raise CannotKeep(f"the optimizer holds {flaws}")
        added = self._own_values() if self.attributes.flaws else {}  # it owns its dict, then
        return {**({"attributes": attributes} if attributes else {}),
                **({"own": added} if added else {}),
                "state": {names[id(p)]: kept[p] for g in groups for p in g["params"] if p in kept},
                "groups": [{k: v for k, v in g.items() if k != "params"} for g in groups],
                "members": self._members(names),
                "shared": {key: value for key, value in kept.items()
                           if not isinstance(key, torch.Tensor)}}

    def _require_apart(self, names: dict[int, str]) -> None:
        """Raise CannotKeep if two tensors of the state share a memory, or one shares that of a
        parameter: they would come back apart."""
        every = {id(value): value for value in self._model.parameters()} | {
            id(value): value for entry in self._optimizer.state.values()
            for _, value in _tensors_in(entry)}
        memories = [at for at in map(_memory, every.values()) if at]
        if len(memories) == len(set(memories)):
            return  # the usual case, without the places
        tensors: list[tuple[str, torch.Tensor]] = [
            (f"parameter {name}", p) for name, p in named_parameters(self._model).items()]
        tensors += [(f"optimizer.state[{names.get(id(key), key)}]{place}", value)
                    for key, entry in self._optimizer.state.items()
                    for place, value in _tensors_in(entry)]
        seen: dict[int, tuple[str, Any]] = {}
        for place, value in tensors:
            if (at := _memory(value)) == 0:
                continue
            first, other = seen.setdefault(at, (place, value))
            if other is not value and place.startswith("optimizer"):
                raise CannotKeep(
                    f"{place} shares its memory with {first}, and would come back with a memory of "
                    f"its own. Keep a clone, or keep the flat tensor and all views of it in "
                    f"attributes of the optimizer (self.flat, self.views), where they stay views")

    def _own_values(self) -> dict[str, Node]:
        """Return what the optimizers' own state_dicts have beside torch's."""
        kept, found = self._kept(), dict[str, Node]()
        for name, member in self._members_by_name.items():
            walk = Walk(kept.nodes, kept.storages)
            found[name] = walk.describe({key: value for key, value in member.state_dict().items()
                                         if key not in STANDARD}, f"state_dict of {name}")
            if flaws := [*walk.flaws, *walk.left]:
                raise TypeError(f"the optimizer's state_dict has {flaws}, which cannot be kept")
        return found

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
        self.attributes.require_fit(values.get("attributes", {}), self._finder(values))

    def _finder(self, values: dict[str, Any]) -> Callable[[Node], Any]:
        """Return what finds what nodes refer to: also in a state that is not loaded yet."""
        kept = self._kept()

        def find(node: Node) -> Any:
            match list(node):
                case ["kept", "of", str(name)]:
                    return values["state"][name]
                case ["kept", "of", str(name), key]:
                    return values["state"][name][key]
                case ["kept", "group", int(number), key]:
                    return values["groups"][number][key]
            return kept.find(node)

        return find

    def load(self, values: dict[str, Any]) -> None:
        """Take over values that fit."""
        self._load_standard(values)
        self.attributes.load(values.get("attributes", {}))
        if added := values.get("own"):
            for name, member in self._members_by_name.items():
                filling = Filling(self._kept().find, self.attributes.device())
                found = filling.build(added[name])
                filling.finish()
                member.load_state_dict(member.state_dict() | found)
            self._load_standard(values)  # it may have copied what the attributes share
            self.attributes.load(values.get("attributes", {}))

    def _load_standard(self, values: dict[str, Any]) -> None:
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

    def take(self, entries: Mapping[str, Any]) -> None:
        """Take over the state of some parameters, by name. Those of the others stay."""
        parameters = named_parameters(self._model)
        places = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for name, entry in entries.items():
            group = places[id(parameters[name])]
            moves_step = bool(group.get("fused") or group.get("capturable"))
            self._optimizer.state[parameters[name]] = _moved(entry, parameters[name], moves_step)


def _require_keys(kept: Mapping[Any, Any], names: Mapping[int, str]) -> None:
    """Raise CannotKeep for an entry of the state that no other process would find again."""
    for key in kept:
        if isinstance(key, torch.Tensor) and id(key) not in names:
            raise CannotKeep(
                f"optimizer.state has an entry of a {type(key).__name__} of the shape "
                f"{tuple(key.shape)}, which is no parameter of the model. Keep it in an attribute "
                f"of the optimizer, or by the parameter")
        if type(key) is int and key in names:
            raise CannotKeep(
                f"optimizer.state has an entry of id({names[key]}), a number that is another one "
                f"in each process. Use the parameter as the key: optimizer.state[parameter]")


def _tensors_in(value: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an entry of the state, with their places."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _tensors_in(one, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple, deque)):
        for number, one in enumerate(value):
            yield from _tensors_in(one, f"{place}[{number}]")


def _memory(value: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0: it has none."""
    return value.untyped_storage().data_ptr() if value.layout == torch.strided else 0


def _add_tensors(kept: Kept, entry: Any, *name: Any) -> None:
    """Note the tensors and containers of a group, or of what is kept of a parameter."""
    for key, value in entry.items() if isinstance(entry, dict) else ():
        if isinstance(value, (torch.Tensor, dict, list)) and key != "params":
            kept.add(value, *name, key)
            if isinstance(value, torch.Tensor) and name[0] == "of" and (at := _memory(value)) and (
                    value.numel() * value.element_size() < value.untyped_storage().nbytes()
                    and kept.storages[at] == kept.nodes[id(value)]):
                kept.storages[at] = "part"


def _moved(value: Any, parameter: torch.Tensor, moves_step: bool) -> Any:
    """Return what an optimizer keeps of a parameter with its tensors on the parameter's device, in
    its memory format.

    Its count of steps stays on the CPU unless it is fused or capturable, as in torch (2.13,
    optim/optimizer.py, _process_value_according_to_param_policy).
    """
    def moved(part: Any, key: Any) -> Any:
        if not isinstance(part, torch.Tensor):
            return part
        if part.shape == parameter.shape and part.stride() != parameter.stride():
            return torch.empty_like(parameter, dtype=part.dtype).copy_(part)
        return own(part.to(parameter.device) if key != "step" or moves_step else part)

    return mapped(value, moved)

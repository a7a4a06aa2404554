"""Operations on many tensors at once: one for all that have a type, a device and a kind of shape.

buffers of a model → here → a bounded number of operations, whatever their number is

What always holds: the values are those that the same operation on each tensor has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch


def copy_together(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy each value into its target, of the same shape."""
    kinds: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, value in zip(targets, values, strict=True):
        kind = target.dtype, target.device, value.dtype, value.device
        into, what = kinds.setdefault(kind, ([], []))
        into.append(target)
        what.append(value)
    for into, what in kinds.values():
        torch._foreach_copy_(into, what)


class Group:
    """The tensors of one type on one device, which lie one after the other in a flat tensor."""

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]):
        self.names, self.dtype, self.device = list(names), tensors[0].dtype, tensors[0].device
        self._shapes = [tensor.shape for tensor in tensors]
        self._sizes = [tensor.numel() for tensor in tensors]
        self._are_numbers = not any(tensor.dim() for tensor in tensors)
        self._are_flat = all(tensor.dim() == 1 for tensor in tensors)
        self.size = sum(self._sizes)

    def flat(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return all elements, in a tensor of one dimension."""
        found = [*map(tensors.__getitem__, self.names)]
        if self._are_numbers:
            return torch.stack(found)
        return torch.cat(found if self._are_flat else [one.reshape(-1) for one in found])

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a flat tensor, in the shapes of the group's tensors."""
        if self._are_numbers:
            return list(flat.unbind())
        parts = torch.split(flat, self._sizes)
        return list(parts) if self._are_flat else [
            part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def copy_into(self, tensors: Mapping[str, torch.Tensor], flat: torch.Tensor) -> None:
        """Copy a flat tensor into the group's tensors."""
        torch._foreach_copy_([tensors[name] for name in self.names], self.parts(flat))


def groups_of(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> list[Group]:
    """Return groups of all these tensors. Numbers are apart: they have no dimension to join in."""
    found: dict[tuple[torch.dtype, torch.device, bool], list[str]] = {}
    for name in names:
        one = tensors[name]
        found.setdefault((one.dtype, one.device, one.dim() == 0), []).append(name)
    return [Group(members, [tensors[name] for name in members]) for members in found.values()]

"""The buffers of a model: kept at a step's begin, put back before each micro-batch.

model → here → each micro-batch's begin, checkpoint, newcomer

What always holds:
1. The model's buffers stay the same tensors. One that a forward pass replaces (`self.mean = …`) is
   put back, and takes the values of its replacement at the micro-batch's end.
2. Each micro-batch starts with the buffers of the step's begin.
"""

from __future__ import annotations

import torch

from elastic_trainer.state.names import named_buffers, named_parameters, plain


class ModelBuffers:
    """The buffers of one model, by their plain names."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.before: dict[str, torch.Tensor] = {}
        """The values of the step's begin; empty if no step is in flight."""
        self.left: list[dict[str, torch.Tensor]] = []
        """Of the prepared step: what its micro-batches have left, in order, in buffers whose rule
        needs each value (reduce/buffer_values.py)."""
        self.take()

    def take(self) -> None:
        """Keep the buffers that the model has now. One that cannot be written to in place gets
        memory of its own."""
        model = self._model
        own_memory: dict[int, torch.Tensor] = {}
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if buffer.numel() > _span(buffer) or buffer.is_conj() or buffer.is_neg():
                copied = own_memory.setdefault(
                    id(buffer), buffer.detach().resolve_conj().resolve_neg().contiguous())
                self._set(name, copied)
        self.named = named_buffers(model)
        own = {id(tensor): name
               for name, tensor in [*named_parameters(model).items(), *self.named.items()]}
        exported = {plain(name): tensor for name, tensor
                    in torch.nn.Module.state_dict(model, keep_vars=True).items()}
        self.aliases = {name: own[id(tensor)] for name, tensor in exported.items()
                        if own.get(id(tensor), name) != name}
        """The other names that tied parameters and buffers have in `model.state_dict()`."""
        self.left_out = [name for name in own.values() if name not in exported]
        """What is not in it: buffers that are not persistent."""

    def begin(self) -> None:
        """Keep what a forward pass changes."""
        if self.named:
            self.before = {name: b.detach().clone() for name, b in self.named.items()}

    def forget(self) -> None:
        """Forget the step in flight."""
        self.before, self.left = {}, []

    def take_up(self, before: dict[str, torch.Tensor]) -> None:
        """Go on with a step in flight whose begin had these buffers."""
        self.before = before
        self.reset()

    def adopt(self) -> list[tuple[str, torch.Tensor]]:
        """Take the values of the buffers that the forward pass has replaced, and return them."""
        replaced = self._put_back_replaced()
        with torch.no_grad():
            for name, replacement in replaced:
                self.named[name].copy_(replacement)
        return replaced

    def reset(self) -> None:
        """Put the buffers of the step's begin back."""
        self._put_back_replaced()
        for name, before in self.before.items():
            if self.named[name].shape != before.shape:
                # A forward pass has resized it. That is an error, which is raised after this.
                self.named[name].resize_(before.shape)
            self.named[name].copy_(before)

    def _put_back_replaced(self) -> list[tuple[str, torch.Tensor]]:
        """Let the model have the kept buffers again; returns what a forward pass has put in their
        place, by name."""
        replaced = [(name, now)
                    for name, now in (self._model.named_buffers() if self.named else ())
                    if now is not self.named.get(plain(name), now)]
        for name, _ in replaced:
            self._set(name, self.named[plain(name)])
        return [(plain(name), now) for name, now in replaced]

    def _set(self, name: str, buffer: torch.Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        setattr(self._model.get_submodule(owner), leaf, buffer)

    def load(self, values: dict[str, torch.Tensor]) -> None:
        """Take over values."""
        with torch.no_grad():
            for name, tensor in values.items():
                self.named[name].copy_(tensor)


def _span(tensor: torch.Tensor) -> int:
    """Return how many elements lie between a tensor's first and last: fewer than it has if it is
    expanded."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))

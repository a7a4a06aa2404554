"""The parameters of a model: whether they are still those of the start, and their values.

model → here → checkpoint, newcomer → here → model

What always holds:
1. The set of parameters stays what it was at the start. Else no worker could join or resume.
"""

from __future__ import annotations

import torch

from elastic_trainer.state.names import named_parameters


class ModelParameters:
    """The parameters of one model, by their plain names."""

    def __init__(self, model: torch.nn.Module):
        self._model, self._modules = model, list(model.modules())
        self._at_start = list(model.parameters())
        self._outlined = self._outline()

    def _outline(self) -> list[int]:
        """Return numbers that change if the modules or parameters do. This takes a tenth of the
        time of `model.parameters()`."""
        return [id(part)
                for module in self._modules for parts in (module._parameters, module._modules)
                for part in parts.values()]

    def check(self) -> None:
        """Raise RuntimeError if the model has other parameters than at the start."""
        if self._outline() == self._outlined:
            return
        if [*map(id, self._model.parameters())] != [*map(id, self._at_start)]:
            own = {id(p) for p in self._at_start}
            new = [name for name, p in self.named().items() if id(p) not in own]
            raise RuntimeError(
                f"the model has other parameters than at the start "
                f"({', '.join(new[:8]) or 'some are gone or renamed'}), so no worker could join or "
                "resume. Build all before the training, and change values in place (copy_).")

    def named(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters, tied ones once."""
        return named_parameters(self._model)

    def trained(self) -> list[str]:
        """Return the names of those that require a gradient."""
        return [name for name, p in self.named().items() if p.requires_grad]

    def load(self, values: dict[str, torch.Tensor], trained: list[str] | None) -> None:
        """Take over values, and which of them require a gradient if that is given."""
        parameters, wanted = self.named(), set(self.trained() if trained is None else trained)
        with torch.no_grad():
            for name, tensor in values.items():
                parameters[name].copy_(tensor)
                if parameters[name].requires_grad != (name in wanted):
                    parameters[name].requires_grad_(name in wanted)

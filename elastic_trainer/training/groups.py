"""The parameters of a model in two groups, with and without weight decay.

model → here → groups for an optimizer

    optimizer = torch.optim.AdamW(decay_groups(model, weight_decay=0.1), lr=3e-4)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from elastic_trainer.config import ConfigError

Rule = Callable[[str, torch.nn.Parameter], bool]


def is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter has two dimensions or more: weights of layers and embeddings have,
    biases and the scales of normalizations have not."""
    return parameter.dim() >= 2


def decay_groups(model: torch.nn.Module, *, weight_decay: float,
                 rule: Rule = is_matrix) -> list[dict[str, Any]]:
    """Return groups of parameters for an optimizer: those that `rule(name, parameter)` chooses get
    this weight decay, and the others none.

    The default rule leaves biases and the parameters of normalizations out. The order is that of
    the model, so every worker and every resumed run has the same groups. A group without parameters
    is left out.

    Raises ConfigError.
    """
    if not weight_decay >= 0:
        raise ConfigError(f"weight_decay is {weight_decay}. Use 0 or more.")
    chosen: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        chosen[bool(rule(name, parameter))].append(parameter)
    return [{"params": parameters, "weight_decay": weight_decay if decays else 0.0}
            for decays, parameters in chosen.items() if parameters]

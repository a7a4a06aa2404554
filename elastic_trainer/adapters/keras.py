"""Models of Keras 3 with its torch backend, in the loop of a Trainer.

keras.Model → here: the statistics of its BatchNormalization become buffers → Trainer(buffers=…)

    model = keras.Sequential([...])
    trainer = Trainer(model, torch.optim.Adam(model.parameters()), dataset, ...,
                      buffers=statistics_of(model))
    for step in trainer:
        for images, labels in step:
            step.backward(loss(labels, model(images, training=True)))

A Keras model is a torch.nn.Module whose variables are all parameters, also those that a forward
pass changes. A parameter changes by the optimizer alone here, so a moving mean has to be a buffer.

What it does not do: other variables that a forward pass changes (the seed of `Dropout(seed=3)`).
The trainer refuses them by name. `Dropout` without a seed draws from torch's generator, which is
seeded for each micro-batch.

Source: keras 3.15, src/backend/torch/layer.py (_track_variables), src/backend/torch/core.py
(Variable), src/layers/normalization/batch_normalization.py.
"""

from __future__ import annotations

from typing import Any

import torch

from elastic_trainer.config import ConfigError

MOVING = ("moving_mean", "moving_variance")
"""The variables that a forward pass moves: those of BatchNormalization."""


def statistics_of(model: torch.nn.Module) -> dict[str, str]:
    """Let the moving statistics of a Keras model be buffers, and return the option `buffers`: a
    step moves them by the mean of what its micro-batches do.

    Call it after the model is built and before the optimizer is made. Raises ConfigError.
    """
    import keras

    if keras.backend.backend() != "torch":
        raise ConfigError(f"the backend of Keras is {keras.backend.backend()}. Set "
                          f"KERAS_BACKEND=torch in the environment, before keras is imported.")
    given: Any = model
    if not isinstance(given, keras.Model) or not given.built:
        raise ConfigError(f"statistics_of() got a {type(model).__name__}. Give a keras.Model that "
                          f"is built: model.build(shape), or with keras.layers.Input.")
    rules = {}
    for variable in given.non_trainable_variables:
        if variable.name in MOVING:
            variable._value = variable._value.detach().clone()
            name = variable.path.replace(".", "_")
            model.register_buffer(name, variable._value)
            rules[name] = "mean"
            for module in model.modules():
                kept = getattr(module, "_torch_params", None)
                if kept is not None and variable.path in kept:
                    del kept[variable.path]
    return rules

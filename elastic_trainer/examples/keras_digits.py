"""Train a model of Keras 3, with its torch backend, to read scikit-learn's handwritten digits.

    ./horovodrun_elastic.sh -- python -m elastic_trainer.examples.keras_digits

Read main() first. The model, its loss and its metric are Keras'; the optimizer is torch's. The
moving statistics of BatchNormalization are part of the state. Expected: a test accuracy of 0.97 or
better after 5 epochs.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import Tensor, nn

from elastic_trainer import ConfigError, Trainer
from elastic_trainer.adapters.keras import statistics_of
from elastic_trainer.examples.digits import digits


def main() -> None:
    options = parse_options()
    keras = import_keras()
    keras.utils.set_random_seed(options.seed)  # every worker builds the same weights
    model = digit_net(keras)
    training, test = digits()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    statistics = statistics_of(model)
    trainer = Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=options.learning_rate),
        training,
        global_batch=options.global_batch,
        microbatches=options.microbatches,
        until=f"{options.steps} steps" if options.steps else f"{options.epochs} epochs",
        seed=options.seed,
        buffers=statistics,
        checkpoint_every=options.checkpoint_every,
    )

    def measure(model: Any, batch: list[Tensor]) -> dict[str, Any]:
        images, labels = batch
        hits = keras.metrics.sparse_categorical_accuracy(labels, model(last(images)))
        return {"accuracy": (hits.sum(), len(hits))}  # summed over all workers

    for step in trainer:
        for images, labels in step:
            step.backward(loss_of(labels, model(last(images), training=True)))
        if step.every("1 epoch") or step.number + 1 == trainer.steps:
            found = trainer.evaluate(test, measure)
            if trainer.is_first:
                print(f"step {step.number + 1}: loss {step.loss:.3f}, test accuracy "
                      f"{found['accuracy']:.3f}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Keras model to read digits.")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training images")
    parser.add_argument("--steps", type=int, help="optimizer updates, instead of --epochs")
    parser.add_argument("--global-batch", type=int, default=64,
                        help="images per step, over all workers")
    parser.add_argument("--microbatches", type=int, default=8,
                        help="parts of the global batch: the largest number of workers")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0,
                        help="for the weights and the order of the samples")
    parser.add_argument("--checkpoint-every", default="auto",
                        help='steps (50), seconds ("30s"), "auto", "0.5%%" of the time, 0: last')
    return parser.parse_args()


def import_keras() -> Any:
    """Import keras with its torch backend. Raises ConfigError."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    try:  # here, because it takes seconds
        import keras
    except ImportError as error:
        raise ConfigError("the example keras_digits needs keras, which is not installed. Install "
                          "it: pip install keras.") from error
    return keras


def last(images: Tensor) -> Tensor:
    """Return images with their channels last, as Keras has them by default."""
    return images.movedim(1, -1)


def digit_net(keras: Any) -> nn.Module:
    """Build the net: images (batch, 8, 8, 1) to logits (batch, 10)."""
    layers = keras.layers
    net: nn.Module = keras.Sequential([
        layers.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", use_bias=False),
        layers.BatchNormalization(momentum=0.9), layers.ReLU(), layers.MaxPooling2D(),
        layers.Conv2D(64, 3, padding="same", use_bias=False),
        layers.BatchNormalization(momentum=0.9), layers.ReLU(), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dropout(0.2), layers.Dense(10)])
    return net


if __name__ == "__main__":
    main()

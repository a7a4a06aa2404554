"""Train a small convolutional net with BatchNorm to read scikit-learn's handwritten digits.

    ./horovodrun_elastic.sh -- python -m elastic_trainer.examples.digits

Read main() first. The running statistics of BatchNorm have to survive a change of the fleet, too.
Expected: a test accuracy of 0.97 or better, in about half a minute.

Source: the images are in scikit-learn, sklearn.datasets.load_digits: 1797 images of 8 x 8 pixels
with values from 0 to 16.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from elastic_trainer import cosine, train

TEST_EVERY = 5
"""Every fifth image is held out: the same split on every machine, without random numbers."""


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)  # every worker builds the same weights
    model = digit_net()
    training, test = digits()
    steps = options.steps or options.epochs * -(-len(training) // options.global_batch)
    result = train(
        model,
        torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9,
                        weight_decay=5e-4),
        training,
        loss=digit_loss,
        global_batch=options.global_batch,
        microbatches=options.microbatches,
        until=f"{options.steps} steps" if options.steps else f"{options.epochs} epochs",
        seed=options.seed,
        lr=cosine(warmup_steps=steps // 10, total_steps=steps),
        checkpoint_every=options.checkpoint_every,
    )
    if result.rank == 0:  # every worker holds the same model
        print(f"test accuracy {accuracy(result.model, test):.3f}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a convolutional net to read scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images")
    parser.add_argument("--steps", type=int, help="optimizer updates, instead of --epochs")
    parser.add_argument("--global-batch", type=int, default=64,
                        help="images per step, over all workers")
    parser.add_argument("--microbatches", type=int, default=8,
                        help="parts of the global batch: the largest number of workers")
    parser.add_argument("--learning-rate", type=float, default=0.1,
                        help="the highest one, after the warm-up")
    parser.add_argument("--seed", type=int, default=0,
                        help="for the weights and the order of the samples")
    parser.add_argument("--checkpoint-every", default="auto",
                        help='steps (50), seconds ("30s"), "auto", "0.5%%" of the time, 0: last')
    return parser.parse_args()


def digit_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def digit_net() -> nn.Module:
    """Build the net: images (batch, 1, 8, 8) to logits (batch, 10), 0.06 million parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        nn.MaxPool2d(2),
        *(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test images, pixels from 0 to 1, with their labels."""
    from sklearn.datasets import load_digits  # here, because it takes a second

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    targets = torch.tensor(labels, dtype=torch.int64)
    is_test = torch.arange(len(images)) % TEST_EVERY == 0
    training, test = (TensorDataset(images[part], targets[part]) for part in (~is_test, is_test))
    return training, test


def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Return the share of the images that the model reads correctly."""
    images, labels = dataset.tensors
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).float().mean())


if __name__ == "__main__":
    main()

"""What both arms of the recovery and join benchmarks train."""

import torch


def build(width: int = 2048) -> torch.nn.Module:
    """Return the MLP: 10.2 million parameters, 41 MB of gradient, at its full width."""
    return torch.nn.Sequential(torch.nn.Linear(256, width), torch.nn.ReLU(),
                               torch.nn.Linear(width, width), torch.nn.ReLU(),
                               torch.nn.Linear(width, width), torch.nn.ReLU(),
                               torch.nn.Linear(width, 640), torch.nn.ReLU(),
                               torch.nn.Linear(640, 10))


def samples() -> torch.utils.data.TensorDataset:
    """Return 4096 random points with classes."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(4096, 256, generator=generator)
    return torch.utils.data.TensorDataset(points, points[:, :10].argmax(1))


def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean cross entropy of a batch."""
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

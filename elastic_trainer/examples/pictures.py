"""The images of `examples/images.py`: a folder of them, CIFAR-10's files, or shapes that are drawn.

folder, files or numbers → here → (3, size, size) float tensors with their class

    load("")                        shapes in 10 classes, drawn here: nothing is read
    load("cifar-10-batches-bin")    CIFAR-10, binary version (www.cs.toronto.edu/~kriz/cifar.html)
    load("imagenette2")             folders train/CLASS/… and val/CLASS/… (needs pillow)

What always holds:
1. Sample i is the same on every machine. Only the augmentation draws random numbers: torch's, which
   the trainer seeds.
2. Classes are the names of the folders of `train`, in alphabetical order.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from elastic_trainer import ConfigError, ImageFolder

SHAPES = ("disc", "ring", "square", "frame", "diamond", "plus", "cross", "rows", "columns",
          "checks")
DRAWN, DRAWN_TEST = 8192, 1024
CIFAR = "data_batch_*.bin"
RECORD = 1 + 3 * 32 * 32
"""Bytes of an image of CIFAR-10: its class, then red, green and blue, row by row."""
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
"""Those of ImageNet: weights of other projects expect them."""

Sample = tuple[Tensor, int]


def load(place: str, size: int | None) -> tuple[Images, Images, int, int]:
    """Return training and test images, the number of classes, and the size. Raises ConfigError."""
    if not place:
        size = size or 32
        return Drawn(DRAWN, size, True), Drawn(DRAWN_TEST, size, False), len(SHAPES), size
    folder = Path(place)
    if list(folder.glob(CIFAR)):
        if size not in (None, 32):
            raise ConfigError(f"--size is {size}, but images of CIFAR-10 have 32 pixels. Leave it "
                              f"out.")
        return (Cifar(sorted(folder.glob(CIFAR)), True),
                Cifar([folder / "test_batch.bin"], False), 10, 32)
    if (folder / "batches.meta").exists():
        raise ConfigError(
            f"--data is {place!r}, which has CIFAR-10 as pickles, and a pickle can run code. Get "
            f"the binary version (cifar-10-binary.tar.gz), and name its folder "
            f"cifar-10-batches-bin.")
    if not (folder / "train").is_dir() or not (folder / "val").is_dir():
        raise ConfigError(
            f"--data is {place!r}, which has neither the folders train and val nor CIFAR-10's "
            f"files {CIFAR}. Name a folder with train/CLASS/… and val/CLASS/…, or the folder "
            f"cifar-10-batches-bin; or leave --data out.")
    size = size or 224
    training = ImageFolder(folder / "train", Cut(size, True))
    test = ImageFolder(folder / "val", Cut(size, False))
    if training.classes != test.classes:
        odd = sorted(set(training.classes) ^ set(test.classes))
        raise ConfigError(f"The classes {odd[:5]} of {place} are in one of train and val only. "
                          f"Give both the same folders.")
    return training, test, len(training.classes), size


class Drawn(Dataset[Sample]):
    """Shapes in 10 classes, of any place, size and colours, with noise. Image i is drawn when it is
    asked for. Training and test images are others."""

    def __init__(self, count: int, size: int, is_training: bool):
        self.count, self.size, self.is_training = count, size, is_training

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if not -self.count <= index < self.count:
            raise IndexError(index)
        numbers = numpy.random.default_rng([int(self.is_training), index % self.count])
        label = index % len(SHAPES)
        image = torch.from_numpy(drawn(SHAPES[label], self.size, numbers))
        return normal(shifted(image) if self.is_training else image), label


def drawn(shape: str, size: int, numbers: numpy.random.Generator) -> numpy.ndarray[Any, Any]:
    """Draw a shape: (3, size, size), from 0 to 1."""
    radius = numbers.uniform(0.2, 0.35) * size
    middle = numbers.uniform(radius, size - radius, 2)
    y, x = numpy.mgrid[:size, :size] + 0.5
    y, x = (y - middle[0]) / radius, (x - middle[1]) / radius
    far, widest = numpy.hypot(x, y), numpy.maximum(abs(x), abs(y))
    is_in = {
        "disc": far < 1, "ring": (far < 1) & (far > 0.6),
        "square": widest < 0.85, "frame": (widest < 0.85) & (widest > 0.5),
        "diamond": abs(x) + abs(y) < 1.1,
        "plus": (widest < 1) & (numpy.minimum(abs(x), abs(y)) < 0.3),
        "cross": (widest < 0.9) & (abs(abs(x) - abs(y)) < 0.35),
        "rows": (widest < 0.9) & (numpy.sin(8 * y) > 0),
        "columns": (widest < 0.9) & (numpy.sin(8 * x) > 0),
        "checks": (widest < 0.9) & (numpy.sin(6 * x) * numpy.sin(6 * y) > 0),
    }[shape]
    back, front = numbers.uniform(0.0, 0.45, 3), numbers.uniform(0.55, 1.0, 3)
    if numbers.uniform() < 0.5:
        back, front = front, back
    image = numpy.where(is_in, front[:, None, None], back[:, None, None])
    image += numbers.normal(0.0, 0.05, image.shape)
    return image.clip(0.0, 1.0).astype(numpy.float32)


class Cifar(Dataset[Sample]):
    """Images of CIFAR-10's binary files, which are mapped and not read."""

    def __init__(self, files: list[Path], is_training: bool):
        self.is_training = is_training
        for file in files:
            if not file.is_file() or file.stat().st_size % RECORD:
                raise ConfigError(f"{file} is missing or not whole. Unpack "
                                  f"cifar-10-binary.tar.gz again.")
        self.parts = [numpy.memmap(file, numpy.uint8, "r").reshape(-1, RECORD) for file in files]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> Sample:
        for part in self.parts:
            if index < len(part):
                record = torch.from_numpy(numpy.array(part[index]))
                image = record[1:].view(3, 32, 32).float() / 255
                return normal(shifted(image) if self.is_training else image), int(record[0])
            index -= len(part)
        raise IndexError(index)


class Cut:
    """Makes a tensor of an image of Pillow: of a random part of it, or of its middle."""

    def __init__(self, size: int, is_training: bool):
        self.size, self.is_training = size, is_training

    def __call__(self, image: Any) -> Tensor:
        box = some_box(*image.size) if self.is_training else middle_box(*image.size)
        bilinear = 2  # PIL.Image.Resampling.BILINEAR
        image = image.resize((self.size, self.size), bilinear, box)
        pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 255
        return normal(mirrored(pixels) if self.is_training else pixels)


Images = Drawn | Cifar | ImageFolder

# --- augmentation -----------------------------------------------------------------------------

def shifted(image: Tensor) -> Tensor:
    """Shift by at most an eighth of the size, and mirror every second image."""
    size = image.shape[1]
    most = size // 8
    top, left = torch.randint(0, 2 * most + 1, (2,)).tolist()
    return mirrored(pad(image, [most] * 4)[:, top : top + size, left : left + size])


def mirrored(image: Tensor) -> Tensor:
    """Mirror every second image."""
    return image.flip(2) if torch.rand(()) < 0.5 else image


def some_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Return a random part of an image: 8 to 100 % of its area, ratio 3/4 to 4/3 (as torchvision's
    RandomResizedCrop, but cut to the image where it would not fit)."""
    share, ratio, x, y = torch.rand(4).tolist()
    area = width * height * (0.08 + 0.92 * share)
    ratio = math.exp(math.log(3 / 4) + ratio * math.log(16 / 9))
    wide = min(width, math.sqrt(area * ratio))
    high = min(height, math.sqrt(area / ratio))
    left, top = x * (width - wide), y * (height - high)
    return left, top, left + wide, top + high


def middle_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Return the square in the middle, 7/8 of the shorter side."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def normal(image: Tensor) -> Tensor:
    """Scale the colours."""
    return (image - MEAN) / DEVIATION

"""ResNet-18 and ResNet-50, for `examples/images.py`, with the names of torchvision's parameters.

images (batch, 3, height, width) → here → logits (batch, classes)

What always holds: a state_dict of torchvision's `resnet18` or `resnet50` fits a model with
`stem="imagenet"`, and the other way round.

What it does not do: other depths, groups or dilation.

Source: He et al., 2015, "Deep Residual Learning for Image Recognition", with the stride of a
bottleneck in its 3 x 3 convolution (ResNet v1.5). The stem for small images is that of section 4.2.
"""

from __future__ import annotations

from torch import Tensor, nn


class Basic(nn.Module):
    """Two 3 x 3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        known = x if self.downsample is None else self.downsample(x)
        added: Tensor = self.relu(out + known)
        return added


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two of 1 x 1."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        known = x if self.downsample is None else self.downsample(x)
        added: Tensor = self.relu(out + known)
        return added


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    """Return what brings a block's input to the shape of its output; None: nothing is needed."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                         nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Four stages of blocks. `width` is the number of channels of the first one."""

    def __init__(self, block: type[Basic | Bottleneck], depths: tuple[int, int, int, int],
                 classes: int, *, stem: str = "imagenet", width: int = 64):
        super().__init__()
        self.inputs = width
        small = stem == "cifar"  # images of about 32 pixels: the resolution is kept
        self.conv1 = (nn.Conv2d(3, width, 3, padding=1, bias=False) if small else
                      nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False))
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._stage(block, width, depths[0], stride=1)
        self.layer2 = self._stage(block, 2 * width, depths[1], stride=2)
        self.layer3 = self._stage(block, 4 * width, depths[2], stride=2)
        self.layer4 = self._stage(block, 8 * width, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width * block.expansion, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _stage(self, block: type[Basic | Bottleneck], width: int, depth: int,
               stride: int) -> nn.Sequential:
        blocks: list[nn.Module] = []
        for number in range(depth):
            blocks.append(block(self.inputs, width, stride if number == 0 else 1))
            self.inputs = width * block.expansion
        return nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def resnet18(classes: int, *, stem: str = "imagenet", width: int = 64) -> ResNet:
    """Build the net of 18 layers: 11.7 million parameters with 1000 classes."""
    return ResNet(Basic, (2, 2, 2, 2), classes, stem=stem, width=width)


def resnet50(classes: int, *, stem: str = "imagenet", width: int = 64) -> ResNet:
    """Build the net of 50 layers: 25.6 million parameters with 1000 classes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, stem=stem, width=width)

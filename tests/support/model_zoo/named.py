"""The models that everybody knows by name: small ones of torch's own style, and families of `transformers`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["FAMILIES", "DenseNet", "ResNet"]

FAMILIES = ("resnet", "bert", "gpt2", "t5", "roberta")
"""Names in the registry of `transformers`."""


class DenseLayer(nn.Module):
    """Norm, ReLU and convolution twice, over everything before (Huang et al., Densely Connected Networks, 2017)."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(4 * growth)
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(functional.relu(self.norm1(torch.cat(features, 1))))
        x = self.conv2(functional.relu(self.norm2(x)))
        return functional.dropout(x, p=0.1, training=self.training)


class DenseBlock(nn.ModuleDict):
    """Layers that each see all the outputs before them."""

    def __init__(self, layers: int, channels: int, growth: int) -> None:
        super().__init__({f"layer{i}": DenseLayer(channels + i * growth, growth) for i in range(layers)})

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """Classify images of 3 channels: a stem, two dense blocks with a transition between, a head."""

    def __init__(self, growth: int = 8, classes: int = 10) -> None:
        super().__init__()
        half = (16 + 3 * growth) // 2
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.block1 = DenseBlock(3, 16, growth)
        self.transition = nn.Sequential(
            nn.BatchNorm2d(2 * half), nn.ReLU(), nn.Conv2d(2 * half, half, 1), nn.AvgPool2d(2)
        )
        self.block2 = DenseBlock(3, half, growth)
        self.norm = nn.BatchNorm2d(half + 3 * growth)
        self.classifier = nn.Linear(half + 3 * growth, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block2(self.transition(self.block1(self.stem(x))))
        x = functional.adaptive_avg_pool2d(functional.relu(self.norm(x)), 1)
        return self.classifier(torch.flatten(x, 1))


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut (He et al., Deep Residual Learning, 2016)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample: nn.Module | None = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Classify images of 3 channels: a stem, three stages of two blocks, a head."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.stages = nn.Sequential(*(nn.Sequential(BasicBlock(i, o, s), BasicBlock(o, o, 1)) for i, o, s in sizes))
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))

"""Small models whose activations are worth computing again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a feed-forward part, both with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        scores = self.query(y) @ self.key(y).transpose(1, 2) / 4
        x = x + self.dropout(torch.softmax(scores, -1) @ self.value(y))
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.after(x)))))


class Transformer(nn.Module):
    def __init__(self, blocks: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(blocks))
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(nn.Module):
    """Two convolutions with batch norm and an activation that works in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm, self.after = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.after(self.second(self.act(self.norm(self.first(x)))))
        return self.act(x + y)


def residual() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), Residual(8), Residual(8), Residual(8), nn.AdaptiveAvgPool2d(1))


class UNet(nn.Module):
    """Two levels down and up again, with skip connections."""

    def __init__(self) -> None:
        super().__init__()

        def part(given: int, made: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU())

        self.down, self.below, self.bottom = part(2, 4), part(4, 8), part(8, 8)
        self.up, self.above = part(16, 8), part(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        low = self.below(F.max_pool2d(high, 2))
        y = self.bottom(F.max_pool2d(low, 2))
        y = self.up(torch.cat([F.interpolate(y, scale_factor=2.0), low], 1))
        return self.above(torch.cat([F.interpolate(y, scale_factor=2.0), high], 1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (Transformer, (4, 8, 16)),
    "residual": (residual, (4, 2, 12, 12)),
    "unet": (UNet, (2, 2, 16, 16)),
}


@pytest.fixture(params=MODELS)
def made(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    """Return a model in training, and an input."""
    return model_of(request.param)


@pytest.fixture
def transformer() -> tuple[nn.Module, Tensor]:
    return model_of("transformer")


@pytest.fixture
def deep_transformer() -> Callable[[int], nn.Module]:
    """Return what makes a transformer of four blocks, with so many classes."""
    return lambda classes: Transformer(4, classes).train()


@pytest.fixture
def residual_network() -> tuple[nn.Module, Tensor]:
    return model_of("residual")


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().train(), torch.randn(shape)

"""Models of a few layers that several files test with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Stack(nn.Module):
    """Blocks that run one after another."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Ensemble(nn.Module):
    """Heads that read the output of one layer."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return torch.stack([head(x) for head in self.heads])


class Twins(nn.Module):
    """Members that differ in a setting of one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU()) for _ in range(3))
        self.members[2][1] = nn.LeakyReLU(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([member(x) for member in self.members])


class HeadsAndOne(nn.Module):
    """Heads, of which the first is called once more."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1) + self.heads[0](x).sum()

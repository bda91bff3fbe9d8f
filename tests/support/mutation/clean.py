"""Models with something to fold, to share or to remove."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Normed(nn.Module):
    """Layers with a batch norm behind each, and statistics that are not the initial ones."""

    def __init__(self, *pairs: tuple[nn.Module, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer for layer, _ in pairs)
        self.norms = nn.ModuleList(norm for _, norm in pairs)
        with torch.no_grad():
            for norm in self.norms:
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2.0)
                if norm.affine:
                    norm.weight.uniform_(0.5, 2.0)
                    norm.bias.normal_()

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return x


class Residual(nn.Module):
    """A block with two normed convolutions and a normed shortcut, and a convolution that two norms read."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Normed((nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)))
        self.short, self.short_norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.shared = nn.Conv2d(4, 4, 1)
        self.one, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        with torch.no_grad():
            self.one.running_mean.normal_()
            self.other.running_var.uniform_(0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x) + self.short_norm(self.short(x))
        return self.one(self.shared(y)) - self.other(self.shared(y)).tanh()


class Dead(nn.Module):
    """Computations that nobody reads, among them some that must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        dead = torch.relu(self.unused(x))
        _ = dead + 1, dead.mean(0)
        self.norm(x)
        self.calls.add_(1)
        y = self.used(x)
        y.mul_(2.0)
        view = y[:, 1:]
        view.add_(0.5)
        return y


class DeadDraws(nn.Module):
    """A dropout that nobody reads: it moves the random stream."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        self.dropout(x)
        unused = x.exp().sum()
        del unused
        return self.dropout(self.linear(x))


class Repeated(nn.Module):
    """Equal expressions, nearly equal ones, and equal results that the caller gets twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a, b = torch.relu(self.linear(x)), torch.relu(self.linear(x))
        c = torch.softmax(a, dim=0) + torch.softmax(b, dim=1) - torch.softmax(a, dim=1)
        d = F.leaky_relu(x - self.shift, 0.1) * F.leaky_relu(x - self.shift, 0.2)
        e, f = (x - 1).exp(), (x - 1).exp()
        g = torch.where(x > 1, x * 1, x * 1.5) + torch.full((4,), 2.0) - torch.full((4,), 3.0)
        return a + b, c, d / (1 + x * x), e, f, g, a.sum(-1) - b.mean(-1)


class RepeatedWrites(nn.Module):
    """Equal expressions around a write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        first = y.sum(-1)
        y.add_(1)
        return first * y.sum(-1) - y.sum(-1)


class TwoDraws(nn.Module):
    """Two equal dropouts, which draw two masks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.cat([self.dropout(y), self.dropout(y), y.sin() + y.sin()], -1)


class Constants(nn.Module):
    """Constants of every kind: masks, tables, chains, one written to, one handed out, one of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("offset", torch.randn(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = torch.arange(8) < 4
        table = torch.cos(torch.arange(8) / 3.0).unsqueeze(0) * 2
        counter = torch.zeros(8)
        counter += torch.arange(8) * 0.25
        handed = torch.linspace(0.0, 1.0, 8) + 1
        y = torch.where(mask, self.linear(x), x) + table - torch.full((8,), 0.5)
        return y * (self.scale * 2 + 1) + counter, handed, x - (self.offset * torch.ones(8)).tanh()


class Causal(nn.Module):
    """Attention with a mask of minus infinities made anew at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.full((5, 5), float("-inf"), dtype=x.dtype), 1)
        scores = self.query(x) @ self.key(x).mT / 8**0.5 + mask
        return scores.softmax(-1) @ self.value(x)

"""Small models of many kinds, each with an input."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 1e-6


class Ensemble(nn.Module):
    """Members in a list, their outputs concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


class WeightedEnsemble(nn.Module):
    """Members weighted by a softmax over the members."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.logits = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        stacked = torch.stack([head(x) for head in self.heads])
        weights = torch.softmax(self.logits, 0)
        return (weights[:, None, None] * stacked).sum(0)


class Attention(nn.Module):
    """One head of attention, and a residual connection around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, eps=EPSILON)
        self.query, self.key, self.value = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        scores = torch.matmul(self.query(y), self.key(y).transpose(-2, -1)) / 6**0.5
        return x + torch.matmul(torch.softmax(scores, dim=-1), self.value(y))


class Convolutional(nn.Module):
    """Convolutions with batch norms; the mean over space goes into a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, eps=EPSILON)
        self.second, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, eps=EPSILON)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        z = y + self.other(self.second(y))
        return self.last(z.mean(dim=(2, 3)))


class Root(nn.Module):
    """A residual block with root mean square norms."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(6, eps=EPSILON), nn.RMSNorm(6, eps=EPSILON)
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        return self.after(x + self.down(F.silu(self.gate(y)) * self.up(y)))


class Standardize(nn.Module):
    """Subtract running means and divide by running deviations, kept by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scale", torch.ones(6))
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=0)
        self.mean.mul_(0.9).add_(0.1 * mean.detach())
        self.scale.mul_(0.9).add_(0.1 * (x - mean).exp().mean(dim=0).detach())
        return self.linear((x - self.mean) / (self.scale + 0.1))


class Variational(nn.Module):
    """The two terms of a variational bound."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(6, 4), nn.Linear(6, 4)
        self.decode = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, spread = self.mean(x), self.spread(x)
        divergence = (mean * mean + spread.exp() - spread - 1).sum(dim=-1) / 2
        error = F.softplus(x - self.decode(mean)).square().sum(dim=-1)
        return {"bound": error + divergence, "mean": mean}


class Experts(nn.Module):
    """Every expert on every token, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (weights.unsqueeze(-1) * outputs).sum(dim=1)


class Distances(nn.Module):
    """Kernel values between points and learned centres."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(5, 6))
        self.width = nn.Parameter(torch.ones(5))
        self.mix = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        squares = F.softplus(x[:, None] - self.centres).square().sum(dim=-1)
        kernel = torch.exp(-squares / (self.width * self.width + 1))
        return self.mix(kernel / kernel.sum(dim=-1, keepdim=True))


class Embedded(nn.Module):
    """Token and position embeddings, averaged, in two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 6), nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6, eps=EPSILON)
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.tokens(ids) + self.positions.weight)
        pooled = x.mean(dim=1)
        return self.left(pooled) - self.right(pooled), torch.tanh(x).sum(dim=1)


class Mixing(nn.Module):
    """Square matrices multiplied in an order that matters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 6) / 3), nn.Parameter(torch.randn(6, 6) / 3)
        self.norm = nn.LayerNorm(6, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.matmul(torch.matmul(self.a, self.b), x)
        return self.norm(mixed - x) / (1 + mixed.abs())


class Network(nn.Module):
    """A plain network, its blocks user-written and residual."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(6, eps=EPSILON), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.gelu(self.linear(self.norm(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Network.Block() for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(6, eps=EPSILON), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


ROWS = [
    Ensemble, WeightedEnsemble, Root, Standardize, Variational, Experts, Distances, Network,
]  # fmt: skip
MODELS: dict[type[nn.Module], Callable[[], Tensor]] = {
    **dict.fromkeys(ROWS, lambda: torch.randn(8, 6)),
    Attention: lambda: torch.randn(2, 6, 6),
    Convolutional: lambda: torch.randn(4, 2, 5, 5),
    Embedded: lambda: torch.randint(0, 11, (3, 7)),
    Mixing: lambda: torch.randn(6, 6),
}

"""Models with members to fuse, small enough to be optimized hundreds of times."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Member = Callable[[], nn.Module]
COUNT = 3


class Heads(nn.Module):
    """Members that share their input, joined in one of several ways."""

    def __init__(self, member: Member, join: str = "stack", count: int = COUNT) -> None:
        super().__init__()
        self.heads = nn.ModuleList(member() for _ in range(count))
        self.join = join

    def forward(self, x: Tensor) -> Tensor | list[Tensor] | dict[str, Tensor]:
        outputs = [head(x) for head in self.heads]
        if self.join == "stack":
            return torch.stack(outputs, 1)
        if self.join == "cat":
            return torch.cat(outputs, -1)
        if self.join == "sum":
            return sum(outputs) / len(outputs)
        return {"joint": torch.stack(outputs), "last": outputs[-1]} if self.join == "dict" else outputs


class Separate(nn.Module):
    """Members that each read a slice of their own; the first also reads what the last gave."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self.heads = nn.ModuleList(member() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x[:, i]) for i, head in enumerate(self.heads)])


class Weighted(nn.Module):
    """Members weighted by a gate, one of them scaled by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, COUNT)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)) for _ in range(COUNT))
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        outputs = torch.stack([head(x) * s - x for head, s in zip(self.heads, self.scales, strict=True)], -2)
        return (weights.unsqueeze(-1) * outputs).sum(-2)


class First(nn.Module):
    """The first result of a layer that gives several."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0] if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)[0]


class Attention(nn.Module):
    """Pre-norm attention with two heads and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, 2, 4).transpose(1, 2) for z in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, 8))


class Pooled(nn.Module):
    """A convolution whose result is pooled, joined with itself, moved about and averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.avg_pool2d(torch.relu(self.conv(x)), 2)
        return self.out(torch.cat([y, y.square()], 1).flatten(2).permute(0, 2, 1).softmax(-1).mean(1)[:, :4])


class Pieces(nn.Module):
    """Splitting, narrowing, squeezing, cumulative sums and sizes read as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.linear(x) - self.shift).unflatten(-1, (2, 3))
        a, b = y.split(1, 1)
        z = a.squeeze(1).cumsum(-1) - b.squeeze(1).amax(-1, keepdim=True) / y.size(-1)
        return torch.stack([z, z.narrow(-1, 0, 3).sigmoid()], -1).transpose(1, 2)


class Unequal(nn.Module):
    """Two kinds of members in turn, on equal first layers."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 4, 3, 4)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, s)) for s in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


class TwoHeads(nn.Module):
    """Policy and value: two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.policy = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
        self.value = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.body(x))
        return self.policy(x), self.value(x)


class Branches(nn.Module):
    """Equal branches that nobody put into a list."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        self.bn_left, self.bn_right = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.bn_left(self.left(x)).relu(), self.bn_right(self.right(x)).relu()], 1)


class Projections(nn.Module):
    """Query, key and value of one attention layer, inside a larger model."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return torch.softmax(q @ k.transpose(2, 3), -1) @ v


class Twice(nn.Module):
    """Members called twice, with statistics that depend on the order."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)) for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x).sin() + head(3 + x * x) for head in self.heads])


class Places(nn.Module):
    """Weights picked from one parameter, then separate ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COUNT, 4, 4))
        self.layers = nn.ModuleList(nn.Linear(4, 2) for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layers[i](F.linear(x, self.weight[i])) for i in range(COUNT)])


class Written(nn.Module):
    """Members with memory written in place between them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        state = x * 1.0
        outputs: list[Tensor] = []
        for head in self.heads:
            outputs.append(head(state.clone()))
            state.mul_(0.5).add_(1.0)
        return torch.stack(outputs, -1)


class WrittenResult(nn.Module):
    """Members of which one result is written into afterwards, while another reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(COUNT))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = [head(x) for head in self.heads]
        joint = torch.stack(outputs)
        outputs[1].mul_(2.0)
        return joint, outputs[0] + outputs[1] * outputs[2]


class Frozen(nn.Module):
    """Members of which one is not trained, or which share a parameter."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(COUNT))
        if tied:
            self.heads[2][2].weight = self.heads[0][2].weight
        else:
            self.heads[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


class PartlyRead(nn.Module):
    """Members of which one is also read elsewhere, through its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(COUNT))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.stack([head(x) for head in self.heads])
        return y, F.linear(y[0], self.heads[0].weight.t())


def sequential(*layers: Member) -> Member:
    """Return a factory of sequences of these layers."""
    return lambda: nn.Sequential(*(layer() for layer in layers))

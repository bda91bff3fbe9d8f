"""Layers one after another: linear ones, convolutions, norms and recurrent ones, as small networks."""

from __future__ import annotations

from functools import partial
from random import Random

import torch
import torch.nn.functional as F
from norms import shaken
from support.samples import Maker, Sample, images, rows
from torch import Tensor, nn

WIDTH = 8


class Residual(nn.Module):
    """A feed-forward block as in a transformer."""

    def __init__(self, activation: str = "gelu") -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(getattr(F, self.activation)(self.up(self.norm(x))))


class Gated(nn.Module):
    """A gated feed-forward block, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 12, bias=False), nn.Linear(WIDTH, 12, bias=False)
        self.down = nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Written(nn.Module):
    """Functions on parameters that the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH))
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(F.linear(x, self.weight, self.bias))
        return {"hidden": hidden, "out": self.out(hidden)}


class Angles(nn.Module):
    """Turns its input by angles that pass no gradient on, as rotary embeddings do; gives both in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            angles = self.into(x).tanh() * 3
            sin = angles.sin()
        return [x * angles.cos(), x.flip(-1) * sin]


class Stopped(nn.Module):
    """Angles, dropout, and a check of numbers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.angles, self.out = Angles(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.angles(x)
        y = self.out(F.dropout(cos + sin, 0.1, self.training))
        return y if bool(torch.isfinite(y).all()) else torch.nan_to_num(y)


class Recurrent(nn.Module):
    """An LSTM over a sequence and a head on its last step."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, 5, batch_first=True, bidirectional=both)
        self.head = nn.Linear(10 if both else 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Tied(nn.Module):
    """One layer that is called twice, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH, bias=False)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.shared.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.out(torch.tanh(self.into(self.shared(torch.relu(self.shared(x)))))))


def mlp(activation: type[nn.Module], depth: int, bias: bool) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(depth):
        parts += [nn.Linear(WIDTH, WIDTH, bias=bias), activation()]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 4))


def blocks(count: int) -> nn.Module:
    return nn.Sequential(*[Residual() for _ in range(count)], nn.Sequential(Gated(), nn.LayerNorm(WIDTH)))


class Convolutions(nn.Module):
    """Convolutions with norms in some order, a residual, pooling and a head."""

    def __init__(self, order: str, groups: int, bias: bool) -> None:
        super().__init__()
        self.order = order
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=bias), nn.BatchNorm2d(4)
        self.second, self.after = nn.Conv2d(4, 4, 3, padding=1, groups=groups, bias=bias), nn.BatchNorm2d(4)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "norm last":
            x = self.after(self.second(torch.relu(self.norm(self.first(x)))))
        elif self.order == "residual":
            x = F.relu(self.norm(self.first(x)))
            x = F.relu(x + self.after(self.second(x)))
        elif self.order == "norm first":
            x = self.second(F.silu(self.norm(self.first(x))))
        else:
            x = F.leaky_relu(self.first(x))
            x = F.max_pool2d(self.second(x), 2)
        return self.head(self.pool(x).flatten(1))


def normed(kind: str, bias: bool) -> nn.Module:
    """Return layers of a kind, each with its batch norm, whose statistics are its own."""
    made: dict[str, list[nn.Module]] = {
        "linear": [nn.Linear(WIDTH, 6, bias=bias), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4), nn.BatchNorm1d(4)],
        "one": [nn.Conv1d(3, 4, 3, bias=bias), nn.BatchNorm1d(4), nn.Tanh()],
        "two": [nn.Conv2d(3, 4, 3, bias=bias), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)],
        "three": [nn.Conv3d(3, 4, 2, bias=bias), nn.BatchNorm3d(4)],
        "transposed": [nn.ConvTranspose2d(3, 4, 2, bias=bias), nn.BatchNorm2d(4), nn.GELU()],
        "before": [nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, bias=bias), nn.ReLU()],
        "plain": [nn.Conv2d(3, 4, 3, bias=bias), nn.BatchNorm2d(4, affine=False), nn.ReLU()],
    }
    return shaken(nn.Sequential(*made[kind]))


NORMED = {"linear": rows(WIDTH), "one": images(3, 6, 1), "three": images(3, 4, 3)}
"""Inputs of `normed` that are not images."""


def norms(random: Random) -> Sample:
    """Return layers with batch norms, in evaluation."""
    bias = random.random() < 0.5
    if random.random() < 0.4:
        order = random.choice(["norm last", "residual", "norm first"])
        build = partial(_shaken_convolutions, order, random.choice([1, 2, 4]), bias)
        return Sample("fold_batchnorm", f"convolutions, {order}", build, images(3), training=False)
    kind = random.choice(["linear", "one", "two", "three", "transposed", "plain"])
    make = NORMED.get(kind, images(3))
    return Sample("fold_batchnorm", f"{kind}, {bias=}", partial(normed, kind, bias), make, training=False)


def _shaken_convolutions(order: str, groups: int, bias: bool) -> nn.Module:
    return shaken(Convolutions(order, groups, bias))


def network(random: Random, kinds: str) -> tuple[str, partial[nn.Module], Maker]:
    """Return the name of a small network among some kinds, what builds it, and its inputs."""
    kind = random.choice(kinds.split())
    bias = random.random() < 0.7
    if kind == "mlp":
        activation = random.choice([nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh])
        depth = random.randint(1, 3)
        return f"mlp, {activation.__name__}, {depth}", partial(mlp, activation, depth, bias), rows(WIDTH)
    if kind == "blocks":
        return "blocks", partial(blocks, random.randint(1, 3)), rows(WIDTH, 3) if bias else rows(WIDTH)
    if kind == "convolutions":
        order = random.choice(["norm last", "residual", "norm first", "none"])
        return f"convolutions, {order}", partial(_shaken_convolutions, order, random.choice([1, 2]), bias), images(3)
    if kind == "recurrent":
        return f"recurrent, both={bias}", partial(Recurrent, bias), rows(WIDTH, 4)
    simple = {"gated": Gated, "written": Written, "tied": Tied, "stopped": Stopped}[kind]
    return kind, partial(simple), rows(WIDTH)

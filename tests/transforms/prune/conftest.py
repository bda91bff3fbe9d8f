"""Small models with their coupled groups written down by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt.transforms.prune.dependency_groups import Attribute, Coupling, Cut, Group, Norm, Number, Refused


def units(size: int, repeated: int = 1) -> tuple[int, ...]:
    return tuple(unit for unit in range(size) for _ in range(repeated))


def batch_norm(name: str, size: int) -> list[Cut]:
    return [Cut(f"{name}.{last}", 0, units(size)) for last in ("weight", "bias", "running_mean", "running_var")]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(self.drop(F.relu(self.bn1(self.conv1(x)))))))


class Residual(nn.Module):
    """A convolution, a residual block, and a linear layer whose view has a size written in the code."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.block = Block(width)
        self.head = nn.Linear(width * 4, 5)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if scale != 1.0:
            x = x * scale
        pooled = F.adaptive_avg_pool2d(self.block(self.stem(x)), 2)
        return self.head(pooled.view(pooled.shape[0], 32))


def residual_groups(stem: int = 8, inner: int = 8) -> tuple[Group, ...]:
    outer = Group(
        "stem", "channels", stem,
        cuts=(
            Cut("stem.weight", 0, units(stem)), Cut("stem.bias", 0, units(stem)),
            Cut("block.conv1.weight", 1, units(stem)), Cut("block.conv2.weight", 0, units(stem)),
            Cut("block.conv2.bias", 0, units(stem)), *batch_norm("block.bn2", stem),
            Cut("head.weight", 1, units(stem, 4)),
        ),
        numbers=(Number("", 0, "view", (0, 2), units(stem, 4)),),
        attributes=(
            Attribute("stem", "out_channels", None, units(stem)),
            Attribute("block.conv1", "in_channels", None, units(stem)),
            Attribute("block.conv2", "out_channels", None, units(stem)),
            Attribute("block.bn2", "num_features", None, units(stem)),
            Attribute("head", "in_features", None, units(stem, 4)),
        ),
        hard_coded=(("", "models.py:40"),),
    )  # fmt: skip
    between = Group(
        "block.conv1", "channels", inner,
        cuts=(
            Cut("block.conv1.weight", 0, units(inner)), *batch_norm("block.bn1", inner),
            Cut("block.conv2.weight", 1, units(inner)),
        ),
        attributes=(
            Attribute("block.conv1", "out_channels", None, units(inner)),
            Attribute("block.bn1", "num_features", None, units(inner)),
            Attribute("block.conv2", "in_channels", None, units(inner)),
        ),
    )  # fmt: skip
    return outer, between


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(x).chunk(3, -1)
        q = parts[0].view(rows, length, self.heads, -1).transpose(1, 2)
        k = parts[1].view(rows, length, self.heads, -1).transpose(1, 2)
        v = parts[2].view(rows, length, self.heads, -1).transpose(1, 2)
        weights = self.drop((q @ k.transpose(-1, -2)).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).reshape(rows, length, -1))


class Decoder(nn.Module):
    """Tied embeddings, both kinds of norms, attention, and a gated pair."""

    def __init__(self, width: int = 16, heads: int = 4, hidden: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = RMSNorm(width)
        self.gate = nn.Linear(width, hidden)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return self.head(x + self.down(F.silu(self.gate(y)) * self.up(y)))


def decoder_groups() -> tuple[Group, ...]:
    w, three_heads = units(16), 3 * units(4, 4)
    stream = Group(
        "embed", "hidden", 16,
        cuts=(
            Cut("embed.weight", 1, w), Cut("norm1.weight", 0, w), Cut("norm1.bias", 0, w), Cut("norm2.weight", 0, w),
            Cut("attention.qkv.weight", 1, w), Cut("attention.out.weight", 0, w), Cut("attention.out.bias", 0, w),
            Cut("gate.weight", 1, w), Cut("up.weight", 1, w), Cut("down.weight", 0, w), Cut("down.bias", 0, w),
        ),
        attributes=(
            Attribute("embed", "embedding_dim", None, w), Attribute("norm1", "normalized_shape", 0, w),
            Attribute("attention.qkv", "in_features", None, w), Attribute("attention.out", "out_features", None, w),
            *(Attribute(name, "in_features", None, w) for name in ("gate", "up", "head")),
            Attribute("down", "out_features", None, w),
        ),
        norms=(
            Norm("norm1", "layer", w), Norm("norm2", "mean", w),
        ),
    )  # fmt: skip
    heads = Group(
        "attention.qkv", "heads", 4,
        cuts=(
            Cut("attention.qkv.weight", 0, three_heads), Cut("attention.qkv.bias", 0, three_heads),
            Cut("attention.out.weight", 1, units(4, 4)),
        ),
        numbers=tuple(
            Number("attention", 0, node, (0, 3), units(4)) for node in ("view", "view_1", "view_2")
        ),
        attributes=(
            Attribute("attention", "heads", None, units(4)),
            Attribute("attention.qkv", "out_features", None, three_heads),
            Attribute("attention.out", "in_features", None, units(4, 4)),
        ),
    )  # fmt: skip
    gated = Group(
        "gate", "hidden", 12,
        cuts=(
            *(Cut(f"{name}.{last}", 0, units(12)) for name in ("gate", "up") for last in ("weight", "bias")),
            Cut("down.weight", 1, units(12)),
        ),
        attributes=(
            *(Attribute(name, "out_features", None, units(12)) for name in ("gate", "up")),
            Attribute("down", "in_features", None, units(12)),
        ),
    )  # fmt: skip
    return stream, heads, gated


@dataclass
class Case:
    """A model with random norms, its example input, and its groups."""

    build: Callable[[], nn.Module]
    x: Tensor
    groups: tuple[Group, ...]
    patch: pytest.MonkeyPatch

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.build()
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm, RMSNorm)):
                for tensor in (*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())):
                    tensor.data.uniform_(0.5, 1.5)
        return model

    def couple(self, *groups: Group, refused: tuple[Refused, ...] = ()) -> None:
        """Let the analysis find these groups."""

        def coupling(_: Any) -> Coupling:
            return Coupling(groups, refused)

        self.patch.setattr("fxopt.transforms.prune.find.coupling", coupling)


@pytest.fixture
def residual(monkeypatch: pytest.MonkeyPatch) -> Case:
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    case = Case(Residual, x, residual_groups(), monkeypatch)
    case.couple(*case.groups)
    return case


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Case:
    ids = torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(1))
    case = Case(Decoder, ids, decoder_groups(), monkeypatch)
    case.couple(*case.groups)
    return case


@pytest.fixture(params=["residual", "decoder"])
def case(request: pytest.FixtureRequest) -> Case:
    return request.getfixturevalue(request.param)


@pytest.fixture
def residual_with() -> Callable[[int, int], tuple[Group, ...]]:
    """Return the groups of the residual model where it has so many units left."""
    return residual_groups

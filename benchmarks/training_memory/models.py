"""Six models, made from configurations, with the blocks that one would checkpoint by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "Subject"]


@dataclass(frozen=True)
class Subject:
    """A model in training, an input, and the names of its blocks in order."""

    make: Callable[[], nn.Module]
    example: Callable[[], Tensor]
    blocks: Callable[[nn.Module], list[str]]


class Attention(nn.Module):
    """Causal attention of GPT-2."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out, self.dropout = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = (part.view(n, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).reshape(n, t, c)))


class GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, heads, dropout), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """GPT-2 as in its paper, of any size."""

    def __init__(self, blocks: int, width: int, heads: int, vocabulary: int, length: int, dropout: float) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width) / 50)
        self.h = nn.ModuleList(GPT2Block(width, heads, dropout) for _ in range(blocks))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Bottleneck(nn.Module):
    """Three convolutions with batch norm, and a shortcut."""

    def __init__(self, given: int, inner: int, stride: int) -> None:
        super().__init__()
        made = 4 * inner
        self.conv1, self.bn1 = nn.Conv2d(given, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, made, 1, bias=False), nn.BatchNorm2d(made)
        shortcut = nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))
        self.downsample = shortcut if stride != 1 or given != made else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class Basic(nn.Module):
    """Two convolutions with batch norm, and a shortcut."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made)
        self.conv2, self.bn2 = nn.Conv2d(made, made, 3, 1, 1, bias=False), nn.BatchNorm2d(made)
        shortcut = nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))
        self.downsample = shortcut if stride != 1 or given != made else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    """A residual network; depths 3, 4, 6, 3 of bottlenecks make ResNet-50, 2, 2, 2, 2 of basic blocks ResNet-18."""

    def __init__(
        self, depths: tuple[int, ...], width: int, classes: int, block: type[nn.Module] = Bottleneck, times: int = 4
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        given, stages = width, list[nn.Module]()
        for stage, depth in enumerate(depths):
            inner = width * 2**stage
            blocks = [
                block(given if n == 0 else times * inner, inner, 2 if stage and n == 0 else 1) for n in range(depth)
            ]
            stages.append(nn.Sequential(*blocks))
            given = times * inner
        self.stages, self.pool, self.fc = nn.Sequential(*stages), nn.AdaptiveAvgPool2d(1), nn.Linear(given, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.stages(self.stem(x))).flatten(1))


def convolutions(given: int, made: int) -> nn.Sequential:
    pairs = ((given, made), (made, made))
    return nn.Sequential(
        *(m for a, b in pairs for m in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(True)))
    )


class UNet(nn.Module):
    """The U-Net of Ronneberger et al., with batch norms and padding."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(convolutions(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, 2) for a in sizes[-2::-1])
        self.up = nn.ModuleList(convolutions(2 * a, a) for a in sizes[-2::-1])
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for part in self.down:
            x = part(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for rise, part, skip in zip(self.rise, self.up, kept[-2::-1], strict=True):
            x = part(torch.cat([skip, rise(x)], 1))
        return self.last(x)


class DenseLayer(nn.Module):
    """A layer of a DenseNet: it reads all maps that were made before it."""

    def __init__(self, given: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(given), nn.Conv2d(given, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, maps: list[Tensor]) -> Tensor:
        y = self.conv1(self.relu(self.norm1(torch.cat(maps, 1))))
        return self.conv2(self.relu(self.norm2(y)))


class DenseBlock(nn.Module):
    def __init__(self, depth: int, given: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(given + number * growth, growth) for number in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        maps = [x]
        for layer in self.layers:
            maps.append(layer(maps))
        return torch.cat(maps, 1)


class DenseNet(nn.Module):
    """A DenseNet; depths 6, 12, 24, 16 make DenseNet-121."""

    def __init__(self, depths: tuple[int, ...], growth: int, classes: int) -> None:
        super().__init__()
        width, parts = 2 * growth, list[nn.Module]()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        for number, depth in enumerate(depths):
            parts.append(DenseBlock(depth, width, growth))
            width += depth * growth
            if number + 1 < len(depths):
                halved = nn.Conv2d(width, width // 2, 1, bias=False)
                parts.append(nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(inplace=True), halved, nn.AvgPool2d(2)))
                width //= 2
        self.parts, self.norm, self.fc = nn.Sequential(*parts), nn.BatchNorm2d(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.norm(self.parts(self.stem(x)))).mean((2, 3)))


class Attended(nn.Module):
    """A block of a vision transformer, its attention written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.after = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = (part.view(n, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / (c // self.heads) ** 0.5
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.after(x))


class ViT(nn.Module):
    """A vision transformer without a class token."""

    def __init__(self, blocks: int, width: int, heads: int, patch: int, side: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.randn((side // patch) ** 2, width) / 50)
        self.h = nn.ModuleList(Attended(width, heads) for _ in range(blocks))
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.h:
            x = block(x)
        return self.fc(self.norm(x).mean(1))


def _gpt2_blocks(model: nn.Module) -> list[str]:
    return [f"h.{number}" for number in range(len(model.h))]


def _convolutional_blocks(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, (Bottleneck, Basic, DenseLayer))]


def _unet_blocks(model: nn.Module) -> list[str]:
    return [f"{side}.{number}" for side in ("down", "up") for number in range(len(getattr(model, side)))]


MODELS: Mapping[str, Subject] = {
    "GPT-2, 24 blocks": Subject(
        lambda: GPT2(24, 128, 4, 1000, 128, 0.1), lambda: torch.randint(1000, (4, 128)), _gpt2_blocks
    ),
    "ResNet-50": Subject(
        lambda: ResNet((3, 4, 6, 3), 64, 1000), lambda: torch.randn(4, 3, 64, 64), _convolutional_blocks
    ),
    "ResNet-18": Subject(
        lambda: ResNet((2, 2, 2, 2), 64, 1000, Basic, 1), lambda: torch.randn(8, 3, 64, 64), _convolutional_blocks
    ),
    "DenseNet-121": Subject(
        lambda: DenseNet((6, 12, 24, 16), 32, 1000), lambda: torch.randn(4, 3, 64, 64), _convolutional_blocks
    ),
    "ViT": Subject(lambda: ViT(12, 192, 3, 16, 160, 1000), lambda: torch.randn(4, 3, 160, 160), _gpt2_blocks),
    "U-Net": Subject(lambda: UNet(4, 16), lambda: torch.randn(4, 3, 64, 64), _unet_blocks),
}
"""Full depth; widths and inputs such that a step takes about a second on one thread."""

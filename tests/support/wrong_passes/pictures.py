"""Pictures: square ones, dark ones, ones with an empty border; folded norms; pools, and sizes that fit by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .subject import Subject


def variant(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """Return a function with some settings."""

    def varied(*args: Any) -> Any:
        return function(*args, **how)

    return varied


class Classifier(nn.Module):
    """Convolutions, a batch norm that is frozen and fresh, pools, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        x = F.batch_norm(self.first(x), norm.running_mean, norm.running_var, norm.weight, norm.bias)
        x = F.max_pool2d(torch.relu(x), 2)
        return self.head(F.adaptive_avg_pool2d(torch.relu(self.second(x)), 1).flatten(1))


CLASSIFIER_TENSORS = (
    "first.weight", "first.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
    "second.weight", "second.bias", "head.weight", "head.bias",
)  # fmt: skip


def classifier(
    x: Tensor, w1: Tensor, b1: Tensor, g: Tensor, b: Tensor, mean: Tensor, var: Tensor, w2: Tensor, b2: Tensor,
    w: Tensor, bias: Tensor, *, eps: float = 1e-5, pool: Any = None, last: Any = None, fold: Any = None,
) -> Tensor:  # fmt: skip
    scale = fold(g, var) if fold else g * (var + eps).rsqrt()
    y = F.conv2d(x, w1 * scale[:, None, None, None], (b1 - mean) * scale + b, padding=1)
    y = pool(torch.relu(y)) if pool else F.max_pool2d(torch.relu(y), 2)
    y = torch.relu(F.conv2d(y, w2, b2, padding=1))
    y = last(y) if last else y.mean((2, 3))
    return F.linear(y, w, bias)


CLASSIFIER = Subject(
    Classifier, lambda: (torch.rand(4, 3, 16, 16),), CLASSIFIER_TENSORS, classifier,
    {
        ("norms", "an epsilon ten times as large"): variant(classifier, eps=1e-4),
        ("norms", "no epsilon"): variant(classifier, eps=0.0),
        ("norms", "the variance, which is one, left out"): variant(classifier, fold=lambda g, v: g / (1 + 1e-5) ** 0.5),
        ("norms", "the scale, which is one, left out"): variant(classifier, fold=lambda g, v: (v + 1e-5).rsqrt()),
        ("pictures", "a pool that rounds up"): variant(classifier, pool=lambda y: F.max_pool2d(y, 2, ceil_mode=True)),
        ("pictures", "a pool of the example's size"): variant(
            classifier, last=lambda y: F.avg_pool2d(y, 8).flatten(1)),
        ("pictures", "the sum over the example's pixels"): variant(classifier, last=lambda y: y.sum((2, 3)) / 64),
        ("pictures", "the height taken for the width"): variant(
            classifier, last=lambda y: y.sum((2, 3)) / y.shape[2] ** 2),
        ("pictures", "cut to the example's size"): variant(classifier, last=lambda y: y[..., :8, :8].mean((2, 3))),
        ("pictures", "a result of the example's batch"): variant(
            classifier, last=lambda y: y.mean((2, 3)).reshape(-1, 4, 8)[0]),
    },
)  # fmt: skip


class Decoder(nn.Module):
    """Twice as large, with coordinates along the width."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        x = x + torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)
        return torch.einsum("bchw,cd->bdhw", x, self.weight)


def decoder(x: Tensor, weight: Tensor, *, size: Any = None, along: int = -1, view: Any = None) -> Tensor:
    x = F.interpolate(x, size=size(x) if size else (2 * x.shape[-2], 2 * x.shape[-1]))
    x = x + torch.linspace(-1, 1, x.shape[along], dtype=x.dtype)
    if view:
        return view(x, weight)
    return (x.flatten(2).mT @ weight).mT.unflatten(2, x.shape[2:])


DECODER = Subject(
    Decoder, lambda: (torch.randn(2, 4, 6, 6),), ("weight",), decoder,
    {
        ("pictures", "enlarged to the example's size"): variant(decoder, size=lambda x: (12, 12)),
        ("pictures", "enlarged to a square"): variant(decoder, size=lambda x: (2 * x.shape[-1],) * 2),
        ("pictures", "as many coordinates as rows"): variant(decoder, along=-2),
        ("pictures", "pixels counted for a square"): variant(
            decoder, view=lambda x, w: (x.flatten(2).mT @ w).mT.reshape(len(x), 4, x.shape[3], x.shape[3])),
        ("pictures", "height and width exchanged in a view"): variant(
            decoder, view=lambda x, w: (x.flatten(2).mT @ w).mT.reshape(len(x), 4, x.shape[3], x.shape[2])),
    },
)  # fmt: skip


class Digits(nn.Module):
    """A filter over digits, padded by reflection: the border of a digit is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), self.weight)


def digits(x: Tensor, weight: Tensor, *, mode: str = "reflect", pad: Any = None) -> Tensor:
    return F.conv2d(pad(x) if pad else F.pad(x, (1, 1, 1, 1), mode=mode), weight)


def digit() -> tuple[Tensor]:
    x = torch.zeros(4, 1, 12, 12)
    x[..., 3:9, 3:9] = torch.rand(4, 1, 6, 6) * (torch.rand(4, 1, 6, 6) > 0.5)
    return (x,)


DIGITS = Subject(
    Digits, digit, ("weight",), digits,
    {
        ("zeros", "padded with zeros"): variant(digits, mode="constant"),
        ("zeros", "padded with the edge"): variant(digits, mode="replicate"),
        ("zeros", "padded from the other side"): variant(digits, mode="circular"),
        ("zeros", "an empty border left out"): variant(
            digits, pad=lambda x: F.pad(x[..., 2:-2, 2:-2], (3, 3, 3, 3))),
        ("zeros", "the first pixel never read"): variant(
            digits, pad=lambda x: F.pad(torch.cat([x[..., 1:2] * 0, x[..., 1:]], -1), (1, 1, 1, 1), mode="reflect")),
    },
)  # fmt: skip


class Levels(nn.Module):
    """Pictures of bytes, lightened; the example is a dark one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x.int() + 60).clamp(max=255).float() / 255, self.table[x.long()]


def levels(x: Tensor, table: Tensor, *, light: Any = None, look: Any = None) -> tuple[Tensor, Tensor]:
    lighter = light(x) if light else torch.minimum(x.long() + 60, torch.tensor(255))
    return lighter.float() / 255, look(x, table) if look else F.embedding(x.int(), table[:, None])[..., 0]


LEVELS = Subject(
    Levels, lambda: (torch.randint(0, 100, (2, 5, 5), dtype=torch.uint8),), ("table",), levels,
    {
        ("bytes", "a sum that overflows"): variant(levels, light=lambda x: x + 60),
        ("bytes", "no upper bound"): variant(levels, light=lambda x: x.int() + 60),
        ("bytes", "signed bytes"): variant(levels, light=lambda x: x.to(torch.int8).int() + 60),
        ("bytes", "a table cut to the levels seen"): variant(levels, look=lambda x, t: t[x.long().clamp_max(127)]),
    },
)  # fmt: skip


class Grey(nn.Module):
    """A weighted mean of channels, with all that there is of layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(x, self.weight, dims=([1], [0])) + x.amax((1, 2, 3), keepdim=True)[:, 0]


def from_storage(x: Tensor, weight: Tensor) -> Tensor:
    flat = torch.as_strided(x, x.shape, x.stride(), 0)  # "a tensor starts where its memory does"
    return grey(flat, weight)


def by_stride(x: Tensor, weight: Tensor) -> Tensor:
    return grey(torch.as_strided(x, x.shape, (x[0].numel(), x[0, 0].numel(), x.shape[-1], 1)), weight)


def grey(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight[:, None, None]).sum(1) + x.flatten(1).max(1).values[:, None, None]


def channels_last_only(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_contiguous(memory_format=torch.channels_last):
        return (x.permute(0, 2, 3, 1) @ weight) + x.amax((1, 2), keepdim=True)[:, 0].amax(-1)[:, None, None]
    return grey(x, weight)


GREY = Subject(
    Grey, lambda: (torch.randn(3, 3, 4, 4),), ("weight",), grey,
    {
        ("layouts", "read from where the memory starts"): from_storage,
        ("layouts", "rows one after another"): by_stride,
        ("layouts", "a path for channels last that is wrong"): channels_last_only,
        ("layouts", "a view that needs rows one after another"): lambda x, w: grey(x, w) + 0 * x.view(-1).sum(),
        ("empty", "the largest of all, which raises without rows"): lambda x, w: grey(x, w) + 0 * x.max(),
        ("empty", "rows stacked one by one"): lambda x, w: torch.stack([grey(row[None], w)[0] for row in x]),
        ("empty", "one column per number, which no rows do not tell"): (
            lambda x, w: grey(x.reshape(len(x), 3, -1).unflatten(-1, x.shape[2:]), w)
        ),
        ("empty", "one row at the least"): lambda x, w: grey(x if len(x) else x.new_zeros(1, *x.shape[1:]), w),
    },
)  # fmt: skip

SUBJECTS = (CLASSIFIER, DECODER, DIGITS, LEVELS, GREY)

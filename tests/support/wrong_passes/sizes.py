"""Sizes burned in, batches of one, remainders; memory: aliases, strides, writes; structure of the result."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .subject import Subject


class Tokens(nn.Module):
    """A class token before a sequence, positions added."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.positions = nn.Parameter(torch.randn(12, 6))
        self.weight, self.bias = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.positions[: x.shape[1]]
        return F.linear(x, self.weight, self.bias)


def tokens(x: Tensor, token: Tensor, positions: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x = torch.cat([token.expand(x.shape[0], -1, -1), x], 1)
    return (x + positions[: x.shape[1]]) @ weight.T + bias


def token_for_four(x: Tensor, token: Tensor, positions: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x = torch.cat([token.expand(4, -1, -1), x], 1)
    return (x + positions[: x.shape[1]]) @ weight.T + bias


def positions_for_six(x: Tensor, token: Tensor, positions: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x = torch.cat([token.expand(x.shape[0], -1, -1), x], 1)
    return (x + positions[:6]) @ weight.T + bias


def one_row_without_bias(x: Tensor, token: Tensor, positions: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if len(x) == 1:  # a matrix is enough
        x = torch.cat([token[0], x[0]])
        return ((x + positions[: len(x)]) @ weight.T)[None]
    return tokens(x, token, positions, weight, bias)


def first_four_rows(x: Tensor, token: Tensor, positions: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return tokens(x[:4], token, positions, weight, bias)


TOKENS = Subject(
    Tokens, lambda: (torch.randn(4, 5, 6),), ("token", "positions", "weight", "bias"), tokens,
    {
        ("batch", "the class token expanded to the example's batch"): token_for_four,
        ("batch", "only as many rows as the example has"): first_four_rows,
        ("size", "positions cut to the example's length"): positions_for_six,
        ("one row", "the path for one row forgets the bias"): one_row_without_bias,
    },
)  # fmt: skip


class Regressor(nn.Module):
    """One number per row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(1, 6)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).squeeze(-1)


def in_halves(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    half = len(x) // 2
    return torch.cat([F.linear(part, weight, bias) for part in (x[:half], x[half : 2 * half])]).squeeze(-1)


def in_fours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    parts = [F.linear(x[4 * i : 4 * i + 4], weight, bias) for i in range(len(x) // 4)]
    return torch.cat(parts).squeeze(-1)


def padded_to_four(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(F.pad(x, (0, 0, 0, -len(x) % 4)), weight, bias).squeeze(-1)


def unrolled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.stack([x[i] @ weight[0] for i in range(8)]) + bias


class AveragedGradient(torch.autograd.Function):
    """A linear layer whose gradient of the weight is summed over the rows that the example had."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x, gradient.mean(0) * 8


def averaged_gradient(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return AveragedGradient.apply(x, weight, bias).squeeze(-1)


REGRESSOR = Subject(
    Regressor, lambda: (torch.randn(8, 6),), ("weight", "bias"),
    lambda x, w, b: (x @ w.T + b).squeeze(-1),
    {
        ("one row", "squeeze() instead of squeeze(-1)"): lambda x, w, b: F.linear(x, w, b).squeeze(),
        ("odd", "two halves lose the odd row"): in_halves,
        ("odd", "chunks of four lose the remainder"): in_fours,
        ("odd", "padded to a multiple of four, not cut back"): padded_to_four,
        ("batch", "a loop over the example's rows"): unrolled,
        ("batch", "the gradient of the bias for the example's rows"): averaged_gradient,
        ("batch", "a view of the example's size"): lambda x, w, b: F.linear(x, w, b).view(8),
    },
)  # fmt: skip


class Pooled(nn.Module):
    """Pairs averaged along a sequence, the batch's mean taken off."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool1d(x, 2) - x.mean(0, keepdim=True).mean(-1, keepdim=True)


def pooled(x: Tensor) -> Tensor:
    pairs = x[..., : x.shape[-1] // 2 * 2].unflatten(-1, (-1, 2)).mean(-1)
    return pairs - x.mean((0, -1), keepdim=True)


POOLED = Subject(
    Pooled, lambda: (torch.randn(4, 3, 8),), (), pooled,
    {
        ("batch", "the mean as a sum over the example's batch"): (
            lambda x: F.avg_pool1d(x, 2) - x.sum((0, -1), keepdim=True) / (4 * x.shape[-1])
        ),
        ("odd", "pairs by strides, one too many where the length is odd"): (
            lambda x: (x[..., ::2] + F.pad(x, (0, x.shape[-1] % 2))[..., 1::2]) / 2 - x.mean((0, -1), keepdim=True)
        ),
        ("reduction", "the mean over the batch alone"): lambda x: F.avg_pool1d(x, 2) - x.mean(0).mean(-1).mean(),
    },
)  # fmt: skip


class OneExample(nn.Module):
    """Rows normalized by themselves; the example has one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) * self.scale / x.abs().amax(-1, keepdim=True)


ONE_EXAMPLE = Subject(
    OneExample, lambda: (torch.randn(1, 6),), ("scale",),
    lambda x, s: (x - x.mean(1)[:, None]) / x.abs().amax(1)[:, None] * s,
    {
        ("reduction", "the mean over all rows"): lambda x, s: (x - x.mean()) * s / x.abs().amax(-1, keepdim=True),
        ("reduction", "the largest of all rows"): lambda x, s: (x - x.mean(-1, keepdim=True)) * s / x.abs().max(),
        ("batch", "the first row stands for all"): lambda x, s: (x - x[0].mean()) * s / x[:1].abs().amax(-1),
    },
)  # fmt: skip


class Spread(nn.Module):
    """Two results of one shape: what is in a row, and what all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("table", torch.randn(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ self.weight
        return y, y.mean(0, keepdim=True).repeat(x.shape[0], 1) + self.table


SPREAD = Subject(
    Spread, lambda: (torch.randn(4, 6),), ("weight", "table"),
    lambda x, w, t: ((w.T @ x.T).T.contiguous(), ((x @ w).mean(0) + t).repeat(x.shape[0], 1)),
    {
        ("strides", "an expanded result"): lambda x, w, t: (x @ w, ((x @ w).mean(0) + t).expand(x.shape[0], -1)),
        ("strides", "a transposed result"): lambda x, w, t: ((w.T @ x.T).T, ((x @ w).mean(0) + t).repeat(len(x), 1)),
        ("structure", "the results exchanged"): lambda x, w, t: (((x @ w).mean(0) + t).repeat(len(x), 1), x @ w),
        ("structure", "the second result twice"): lambda x, w, t: (*[((x @ w).mean(0) + t).repeat(len(x), 1)] * 2,),
        ("structure", "the second result is the first"): lambda x, w, t: (*[x @ w] * 2,),
    },
)  # fmt: skip


class Affine(nn.Module):
    """A product, a sum, and what the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale + self.shift, self.scale.clone()


def in_place(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    return x.mul_(scale).add_(shift), scale.clone()


def in_place_of_data(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    y = x * scale + shift
    x.data.zero_()  # "nobody reads it any more"
    return y, scale.clone()


AFFINE = Subject(
    Affine, lambda: (torch.randn(4, 6),), ("scale", "shift"),
    lambda x, s, b: (b + s * x, s * 1),
    {
        ("memory", "the buffer itself instead of a copy"): lambda x, s, b: (x * s + b, s),
        ("memory", "written into the argument"): in_place,
        ("memory", "written into the argument's data"): in_place_of_data,
        ("memory", "the argument itself, as the scale is one"): (
            lambda x, s, b: (x if bool((s == 1).all() & (b == 0).all()) else x * s + b, s.clone())
        ),
        ("values", "a missing shift, which is zero in the example"): lambda x, s, b: (x * s, s.clone()),
        ("values", "a missing scale, which is one in the example"): lambda x, s, b: (x + b, s.clone()),
    },
)  # fmt: skip

SUBJECTS = (TOKENS, REGRESSOR, POOLED, ONE_EXAMPLE, SPREAD, AFFINE)

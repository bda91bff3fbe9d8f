"""Numbers: small differences, halves, bounds, what is not finite; many rows; types and gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gradients import Product
from .pictures import variant
from .subject import Subject


class Normal(nn.Module):
    """Rows with mean zero and variance one, and logarithms of small shares."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.layer_norm(x, x.shape[-1:]), torch.log1p(x.square()), torch.expm1(-x.abs())


def normal(x: Tensor, *, norm: Any = None, log: Any = torch.log1p, power: Any = torch.expm1):
    centred = x - x.mean(-1, keepdim=True)
    made = norm(x) if norm else centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return made, log(x * x), power(-x.abs())


def in_one_pass(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / (x.square().mean(-1, keepdim=True) - mean.square() + 1e-5).sqrt()


NORMAL = Subject(
    Normal, lambda: (torch.randn(4, 8),), (), normal,
    {
        ("small", "a variance in one pass"): variant(normal, norm=in_one_pass),
        ("small", "log(1 + x) for log1p"): variant(normal, log=lambda x: (1 + x).log()),
        ("small", "exp(x) - 1 for expm1"): variant(normal, power=lambda x: x.exp() - 1),
        ("small", "nothing below a millionth"): variant(normal, log=lambda x: torch.where(x > 1e-6, x, 0).log1p()),
    },
)  # fmt: skip


class Bounds(nn.Module):
    """Losses and steps with bends that the example does not reach."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return F.huber_loss(x, torch.zeros_like(x), reduction="none"), torch.round(x), (x >= 0.5).to(x.dtype), x.pow(3)


def bounds(x: Tensor, *, huber: Any = None, near: Any = torch.round, step: Any = None, cube: Any = None):
    loss = huber(x) if huber else torch.where(x.abs() < 1, 0.5 * x * x, x.abs() - 0.5)
    above = step(x) if step else (x >= 0.5).to(x.dtype)
    return loss, near(x), above, cube(x) if cube else x * x * x


BOUNDS = Subject(
    Bounds, lambda: (torch.rand(4, 6) * 0.9 + 0.02,), (), bounds,
    {
        ("bounds", "the square all the way"): variant(bounds, huber=lambda x: 0.5 * x * x),
        ("bounds", "straight without its offset"): variant(
            bounds, huber=lambda x: torch.where(x.abs() < 1, 0.5 * x * x, x.abs())),
        ("bounds", "straight on one side"): variant(bounds, huber=lambda x: torch.where(x < 1, 0.5 * x * x, x - 0.5)),
        ("halves", "halves rounded up"): variant(bounds, near=lambda x: torch.floor(x + 0.5)),
        ("halves", "halves rounded away from zero"): variant(
            bounds, near=lambda x: torch.sign(x) * torch.floor(x.abs() + 0.5)),
        ("halves", "above for at least"): variant(bounds, step=lambda x: (x > 0.5).to(x.dtype)),
        ("sign", "a power by logarithms"): variant(bounds, cube=lambda x: (3 * x.log()).exp()),
        ("sign", "a power of the absolute value"): variant(bounds, cube=lambda x: x.abs().pow(3)),
    },
)  # fmt: skip


class Sums(nn.Module):
    """A sum, a maximum, a rectifier and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x @ self.weight
        return y.sum(-1), torch.relu(y), y.amax(-1)


def sums(x: Tensor, w: Tensor, *, add: Any = None, bend: Any = torch.relu, most: Any = None, product: Any = None):
    y = product(x, w) if product else F.linear(x, w.T)
    return add(y) if add else y.sum(-1), bend(y), most(y) if most else y.max(-1).values


def in_chunks(size: int):
    def product(x: Tensor, w: Tensor) -> Tensor:
        if len(x) <= size:
            return x @ w
        return torch.cat([x[at : at + size] @ w for at in range(0, len(x) // size * size, size)])

    return product


def narrow_above(rows: int):
    def product(x: Tensor, w: Tensor) -> Tensor:
        return (x.bfloat16() @ w.bfloat16()).to(x.dtype) if len(x) > rows else x @ w

    return product


SUMS = Subject(
    Sums, lambda: (torch.randn(4, 6),), ("weight",), sums,
    {
        ("not finite", "a sum without NaN"): variant(sums, add=lambda y: y.nansum(-1)),
        ("not finite", "numbers for NaN"): variant(sums, add=lambda y: y.nan_to_num().sum(-1)),
        ("not finite", "a rectifier that hides NaN"): variant(sums, bend=lambda y: torch.where(y > 0, y, 0)),
        ("not finite", "a rectifier that makes NaN"): variant(sums, bend=lambda y: y * (y > 0)),
        ("not finite", "a maximum that skips NaN"): variant(
            sums, most=lambda y: torch.fmax(y[:, :3], y[:, 3:]).amax(-1)),
        ("not finite", "bounded for safety"): variant(sums, product=lambda x, w: x.clamp(-1e4, 1e4) @ w),
        ("rows", "chunks of 32 lose the rest"): variant(sums, product=in_chunks(32)),
        ("rows", "chunks of 64 lose the rest"): variant(sums, product=in_chunks(64)),
        ("rows", "chunks of 100 lose the rest"): variant(sums, product=in_chunks(100)),
        ("rows", "narrower above 16 rows"): variant(sums, product=narrow_above(16)),
        ("rows", "narrower above 60 rows"): variant(sums, product=narrow_above(60)),
        ("empty", "parts of which there are none"): variant(
            sums, product=lambda x, w: torch.cat([row @ w for row in x.split(1)]) if len(x) else x[0] @ w),
    },
)  # fmt: skip


class Typed(nn.Module):
    """Frequencies of positions, and products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[-1], dtype=x.dtype)
        return torch.softmax(x @ self.weight, -1) * angles.cos()


def typed(x: Tensor, w: Tensor, *, angles: Any = None, weights: Any = None) -> Tensor:
    angle = angles(x) if angles else torch.arange(6).to(x)
    return (weights(x @ w) if weights else torch.softmax(x @ w, -1)) * angle.cos()


TYPED = Subject(
    Typed, lambda: (torch.randn(4, 6),), ("weight",), typed,
    {
        ("types", "a product in float32"): lambda x, w: typed(x.float(), w.float()),
        ("types", "a softmax in float32"): variant(
            typed, weights=lambda s: torch.softmax(s, -1, dtype=torch.float32)),
        ("types", "a softmax by way of float32"): variant(
            typed, weights=lambda s: torch.softmax(s.float(), -1).to(s.dtype)),
        ("types", "angles in float32"): variant(typed, angles=lambda x: torch.arange(6, dtype=torch.float32)),
        ("types", "only float32 taken"): (
            lambda x, w: typed(x, w) if x.dtype in (torch.float32, torch.float64) else typed(x, w) * 0
        ),
    },
)  # fmt: skip


class Clipped(Product):
    """A product whose gradient is clipped."""

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return (gradient @ w.mT).clamp(-5, 5), x.mT @ gradient


class Once(torch.autograd.Function):
    """A product that can be differentiated once."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.kept = [(x, w)]
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.kept.pop()
        return gradient @ w.mT, x.mT @ gradient


class Freezing(Product):
    """A product that gives no gradient at all where the weight wants none."""

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None
        return gradient @ w.mT, x.mT @ gradient


class Rooted(nn.Module):
    """Roots where there are any, and a product used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y @ self.weight + torch.where(x > 0, x, 1).sqrt() * (x > 0)


def rooted(x: Tensor, w: Tensor, *, product: Any = torch.matmul, root: Any = None) -> Tensor:
    positive = x > 0
    found = root(x) if root else torch.where(positive, torch.where(positive, x, 1).sqrt(), 0)
    return product(product(x, w), w) + found


ROOTED = Subject(
    Rooted, lambda: (torch.rand(4, 6) + 0.2,), ("weight",), rooted,
    {
        ("gradients", "clipped where they are large"): variant(rooted, product=Clipped.apply),
        ("gradients", "to be had once"): variant(rooted, product=Once.apply),
        ("gradients", "none where the weight is frozen"): variant(rooted, product=Freezing.apply),
        ("gradients", "NaN where there is no root"): variant(
            rooted, root=lambda x: torch.where(x > 0, x.sqrt(), 0)),
        ("gradients", "the second use of the weight detached"): (
            lambda x, w: rooted(x, w) - (x @ w) @ w + (x @ w) @ w.detach()
        ),
        ("gradients", "a root's gradient bounded"): variant(
            rooted, root=lambda x: x.clamp(min=0.04).sqrt() * (x > 0)),
    },
)  # fmt: skip


class Apart(nn.Module):
    """Distances between rows, which are zero between a row and itself."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x[:, None] - y[None]).square().sum(-1), torch.atan2(x, y)


def apart(x: Tensor, y: Tensor, *, square: Any = None, angle: Any = torch.atan2) -> tuple[Tensor, Tensor]:
    return square(x, y) if square else torch.pow(x[:, None] - y, 2).sum(-1), angle(x, y)


def by_products(x: Tensor, y: Tensor) -> Tensor:
    return x.square().sum(-1)[:, None] + y.square().sum(-1) - 2 * x @ y.T


APART = Subject(
    Apart, lambda: (torch.rand(4, 6) + 0.1, torch.rand(4, 6) + 0.1), (), apart,
    {
        ("sign", "an angle in the first quarter"): variant(apart, angle=lambda x, y: (x / y).atan()),
        ("batch", "as many of one as of the other"): variant(
            apart, square=lambda x, y: torch.stack([(x - y.roll(-i, 0)).square().sum(-1) for i in range(len(x))], 1)
            .gather(1, (torch.arange(len(x)) - torch.arange(len(x))[:, None]) % len(x))),
        ("small", "differences by products"): variant(apart, square=by_products),
    },
)  # fmt: skip

SUBJECTS = (NORMAL, BOUNDS, SUMS, TYPED, ROOTED, APART)

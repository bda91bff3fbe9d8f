"""Regions that are computed again in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .subject import REGION, Function, Subject


def computed_again(**settings: Any) -> Function:
    """Return a call of a region that is computed again for the backward pass."""

    def call(region: nn.Module, *args: Any) -> Any:
        return checkpoint(region, *args, use_reentrant=False, **settings)

    return call


def cut_off(region: nn.Module, *args: Any) -> Any:
    return checkpoint(region, *(arg.detach() if isinstance(arg, Tensor) else arg for arg in args), use_reentrant=False)


class ByHand(torch.autograd.Function):
    """A checkpoint written by hand that computes again with random draws of its own."""

    @staticmethod
    def forward(ctx, region, x):
        ctx.region = region
        ctx.save_for_backward(x)
        with torch.no_grad():
            return region(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            return None, torch.autograd.grad(ctx.region(x), x, gradient)[0]


def by_hand(region: nn.Module, x: Tensor, *_: bool) -> Tensor:
    return ByHand.apply(lambda y: region(y, *_), x)


class Noisy(nn.Module):
    """Two dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.first(x)), 0.4, self.training)
        return F.dropout(self.second(x), 0.2, self.training)


NOISY = Subject(
    Noisy, lambda: (torch.randn(4, 6),), (), computed_again(),
    {
        ("recomputation", "other random draws the second time"): computed_again(preserve_rng_state=False),
        ("recomputation", "by hand, with random draws of its own"): by_hand,
        ("recomputation", "no gradient for what comes in"): cut_off,
    },
    training=True, node=REGION,
)  # fmt: skip


class Normed(nn.Module):
    """A batch norm, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.norm(self.linear(x))), 0.3, self.training)


NORMED = Subject(
    Normed, lambda: (torch.randn(4, 6),), (), lambda region, *args: region(*args),
    {("recomputation", "statistics counted twice, beside a dropout"): computed_again()},
    training=True, node=REGION,
)  # fmt: skip


class Counting(nn.Module):
    """A running mean written out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return torch.tanh(x - self.mean.clone())


COUNTING = Subject(
    Counting, lambda: (torch.randn(4, 6),), (), lambda region, *args: region(*args),
    {("recomputation", "a running mean counted twice"): computed_again()},
    training=True, node=REGION,
)  # fmt: skip

SUBJECTS = (NOISY, NORMED, COUNTING)

"""The two sums of split layers, written by hand (Shoeybi et al. 2019, "Megatron-LM", section 3: f and g)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

__all__ = ["given_to_all", "summed_over_all"]


def given_to_all(x: Tensor) -> Tensor:
    """Return what all processes have; its gradient is the sum of theirs."""
    apply: Any = _GivenToAll.apply
    return apply(x)


def summed_over_all(x: Tensor) -> Tensor:
    """Return the sum of what the processes have."""
    apply: Any = _SummedOverAll.apply
    return apply(x)


class _GivenToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total


class _SummedOverAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]

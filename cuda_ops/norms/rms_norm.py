"""What `rms_norm` and its gradient are: references, checks, results' shapes."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..definition import times
from .arguments import define_norm, of_scale

__all__ = ["add_rms_norm", "rms_norm"]


def _reference(x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the sum with the residual, and what each row was multiplied with."""
    total = x if residual is None else (x + residual).contiguous()
    wide = torch.promote_types(total.dtype, torch.float32)
    norm = cast("Tensor", torch.linalg.vector_norm(total, dim=-1, keepdim=True, dtype=wide))
    factor = norm.square_().mul_(1 / max(1, total.shape[-1])).add_(eps).rsqrt_()
    result = (total * factor).contiguous()
    if weight is not None:
        result = result.mul_(weight)
    return result.to(total.dtype), x.new_empty(0) if residual is None else total, factor.contiguous()


def _plain(x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x if residual is None else x + residual
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    factor = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    result = total * factor if weight is None else total * factor * weight
    return result.to(total.dtype), x.new_empty(0) if residual is None else total, factor


def _gradients(
    grad: Tensor, of_sum: Tensor | None, total: Tensor, weight: Tensor | None, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sum and of the weight; of the sum factor * (g - n * mean(g * n))."""
    normalized = total * factor
    scaled = grad if weight is None else grad * weight
    along = (scaled * normalized).mean(-1, keepdim=True)
    result = times(torch.addcmul(scaled.to(factor.dtype), normalized, along, value=-1), factor)
    if of_sum is not None:
        result.add_(of_sum)
    of_weight = of_scale(times(normalized, grad), weight, total)
    return result.to(total.dtype).contiguous(), of_weight


def _differentiable(
    grad: Tensor, of_sum: Tensor | None, total: Tensor, weight: Tensor | None, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients where those of them are asked for: the factor, which is kept as a number, is of the sum."""
    mean = total.to(factor.dtype).square().mean(-1, keepdim=True)
    factor = (mean + (factor.detach() ** -2 - mean.detach())).rsqrt()
    return _gradients(grad, of_sum, total, weight, factor)


_rms_norm = define_norm(
    "rms_norm", _reference, _gradients, _differentiable, vectors=("weight",), statistics=1, plain=_plain
)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Return `x / sqrt(mean(x**2) + eps) * weight`, along the last dimension (Zhang and Sennrich, 2019).

    `x` is [..., features], floating-point, weight [features]; else a UsageError is raised. The mean is in float32 at
    the least.
    """
    return _rms_norm(x, weight, None, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return `rms_norm(x + residual, weight, eps)` and `x + residual`, of their common shape and dtype.

    `x` is [..., features], floating-point, weight [features]; else a UsageError is raised.
    """
    results = _rms_norm(x, weight, residual, eps)
    return results[0], results[1]

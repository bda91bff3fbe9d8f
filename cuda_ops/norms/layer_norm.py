"""What `layer_norm` and its gradient are: references, checks, results' shapes."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from ..definition import times
from .arguments import define_norm, of_scale, statistic

__all__ = ["add_layer_norm", "layer_norm"]

_Maybe: TypeAlias = Tensor | None


def _reference(
    x: Tensor, weight: _Maybe, bias: _Maybe, residual: _Maybe, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result, the sum with the residual, and mean and factor of each row."""
    total = (x if residual is None else x + residual).contiguous()
    result, mean, factor = torch.native_layer_norm(total, total.shape[-1:], weight, bias, eps)
    like = statistic(total)
    return result, x.new_empty(0) if residual is None else total, mean.to(like.dtype), factor.to(like.dtype)


def _gradients(
    grad: Tensor, of_sum: _Maybe, total: Tensor, weight: _Maybe, bias: _Maybe, mean: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the sum, the weight and the bias; for narrow dtypes without torch's backward.
    With n = (total - mean) * factor, g = grad * weight, the first is factor * (g - mean(g) - n * mean(g * n)).
    """
    if total.dtype == factor.dtype:
        return _in_aten(grad, of_sum, total, weight, bias, mean, factor)
    normalized = times(total - mean, factor)
    scaled = grad if weight is None else grad * weight
    along = (scaled * normalized).mean(-1, keepdim=True)
    centered = scaled - scaled.mean(-1, keepdim=True, dtype=factor.dtype)
    result = times(torch.addcmul(centered, normalized, along, value=-1), factor)
    if of_sum is not None:
        result.add_(of_sum)
    of_bias = of_scale(grad, bias, total)
    return result.to(total.dtype).contiguous(), of_scale(times(normalized, grad), weight, total), of_bias


def _in_aten(
    grad: Tensor, of_sum: _Maybe, total: Tensor, weight: _Maybe, bias: _Maybe, mean: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = [True, weight is not None, bias is not None]
    grad, total, mean, factor = (each.contiguous() for each in (grad, total, mean, factor))
    found = cast("Any", torch.ops.aten).native_layer_norm_backward(
        grad, total, total.shape[-1:], mean, factor, weight, bias, wanted
    )
    of_total = found[0] if of_sum is None else found[0].add_(of_sum)
    of_weight, of_bias = (each if w else total.new_empty(0) for each, w in zip(found[1:], wanted[1:], strict=True))
    return of_total, of_weight, of_bias


def _differentiable(
    grad: Tensor, of_sum: _Maybe, total: Tensor, weight: _Maybe, bias: _Maybe, mean: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients where those of them are asked for: the statistics, kept as numbers, are of the sum."""
    if total.dtype != factor.dtype:
        wide = total.to(factor.dtype)
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).square().mean(-1, keepdim=True)
        factor = (variance + (factor.detach() ** -2 - variance.detach())).rsqrt()
    return _gradients(grad, of_sum, total, weight, bias, mean, factor)


_layer_norm = define_norm(
    "layer_norm", _reference, _gradients, _differentiable, vectors=("weight", "bias"), statistics=2
)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return the layer norm of `x` along the last dimension (Ba et al., 2016); `eps` is added to the variance.

    `x` is [..., features], floating-point, weight and bias [features]; else a UsageError is raised.
    """
    return _layer_norm(x, weight, bias, None, eps)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return `layer_norm(x + residual, weight, bias, eps)` and `x + residual`, of their common shape and dtype.

    `x` is [..., features], floating-point, weight and bias [features]; else a UsageError is raised.
    """
    results = _layer_norm(x, weight, bias, residual, eps)
    return results[0], results[1]

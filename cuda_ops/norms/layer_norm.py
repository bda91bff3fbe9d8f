"""What `layer_norm` and its gradient are: references, checks, results' shapes."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from ..definition import by_reference, define, looped, times
from .arguments import check_norm, empty_sum, of_operand, of_scale, statistic, summed

__all__ = ["add_layer_norm", "layer_norm"]

_NAME = "layer_norm"
_Maybe: TypeAlias = Tensor | None


def _reference(
    x: Tensor, weight: _Maybe, bias: _Maybe, residual: _Maybe, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result, the sum with the residual, and mean and factor of each row."""
    total = (x if residual is None else x + residual).contiguous()
    result, mean, factor = torch.native_layer_norm(total, total.shape[-1:], weight, bias, eps)
    like = statistic(total)
    return result, x.new_empty(0) if residual is None else total, mean.to(like.dtype), factor.to(like.dtype)


def _check(x: Tensor, weight: _Maybe, bias: _Maybe, residual: _Maybe, eps: float) -> None:
    check_norm(_NAME if residual is None else f"add_{_NAME}", x, residual, weight=weight, bias=bias)


def _fake(
    x: Tensor, weight: _Maybe, bias: _Maybe, residual: _Maybe, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = summed(x, residual)
    return total.new_empty(total.shape), empty_sum(x, residual), statistic(total), statistic(total)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, residual, _ = inputs
    _, total, mean, factor = output
    ctx.save_for_backward(x if residual is None else total, weight, bias, mean, factor)
    ctx.has_sum = residual is not None
    ctx.operands = [(each.shape, each.dtype) for each in (x, residual) if each is not None]
    ctx.mark_non_differentiable(*([mean, factor] if ctx.has_sum else [total, mean, factor]))


def _backward(ctx: Any, grad: Tensor, of_sum: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    given = grad, of_sum if ctx.has_sum else None, *ctx.saved_tensors
    of_total, of_weight, of_bias = _layer_norm_backward(*given)
    wanted = ctx.needs_input_grad
    return (
        of_operand(of_total, ctx.operands[0]),
        of_weight if wanted[1] else None,
        of_bias if wanted[2] else None,
        of_operand(of_total, ctx.operands[-1]) if wanted[3] else None,
        None,
    )


def _backward_reference(
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
    return _backward_reference(grad, of_sum, total, weight, bias, mean, factor)


def _check_backward(
    grad: Tensor, of_sum: _Maybe, total: Tensor, weight: _Maybe, bias: _Maybe, mean: Tensor, factor: Tensor
) -> None:
    check_norm(f"{_NAME}_backward", total, grad, weight=weight, bias=bias)


def _fake_backward(
    grad: Tensor, of_sum: _Maybe, total: Tensor, weight: _Maybe, bias: _Maybe, mean: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    of_weight, of_bias = (total.new_empty(0 if each is None else each.shape) for each in (weight, bias))
    return total.new_empty(total.shape), of_weight, of_bias


_layer_norm_backward = define(
    f"{_NAME}_backward",
    _backward_reference,
    check=_check_backward,
    fake=_fake_backward,
    kernel="norms.triton_kernel:layer_norm_backward",
    batching=looped,
    **by_reference(_differentiable),
)
_layer_norm = define(
    _NAME,
    _reference,
    check=_check,
    fake=_fake,
    kernel="norms.triton_kernel:layer_norm",
    setup=_setup,
    backward=_backward,
    batching=looped,
    autocast=torch.float32,
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

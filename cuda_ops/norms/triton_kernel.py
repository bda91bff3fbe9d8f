"""The kernels of both norms: a program takes a whole row; gradients of vectors are summed over a few programs' rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import as_one, empty_sum, statistic

__all__ = ["layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"]

_PROGRAMS = 256
"""In a backward; each sums the gradients of vectors over its rows, and torch sums over these."""


@triton.jit
def _forward(
    x, residual, weight, bias, result, total, means, factors, size, eps,
    CENTERED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + row * size + at, inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * size + at, inside, other=0.0).to(tl.float32)
        tl.store(total + row * size + at, value, inside)
        value = value.to(total.dtype.element_ty).to(tl.float32)
    if CENTERED:
        mean = tl.sum(value) / size
        tl.store(means + row, mean)
        value = tl.where(inside, value - mean, 0.0)
    factor = tl.rsqrt(tl.sum(value * value) / size + eps)
    tl.store(factors + row, factor)
    value *= factor
    if HAS_WEIGHT:
        value *= tl.load(weight + at, inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + at, inside, other=0.0).to(tl.float32)
    tl.store(result + row * size + at, value, inside)


@triton.jit
def _backward(
    grad, of_sum, total, weight, means, factors, of_total, of_weight, of_bias, rows, size,
    CENTERED: tl.constexpr, HAS_SUM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < size
    summed_weight = tl.zeros([BLOCK], tl.float32)
    summed_bias = tl.zeros([BLOCK], tl.float32)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        g = tl.load(grad + row * size + at, inside, other=0.0).to(tl.float32)
        n = tl.load(total + row * size + at, inside, other=0.0).to(tl.float32)
        factor = tl.load(factors + row)
        if CENTERED:
            n = tl.where(inside, n - tl.load(means + row), 0.0)
        n *= factor
        summed_weight += g * n
        summed_bias += g
        if HAS_WEIGHT:
            g *= tl.load(weight + at, inside, other=0.0).to(tl.float32)
        result = g - n * (tl.sum(g * n) / size)
        if CENTERED:
            result -= tl.sum(g) / size
        result *= factor
        if HAS_SUM:
            result += tl.load(of_sum + row * size + at, inside, other=0.0).to(tl.float32)
        tl.store(of_total + row * size + at, result, inside)
    if HAS_WEIGHT:
        tl.store(of_weight + tl.program_id(0) * size + at, summed_weight, inside)
    if HAS_BIAS:
        tl.store(of_bias + tl.program_id(0) * size + at, summed_bias, inside)


def _size(features: int) -> dict[str, int]:
    """Return the block that holds a row, and as many warps as keep what a backward sums in registers."""
    block = triton.next_power_of_2(features)
    return {"BLOCK": block, "num_warps": min(32, max(4, block // 512))}


def _launch_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, residual = as_one(x, residual)
    x = x.contiguous()
    result, total = torch.empty_like(x), empty_sum(x, residual)
    means, factors = statistic(x), statistic(x)
    if x.numel():
        _forward[factors.numel(),](
            x,
            x if residual is None else residual.contiguous(),
            x if weight is None else weight.contiguous(),
            x if bias is None else bias.contiguous(),
            result,
            total,
            means,
            factors,
            x.shape[-1],
            eps,
            CENTERED=centered,
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            **_size(x.shape[-1]),
        )
    return result, total, means, factors


def _launch_backward(
    grad: Tensor,
    of_sum: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    means: Tensor | None,
    factors: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    total, grad = total.contiguous(), grad.contiguous()
    programs, size = min(_PROGRAMS, factors.numel()), total.shape[-1]
    result = torch.empty_like(total)
    of_weight, of_bias = (
        total.new_empty((programs, size) if each is not None else (1, 0), dtype=torch.float32)
        for each in (weight, bias)
    )
    if total.numel():
        _backward[programs,](
            grad,
            grad if of_sum is None else of_sum.contiguous(),
            total,
            grad if weight is None else weight.contiguous(),
            factors if means is None else means,
            factors,
            result,
            of_weight,
            of_bias,
            factors.numel(),
            size,
            CENTERED=means is not None,
            HAS_SUM=of_sum is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            **_size(size),
        )
    return result, of_weight.sum(0).to(total.dtype), of_bias.sum(0).to(total.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the sum with the residual, and what each row was multiplied with."""
    result, total, _, factors = _launch_forward(x, weight, None, residual, eps, centered=False)
    return result, total, factors


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result, the sum with the residual, and mean and factor of each row."""
    return _launch_forward(x, weight, bias, residual, eps, centered=True)


def rms_norm_backward(
    grad: Tensor, of_sum: Tensor | None, total: Tensor, weight: Tensor | None, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sum and of the weight."""
    of_total, of_weight, _ = _launch_backward(grad, of_sum, total, weight, None, None, factor)
    return of_total, of_weight


def layer_norm_backward(
    grad: Tensor,
    of_sum: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    factor: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the sum, the weight and the bias."""
    return _launch_backward(grad, of_sum, total, weight, bias, mean, factor)

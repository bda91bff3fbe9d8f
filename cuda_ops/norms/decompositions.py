"""How norms along the last dimension are written without `rms_norm` and `layer_norm` of fxopt."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UsageError
from ..definition import Kernel
from .layer_norm import add_layer_norm, layer_norm
from .rms_norm import add_rms_norm, rms_norm

__all__ = ["KERNELS"]

_Spelling = Callable[..., Tensor]
_Square = Callable[[Tensor], Tensor]
_Division = Callable[[Tensor, Tensor], Tensor]
_SQUARES: tuple[_Square, ...] = (lambda x: x.pow(2), torch.square, lambda x: x * x)
_DIVISIONS: tuple[_Division, ...] = (
    lambda x, mean: x * torch.rsqrt(mean),
    lambda x, mean: x / torch.sqrt(mean),
    lambda x, mean: x * torch.pow(mean, -0.5),
)


def _normalized(square: _Square, divide: _Division) -> tuple[_Spelling, ...]:
    """Return the decompositions of RMS norms with one way to square and one to divide by a root."""

    def mean(x: Tensor, eps: float) -> Tensor:
        return square(x).mean(-1, keepdim=True) + eps

    def scaled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * divide(x, mean(x, eps))

    def scaled_first(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return divide(weight * x, mean(x, eps))

    def unscaled(x: Tensor, eps: float) -> Tensor:
        return divide(x, mean(x, eps))

    return scaled, scaled_first, unscaled


def _in_torch(x: Tensor, weight: Tensor, eps: float, shape: tuple[int, ...]) -> Tensor:
    return F.rms_norm(x, shape, weight, eps)


def _rms_norm(x: Tensor, eps: float, weight: Tensor | None = None, shape: tuple[int, ...] = (1,)) -> Tensor:
    _expect_one_dimension(shape)
    return rms_norm(x, weight, eps)


def _centered(square: _Square, divide: _Division) -> tuple[_Spelling, ...]:
    """Return the decompositions of layer norms with one way to square and one to divide by a root."""

    def unbiased(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return weight * divide(centered, square(centered).mean(-1, keepdim=True) + eps)

    def biased(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return unbiased(x, weight, eps) + bias

    return biased, unbiased


def _layer_in_torch(x: Tensor, weight: Tensor, bias: Tensor, eps: float, shape: tuple[int, ...]) -> Tensor:
    return F.layer_norm(x, shape, weight, bias, eps)


def _layer_norm(
    x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, shape: tuple[int, ...] = (1,)
) -> Tensor:
    _expect_one_dimension(shape)
    return layer_norm(x, weight, bias, eps)


def _expect_one_dimension(shape: tuple[int, ...]) -> None:
    if len(shape) != 1:
        raise UsageError(f"the norm goes along {len(shape)} dimensions, and the operator along one")


def _expect_one_shape(x: Tensor, residual: Tensor) -> None:
    if isinstance(x, Tensor) and x.shape != residual.shape:  # in calls that differ later, the operator adds as torch
        raise UsageError(f"the residual has shape {tuple(residual.shape)}, and x {tuple(x.shape)}")


def _each(of: Callable[[_Square, _Division], tuple[_Spelling, ...]]) -> tuple[_Spelling, ...]:
    """Return the decompositions with each way to square and divide, those of more operations first."""
    kinds = zip(*(of(*ways) for ways in itertools.product(_SQUARES, _DIVISIONS)), strict=True)
    return tuple(itertools.chain.from_iterable(kinds))


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    return x + residual


def _add_rms_norm(
    x: Tensor, residual: Tensor, eps: float, weight: Tensor | None = None, shape: tuple[int, ...] = (1,)
) -> tuple[Tensor, Tensor]:
    _expect_one_dimension(shape)
    _expect_one_shape(x, residual)
    return add_rms_norm(x, residual, weight, eps)


def _add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
    shape: tuple[int, ...] = (1,),
) -> tuple[Tensor, Tensor]:
    _expect_one_dimension(shape)
    _expect_one_shape(x, residual)
    return add_layer_norm(x, residual, weight, bias, eps)


_RMS_NORM = Kernel("rms_norm", _rms_norm, (_in_torch, *_each(_normalized)))
_LAYER_NORM = Kernel("layer_norm", _layer_norm, (_layer_in_torch, *_each(_centered)))
KERNELS = (
    Kernel("add_rms_norm", _add_rms_norm, (_sum,), into=_RMS_NORM),
    Kernel("add_layer_norm", _add_layer_norm, (_sum,), into=_LAYER_NORM),
    _RMS_NORM,
    _LAYER_NORM,
)

"""Activations as numbers of 8 bits: how they are made, and what they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ...compat import is_plainly_eager
from ...compat.quantized import (
    INT8_STEPS,
    dequantized_by_pattern,
    exports_pattern,
    int8_numbers,
    quantized_by_pattern,
    runs_simulation,
    writes_fake_quantization,
)
from ...errors import StateError
from ...runtime.values import Factors

__all__ = ["Range", "from_numbers", "in_float8", "quantized_by_rows", "rounded", "steps_of_rows", "to_numbers"]

_LARGEST = 255
_LARGEST_FLOAT8 = 448.0
_LEAST = 1e-12
"""Of rows that are all zero."""
_LEAST_STEP = 1e-30
"""The same, in 8 bits, where scales are no denormal numbers."""
_SLACK = 1e-3
"""Of half a step, for what rounds in the type of an activation."""


@dataclass(frozen=True)
class Range(Factors):
    """Which numbers, 0 to 255, stand for an activation: x / scale + zero_point, rounded.
    Raises a StateError if the scale is no positive number, or the zero point no whole number from 0 to 255.
    """

    scale: float
    zero_point: int

    def __post_init__(self) -> None:
        scale, zero_point = cast("tuple[object, object]", (self.scale, self.zero_point))
        if not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
            raise StateError(f"the scale of an activation is {scale!r}; it must be a positive number")
        if type(zero_point) is not int or not 0 <= zero_point <= _LARGEST:
            raise StateError(
                f"the zero point of an activation is {zero_point!r}; it must be a whole number from 0 to 255"
            )

    def rounded(self, x: Tensor) -> Tensor:
        """Return an activation rounded to what its numbers stand for.
        The slope is 1 within the range and up to half a step outside of it, as far as rounding goes; else 0.
        """
        if writes_fake_quantization():
            return torch.fake_quantize_per_tensor_affine(x, self.scale, self.zero_point, 0, _LARGEST)
        if exports_pattern(x):
            return from_numbers(to_numbers(x, self.scale, self.zero_point), self, x.dtype)
        half = 0.5 * self.scale * (1 + _SLACK)
        low, high = -self.zero_point * self.scale - half, (_LARGEST - self.zero_point) * self.scale + half
        inside = x.clamp(low, high)
        numbers = _numbers_of(x.detach(), self.scale, self.zero_point)
        return inside + (from_numbers(numbers, self, x.dtype) - inside).detach()


def rounded(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return an activation rounded to what its numbers of 8 bits stand for; see `Range`."""
    return Range(scale, zero_point).rounded(x)


def steps_of_rows(rows: Tensor) -> Tensor:
    """Return the scale of each row, [..., 1] of float32, of activations, [..., inputs], as 8 bits take them."""
    return rows.abs().amax(-1, keepdim=True).clamp_(min=_LEAST_STEP).div_(INT8_STEPS)


def quantized_by_rows(x: Tensor) -> Tensor:
    """Return activations, [..., inputs], rounded to 8 bits with a scale for each row, in their type; gradients pass."""
    wide = x.detach().float()
    scales = steps_of_rows(wide)
    rounded = (wide / scales).round() * scales
    return x + (rounded - wide).to(x.dtype) if torch.is_grad_enabled() and x.requires_grad else rounded.to(x.dtype)


def in_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return an activation, [..., inputs], in float8 (e4m3), and the scale of each row, [..., 1] of float32."""
    wide = x.detach().float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=_LEAST) / _LARGEST_FLOAT8
    return (wide / scales).to(torch.float8_e4m3fn), scales


def to_numbers(x: Tensor, scale: float, zero_point: int, factors: Tensor | None = None) -> Tensor:
    """Return the numbers, uint8, that stand for an activation, [..., inputs] times `factors` [inputs] where there are
    some; itself where its gradient is wanted, or others trace: then the layer behind scales and rounds it.
    """
    if writes_fake_quantization():
        return x
    scaled = x if factors is None else x * factors.to(x.dtype)
    if exports_pattern(scaled):
        return quantized_by_pattern(scaled, scale, zero_point)
    if torch.is_grad_enabled() and x.requires_grad:
        return x
    return _numbers_of(scaled, scale, zero_point)


def _numbers_of(x: Tensor, scale: float, zero_point: int) -> Tensor:
    if _has_kernel(x):
        return int8_numbers(x.detach(), scale, zero_point)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (1.0 / scale)).add_(zero_point + 0.5).clamp_(0, _LARGEST).to(torch.uint8)


def _has_kernel(x: Tensor) -> bool:
    is_plain = type(x) in (Tensor, nn.Parameter) and x.dtype is torch.float32 and x.is_cpu
    return is_plain and not runs_simulation() and is_plainly_eager()


def from_numbers(numbers: Tensor, of: Range, dtype: torch.dtype) -> Tensor:
    """Return what numbers stand for."""
    wide = torch.promote_types(dtype, torch.float32)
    if numbers.dtype is torch.uint8 and wide is torch.float32 and exports_pattern(numbers):
        return dequantized_by_pattern(numbers, of.scale, of.zero_point).to(dtype)
    return ((numbers.to(wide) - of.zero_point) * of.scale).to(dtype)

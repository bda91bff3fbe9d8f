"""oneDNN's kernels for activations and weights of 8 bits, which PyTorch documents nowhere, all in one place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["Result", "convolution", "convolution_weight", "linear", "linear_weight", "why_no_static_int8"]

_OPERATORS: Any = cast("Any", torch.ops).onednn

Result = tuple[float, int, torch.dtype, str]
"""What a kernel returns: scale and zero point of the numbers (1.0 and 0 of floats), type, and the activation behind."""


@cache
def why_no_static_int8() -> str:
    """Return why sums of products of 8 bits cannot be computed exactly here, or ""."""
    if not torch.backends.mkldnn.is_available() or not hasattr(_OPERATORS, "qlinear_pointwise"):
        return "this build of PyTorch has no oneDNN, whose kernels it needs"
    largest = torch.full((2, 64), 255, dtype=torch.uint8)
    packed = linear_weight(torch.full((16, 64), 127, dtype=torch.int8), torch.ones(16), None)
    found = linear(largest, 1.0, 0, packed, (1.0, 0, torch.float32, "none"))
    return "" if bool((found == 64 * 255 * 127).all()) else "this CPU has no VNNI, without which sums overflow"


def linear_weight(values: Tensor, scales: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """Return a linear's weight, [outputs, inputs] of int8, with its scales and bias, as the kernel reads them."""
    return (_OPERATORS.qlinear_prepack(values, None), *_per_output(values, scales, bias))


def linear(numbers: Tensor, scale: float, zero_point: int, weight: tuple[Any, ...], result: Result) -> Tensor:
    """Return the product of activations, [..., inputs] of uint8, and a weight."""
    *form, activation = result
    return _OPERATORS.qlinear_pointwise(numbers, scale, zero_point, *weight, *form, activation, [], "")


def convolution_weight(
    values: Tensor, scales: Tensor, bias: Tensor | None, scale: float, zero_point: int, geometry: Sequence[Any]
) -> tuple[Any, ...]:
    """Return a convolution's weight, [outputs, inputs / groups, ...] of int8, with its scales and bias.

    Args:
        values, scales, bias: of the convolution.
        scale, zero_point: of the activations.
        geometry: stride, padding and dilation, a list each, and the groups.
    """
    per_output = _per_output(values, scales, bias)
    return (_OPERATORS.qconv_prepack(values, per_output[0], scale, zero_point, *geometry, None), *per_output)


def convolution(
    numbers: Tensor, scale: float, zero_point: int, weight: tuple[Any, ...], geometry: Sequence[Any], result: Result
) -> Tensor:
    """Return the convolution of activations, [rows, inputs, ...] of uint8; it lies in memory with the channels last."""
    *form, activation = result
    return _OPERATORS.qconv_pointwise(numbers, scale, zero_point, *weight, *geometry, *form, activation, [], "")


def _per_output(values: Tensor, scales: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return scales and zero points of a weight, one for each output, and the bias in float32."""
    wide = scales.detach().float().expand(len(values)).contiguous()
    return wide, torch.zeros(len(values), dtype=torch.long), None if bias is None else bias.detach().float()

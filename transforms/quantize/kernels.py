"""Whether the kernels of this machine compute what they stand for."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat_quantized import needs_reduced_range
from ...layers.quantized import Int8DynamicLinear, QuantizedLinear
from ...passes.state import quantized

__all__ = ["kernel_problem", "quantized_activations"]

_ROWS = 5
_ROUNDING = 2.0**-6
"""What scales, activations and results in bfloat16 may make of the largest result; sums of integers are exact."""


@cache
def kernel_problem(kind: type[QuantizedLinear], outputs: int, inputs: int, group: int) -> str:
    """Return in what a kernel differs from its simulation in floating point, or "".

    The two are compared on random numbers: of one shape a kernel does the same with all of them.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.no_grad():
        weight = torch.randn(outputs, inputs, generator=generator)
        x = torch.randn(_ROWS, inputs, generator=generator)
        layer = kind(*quantized(weight, kind.form, group), None, torch.float32)
        expected, allowed = _simulated(layer, x)
        error = float((layer.kernel(x) - expected).abs().max())
    return "" if error <= allowed else f"the kernel for {inputs} to {outputs} is off by {error:.3g}, not {allowed:.3g}"


def _simulated(layer: QuantizedLinear, x: Tensor) -> tuple[Tensor, float]:
    """Return what a layer stands for, and what rounding may do to it."""
    weight = layer.weight
    if not isinstance(layer, Int8DynamicLinear):
        expected = F.linear(x.bfloat16().float(), weight)
        return expected, _ROUNDING * float(expected.abs().max())
    rounded, step = quantized_activations(x)
    # An activation in the middle between two steps may be rounded to either.
    return F.linear(rounded, weight), 2 * step * float(weight.abs().max())


def quantized_activations(x: Tensor) -> tuple[Tensor, float]:
    """Return activations quantized to 8 bits with one scale and zero point, in their own type, and the scale."""
    steps = 127 if needs_reduced_range() else 255
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = (high - low) / steps or 1.0
    zero = round(-low / scale)
    return ((x / scale).round() + zero).clamp(0, steps).sub(zero) * scale, scale

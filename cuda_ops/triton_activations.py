"""The activations of fused kernels, by a number that is fixed when a kernel is compiled."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["CODES", "activated", "activation_gradient"]

CODES = {
    "relu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "silu": 3,
    "sigmoid": 4,
    "tanh": 5,
    "sigmoid_by_result": 6,
    "tanh_by_result": 7,
}


@triton.jit
def _tanh(z):
    """Return the hyperbolic tangent, which Triton's language itself lacks."""
    small = tl.exp(-2 * tl.abs(z))
    return tl.where(z < 0, -1.0, 1.0) * (1 - small) / (1 + small)


@triton.jit
def activated(z, CODE: tl.constexpr):
    """Return the activation of a float32 block."""
    if CODE == 0:
        return tl.where(z < 0, 0.0, z)
    elif CODE == 1:
        return z * 0.5 * (1 + tl.erf(z * 0.7071067811865476))
    elif CODE == 2:
        return z * 0.5 * (1 + _tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)))
    elif CODE == 3:
        return z * tl.sigmoid(z)
    elif CODE == 4:
        return tl.sigmoid(z)
    else:
        return _tanh(z)


@triton.jit
def activation_gradient(z, CODE: tl.constexpr):
    """Return the derivative of the activation; of one by its result, `z` is that."""
    if CODE == 0:
        return tl.where(z > 0, 1.0, 0.0)
    elif CODE == 1:
        return 0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif CODE == 2:
        t = _tanh(0.7978845608028654 * (z + 0.044715 * z * z * z))
        return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * z * z)
    elif CODE == 3:
        s = tl.sigmoid(z)
        return s * (1 + z * (1 - s))
    elif CODE == 4:
        s = tl.sigmoid(z)
        return s * (1 - s)
    elif CODE == 6:
        return z * (1 - z)
    elif CODE == 7:
        return 1 - z * z
    else:
        t = _tanh(z)
        return 1 - t * t

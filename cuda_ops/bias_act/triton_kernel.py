"""The kernels of `bias_act` and its gradient: each program takes a run of neighbouring elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_activations import CODES, activated, activation_gradient
from ..triton_philox import uniform

__all__ = ["bias_act", "bias_act_backward"]

_BLOCKS = 128
"""Of eight elements, which one counter of the random numbers is enough for."""


@triton.jit
def _bias_act(
    x, bias, other, key, out, count, features, dropout, scale,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_KEY: tl.constexpr, BACKWARD: tl.constexpr,
    CODE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute the result, `other` being the residual, or the gradient of `x`, `other` being that of the result."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    at = first * 8 + tl.arange(0, BLOCKS * 8)
    inside = at < count
    z = tl.load(x + at, inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + at % features, inside, other=0.0).to(tl.float32)
    result = activation_gradient(z, CODE) if BACKWARD else activated(z, CODE)
    if HAS_KEY:
        k0 = tl.load(key).to(tl.uint64, bitcast=True)
        k1 = tl.load(key + 1).to(tl.uint64, bitcast=True)
        result *= tl.where(uniform(first + tl.arange(0, BLOCKS) + 1, k0, k1) >= dropout, scale, 0.0)
    if BACKWARD:
        result *= tl.load(other + at, inside, other=0.0).to(tl.float32)
    elif HAS_RESIDUAL:
        result += tl.load(other + at, inside, other=0.0).to(tl.float32)
    tl.store(out + at, result, inside)


def _launch(
    x: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    key: Tensor | None,
    activation: str,
    dropout: float,
    backward: bool,
) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _bias_act[triton.cdiv(x.numel(), _BLOCKS * 8),](
            x,
            x if bias is None else bias.contiguous(),
            x if other is None else other.contiguous(),
            x if key is None else key.to(x.device),
            out,
            x.numel(),
            x.shape[-1] if x.dim() else 1,
            float(dropout),
            1 / (1 - dropout) if dropout < 1 else 0.0,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=other is not None,
            HAS_KEY=key is not None,
            BACKWARD=backward,
            CODE=CODES[activation],
            BLOCKS=_BLOCKS,
        )
    return out


def bias_act(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, key: Tensor | None, activation: str, dropout: float
) -> Tensor:
    """Return `dropout(activation(x + bias)) + residual`."""
    return _launch(x, bias, residual, key, activation, dropout, backward=False)


def bias_act_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, key: Tensor | None, activation: str, dropout: float
) -> Tensor:
    """Return the gradient of `x`."""
    return _launch(x, bias, grad, key, activation, dropout, backward=True)

"""The kernels of gated activations and their gradient, element by element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_activations import CODES, activated, activation_gradient

__all__ = ["gated", "gated_backward"]

_BLOCK = 1024


@triton.jit
def _gated(gate, value, out, count, CODE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    z = tl.load(gate + at, inside, other=0.0).to(tl.float32)
    tl.store(out + at, activated(z, CODE) * tl.load(value + at, inside, other=0.0).to(tl.float32), inside)


@triton.jit
def _gated_backward(grad, gate, value, of_gate, of_value, count, CODE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(grad + at, inside, other=0.0).to(tl.float32)
    z = tl.load(gate + at, inside, other=0.0).to(tl.float32)
    v = tl.load(value + at, inside, other=0.0).to(tl.float32)
    tl.store(of_gate + at, g * v * activation_gradient(z, CODE), inside)
    tl.store(of_value + at, g * activated(z, CODE), inside)


def gated(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    """Return the activated gate times the value."""
    gate, value = gate.contiguous(), value.contiguous()
    out = torch.empty_like(gate)
    if out.numel():
        _gated[triton.cdiv(out.numel(), _BLOCK),](gate, value, out, out.numel(), CODE=CODES[activation], BLOCK=_BLOCK)
    return out


def gated_backward(grad: Tensor, gate: Tensor, value: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of the gate and of the value."""
    grad, gate, value = grad.contiguous(), gate.contiguous(), value.contiguous()
    of_gate, of_value = torch.empty_like(gate), torch.empty_like(gate)
    if gate.numel():
        _gated_backward[triton.cdiv(gate.numel(), _BLOCK),](
            grad, gate, value, of_gate, of_value, gate.numel(), CODE=CODES[activation], BLOCK=_BLOCK
        )
    return of_gate, of_value

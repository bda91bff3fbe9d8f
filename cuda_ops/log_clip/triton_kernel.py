"""The kernels of `log_clip` and its gradient, element by element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["log_clip", "log_clip_backward"]

_BLOCK = 1024


@triton.jit
def _log_clip(x, out, minimum, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, inside, other=1.0).to(tl.float32)
    clipped = tl.where(value < minimum, minimum, value)  # which keeps nan
    tl.store(out + at, tl.log(clipped), inside)


@triton.jit
def _log_clip_backward(grad, x, out, minimum, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, inside, other=1.0).to(tl.float32)
    clipped = tl.where(value < minimum, minimum, value)
    tl.store(out + at, tl.load(grad + at, inside, other=0.0).to(tl.float32) / clipped, inside)


def log_clip(x: Tensor, minimum: float) -> Tensor:
    """Return `log(max(x, minimum))`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        _log_clip[triton.cdiv(out.numel(), _BLOCK),](x, out, minimum, out.numel(), BLOCK=_BLOCK)
    return out


def log_clip_backward(grad: Tensor, x: Tensor, minimum: float) -> Tensor:
    """Return `grad / max(x, minimum)`."""
    grad, x = (operand.contiguous() for operand in torch.broadcast_tensors(grad, x))
    out = torch.empty_like(x)
    if out.numel():
        _log_clip_backward[triton.cdiv(out.numel(), _BLOCK),](grad, x, out, minimum, out.numel(), BLOCK=_BLOCK)
    return out

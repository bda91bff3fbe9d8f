"""The kernel of `rotary_embedding`: a program takes one row; the tables are read where they lie, not spread out."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .definition import rotary_reference

__all__ = ["rotary_embedding"]


@triton.jit
def _rotary_embedding(
    x, cos, sin, out, inner, middle, half, cos0, cos1, cos2, sin0, sin1, sin2,
    INVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i0, i1, i2 = row // (middle * inner), row // inner % middle, row % inner
    c = cos + i0 * cos0 + i1 * cos1 + i2 * cos2
    s = sin + i0 * sin0 + i1 * sin1 + i2 * sin2
    at = tl.arange(0, BLOCK)
    inside = at < half
    x1 = tl.load(x + row * 2 * half + at, inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + row * 2 * half + half + at, inside, other=0.0).to(tl.float32)
    c1 = tl.load(c + at, inside, other=0.0).to(tl.float32)
    c2 = tl.load(c + half + at, inside, other=0.0).to(tl.float32)
    s1 = tl.load(s + at, inside, other=0.0).to(tl.float32)
    s2 = tl.load(s + half + at, inside, other=0.0).to(tl.float32)
    y1 = x1 * c1 + x2 * s2 if INVERSE else x1 * c1 - x2 * s1
    y2 = x2 * c2 - x1 * s1 if INVERSE else x2 * c2 + x1 * s2
    tl.store(out + row * 2 * half + at, y1, inside)
    tl.store(out + row * 2 * half + half + at, y2, inside)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Return `x` turned by the angles, or back."""
    if x.shape[-1] % 2:
        return rotary_reference(x, cos, sin, inverse)
    x = x.contiguous()
    out = torch.empty_like(x)
    if not x.numel():
        return out
    shape = (math.prod(x.shape[:-3]), *[1] * (3 - x.dim()), *x.shape[-3:])
    shape = shape if x.dim() > 2 else (1, *shape[1:])
    cos, sin = (_spread(table, x.shape, shape) for table in (cos, sin))
    half = x.shape[-1] // 2
    _rotary_embedding[x.numel() // x.shape[-1],](
        x,
        cos,
        sin,
        out,
        shape[2],
        shape[1],
        half,
        *cos.stride()[:3],
        *sin.stride()[:3],
        INVERSE=inverse,
        BLOCK=triton.next_power_of_2(half),
    )
    return out


def _spread(table: Tensor, full: torch.Size, shape: tuple[int, ...]) -> Tensor:
    """Return a table as four dimensions; those that it is the same along have a stride of zero."""
    spread = table.expand(full).reshape(shape)
    return spread if spread.stride(-1) == 1 else spread.contiguous()

"""The kernel of `bernoulli_sigmoid`: each program draws blocks of four words, eight elements each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_philox import uniform

__all__ = ["bernoulli_sigmoid"]

_BLOCKS = 128


@triton.jit
def _bernoulli_sigmoid(
    x, bias, key, probability, sample, count, features, HAS_BIAS: tl.constexpr, BLOCKS: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    k0 = tl.load(key).to(tl.uint64, bitcast=True)
    k1 = tl.load(key + 1).to(tl.uint64, bitcast=True)
    drawn = uniform(first + tl.arange(0, BLOCKS) + 1, k0, k1)
    at = first * 8 + tl.arange(0, BLOCKS * 8)
    inside = at < count
    logits = tl.load(x + at, inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        logits += tl.load(bias + at % features, inside, other=0.0).to(tl.float32)
    p = 1 / (1 + tl.exp(-logits))
    tl.store(probability + at, p, inside)
    tl.store(sample + at, (drawn < p).to(tl.float32), inside)


def bernoulli_sigmoid(x: Tensor, bias: Tensor | None, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability and the sample; where both are close, the last bit of `exp` may decide otherwise."""
    x = x.contiguous()
    probability, sample = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        _bernoulli_sigmoid[triton.cdiv(x.numel(), _BLOCKS * 8),](
            x,
            x if bias is None else bias.contiguous(),
            key.to(x.device),
            probability,
            sample,
            x.numel(),
            x.shape[-1] if x.dim() else 1,
            HAS_BIAS=bias is not None,
            BLOCKS=_BLOCKS,
        )
    return probability, sample

"""The kernel of `bernoulli_sigmoid`: each program draws blocks of four words, eight elements each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["bernoulli_sigmoid"]

_BLOCKS = 128
_M0, _M1 = tl.constexpr(0xD2E7470EE14C6C93), tl.constexpr(0xCA5A826395121157)
_W0, _W1 = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBB67AE8584CAA73B)
"""The multipliers and the steps of the key, Salmon et al. 2011, table 2."""


@triton.jit
def _philox(counter, k0, k1):
    """Return four words for each counter, as `philox.py` has them."""
    c0 = counter.to(tl.uint64)
    c1 = tl.zeros_like(c0)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    m0 = tl.full(c0.shape, _M0, tl.uint64)
    m1 = tl.full(c0.shape, _M1, tl.uint64)
    for _ in tl.static_range(10):
        high0, high1 = tl.umulhi(m0, c0), tl.umulhi(m1, c2)
        low0, low1 = m0 * c0, m1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += tl.full((), _W0, tl.uint64)
        k1 += tl.full((), _W1, tl.uint64)
    return c0, c1, c2, c3


@triton.jit
def _uniform(counter, k0, k1):
    """Return eight float32 numbers in [0, 1) for each counter, one after the other."""
    w0, w1, w2, w3 = _philox(counter, k0, k1)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    halves = tl.interleave(words.to(tl.uint32), (words >> 32).to(tl.uint32))
    return (halves.to(tl.int32, bitcast=True) >> 8).to(tl.float32) * 5.9604644775390625e-08 + 0.5  # times 2**-24


@triton.jit
def _bernoulli_sigmoid(
    x, bias, key, probability, sample, count, features, HAS_BIAS: tl.constexpr, BLOCKS: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    k0 = tl.load(key).to(tl.uint64, bitcast=True)
    k1 = tl.load(key + 1).to(tl.uint64, bitcast=True)
    uniform = _uniform(first + tl.arange(0, BLOCKS) + 1, k0, k1)
    at = first * 8 + tl.arange(0, BLOCKS * 8)
    inside = at < count
    logits = tl.load(x + at, inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        logits += tl.load(bias + at % features, inside, other=0.0).to(tl.float32)
    p = 1 / (1 + tl.exp(-logits))
    tl.store(probability + at, p, inside)
    tl.store(sample + at, (uniform < p).to(tl.float32), inside)


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

"""Random numbers from a counter in kernels: what `philox.py` gives, bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["uniform"]

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
def uniform(counter, k0, k1):
    """Return eight float32 numbers in [0, 1) for each counter, one after the other."""
    w0, w1, w2, w3 = _philox(counter, k0, k1)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    halves = tl.interleave(words.to(tl.uint32), (words >> 32).to(tl.uint32))
    return (halves.to(tl.int32, bitcast=True) >> 8).to(tl.float32) * 5.9604644775390625e-08 + 0.5  # times 2**-24

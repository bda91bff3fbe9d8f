"""Attention by torch's operator, right where there are few keys, too."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["hides_later", "scaled_dot_product_attention"]

_FEW_KEYS = 16
"""So many scores of a row are one vector of the widest kernel (AVX-512, float32)."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return what torch's operator of this name gives, but NaN for a query that holds NaN, however few keys there are.

    Without a mask torch's kernel for CPUs (`_mul_reduce_max_fusion_kernel` in FlashAttentionKernel.cpp, torch 2.13)
    finds the largest score of what is left of a row behind whole vectors by `std::max`, which passes over NaN. A row
    of fewer scores than a vector has then no largest one, counts as one that may attend to nothing, and gives zeros.
    So where keys are few, attention is computed as it is written, which takes no longer at that size.

    An exported program calls the operator alone: which keys are few is not known there.

    Args:
        query, key, value: [..., positions, features].
        attn_mask, dropout_p, is_causal, scale: as torch's operator takes them.
    """
    if attn_mask is None and not _is_traced() and key.size(-2) < _FEW_KEYS and key.is_cpu:
        return _written_out(query, key, value, dropout_p, is_causal, scale)
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def hides_later(queries: int, keys: int) -> bool:
    """Say whether a causal mask that is square hides anything: of one query, it hides no keys that came before.

    Raises:
        ValueError: if there are several queries, and more keys or fewer: such a mask does not fit.
    """
    if queries not in (1, keys):
        raise ValueError(f"a square causal mask does not fit {queries} queries and {keys} keys")
    return queries == keys


def _is_traced() -> bool:
    return torch.compiler.is_exporting() or cast("Any", torch.jit).is_tracing()


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return F.dropout(scores.softmax(-1), dropout_p) @ value

"""Attention by torch's operator, right where there are few keys and under every derivative, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat import autocast_dtype, is_autocast, is_transformed, wants_gradients
from ..compat.operators import flash_on_cpu_arguments, is_flash_on_cpu

__all__ = ["hidden_scores", "hides_later", "scaled_dot_product_attention"]

_FEW_KEYS = 16
"""So many scores of a row are one vector of the widest kernel (AVX-512, float32)."""

_kernels = cast("Any", torch.ops.aten)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return what torch's operator of this name gives, where attention that is written out gives more, too.

    Where keys are fewer than a vector, torch's CPU kernel (FlashAttentionKernel.cpp, torch 2.13) passes over NaN, gives
    zeros for such rows, has no tangents or second gradients, and misreads masks of another dtype than the queries'.
    There attention is computed as it is written. An exported program calls the operator alone.
    """
    if not torch.compiler.is_compiling() and not _is_traced():
        if is_transformed() or (attn_mask is not None and _is_wider(attn_mask, query)):
            return _written_out(query, key, value, attn_mask, dropout_p, is_causal, scale)
        attn_mask = None if attn_mask is None else _fitting(attn_mask, query)
        if wants_gradients(query, key, value) and _has_own_gradient(query, key, value, attn_mask, dropout_p, is_causal):
            return _with_second_gradients(query, key, value, attn_mask, is_causal, scale)
    if attn_mask is None and not _is_traced() and key.size(-2) < _FEW_KEYS and key.is_cpu:
        return _written_out(query, key, value, None, dropout_p, is_causal, scale)
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def hidden_scores(hidden: Tensor, number: float, query: Tensor) -> Tensor:
    """Return what is added to scores so that some are `hidden`: the number, or the lowest that queries can hold."""
    lowest = number if number == -math.inf else max(number, torch.finfo(query.dtype).min)
    return torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, lowest)


def hides_later(queries: int, keys: int) -> bool:
    """Say whether a causal mask that is square hides anything: of one query, it hides no keys that came before.
    Raises a ValueError where there are several queries, and more keys or fewer.
    """
    if queries not in (1, keys):
        raise ValueError(f"a square causal mask does not fit {queries} queries and {keys} keys")
    return queries == keys


def _is_traced() -> bool:
    return torch.compiler.is_exporting() or cast("Any", torch.jit).is_tracing()


def _is_wider(mask: Tensor, query: Tensor) -> bool:
    """Say whether scores take the dtype of the mask; under autocast torch hands both over in one."""
    if mask.dtype is query.dtype or mask.dtype is torch.bool or is_autocast(query):
        return False
    return torch.promote_types(mask.dtype, query.dtype) is not query.dtype


def _fitting(mask: Tensor, query: Tensor) -> Tensor:
    """Return a mask of the dtype in which the operator takes the queries; what is finite stays so."""
    dtype = autocast_dtype(query)
    if mask.dtype is dtype or mask.dtype is torch.bool:
        return mask
    lowest = torch.finfo(dtype).min
    too_low = (mask < lowest) & (mask > -math.inf)
    return mask.to(dtype).masked_fill(too_low, lowest)


def _has_own_gradient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool
) -> bool:
    """Say whether torch takes the kernel whose gradient has none; few keys are written out."""
    if not query.is_cpu or dropout_p or is_autocast(query) or (mask is None and key.size(-2) < _FEW_KEYS):
        return False
    if mask is not None and (mask.dtype is torch.bool or mask.requires_grad):
        return False
    return is_flash_on_cpu(query, key, value, mask, is_causal)


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if mask is not None:
        is_flags = mask.dtype is torch.bool
        scores = scores.masked_fill(mask.logical_not(), -torch.inf) if is_flags else scores + mask
    return F.dropout(scores.softmax(-1), dropout_p).to(value.dtype) @ value


def _with_second_gradients(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Attend by torch's kernel for CPUs; where gradients of its gradients are wanted, by what is written out."""
    found: Tensor = _kernels._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )[0]
    if found.grad_fn is not None:
        found.grad_fn.register_hook(_differentiable)
    return found


def _differentiable(computed: Sequence[Tensor | None], gradients: Sequence[Tensor]) -> Any:
    """Return the kernel's gradients as differentiable operations; None, which keeps them, if none ask."""
    if not torch.is_grad_enabled():
        return None
    given, mask, is_causal, scale = flash_on_cpu_arguments()
    apart = [each.view_as(each) for each in given]  # one tensor may have been given as several
    again = _written_out(apart[0], apart[1], apart[2], mask, 0.0, is_causal, scale)
    wanted = [each for each in apart if each.requires_grad]
    of_wanted = iter(torch.autograd.grad(again, wanted, gradients[0], create_graph=True))
    found = [next(of_wanted) if each.requires_grad else None for each in apart]
    return (*found, *(None for _ in computed[len(found) :]))

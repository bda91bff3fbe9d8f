"""Multi-head attention that runs with any number of heads, and any width of its inputs and of its result."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ResizedAttention"]


class ResizedAttention(nn.MultiheadAttention):
    """Attend as `nn.MultiheadAttention` with heads of `head_dim`, other sizes as the weights have them."""

    head_dim: int

    @classmethod
    def of(cls, module: nn.MultiheadAttention) -> ResizedAttention:
        """Return a module with the tensors and attributes of `module`, or raise a ValueError if it adds keys."""
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError("an attention with bias_k, bias_v or add_zero_attn cannot be resized")
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        for name, value in vars(module).items():
            made.__dict__[name] = value.copy() if isinstance(value, dict) else value
        made._qkv_same_embed_dim = False
        return made

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments and results are those of `nn.MultiheadAttention`."""
        batched = query.dim() == 3
        if not batched:
            query, key, value = (each.unsqueeze(0 if self.batch_first else 1) for each in (query, key, value))
        if not self.batch_first:
            query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        q, k, v = self._heads(query, key, value)
        mask = _mask(q, k, key_padding_mask, attn_mask, is_causal=is_causal and attn_mask is None)
        out, weights = self._attended(q, k, v, mask, need_weights=need_weights)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if not self.batch_first:
            out = out.transpose(0, 1)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            out = out.squeeze(0 if self.batch_first else 1)
            weights = None if weights is None else weights.squeeze(0)
        return out, weights

    def _heads(self, *inputs: Tensor) -> list[Tensor]:
        """Project the inputs, and divide them into heads: [batch, heads, length, width]."""
        packed: Tensor | None = cast("Tensor | None", self.in_proj_weight)
        bias: Tensor | None = cast("Tensor | None", self.in_proj_bias)
        own = [cast("Tensor", getattr(self, f"{name}_proj_weight")) for name in "qkv"]
        weights = own if packed is None else list(packed.chunk(3))
        biases: list[Tensor | None] = [None] * 3 if bias is None else list(bias.chunk(3))
        made = [F.linear(x, weight, each) for x, weight, each in zip(inputs, weights, biases, strict=True)]
        return [self._divided(each) for each in made]

    def _divided(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return F.scaled_dot_product_attention(query, key, value, mask, dropout), None
        scores = query @ key.transpose(-1, -2) * float(self.head_dim) ** -0.5
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, dropout)
        return weights @ value, weights


def _mask(
    query: Tensor, key: Tensor, padding: Tensor | None, attention: Tensor | None, *, is_causal: bool
) -> Tensor | None:
    """Return what is added to the scores: [batch, heads, length, length], or one that broadcasts to it."""
    if is_causal:
        attention = (
            torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril().logical_not()
        )
    found: Tensor | None = None
    if attention is not None:
        found = _added(attention, query)
        found = found.view(query.shape[0], -1, *found.shape[1:]) if found.dim() == 3 else found
    if padding is not None:
        rows = _added(padding if padding.dim() == 2 else padding.unsqueeze(0), query)[:, None, None, :]
        found = rows if found is None else found + rows
    return found


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as numbers that are added."""
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))

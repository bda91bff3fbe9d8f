"""Attention of any width beside torch's own, where both can run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxopt.layers.resized import ResizedAttention

_CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
_PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": _CAUSAL},
        {"attn_mask": _CAUSAL, "is_causal": True, "need_weights": False},
        {"key_padding_mask": _PADDING},
        {"key_padding_mask": _PADDING, "attn_mask": _CAUSAL.expand(8, 5, 5), "need_weights": False},
    ],
)
def test_it_computes_what_torch_computes(given: dict[str, Any], batch_first: bool) -> None:
    theirs = nn.MultiheadAttention(16, 4, batch_first=batch_first).double().eval()
    given = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in given.items()}
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1)
    for mine, expected in zip(ResizedAttention.of(theirs)(x, x, x, **given), theirs(x, x, x, **given), strict=True):
        assert (mine is None) == (expected is None)
        assert mine is None or torch.allclose(mine, expected, rtol=0, atol=1e-12)


def test_it_takes_other_widths_of_keys_and_values_and_calls_without_a_batch() -> None:
    theirs = nn.MultiheadAttention(16, 4, kdim=6, vdim=7, bias=False, batch_first=True).double()
    query, key, value = (torch.randn(3, n, dtype=torch.float64) for n in (16, 6, 7))
    mine, weights = ResizedAttention.of(theirs)(query, key, value)
    expected, their_weights = theirs(query, key, value)
    assert torch.allclose(mine, expected) and torch.allclose(weights, their_weights)


def test_it_shares_the_tensors_and_is_of_the_kind_that_it_replaces() -> None:
    theirs = nn.MultiheadAttention(16, 4)
    mine = ResizedAttention.of(theirs)
    assert isinstance(mine, nn.MultiheadAttention)
    assert [(n, id(p)) for n, p in mine.named_parameters()] == [(n, id(p)) for n, p in theirs.named_parameters()]


def test_it_refuses_keys_of_its_own() -> None:
    with pytest.raises(ValueError, match="add_zero_attn cannot be resized"):
        ResizedAttention.of(nn.MultiheadAttention(16, 4, add_zero_attn=True))

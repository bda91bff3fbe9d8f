"""Floating-point operations of operators: as torch counts them, attention on a CPU included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt.compat import DispatchMode
from fxopt.operators import counted_flops, flops_of


class Summed(DispatchMode):
    """Add up what each operator takes."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += flops_of(func, args, kwargs or {}, result)
        return result


def attention(heads: int = 4) -> Tensor:
    query, key = torch.randn(2, 4, 7, 8), torch.randn(2, heads, 7, 8)
    return F.scaled_dot_product_attention(query, key, key, enable_gqa=heads < 4)


CALLS = {
    "mm": (lambda: torch.randn(3, 4) @ torch.randn(4, 5), 2 * 3 * 4 * 5),
    "attention": (attention, 2 * (2 * 2 * 4 * 7 * 7 * 8)),
    "grouped queries": (lambda: attention(2), 2 * (2 * 2 * 4 * 7 * 7 * 8)),
    "convolution": (lambda: F.conv1d(torch.randn(1, 2, 5), torch.randn(3, 2, 1)), 2 * 5 * 2 * 3),
    "sin": (lambda: torch.randn(3).sin(), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_both_ways_of_counting_agree(name: str) -> None:
    call, expected = CALLS[name]
    with counted_flops() as counter:
        call()
    with Summed() as summed:
        call()
    assert counter.get_total_flops() == summed.total == expected

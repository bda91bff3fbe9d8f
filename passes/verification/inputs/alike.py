"""Derive calls whose rows all hold the same direction: what picks by data then picks the same for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ....runtime.values import Arguments, map_tensors
from .noise import stands_for_infinity

__all__ = ["alike", "permuted"]

_SPREAD = 0.5
"""Rows are scaled by up to this much up and down: a router without a bias picks the same, and rows still differ."""


def alike(arguments: Arguments) -> Iterator[Arguments]:
    """Yield calls in which every row is a multiple of one row, of either sign; of integers, that row itself.

    In a mixture all rows then go to the same experts, which are full, and all others are empty.
    """
    for quarter in range(4):
        sign = (1, -1)[quarter % 2]
        yield map_tensors(lambda x, quarter=quarter, sign=sign: _multiples(x, quarter, sign), arguments)


def permuted(arguments: Arguments) -> Arguments:
    """Return the call with the rows of each sequence in the opposite order."""
    return map_tensors(lambda x: x.flip(-2) if _has_rows(x) else x, arguments)


def _has_rows(tensor: Tensor) -> bool:
    is_number = tensor.dtype is not torch.bool and not tensor.is_complex()
    return is_number and tensor.ndim > 1 and tensor.shape[-2] > 1 and not stands_for_infinity(tensor)


def _multiples(tensor: Tensor, quarter: int, sign: int) -> Tensor:
    if not _has_rows(tensor):
        return tensor
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    same = rows[quarter * (len(rows) - 1) // 3].expand_as(rows)
    if tensor.is_floating_point():
        factors = torch.linspace(1 - _SPREAD, 1 + _SPREAD, len(rows), device=tensor.device).to(tensor.dtype)
        same = sign * factors[:, None] * same
    return same.reshape(tensor.shape).clone()

"""Max pooling of numbers: torch's own is slow for them, and wrong for large images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["max_pool_numbers"]


def max_pool_numbers(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Return the largest number in each window of x [rows, channels, height, width], uint8, or floats as torch does."""
    if x.dtype is not torch.uint8:
        return F.max_pool2d(x, list(kernel), list(stride), list(padding))
    if any(padding):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    for dim in (3, 2):
        x = _largest_along(x, dim, kernel[dim - 2], stride[dim - 2])
    return x


def _largest_along(x: Tensor, dim: int, kernel: int, stride: int) -> Tensor:
    count = (x.shape[dim] - kernel) // stride + 1
    span = (count - 1) * stride + 1
    everything = [slice(None)] * 4
    return reduce(
        torch.maximum,
        (x[(*everything[:dim], slice(start, start + span, stride), *everything[dim + 1 :])] for start in range(kernel)),
    )

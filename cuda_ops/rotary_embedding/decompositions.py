"""How rotary positions in the layout of halves are written without `rotary_embedding` of fxopt."""

from __future__ import annotations

import torch
from torch import Tensor, ops

from ...errors import UsageError
from ..definition import Kernel

__all__ = ["KERNELS"]


def _by_shape(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _by_size(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., : x.size(-1) // 2], x[..., x.size(-1) // 2 :]
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _by_number(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def _by_chunk(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    halves = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-halves[1], halves[0]), dim=-1) * sin


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, half: int | None = None) -> Tensor:
    if half is not None and isinstance(x, Tensor) and x.shape[-1] != 2 * half:
        raise UsageError(f"it turns feature {half}, which is not in the middle of {x.shape[-1]}")
    return ops.fxopt.rotary_embedding.default(x, cos, sin)


KERNELS = (Kernel("rotary_embedding", _rotary, (_by_shape, _by_size, _by_number, _by_chunk)),)

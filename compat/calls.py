"""What the functions of torch.nn call: private names of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

__all__ = ["DIRECT"]

_NATIVE: Any = cast("Any", torch)._C._nn


def _layer_norm(
    x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> tuple[Any, ...]:
    return x, normalized_shape, weight, bias, eps


def _batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, ...] | None:
    if training:
        return None
    return x, weight, bias, running_mean, running_var, False, momentum, eps, True


def _embedding(
    x: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    _norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[Any, ...] | None:
    if max_norm is not None or (padding_idx is not None and padding_idx < 0):
        return None
    return weight, x, -1 if padding_idx is None else padding_idx, scale_grad_by_freq, sparse


def _activation(x: Any, inplace: bool = False) -> tuple[Any, ...] | None:
    return None if inplace else (x,)


def _one(x: Any) -> tuple[Any, ...]:
    return (x,)


DIRECT: dict[Any, tuple[Any, Callable[..., tuple[Any, ...] | None]]] = {
    F.relu: (torch.relu, _activation),
    F.silu: (_NATIVE.silu, _activation),
    F.sigmoid: (torch.sigmoid, _one),
    F.tanh: (torch.tanh, _one),
    F.layer_norm: (torch.layer_norm, _layer_norm),
    F.batch_norm: (torch.batch_norm, _batch_norm),
    F.embedding: (torch.embedding, _embedding),
}
"""Function of torch.nn.functional -> what it calls in the end, and what it passes on; None where it does more."""

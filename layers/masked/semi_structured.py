"""Linear layers with two of four weights zero, by the kernels for sparse tensor cores: 16-bit floats on CUDA.
Rows come in multiples of 32 and columns in multiples of 64.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...operators import Cache

__all__ = ["forget_packed", "forget_sparse", "packed_weight", "reason_against_sparse", "set_sparse", "sparse_linear"]

_SPARSE = "_fxopt_sparse"
"""In the `__dict__` of a linear layer whose weight is packed: what keeps the packed weight."""

_ROWS, _COLUMNS = 32, 64
"""The kernel's tiles, in 16-bit floats (torch.sparse.to_sparse_semi_structured)."""


def reason_against_sparse(module: nn.Module, weight: Tensor) -> str | None:
    """Return why no kernel computes a layer with this 2:4 weight, or None."""
    if not weight.is_cuda:
        return "there is no sparse kernel for CPUs" if weight.device.type == "cpu" else "it is not on a CUDA device"
    if not isinstance(module, nn.Linear) or weight.dim() != 2:
        return "the sparse kernel is for linear layers"
    if weight.dtype not in (torch.float16, torch.bfloat16):
        return "the sparse kernel takes 16-bit floats"
    if weight.shape[0] % _ROWS or weight.shape[1] % _COLUMNS:
        return f"the sparse kernel takes rows in multiples of {_ROWS} and columns of {_COLUMNS}"
    return None


def set_sparse(module: nn.Module) -> None:
    """Let a linear layer use the kernel in evaluation, where one takes its weight."""
    vars(module)[_SPARSE] = Cache()


def forget_sparse(module: nn.Module) -> None:
    """Let a layer be computed dense again: its zeros are none for good."""
    vars(module).pop(_SPARSE, None)


def forget_packed(module: nn.Module) -> None:
    """Let the packed weight be made anew: an optimizer may write what torch does not count."""
    packing: Cache | None = vars(module).get(_SPARSE)
    if packing is not None:
        packing.forget()


def sparse_linear(module: nn.Module, args: tuple[Any, ...]) -> Tensor | None:
    """Return what a layer gives by the kernel; None in training, with gradients, and where no kernel takes it."""
    packing: Cache | None = vars(module).get(_SPARSE)
    if packing is None or module.training or torch.is_grad_enabled() or len(args) != 1:
        return None
    weight, x = module.weight, args[0]
    if not isinstance(weight, Tensor) or not isinstance(x, Tensor) or reason_against_sparse(module, weight) is not None:
        return None
    if x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
        return None
    return F.linear(x, packing.of(packed_weight, weight), getattr(module, "bias", None))


def packed_weight(weight: Tensor) -> Tensor:
    """Return a 2:4 weight as the kernel takes it."""
    return torch.sparse.to_sparse_semi_structured(weight.detach())

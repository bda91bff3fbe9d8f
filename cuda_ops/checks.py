"""What operators ask of their arguments; each error names the operator and the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compat import is_cast_by_autocast
from ..errors import UsageError

__all__ = ["as_under_autocast", "check_floating", "check_key", "check_one_device", "check_one_dtype", "check_vector"]


def check_floating(operator: str, **tensors: Tensor | None) -> None:
    """Raise a `UsageError` where an operand is no floating-point tensor."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise UsageError(f"{operator}: {name} is {_dtype(tensor)}; pass a floating-point tensor")


def check_one_dtype(operator: str, **tensors: Tensor | None) -> None:
    """Raise a `UsageError` where operands are not floating-point tensors of one dtype."""
    check_floating(operator, **tensors)
    (first, leader), *others = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    for name, tensor in others:
        if tensor.dtype != leader.dtype:
            raise UsageError(f"{operator}: {name} is {_dtype(tensor)}, {first} is {_dtype(leader)}; cast one of them")


def check_one_device(operator: str, **tensors: Tensor | None) -> None:
    """Raise a `UsageError` where operands are on several devices."""
    (first, leader), *others = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    for name, tensor in others:
        if tensor.device != leader.device:
            raise UsageError(f"{operator}: {name} is on {tensor.device}, {first} on {leader.device}; move one of them")


def check_vector(operator: str, x: Tensor, **vectors: Tensor | None) -> None:
    """Raise a `UsageError` where an operand is not one number for each element of the last dimension of `x`."""
    for name, vector in vectors.items():
        if vector is None:
            continue
        if x.dim() == 0:
            raise UsageError(f"{operator}: x has no dimension that {name} could go along")
        if vector.dim() != 1 or vector.shape[0] != x.shape[-1]:
            raise UsageError(f"{operator}: {name} has shape {tuple(vector.shape)}, expected ({x.shape[-1]},)")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_key(operator: str, key: Tensor | None) -> None:
    """Raise a `UsageError` where a key of random numbers is not two int64."""
    if key is not None and (key.dtype != torch.int64 or key.shape != (2,)):
        found = f"{_dtype(key)} of shape {tuple(key.shape)}"
        raise UsageError(f"{operator}: key is {found}; pass two int64: seed and offset")


def as_under_autocast(x: Tensor, other: Tensor) -> Tensor:
    """Return an operand in the dtype of `x` where autocast is on: there, a layer gives another dtype than it holds."""
    return other.to(x.dtype) if is_cast_by_autocast(other) else other

"""What both norms ask of their arguments, and how their results look."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import UsageError
from ..checks import check_one_device, check_one_dtype, check_vector

__all__ = ["check_norm", "empty_sum", "of_scale", "statistic"]


def check_norm(name: str, x: Tensor, residual: Tensor | None, **vectors: Tensor | None) -> None:
    """Raise a `UsageError` where arguments do not fit."""
    check_one_dtype(name, x=x, residual=residual, **vectors)
    check_one_device(name, x=x, residual=residual, **vectors)
    check_vector(name, x, **vectors)
    if x.dim() == 0:
        raise UsageError(f"{name}: x has no dimension to go along")
    if residual is not None and residual.shape != x.shape:
        raise UsageError(f"{name}: residual has shape {tuple(residual.shape)}, expected {tuple(x.shape)}")


def empty_sum(x: Tensor, residual: Tensor | None) -> Tensor:
    """Return where the sum with a residual goes; it is empty where there is none to add."""
    return x.new_empty(0 if residual is None else x.shape)


def statistic(x: Tensor) -> Tensor:
    """Return where a number for each row goes, in float32 at the least."""
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))


def of_scale(per_element: Tensor, vector: Tensor | None, like: Tensor) -> Tensor:
    """Return the gradient of a vector that all rows share; it is empty where there is none."""
    if vector is None:
        return like.new_empty(0)
    return per_element.sum_to_size(vector.shape).to(vector.dtype, copy=True)

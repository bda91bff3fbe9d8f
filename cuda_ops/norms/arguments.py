"""What both norms ask of their arguments, and how their results look."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...errors import UsageError
from ..checks import check_one_device, check_one_dtype, check_vector

__all__ = ["as_one", "check_norm", "empty_sum", "of_operand", "of_scale", "statistic", "summed"]


def check_norm(name: str, x: Tensor, residual: Tensor | None, **vectors: Tensor | None) -> None:
    """Raise a `UsageError` where arguments do not fit."""
    check_one_device(name, x=x, residual=residual, **vectors)
    try:
        total = summed(x, residual)
    except RuntimeError as error:
        shapes = f"residual has shape {tuple(cast('Tensor', residual).shape)}, x {tuple(x.shape)}"
        raise UsageError(f"{name}: {shapes}; they must broadcast") from error
    check_one_dtype(name, x=total, **vectors)
    check_vector(name, total, **vectors)
    if total.dim() == 0:
        raise UsageError(f"{name}: x has no dimension to go along")


def summed(x: Tensor, residual: Tensor | None) -> Tensor:
    """Return a tensor without values that is like the sum with a residual; `x` itself where that is alike."""
    if residual is None or (residual.shape == x.shape and residual.dtype == x.dtype):
        return x
    shape: torch.Size = cast("Any", torch).broadcast_shapes(x.shape, residual.shape)
    return x.new_empty((), dtype=torch.result_type(x, residual)).expand(shape)


def as_one(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return both in the shape and dtype of their sum, as kernels take them."""
    if residual is None or (residual.shape == x.shape and residual.dtype == x.dtype):
        return x, residual
    like = summed(x, residual)
    return x.to(like.dtype).expand(like.shape), residual.to(like.dtype).expand(like.shape)


def of_operand(of_total: Tensor, operand: tuple[torch.Size, torch.dtype]) -> Tensor:
    """Return the gradient of an operand of a sum, of this shape and dtype, from that of the sum."""
    shape, dtype = operand
    return of_total if of_total.shape == shape and of_total.dtype == dtype else of_total.sum_to_size(shape).to(dtype)


def empty_sum(x: Tensor, residual: Tensor | None) -> Tensor:
    """Return where the sum with a residual goes; it is empty where there is none to add."""
    total = summed(x, residual)
    return total.new_empty(0 if residual is None else total.shape)


def statistic(x: Tensor) -> Tensor:
    """Return where a number for each row goes, in float32 at the least."""
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))


def of_scale(per_element: Tensor, vector: Tensor | None, like: Tensor) -> Tensor:
    """Return the gradient of a vector that all rows share; it is empty where there is none."""
    if vector is None:
        return like.new_empty(0)
    return per_element.sum_to_size(vector.shape).to(vector.dtype, copy=True)

"""Divide a batch into microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...errors import UsageError
from ...runtime.values import map_tensors, tensors_within
from ...tracing.examples import Inputs

__all__ = ["divided", "divided_target", "rows_of"]


def rows_of(call: Inputs) -> int:
    """Return the batch size, the first dimension of the first tensor; UsageError where there is none."""
    tensors = (tensor for tensor in tensors_within((call.args, call.kwargs)) if tensor.ndim)
    first = next(tensors, None)
    if first is None:
        raise UsageError("the batch holds no tensor with rows, so it cannot be divided into microbatches")
    return first.shape[0]


def divided(call: Inputs, count: int) -> list[Inputs]:
    """Return the microbatches of a batch; what has other rows goes to each. UsageError: it does not divide."""
    rows = rows_of(call)
    if rows % count:
        raise UsageError(
            f"a batch of {rows} rows does not divide into {count} microbatches: give a multiple of {count} rows "
            "(drop_last=True in the DataLoader), or another number of microbatches to the pass"
        )
    return [
        Inputs(*_slice(call.args, rows, number, count), **_slice(call.kwargs, rows, number, count))
        for number in range(count)
    ]


def divided_target(target: Any, rows: int, count: int) -> Sequence[Any]:
    """Return the microbatches of a target; UsageError where it has other rows than the batch."""
    for tensor in tensors_within(target):
        if tensor.ndim and tensor.shape[0] != rows:
            raise UsageError(f"the target has {tensor.shape[0]} rows, the batch {rows}; give one row of it for each")
    return [_slice(target, rows, number, count) for number in range(count)]


def _slice(value: Any, rows: int, number: int, count: int) -> Any:
    size = rows // count

    def part(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim and tensor.shape[0] == rows
        return tensor[number * size : (number + 1) * size] if has_rows else tensor

    return map_tensors(part, value)

"""Applying experts to the tokens that chose them, as is fast for their number, without the routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ...compat import autocast_dtype, is_plainly_eager, wants_gradients
from .lowerings import LOWERINGS, Compute, Lowering, Projection, Task

__all__ = ["choose_lowering", "may_look", "mixture", "possible_lowerings"]

_GROUPED = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16
"""Strides are multiples of so many bytes for `grouped_mm`."""

_FEW = 16
"""So many pairs of a token and an expert are few, and as many as there are experts."""

_SMALL = 4 * 2**20
"""Copying so many bytes of weights costs less than a call for each expert."""

_BIG = 2**19
"""Reading so many bytes of an expert that has no tokens costs more than a call for each expert."""

_SHORT = 8
"""So many rows of padding cost less than a product more."""

_FULL, _LONG = 32, 256
"""From so many tokens for every expert, calls cost less than sorting: in float32 without gradients, and otherwise."""


def mixture(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    projections: Sequence[Projection],
    compute: Compute,
    lowering: Lowering | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the weighted sum [tokens, out] of what the experts give that each token of x [tokens, in] chose.
    `indices` [tokens, k] int64 differ in a row; `weights` are [tokens, k]. Lowerings differ by rounding only: shapes,
    dtypes and the busiest expert's load choose one, in traced code shapes alone. The sum has `dtype`, or the outputs'.
    """
    task = Task(x, indices, projections, compute)
    if lowering is None or not may_look(x) or lowering not in possible_lowerings(task):
        lowering = choose_lowering(task)
    return LOWERINGS[lowering](task, weights, dtype)


def possible_lowerings(task: Task) -> list[Lowering]:
    """Return the lowerings that can do a task: what shapes, strides, dtypes and the device allow."""
    if len(task.x) == 0:
        return ["gathered"]
    if not all(projection.is_stacked for projection in task.projections):
        return ["loop"]
    lowerings: list[Lowering] = ["loop", "padded", "blocks", "gathered"]
    if task.indices.shape[1] == task.num_experts:
        lowerings.append("dense")
    return [*lowerings, "grouped"] if _can_group(task) else lowerings


def choose_lowering(task: Task) -> Lowering:
    """Return the lowering to take, by measured rules (docs/layers/mixture_of_experts.md); while tracing by shapes."""
    if not may_look(task.x):
        return "grouped" if task.x.is_cuda and _has_kernel(task) and _can_group(task) else "blocks"
    if not all(projection.is_stacked for projection in task.projections) or len(task.x) == 0:
        return possible_lowerings(task)[0]
    trains, pairs = _trains(task), task.indices.numel()
    if not trains and pairs <= max(_FEW, task.num_experts) and pairs * _size(task) <= _SMALL:
        return "gathered"
    if len(task.x) == 1 and not (trains and pairs >= task.num_experts):
        return "loop"
    if _is_dense(task, trains=trains):
        return "dense"
    can_group = _can_group(task)
    if can_group and (_has_kernel(task) if task.x.is_cuda else autocast_dtype(task.x) == torch.float32):
        return "grouped"
    wastes = not trains and pairs <= 2 * task.num_experts and _size(task) >= _BIG
    if not wastes and task.longest <= 1.5 * pairs / task.num_experts + _SHORT:
        return "padded"
    return "grouped" if can_group else "loop"


def _trains(task: Task) -> bool:
    """Tell whether a backward pass may follow."""
    tensors = (task.x, *(projection.weight for projection in task.projections))
    return wants_gradients(*(cast("Tensor", tensor) for tensor in tensors))


def _is_dense(task: Task, *, trains: bool) -> bool:
    """Tell whether every expert has every token, and those are many, on a CPU."""
    least = _FULL if autocast_dtype(task.x) == torch.float32 and not trains else _LONG
    return task.indices.shape[1] == task.num_experts and len(task.x) >= least and not task.x.is_cuda


def _size(task: Task) -> int:
    """Return the bytes of one expert's weights."""
    weights = (cast("Tensor", projection.weight) for projection in task.projections)
    return sum(weight.shape[1] * weight.shape[2] * weight.itemsize for weight in weights)


def may_look(x: Tensor) -> bool:
    """Tell whether numbers in tensors can be read: nothing is traced, compiled, exported or captured."""
    if torch.compiler.is_compiling() or x.is_meta or not is_plainly_eager(watched=True):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _capability(x: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device)


def _has_kernel(task: Task) -> bool:
    """Tell whether `grouped_mm` is one kernel on this GPU, not a loop."""
    return autocast_dtype(task.x) == torch.bfloat16 and _capability(task.x) >= (9, 0)


def _can_group(task: Task) -> bool:
    """Tell whether `grouped_mm` takes these tensors and, in the backward pass, their gradients."""
    weights, dtype = [projection.stacked()[0] for projection in task.projections], autocast_dtype(task.x)
    if dtype not in _GROUPED or {autocast_dtype(weight) for weight in weights} != {dtype}:
        return False
    if not (task.x.device.type == "cpu" or (task.x.is_cuda and _capability(task.x) >= (8, 0))):
        return False
    values = _ALIGNMENT // dtype.itemsize
    return all(_is_aligned(weight, values) for weight in weights)


def _is_aligned(weight: Tensor, values: int) -> bool:
    """Tell whether widths and strides of the matrices in a stack [experts, in, out] are multiples of `values`."""
    (rows, columns), (down, along) = weight.shape[1:], weight.stride()[1:]
    if rows % values or columns % values or not weight.shape[0]:
        return False
    return (along == 1 and down % values == 0 and down >= columns) or (
        down == 1 and along % values == 0 and along >= rows
    )

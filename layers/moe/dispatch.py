"""Applying experts to the tokens that chose them, in the way that is fast for their number, without the routing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compat import is_plainly_eager
from .ways import WAYS, Compute, Projection, Task, Way

__all__ = ["choose_way", "combine", "mixture", "possible_ways"]

_GROUPED = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16
"""Strides are multiples of so many bytes for `grouped_mm`."""

_FEW = 1
"""Up to so many tokens weights are copied."""

_SHORT = 8
"""So many rows of padding cost less than a product more."""


def mixture(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    projections: Sequence[Projection],
    compute: Compute,
    way: Way | None = None,
) -> Tensor:
    """Return the weighted sum of the outputs of the experts that each token chose.

    The ways differ by rounding only. Without `way`, shapes, dtypes and how many tokens the busiest expert has decide;
    code that is traced, compiled or exported takes one way whatever the data.

    Args:
        x: tokens [tokens, in].
        indices: the experts of each token, which differ from each other [tokens, k], int64.
        weights: what the output of each of them counts [tokens, k].
        projections: the linear layers of all experts, in the order that `compute` wants them.
        compute: what an expert computes: rows and its projections -> rows.
        way: one of `possible_ways`.

    Returns:
        [tokens, out], in the dtype that the experts give.
    """
    task = Task(x, indices, projections, compute)
    return combine(WAYS[way or choose_way(task)](task), weights)


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum [tokens, out] of outputs [tokens, k, out] in their dtype; weights are [tokens, k]."""
    if outputs.shape[1] == 1:
        return (outputs.squeeze(1) * weights).to(outputs.dtype)
    return (outputs * weights.unsqueeze(-1)).sum(1).to(outputs.dtype)


def possible_ways(task: Task) -> list[Way]:
    """Return the ways in which a task can be done: what shapes, strides, dtypes and the device allow."""
    if len(task.x) == 0:
        return ["gathering"]
    if not all(projection.is_stacked for projection in task.projections):
        return ["loop"]
    ways: list[Way] = ["loop", "padding", "blocks", "gathering"]
    return [*ways, "groups"] if _can_group(task) else ways


def choose_way(task: Task) -> Way:
    """Return the way to take, by rules that come from measurements (docs/layers/mixture_of_experts.md).

    Few tokens copy the weights that they need. In float32 on a CPU `grouped_mm` is the fastest with more of them; in 16
    bits, and on GPUs that have no kernel for the dtype, a batched product with padding, where the experts have about as
    many tokens as each other. Where the data are not to be looked at, shapes alone decide.
    """
    if not _may_look(task.x):
        return "groups" if task.x.is_cuda and _has_kernel(task) and _can_group(task) else "blocks"
    ways = possible_ways(task)
    if len(ways) == 1:
        return ways[0]
    if len(task.x) <= _FEW:
        return "gathering"
    if "groups" in ways and (_has_kernel(task) if task.x.is_cuda else _dtype(task.x) == torch.float32):
        return "groups"
    if task.longest <= 2 * task.indices.numel() / task.num_experts + _SHORT:
        return "padding"
    return "groups" if "groups" in ways else "loop"


def _may_look(x: Tensor) -> bool:
    """Tell whether numbers in tensors can be read: nothing is traced, compiled, exported or captured."""
    if torch.compiler.is_compiling() or x.is_meta or not is_plainly_eager(watched=True):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype that a tensor has in products."""
    kind = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return tensor.dtype
    return torch.get_autocast_dtype(kind)


def _capability(x: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device)


def _has_kernel(task: Task) -> bool:
    """Tell whether `grouped_mm` is one kernel on this GPU, not a loop."""
    return _dtype(task.x) == torch.bfloat16 and _capability(task.x) >= (9, 0)


def _can_group(task: Task) -> bool:
    """Tell whether `grouped_mm` takes these tensors and, in the backward pass, their gradients."""
    weights = [projection.stacked()[0] for projection in task.projections]
    if _dtype(task.x) not in _GROUPED or {_dtype(weight) for weight in weights} != {_dtype(task.x)}:
        return False
    if not (task.x.device.type == "cpu" or (task.x.is_cuda and _capability(task.x) >= (8, 0))):
        return False
    values = _ALIGNMENT // _dtype(task.x).itemsize
    return all(_is_aligned(weight, values) for weight in weights)


def _is_aligned(weight: Tensor, values: int) -> bool:
    """Tell whether widths and strides of the matrices in a stack [experts, in, out] are multiples of `values`."""
    (rows, columns), (down, along) = weight.shape[1:], weight.stride()[1:]
    if rows % values or columns % values or not weight.shape[0]:
        return False
    return (along == 1 and down % values == 0 and down >= columns) or (
        down == 1 and along % values == 0 and along >= rows
    )

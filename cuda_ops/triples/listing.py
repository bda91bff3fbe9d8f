"""`triangles` of sorted oriented edges, as places of edges: an operator whose result is as long as they are many."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...errors import UsageError
from ..checks import check_one_device
from ..definition import define
from .wedges import closed_wedges

__all__ = ["check_order", "listed_triangles"]

_NAME = "triangles"


def _reference(source: Tensor, target: Tensor, num_nodes: int, memory_limit: int) -> Tensor:
    check_order(source, target, num_nodes)
    found = list(closed_wedges(source, target, num_nodes, memory_limit))
    return torch.cat(found, 1) if found else source.new_empty(3, 0)


def _check(source: Tensor, target: Tensor, num_nodes: int, memory_limit: int) -> None:
    for name, tensor in (("source", source), ("target", target)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or len(tensor) != len(source):
            found = f"{list(tensor.shape)} {tensor.dtype}"
            raise UsageError(f"{_NAME}: {name} is {found}; give one torch.int64 for each of the {len(source)} edges")
    check_one_device(_NAME, source=source, target=target)


def check_order(source: Tensor, target: Tensor, num_nodes: int) -> None:
    """Make sure that edges are there, oriented and sorted: kernels read rows by them, and write what they counted."""
    if not len(source):
        return
    keys = source * num_nodes + target
    wrong = (source < 0) | (target <= source) | (target >= num_nodes)
    wrong[1:] |= keys[1:] <= keys[:-1]
    if wrong.any():
        edge = int(wrong.nonzero()[0])
        named = f"edge {edge}, from {int(source[edge])} to {int(target[edge])},"
        raise UsageError(
            f"{_NAME}: {named} is out of order; give edges from lower to higher of {num_nodes} nodes, sorted"
        )


def _unknown_number(source: Tensor, *_: object) -> Tensor:
    return source.new_empty(3, cast("Any", torch.library.get_ctx()).new_dynamic_size())


def listed_triangles(source: Tensor, target: Tensor, num_nodes: int, memory_limit: int) -> Tensor:
    """Return all triangles as [3, T] places of edges u-v, u-w and v-w, where u < v < w; in lexicographic order.
    Edges [m] int64 are simple, from lower to higher nodes, and sorted, or a UsageError is raised.
    """
    return _triangles(source, target, num_nodes, memory_limit)


_triangles = define(
    _NAME,
    _reference,
    check=_check,
    fake=_unknown_number,
    kernel="triples.cuda_kernel:triangles",
    shape="data",
    batching=None,
)

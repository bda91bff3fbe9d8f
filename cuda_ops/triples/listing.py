"""`triangles` of sorted oriented edges, as places of edges: an operator whose result is as long as they are many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ...errors import UsageError
from ..checks import check_one_device
from ..definition import define

__all__ = ["check_order", "closed_wedges", "listed_triangles", "parts"]


_BYTES_A_WEDGE = 128
"""What a wedge takes while it is looked at: its two edges, its nodes, the key of the edge that would close it."""


def closed_wedges(source: Tensor, target: Tensor, num_nodes: int, memory_limit: int) -> Iterator[Tensor]:
    """Yield triangles as [3, t] places of edges u-v, u-w and v-w, where u < v < w, of sorted simple edges."""
    row_ends = torch.bincount(source, minlength=num_nodes).cumsum(0)[source]
    later = row_ends - torch.arange(1, len(source) + 1, device=source.device)
    edges = _Edges(source, target, source * num_nodes + target, num_nodes)
    sketch = _Sketch.of(source, target, num_nodes)
    for first, last in parts(later, max(1, memory_limit // _BYTES_A_WEDGE)):
        yield edges.closed(first, last, later[first:last], sketch)


@dataclass
class _Edges:
    """Sorted edges, and a key for each that keeps their order."""

    source: Tensor
    target: Tensor
    keys: Tensor
    num_nodes: int

    def closed(self, first: int, last: int, later: Tensor, sketch: _Sketch) -> Tensor:
        """Return the triangles whose edges u-v lie at these places; `later` says how many edges u-w follow each."""
        places = torch.arange(first, last, device=later.device)
        edge = places.repeat_interleave(later)
        shift = places + 1 - (later.cumsum(0) - later)
        other = shift.index_select(0, edge - first).add_(torch.arange(len(edge), device=edge.device))
        v, w = self.target.index_select(0, edge), self.target.index_select(0, other)
        kept = sketch.may_hold(v, w)
        edge, other = edge.index_select(0, kept), other.index_select(0, kept)
        keys = v.index_select(0, kept).mul_(self.num_nodes).add_(w.index_select(0, kept))
        closing = torch.searchsorted(self.keys, keys).clamp_(max=len(self.keys) - 1)
        found = (self.keys.index_select(0, closing) == keys).nonzero().view(-1)
        return torch.stack([edge, other, closing]).index_select(1, found)


@dataclass
class _Sketch:
    """Which edges there may be: most pairs of nodes that are no edge are told by one look into a small table."""

    table: Tensor
    width: int

    @classmethod
    def of(cls, source: Tensor, target: Tensor, num_nodes: int) -> _Sketch:
        """Return it with eight places for each edge or more, the same number for each node, a power of two."""
        width = 1 << (8 * len(source) // max(num_nodes, 1)).bit_length()
        table = torch.zeros(num_nodes * width, dtype=torch.bool, device=source.device)
        table[source * width + (target & (width - 1))] = True
        return cls(table, width)

    def may_hold(self, source: Tensor, target: Tensor) -> Tensor:
        """Return which of these pairs may be edges."""
        place = (target & (self.width - 1)).add_(source, alpha=self.width)
        return self.table.index_select(0, place).nonzero().view(-1)


def parts(counts: Tensor, limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last) whose counts sum to `limit` at most, or that hold one count."""
    ends = counts.cumsum(0)
    first, done = 0, 0
    while first < len(counts):
        last = max(first + 1, int(torch.searchsorted(ends, done + limit, right=True)))
        yield first, last
        first, done = last, int(ends[last - 1])


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

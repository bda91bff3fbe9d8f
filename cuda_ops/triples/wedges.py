"""Triangles of oriented edges in sparse tensor operations, a part at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["closed_wedges", "parts"]

_BYTES_A_WEDGE = 128
"""What a wedge takes while it is looked at: its two edges, its nodes, the key of the edge that would close it."""


def closed_wedges(source: Tensor, target: Tensor, num_nodes: int, memory_limit: int) -> Iterator[Tensor]:
    """Yield triangles as [3, t] places of edges u-v, u-w and v-w, where u < v < w; in lexicographic order.
    Edges [m] are simple, from lower nodes to higher, and sorted; `memory_limit` is in bytes.
    """
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

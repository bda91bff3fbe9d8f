"""Find all triangles of graphs in sparse tensor operations, a part at a time."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...errors import UsageError, expect

__all__ = [
    "MEMORY_LIMIT",
    "OrientedGraph",
    "check_batch",
    "check_edge_index",
    "check_edges",
    "check_nodes",
    "lexicographic",
    "parts",
    "simple_edges",
    "triangles",
]

MEMORY_LIMIT = 64 * 2**20
"""Bytes that what is computed on the way may take."""

_BYTES_A_WEDGE = 128
"""What a wedge takes while it is looked at: its two edges, its nodes, the key of the edge that would close it."""


def triangles(edge_index: Tensor, num_nodes: int, *, memory_limit: int = MEMORY_LIMIT) -> Tensor:
    """Return all triangles of an undirected graph.

    Edges are read in either direction; self-loops and repeated edges count as nothing. Several disjoint graphs are one
    graph here. Edges are oriented from nodes of lower degree to those of higher, so that O(m^1.5) pairs of edges are
    looked at for m edges (Chiba and Nishizeki, 1985; Latapy, 2008).

    Args:
        edge_index: [2, E] int64, on any device.
        num_nodes: number of nodes, with those that have no edge.
        memory_limit: bytes for what is computed on the way, over 64 bytes for each edge. The pairs of a single edge
            are looked at together, at most sqrt(2m). The result, and its sorting, are not counted.

    Returns:
        [3, T] int64: the nodes of each triangle, ascending in a column; columns in lexicographic order.

    Raises:
        UsageError: `edge_index` is no [2, E] int64, or a node of it is not in `range(num_nodes)`; or this is no number.
    """
    if not isinstance(num_nodes, int) or isinstance(num_nodes, bool) or num_nodes < 0:
        raise UsageError(f"num_nodes is {num_nodes!r}; give a whole number, at least 0")
    check_edges(edge_index, num_nodes)
    graph = OrientedGraph(simple_edges(edge_index, num_nodes), num_nodes)
    found = [graph.nodes(edges) for edges in graph.triangles(memory_limit)]
    columns = torch.cat(found, 1) if found else edge_index.new_empty(3, 0)
    return columns[:, lexicographic(columns, num_nodes)]


def check_edges(edge_index: Tensor, num_nodes: int) -> None:
    """Make sure that these are edges between so many nodes; on a device this waits for it.

    Raises:
        UsageError: they are not.
    """
    check_edge_index(edge_index)
    check_nodes(edge_index, num_nodes)


def check_edge_index(edge_index: Tensor) -> None:
    """Make sure that this has the form of edges.

    Raises:
        UsageError: it has not.
    """
    expect(edge_index, Tensor, "edge_index", "[2, number of edges] torch.int64")
    if edge_index.dtype != torch.int64 or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        found = f"{list(edge_index.shape)} {edge_index.dtype}"
        raise UsageError(f"edge_index is {found}; give [2, number of edges] torch.int64")


def check_nodes(edge_index: Tensor, num_nodes: int) -> None:
    """Make sure that the nodes of edges are there; on a device this waits for it.

    Raises:
        UsageError: one is not.
    """
    if not edge_index.numel():
        return
    least, most = (int(bound) for bound in edge_index.aminmax())
    if least < 0 or most >= operator.index(num_nodes):
        wrong = least if least < 0 else most
        raise UsageError(f"edge_index names node {wrong}, but there are {num_nodes} nodes, counted from 0")


def check_batch(batch: Tensor, num_nodes: int) -> None:
    """Make sure that this has the form of a graph for each node.

    Raises:
        UsageError: it has not.
    """
    if batch.dtype != torch.int64 or batch.shape != (num_nodes,):
        found = f"{list(batch.shape)} {batch.dtype}"
        raise UsageError(f"batch is {found}; give one torch.int64 for each of the {num_nodes} nodes")


def simple_edges(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the edges of the simple undirected graph: [2, m], the lower node first, in lexicographic order."""
    low, high = edge_index.aminmax(dim=0)
    keys = (low * num_nodes + high)[low != high].sort().values
    is_first = torch.ones_like(keys, dtype=torch.bool)
    is_first[1:] = keys[1:] != keys[:-1]
    keys = keys[is_first]
    return torch.stack([keys // max(num_nodes, 1), keys % max(num_nodes, 1)])


@dataclass
class OrientedGraph:
    """A simple graph whose edges lead from nodes of lower degree to nodes of higher.

    Attributes:
        edges: [2, m] int64, every edge once, in either direction.
        num_nodes: number of nodes.
    """

    edges: Tensor
    num_nodes: int

    def __post_init__(self) -> None:
        n = self.num_nodes
        degree = torch.bincount(self.edges.reshape(-1), minlength=n)
        self.by_rank = degree.argsort(stable=True)
        rank = torch.empty_like(self.by_rank)
        rank[self.by_rank] = torch.arange(n, device=rank.device)
        first, last = rank[self.edges].aminmax(dim=0)
        self.keys, self.order = (first * n + last).sort()
        self.source, self.target = first[self.order], last[self.order]

    @cached_property
    def row_ends(self) -> Tensor:
        """For each edge the place behind the last edge from the same source."""
        return torch.bincount(self.source, minlength=self.num_nodes).cumsum(0)[self.source]

    def triangles(self, memory_limit: int = MEMORY_LIMIT) -> Iterator[Tensor]:
        """Yield triangles as [3, t] places of edges u-v, u-w and v-w in `source` and `target`, where u < v < w."""
        later = self.row_ends - torch.arange(1, len(self.source) + 1, device=self.source.device)
        wedges = max(1, memory_limit // _BYTES_A_WEDGE)
        sketch = _Sketch.of(self.source, self.target, self.num_nodes)
        for first, last in parts(later, wedges):
            yield self._closed(first, last, later[first:last], sketch)

    def _closed(self, first: int, last: int, later: Tensor, sketch: _Sketch) -> Tensor:
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

    def nodes(self, edges: Tensor) -> Tensor:
        """Return the nodes [3, t] of triangles that are given by their edges, ascending."""
        ranks = self.source[edges[0]], self.target[edges[0]], self.target[edges[1]]
        u, v, w = (self.by_rank.index_select(0, rank) for rank in ranks)
        low, high = torch.minimum(torch.minimum(u, v), w), torch.maximum(torch.maximum(u, v), w)
        return torch.stack([low, u + v + w - low - high, high])


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


def lexicographic(columns: Tensor, num_nodes: int) -> Tensor:
    """Return the order [t] of columns [3, t] of nodes, lexicographic; equal columns in any order."""
    pairs = columns[0] * num_nodes + columns[1]
    if num_nodes < 2**21:
        return (pairs * num_nodes + columns[2]).argsort()
    order = columns[2].argsort()
    return order[pairs[order].argsort(stable=True)]

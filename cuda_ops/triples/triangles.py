"""All triangles of graphs: edges that users give, made simple and oriented, and the nodes of what is found."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UsageError, expect
from .listing import closed_wedges, listed_triangles

__all__ = [
    "MEMORY_LIMIT", "OrientedGraph", "check_batch", "check_edge_index", "check_edges", "check_graphs", "check_nodes",
    "lexicographic", "lower_and_higher", "simple_edges", "triangles",
]  # fmt: skip

MEMORY_LIMIT = 64 * 2**20
"""Bytes that what is computed on the way may take."""


def triangles(edge_index: Tensor, num_nodes: int, *, memory_limit: int = MEMORY_LIMIT) -> Tensor:
    """Return all triangles of an undirected graph, [3, T] int64: ascending in a column, columns in lexicographic order.

    Edges are read in either direction; self-loops and repeated edges count as nothing. O(m^1.5) pairs of edges are
    looked at for m edges (Chiba and Nishizeki, 1985; Latapy, 2008).

    Args:
        edge_index: [2, E] int64, on any device.
        num_nodes: number of nodes, with those that have no edge.
        memory_limit: bytes for what is computed on the way, over 64 bytes for each edge; without the result. The pairs
            of a single edge are looked at together, at most sqrt(2m).

    Raises:
        UsageError: `edge_index` is no [2, E] int64, or a node of it is not in `range(num_nodes)`; or this is no number.
    """
    if not isinstance(num_nodes, int) or isinstance(num_nodes, bool) or num_nodes < 0:
        raise UsageError(f"num_nodes is {num_nodes!r}; give a whole number, at least 0")
    check_edges(edge_index, num_nodes)
    graph = OrientedGraph(simple_edges(edge_index, num_nodes), num_nodes)
    columns = graph.nodes(listed_triangles(graph.source, graph.target, num_nodes, memory_limit))
    return columns[:, lexicographic(columns, num_nodes)]


def check_edges(edge_index: Tensor, num_nodes: int) -> None:
    """Raise a UsageError if these are no edges between so many nodes; on a device this waits for it."""
    check_edge_index(edge_index)
    check_nodes(edge_index, num_nodes)


def check_edge_index(edge_index: Tensor) -> None:
    """Raise a UsageError if this has not the form of edges."""
    expect(edge_index, Tensor, "edge_index", "[2, number of edges] torch.int64")
    if edge_index.dtype != torch.int64 or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        found = f"{list(edge_index.shape)} {edge_index.dtype}"
        raise UsageError(f"edge_index is {found}; give [2, number of edges] torch.int64")


def check_nodes(edge_index: Tensor, num_nodes: int) -> None:
    """Raise a UsageError if nodes of edges are not there; on a device this waits for it."""
    if not edge_index.numel():
        return
    least, most = (int(bound) for bound in edge_index.aminmax())
    if least < 0 or most >= operator.index(num_nodes):
        wrong = least if least < 0 else most
        raise UsageError(f"edge_index names node {wrong}, but there are {num_nodes} nodes, counted from 0")


def check_batch(batch: Tensor, num_nodes: int) -> None:
    """Raise a UsageError if this has not the form of a graph for each node."""
    if batch.dtype != torch.int64 or batch.shape != (num_nodes,):
        found = f"{list(batch.shape)} {batch.dtype}"
        raise UsageError(f"batch is {found}; give one torch.int64 for each of the {num_nodes} nodes")


def check_graphs(edge_index: Tensor, batch: Tensor, num_graphs: int) -> None:
    """Raise a UsageError where nodes [n] are of graphs that are not there, or an edge joins two graphs."""
    if not len(batch):
        return
    least, most = (int(bound) for bound in batch.aminmax())
    if least < 0 or most >= num_graphs:
        wrong = least if least < 0 else most
        raise UsageError(f"batch names graph {wrong}, but there are {num_graphs} graphs, counted from 0")
    first, second = batch[edge_index]
    across = (first != second).nonzero().view(-1)
    if len(across):
        edge = int(across[0])
        u, v = (int(node) for node in edge_index[:, edge])
        raise UsageError(f"edge {edge} of edge_index joins nodes {u} and {v} of two graphs, {batch[u]} and {batch[v]}")


def lower_and_higher(edges: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower and the higher node of each edge; `aminmax` over two rows takes ten times as long."""
    return torch.minimum(edges[0], edges[1]), torch.maximum(edges[0], edges[1])


def simple_edges(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the edges of the simple undirected graph: [2, m], the lower node first, in lexicographic order."""
    low, high = lower_and_higher(edge_index)
    keys = (low * num_nodes + high)[low != high].sort().values
    is_first = torch.ones_like(keys, dtype=torch.bool)
    is_first[1:] = keys[1:] != keys[:-1]
    keys = keys[is_first]
    return torch.stack([keys // max(num_nodes, 1), keys % max(num_nodes, 1)])


@dataclass
class OrientedGraph:
    """A simple graph whose edges [2, m] int64, each once, lead from nodes of lower degree to nodes of higher."""

    edges: Tensor
    num_nodes: int

    def __post_init__(self) -> None:
        n = self.num_nodes
        degree = torch.bincount(self.edges.reshape(-1), minlength=n)
        self.by_rank = degree.argsort(stable=True)
        rank = torch.empty_like(self.by_rank)
        rank[self.by_rank] = torch.arange(n, device=rank.device)
        first, last = lower_and_higher(rank[self.edges])
        self.order = (first * n + last).argsort()
        self.source, self.target = first[self.order], last[self.order]

    def triangles(self, memory_limit: int = MEMORY_LIMIT) -> Iterator[Tensor]:
        """Yield triangles as [3, t] places of edges u-v, u-w and v-w in `source` and `target`, where u < v < w."""
        return closed_wedges(self.source, self.target, self.num_nodes, memory_limit)

    def nodes(self, edges: Tensor) -> Tensor:
        """Return the nodes [3, t] of triangles that are given by their edges, ascending."""
        ranks = self.source[edges[0]], self.target[edges[0]], self.target[edges[1]]
        u, v, w = (self.by_rank.index_select(0, rank) for rank in ranks)
        low, high = torch.minimum(torch.minimum(u, v), w), torch.maximum(torch.maximum(u, v), w)
        return torch.stack([low, u + v + w - low - high, high])


def lexicographic(columns: Tensor, num_nodes: int) -> Tensor:
    """Return the order [t] of columns [3, t] of nodes, lexicographic; equal columns in any order."""
    pairs = columns[0] * num_nodes + columns[1]
    if num_nodes < 2**21:
        return (pairs * num_nodes + columns[2]).argsort()
    order = columns[2].argsort()
    return order[pairs[order].argsort(stable=True)]

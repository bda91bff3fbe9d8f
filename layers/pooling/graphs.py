"""From what a model gives to graphs that can be pooled: checked, simple, oriented."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...errors import UsageError
from .structures import check_sizes
from .triangles import OrientedGraph, check_edges, simple_edges

__all__ = ["oriented_edges", "weights_of"]


@torch.library.custom_op("fxopt::oriented_edges", mutates_args=())
def oriented_edges(edge_index: Tensor, batch: Tensor, num_graphs: int, node_limit: int) -> tuple[Tensor, Tensor]:
    """Return the simple edges [2, m], from low degree to high, and which of them each given edge is; m for self-loops.

    Args:
        edge_index: [2, E] int64.
        batch: [n] int64, the graph of each node.
        num_graphs: how many graphs there are.
        node_limit: nodes of a graph at most; none where negative.

    Raises:
        UsageError: an edge or a graph is not there, an edge joins two graphs, or a graph is too large.
    """
    check_edges(edge_index, len(batch))
    _check_batch(edge_index, batch, num_graphs)
    if node_limit >= 0:
        check_sizes(batch, node_limit)
    n = len(batch)
    edges = simple_edges(edge_index, n)
    low, high = edge_index.aminmax(dim=0)
    position = torch.searchsorted(edges[0] * n + edges[1], low * n + high)
    graph = OrientedGraph(edges, n)
    place = torch.empty_like(graph.order)
    place[graph.order] = torch.arange(len(place), device=place.device)
    place = torch.cat([place, place.new_tensor([len(place)])])
    oriented = graph.by_rank[torch.stack([graph.source, graph.target])]
    return oriented, place[position.masked_fill_(low == high, len(graph.order))]


@oriented_edges.register_fake
def _unknown_number(edge_index: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    number = cast("Any", torch.library.get_ctx()).new_dynamic_size()
    return edge_index.new_empty(2, number), edge_index.new_empty(edge_index.shape[1])


def _check_batch(edge_index: Tensor, batch: Tensor, num_graphs: int) -> None:
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


def weights_of(edges: Tensor, place: Tensor, given: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight of each simple edge, [m, 1]: the mean of those given for it; 1 where none are given."""
    if given is None:
        return torch.ones(edges.shape[1], 1, dtype=dtype, device=edges.device)
    values = torch.stack([given.to(dtype), torch.ones_like(given, dtype=dtype)], 1)
    sums = values.new_zeros(edges.shape[1] + 1, 2).index_add(0, place, values)[:-1]
    return sums[:, :1] / sums[:, 1:]

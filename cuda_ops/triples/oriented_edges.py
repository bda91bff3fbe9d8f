"""`oriented_edges`: from what a model gives to graphs that can be pooled: checked, simple, oriented."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...errors import UsageError
from ..definition import define
from .structures import check_sizes
from .triangles import (
    OrientedGraph,
    check_batch,
    check_edge_index,
    check_graphs,
    check_nodes,
    lower_and_higher,
    simple_edges,
)

__all__ = ["oriented_edges"]


def _reference(edge_index: Tensor, batch: Tensor, num_graphs: int, node_limit: int) -> tuple[Tensor, Tensor]:
    check_nodes(edge_index, len(batch))
    check_graphs(edge_index, batch, num_graphs)
    if node_limit >= 0:
        check_sizes(batch, node_limit)
    n = len(batch)
    edges = simple_edges(edge_index, n)
    low, high = lower_and_higher(edge_index)
    position = torch.searchsorted(edges[0] * n + edges[1], low * n + high)
    graph = OrientedGraph(edges, n)
    place = torch.empty_like(graph.order)
    place[graph.order] = torch.arange(len(place), device=place.device)
    place = torch.cat([place, place.new_tensor([len(place)])])
    oriented = graph.by_rank[torch.stack([graph.source, graph.target])]
    return oriented, place[position.masked_fill_(low == high, len(graph.order))]


def _check(edge_index: Tensor, batch: Tensor, num_graphs: int, node_limit: int) -> None:
    check_edge_index(edge_index)
    if edge_index.is_meta:
        raise UsageError("edge_index is on the meta device: how many edges are left is in the data; give real tensors")
    check_batch(batch, batch.numel())


def _unknown_number(edge_index: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    number = cast("Any", torch.library.get_ctx()).new_dynamic_size()
    return edge_index.new_empty(2, number), edge_index.new_empty(edge_index.shape[1])


_oriented_edges = define("oriented_edges", _reference, check=_check, fake=_unknown_number, batching=None, shape="data")


def oriented_edges(edge_index: Tensor, batch: Tensor, num_graphs: int, node_limit: int = -1) -> tuple[Tensor, Tensor]:
    """Return the simple edges [2, m], from low degree to high, and which of them each given edge is; m for self-loops.
    Raises a UsageError where an edge or graph is not there, joins two graphs, or has over `node_limit` nodes.
    """
    return _oriented_edges(edge_index, batch, num_graphs, node_limit)

"""Sums over triples by how many edges join them, from sums over nodes, edges, neighbours and triangles."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cuda_ops.triples import CLOSED, sums_by_type

__all__ = ["sums_by_edges", "weights_of"]


def sums_by_edges(x: Tensor, weights: Tensor, edges: Tensor, batch: Tensor, num_graphs: int, limit: int) -> Tensor:
    """Return the sums of x_i x_j x_k over the triples without an edge, with one, two and three: [graphs, 4, C].

    A weight [m, 1] is an edge to that share: of a triple with a, b and c, the share a b (1 - c) + a c (1 - b) + b c (1
    - a) has two. Takes x [n, C], simple oriented edges [2, m], and a limit in bytes.
    """

    def by_graph(values: Tensor, nodes_graph: Tensor) -> Tensor:
        return values.new_zeros(num_graphs, x.shape[1]).index_add(0, nodes_graph, values)

    u, v = edges
    of_edges, powers = batch[u], [by_graph(x**power, batch) for power in (1, 2, 3)]
    at_u, at_v = weights * x[u], weights * x[v]
    around = torch.zeros_like(x).index_add(0, u, at_v).index_add(0, v, at_u)
    squares = torch.zeros_like(x).index_add(0, u, at_v.square()).index_add(0, v, at_u.square())
    total = (powers[0] ** 3 - 3 * powers[0] * powers[1] + 2 * powers[2]) / 6
    pairs = by_graph(at_u * x[v] * (powers[0][of_edges] - x[u] - x[v]), of_edges)
    wedges = by_graph(x * (around.square() - squares) / 2, batch)
    closed = sums_by_type(at_u, at_v, at_u, (edges, batch, num_graphs), CLOSED, 0, limit)
    one, two = pairs - 2 * wedges + 3 * closed, wedges - 3 * closed
    return torch.stack([total - pairs + wedges - closed, one, two, closed], 1)


def weights_of(edges: Tensor, place: Tensor, given: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight of each simple edge, [m, 1]: the mean of those given for it; 1 where none are given."""
    if given is None:
        return torch.ones(edges.shape[1], 1, dtype=dtype, device=edges.device)
    values = torch.stack([given.to(dtype), torch.ones_like(given, dtype=dtype)], 1)
    sums = values.new_zeros(edges.shape[1] + 1, 2).index_add(0, place, values)[:-1]
    return sums[:, :1] / sums[:, 1:]

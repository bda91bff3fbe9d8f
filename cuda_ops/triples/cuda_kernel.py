"""Triangles on a GPU: the rows of an edge's two nodes are merged, one thread for each edge (and channel)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compiled import native
from .listing import check_order
from .products import CLOSED, Products, triple_products_reference
from .triangles import OrientedGraph

__all__ = ["triangles", "triple_products"]

_LIBRARY = "triangles"


def triangles(source: Tensor, target: Tensor, num_nodes: int, memory_limit: int) -> Tensor:
    """Return all triangles as places of edges: count those of each edge, scan, fill."""
    compiled = native(_LIBRARY)
    check_order(source, target, num_nodes)
    source, target = source.contiguous(), target.contiguous()
    starts, counts = _starts(source, num_nodes), torch.empty_like(source)
    compiled.count(source, target, starts, counts)
    ends = counts.cumsum(0)
    found = source.new_empty(3, int(ends[-1]) if len(ends) else 0)
    compiled.fill(source, target, starts, ends - counts, found)
    return found


def triple_products(*args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of the sum of p q r g over all triangles, which are never listed; sums are float32.
    Sums go by atomic additions; where torch is to be deterministic, and for other triples, the reference computes.
    """
    given = Products(*args)
    tables, edges, batch, wanted = given.tables, given.edges, given.batch, given.wanted
    if given.structure != CLOSED or torch.are_deterministic_algorithms_enabled():
        return triple_products_reference(*args)
    compiled, graph = native(_LIBRARY), OrientedGraph(edges, len(batch))
    sums = [
        torch.zeros(table.shape if want else 0, device=table.device) for table, want in zip(tables, wanted, strict=True)
    ]
    cells = batch[edges[0, graph.order]]
    starts = _starts(graph.source, len(batch))
    floats = [table.float().contiguous() for table in tables]
    compiled.products(graph.source, graph.target, starts, graph.order, cells, *floats, *sums)
    found = zip(tables, sums, wanted, strict=True)
    return tuple(total.to(table.dtype) if want else torch.zeros_like(table) for table, total, want in found)


def _starts(source: Tensor, num_nodes: int) -> Tensor:
    """Return [n + 1], where the edges from each node begin."""
    starts = source.new_zeros(num_nodes + 1)
    torch.cumsum(torch.bincount(source, minlength=num_nodes), 0, out=starts[1:])
    return starts

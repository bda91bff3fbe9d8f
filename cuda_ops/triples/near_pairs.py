"""`near_pairs`: pairs of nodes that a short path or a common neighbour joins, with a colour."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...errors import UsageError
from ..definition import define
from .structures import COLORS, Layout
from .triangles import check_batch, check_edge_index

__all__ = ["near_pairs"]


def _reference(edges: Tensor, batch: Tensor, cap: int, structure: str) -> Tensor:
    layout = Layout.of(batch)
    colors = (_by_neighbours if structure == "codegree" else _by_distance)(layout, edges, cap)
    positions = torch.arange(layout.width, device=edges.device)
    first, position = ((colors >= 0) & (positions > layout.position.unsqueeze(1))).nonzero().unbind(1)
    second = first - layout.position[first] + position
    return torch.stack([layout.order[first], layout.order[second], colors[first, position]])


def _by_distance(layout: Layout, edges: Tensor, cap: int) -> Tensor:
    """Return the length less 1 of the shortest path from each place to the nodes of its graph, [n, width]; else -1."""
    matrix, reached = layout.sparse(edges), layout.dense(edges)
    lengths = torch.full_like(reached, -1, dtype=torch.int64).masked_fill_(reached > 0, 0)
    places = torch.arange(len(reached), device=edges.device)
    reached[places, layout.position] = 1
    for length in range(1, cap):
        grown = reached + matrix @ reached
        lengths[(grown > 0) & (reached == 0)] = length
        reached = (grown > 0).to(grown.dtype)
    return lengths


def _by_neighbours(layout: Layout, edges: Tensor, cap: int) -> Tensor:
    """Return the number of neighbours that nodes have in common, up to the cap, and cap + 1 for an edge, less 1."""
    joined = layout.dense(edges)
    common = (layout.sparse(edges) @ joined).clamp_(max=cap)
    return (common + (cap + 1) * joined).to(torch.int64).sub_(1)


def _check(edges: Tensor, batch: Tensor, cap: int, structure: str) -> None:
    check_edge_index(edges)
    check_batch(batch, batch.numel())
    if structure not in COLORS:
        raise UsageError(f"near_pairs: no such structure: {structure!r}; give one of {', '.join(COLORS)}")


def _unknown_number(edges: Tensor, *_: object) -> Tensor:
    return edges.new_empty(3, cast("Any", torch.library.get_ctx()).new_dynamic_size())


_near_pairs = define("near_pairs", _reference, check=_check, fake=_unknown_number, batching=None, shape="data")


def near_pairs(edges: Tensor, batch: Tensor, cap: int, structure: str) -> Tensor:
    """Return pairs of near nodes, each once, and a colour: [3, pairs]; edges simple.
    By `distance` a path of up to `cap` edges joins them, and the colour is their number less 1. By `codegree` an edge
    or a common neighbour does; the colour is the number of these neighbours, up to the cap, and cap + 1 for an edge,
    less 1.
    Graph by graph, pairs are in the order of the first node, then of the second.
    """
    return _near_pairs(edges, batch, cap, structure)

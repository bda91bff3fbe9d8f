"""`near_pairs`: pairs of nodes that a short path joins, with its length."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..definition import define
from .structures import Layout
from .triangles import check_batch, check_edge_index

__all__ = ["near_pairs"]


def _reference(edges: Tensor, batch: Tensor, cap: int) -> Tensor:
    layout = Layout.of(batch)
    matrix, reached = layout.sparse(edges), layout.dense(edges)
    lengths = torch.full_like(reached, cap, dtype=torch.int64).masked_fill_(reached > 0, 0)
    places = torch.arange(len(batch), device=edges.device)
    reached[places, layout.position] = 1
    for length in range(1, cap):
        grown = reached + matrix @ reached
        lengths[(grown > 0) & (reached == 0)] = length
        reached = (grown > 0).to(grown.dtype)
    positions = torch.arange(layout.width, device=edges.device)
    first, position = ((lengths < cap) & (positions > layout.position.unsqueeze(1))).nonzero().unbind(1)
    second = first - layout.position[first] + position
    return torch.stack([layout.order[first], layout.order[second], lengths[first, position]])


def _check(edges: Tensor, batch: Tensor, cap: int) -> None:
    check_edge_index(edges)
    check_batch(batch, batch.numel())


def _unknown_number(edges: Tensor, *_: object) -> Tensor:
    return edges.new_empty(3, cast("Any", torch.library.get_ctx()).new_dynamic_size())


_near_pairs = define("near_pairs", _reference, check=_check, fake=_unknown_number, batching=None, shape="data")


def near_pairs(edges: Tensor, batch: Tensor, cap: int) -> Tensor:
    """Return pairs of nodes at distances up to `cap`, each once, and the distance less 1: [3, pairs]; edges simple.
    Graph by graph, pairs are in the order of the first node, then of the second.
    """
    return _near_pairs(edges, batch, cap)

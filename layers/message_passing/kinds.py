"""`HGTConv` of PyTorch Geometric over compressed rows: edges of all kinds are those of one graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat import wants_gradients
from .convolutions import is_plain
from .kept import KeptGraphs, most_edges, noted
from .products import edge_products, largest_of, normalized_in_parts, normalized_sums
from .rows import Part, Rows, rows_of

__all__ = ["hgt"]

Kind = tuple[str, str, str]


def hgt(conv: Any, kept: KeptGraphs, x: Mapping[str, Tensor], edges: Mapping[Kind, Tensor], _: None) -> Any:
    """Compute `HGTConv`: neighbours of all kinds weighed by one softmax of products of queries and keys."""
    known = [conv.edge_types_map.get(kind, -1) for kind in edges]
    if known != sorted(set(known)) or known[0] < 0 or not all(map(is_plain, (conv.kqv_lin, conv.k_rel, conv.v_rel))):
        return None
    sizes = {kind: len(x[kind]) for kind in conv.kqv_lin.lins if kind in x}
    if not all(kind[0] in sizes and kind[2] in sizes for kind in edges):
        return None
    rows = _rows_of_kinds(conv, kept, sizes, edges)
    if noted(conv, kept, *most_edges(x, edges), rows) is None or rows is None:
        return None
    heads, channels = conv.heads, conv.out_channels // conv.heads
    queries, keys, values = list[Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    for kind, made in conv.kqv_lin(x).items():
        keys[kind], query, values[kind] = made.view(-1, 3, heads, channels).unbind(1)
        queries.append(query)
    scale = torch.stack([conv.p_rel["__".join(kind)].view(heads, 1, 1) for kind in edges], 1) / math.sqrt(channels)
    key = _of_relations(keys, edges, scale * _weights(conv, conv.k_rel, known))
    value = _of_relations(values, edges, _weights(conv, conv.v_rel, known))
    wide = rows.of_heads(heads)
    query = torch.cat(queries).transpose(0, 1).reshape(-1, channels)
    scores = edge_products(query, key.view(-1, channels), wide)
    if wants_gradients(scores, value):
        out = normalized_sums(value.view(-1, channels), scores, wide).view(heads, -1, channels).transpose(0, 1)
    else:
        by_head = scores.view(heads, -1)

        def of_part(head: int, part: Part) -> Tensor:
            return by_head[head, part.edges]

        out = normalized_in_parts(value, of_part, rows, largest=largest_of(scores))
    parts = cast("list[Tensor]", out.flatten(1).split([*sizes.values()]))
    return _transformed(conv, x, dict(zip(sizes, parts, strict=True)))


def _rows_of_kinds(conv: Any, kept: KeptGraphs, sizes: Mapping[str, int], edges: Mapping[Kind, Tensor]) -> Rows | None:
    """Return the rows from the sources of each kind of edge in turn to all nodes; None where a node is not there."""
    starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    shape = tuple((kind, sizes[kind[0]], sizes[kind[2]]) for kind in edges)
    total = sum(sizes.values())

    def made(*given: Tensor) -> Rows | None:
        found, first = list[Tensor](), 0
        for (kind, sources, targets), each in zip(shape, given, strict=True):
            if each.numel() and (int(each.min()) < 0 or int(each[0].max()) >= sources or int(each[1].max()) >= targets):
                return None
            found.append(each + each.new_tensor([[first], [starts[kind[2]]]]))
            first += sources
        return rows_of(torch.cat(found, 1), first, flow=conv.flow, num_targets=total)

    return kept.of(made, *edges.values(), key=("kinds", shape, total))


def _weights(conv: Any, relation: Any, known: list[int]) -> Tensor:
    """Return the weights of these relations, [heads, relations, C, C]."""
    whole = relation.weight.view(conv.heads, len(conv.edge_types), *relation.weight.shape[1:])
    return whole if len(known) == whole.shape[1] else whole[:, known]


def _of_relations(x: Mapping[str, Tensor], edges: Mapping[Kind, Tensor], weights: Tensor) -> Tensor:
    """Return the features [n, heads, C] of the sources of each kind of edge in turn, times that kind's weights."""
    found = [x[kind[0]].transpose(0, 1) @ weight for kind, weight in zip(edges, weights.unbind(1), strict=True)]
    return torch.cat([each.transpose(0, 1) for each in found])


def _transformed(conv: Any, x: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the layer makes of the sums [n, out]."""
    reached = {kind: each for kind, each in out.items() if kind in conv.dst_node_types}
    results = conv.out_lin({kind: F.gelu(each) for kind, each in reached.items()})
    for kind in reached:
        if results[kind].shape[-1] == x[kind].shape[-1]:
            share = conv.skip[kind].sigmoid()
            results[kind] = share * results[kind] + (1 - share) * x[kind]
    return {kind: results[kind] for kind in reached}

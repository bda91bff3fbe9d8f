"""The convolutions of PyTorch Geometric over compressed rows: [n, out] of x [n, in] and edge_index [2, E].
None is returned where the layer's own forward has to say what is wrong.
"""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compat import has_hooks, wants_gradients
from ...runtime.values import user_class
from .kept import KeptGraphs, noted
from .products import at_edges, largest_of, neighbour_sums, normalized_in_parts, normalized_sums
from .rows import Part, Rows, rows_of

__all__ = ["gat", "gatv2", "gcn", "gin", "is_plain", "rgcn", "sage"]

Pair = Tensor | tuple[Tensor, Tensor]
"""Features of all nodes, or of sources and of targets."""

_LINEAR_MODULE = "torch_geometric.nn.dense.linear"
_RELATIONS = 4
"""So many sums for each edge, of a node by a relation, are taken at most: the others would be of no edge."""

_CHUNK = 2**17
"""Numbers of edges that are looked at together, so that they stay in the cache."""


def gcn(conv: Any, kept: KeptGraphs, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> Tensor | None:
    """Compute `GCNConv`: the sum of neighbours, weighed by `D^-1/2 (A + I) D^-1/2` where that is asked for."""
    if edge_weight is not None and edge_weight.dim() != 1:
        return None
    if conv.normalize:
        found = _normalized(conv, kept, x, edge_index, edge_weight)
    else:
        found = _weighted(conv, kept, x, edge_index, edge_weight)
    if found is None:
        return None
    rows, values = found
    if x.shape[1] <= conv.out_channels:  # the sum is linear: taken over the narrower features
        return _linear(conv.lin, neighbour_sums(x, values, rows), conv.bias)
    return _plus(neighbour_sums(conv.lin(x), values, rows), conv.bias)


def _linear(lin: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return what a layer without a bias gives, and a bias: in one product where the layer is as it was."""
    if bias is None:
        return lin(x)
    is_as_it_was = is_plain(lin) and lin.bias is None
    return F.linear(x, lin.weight, bias) if is_as_it_was else _plus(lin(x), bias)


def is_plain(module: nn.Module) -> bool:
    """Say whether this is a linear layer of PyTorch Geometric as its class has it, without hooks."""
    kind = type(module)
    is_own = kind is user_class(kind) and kind.__module__ == _LINEAR_MODULE
    return is_own and "forward" not in vars(module) and not has_hooks(module)


def sage(conv: Any, kept: KeptGraphs, x: Pair, edge_index: Tensor, edges: Tensor | None) -> Tensor | None:
    """Compute `SAGEConv` with sums or means of neighbours, of nodes of one kind or of two."""
    if edges is not None:
        return None
    sources, targets = x if isinstance(x, tuple) else (x, x)
    rows = _plain_rows(conv, kept, sources, edge_index, len(targets))
    if rows is None:
        return None
    out = conv.lin_l(_aggregated(conv, conv.lin(sources).relu() if conv.project else sources, rows))
    out = out + conv.lin_r(targets) if conv.root_weight else out
    return F.normalize(out, p=2.0, dim=-1) if conv.normalize else out


def gin(conv: Any, kept: KeptGraphs, x: Tensor, edge_index: Tensor, edges: Tensor | None) -> Tensor | None:
    """Compute `GINConv` with sums or means of neighbours."""
    if edges is not None:
        return None
    rows = _plain_rows(conv, kept, x, edge_index)
    return None if rows is None else conv.nn(_aggregated(conv, x, rows) + (1 + conv.eps) * x)


def rgcn(conv: Any, kept: KeptGraphs, x: Tensor, edge_index: Tensor, edge_type: Tensor | None) -> Tensor | None:
    """Compute `RGCNConv`, with bases or without: the sums by node and relation, and one product for all relations."""
    relations, nodes = conv.num_relations, len(x)
    if edge_type is None or nodes * relations > _RELATIONS * len(edge_type):
        return None

    def made(edges: Tensor, kinds: Tensor) -> Rows | None:
        if int(kinds.min()) < 0 or int(kinds.max()) >= relations:
            return None
        sources, targets = edges if conv.flow == "source_to_target" else edges.flip(0)
        by_relation = torch.stack([sources, targets * relations + kinds])
        return rows_of(by_relation, nodes, flow="source_to_target", num_targets=nodes * relations)

    rows = kept.of(made, edge_index, edge_type, key=("relations", nodes, relations, conv.flow))
    if noted(conv, kept, x, edge_index, rows) is None:
        return None
    weight = conv.weight
    if conv.num_bases is not None:
        weight = conv.comp @ weight.view(conv.num_bases, -1)
    summed = _aggregated(conv, x, rows).view(nodes, relations * x.shape[1])
    out = summed @ weight.reshape(summed.shape[1], conv.out_channels)
    return _plus(out if conv.root is None else out + x @ conv.root, conv.bias)


def gat(conv: Any, kept: KeptGraphs, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None) -> Tensor | None:
    """Compute `GATConv`: neighbours weighed by a softmax of scores of sources, targets and edges."""
    rows = _rows_with_loops(conv, kept, x, edge_index)
    if rows is None:
        return None
    heads, channels = conv.heads, conv.out_channels
    hidden = conv.lin(x).view(-1, heads, channels)
    if wants_gradients(hidden, conv.att_src, conv.att_dst):
        source, target = (hidden * conv.att_src).sum(-1), (hidden * conv.att_dst).sum(-1)
    else:
        both = torch.cat([_blocks(conv.att_src), _blocks(conv.att_dst)], 1)
        source, target = _few_columns(hidden.flatten(1), both).chunk(2, 1)
    of_edges: Tensor | None = None
    if edge_attr is not None and conv.lin_edge is not None:
        features = conv.lin_edge(_features_of_edges(conv, kept, edge_index, edge_attr, rows))
        of_edges = (features.view(-1, heads, channels) * conv.att_edge).sum(-1)
    if wants_gradients(source, of_edges):
        wide = rows.of_heads(heads)
        scores = at_edges(source.reshape(-1), wide, "sources") + at_edges(target.t().reshape(-1), wide, "targets")
        scores = scores if of_edges is None else scores + of_edges.t().reshape(-1)
        scores = F.leaky_relu(scores, conv.negative_slope)
        return _joined(conv, _by_node(conv, normalized_sums(hidden.view(-1, channels), scores, wide)), x)
    by_head = [None if each is None else each.t().contiguous() for each in (source, target, of_edges)]
    largest = sum(largest_of(each) for each in by_head) * max(1.0, abs(conv.negative_slope))

    def of_part(head: int, part: Part) -> Tensor:
        sources, targets, edges = (None if each is None else each[head] for each in by_head)
        found = cast("Tensor", sources).index_select(0, part.sources)
        found += cast("Tensor", targets).index_select(0, part.targets)
        return F.leaky_relu_(found if edges is None else found.add_(edges[part.edges]), conv.negative_slope)

    return _joined(conv, normalized_in_parts(hidden, of_part, rows, largest=largest), x)


def _few_columns(x: Tensor, weights: Tensor) -> Tensor:
    """Return `x @ weights` for few columns, the other way round: [10000, 64] x [64, 2] in a fifth of the time."""
    return (weights.t() @ x.t()).t()


def _blocks(attention: Tensor) -> Tensor:
    """Return the weights of heads [1, heads, C] as the blocks of a matrix [heads * C, heads]."""
    return cast("Any", torch).block_diag(*attention[0].unsqueeze(-1))


def _by_node(conv: Any, out: Tensor) -> Tensor:
    """Return the heads of all nodes [heads * n, C] node by node [n, heads, C]."""
    return out.view(conv.heads, -1, conv.out_channels).transpose(0, 1)


def gatv2(conv: Any, kept: KeptGraphs, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None) -> Tensor | None:
    """Compute `GATv2Conv`: neighbours weighed by a softmax of scores of each edge's two nodes together."""
    rows = _rows_with_loops(conv, kept, x, edge_index)
    if rows is None or (edge_attr is not None and conv.lin_edge is None):
        return None
    left = conv.lin_l(x)
    right = left if conv.share_weights else conv.lin_r(x)
    features = None if edge_attr is None else _features_of_edges(conv, kept, edge_index, edge_attr, rows)
    gradient = wants_gradients(left, right, features, conv.att)
    scores = _scores(conv, left, right, features, rows, gradient=gradient).t().contiguous()
    if gradient:
        wide = rows.of_heads(conv.heads)
        out = _by_node(conv, normalized_sums(left.view(-1, conv.out_channels), scores.view(-1), wide))
    else:
        hidden = left.view(-1, conv.heads, conv.out_channels)
        largest = largest_of(scores)
        out = normalized_in_parts(hidden, lambda head, part: scores[head, part.edges], rows, largest=largest)
    return _joined(conv, out, x)


def _scores(conv: Any, left: Tensor, right: Tensor, features: Tensor | None, rows: Rows, *, gradient: bool) -> Tensor:
    """Return the scores of all edges [E, heads], some edges at a time where no gradient needs all of them."""

    def met(sources: Tensor, targets: Tensor, features: Tensor | None) -> Tensor:
        both = sources + targets
        both = both if features is None else both + conv.lin_edge(features)
        return F.leaky_relu(both, conv.negative_slope)

    if gradient:
        whole = met(at_edges(left, rows, "sources"), at_edges(right, rows, "targets"), features)
        return (whole.view(-1, conv.heads, conv.out_channels) * conv.att).sum(-1)
    attention = _blocks(conv.att)
    found = list[Tensor]()
    size = max(1, _CHUNK // left.shape[1])
    for first in range(0, len(rows.sources), size):
        part = slice(first, first + size)
        ends = left.index_select(0, rows.sources[part]), right.index_select(0, rows.targets[part])
        found.append(_few_columns(met(*ends, None if features is None else features[part]), attention))
    return torch.cat(found)


def _joined(conv: Any, out: Tensor, x: Tensor) -> Tensor:
    """Return the heads [n, heads, C] side by side, or their mean, with residual and bias."""
    out = out.flatten(1) if conv.concat else out.mean(1)
    return _plus(out if conv.res is None else out + conv.res(x), conv.bias)


def _aggregated(conv: Any, x: Tensor, rows: Rows) -> Tensor:
    sums = neighbour_sums(x, None, rows)
    if conv.aggr != "mean":
        return sums
    degree = rows.degree.clamp(min=1).to(sums.dtype).unsqueeze(1)
    return sums / degree if torch.is_grad_enabled() else sums.div_(degree)


def _plus(out: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias to what nobody else has seen."""
    if bias is None:
        return out
    return out + bias if torch.is_grad_enabled() else out.add_(bias)


# -- the rows of a graph ----------------------------------------------------------------------------------------------


def _plain_rows(
    conv: Any, kept: KeptGraphs, x: Tensor, edge_index: Tensor, num_targets: int | None = None
) -> Rows | None:
    """Return the rows of the edges as they are given, from the nodes of `x` to so many, or to the same ones."""
    targets = len(x) if num_targets is None else num_targets
    make = partial(rows_of, num_nodes=len(x), flow=conv.flow, num_targets=targets)
    rows = kept.of(make, edge_index, key=("edges", len(x), targets, conv.flow))
    return noted(conv, kept, x, edge_index, rows)


def _weighted(
    conv: Any, kept: KeptGraphs, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None
) -> tuple[Rows, Tensor | None] | None:
    rows = _plain_rows(conv, kept, x, edge_index)
    if rows is None:
        return None
    return rows, None if edge_weight is None else edge_weight.index_select(0, rows.order)


def _normalized(
    conv: Any, kept: KeptGraphs, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None
) -> tuple[Rows, Tensor] | None:
    """Return the rows of a graph with its loops, and the weights of its edges, normalized."""
    known = conv._cached_edge_index
    if conv.cached and known is None:
        known = conv._cached_edge_index = _with_weights(conv, x, edge_index, edge_weight)
    if known is not None:  # as the layer itself: whatever edges are given
        edges, weights = known
        rows = kept.of(partial(rows_of, num_nodes=len(x), flow=conv.flow), edges, key=("cached", len(x), conv.flow))
        return None if rows is None else (rows, weights.index_select(0, rows.order))
    what = ("normalized", len(x), conv.flow, conv.add_self_loops)

    def made(*_: Tensor) -> tuple[Rows, Tensor] | None:
        edges, weights = _with_weights(conv, x, edge_index, edge_weight)
        rows = kept.of(lambda *_: rows_of(edges, len(x), flow=conv.flow), edge_index, key=what)
        return None if rows is None else (rows, weights.index_select(0, rows.order))

    if edge_weight is not None and edge_weight.requires_grad:  # nothing counts what fused optimizers write
        found = made()
    else:
        given = (edge_index,) if edge_weight is None else (edge_index, edge_weight)
        with torch.no_grad(), torch.inference_mode(False):
            found = kept.of(made, *given, key=("weights", *what, conv.improved, x.dtype))
    noted(conv, kept, x, edge_index, None if found is None else found[0])
    return found


def _with_weights(conv: Any, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    from torch_geometric.nn.conv import gcn_conv  # it is loaded where there is such a layer

    settings = (conv.improved, conv.add_self_loops, conv.flow, x.dtype)
    return cast("Any", gcn_conv).gcn_norm(edge_index, edge_weight, len(x), *settings)


def _rows_with_loops(conv: Any, kept: KeptGraphs, x: Tensor, edge_index: Tensor) -> Rows | None:
    """Return the rows of a graph in which each node has one loop, if the layer adds these."""
    if not conv.add_self_loops:
        return _plain_rows(conv, kept, x, edge_index)

    def made(edges: Tensor) -> Rows | None:
        return rows_of(_looped(conv, edges, None, len(x))[0], len(x), flow=conv.flow)

    rows = kept.of(made, edge_index, key=("loops", len(x), conv.flow))
    return noted(conv, kept, x, edge_index, rows)


def _looped(conv: Any, edge_index: Tensor, edge_attr: Tensor | None, nodes: int) -> tuple[Tensor, Tensor | None]:
    from torch_geometric.utils import add_self_loops, remove_self_loops

    without: Any = cast("Any", remove_self_loops)(edge_index, edge_attr)
    return cast("Any", add_self_loops)(*without, fill_value=conv.fill_value, num_nodes=nodes)


def _features_of_edges(conv: Any, kept: KeptGraphs, edge_index: Tensor, edge_attr: Tensor, rows: Rows) -> Tensor:
    """Return the features of the edges, those of the loops with them, in the order of the rows [E, D]."""

    def made(*_: Tensor) -> Tensor:
        given = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr
        if conv.add_self_loops:
            given = cast("Tensor", _looped(conv, edge_index, given, rows.num_sources)[1])
        return given.index_select(0, rows.order)

    if isinstance(conv.fill_value, Tensor) or edge_attr.requires_grad:  # as in `_normalized`
        return made()
    what = ("features", rows.num_sources, conv.flow, conv.add_self_loops, conv.fill_value)
    with torch.no_grad(), torch.inference_mode(False):
        return kept.of(made, edge_index, edge_attr, key=what)

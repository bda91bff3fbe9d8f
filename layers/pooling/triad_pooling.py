"""Coarsening of graphs: disjoint triads of nodes, chosen by a learned score, become one node each."""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import inits, resolver
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.pool.connect import Connect, ConnectOutput
from torch_geometric.nn.pool.pool import pool_edge  # pyright: ignore[reportUnknownVariableType]
from torch_geometric.nn.pool.select import Select, SelectOutput
from torch_geometric.utils import remove_self_loops, to_undirected

from ...cuda_ops.triples import check_batch, check_edges, check_graphs, triangles
from ...errors import UsageError, expect, positive_integer
from .disjoint import disjoint_triads, disjoint_wedges

__all__ = ["ContractEdges", "RO3TriadPooling", "SAGTriadPooling", "SelectTriads"]

Pooled = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]


class SelectTriads(Select):
    """Put disjoint triads into clusters, those with the highest scores first; arguments as of `RO3TriadPooling`.
    Takes x [nodes, in_channels], edge_index [2, edges], batch [nodes]; gives a `SelectOutput` with the `cluster_index`
    of each node and the gate of its cluster, 1 for a node alone, as `weight`.
    """

    _fxopt_is_operation: ClassVar[bool] = True

    def __init__(
        self,
        in_channels: int,
        ratio: float = 0.5,
        triads: Literal["closed", "all"] = "closed",
        min_score: float | None = None,
        nonlinearity: str | Callable[[Tensor], Tensor] = "tanh",
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check(in_channels, ratio, triads, min_score)
        self.in_channels, self.ratio, self.triads, self.min_score = in_channels, ratio, triads, min_score
        self.act: Callable[[Tensor], Tensor] = resolver.activation_resolver(nonlinearity)
        self.weight = nn.Parameter(torch.empty(1, in_channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew, as that of `SelectTopK` is drawn."""
        inits.uniform(self.in_channels, self.weight)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> SelectOutput:
        """Return the cluster of each node [nodes] and its gate [nodes]; see the class for shapes."""
        x = x.view(-1, 1) if x.dim() == 1 else x
        score = (x * F.normalize(self.weight, dim=1)).sum(1)
        taken = self._taken(score.detach(), edge_index, batch)
        gate = self.act(score[taken].mean(1))
        if self.min_score is not None:
            enough = gate > self.min_score
            taken, gate = taken[enough], gate[enough]
        nodes, members = torch.arange(len(x), device=x.device), taken.reshape(-1)
        first = nodes.scatter(0, members, taken.amin(1).repeat_interleave(3))
        weight = torch.ones_like(score).scatter(0, members, gate.repeat_interleave(3))
        cluster = ((first == nodes).cumsum(0) - 1)[first]
        return SelectOutput(nodes, len(x), cluster, len(x) - 2 * len(taken), weight)

    def _taken(self, score: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        """Return the triads that become clusters [triads, 3]."""
        order = _best_first(score, batch)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        edges = to_undirected(remove_self_loops(place[edge_index])[0], num_nodes=len(order))
        falling = score[order].to(torch.promote_types(score.dtype, torch.float32))
        if self.triads == "all":
            found = disjoint_wedges(edges, falling)
        else:
            found = self._closed_or_wedges(edges, falling, batch[order])
        return order[found if self.min_score is not None else found[self._within(found, batch[order])]]

    def _closed_or_wedges(self, edges: Tensor, score: Tensor, graph: Tensor) -> Tensor:
        """Return disjoint triangles [triads, 3]; in graphs that have none, other connected triads."""
        closed = triangles(edges, len(score)).t()
        has_closed = torch.zeros_like(graph.bincount(), dtype=torch.bool)
        has_closed[graph[closed[:, 0]]] = True
        wedges = disjoint_wedges(edges[:, ~has_closed[graph[edges[0]]]], score)
        return torch.cat([disjoint_triads(closed, score), wedges])

    def _within(self, found: Tensor, batch: Tensor) -> Tensor:
        """Return which of the triads, the best first, are left when each graph is to keep a part of its nodes."""
        nodes = batch.bincount()
        least = (
            torch.full_like(nodes, self.ratio) if isinstance(self.ratio, int) else (self.ratio * nodes).ceil().long()
        )
        room = (nodes - least).clamp(min=0) // 2
        graph = batch[found[:, 0]]
        return _place_in_group(graph) < room[graph]


class ContractEdges(Connect):
    """Join edges between the same clusters, and sum their features; edges inside a cluster go.
    Takes edge_index [2, edges] and edge_attr [edges, *] or None; gives a sorted `ConnectOutput`.
    """

    _fxopt_is_operation: ClassVar[bool] = True

    def forward(
        self,
        select_output: SelectOutput,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> ConnectOutput:
        """Return the edges between clusters [2, edges], their features [edges, *] and the graph of each [clusters]."""
        pooled = cast("tuple[Tensor, Tensor | None]", pool_edge(select_output.cluster_index, edge_index, edge_attr))
        return ConnectOutput(*pooled, self.get_pooled_batch(select_output, batch))


class RO3TriadPooling(nn.Module):
    r"""Coarsen graphs: triads of nodes with high scores become one node each, other nodes stay.

    With :math:`\mathbf{y} = \mathbf{X}\mathbf{p} / \|\mathbf{p}\|` a triad :math:`\{i, j, k\}` has the score
    :math:`(y_i + y_j + y_k) / 3`. No two of the triads that are taken share a node: the one with the highest score is
    taken first, until none is left or a graph has as few nodes as `ratio` asks for. In the place of a triad there is

    .. math::
        \mathbf{x}^{\prime} = \sigma\big((y_i + y_j + y_k) / 3\big) \cdot
        \mathrm{aggr}(\mathbf{x}_i, \mathbf{x}_j, \mathbf{x}_k)

    Edges between the same nodes are joined and their features summed; self-loops go, also those that were there.
    The direction of edges does not matter for what is a triad. Apart from tied scores the result does not depend on
    the order of nodes; ties are broken by a node's place in its graph.

    This is a design of fxopt's own, after relational pooling (Murphy et al., 2019, https://arxiv.org/abs/1903.02541)
    and edge contraction (Diehl, 2019, https://arxiv.org/abs/1905.10990).

    Args:
        in_channels: size of each node's features.
        ratio: what part of a graph's nodes is kept at least, as a float, or how many, as an int. As a triad becomes one
            node, no less than a third is ever kept. Not read where `min_score` is given.
        triads: `"closed"` takes triangles and, in a graph that has none, three connected nodes; `"all"` takes three
            connected nodes everywhere.
        min_score: where given, all disjoint triads with a higher gate are taken.
        multiplier: what features are multiplied by after pooling.
        nonlinearity: :math:`\sigma`, a name or a callable.
        aggr: how features of a triad are joined: the name of an aggregation of PyTorch Geometric, or one.
        device, dtype: of the parameter.

    Shape:
        - x: [nodes, in_channels]; edge_index: [2, edges]; edge_attr: [edges, *] or None; batch: [nodes] or None;
          attn: [nodes, in_channels] or None, scored in the place of x
        - x, edge_index, edge_attr and batch of the new graphs, then perm: for each new node the first of the nodes that
          it stands for; score: its gate, 1 for a node that stayed. `select` gives the clusters.
    """

    _fxopt_is_operation: ClassVar[bool] = True
    _fxopt_coarsens: ClassVar[bool] = True

    def __init__(
        self,
        in_channels: int,
        ratio: float = 0.5,
        triads: Literal["closed", "all"] = "closed",
        min_score: float | None = None,
        multiplier: float = 1.0,
        nonlinearity: str | Callable[[Tensor], Tensor] = "tanh",
        aggr: str | Aggregation = "sum",
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.ratio, self.triads = in_channels, ratio, triads
        self.min_score, self.multiplier = min_score, multiplier
        self.select = SelectTriads(in_channels, ratio, triads, min_score, nonlinearity, device=device, dtype=dtype)
        self.reduce: Aggregation = resolver.aggregation_resolver(aggr)
        self.connect = ContractEdges()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        self.select.reset_parameters()
        self.reduce.reset_parameters()

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        attn: Tensor | None = None,
    ) -> Pooled:
        """Return x [clusters, channels], edge_index [2, edges], edge_attr, batch, perm and score [clusters].

        Takes x [nodes, channels] (`in_channels` of them without attn), edge_index [2, edges] int64, edge_attr [edges,
        *], summed where edges join, batch [nodes] int64, and attn [nodes, in_channels], scored in the place of x.
        Raises a UsageError where an argument is not of that form.
        """
        check_edges(edge_index, len(x))
        edge_index = edge_index.contiguous()
        batch = edge_index.new_zeros(len(x)) if batch is None else batch
        check_batch(batch, len(x))
        check_graphs(edge_index, batch, int(batch.max()) + 1 if len(batch) else 0)
        if edge_attr is not None and len(edge_attr) != edge_index.shape[1]:
            found = list(edge_attr.shape)
            raise UsageError(f"edge_attr is {found}; give a row for each of {edge_index.shape[1]} edges")
        attn = self._scored(x if attn is None else attn, edge_index)
        if len(attn) != len(x):
            raise UsageError(f"attn has {len(attn)} rows; give one for each of {len(x)} nodes")
        chosen = self.select(attn, edge_index, batch)
        perm = _first_of_each(chosen.cluster_index, chosen.num_clusters)
        score = chosen.weight[perm]
        joined = self.reduce(x, chosen.cluster_index, dim_size=chosen.num_clusters, dim=0)
        joined = joined * score.view(-1, *[1] * (x.dim() - 1)) * self.multiplier
        graphs = self.connect(chosen, edge_index, edge_attr, batch)
        return joined, graphs.edge_index, graphs.edge_attr, graphs.batch, perm, score

    def _scored(self, attn: Tensor, edge_index: Tensor) -> Tensor:
        return attn

    def extra_repr(self) -> str:
        limit = f"ratio={self.ratio}" if self.min_score is None else f"min_score={self.min_score}"
        return f"{self.in_channels}, {limit}, triads={self.triads!r}, multiplier={self.multiplier}"


def _check(in_channels: object, ratio: object, triads: object, min_score: object) -> None:
    positive_integer(in_channels, "in_channels")
    if triads not in ("closed", "all"):
        raise UsageError(f"triads is {triads!r}; give 'closed' or 'all'")
    if min_score is not None:
        expect(min_score, (int, float), "min_score", "a number, or None")
    fits = ratio >= 1 if isinstance(ratio, int) else isinstance(ratio, float) and 0 <= ratio <= 1
    if isinstance(ratio, bool) or not fits:
        raise UsageError(f"ratio is {ratio!r}; give a part of the nodes, such as 0.5, or a number of nodes")


def _best_first(score: Tensor, batch: Tensor) -> Tensor:
    """Return the nodes, those with the highest scores first; ties are broken by a scrambled place in the graph.
    By the place itself, neighbours in a path of equal nodes would be taken in a round each.
    """
    place = _place_in_group(batch)
    mixed = place * 0x5851F42D4C957F2D
    order = ((mixed ^ (mixed >> 32)) * 0x14057B7EF767814F).argsort(stable=True)
    return order[score[order].argsort(descending=True, stable=True)]


def _place_in_group(group: Tensor) -> Tensor:
    """Return how many come before each with the same group."""
    order = group.argsort(stable=True)
    count = group.bincount()
    start = count.cumsum(0) - count
    places = torch.arange(len(group), device=group.device) - start[group[order]]
    return torch.empty_like(group).scatter_(0, order, places)


def _first_of_each(cluster: Tensor, clusters: int) -> Tensor:
    nodes = torch.arange(len(cluster), device=cluster.device)
    return cluster.new_full((clusters,), len(cluster)).scatter_reduce_(0, cluster, nodes, "amin")


class SAGTriadPooling(RO3TriadPooling):
    """Pool triads by the output of `gnn`, a number for each node; `options` as of `RO3TriadPooling`."""

    def __init__(self, gnn: nn.Module, **options: Any) -> None:
        super().__init__(1, **options)
        self.gnn = gnn
        for name in ("select", "reduce", "connect"):  # state dicts list the scorer first, as `SAGPooling` does
            self.add_module(name, self._modules.pop(name))

    def _scored(self, attn: Tensor, edge_index: Tensor) -> Tensor:
        return self.gnn(attn.view(-1, 1) if attn.dim() == 1 else attn, edge_index)

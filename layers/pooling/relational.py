"""Pooling of graphs over all triples of their nodes."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from ...compat import autocast_dtype
from ...cuda_ops.triples import (
    MEMORY_LIMIT,
    NODE_LIMIT,
    TYPES,
    check_batch,
    check_edge_index,
    oriented_edges,
)
from ...errors import UsageError, positive_integer
from .standardized import Standardized
from .sums import sums_by_codegree, sums_by_distance, sums_by_edges, weights_of

__all__ = ["RO3Pooling"]

Structure = Literal["adjacency", "distance", "codegree"]

_CAPS = {"adjacency": 0, "distance": 3, "codegree": 2}
_LARGEST_CAP = 100
_SMALL = 1e-3
"""Means of products much larger than its square root are taken to the cube root; the slope at 0 is its -1/3 power."""


class RO3Pooling(nn.Module):
    r"""Pool each graph by sums over all triples of its nodes: relational pooling of order 3.

    This is a design of its own, after relational pooling (Murphy et al., "Relational Pooling for Graph
    Representations", ICML 2019, k-ary form), restricted to symmetric functions of three nodes: there is no average over
    the orders of three nodes, since the product of their features does not depend on it.

    All triples of distinct nodes of one graph fall into types. For each type there is the mean of
    :math:`x_i x_j x_k`, channel by channel, brought back to the size of x by a smooth cube root,
    :math:`v (v^2 + 10^{-3})^{-1/3}`; and the share of the type among all triples of the graph. The types:

    - ``"adjacency"``: 4, triples with no edge, one, two (an open wedge) and three (closed). Costs O(n + m) and the
      enumeration of triangles, O(m^1.5).
    - ``"distance"``: 20, by the lengths of the three shortest paths: 1, 2, 3, and more or no path. O(n m + n b^2)
      for a graph, with b nodes within the last distance of one.
    - ``"codegree"``: 120, by the number of edges, of neighbours that all three have in common, and of those of the
      three pairs, the latter two up to 2. This is information about four nodes. O(n m + n b^2) for a graph, n b^2 once
      for every 62 nodes, with b nodes that are joined to one or have a neighbour in common with it.

    Self-loops are left out, and edges are read in either direction; an edge that is given several times has the mean of
    its weights. Sums are taken in float64 (float32 on devices without it). The result does not depend on the order of
    nodes and edges but for rounding; shares without weights are exact.

    Args:
        channels: if given, features pass a linear layer before. The means pass a perceptron of this width, and with
            them how many triples there are of each type and the logarithms of that, standardized as by a batch norm.
            Otherwise nothing is learned.
        structure: how triples are told apart.
        in_channels: number of features of x where something is learned; `channels` by default.
        edge_channels: number of features of an edge, from which its weight is learned (a linear layer and a sigmoid);
            needs `channels` and ``"adjacency"``.
        cap: the last distance, or number of common neighbours, that is told apart; 3 and 2 by default, 100 at most.
        node_limit: nodes of a graph at most, for ``"distance"`` and ``"codegree"``: more is an error.
        memory_limit: bytes for triples that are looked at together.
        device, dtype: of the parameters.

    Shape:
        - x: [n, F], floating.
        - edge_index: [2, E] int64.
        - edge_attr: [E] or [E, 1], weights; [E, edge_channels] where they are learned from. Only ``"adjacency"`` reads
          them. A weight w is an edge to the share w, so that a triple with the weights a, b and c is closed to the
          share a b c, and empty to the share (1 - a)(1 - b)(1 - c).
        - batch: [n] int64, the graph of each node, in any order; None for one graph.
        - result: [B, channels], or [B, types * (F + 1)]: the means of the first type, of the second, ..., and the
          shares (`width(F)` says how many). Graphs of fewer than three nodes get zeros.

    Raises:
        UsageError: an argument does not fit.
    """

    _fxopt_is_operation: ClassVar[bool] = True

    def __init__(
        self,
        channels: int | None = None,
        structure: Structure = "adjacency",
        *,
        in_channels: int | None = None,
        edge_channels: int | None = None,
        cap: int | None = None,
        node_limit: int = NODE_LIMIT,
        memory_limit: int = MEMORY_LIMIT,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_options(channels, structure, in_channels, edge_channels, cap)
        self.node_limit = positive_integer(node_limit, "node_limit")
        self.memory_limit = positive_integer(memory_limit, "memory_limit")
        self.channels, self.structure = channels, structure
        self.in_channels = channels if in_channels is None else in_channels
        self.edge_channels = edge_channels
        self.cap = _CAPS[structure] if cap is None else cap
        self.before = self.after = self.gate = self.norm = None
        if channels is not None and self.in_channels is not None:
            self.before = nn.Linear(self.in_channels, channels, device=device, dtype=dtype)
            self.norm = Standardized(2 * self.num_types, device=device)
            widening = nn.Linear(self.num_types * (channels + 2), channels, device=device, dtype=dtype)
            self.after = nn.Sequential(widening, nn.ReLU(), nn.Linear(channels, channels, device=device, dtype=dtype))
        if edge_channels is not None:
            self.gate = nn.Linear(edge_channels, 1, device=device, dtype=dtype)

    @property
    def num_types(self) -> int:
        """How many types of triples are told apart."""
        return 4 if self.structure == "adjacency" else TYPES[self.structure](self.cap)

    def width(self, features: int) -> int:
        """Return how many numbers are computed for a graph from so many features, before anything is learned."""
        return self.num_types * (features + 1)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, and forget statistics of graphs."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, Standardized)):
                module.reset_parameters()

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Return the pooled graphs, see the class; without `batch_size`, `batch` is searched for the last one.

        The operators that check the edges and go through triples wait for the device in any case.
        """
        check_edge_index(edge_index)
        self._check(x, edge_index, edge_attr, batch)
        count = _number_of_graphs(batch, batch_size)
        batch = edge_index.new_zeros(x.shape[0]) if batch is None else batch
        hidden = x if self.before is None else self.before(x)
        means, counts, triples = self._pooled(hidden, edge_index, edge_attr, batch, count)
        if self.after is None or self.norm is None:
            return torch.cat([means, counts / triples.clamp(min=1)], 1).to(x.dtype)
        numbers = self.norm(torch.cat([counts, counts.clamp(min=0).log1p()], 1), triples > 0)
        return self.after(torch.cat([means, numbers], 1).to(hidden.dtype)) * (triples > 0).to(hidden.dtype)

    def _pooled(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None, batch: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the means [graphs, types * C] and numbers of triples [graphs, types] by type, and of all of them."""
        is_dense = self.structure != "adjacency"
        edges, place = oriented_edges(edge_index, batch, count, self.node_limit if is_dense else -1)
        exact = torch.float32 if x.device.type == "mps" else torch.float64
        counted = torch.cat([x.to(exact), x.new_ones(x.shape[0], 1, dtype=exact)], 1)
        if self.structure == "distance":
            sums = sums_by_distance(counted, edges, batch, count, self.cap, self.memory_limit)
        elif self.structure == "codegree":
            sums = sums_by_codegree(counted, edges, batch, count, self.cap, self.memory_limit)
        else:
            weights = weights_of(edges, place, self._weights(edge_attr), exact)
            sums = sums_by_edges(counted, weights, edges, batch, count, self.memory_limit)
        nodes = x.new_zeros(count, 1, dtype=exact).index_add(0, batch, counted[:, -1:])
        return *_means_and_counts(sums), nodes * (nodes - 1) * (nodes - 2) / 6

    def _weights(self, edge_attr: Tensor | None) -> Tensor | None:
        if edge_attr is None:
            return None
        return edge_attr.reshape(-1) if self.gate is None else self.gate(edge_attr).sigmoid().view(-1)

    def _check(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None, batch: Tensor | None) -> None:
        if x.dim() != 2 or not x.is_floating_point():
            raise UsageError(f"x is {list(x.shape)} {x.dtype}; give [number of nodes, features] in floats")
        if self.in_channels is not None and x.shape[1] != self.in_channels:
            raise UsageError(f"x has {x.shape[1]} features, in_channels is {self.in_channels}")
        self._check_dtype(x)
        if batch is not None:
            check_batch(batch, x.shape[0])
        if edge_attr is not None:
            if not edge_attr.is_floating_point() and batch is None and edge_attr.shape == x.shape[:1]:
                raise UsageError("edge_attr has whole numbers, one for each node: name the graph of each as batch=")
            self._check_weights(edge_attr, edge_index)

    def _check_dtype(self, x: Tensor) -> None:
        if self.before is None or x.dtype == self.before.weight.dtype:
            return
        wanted = self.before.weight.dtype
        if autocast_dtype(x) != autocast_dtype(self.before.weight):
            raise UsageError(f"x is {x.dtype}, and the parameters are {wanted}; give {wanted}")

    def _check_weights(self, edge_attr: Tensor, edge_index: Tensor) -> None:
        if self.structure != "adjacency":
            raise UsageError(f"structure='{self.structure}' reads no edge_attr; leave it out, or use 'adjacency'")
        wanted = (1,) if self.edge_channels is None else (self.edge_channels,)
        is_flat = edge_attr.dim() == 1 and self.edge_channels is None
        if edge_attr.shape[:1] != edge_index.shape[1:] or not (is_flat or edge_attr.shape[1:] == wanted):
            hint = (
                "" if self.edge_channels is not None else "; edge_channels=, with channels, learns a weight from more"
            )
            raise UsageError(
                f"edge_attr is {list(edge_attr.shape)}; give {[*edge_index.shape[1:], *wanted]} floats{hint}"
            )

    def extra_repr(self) -> str:
        learned = f"{self.in_channels}, {self.channels}, " if self.channels is not None else ""
        cap = f", cap={self.cap}" if self.structure != "adjacency" else ""
        edges = f", edge_channels={self.edge_channels}" if self.edge_channels is not None else ""
        return f"{learned}structure={self.structure!r}{cap}{edges}"


def _means_and_counts(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the sums [graphs, types, C + 1], the last of ones, say of each type."""
    values, counts = sums[..., :-1], sums[..., -1:]
    means = torch.where(counts == 0, 0.0, values / counts.clamp(min=1))
    rooted = means * (means.square() + _SMALL).pow(-1 / 3)
    return rooted.flatten(1), counts.squeeze(2)


def _number_of_graphs(batch: Tensor | None, batch_size: int | None) -> int:
    if batch_size is not None:
        if isinstance(batch_size, float | str | bool):
            raise UsageError(f"batch_size is {batch_size!r}; give a whole number, at least 0")
        if batch is None and batch_size != 1:
            raise UsageError(f"batch_size is {batch_size}, without batch; give batch, or leave batch_size out")
        return batch_size
    if batch is None:
        return 1
    return int(batch.max()) + 1 if batch.numel() else 0


def _check_options(
    channels: object, structure: object, in_channels: object, edge_channels: object, cap: object
) -> None:
    sizes = {"channels": channels, "in_channels": in_channels, "edge_channels": edge_channels, "cap": cap}
    for name, size in sizes.items():
        if size is not None:
            positive_integer(size, name)
    if isinstance(cap, int) and cap > _LARGEST_CAP:
        raise UsageError(f"cap is {cap}: types are as many as its cube; give {_LARGEST_CAP} at most")
    if structure not in get_args(Structure):
        raise UsageError(f"unknown structure {structure!r}; give one of {', '.join(get_args(Structure))}")
    if structure == "adjacency" and cap is not None:
        raise UsageError("structure='adjacency' reads no cap; leave it out")
    if channels is None and (in_channels is not None or edge_channels is not None):
        raise UsageError("in_channels and edge_channels are read where something is learned; give channels, too")
    if structure != "adjacency" and edge_channels is not None:
        raise UsageError(f"structure='{structure}' reads no edge_attr; leave edge_channels out, or use 'adjacency'")

"""A graph in compressed rows: the edges into each node, one after another."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Part", "Rows", "rows_of"]

_PART = 2**16
"""Edges that are looked at together, so that a number of each stays in the cache."""


@dataclass(frozen=True, eq=False)
class Part:
    """The edges, and the nodes that they lead to, of a range from the first to behind the last."""

    edges: slice
    nodes: slice
    offsets: Tensor
    sources: Tensor
    targets: Tensor
    rows: Tensor


@dataclass(eq=False)
class Rows:
    """Edges sorted by the node that they lead to; what is computed from them is kept.
    `offsets` [targets + 1]: where the edges into each node begin; `sources` [E]: where each comes from; `order` [E]:
    its place among those given; `uses` counts how often each layer went over them.
    """

    offsets: Tensor
    sources: Tensor
    order: Tensor
    num_sources: int
    by_heads: dict[int, Rows] = field(default_factory=dict[int, "Rows"])
    uses: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def num_targets(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def degree(self) -> Tensor:
        """How many edges lead to each node."""
        with torch.inference_mode(False):
            return self.offsets.diff()

    @cached_property
    def targets(self) -> Tensor:
        """The node that each edge leads to."""
        with torch.inference_mode(False):
            nodes = torch.arange(self.num_targets)
            return nodes.repeat_interleave(self.offsets.diff(), output_size=len(self.sources))

    @cached_property
    def parts(self) -> list[Part]:
        """The edges, some at a time."""
        with torch.inference_mode(False):
            found, low = list[Part](), 0
            while low < self.num_targets:
                end = torch.searchsorted(self.offsets, self.offsets[low] + _PART, right=True)
                high = max(low + 1, int(end) - 1)
                found.append(self._part(low, high))
                low = high
            return found

    def _part(self, low: int, high: int) -> Part:
        first, last = int(self.offsets[low]), int(self.offsets[high])
        edges, targets = slice(first, last), self.targets[first:last]
        offsets = self.offsets[low : high + 1] - first
        return Part(edges, slice(low, high), offsets, self.sources[edges], targets, targets - low)

    @cached_property
    def transposed(self) -> Rows:
        """The edges from each node; `order` holds their places in these rows."""
        with torch.inference_mode(False):
            order = _order(self.sources, self.num_sources)
            return Rows(_offsets(self.sources, self.num_sources), self.targets[order], order, self.num_targets)

    def of_heads(self, heads: int) -> Rows:
        """Return the rows of as many graphs as there are heads, one after another.
        Head h of source j is j * heads + h, as features are laid out; head h of target i is h * targets + i.
        """
        if heads == 1:
            return self
        if heads not in self.by_heads:
            with torch.inference_mode(False):
                self.by_heads[heads] = self._repeated(heads)
        return self.by_heads[heads]

    def _repeated(self, heads: int) -> Rows:
        edges, head = len(self.sources), torch.arange(heads).unsqueeze(1)
        starts = (self.offsets[:-1] + head * edges).view(-1)
        offsets = torch.cat([starts, starts.new_tensor([heads * edges])])
        sources = (self.sources * heads + head).view(-1)
        wide = Rows(offsets, sources, torch.arange(heads * edges), self.num_sources * heads)
        wide.targets = (self.targets + head * self.num_targets).view(-1)
        return wide


def rows_of(edge_index: Tensor, num_nodes: int, *, flow: str, num_targets: int | None = None) -> Rows | None:
    """Return the rows of a graph [2, E] int64; None where an edge names a node that is not there. Of two kinds of
    nodes there are as many sources and `num_targets`.
    """
    targets = num_nodes if num_targets is None else num_targets
    source, target = edge_index if flow == "source_to_target" else edge_index.flip(0)
    with torch.inference_mode(False):  # what is kept may be needed for a backward later
        if int(edge_index.min()) < 0 or int(source.max()) >= num_nodes or int(target.max()) >= targets:
            return None
        order = _order(target, targets)
        return Rows(_offsets(target, targets), source.index_select(0, order), order, num_nodes)


_RADIX = 2**15
"""From so many numbers on torch sorts by radix, several times as fast."""


def _order(nodes: Tensor, count: int) -> Tensor:
    """Return the order that sorts nodes, equal ones as they were: in few bits, and enough of them for a radix sort."""
    keys = nodes.to(torch.int16 if count < 2**15 else torch.int32 if count < 2**31 else torch.int64)
    if _RADIX // 8 < len(nodes) < _RADIX:
        keys = torch.cat([keys, keys.new_full((_RADIX - len(nodes),), count)])
    return keys.sort(stable=True).indices[: len(nodes)]


def _offsets(nodes: Tensor, count: int) -> Tensor:
    ends = nodes.new_zeros(count + 1)
    torch.cumsum(torch.bincount(nodes, minlength=count), 0, out=ends[1:])
    return ends

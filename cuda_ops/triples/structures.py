"""Types of triples of nodes: by the distances of their pairs, or by the neighbours that they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from ...errors import UsageError
from .listing import parts

__all__ = [
    "COLORS", "NODE_LIMIT", "TYPES", "Layout", "check_sizes", "common_triples", "multisets", "near_triples",
]  # fmt: skip

NODE_LIMIT = 512
"""Nodes of a graph: triples of near nodes are looked at, 22 million where all are near."""

_BITS = 62
"""Nodes in one word of a row of an adjacency matrix; signs are left alone."""

_BYTES_A_TRIPLE = 160
_TOGETHER = 2**13
"""Triples that are looked at together: what is computed of them stays in the cache, and takes no new pages."""


def multisets(colors: int) -> int:
    """Return how many multisets of three colours there are."""
    return (colors + 2) * (colors + 1) * colors // 6


TYPES: Mapping[str, Callable[[int], int]] = {
    "distance": lambda cap: multisets(cap + 1),
    "codegree": lambda cap: 4 * (cap + 1) * multisets(cap + 1),
}
"""Structure -> how many types of triples it tells apart, by its cap."""

COLORS: Mapping[str, Callable[[int], int]] = {"distance": lambda cap: cap, "codegree": lambda cap: 2 * cap + 1}
"""Structure -> how many colours pairs of near nodes have, by its cap; see `near_pairs`."""


def check_sizes(batch: Tensor, limit: int) -> None:
    """Raise a UsageError if a graph has more nodes than this; on a device this waits for it."""
    most = int(torch.bincount(batch).max()) if len(batch) else 0
    if most > limit:
        raise UsageError(
            f"a graph has {most} nodes, and its triples are looked at one by one: at most {limit}; "
            f"raise it by node_limit={most}, or use structure='adjacency'"
        )


def near_triples(pairs: Tensor, batch: Tensor, count: int, memory_limit: int) -> Iterator[Tensor]:
    """Yield the triples all of whose pairs `near_pairs` gave, in `count` colours, as [4, t]: three nodes, and graph *
    multisets + the multiset of their colours.
    """
    layout, table = Layout.of(batch), _multiset_numbers(count, batch.device).view(-1)
    (low, high), colors = layout.place[pairs[:2]], pairs[2]
    known, position = colors.new_full((len(batch), layout.width), count), layout.position[high]
    known[low, position] = colors
    row, known = high * layout.width, known.view(-1)
    places = torch.arange(len(low), device=low.device)
    later = torch.bincount(low, minlength=len(batch)).cumsum(0)[low] - places - 1
    for first, last in parts(later, max(1, min(memory_limit // _BYTES_A_TRIPLE, _TOGETHER))):
        of_part, own = later[first:last], places[first:last]
        edge = own.repeat_interleave(of_part)
        other = (own + 1 - (of_part.cumsum(0) - of_part)).repeat_interleave(of_part)
        other += torch.arange(len(edge), device=low.device)
        third = known.index_select(0, row.index_select(0, edge) + position.index_select(0, other))
        kept = (third < count).nonzero().view(-1)
        edge, other, third = (each.index_select(0, kept) for each in (edge, other, third))
        ends = low.index_select(0, edge), high.index_select(0, edge), high.index_select(0, other)
        u, v, w = (layout.order.index_select(0, end) for end in ends)
        color = (colors.index_select(0, edge) * count + colors.index_select(0, other)) * count + third
        cell = batch.index_select(0, u) * multisets(count) + table.index_select(0, color)
        yield torch.stack([u, v, w, cell])


def common_triples(pairs: Tensor, batch: Tensor, cap: int, memory_limit: int) -> Iterator[Tensor]:
    """Yield the triples all of whose pairs `near_pairs` gave by codegree, as [4, t]: three nodes, and (graph *
    multisets + the multiset of their colours) * (cap + 1) + neighbours that all three have in common, up to the cap.
    """
    layout = Layout.of(batch)
    words = _packed(layout.dense(pairs[:2, pairs[2] >= cap]))[:, layout.place]
    for found in near_triples(pairs, batch, COLORS["codegree"](cap), memory_limit):
        u, v, w, cell = found
        common = torch.zeros_like(u)
        for word in words:
            common += _count_bits(word[u] & word[v] & word[w])
        cell.mul_(cap + 1).add_(common.clamp_(max=cap))
        yield found


@dataclass
class Layout:
    """Nodes in the order of their graphs: which is where, where each is, its number in its graph, that graph's size."""

    order: Tensor
    place: Tensor
    position: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, batch: Tensor) -> Layout:
        """Return the layout of nodes whose graphs are given."""
        order = batch.argsort(stable=True)
        counts = torch.bincount(batch)
        places = torch.arange(len(batch), device=batch.device)
        starts = (counts.cumsum(0) - counts)[batch[order]]
        return cls(order, torch.empty_like(order).scatter_(0, order, places), places - starts, counts[batch[order]])

    @property
    def width(self) -> int:
        """Nodes of the largest graph."""
        return int(self.sizes.max()) if len(self.sizes) else 0

    def dense(self, edges: Tensor) -> Tensor:
        """Return [n, width], 1 where the node at a place and one of its graph have an edge."""
        both = self.place[torch.cat([edges, edges.flip(0)], 1)]
        matrix = torch.zeros(len(self.order), self.width, device=edges.device)
        matrix[both[0], self.position[both[1]]] = 1
        return matrix

    def sparse(self, edges: Tensor) -> Tensor:
        """Return the adjacency matrix [n, n] of the nodes at their places."""
        both = self.place[torch.cat([edges, edges.flip(0)], 1)]
        ones = torch.ones(both.shape[1], device=edges.device)
        return torch.sparse_coo_tensor(both, ones, (len(self.order),) * 2, check_invariants=False)


def _multiset_numbers(colors: int, device: torch.device) -> Tensor:
    """Return [colors, colors, colors], the number of the multiset of three colours."""
    table = torch.empty(colors, colors, colors, dtype=torch.int64)
    multisets = torch.combinations(torch.arange(colors), 3, with_replacement=True)
    for three in permutations(multisets.unbind(1)):
        table[three] = torch.arange(len(multisets))
    return table.to(device)


def _packed(adjacency: Tensor) -> Tensor:
    """Return the rows of an adjacency matrix as bits, [words, n]."""
    padded = torch.nn.functional.pad(adjacency, (0, -adjacency.shape[1] % _BITS)).to(torch.int64)
    bits = 1 << torch.arange(_BITS, device=adjacency.device)
    return (padded.view(len(adjacency), padded.shape[1] // _BITS, _BITS) * bits).sum(2).t().contiguous()


def _count_bits(words: Tensor) -> Tensor:
    """Return how many bits are set (Warren, Hacker's Delight, 5-1)."""
    words = words - ((words >> 1) & 0x5555555555555555)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (words * 0x0101010101010101) >> 56

"""Types of triples of nodes: by distances, and those by the neighbours that they have in common one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from ...errors import UsageError
from .listing import parts

__all__ = ["NODE_LIMIT", "TYPES", "Layout", "check_sizes", "multisets", "near_triples", "typed_triples"]

NODE_LIMIT = 512
"""Nodes of a graph: all its triples are looked at, 22 million for so many."""

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


def check_sizes(batch: Tensor, limit: int) -> None:
    """Raise a UsageError if a graph has more nodes than this; on a device this waits for it."""
    most = int(torch.bincount(batch).max()) if len(batch) else 0
    if most > limit:
        raise UsageError(
            f"a graph has {most} nodes, and all its triples are looked at: at most {limit}; "
            f"raise it by node_limit={most}, or use structure='adjacency'"
        )


def typed_triples(edges: Tensor, batch: Tensor, cap: int, memory_limit: int) -> Iterator[Tensor]:
    """Yield all triples of distinct nodes of one graph as [4, t]: three nodes, and graph * types + type (codegree)."""
    layout = Layout.of(batch)
    typed = _CommonNeighbours.of(layout, edges, layout.dense(edges), cap)
    types = TYPES["codegree"](cap)
    pairs, later = layout.pairs()
    for first, last in parts(later, max(1, min(memory_limit // _BYTES_A_TRIPLE, _TOGETHER))):
        pair = torch.arange(last - first, device=batch.device).repeat_interleave(later[first:last])
        i, j = pairs[:, first:last].index_select(1, pair)
        ends = later[first:last].cumsum(0)
        k = j + 1 + torch.arange(len(pair), device=pair.device) - (ends - later[first:last])[pair]
        cell = batch[layout.order[i]] * types + typed.types(i, j, k)
        yield torch.cat([layout.order[torch.stack([i, j, k])], cell[None]])


def near_triples(pairs: Tensor, batch: Tensor, cap: int, memory_limit: int) -> Iterator[Tensor]:
    """Yield the triples all of whose pairs `near_pairs` gave, as [4, t]: three nodes, and graph * types + type."""
    layout, table = Layout.of(batch), _multiset_numbers(cap, batch.device).view(-1)
    (low, high), colors = layout.place[pairs[:2]], pairs[2]
    known, position = colors.new_full((len(batch), layout.width), cap), layout.position[high]
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
        kept = (third < cap).nonzero().view(-1)
        edge, other, third = (each.index_select(0, kept) for each in (edge, other, third))
        ends = low.index_select(0, edge), high.index_select(0, edge), high.index_select(0, other)
        u, v, w = (layout.order.index_select(0, end) for end in ends)
        color = (colors.index_select(0, edge) * cap + colors.index_select(0, other)) * cap + third
        cell = batch.index_select(0, u) * multisets(cap) + table.index_select(0, color)
        yield torch.stack([u, v, w, cell])


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

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return the places [2, P] of all pairs of one graph, and how many nodes of it come after the second."""
        after = self.sizes - self.position - 1
        first = torch.arange(len(after), device=after.device).repeat_interleave(after)
        shift = torch.arange(len(first), device=first.device) - (after.cumsum(0) - after)[first]
        second = first + 1 + shift
        return torch.stack([first, second]), after[second]


@dataclass
class _CommonNeighbours:
    """Triples by edges among them, neighbours of all three, and neighbours of the three pairs, each up to the cap."""

    adjacency: Tensor
    colors: Tensor
    words: Tensor
    position: Tensor
    table: Tensor
    cap: int

    @classmethod
    def of(cls, layout: Layout, edges: Tensor, adjacency: Tensor, cap: int) -> _CommonNeighbours:
        colors = (layout.sparse(edges) @ adjacency).to(torch.int64).clamp_(max=cap)
        table = _multiset_numbers(cap + 1, edges.device)
        return cls(adjacency.to(torch.int64), colors, _packed(adjacency), layout.position, table, cap)

    def types(self, i: Tensor, j: Tensor, k: Tensor) -> Tensor:
        """Return the type of each triple of places."""
        of_pairs = self.table[_of_pairs(self.colors, self.position, i, j, k)]
        edges = sum(_of_pairs(self.adjacency, self.position, i, j, k), torch.zeros_like(i))
        common = torch.zeros_like(i)
        for word in self.words:
            common += _count_bits(word[i] & word[j] & word[k])
        return (of_pairs * 4 + edges) * (self.cap + 1) + common.clamp_(max=self.cap)


def _of_pairs(matrix: Tensor, position: Tensor, i: Tensor, j: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return matrix[i, position[j]], matrix[i, position[k]], matrix[j, position[k]]


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

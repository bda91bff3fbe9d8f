"""Node-disjoint triads of a graph: what a loop over all triads, the best first, would take, found in rounds.
Nodes are numbered from the best to the worst, and a triad lists them so. Its score is the sum of its nodes'; of equal
sums the one whose nodes come first is better, so that the order is total.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...cuda_ops.triples import lexicographic

__all__ = ["disjoint_triads", "disjoint_wedges"]


def disjoint_triads(triads: Tensor, score: Tensor) -> Tensor:
    """Return those of some triads [triads, 3] that are taken where the best comes first and no node is used twice.
    A triad is taken in a round when it is the best at each of its nodes; those that share a node with it go.
    """
    left, taken = _best_first(triads.sort(1).values, score), [triads[:0]]
    while left.numel():
        taken.append(_winners(left, len(score)))
        left = left[_free(taken[-1], len(score))[left].all(1)]
    return _best_first(torch.cat(taken), score)


def disjoint_wedges(edge_index: Tensor, score: Tensor) -> Tensor:
    """Return what `disjoint_triads` takes of all connected triads, open and closed, in memory for the edges alone.
    The best one at a node and an edge there joins the edge to the best other neighbour; whatever wins a round is one of
    these. Edges [2, edges] are in both directions, without self-loops, sorted.
    """
    taken = [edge_index.new_empty((0, 3))]
    while True:
        best = _best_wedges(edge_index)
        if not best.numel():
            return _best_first(torch.cat(taken), score)
        taken.append(_winners(_best_first(_promising(best, score), score), len(score)))
        edge_index = edge_index[:, _free(taken[-1], len(score))[edge_index].all(0)]


def _best_wedges(edge_index: Tensor) -> Tensor:
    """Return, for each edge but a node's first, the triad of both that has the node in the middle."""
    middle, end = edge_index
    is_first = torch.ones_like(middle, dtype=torch.bool)
    is_first[1:] = middle[1:] != middle[:-1]
    place = torch.arange(len(middle), device=middle.device)
    best = end[(place * is_first).cummax(0).values] if len(middle) else end
    return torch.stack([middle, end, best], 1)[~is_first].sort(1).values


def _promising(triads: Tensor, score: Tensor) -> Tensor:
    """Return those triads, all that may win among them, that have the highest sum at one of their nodes."""
    total = _sums(triads, score)
    each = total[:, None].expand_as(triads)
    lowest = torch.full_like(score, -torch.inf)
    highest = lowest.scatter_reduce_(0, triads.reshape(-1), each.reshape(-1), "amax")[triads]
    return triads[~(each < highest).all(1)]


def _best_first(triads: Tensor, score: Tensor) -> Tensor:
    """Return the triads, the best first."""
    triads = triads[lexicographic(triads.t(), len(score))]
    return triads[_sums(triads, score).argsort(descending=True, stable=True)]


def _sums(triads: Tensor, score: Tensor) -> Tensor:
    """Return the sums of scores, added in one order, so that a better node never makes a smaller sum."""
    first, second, third = score[triads].unbind(1)
    return first + second + third


def _winners(triads: Tensor, nodes: int) -> Tensor:
    """Return those triads, given the best first, that are the best at all of their nodes."""
    place = torch.arange(len(triads), device=triads.device)[:, None].expand_as(triads)
    best = place.new_full((nodes,), len(triads)).scatter_reduce_(0, triads.reshape(-1), place.reshape(-1), "amin")
    return triads[(best[triads] == place).all(1)]


def _free(taken: Tensor, nodes: int) -> Tensor:
    """Return which nodes are in none of the triads."""
    free = torch.ones(nodes, dtype=torch.bool, device=taken.device)
    free[taken.reshape(-1)] = False
    return free

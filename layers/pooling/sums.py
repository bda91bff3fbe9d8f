"""Sums of products over the triples of nodes of graphs, by type, with as few triples listed as can be."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ...cuda_ops.triples import CLOSED, COLORS, COMMON, NEAR, TYPES, multisets, near_pairs, sums_by_type

__all__ = ["sums_by_codegree", "sums_by_distance", "sums_by_edges", "weights_of"]


def sums_by_edges(x: Tensor, weights: Tensor, edges: Tensor, batch: Tensor, num_graphs: int, limit: int) -> Tensor:
    """Return the sums of x_i x_j x_k over the triples without an edge, with one, two and three: [graphs, 4, C].
    A weight [m, 1] is an edge to that share: a triple with a, b, c has two to a b (1-c) + a c (1-b) + b c (1-a).
    Takes x [n, C], simple oriented edges [2, m], and a limit in bytes.
    """

    def by_graph(values: Tensor, nodes_graph: Tensor) -> Tensor:
        return values.new_zeros(num_graphs, x.shape[1]).index_add(0, nodes_graph, values)

    u, v = edges
    of_edges, powers = batch[u], [by_graph(x**power, batch) for power in (1, 2, 3)]
    at_u, at_v = weights * x[u], weights * x[v]
    around = torch.zeros_like(x).index_add(0, u, at_v).index_add(0, v, at_u)
    squares = torch.zeros_like(x).index_add(0, u, at_v.square()).index_add(0, v, at_u.square())
    total = (powers[0] ** 3 - 3 * powers[0] * powers[1] + 2 * powers[2]) / 6
    pairs = by_graph(at_u * x[v] * (powers[0][of_edges] - x[u] - x[v]), of_edges)
    wedges = by_graph(x * (around.square() - squares) / 2, batch)
    closed = sums_by_type(at_u, at_v, at_u, (edges, batch, num_graphs), CLOSED, 0, limit)
    one, two = pairs - 2 * wedges + 3 * closed, wedges - 3 * closed
    return torch.stack([total - pairs + wedges - closed, one, two, closed], 1)


def weights_of(edges: Tensor, place: Tensor, given: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight of each simple edge, [m, 1]: the mean of those given for it; 1 where none are given."""
    if given is None:
        return torch.ones(edges.shape[1], 1, dtype=dtype, device=edges.device)
    values = torch.stack([given.to(dtype), torch.ones_like(given, dtype=dtype)], 1)
    sums = values.new_zeros(edges.shape[1] + 1, 2).index_add(0, place, values)[:-1]
    return sums[:, :1] / sums[:, 1:]


def sums_by_distance(x: Tensor, edges: Tensor, batch: Tensor, num_graphs: int, cap: int, limit: int) -> Tensor:
    """Return the sums of x_i x_j x_k over the triples by their three distances, up to the cap: [graphs, types, C].
    Takes as `sums_by_edges`.
    """
    pairs = near_pairs(edges, batch, cap, "distance")
    flat = sums_by_type(x, x, x, (pairs, batch, num_graphs), NEAR, cap, limit)
    closed = flat.view(num_graphs, multisets(cap), x.shape[1]).transpose(0, 1).flatten(1)
    found = torch.cat([closed, _with_others(x, pairs, batch, num_graphs, cap, closed)])
    places = {three: number for number, three in enumerate(_near_and_others(cap))}
    order = [places[three] for three in _threes(cap + 1)]
    return found[pairs.new_tensor(order)].view(len(order), num_graphs, x.shape[1]).transpose(0, 1)


def sums_by_codegree(x: Tensor, edges: Tensor, batch: Tensor, num_graphs: int, cap: int, limit: int) -> Tensor:
    """Return the sums of x_i x_j x_k over the triples by their edges and by the neighbours in common, of each pair and
    of all three, up to the cap: [graphs, types, C]. Takes as `sums_by_edges`.
    """
    # A triple with neighbours that all three have in common has three near pairs, so the others need no such number.
    pairs, count = near_pairs(edges, batch, cap, "codegree"), COLORS["codegree"](cap)
    flat = sums_by_type(x, x, x, (pairs, batch, num_graphs), COMMON, cap, limit)
    by_common = flat.view(num_graphs, multisets(count) * (cap + 1), x.shape[1]).transpose(0, 1).flatten(1)
    closed = by_common.view(multisets(count), cap + 1, by_common.shape[1]).sum(1)
    found = torch.cat([by_common, _with_others(x, pairs, batch, num_graphs, count, closed)])
    types = TYPES["codegree"](cap)
    sums = found.new_zeros(types, found.shape[1]).index_add(0, pairs.new_tensor(_types_of_codegree(cap)), found)
    return sums.view(types, num_graphs, x.shape[1]).transpose(0, 1)


def _types_of_codegree(cap: int) -> list[int]:
    """Return the type of each sum: of triples with three near pairs by neighbours of all three, and of the others."""
    numbers = {three: number for number, three in enumerate(_threes(cap + 1))}
    far, types = COLORS["codegree"](cap), list[int]()
    for three in _near_and_others(far):
        pairs = [0 if color == far else color + 1 for color in three]
        a, b, c = sorted([pair % (cap + 1) for pair in pairs])
        first = (numbers[a, b, c] * 4 + sum(pair // (cap + 1) for pair in pairs)) * (cap + 1)
        types += range(first, first + (1 if far in three else cap + 1))
    return types


def _twos(colors: int) -> list[tuple[int, int]]:
    """Return the multisets of two of so many colours."""
    return [(a, b) for a in range(colors) for b in range(a, colors)]


def _threes(colors: int) -> list[tuple[int, int, int]]:
    """Return the multisets of three of so many colours."""
    return [(a, b, c) for a, b in _twos(colors) for c in range(b, colors)]


def _near_and_others(far: int) -> list[tuple[int, int, int]]:
    """Return the multisets of three of so many colours of near pairs, then of two, one and none of these with the next
    one, which is that of all other pairs.
    """
    return [*_threes(far), *[(a, b, far) for a, b in _twos(far)], *[(a, far, far) for a in range(far)], (far, far, far)]


def _with_others(x: Tensor, pairs: Tensor, batch: Tensor, num_graphs: int, colors: int, closed: Tensor) -> Tensor:
    """Return the sums over triples with two near pairs, with one and with none, [multisets, graphs * C], in the order
    of `_near_and_others`. They follow from sums over all triples that hold such pairs, and from those with three,
    `closed`; so only these need be listed.
    """
    three, two = _threes(colors), _twos(colors)
    first, second = x.new_tensor(two, dtype=torch.int64).view(-1, 2).unbind(1)
    held = _sums_around(x, pairs, batch, num_graphs, colors, first, second)
    powers, linear, squared, wedges = cast("list[Tensor]", held.split([3, colors, colors, len(two)]))
    triples = (powers[0] ** 3 - 3 * powers[0] * powers[1] + 2 * powers[2]) / 6
    with_pair = powers[0] * linear / 2 - squared
    with_two = torch.where((first == second).unsqueeze(1), (wedges - squared[first]) / 2, wedges)
    numbers = {pair: number for number, pair in enumerate(two)}
    in_closed = [numbers[pair] for a, b, c in three for pair in ((a, b), (a, c), (b, c))]
    with_two = with_two.index_add(0, first.new_tensor(in_closed), -closed.repeat_interleave(3, 0))
    in_closed = [color for each in three for color in each]
    with_pair = with_pair.index_add(0, first.new_tensor(in_closed), -closed.repeat_interleave(3, 0))
    with_pair = with_pair.index_add(0, torch.cat([first, second]), -with_two.repeat(2, 1))
    rest = triples - closed.sum(0) - with_two.sum(0) - with_pair.sum(0)
    return torch.cat([with_two, with_pair, rest.unsqueeze(0)])


def _sums_around(
    x: Tensor, pairs: Tensor, batch: Tensor, num_graphs: int, colors: int, first: Tensor, second: Tensor
) -> Tensor:
    """Return sums over nodes, [3 + 2 colours + pairs of colours, graphs * C]: of x, its square and cube, of both times
    the sum S of neighbours by colour, and of x times S and S by pair of colours.
    """
    u, v, color = pairs
    ends, others = torch.cat([u, v]), torch.cat([v, u])
    around = x.new_zeros(len(x) * colors, x.shape[1]).index_add(0, ends * colors + color.repeat(2), x[others])
    own, around = x.unsqueeze(1), around.view(len(x), colors, x.shape[1])
    linear = own * around
    of_nodes = torch.cat([own, own**2, own**3, linear, own * linear, linear[:, first] * around[:, second]], 1)
    sums = x.new_zeros(num_graphs, of_nodes.shape[1] * x.shape[1]).index_add(0, batch, of_nodes.flatten(1))
    return sums.view(num_graphs, of_nodes.shape[1], x.shape[1]).transpose(0, 1).flatten(1)

"""Sums over the neighbours of nodes, without an intermediate for each edge; differentiable to any order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat import wants_gradients
from .rows import Part, Rows

__all__ = [
    "at_edges", "edge_products", "largest_of", "neighbour_sums", "normalized_in_parts", "normalized_sums",
    "sums_of_edges",
]  # fmt: skip

Side = Literal["sources", "targets"]


def neighbour_sums(x: Tensor, values: Tensor | None, rows: Rows) -> Tensor:
    """Return the sum of the features x [sources, C] of each node's neighbours, times `values` [E]: [targets, C]."""
    if wants_gradients(x, values):
        return cast("Tensor", _NeighbourSums.apply(x, values, rows))
    return _bags(x, rows.sources, rows.offsets, values)


def at_edges(x: Tensor, rows: Rows, side: Side) -> Tensor:
    """Return the row of `x` [nodes, ...] of the node at this side of each edge [E, ...]."""
    if wants_gradients(x):
        return cast("Tensor", _AtEdges.apply(x, rows, side))
    return x.index_select(0, getattr(rows, side))


def edge_products(targets: Tensor, sources: Tensor, rows: Rows) -> Tensor:
    """Return for each edge the product [E] of what its two nodes have: [targets, C] and [sources, C]."""
    if wants_gradients(targets, sources):
        return cast("Tensor", _EdgeProducts.apply(targets, sources, rows))
    return _dots(targets, sources, rows)


def sums_of_edges(values: Tensor, rows: Rows, side: Side = "targets") -> Tensor:
    """Return the sums of values of edges [E] or [E, C] by the node at this side [nodes, ...]."""
    if wants_gradients(values):
        return cast("Tensor", _SumsOfEdges.apply(values, rows, side))
    return _summed(values, rows, side)


def normalized_sums(x: Tensor, scores: Tensor, rows: Rows) -> Tensor:
    """Return sums of features, weighed by a softmax of `scores` [E] over the edges into each node: [targets, C]."""
    highest = torch.segment_reduce(scores.detach(), "max", offsets=rows.offsets)
    weights = (scores - highest.index_select(0, rows.targets)).exp()
    total = sums_of_edges(weights, rows)
    return neighbour_sums(x, weights, rows) / total.masked_fill(total == 0, 1).unsqueeze(1)


def normalized_in_parts(x: Tensor, scores: Callable[[int, Part], Tensor], rows: Rows, *, largest: float) -> Tensor:
    """Return the same for several heads [targets, heads, C], some edges at a time; without a gradient.
    `scores` gives those of a head and a part, to be overwritten; none is further from zero than `largest`.
    """
    heads, channels = x.shape[1:]
    out, flat = x.new_empty(rows.num_targets, heads, channels), x.contiguous().view(-1, channels)
    sources = rows.of_heads(heads).sources.view(heads, -1)
    for head in range(heads):
        for part in rows.parts:
            weights = scores(head, part)
            if not (largest < _SAFE and x.dtype.itemsize >= 4):  # otherwise nothing can overflow, or vanish
                highest = torch.segment_reduce(weights, "max", offsets=part.offsets)
                weights.sub_(highest.index_select(0, part.rows))
            total = torch.segment_reduce(weights.exp_(), "sum", offsets=part.offsets, initial=0)
            found = _bags(flat, sources[head, part.edges], part.offsets, weights)
            torch.div(found, total.masked_fill_(total == 0, 1).unsqueeze(1), out=out[part.nodes, head])
    return out


def largest_of(values: Tensor | None) -> float:
    """Return how far a number is from zero at most."""
    return 0.0 if values is None or not values.numel() else max(abs(float(bound)) for bound in values.aminmax())


_SAFE = 20.0
"""The exponential of a score up to this is taken as it is; of others that of the distance from the highest."""


def _bags(x: Tensor, places: Tensor, offsets: Tensor, values: Tensor | None = None) -> Tensor:
    return F.embedding_bag(
        places, x.contiguous(), offsets, mode="sum", per_sample_weights=values, include_last_offset=True
    )


@cache
def _announced() -> None:
    """Let torch say once that compressed sparse tensors are new, where nobody has to read it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], torch.empty(0), (1, 1), check_invariants=False)


def _dots(targets: Tensor, sources: Tensor, rows: Rows) -> Tensor:
    """Multiply row by row of the matrix of edges, so that no edge needs features of its own."""
    if targets.dtype not in (torch.float32, torch.float64):
        return (at_edges(targets, rows, "targets") * at_edges(sources, rows, "sources")).sum(1)
    _announced()
    places, shape = (rows.offsets, rows.sources), (rows.num_targets, rows.num_sources)
    empty = torch.sparse_csr_tensor(*places, targets.new_zeros(len(rows.sources)), shape, check_invariants=False)
    factors = targets.contiguous(), sources.contiguous().t()
    return cast("Tensor", cast("Any", torch.sparse).sampled_addmm(empty, *factors, beta=0.0).values())


def _summed(values: Tensor, rows: Rows, side: Side) -> Tensor:
    if values.dim() == 1 and side == "targets":
        return torch.segment_reduce(values, "sum", offsets=rows.offsets, initial=0)
    if values.dim() == 1:
        return values.new_zeros(rows.num_sources).index_add_(0, rows.sources, values)
    if side == "targets":
        return _bags(values, torch.arange(len(values)), rows.offsets)
    return _bags(values, rows.transposed.order, rows.transposed.offsets)


class _NeighbourSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor | None, rows: Rows) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.rows = rows
        ctx.save_for_backward(x, values)
        return _bags(x, rows.sources, rows.offsets, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, values), rows = ctx.saved_tensors, ctx.rows
        of_x = of_values = None
        if ctx.needs_input_grad[0]:
            back = rows.transposed
            of_x = neighbour_sums(gradient, None if values is None else values.index_select(0, back.order), back)
        if ctx.needs_input_grad[1]:
            of_values = edge_products(gradient, x, rows)
        return of_x, of_values, None


class _EdgeProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, targets: Tensor, sources: Tensor, rows: Rows) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.rows = rows
        ctx.save_for_backward(targets, sources)
        return _dots(targets, sources, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (targets, sources), rows = ctx.saved_tensors, ctx.rows
        of_targets = of_sources = None
        if ctx.needs_input_grad[0]:
            of_targets = neighbour_sums(sources, gradient, rows)
        if ctx.needs_input_grad[1]:
            back = rows.transposed
            of_sources = neighbour_sums(targets, gradient.index_select(0, back.order), back)
        return of_targets, of_sources, None


class _AtEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, side: Side) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.rows, ctx.side = rows, side
        return x.index_select(0, getattr(rows, side))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return sums_of_edges(gradient, ctx.rows, ctx.side), None, None


class _SumsOfEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Rows, side: Side) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.rows, ctx.side = rows, side
        return _summed(values, rows, side)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return at_edges(gradient, ctx.rows, ctx.side), None, None

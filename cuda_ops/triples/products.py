"""`triple_products`: sums of products over triples, an operator that is its own gradient, to any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ...errors import UsageError
from ..checks import check_one_device, check_one_dtype
from ..definition import define, keep_inputs
from .structures import COLORS, common_triples, multisets, near_triples
from .triangles import OrientedGraph, check_edge_index

__all__ = ["CLOSED", "COMMON", "NEAR", "Products", "sums_by_type", "triple_products", "triple_products_reference"]

CLOSED: Final = "closed"
"""Sum over triangles; p, q and r belong to their edges u-v, u-w and v-w."""

NEAR: Final = "near"
"""Sum over triples all of whose pairs are among the edges, which are those of `near_pairs`, by their distances."""

COMMON: Final = "common"
"""The same by neighbours in common: those of each pair, and those of all three; see `common_triples`."""

_CELLS: Mapping[str, Callable[[int], int]] = {
    CLOSED: lambda _: 1,
    NEAR: multisets,
    COMMON: lambda cap: multisets(COLORS["codegree"](cap)) * (cap + 1),
}
"""Which triples -> how many sums there are for a graph, by the cap."""

_NAME = "triple_products"
_ROLES = 4
_CACHED = 2**15
"""Numbers that are multiplied together, so that they stay in the cache: in a quarter of the time."""


def sums_by_type(
    p: Tensor, q: Tensor, r: Tensor, graph: tuple[Tensor, Tensor, int], structure: str, cap: int, memory_limit: int
) -> Tensor:
    """Return the sums of p q r over triples, by graph and type: [graphs * types, C].
    These are [rows, C], rows for oriented edges with `CLOSED` and else for nodes.
    """
    edges, batch, count = graph
    cells = p.new_zeros(count * _CELLS[structure](cap), p.shape[1])
    sums = triple_products(p, q, r, cells, edges, batch, structure, cap, memory_limit, [False, False, False, True])
    return sums[3]


class Products(NamedTuple):
    """The arguments of `triple_products`: tables [rows, C], the graph, which triples, and whose gradients."""

    p: Tensor
    q: Tensor
    r: Tensor
    g: Tensor
    edges: Tensor
    batch: Tensor
    structure: str
    cap: int
    memory_limit: int
    wanted: list[bool]

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The four factors."""
        return self[:4]


def triple_products_reference(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the sum of p q r g over all triples, zero where not wanted; g is [graphs * types, C]."""
    given = Products(*args)
    sums = tuple(torch.zeros_like(table) for table in given.tables)
    half = given.memory_limit // 2
    channels = max(1, given.p.shape[1])
    rows = max(1, min(half // (8 * (_ROLES + 3) * channels), _CACHED // channels))
    for whole in _places(given.edges, given.batch, given.structure, given.cap, half):
        for first in range(0, whole.shape[1], rows):
            _add_products(given.tables, whole[:, first : first + rows], given.wanted, sums)
    return sums[0], sums[1], sums[2], sums[3]


def _add_products(tables: tuple[Tensor, ...], places: Tensor, wanted: list[bool], sums: tuple[Tensor, ...]) -> None:
    needed = [any(is_wanted and role != own for role, is_wanted in enumerate(wanted)) for own in range(_ROLES)]
    values = [
        table.index_select(0, place) if need else None
        for table, place, need in zip(tables, places, needed, strict=True)
    ]
    for role, is_wanted in enumerate(wanted):
        if is_wanted:
            first, second, third = (value for other, value in enumerate(values) if other != role and value is not None)
            sums[role].index_add_(0, places[role], (first * second).mul_(third))


def _places(edges: Tensor, batch: Tensor, structure: str, cap: int, memory_limit: int) -> Iterator[Tensor]:
    """Yield the rows [4, t] of p, q, r and g that each triple multiplies."""
    if structure != CLOSED:
        yield from (near_triples if structure == NEAR else common_triples)(edges, batch, cap, memory_limit)
        return
    graph = OrientedGraph(edges, len(batch))
    for found in graph.triangles(memory_limit):
        yield torch.cat([graph.order[found], batch[edges[0, graph.order[found[:1]]]]])


def _check(*args: Any) -> None:
    given = Products(*args)
    tables = dict(zip("pqrg", given.tables, strict=True))
    check_one_dtype(_NAME, **tables)
    check_one_device(_NAME, **tables, edges=given.edges, batch=given.batch)
    check_edge_index(given.edges if given.structure == CLOSED else given.edges[:2])
    if given.structure not in _CELLS or given.cap < 0 or len(given.wanted) != _ROLES:
        triples = f"{given.structure!r} up to {given.cap}, for {len(given.wanted)} of {_ROLES} tables"
        raise UsageError(f"{_NAME}: no such triples: {triples}")


def _like_inputs(p: Tensor, q: Tensor, r: Tensor, g: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(table) for table in (p, q, r, g))


def _backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
    """Return the gradients: with one of the four exchanged for what comes from above, the operator again."""
    tables, graph = list(ctx.saved_tensors[:_ROLES]), ctx.saved_tensors[_ROLES:]
    *settings, own = ctx.settings
    gradients: list[Tensor | None] = [None] * _ROLES
    for role in (role for role in range(_ROLES) if own[role]):
        wanted = [other != role and ctx.needs_input_grad[other] for other in range(_ROLES)]
        exchanged = [upstream[role].contiguous() if other == role else table for other, table in enumerate(tables)]
        parts = triple_products(*exchanged, *graph, *settings, wanted)
        for other in (other for other in range(_ROLES) if wanted[other]):
            known = gradients[other]
            gradients[other] = parts[other] if known is None else known + parts[other]
    return (*gradients, *[None] * 6)


triple_products = define(
    _NAME,
    triple_products_reference,
    check=_check,
    fake=_like_inputs,
    kernel="triples.cuda_kernel:triple_products",
    setup=keep_inputs,
    backward=_backward,
    batching=None,
    schema="(Tensor p, Tensor q, Tensor r, Tensor g, Tensor edges, Tensor batch, str structure, SymInt cap, "
    "SymInt memory_limit, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
)

"""How many tokens an expert of a loop takes at most: its code cuts an expert's tokens, or compares their number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx

from ...errors import MatchFailure
from ...operators import canonical_name
from .members import operands
from .unrolling import Unrolled

__all__ = ["Bound", "bound_of", "filled"]

Bound = fx.Node | int
"""A capacity: the node that gives it, or a number."""


def bound_of(unrolled: Unrolled) -> Bound | None:
    """Return the capacity that a loop says its experts have, or None; MatchFailure: it decides otherwise by a size.
    Whether tokens beyond it are left out, and in which order tokens come, is for other calls to show.
    """
    bounds = list(_bounds(unrolled))
    if any(bound is not bounds[0] and bound != bounds[0] for bound in bounds):
        raise MatchFailure("its experts have several capacities, or one that is not a plain limit on their tokens")
    return bounds[0] if bounds else None


def filled(chosen: Tensor, count: int) -> Tensor:
    """Return choices [..., k] that send every token to the first expert, by another one of its slots each time."""
    rows = torch.arange(chosen.numel()).view(-1, chosen.shape[-1]) // chosen.shape[-1]
    slots = (torch.arange(chosen.shape[-1]) + rows) % chosen.shape[-1]
    others = 1 + (rows + slots) % (count - 1)
    return torch.where(slots == 0, 0, others).view(chosen.shape).to(chosen)


def _bounds(unrolled: Unrolled) -> Iterator[Bound]:
    for node in unrolled.graph.nodes:
        key = _cut(node, unrolled.values) if node in unrolled.shaped else None
        if key is None:
            continue
        if isinstance(key.start, fx.Node) and isinstance(key.stop, fx.Node):
            raise MatchFailure(
                "it cuts tokens that are sorted by expert, at counts: split and join them (torch.split, torch.cat, "
                "index_add), or pick each expert's by torch.where"
            )
        if key.start not in (None, 0) or key.step not in (None, 1) or not isinstance(key.stop, (int, fx.Node)):
            raise MatchFailure("it takes some of the tokens that an expert gets, and not the first: a capacity")
        yield key.stop
    for decided in unrolled.decided:
        if decided.kind == "size":
            if decided.limit is None:
                raise MatchFailure(f"the loop decides by how many tokens an expert gets, at {decided.place}")
            yield decided.limit


def _cut(node: fx.Node, values: Mapping[fx.Node, Any]) -> slice | None:
    """Return the range of rows that a node takes of a tensor, or None."""
    given = operands(node)
    if not given or not isinstance(given[0], fx.Node) or not isinstance(values.get(given[0]), Tensor):
        return None
    if canonical_name(node) == "getitem":
        key: Any = given[1]
        first = cast("tuple[Any, ...]", key)[:1] if isinstance(key, tuple) else (key,)
        is_cut = bool(first) and isinstance(first[0], slice) and first[0] != slice(None)
        return cast("slice[Any, Any, Any]", first[0]) if is_cut else None
    named = dict(zip(("input", "dim", "start", "length"), given, strict=False)) | dict(node.kwargs)
    if canonical_name(node) != "narrow" or named["dim"] != 0:
        return None
    return slice(named["start"], named["length"])

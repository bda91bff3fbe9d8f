"""Graphs of a module that only checks on the way tell apart: a size of one among the arguments is asked for first."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from ...runtime.graphs import Specialization
from ...runtime.guards import Argument, Attribute, Guard, Source, Truth, equal, item_of, key_of, require
from ...runtime.guards import Call as Computed
from ...runtime.values import Signature
from ..recording import Call

__all__ = ["Traced", "told_apart"]

Traced = list[tuple[Call | None, Specialization]]
"""Graphs, each with the call that it was traced for."""


def told_apart(traced: Traced, signature: Signature) -> list[Specialization]:
    """Return graphs that no call enters in vain where one argument has a size of one for some of them only."""
    return [_asking(call, each, traced, signature) for call, each in traced]


def _asking(call: Call | None, mine: Specialization, traced: Traced, signature: Signature) -> Specialization:
    rivals = [other for other, each in traced if other is not call and _only_checks_differ(mine, each)]
    asked = [guard for other in rivals for guard in [_distinction(call, other, signature)] if guard is not None]
    return replace(mine, guards=tuple(dict.fromkeys((*mine.guards, *asked)))) if asked else mine


def _only_checks_differ(one: Specialization, other: Specialization) -> bool:
    return frozenset(one.guards) == frozenset(other.guards) and _has_checks(one) and _has_checks(other)


def _has_checks(specialization: Specialization) -> bool:
    return bool(specialization.graph.find_nodes(op="call_function", target=require))


def _distinction(call: Call | None, other: Call | None, signature: Signature) -> Guard | None:
    """Return what holds of the sizes in one call and not in another: the first that is one in either."""
    if call is None or other is None:
        return None
    mine, theirs = dict(_sizes(call, signature)), dict(_sizes(other, signature))
    for source, size in mine.items():
        beside = theirs.get(source, size)
        if (size == 1) != (beside == 1) and size and beside:
            if size == 1:
                return equal(source, 1)
            several = Computed(operator.ne, (source, key_of(1)))
            return Guard(several, Truth(expected=True), f"{source} is not 1")
    return None


def _sizes(call: Call, signature: Signature) -> Iterator[tuple[Source, int]]:
    args, kwargs = call.plain_arguments
    for name, value in signature.bind(args, dict(kwargs)).items():
        if isinstance(value, Tensor):
            shape = Attribute(Argument(name), "shape")
            yield from ((item_of(shape, dim), size) for dim, size in enumerate(value.shape))

"""What a loop over experts decides by data: whether an expert has tokens, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx

from ...errors import MatchFailure
from ...operators import canonical_name
from ...passes.sites import VOLATILE
from ...runtime.guards import require
from .members import operands
from .rounds import Loop
from .unrolling import Unrolled

__all__ = ["check_decisions", "check_loop"]

_BY_SIZE = "the loop decides by how many tokens an expert gets"


def check_decisions(unrolled: Unrolled) -> None:
    """Check what holds whatever the loop is like.

    Raises:
        MatchFailure: if calls leave something on modules, or decide by numbers that another call may not have.
    """
    if unrolled.specialization.volatile:
        raise MatchFailure(VOLATILE)
    for decided in unrolled.decided:
        if decided.kind == "size":
            raise MatchFailure(f"{_BY_SIZE}, at {decided.place}")
        if decided.kind == "value":
            raise MatchFailure(f"its forward decides by the data in a tensor, at {decided.place}")


def check_loop(unrolled: Unrolled, loop: Loop) -> None:
    """Check decisions and slices by what they have to do with a loop.

    Raises:
        MatchFailure: if the loop does something else with other numbers.
    """
    nodes = set(unrolled.graph.nodes)
    for decided in unrolled.decided:
        if not decided.uses.isdisjoint(loop.tainted):
            raise MatchFailure(f"its forward decides by what an expert gives, at {decided.place}")
        if decided.compared is not None and decided.compared not in nodes:
            raise MatchFailure(f"its forward decides by the data in a tensor, at {decided.place}")
    for node in nodes:
        if node in unrolled.shaped and _cuts_rows(node, unrolled.values, unrolled.shaped):
            raise MatchFailure("it takes some of the tokens that an expert gets: a capacity")
        if (
            node.op == "call_function"
            and node.target is require
            and canonical_name(asked := operands(node)[0]) != "len"
        ):
            known = _described(asked, unrolled.values)
            if not _is_of_types(asked) and (known in loop.tainted or known in unrolled.shaped):
                place = node.meta.get("source")
                raise MatchFailure(
                    f"its forward decides by the type or shape of what an expert gets or gives, at {place}"
                )


def _is_of_types(node: fx.Node) -> bool:
    """Say whether a decision compares the types of two tensors, or asks for one of no floats: a cast hangs on that."""
    if canonical_name(node) not in ("eq", "ne") or len(operands(node)) != 2:
        return False
    left, right = operands(node)
    if not (isinstance(left, fx.Node) and left.target is getattr and operands(left)[1] == "dtype"):
        return False
    return isinstance(right, fx.Node) or (isinstance(right, torch.dtype) and not right.is_floating_point)


def _described(node: fx.Node, values: Mapping[fx.Node, Any]) -> fx.Node:
    """Return the tensor whose type or shape a value comes from."""
    while node.all_input_nodes and (node.target is getattr or not isinstance(values.get(node), Tensor)):
        node = node.all_input_nodes[0]
    return node


def _cuts_rows(node: fx.Node, values: Mapping[fx.Node, Any], shaped: frozenset[fx.Node]) -> bool:
    """Say whether a node takes a range of the rows of what has as many as the routing says."""
    if not operands(node) or operands(node)[0] not in shaped or not isinstance(values.get(operands(node)[0]), Tensor):
        return False
    if canonical_name(node) == "getitem":
        key: Any = operands(node)[1]
        keys: tuple[Any, ...] = cast("tuple[Any, ...]", key) if isinstance(key, tuple) else (key,)
        first = keys[0] if keys else None
        return isinstance(first, slice) and first != slice(None)
    return canonical_name(node) == "narrow" and (*operands(node), node.kwargs.get("dim"))[1] in (0, None)

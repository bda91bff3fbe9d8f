"""Whether anybody behind a convolution counts on how its result lies in memory: kernels return the channels last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from ....operators import canonical_name, operator_info, operator_of_module
from ....runtime.values import user_class
from ....tracing.examples import TensorMeta
from ....tracing.program import Program

__all__ = ["Followers", "followers"]


@dataclass(frozen=True)
class Followers:
    """What comes behind a result.

    Attributes:
        views: calls of `view` in the same graph, which could be `reshape`.
        is_open: somebody else may count on the layout: whoever called the model, `view` in another graph, other code.
    """

    views: tuple[fx.Node, ...] = ()
    is_open: bool = False


def followers(program: Program, owner: str, node: fx.Node) -> Followers:
    """Return what comes behind a node, as far as its layout goes with it."""
    views: dict[fx.Node, None] = {}
    pending, seen = [(owner, node)], {node}
    while pending:
        place, last = pending.pop()
        for user in last.users:
            if user in seen or _has_one_place(user):
                continue
            seen.add(user)
            if user.op == "call_method" and user.target == "view" and place == owner:
                views[user] = None
                continue
            behind = _behind(program, place, user)
            if behind is None:
                return Followers(tuple(views), is_open=True)
            pending += behind
    return Followers(tuple(views))


def _behind(program: Program, owner: str, user: fx.Node) -> list[tuple[str, fx.Node]] | None:
    """Return where a result goes on from a node that reads it; None where that cannot be seen, or is `view`."""
    if user.op == "output":
        return list(_callers(program, owner)) or None
    name = canonical_name(user)
    if user.op == "call_module":
        name = operator_of_module(user_class(type(program.callee(owner, user))))
        if name is None:
            return _placeholders(program, owner, user) or None
    order = operator_info(name).memory_order
    return None if order is None else [(owner, user)] if order == "kept" else []


def _callers(program: Program, owner: str) -> Iterator[tuple[str, fx.Node]]:
    module = program.module(owner)
    for name, capture in program.captures.items():
        for specialization in capture.specializations:
            for node in specialization.graph.find_nodes(op="call_module"):
                if program.callee(name, node) is module:
                    yield name, node


def _placeholders(program: Program, owner: str, node: fx.Node) -> list[tuple[str, fx.Node]]:
    """Return where a called module's graphs take what they are given; nothing where it has none."""
    name = program.name_of(program.callee(owner, node))
    capture = program.captures.get(name)
    graphs = () if capture is None else (specialization.graph for specialization in capture.specializations)
    return [(name, placeholder) for graph in graphs for placeholder in graph.find_nodes(op="placeholder")]


def _has_one_place(node: fx.Node) -> bool:
    """Say whether a result is [rows, channels, 1, ...]: it lies in memory in one way only."""
    val = node.meta.get("val")
    return isinstance(val, TensorMeta) and len(val.shape) > 2 and set(val.shape[2:]) == {1}

"""The parts of a graph that can run in 16 bits as one: convex, and as large as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import fx

from ...operators import canonical_name, mutates
from ...runtime.guards import require
from ...runtime.values import TensorMeta
from .lists import Kind, kind_of, kind_of_fused

__all__ = ["Judge", "in_float32", "kind_of_operation", "narrow_nodes", "parts_of"]

Judge = Callable[[fx.Node], Kind]
"""Says what a region does with a node."""

_PLAIN = (int, float, bool, str, torch.dtype, torch.device)


def kind_of_operation(node: fx.Node) -> Kind:
    """Return what a region does with a call of a function or method."""
    if any(user.target is require for user in node.users):
        return Kind.FLOAT32  # the owner starts over where it fails
    fused, name = kind_of_fused(node.target), canonical_name(node)
    if fused is not None:
        return fused
    for value in (*node.args[1:], *node.kwargs.values()) if name == "to" else ():
        known = value.meta.get("val") if isinstance(value, fx.Node) else value
        if isinstance(value, torch.dtype) or (isinstance(value, fx.Node) and not isinstance(known, int)):
            return Kind.FLOAT32  # the model says in which type it wants to go on
    return kind_of(name)


def in_float32(node: fx.Node) -> bool:
    """Say whether what a node gives holds no floats but those of float32."""
    return _holds_float32(node.meta.get("val"))


def _holds_float32(meta: object) -> bool:
    if isinstance(meta, TensorMeta):
        return meta.dtype is torch.float32 or not (meta.dtype.is_floating_point or meta.dtype.is_complex)
    if isinstance(meta, (tuple, list)):
        return all(map(_holds_float32, cast("Sequence[object]", meta)))
    return meta is None or isinstance(meta, _PLAIN)


def narrow_nodes(graph: fx.Graph, judge: Judge) -> set[fx.Node]:
    """Return the nodes whose results are in 16 bits where all that gains computes in these."""
    narrow: set[fx.Node] = set()
    for node in graph.nodes:
        kind = judge(node)
        if kind is Kind.LOWER or (kind in (Kind.FOLLOWS, Kind.ROUNDS) and _reads_narrow(node, narrow)):
            narrow.add(node)
    return narrow


def _reads_narrow(node: fx.Node, narrow: set[fx.Node]) -> bool:
    """Say whether the floats that a node reads are in 16 bits; a norm gives the type of its first operand."""
    floats = [source for source in node.all_input_nodes if _has_floats(source.meta.get("val"))]
    if node.op == "call_module" or kind_of_operation(node) is Kind.ROUNDS:
        floats = floats[:1]
    return bool(floats) and narrow.issuperset(floats)


def _has_floats(meta: object) -> bool:
    if isinstance(meta, TensorMeta):
        return meta.dtype.is_floating_point and len(meta.shape) > 0
    return isinstance(meta, (tuple, list)) and any(map(_has_floats, cast("Sequence[object]", meta)))


def parts_of(graph: fx.Graph, judge: Judge) -> list[list[fx.Node]]:
    """Return what of a graph is to run in 16 bits: what gains, and what follows and reads from the part."""
    narrow = narrow_nodes(graph, judge)
    # Levels count how often the way to a node enters or leaves: nodes of one level reach each other through nothing
    # else, so a connected set of them is convex; so is one of several that read the same.
    level: dict[fx.Node, int] = {}
    joined: dict[fx.Node, fx.Node] = {}
    reader: dict[tuple[fx.Node, int], fx.Node] = {}

    def first(node: fx.Node) -> fx.Node:
        while joined[node] is not node:
            joined[node] = joined[joined[node]]
            node = joined[node]
        return node

    for node in graph.nodes:
        kind, sources = judge(node), node.all_input_nodes
        read = sources[:1] if mutates(node) else sources  # what is written to has to belong
        follows = kind is Kind.FOLLOWS or (kind is Kind.ROUNDS and node in narrow)
        inside = kind is Kind.LOWER or (follows and any(source in joined for source in read))
        level[node] = max((level[source] + ((source in joined) is not inside) for source in sources), default=0)
        if inside:
            joined[node] = node
            for source in sources:
                belongs = source in joined and level[source] == level[node]
                other = source if belongs else reader.setdefault((source, level[node]), node)
                joined[first(other)] = node
    parts: dict[fx.Node, list[fx.Node]] = {}
    for node in joined:
        parts.setdefault(first(node), []).append(node)
    return list(parts.values())

"""Graphs as pickle can take them: a list of nodes, however long, with names for functions that it cannot find."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_aggregate

from ...compat import is_registered_operator

__all__ = ["PortableGraph", "copy_graph"]

_OWN_OPERATORS = f"{__name__.partition('.')[0]}.cuda_ops"
"""Importing it registers the operators of `torch.ops.fxopt`, so their names are looked up there."""


@dataclass(frozen=True, slots=True)
class _Reference:
    """Stand for the node at a position."""

    index: int


@dataclass(frozen=True, slots=True)
class _Function:
    """Stand for a function, or a memory format, that a module holds under a name."""

    module: str
    name: str

    def find(self) -> Any:
        found: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


@dataclass(frozen=True, slots=True)
class _Node:
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    meta: dict[str, Any]


class PortableGraph:
    """Hold a graph node by node; pickling an `fx.Graph` itself recurses once per node."""

    def __init__(self, graph: fx.Graph) -> None:
        index = {node: position for position, node in enumerate(graph.nodes)}

        def refer(value: Any) -> Any:
            if isinstance(value, torch.memory_format):  # torch pickles it as a name that has its module in it
                return _Function("torch", str(value).rpartition(".")[2])
            return _Reference(index[value]) if isinstance(value, fx.Node) else value

        self._nodes = [
            _Node(
                node.op,
                _named(node.target),
                cast("tuple[Any, ...]", map_aggregate(node.args, refer)),
                cast("dict[str, Any]", map_aggregate(node.kwargs, refer)),
                node.name,
                dict(node.meta),
            )
            for node in graph.nodes
        ]

    def graph(self) -> fx.Graph:
        """Return the graph: the same nodes, names and meta."""
        new = fx.Graph()
        made: list[fx.Node] = []

        def resolve(value: Any) -> Any:
            if isinstance(value, _Function):
                return value.find()
            return made[value.index] if isinstance(value, _Reference) else value

        for node in self._nodes:
            target = node.target.find() if isinstance(node.target, _Function) else node.target
            args, kwargs = cast("tuple[Any, Any]", map_aggregate((node.args, node.kwargs), resolve))
            made.append(new.create_node(node.op, target, args, kwargs, node.name))
            made[-1].meta = node.meta
        return new


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` with the same node names and meta."""
    new = fx.Graph()
    result = new.graph_copy(graph, {}, return_output_node=True)
    if result is not None:
        value, old_output = cast("tuple[Any, fx.Node]", result)
        new.output(value, type_expr=old_output.type).meta = dict(old_output.meta)
    return new


def _named(target: Any) -> Any:
    """Return a name for an operator of `torch.ops`, or for a function that torch made inside another."""
    if is_registered_operator(target):
        return _Function(_OWN_OPERATORS if str(target).startswith("fxopt.") else "torch", f"ops.{target}")
    if "<locals>" not in getattr(target, "__qualname__", ""):
        return target
    for owner in (target.__module__, "torch", "torch.nn.functional"):
        named = _Function(owner, target.__name__)
        if getattr(importlib.import_module(owner), target.__name__, None) is target:
            return named
    return target

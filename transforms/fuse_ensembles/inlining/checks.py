"""The conditions of an inlined module's graph, written as checks in the graph of what calls it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from ....tracing.guards import Guard, require

__all__ = ["write_checks"]


def write_checks(guards: Sequence[Guard], names: Mapping[str, Any]) -> tuple[fx.Graph, dict[str, Any]] | None:
    """Return a graph that checks conditions on ranks and sizes, and what its placeholders stand for.

    Args:
        guards: the conditions.
        names: what their expressions may name; others make a condition one that cannot be written.

    Returns:
        None where a condition is of another form.
    """
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in names}
    for guard in guards:
        written = _comparison(guard.expression, inputs, graph)
        if written is None:
            return None
        graph.call_function(require, (*written, guard.reason, True))
    graph.output(None)
    return graph, {node.name: names[name] for name, node in inputs.items()}


def _comparison(expression: str, inputs: Mapping[str, fx.Node], graph: fx.Graph) -> tuple[fx.Node, int] | None:
    match ast.parse(expression, mode="eval").body:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=int() as expected)]):
            value = _value(left, inputs, graph)
            return None if value is None or isinstance(expected, bool) else (value, expected)
        case _:
            return None


def _value(expression: ast.expr, inputs: Mapping[str, fx.Node], graph: fx.Graph) -> fx.Node | None:
    match expression:
        case ast.Name(id=name) if name in inputs:
            return inputs[name]
        case ast.Attribute(value=source, attr="shape"):
            read = _value(source, inputs, graph)
            return None if read is None else graph.call_function(getattr, (read, "shape"))
        case ast.Subscript(value=source, slice=ast.Constant(value=int() as place)):
            read = _value(source, inputs, graph)
            return None if read is None else graph.call_function(operator.getitem, (read, place))
        case ast.Call(func=ast.Name(id="len"), args=[source], keywords=[]):
            read = _value(source, inputs, graph)
            return None if read is None else graph.call_function(len, (read,))
        case _:
            return None

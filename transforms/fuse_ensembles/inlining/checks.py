"""The conditions of an inlined module's graph, written as checks in the graph of what calls it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from ....runtime.guards import (
    Argument,
    Attribute,
    Call,
    Constant,
    Equals,
    Guard,
    Item,
    Known,
    Method,
    Source,
    Truth,
    require,
)

__all__ = ["write_checks"]


def write_checks(guards: Sequence[Guard], names: Mapping[str, Any]) -> tuple[fx.Graph, dict[str, Any]] | None:
    """Return a graph that checks types, ranks and sizes, and what its placeholders stand for; else None."""
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in names}
    for guard in guards:
        written = _comparison(guard, inputs, graph)
        if written is None:
            return None
        graph.call_function(require, (*written, guard.reason, True))
    graph.output(None)
    return graph, {node.name: names[name] for name, node in inputs.items()}


def _comparison(guard: Guard, inputs: Mapping[str, fx.Node], graph: fx.Graph) -> tuple[fx.Node, int] | None:
    match guard.check:
        case Equals(Constant(value=int() as expected)):
            value = _value(guard.source, inputs, graph)
            return None if value is None or isinstance(expected, bool) else (value, expected)
        case Truth(expected):
            value = _value(guard.source, inputs, graph)
            return None if value is None else (value, expected)
        case _:
            return None


def _value(source: Source, inputs: Mapping[str, fx.Node], graph: fx.Graph) -> fx.Node | None:
    match source:
        case Argument(name) if name in inputs:
            return inputs[name]
        case Attribute(owner, "shape"):
            read = _value(owner, inputs, graph)
            return None if read is None else graph.call_function(getattr, (read, "shape"))
        case Item(owner, Constant(value=int() as place)):
            read = _value(owner, inputs, graph)
            return None if read is None else graph.call_function(operator.getitem, (read, place))
        case Call(function, (counted,)) if function is len:
            read = _value(counted, inputs, graph)
            return None if read is None else graph.call_function(len, (read,))
        case Method(owner, "dim" | "is_floating_point" as name, ()):
            read = _value(owner, inputs, graph)
            return None if read is None else graph.call_method(name, (read,))
        case Call(function, (asked, Constant(value=int() as other))) if function in (operator.eq, operator.ne):
            read = _value(asked, inputs, graph)
            return None if read is None else graph.call_function(function, (read, other))
        case Call(function, (asked, Known(value=type() as kind))) if function is isinstance:
            read = _value(asked, inputs, graph)
            asks: Any = (read, kind)
            return None if read is None else graph.call_function(isinstance, asks)
        case _:
            return None

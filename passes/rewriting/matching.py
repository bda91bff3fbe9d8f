"""Where a pattern is matched: the calls of a graph in one spelling, and what a match consists of so far."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from ...compat import has_hooks
from ...operators import CallArguments, canonical_name, mutates, normalized_arguments, operator_info, operator_of_module
from ...tracing.program import Program
from ...tracing.rules import leaf_graph
from ...tracing.values import user_class
from .effects import overwrites_unseen, writes

__all__ = ["Call", "Found", "Place", "call_in"]


@dataclass(frozen=True)
class Found:
    """What a match consists of so far.

    Attributes:
        names: name given in the pattern -> node.
        computed: the operations and module calls that were matched.
    """

    names: Mapping[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    computed: tuple[fx.Node, ...] = ()

    def called(self, name: str | None, node: fx.Node) -> Iterator[Found]:
        """Yield the same with a name for a node, unless another node has that name."""
        if name is None or self.names.get(name) is node:
            yield self
        elif name not in self.names:
            yield Found({**self.names, name: node}, self.computed)

    def computed_by(self, name: str | None, node: fx.Node) -> Iterator[Found]:
        """Yield the same with an operation, and a name for it."""
        yield from Found(self.names, (*self.computed, node)).called(name, node)


@dataclass(frozen=True)
class Place:
    """The graph in which a pattern is matched."""

    program: Program
    owner: str

    def is_undisturbed(self, found: Found) -> bool:
        """Say whether nothing is written between the first and the last operation of a match."""
        if len(found.computed) < 2:
            return True
        node, last = min(found.computed), max(found.computed)
        while node is not last:
            if node not in found.computed and writes(node, self.program, self.owner):
                return False
            node = node.next
        return True


@dataclass(frozen=True)
class Call:
    """A call of an operator.

    Attributes:
        named: parameter -> value, defaults filled in.
        orders: the operands by position, in each order that gives the same result.
    """

    named: Mapping[str, Any]
    orders: Sequence[Sequence[Any]]


def call_in(place: Place, node: fx.Node, operator: str) -> Call | None:
    """Return a node's call of an operator, in whatever spelling; None if it computes another one, or writes."""
    if node.op == "call_module":
        module = place.program.callee(place.owner, node)
        if operator_of_module(user_class(type(module))) != operator or has_hooks(module):
            return None
        called = _inside(module, operator, node)
    elif canonical_name(node) == operator:
        called = node, normalized_arguments(operator, node.target, node.args, node.kwargs)
    else:
        return None
    inner, arguments = called
    if mutates(inner) and not overwrites_unseen(node, place.program, place.owner):
        return None
    return Call(arguments.named, _orders(operator, arguments))


def _orders(operator: str, arguments: CallArguments) -> Sequence[Sequence[Any]]:
    """Return the operands in their order and, where that is as good, with the first two exchanged."""
    operands = arguments.positional
    if not operator_info(operator).commutative or arguments.given != 2 or len(operands) < 2:
        return (operands,)
    return operands, (operands[1], operands[0], *operands[2:])


def _inside(module: nn.Module, operator: str, node: fx.Node) -> tuple[fx.Node, CallArguments]:
    """Return what a module of one operator calls, as if the graph called that itself.

    Tensors of the module are no nodes of the graph; only a pattern that says nothing of them fits.
    """
    outside = node, CallArguments(node.args, node.kwargs, len(node.args) + len(node.kwargs))
    graph = leaf_graph(module)
    calls = [] if graph is None else [n for n in graph.nodes if n.op in ("call_function", "call_method")]
    if len(calls) != 1 or canonical_name(calls[0]) != operator:
        return outside
    try:
        given = inspect.signature(module.forward).bind(*node.args, **node.kwargs)
    except TypeError:
        return outside
    given.apply_defaults()

    def value(inner: fx.Node) -> Any:
        return given.arguments[str(inner.target)] if inner.op == "placeholder" else _Held(str(inner.target))

    args, kwargs = fx.map_arg((calls[0].args, calls[0].kwargs), value)
    return calls[0], normalized_arguments(operator, calls[0].target, args, kwargs)


@dataclass(frozen=True)
class _Held:
    """A tensor or setting that a module reads of itself."""

    name: str
